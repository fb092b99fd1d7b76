"""Describes a resumption: how the run had ended before, and which reported steps are executed again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]
"""A line of metrics.jsonl or events.jsonl, or members.json."""


def describe_resumption(
    steps_done: int, metrics: Sequence[Line], events: Sequence[Line], members: Line | None, plan: str, now: float
) -> dict[str, Any]:
    """The event `resumed` of a run that goes on from a checkpoint after `steps_done` steps, under `plan` (in words).

    `metrics`, `events`, `members`: the run's files as they are found. `now`: Unix time.
    """
    reported = max((line["step"] for line in metrics if "loss" in line), default=0)
    again = max(0, reported - steps_done)
    last = next((event for event in reversed(events) if event["kind"] in ("started", "resumed", "generation", "end")), None)
    broken_off = last is not None and last["kind"] != "end"
    plan_before = (members or {}).get("plan")
    parts = [f"resumed from the checkpoint after step {steps_done}"]
    if again == 1:
        parts.append(f"step {reported} had been reported and is executed again")
    elif again:
        parts.append(f"steps {steps_done + 1}-{reported} had been reported and are executed again")
    if broken_off:
        parts.append(f"the run had broken off after step {max(reported, steps_done)} without recording an end (killed?)")
    if plan_before and plan_before != plan:
        parts.append(f"plan {plan_before} -> {plan}")
    times = [line["time"] for line in (*metrics, *events, members or {}) if line.get("time")]
    return {
        "kind": "resumed",
        "text": "; ".join(parts),
        "step": steps_done,
        "again": again,
        "lost": broken_off,
        "plan": plan,
        "former_end_s": min(now, max(times, default=now)),
        "resumed_s": now,
    }
