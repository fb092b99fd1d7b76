"""Schedules: instructions, one file per schedule, lowering, validation, simulation, pictures. Pure: standard library only."""
