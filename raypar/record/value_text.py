"""Values of events as text, for people: seats, nodes, metrics, durations."""

from __future__ import annotations

import math

from raypar.files.json_type import Json


def seat_without_rank(coordinate: str) -> str:
    """A seat without its rank, which changes with every plan: `stage 1, replica 1` of `worker 3 (stage 1, replica 1)`."""
    return coordinate.partition("(")[2].rpartition(")")[0]


def short_node_id(node: Json) -> str:
    """The first 8 characters of a node's id: enough for `raypar drain`."""
    return str(node)[:8]


def format_metric(value: float) -> str:
    """The value of a metric as text: `0.8125`, `1.2e-05`, `312`, `nan`."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """A duration as text: `45 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
