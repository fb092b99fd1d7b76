"""The failure of a run: all workers are freed, and the cause is found among the failures that follow."""

from __future__ import annotations

from raypar.elastic.actions import AbortGroups
from raypar.elastic.events import CallFailed, FailureKind
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState

BLAME: dict[FailureKind, int] = {"user": 0, "error": 1, "lost": 2, "aborted": 3}
"""Kind of failure -> its rank: the failure with the smallest rank is the cause; among equals, the first."""


def fail_run(m: RunState, event: CallFailed) -> None:
    """Record a failure and abort all workers, so that none waits for a failed one; the run ends once the cause is known."""
    if event.kind == "aborted" and m.health.aborted_by_us:
        return
    m.health.failures.append(event)
    m.health.silent_since_s.clear()  # no worker is waited for any more
    m.enter(Phase.FAILING, deadline_s=m.policy.root_cause_s if m.progress.saving is None else m.policy.save_grace_s)
    m.decide(AbortGroups(f"{type(event.error).__name__} elsewhere"), "no worker may wait for one that has failed")
    end_run_once_cause_is_known(m)


def end_run_once_cause_is_known(m: RunState) -> None:
    """End the run with the failure that caused the others, once it is known and no checkpoint is being written."""
    cause = min(m.health.failures, key=lambda failure: BLAME[failure.kind])
    known = cause.kind != "aborted" or m.timer.deadline_s is None or m.timer.expired
    if known and (m.progress.saving is None or m.timer.expired):
        why = str(cause.error).splitlines()[0] if str(cause.error) else type(cause.error).__name__
        m.end_run("failed", why, cause.error)
