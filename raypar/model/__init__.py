"""Models as layers: capture, initial values, one stage's modules, layers on shards."""
