"""Time limits for steps, answers and silence, and the workers that have exceeded them."""

from __future__ import annotations

from raypar.elastic.events import Tick
from raypar.elastic.run_state import RunState

SILENT_SHARE, SILENT_MEDIANS = 0.5, 3.0
"""A worker that also answers no pings is given up after this share of the step's limit, or so many median steps."""


def step_deadline_s(m: RunState) -> float:
    """Limit for a step: a multiple of the longest recent step. The first step, which warms up, has a limit of its own."""
    longest_s = m.step_times.longest_s(len(m.membership.members))
    if longest_s is None:
        return max(m.policy.start_deadline_s, m.health.next_step_least_limit_s)
    return max(m.policy.step_deadline_s, m.policy.step_deadline_times * longest_s, m.health.next_step_least_limit_s)


def silent_deadline_s(m: RunState) -> float:
    """Limit for the step of a worker that also answers no pings.

    The limit depends on the median step, so a single long step does not lengthen it: a worker that is only slow answers.
    """
    usual_s = SILENT_MEDIANS * usual_step_s(m) if m.step_times.known else m.policy.start_deadline_s
    return max(
        SILENT_SHARE * m.policy.step_deadline_s,
        min(usual_s, SILENT_SHARE * step_deadline_s(m)),
        m.health.next_step_least_limit_s,
    )


def answer_deadline_s(m: RunState) -> float:
    """Limit for a worker to stop its step and answer: a forward or backward pass cannot be interrupted."""
    return max(m.policy.status_s, m.policy.status_medians * usual_step_s(m))


def usual_step_s(m: RunState) -> float:
    """The median time of a step with the present number of workers; 0 before the first step."""
    return m.step_times.usual_s(len(m.membership.members))


def find_overdue_workers(m: RunState, limit_s: float) -> tuple[int, ...]:
    """Members that have not reported the oldest step in flight, if that step has lasted longer than `limit_s`."""
    if m.progress.issued == m.progress.committed or m.timer.elapsed_s <= limit_s:
        return ()
    return tuple(sorted(set(m.membership.members) - m.progress.reports.get(m.progress.committed, set())))


def find_mute_workers(m: RunState) -> tuple[int, ...]:
    """Members that have answered no ping for longer than `silent_deadline_s`.

    Empty if all members are that silent: then something in their work keeps all of them from answering.
    """
    limit_s, now_s = silent_deadline_s(m), m.timer.now_s
    members = m.membership.members
    found = tuple(w for w in members if now_s - m.health.unheard_since_s.get(w, now_s) > limit_s)
    return found if len(found) < len(members) else ()


def extend_step_for_slow_sample(m: RunState, event: Tick) -> bool:
    """Begin the limit of the oldest step in flight anew, if the step is over it because a worker that answers pings reads
    samples for it. True if the step waits for that.

    Such a worker is alive and would not be read for any faster by another one. The step may take `slow_sample_s` in all. The
    limit of workers that answer no pings does not begin anew.
    """
    timer, health = m.timer, m.health
    reading = set(find_overdue_workers(m, -1.0)) & event.reading - event.unheard
    over = health.slow_sample_from_s is not None or timer.elapsed_s > step_deadline_s(m)
    if not reading or not over:
        return False
    if health.slow_sample_from_s is None:
        health.slow_sample_from_s = timer.since_s
    if timer.now_s - health.slow_sample_from_s > m.policy.slow_sample_s:
        return False
    timer.since_s = timer.now_s
    return True
