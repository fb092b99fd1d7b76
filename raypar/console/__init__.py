"""What people read of a run: lines while it trains, its state and its history from its folder. Pure but for `terminal`."""
