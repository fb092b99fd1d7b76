"""Describes a resumption: how the run had ended before, and which reported steps are executed again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypar.record.events import EndOfRun, Resumption
from raypar.record.fold import RunView


def describe_resumption(steps_done: int, view: RunView, members: Mapping[str, Any] | None, plan: str, now: float) -> Resumption:
    """The event of a run that is resumed from a checkpoint after `steps_done` steps, under `plan` (in words).

    `view`, `members`: the state in the run's files before the resumption. `now`: Unix time.
    """
    reported = view.last_step.step if view.last_step is not None else 0
    again = max(0, reported - steps_done)
    has_crashed = view.boundary not in ("", EndOfRun.kind)
    plan_before = (members or {}).get("plan")
    parts = [f"resumed from the checkpoint after step {steps_done}"]
    if again == 1:
        parts.append(f"step {reported} had been reported and is executed again")
    elif again:
        parts.append(f"steps {steps_done + 1}-{reported} had been reported and are executed again")
    if has_crashed:
        parts.append(f"the run had ended after step {max(reported, steps_done)} without recording why (killed?)")
    if plan_before and plan_before != plan:
        parts.append(f"plan {plan_before} -> {plan}")
    heard_s = max((at for at in (view.last_s, (members or {}).get("time")) if at), default=now)
    return Resumption(
        text="; ".join(parts),
        step=steps_done,
        again=again,
        lost=has_crashed,
        plan=plan,
        former_end_s=min(now, heard_s),
        resumed_s=now,
    )
