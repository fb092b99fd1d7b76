"""Texts about a run for its user: lines while it trains, its status and history. Pure except for `event_printer`."""
