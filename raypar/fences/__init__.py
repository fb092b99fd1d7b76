"""Fences around APIs of libraries that other releases may lack: a probe, and what is said where it fails."""
