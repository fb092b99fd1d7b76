"""Rules for silent workers of a run that is not elastic: it waits for them, because each holds the only copy of some state.

Silence alone ends nothing before `last_copy_wait_s`; a process or machine that is gone ends the run within seconds. In an
elastic run silence begins a recovery, which waits by rules of its own (`state_sources.py`).
"""

from __future__ import annotations

from collections.abc import Collection

from raypar.elastic.actions import TellUser, WarnUser
from raypar.elastic.events import CallFailed, Tick, WorkerAnswered, WorkerSilent
from raypar.elastic.failures import fail_run
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.elastic.state_sources import TELL_EVERY_S
from raypar.errors import CommTimeout, WorkerLost
from raypar.plan.wording import after_steps, format_worker_numbers, word_form

NEVER_WAITS_IN = (Phase.ABORTING, Phase.FAILING, Phase.OVER)
ENDED_GRACE_S = 5.0
"""How long a worker's call has to fail with an error of its own, which says more, once its connection was found closed."""
RESUME = "look at its node; `raypar resume` goes on from the last checkpoint"


def wait_for_silent_worker(m: RunState, event: WorkerSilent) -> None:
    """Begin to wait for a worker that answers no pings, or fail its calls if the run does not wait."""
    silent = m.health.silent_since_s
    if m.policy.elastic or m.phase in NEVER_WAITS_IN or not _may_wait(m):
        fail_silent_worker(m, event.worker, event.seconds)
    elif event.worker not in silent:
        silent[event.worker] = m.timer.now_s
        tell_of_silent_worker_wait(m, [event.worker])


def note_answer_of_silent_worker(m: RunState, event: WorkerAnswered) -> None:
    """Note that a silent worker has answered. Time limits begin anew if no other worker is waited for."""
    since_s = m.health.silent_since_s.pop(event.worker, None)
    if since_s is None:
        return
    waited_s = m.timer.now_s - since_s
    m.decide(TellUser(f"worker {event.worker} answers again, after a wait of {waited_s:.1f} s"), "it was waited for")
    if not m.health.silent_since_s:
        m.timer.since_s = m.timer.now_s
        if m.timer.deadline_s is not None:
            m.timer.deadline_s += waited_s


def waits_for_silent_workers(m: RunState) -> bool:
    """Whether the run waits for silent workers: the phase's time limits do not count then.

    After Ctrl-C no worker is waited for: in a phase with a grace period, the end of that period decides.
    """
    graced = m.stopping.interrupted and m.phase in (Phase.FLUSHING, Phase.VALIDATING)
    return bool(m.health.silent_since_s) and not graced


def check_silent_worker_wait(m: RunState, event: Tick) -> Phase | None:
    """End the wait for silent workers if it is over."""
    silent = m.health.silent_since_s
    gone = sorted(event.ended & set(silent))
    late = [worker for worker, since_s in silent.items() if m.timer.now_s - since_s >= m.policy.last_copy_wait_s]
    if not gone:
        m.health.ended_since_s = None
    elif m.health.ended_since_s is None:
        m.health.ended_since_s = m.timer.now_s
    if m.health.ended_since_s is not None and m.timer.now_s - m.health.ended_since_s < ENDED_GRACE_S:
        return None
    if gone:
        what = f"{format_worker_numbers(gone)} {word_form(gone, 'was', 'were')} lost: the process or its machine is gone"
        return fail_run(m, CallFailed("lost", WorkerLost(what, cure=RESUME), gone[0]))
    if late or not _may_wait(m):
        worker = min(silent, key=lambda w: silent[w])
        fail_silent_worker(m, worker, m.timer.now_s - silent[worker])
    elif m.timer.now_s - m.health.silence_told_s >= TELL_EVERY_S:
        tell_of_silent_worker_wait(m, silent)
    return None


def _may_wait(m: RunState) -> bool:
    """Whether the run waits for silent workers: not after Ctrl-C, and not if `last_copy_wait_s` is 0."""
    return bool(m.policy.last_copy_wait_s) and not m.stopping.interrupted


def tell_of_silent_worker_wait(m: RunState, workers: Collection[int]) -> None:
    """Warn people which workers the run waits for, and for how long."""
    m.health.silence_told_s = m.timer.now_s
    begin_s = min(m.health.silent_since_s[worker] for worker in workers)
    left_s = m.policy.last_copy_wait_s - (m.timer.now_s - begin_s)
    saved = f"the checkpoint {after_steps(m.progress.saved)} is left" if m.progress.saved else "there is no checkpoint"
    m.decide(
        WarnUser(f"waiting for {describe_silent_workers(workers)}; {left_s:.0f} s left, then the run ends ({saved})"),
        "silence alone is no evidence of a death",
    )


def describe_silent_workers(workers: Collection[int]) -> str:
    """The text `worker 1: it answers no pings, but ...`: which workers the run waits for, and why."""
    they = word_form(workers, "it answers", "they answer")
    ended = word_form(workers, "its process has", "their processes have")
    only = f"the run is not elastic, so nobody else has {word_form(workers, 'its', 'their')} state"
    return f"{format_worker_numbers(workers)}: {they} no pings, but nothing says that {ended} ended; {only}"


def fail_silent_worker(m: RunState, worker: int, seconds: float) -> None:
    """Turn the worker's silence into a broken connection: a `CallFailed` event is handled next."""
    error = CommTimeout(f"worker {worker} has not answered for {seconds:.0f} s", cure=RESUME)
    m.health.silent_since_s.clear()
    m.next_event = CallFailed("aborted", error, worker)
