"""The process a worker computes in: its settings, and its global state, guarded against changes by users' code."""
