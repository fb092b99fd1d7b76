"""How long a step, an answer or a silence may last, and which workers have outlasted that."""

from __future__ import annotations

from raypar.elastic.run_state import RunState

SILENT_SHARE, SILENT_MEDIANS = 0.5, 3.0
"""A worker that answers no pings either is given up after this share of the step's limit, or so many usual steps."""


def step_deadline_s(m: RunState) -> float:
    """Limit for a step: a multiple of the longest recent one. The first step, which warms everything up, gets the start's."""
    longest_s = m.step_times.longest_s(len(m.membership.members))
    if longest_s is None:
        return max(m.policy.start_deadline_s, m.health.next_step_least_limit_s)
    return max(m.policy.step_deadline_s, m.policy.step_deadline_times * longest_s, m.health.next_step_least_limit_s)


def silent_deadline_s(m: RunState) -> float:
    """Limit for a step of a worker that answers no pings either.

    It is built from the median: a single long step does not lengthen it, because a worker that is only slow answers.
    """
    usual_s = SILENT_MEDIANS * usual_step_s(m) if m.step_times.known else m.policy.start_deadline_s
    return max(
        SILENT_SHARE * m.policy.step_deadline_s,
        min(usual_s, SILENT_SHARE * step_deadline_s(m)),
        m.health.next_step_least_limit_s,
    )


def answer_deadline_s(m: RunState) -> float:
    """Limit for leaving what is in flight: a forward or backward pass cannot be interrupted."""
    return max(m.policy.status_s, m.policy.status_medians * usual_step_s(m))


def usual_step_s(m: RunState) -> float:
    """The median time of a step with as many workers as now; 0 before the first."""
    return m.step_times.usual_s(len(m.membership.members))


def find_overdue_workers(m: RunState, limit_s: float) -> tuple[int, ...]:
    """Workers that have not reported the oldest step in flight, if it has lasted longer than `limit_s`."""
    if m.progress.issued == m.progress.committed or m.timer.elapsed_s <= limit_s:
        return ()
    return tuple(sorted(set(m.membership.members) - m.progress.reports.get(m.progress.committed, set())))


def find_mute_workers(m: RunState) -> tuple[int, ...]:
    """Members that have answered no ping for `silent_deadline_s`, since that was first noticed.

    Nobody where that is true of all members: then something in their work keeps all of them from answering.
    """
    limit_s, now_s = silent_deadline_s(m), m.timer.now_s
    members = m.membership.members
    found = tuple(w for w in members if now_s - m.health.unheard_since_s.get(w, now_s) > limit_s)
    return found if len(found) < len(members) else ()
