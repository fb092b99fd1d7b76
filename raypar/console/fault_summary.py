"""Summarises the faults that a run has survived in one line, from its events. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raypar.console.event_lines import count_noun

COUNTED = ("lost", "node", "driver", "draining", "joined", "generation", "resumed")
"""Kinds of events that are counted."""


def summarize_faults(events: Sequence[Mapping[str, Any]]) -> str | None:
    """The faults in `events` as one line; None if there were none.

    `2 workers (1 whole node) and the driver lost, 1 node drained, 3 workers joined; 11.0 s of pauses in all, 0 steps executed
    again`.
    """
    lost, drivers, joined = (sum(event["kind"] == kind for event in events) for kind in ("lost", "driver", "joined"))
    drained = [event for event in events if event["kind"] == "draining"]
    nodes = len({event.get("node", f"that of worker {event['worker']}") for event in drained})
    whole = sum(event["kind"] == "node" for event in events)
    workers = [count_noun(lost, "worker") + f" ({count_noun(whole, 'whole node')})" * (whole > 0)] * (lost > 0)
    resumed = [event for event in events if event["kind"] == "resumed"]
    broken = sum(bool(event.get("lost")) for event in resumed)
    parts = []
    if broken:
        times = f" {broken} times" * (broken > 1)
        parts.append(f"the whole run lost and resumed{times} (the time in which nothing ran is not counted)")
    if workers or drivers == 1:
        parts.append(" and ".join([*workers, *["the driver"] * (drivers == 1)]) + " lost")
    if drivers > 1:
        parts.append(f"the driver lost {drivers} times")
    if nodes:
        parts.append(f"{count_noun(nodes, 'node')} drained")
    if joined:
        parts.append(f"{count_noun(joined, 'worker')} joined")
    changes = [event for event in events if event["kind"] == "generation" and event.get("pause_s") is not None]
    pause_s, again = sum(event["pause_s"] for event in changes), sum(event.get("again") or 0 for event in (*changes, *resumed))
    if not parts and not changes and not again:
        return None
    pauses = f"{pause_s:.1f} s of pauses in all, {count_noun(again, 'step')} executed again"
    return f"{', '.join(parts)}; {pauses}" if parts else pauses
