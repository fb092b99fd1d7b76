"""A run that makes forward passes only: no step, nothing saved, and a pass that a loss has cut off is made again."""

import pytest
from helpers.machine_steps import begin, do
from test_recovery_rules import layout

from raypar.elastic.actions import (
    AbortGroups,
    AdoptPlan,
    ChoosePlan,
    ClaimGeneration,
    EmitValidation,
    FenceWorkers,
    Teardown,
    Validate,
)
from raypar.elastic.events import (
    CallFailed,
    DrainRequested,
    GenerationClaimed,
    GroupsAborted,
    PlanAdopted,
    PlanChosen,
    StopRequested,
    Tick,
    ValidationEmitted,
    ValidationReported,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import WorkerLost
from raypar.plan import ParallelPlan

DONE = 5


def policy(passes: int, workers: int = 2, **more) -> RunPolicy:
    return RunPolicy(
        workers=workers, job_steps=DONE, steps_before_run=DONE, validates=True, forward_passes=passes, save_at_end=False, **more
    )


def make_pass(machine: RunMachine, number: int) -> list:
    """All workers report the pass; returns what follows its emission."""
    answers = [
        do(machine, ValidationReported((worker,), DONE, machine.membership.generation)) for worker in machine.membership.members
    ]
    assert answers[-1] == [EmitValidation(DONE, number)]
    return do(machine, ValidationEmitted(DONE))


def test_the_passes_follow_one_another_and_nothing_is_trained_or_saved():
    machine = RunMachine(policy(3), plan=ParallelPlan.mesh(dp=2, layers=2))
    assert begin(machine) == [Validate(DONE, 0)]
    assert make_pass(machine, 0) == [Validate(DONE, 1)]
    assert make_pass(machine, 1) == [Validate(DONE, 2)]
    assert make_pass(machine, 2) == [Teardown("done", "all of 3 passes are made", DONE)]


def test_a_stop_ends_the_run_after_the_pass_under_way_without_saving():
    machine = RunMachine(policy(3), plan=ParallelPlan.mesh(dp=2, layers=2))
    begin(machine)
    do(machine, StopRequested("enough"))
    assert make_pass(machine, 0) == [Teardown("stopped", "enough", DONE)]


def test_ctrl_c_aborts_a_pass_that_outlasts_its_grace():
    machine = RunMachine(policy(3), plan=ParallelPlan.mesh(dp=2, layers=2))
    begin(machine)
    do(machine, StopRequested("Ctrl-C", interrupt=True, grace_s=2), 10.0)
    assert do(machine, Tick(), 12.1) == [AbortGroups("interrupted")]
    assert do(machine, GroupsAborted((DONE, DONE)), 12.2) == [Teardown("interrupted", "Ctrl-C", DONE)]


@pytest.mark.parametrize("stages, replicas", [(2, 1), (1, 2)])
def test_after_a_loss_the_pass_is_made_again(stages: int, replicas: int):
    """With two stages nobody else holds the lost one: all read the checkpoint. A replica that is left has all it needs."""
    plan, smaller = ParallelPlan.mesh(pp=stages, dp=replicas, layers=2), ParallelPlan.mesh(layers=2)
    machine = RunMachine(policy(2, elastic=True, capacity_s=10), plan=plan, held_pieces=layout)
    begin(machine)
    make_pass(machine, 0)
    do(machine, ValidationReported((1,), DONE))
    assert do(machine, CallFailed("lost", WorkerLost("worker 0 was lost"), 0)) == [ClaimGeneration(2)]
    assert do(machine, GenerationClaimed(2, True)) == [FenceWorkers(2, (1,))]
    (order,) = do(machine, WorkerStatusReported(2, WorkerStatus(1, DONE, pieces=layout(plan)[1])))
    if isinstance(order, ChoosePlan):
        (order,) = do(machine, PlanChosen(2, smaller))
    assert isinstance(order, AdoptPlan) and order.done == DONE and order.from_checkpoint == (stages == 2)
    assert do(machine, PlanAdopted(1, 2)) == [Validate(DONE, 1)]
    assert make_pass(machine, 1) == [Teardown("done", "all of 2 passes are made", DONE)]


def test_a_drained_worker_leaves_between_two_passes():
    machine = RunMachine(policy(2, elastic=True, capacity_s=10), plan=ParallelPlan.mesh(dp=2, layers=2))
    begin(machine)
    assert do(machine, DrainRequested(1, "preempted")) == []
    assert make_pass(machine, 0) == [ClaimGeneration(2)]


def test_losses_in_different_passes_are_no_repeated_failure():
    machine = RunMachine(policy(20, 2, elastic=True, capacity_s=10, max_attempts=1), plan=ParallelPlan.mesh(dp=2, layers=2))
    begin(machine)
    for number in range(4):
        machine.health.attempts = 1
        make_pass(machine, number)
        assert machine.health.attempts == 0
