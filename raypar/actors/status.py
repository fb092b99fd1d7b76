"""members.json: who does what in a run right now, for people and for scripts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from raypar.actors.request import RunRequest
from raypar.elastic.machine import Phase, RunMachine
from raypar.elastic.table import RECOVERING
from raypar.plan import ParallelPlan


class Status:
    """Makes the text when something in it has changed."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self._last: dict[str, Any] | None = None

    def changed(
        self, machine: RunMachine, who: Callable[[int], dict[str, Any]], schedule: Callable[[ParallelPlan], str]
    ) -> str | None:
        """None while nothing has changed but the number of steps."""
        plan = machine.plan or self.request.plan
        there = [n for n in machine.members if n not in machine.gone]
        facts = {
            "phase": _PHASES.get(machine.phase, "recovering" if machine.phase in RECOVERING else "running"),
            "generation": machine.generation,
            "plan": plan.describe(),
            "stages": [asdict(stage) for stage in plan.stages],
            "schedule": schedule(plan),
            "members": [{"coordinate": plan.coordinate(machine.members.index(n)), **who(n)} for n in there],
            "spares": [who(n) for n in sorted(machine.spares)],
            "starting": sorted(machine.hiring),
            "wanted": machine.wanted,
            "why": machine.recovery.why if machine.phase in RECOVERING else "",
        }
        if facts == self._last:
            return None
        self._last = facts
        more = {"time": time.time(), "step": machine.emitted, "steps": self.request.course.last, "driver_pid": os.getpid()}
        return json.dumps({**more, **facts}, indent=1) + "\n"


_PHASES = {Phase.STARTING: "starting", Phase.WAITING: "waiting", Phase.OVER: "ended"}
