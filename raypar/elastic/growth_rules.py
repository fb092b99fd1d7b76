"""Workers that join a run, and when a seat for them is worth the move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypar.elastic.actions import ChoosePlan, Notice, Warn
from raypar.elastic.events import Event, PlanChosen, WorkerJoined, WorkerPlaced, WorkerStartFailed
from raypar.elastic.failure_budget import mark_lost
from raypar.elastic.phases import Phase
from raypar.elastic.recovery_rules import begin
from raypar.elastic.worker_names import name_workers, verb_form
from raypar.errors import first_line

if TYPE_CHECKING:
    from raypar.elastic.run_machine import RunMachine


def placed(m: RunMachine, event: Event) -> None:
    """One more is on its way."""
    assert isinstance(event, WorkerPlaced)
    if event.worker not in m.gone:
        m.placed.add(event.worker)


def joined(m: RunMachine, event: Event) -> None:
    """A worker more waits for a seat."""
    assert isinstance(event, WorkerJoined)
    welcome(m, event.worker)
    if m.phase is Phase.WAITING:
        begin(m, f"worker {event.worker} has joined", counts=False)


def joined_running(m: RunMachine, event: Event) -> None:
    """It may get a seat between two steps."""
    assert isinstance(event, WorkerJoined)
    welcome(m, event.worker)
    look_for_growth(m)


def joined_ending(m: RunMachine, event: Event) -> None:
    """Needed only if a worker is lost with its share of the last checkpoint."""
    assert isinstance(event, WorkerJoined)
    welcome(m, event.worker)


def hire_failed_ending(m: RunMachine, event: Event) -> None:
    """No other one is tried before it is needed."""
    assert isinstance(event, WorkerStartFailed)
    mark_lost(m, event.worker)


def welcome(m: RunMachine, worker: int) -> None:
    """It has started and waits."""
    m.hiring.discard(worker)
    m.placed.discard(worker)
    m.hired = max(m.hired, worker + 1)
    m.hire_failures = 0
    m.spares.add(worker)
    if m.grow_at_s is None:
        m.grow_at_s = m._now_s + m.policy.grow_after_s


def hire_failed(m: RunMachine, event: Event) -> None:
    """Another one is tried after a while; what goes wrong on one machine may go well on another."""
    assert isinstance(event, WorkerStartFailed)
    mark_lost(m, event.worker)
    m.hire_at_s = m._now_s + m.policy.retry_s * 2 ** min(m.hire_failures, 5)
    m.hire_failures += 1
    again = f"; the next is tried in {m.hire_at_s - m._now_s:.0f} s" if m.policy.hires else ""
    m.decide(Warn(f"worker {event.worker} could not be started: {first_line(event.error)}{again}"), "the others go on")


def look_for_growth(m: RunMachine) -> None:
    """Workers wait for a seat: ask the planner, while training goes on, once nobody else is on the way or the first has waited
    enough. Not before a step has been measured: what a seat would save is a part of that."""
    if (
        not m.policy.grow
        or not m.spares
        or m.grow_at_s is None
        or m.choosing
        or m.pause_for is not None
        or not m.step_times.known
    ):
        return
    able = min(len(m.members) + len(m.spares), m.wanted)
    alone = len(m.members) == 1  # nobody else has a copy of anything: who comes next may come a moment too late
    complete = able == m.wanted or not m.placed
    if able > len(m.members) and (complete or alone or m._now_s >= m.grow_at_s) and m.stop is None:
        m.choosing, m.grow_at_s = True, None
        m.decide(ChoosePlan(m.generation, able), f"{name_workers(m.spares)} {verb_form(m.spares, 'waits', 'wait')} for a seat")


def growth_chosen(m: RunMachine, event: Event) -> None:
    """What the planner would do with the workers that wait; only a gain that pays for the move is worth one.

    Back to as many as the job asks for is worth it while there is something left to do: second copies are worth more than time.
    """
    assert isinstance(event, PlanChosen)
    if event.generation != m.generation or not m.choosing:
        return
    m.choosing = False
    if event.plan is None or event.plan.world <= len(m.members) or m.pause_for is not None:
        return
    left = m.policy.end - m.committed
    # What is predicted is how the plans compare; how long steps really take has been measured.
    left_s = left * m.usual_step_s()
    gain_s = left_s * (1 - event.step_s / event.now_s) if event.now_s else 0.0
    if len(m.members) < m.policy.workers and left_s:
        gain_s = max(gain_s, left_s / 4)
    if event.now_s and gain_s <= m.policy.move_s:
        stay = f"{name_workers(m.spares)} {verb_form(m.spares, 'stays', 'stay')} in reserve"
        text = f"{stay}: {verb_form(m.spares, 'a seat', 'seats')} would save {max(gain_s, 0.0):.1f} s of {left} steps"
        m.decide(Notice(text), f"moving costs about {m.policy.move_s:.1f} s")
        return
    m.pause_for, m.next_plan = f"making room for {name_workers(m.spares)}", event.plan
    m.next_for = len(m.members) + len(m.spares)
    if m.phase in (Phase.RUNNING, Phase.FLUSHING):
        m.advance()
