"""Metrics of a run for Prometheus: what there is, and what its values are. Pure; `actors/` publishes them."""
