"""Data sets that come with raypar: token files, parquet, JSON lines, tar shards, rows of Ray Data."""
