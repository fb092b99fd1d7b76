"""Data sets that come with raypar: token files."""
