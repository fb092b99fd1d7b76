"""Silent workers of a run that is not elastic: each holds the only copy of some state, so the run waits for them.

Silence alone ends nothing before `last_copy_wait_s`; a process or machine that is gone ends the run at once. In an elastic run
silence begins a recovery, which does its own waiting (`last_copy.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from raypar.elastic.actions import Notice, Warn
from raypar.elastic.events import CallFailed, Event, Tick, WorkerAnswered, WorkerSilent
from raypar.elastic.phases import Phase
from raypar.elastic.recovery_rules import SAY_S
from raypar.elastic.worker_names import name_workers, verb_form
from raypar.errors import CommTimeout, WorkerLost

if TYPE_CHECKING:
    from raypar.elastic.run_machine import RunMachine

WAITS_IN = (Phase.STARTING, Phase.RUNNING, Phase.FLUSHING, Phase.VALIDATING, Phase.SAVING, Phase.ENDING)
RESUME = "look at its node; `raypar resume` goes on from the last checkpoint"


def silent(m: RunMachine, event: Event) -> None:
    """Wait for a worker that answers no pings; where nobody waits, it has failed."""
    assert isinstance(event, WorkerSilent)
    if m.policy.elastic or m.phase not in WAITS_IN or not waits(m):
        fail(m, event.worker, event.seconds)
    elif event.worker not in m.silence:
        m.silence[event.worker] = m._now_s
        say(m, [event.worker])


def heard(m: RunMachine, event: Event) -> None:
    """A silent worker has answered. Deadlines begin anew when nobody else is waited for."""
    assert isinstance(event, WorkerAnswered)
    since_s = m.silence.pop(event.worker, None)
    if since_s is None:
        return
    waited_s = m._now_s - since_s
    m.decide(Notice(f"worker {event.worker} answers again, after a wait of {waited_s:.1f} s"), "it was waited for")
    if not m.silence:
        m._since_s = m._now_s
        if m._deadline_s is not None:
            m._deadline_s += waited_s


def tick(m: RunMachine, event: Tick) -> bool:
    """Whether somebody is waited for, so that the phase's deadlines do not count; the end of the wait ends the run.

    After Ctrl-C nobody is waited for: where that gives a grace, the grace decides.
    """
    if not m.silence or (m.interrupted and m.phase in (Phase.FLUSHING, Phase.VALIDATING)):
        return False
    gone = sorted(event.ended & set(m.silence))
    late = [worker for worker, since_s in m.silence.items() if m._now_s - since_s >= m.policy.last_copy_wait_s]
    if gone:
        what = f"{name_workers(gone)} {verb_form(gone, 'was', 'were')} lost: the process or its machine is gone"
        m.fail(CallFailed("lost", WorkerLost(what, cure=RESUME), gone[0]))
    elif late or not waits(m):
        worker = min(m.silence, key=lambda w: m.silence[w])
        fail(m, worker, m._now_s - m.silence[worker])
    elif m._now_s - m.silence_told_s >= SAY_S:
        say(m, m.silence)
    return True


def waits(m: RunMachine) -> bool:
    """Whether silent workers are waited for: not after Ctrl-C, and not where no wait is wanted."""
    return bool(m.policy.last_copy_wait_s) and not m.interrupted


def say(m: RunMachine, workers: Collection[int]) -> None:
    """Tell people who is waited for, and for how long."""
    m.silence_told_s = m._now_s
    left_s = m.policy.last_copy_wait_s - (m._now_s - min(m.silence[worker] for worker in workers))
    saved = f"the checkpoint after {m.saved} steps is left" if m.saved else "there is no checkpoint"
    m.decide(
        Warn(f"waiting for {reason(workers)}; {left_s:.0f} s left, then the run ends ({saved})"),
        "silence alone is no evidence of a death",
    )


def reason(workers: Collection[int]) -> str:
    """`worker 1: it answers no pings, but ...`: who is waited for, and why."""
    they = verb_form(workers, "it answers", "they answer")
    ended = verb_form(workers, "its process has", "their processes have")
    only = f"the run is not elastic, so nobody else has {verb_form(workers, 'its', 'their')} state"
    return f"{name_workers(workers)}: {they} no pings, but nothing says that {ended} ended; {only}"


def fail(m: RunMachine, worker: int, seconds: float) -> None:
    """Its silence is a failure like that of a broken connection, in whatever phase."""
    error = CommTimeout(f"worker {worker} has not answered for {seconds:.0f} s", cure=RESUME)
    m.silence.clear()
    m.handle_as(CallFailed("aborted", error, worker))
