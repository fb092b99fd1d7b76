"""Time limits for steps, answers and silence, the workers that have exceeded them, and the time that does not count."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from raypar.elastic.events import Tick
from raypar.elastic.run_state import RunState

REPORT_VALID_S = 1.2
"""Age up to which a report counts. A process that was stopped since its last report did not lack a processor."""
MIN_SHARE = 0.6
"""Smaller shares are ignored: they are normal with a few more workers than cores, and deadlines have room for them."""
MAX_SHARE = 0.95
"""Larger shares count as this: some time always counts, so that every deadline ends."""


class CpuWaitDeadlineExtension:
    """Computes from every process's wait for a processor how much time deadlines leave out."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, float]] = {}
        """Process -> (its total wait in seconds, when that was reported)."""
        self._shares: dict[Hashable, tuple[float, float]] = {}
        """Process -> (share of the time between its last two reports that it waited, when the last one came), if it was
        `MIN_SHARE` or more."""

    def report(self, who: Hashable, waited_s: float, now_s: float) -> None:
        """Take a process's total wait so far. A total smaller than before is another thread's, and counts as no wait."""
        before_s, at_s = self._last.get(who, (waited_s, now_s))
        if now_s > at_s:
            share = (waited_s - before_s) / (now_s - at_s)
            if share >= MIN_SHARE:
                self._shares[who] = (share, now_s)
            else:
                self._shares.pop(who, None)
        self._last[who] = (waited_s, now_s)

    def uncounted_s(self, now_s: float, since_s: float) -> float:
        """Seconds since `since_s` that no deadline counts: that time x the largest share, if it reaches `MIN_SHARE`."""
        fresh = (share for share, at_s in self._shares.values() if now_s - at_s <= REPORT_VALID_S)
        return min(max(fresh, default=0.0), MAX_SHARE) * (now_s - since_s)


GRACE_STEPS = 1.5
"""Longest recent steps that a step in flight may take after Ctrl-C; a second Ctrl-C ends the run at once."""
SILENT_SHARE, SILENT_MEDIANS = 0.5, 3.0
"""A worker that also answers no pings counts as lost after this share of the step's limit, or this many median steps."""


def step_deadline_s(m: RunState) -> float:
    """Limit for a step: a multiple of the longest recent step. The first step, which warms up, has a limit of its own."""
    longest_s = m.step_times.longest_s(len(m.membership.members))
    if longest_s is None:
        return max(m.policy.start_deadline_s, m.health.next_step_least_limit_s)
    return max(m.policy.step_deadline_s, m.policy.step_deadline_times * longest_s, m.health.next_step_least_limit_s)


def interrupt_grace_s(m: RunState, asked_s: float) -> float:
    """How long steps in flight may take after Ctrl-C: what it asks for, or longer where steps are long; 0 asks for none.

    An aborted step of one worker, which waits for nobody, would end no sooner, and nothing would be saved.
    """
    if not asked_s:
        return 0.0
    longest_s = m.step_times.longest_s(len(m.membership.members)) or 0.0
    return max(asked_s, GRACE_STEPS * longest_s * (m.progress.issued - m.progress.committed))


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
    """Limit for a worker to stop its step and answer: a forward or backward pass cannot be interrupted. At the start of a run
    other programs start too, and nothing is lost by patience."""
    if m.begins:
        return m.policy.start_deadline_s
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
    """Restart the limit of the oldest step in flight if it has passed while a worker that answers pings still reads samples.

    Returns whether the step waits for that. The limit of workers that answer no pings is not restarted.
    """
    over = m.health.slow_sample_from_s is not None or m.timer.elapsed_s > step_deadline_s(m)
    if not over or not waits_for_slow_sample(m, find_overdue_workers(m, -1.0), event):
        return False
    m.timer.since_s = m.timer.now_s
    return True


def waits_for_slow_sample(m: RunState, late: Collection[int], event: Tick) -> bool:
    """Whether a worker of `late` answers pings and reads samples, and has not been waited for longer than `slow_sample_s`.
    While it comes further in finding a place in a stream, that time does not count.

    Another worker would read the same samples no faster.
    """
    timer, health = m.timer, m.health
    if not set(late) & event.reading - event.unheard:
        return False
    if health.slow_sample_from_s is None:
        health.slow_sample_from_s = timer.since_s
    if set(late) & event.searching - event.unheard:
        health.slow_sample_from_s = timer.now_s
    return timer.now_s - health.slow_sample_from_s <= m.policy.slow_sample_s
