"""Sharding styles: how one layer is cut over shards, one file a style. `registry.py` lists them by name."""
