"""Schedules: instructions, one file per schedule, lowering, validation, simulation. Pure: standard library only."""
