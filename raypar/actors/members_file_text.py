"""Makes the text of members.json: the present phase, plan and workers of a run, for users and scripts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Hashable
from typing import Any

from raypar.actors.messages import RunRequest
from raypar.elastic import wait_for_last_copies
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.transition_table import RECOVERING
from raypar.elastic.user_messages import plain_failure_text
from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment
from raypar.plan import ParallelPlan
from raypar.record.field_types import WorkerFacts
from raypar.record.stages_of_plan import stages_as_data

AGAIN_S = 2.0
"""How often the file is written while steps are replayed."""


class MembersFileText:
    """Makes the text of members.json whenever its content has changed."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        """The run's request."""
        self._known_secrets = secrets_of_environment(os.environ)
        """Secrets of this process's environment, which the file may not contain."""
        self._seen: tuple[Hashable, ...] = ()
        """The inputs of the facts when they were last made. The driver asks for the text after every report of a worker, so
        making the facts anew each time would take time proportional to the square of the number of workers in each step."""
        self._last: dict[str, Any] | None = None
        """The facts in the last text."""
        self._again = False
        """Whether the last text said that steps were being replayed."""
        self._at_s = 0.0
        """When the last text was made, by the monotonic clock: the wall clock may be set back meanwhile."""

    def text_if_changed(
        self,
        machine: RunMachine,
        worker_facts: Callable[[int], WorkerFacts],
        schedule: Callable[[ParallelPlan], str],
        started: int = 0,
    ) -> str | None:
        """The new text; None if only the number of steps has changed. While steps are replayed: one every `AGAIN_S` seconds.

        `started`: how many workers have ever started; with another number `worker_facts` may say more.
        """
        plan = machine.membership.plan or self.request.plan
        phase, why = _phase_and_reason(machine)
        again = machine.progress.committed < machine.progress.journalled and machine.phase not in _PHASES
        now_s, who = time.monotonic(), machine.membership
        due = again and now_s - self._at_s > AGAIN_S
        sets = tuple(frozenset(one) for one in (who.gone, who.spares, machine.hiring.starting))
        seen = (phase, why, who.generation, plan, who.members, *sets, machine.policy.wanted, started, again)
        if seen == self._seen and not due:
            return None
        self._seen = seen
        there = [n for n in machine.membership.members if n not in machine.membership.gone]
        facts = {
            "phase": phase,
            "generation": machine.membership.generation,
            "plan": plan.describe(),
            "stages": stages_as_data(plan),
            "schedule": schedule(plan),
            "members": [{"coordinate": plan.coordinate(machine.membership.members.index(n)), **worker_facts(n)} for n in there],
            "spares": [worker_facts(n) for n in sorted(machine.membership.spares)],
            "starting": sorted(machine.hiring.starting),
            "wanted": machine.policy.wanted,
            "why": redact_certain_secrets(why, self._known_secrets),
        }
        if facts == self._last and again == self._again and not due:
            return None
        self._last, self._at_s, self._again = facts, now_s, again
        more = {
            "time": time.time(),
            "step": machine.progress.emitted,
            "steps": self.request.policy.job_steps,
            "driver_pid": os.getpid(),
        }
        replaying = {"step": machine.progress.committed, "until": machine.progress.journalled} if again else None
        return json.dumps({**more, **facts, "replaying": replaying}, indent=1) + "\n"


def _phase_and_reason(machine: RunMachine) -> tuple[str, str]:
    """The run's phase in a word, and why it recovers or waits."""
    if machine.health.silent_since_s:
        return "waiting", wait_for_last_copies.describe_silent_workers(machine.health.silent_since_s)
    if machine.waits and machine.phase is not Phase.WAITING:
        return "waiting", machine.recovery.awaited
    if machine.phase not in RECOVERING:
        return _PHASES.get(machine.phase, "running"), ""
    if machine.begins:
        return "starting", ""
    return _PHASES.get(machine.phase, "recovering"), plain_failure_text(machine.recovery.why)


_PHASES = {Phase.STARTING: "starting", Phase.WAITING: "waiting", Phase.OVER: "ended"}
