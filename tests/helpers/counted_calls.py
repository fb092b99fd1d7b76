"""Counters in a module that other code imports in its functions only."""

by_attribute = by_name = calls = 0


def count() -> int:
    global calls
    calls += 1
    return 0
