"""How often a step may fail before the run gives up, and what people hear while it waits for workers."""

import pytest
from helpers.machine_steps import first_generation

from raypar.elastic.actions import AdoptPlan, ClaimGeneration, Teardown, WarnUser
from raypar.elastic.events import (
    CallFailed,
    DrainRequested,
    GenerationClaimed,
    PlanAdopted,
    StepEmitted,
    StepJournalled,
    StepReported,
    Tick,
    WorkerJoined,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import GroupAborted, OutOfMemory, WorkerLost
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Piece

STATE = (Piece("w", 0, 4),)


class Scene:
    """One stage, as many replicas as workers; the machine's decisions are answered as workers would."""

    def __init__(self, workers: int, **policy):
        plan = ParallelPlan.mesh(dp=workers)
        fixed = {"workers": workers, "job_steps": 1000, "elastic": True, "grow": False}
        self.machine = RunMachine(RunPolicy(**(fixed | policy)), plan=plan, held_pieces=lambda plan: (STATE,) * plan.world)
        self.now_s = 0.0
        self.do(*first_generation(self.machine))

    def do(self, *events):
        return [decision.action for event in events for decision in self.machine.handle(event, self.now_s)]

    def die(self, worker, how="The actor died", **more):
        error = WorkerLost(f"worker {worker} (stage 0, replica {worker}) was lost: {how} {worker:08x}{worker:08x}")
        return self.do(CallFailed("lost", error, worker, **more))

    def recover(self):
        """Up to the new generation, if the machine lets us."""
        m = self.machine
        done = m.progress.committed
        found = self.do(GenerationClaimed(m.membership.generation, True)) if m.phase is Phase.CLAIMING else []
        for worker in sorted(m.recovery.expected) if m.phase is Phase.STANDING else ():
            found += self.do(
                WorkerStatusReported(
                    m.membership.generation,
                    WorkerStatus(worker, done if worker in m.membership.members else None, pieces=STATE),
                )
            )
        for order in [a for a in found if isinstance(a, AdoptPlan)]:
            found += self.do(*(PlanAdopted(w, m.membership.generation) for w in order.members))
        return found

    def step(self):
        m = self.machine
        step = m.progress.committed
        self.do(*(StepReported((w,), step, 0.1, m.membership.generation) for w in m.membership.members))
        if step >= m.progress.emitted:
            self.do(StepJournalled(step), StepEmitted(step))


def test_deaths_in_one_step_end_the_run_and_the_error_says_that_they_were_alike():
    scene = Scene(12, max_attempts=3)
    for worker in (0, 1, 2):
        scene.die(worker)
        scene.recover()
    (end,) = scene.die(3)
    assert isinstance(end, Teardown) and end.end == "failed"
    assert "4 workers have died in step 1, one after the other and all in the same way (the last were 1, 2, 3)" in str(
        end.error
    )


def test_deaths_that_differ_are_listed():
    scene = Scene(12, max_attempts=2)
    for worker, how in ((0, "a"), (1, "b")):
        scene.die(worker, how)
        scene.recover()
    (end,) = scene.die(2, "c")
    assert "3 recoveries in a row did not get beyond step 1" in str(end.error)


def test_a_new_step_gives_back_all_attempts():
    scene = Scene(12, max_attempts=2)
    for worker in range(8):
        scene.die(worker)
        scene.recover()
        scene.step()
    assert scene.machine.phase is Phase.RUNNING


@pytest.mark.parametrize("symptom", [False, True])
@pytest.mark.parametrize("way", ["its machine", "asked to leave"])
def test_machines_that_are_taken_away_do_not_count(way, symptom):
    """However many; whether the death is heard of first or what it does to the others."""
    scene = Scene(12, max_attempts=2)
    for worker in range(10):
        if way == "asked to leave":
            scene.machine.membership.leaving.add(worker)
        if symptom:
            scene.do(CallFailed("aborted", GroupAborted("closed"), 11, scene.machine.membership.generation))
        scene.die(worker, preempted=way == "its machine")
        scene.recover()
        assert scene.machine.phase is Phase.RUNNING and scene.machine.health.attempts == 0
    scene.step()
    assert scene.machine.progress.committed == 1


def test_workers_that_are_asked_to_leave_do_not_count():
    scene = Scene(12, max_attempts=1)
    for worker in range(8):
        scene.do(DrainRequested(worker, "preempted"))
        scene.step()
        scene.step()
        scene.recover()
    assert scene.machine.membership.members == (8, 9, 10, 11)


def test_a_replacement_that_dies_in_the_same_step_is_not_tried_for_ever():
    """One worker; whoever takes its place dies in the same step after a checkpoint was read again."""
    scene = Scene(1, max_attempts=3, min_workers=1)
    for worker in range(3):
        scene.die(worker)
        scene.recover()
        assert scene.machine.phase is Phase.WAITING
        scene.do(WorkerJoined(worker + 1))
        scene.recover()
        assert scene.machine.phase is Phase.RUNNING
    (end,) = scene.die(3)
    assert end.end == "failed" and "4 workers have died in step 1" in str(end.error)


def test_a_place_that_runs_out_of_memory_twice_ends_the_run():
    scene = Scene(1, min_workers=1)
    plan = scene.machine.membership.plan
    (claim,) = scene.do(CallFailed("lost", OutOfMemory("killed: its node ran out of memory"), 0))
    assert claim == ClaimGeneration(2), "once may be somebody else's fault"
    scene.recover()
    scene.do(WorkerJoined(1))
    scene.recover()
    assert scene.machine.phase is Phase.RUNNING and scene.machine.membership.plan == plan
    (end,) = scene.do(CallFailed("lost", OutOfMemory("killed again", "predicted to fit: plan.stages=2"), 1))
    assert isinstance(end, Teardown) and end.error.cure == "predicted to fit: plan.stages=2"


def test_memory_that_is_lacking_while_a_plan_is_taken_over_counts_too():
    scene = Scene(3)
    scene.die(0)
    m = scene.machine
    scene.do(GenerationClaimed(2, True), *(WorkerStatusReported(2, WorkerStatus(w, 0, pieces=STATE)) for w in (1, 2)))
    assert m.phase is Phase.ADOPTING
    assert scene.do(CallFailed("lost", OutOfMemory("killed"), 1)) == [ClaimGeneration(3)]
    scene.recover()
    assert m.membership.members == (2,), "another plan: it has another chance"
    assert scene.do(CallFailed("lost", OutOfMemory("killed"), 2)) == [ClaimGeneration(4)]


def test_people_hear_what_is_awaited_and_for_how_long_every_30_s():
    scene = Scene(4, min_workers=4, capacity_s=100.0)
    scene.die(0)
    scene.die(1)
    (said,) = [a for a in scene.recover() if isinstance(a, WarnUser)]
    assert said.text == "waiting for 2 more workers of 1 CPU each (2 workers are left, min_workers is 4); 100 s left"
    told = []
    for second in range(1, 100):
        scene.now_s = float(second)
        told += [(second, a.text.rpartition("; ")[2]) for a in scene.do(Tick()) if isinstance(a, WarnUser)]
    assert told == [(30, "70 s left"), (60, "40 s left"), (90, "10 s left")]
    scene.now_s = 100.0
    (end,) = scene.do(Tick())
    assert "no workers came within 100 s; awaited were 2 more workers of 1 CPU each (2 workers are left" in str(end.error)
