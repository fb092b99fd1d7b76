"""The record of a run: its events, what they mean, and where they are in its folder. Pure."""
