"""What users read of a run: lines while it trains, its status and history from its folder. Pure except for `terminal`."""
