"""Workers that join and cannot reach the others: the run trains on without them, and does not try for ever."""

import pytest
from helpers.machine_steps import first_generation

from raypar.elastic.actions import AdoptPlan, ChoosePlan, ClaimGeneration, FenceWorkers, KillWorker, RunStep
from raypar.elastic.events import (
    CallFailed,
    GenerationClaimed,
    PlanAdopted,
    PlanChosen,
    StepEmitted,
    StepJournalled,
    StepReported,
    Tick,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import CommError
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Piece

WHOLE = (Piece("w0", 0, 4),)
NODES = {0: "a", 1: "b", 2: "new", 3: "new", 4: "other", 5: "third"}


class Run:
    """Two replicas that train and may become more; workers 0 and 1 train. Every worker answers the driver."""

    def __init__(self, most: int = 4) -> None:
        policy = RunPolicy(workers=2, job_steps=10_000, elastic=True, max_workers=most)
        self.machine = RunMachine(policy, ParallelPlan.mesh(dp=2, layers=1), lambda plan: (WHOLE,) * plan.world)
        self.machine.membership.nodes = NODES
        self.now_s = 0.0
        self.open: list[RunStep] = []
        self.decided: list[ChoosePlan | ClaimGeneration] = []
        self.do(*first_generation(self.machine))
        self.train(1.0)

    def do(self, *events):
        actions = [decision.action for event in events for decision in self.machine.handle(event, self.now_s)]
        self.open += [action for action in actions if isinstance(action, RunStep)]
        self.decided += [action for action in actions if isinstance(action, ChoosePlan | ClaimGeneration)]
        return actions

    def train(self, seconds: float):
        """Steps of 0.1 s, until a plan is asked for or a generation claimed; returns that action, or None."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and not self.decided:
            step, self.now_s = self.open.pop(0).step, self.now_s + 0.1
            generation, members = self.machine.membership.generation, self.machine.membership.members
            self.do(*(StepReported((worker,), step, 0.1, generation) for worker in members), StepJournalled(step))
            self.do(StepEmitted(step), Tick())
        return self.decided.pop(0) if self.decided else None

    def begin_generation(self, generation: int) -> list:
        """All workers that are asked answer; returns the last actions."""
        self.open.clear()
        actions = self.do(GenerationClaimed(generation, True))
        done = self.machine.progress.committed
        for worker in next(action.workers for action in actions if isinstance(action, FenceWorkers)):
            held = WHOLE if worker in self.machine.membership.members else ()
            actions += self.do(WorkerStatusReported(generation, WorkerStatus(worker, done if held else None, pieces=held)))
        return actions

    def try_to_grow(self, workers: int) -> AdoptPlan:
        """From the question for a larger plan to the order to adopt it."""
        asked = self.train(300.0)
        assert isinstance(asked, ChoosePlan) and asked.workers == workers, asked
        self.do(PlanChosen(asked.generation, ParallelPlan.mesh(dp=workers, layers=1), step_s=0.5, now_s=1.0))
        claimed = self.train(1.0)
        assert isinstance(claimed, ClaimGeneration), claimed
        return self.begin_generation(claimed.generation)[-1]

    def cannot_reach(self, order: AdoptPlan, worker: int, other: int) -> list:
        """A worker cannot connect to another one; the run goes back to the plan before. Returns all actions."""
        self.now_s += 4.0
        error = CommError(f"worker {worker} cannot reach worker {other}")
        error.unreachable_ranks = (order.members.index(other),)
        actions = self.do(CallFailed("aborted", error, worker, order.generation))
        assert self.decided.pop() == ClaimGeneration(order.generation + 1)
        actions += self.begin_generation(order.generation + 1)
        assert isinstance(actions[-1], AdoptPlan) and set(actions[-1].members) == {0, 1}
        self.do(*(PlanAdopted(worker, order.generation + 1) for worker in (0, 1)))
        assert self.machine.phase is Phase.RUNNING
        return actions


def joined(*workers: int) -> Run:
    """A run whose new workers have all joined at once."""
    run = Run()
    run.machine.membership.spares.update(workers)
    run.machine.planned.ask_at_s = run.now_s
    return run


def test_a_move_that_failed_is_tried_again_later_and_later():
    """It was tried again after three steps, each time for four seconds: the run stood still for nine tenths of its time."""
    run, trained_s = joined(2, 3), []
    for _ in range(4):
        began_s = run.now_s
        order = run.try_to_grow(4)
        trained_s.append(run.now_s - began_s)
        run.do(CallFailed("aborted", CommError("it broke"), 2, order.generation))
        assert run.decided.pop() == ClaimGeneration(order.generation + 1)
        run.begin_generation(order.generation + 1)
        run.do(*(PlanAdopted(worker, order.generation + 1) for worker in (0, 1)))
    assert trained_s == pytest.approx([0.1, 5.0, 10.0, 20.0], abs=0.5)


def test_newcomers_that_a_member_cannot_reach_twice_are_given_up_with_all_others_of_their_machine():
    run = joined(2, 3, 4)
    first = run.cannot_reach(run.try_to_grow(4), 2, 0)
    assert not [action for action in first if isinstance(action, KillWorker)], "a short interruption costs no worker"
    second = run.cannot_reach(run.try_to_grow(4), 2, 0)
    assert [action.worker for action in second if isinstance(action, KillWorker)] == [2, 3]
    assert run.machine.membership.gone == {2, 3} and run.machine.membership.spares == {4}


def test_failures_of_newcomers_that_are_gone_do_not_count_against_the_next_one():
    """The next newcomer was given up after a single interruption."""
    run = joined(2, 3, 4)
    for _ in range(2):
        run.cannot_reach(run.try_to_grow(4), 2, 0)
    assert run.machine.membership.gone == {2, 3}
    run.machine.planned.ask_at_s = run.now_s
    run.cannot_reach(run.try_to_grow(3), 4, 0)
    assert run.machine.membership.gone == {2, 3}, "a first failure costs no worker"
    run.cannot_reach(run.try_to_grow(3), 4, 0)
    assert run.machine.membership.gone == {2, 3, 4}


def test_a_newcomer_is_given_up_and_not_the_member_that_cannot_reach_it():
    run = joined(4, 5)
    for _ in range(2):
        run.cannot_reach(run.try_to_grow(4), 1, 4)
    assert run.machine.membership.gone == {4}


def test_after_newcomers_have_got_seats_earlier_failures_are_forgotten():
    run = joined(2, 3)
    run.cannot_reach(run.try_to_grow(4), 2, 0)
    order = run.try_to_grow(4)
    run.do(*(PlanAdopted(worker, order.generation) for worker in order.members))
    planned = run.machine.planned
    assert run.machine.membership.members == order.members and not planned.unreachable and not planned.failed_moves
