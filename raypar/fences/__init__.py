"""Fences around APIs of libraries that other releases may lack: a probe, and a warning if it fails."""
