"""Metrics of a run for Prometheus: their definitions and their values. Pure; `actors/` publishes them."""
