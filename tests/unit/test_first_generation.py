"""A run's first generation begins as every later one: it is claimed, the workers say where they stand, and adopt its plan."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.machine_steps import begin, do, first_generation

from raypar.actors.messages import StepCall
from raypar.actors.worker_actor import WorkerActor
from raypar.elastic.actions import AdoptPlan, ClaimGeneration, FenceWorkers, RequestStacks, RunStep, Teardown
from raypar.elastic.events import (
    CallFailed,
    DrainRequested,
    FirstWorkersPlaced,
    GenerationClaimed,
    PlanAdopted,
    StacksReported,
    StopRequested,
    Tick,
    WorkerSilent,
    WorkersReady,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import GenerationGuard, StaleGeneration, WorkerStatus
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import CommError, GroupAborted, UserCodeError, WorkerLost
from raypar.plan import ParallelPlan

PAIR = ParallelPlan.mesh(dp=2, layers=1)


def machine(**policy) -> RunMachine:
    return RunMachine(RunPolicy(**({"workers": 2, "job_steps": 9, "elastic": True} | policy)), PAIR)


def adopting(**policy) -> RunMachine:
    """Its two workers build their stages."""
    made = machine(**policy)
    for event in first_generation(made)[:-2]:
        do(made, event)
    assert made.phase is Phase.ADOPTING
    return made


def test_the_first_generation_is_claimed_and_adopted_as_every_later_one():
    made = machine(steps_before_run=3)
    assert do(made, WorkersReady()) == [ClaimGeneration(1)]
    assert do(made, GenerationClaimed(1, True)) == [FenceWorkers(1, (0, 1))]
    assert do(made, WorkerStatusReported(1, WorkerStatus(0))) == []
    order = AdoptPlan(1, PAIR, (0, 1), (), 3, (), from_checkpoint=True)
    assert do(made, WorkerStatusReported(1, WorkerStatus(1))) == [order]
    assert do(made, PlanAdopted(1, 1)) == []
    assert do(made, PlanAdopted(0, 1)) == [RunStep(3), RunStep(4)], "and nothing is told of a recovery"


def test_a_driver_whose_predecessor_died_at_the_start_claims_the_generation_after_it():
    made = machine()
    do(made, FirstWorkersPlaced(PAIR, (0, 1), claimed=2))
    assert do(made, WorkersReady()) == [ClaimGeneration(3)]


def test_a_worker_that_is_drained_before_the_first_step_gets_no_seat():
    made = machine()
    do(made, DrainRequested(1, "preempted"))
    do(made, WorkersReady())
    do(made, GenerationClaimed(1, True))
    do(made, WorkerStatusReported(1, WorkerStatus(0)))
    (order,) = do(made, WorkerStatusReported(1, WorkerStatus(1)))
    assert order.members == (0,)


@pytest.mark.parametrize("elastic", [False, True])
def test_a_death_while_stages_are_built_ends_a_run_only_if_it_is_not_elastic(elastic):
    made = adopting(elastic=elastic)
    do(made, CallFailed("lost", WorkerLost("worker 1 died"), 1))
    assert made.phase is (Phase.CLAIMING if elastic else Phase.OVER)
    made = adopting(elastic=elastic)
    do(made, CallFailed("aborted", GroupAborted("closed"), 0, 1))
    assert made.phase is (Phase.CLAIMING if elastic else Phase.FAILING), "the cause is waited for"


def test_workers_that_build_for_long_are_no_less_patiently_waited_for_because_they_answer_no_pings():
    made = adopting(start_deadline_s=300.0)
    assert do(made, Tick(unheard=frozenset({0, 1})), 299.0) == [] and made.phase is Phase.ADOPTING
    assert do(made, WorkerSilent(1, 10.0), 299.0) == [ClaimGeneration(2)], "but the registry's word counts"


def test_a_start_that_hangs_ends_with_the_stacks_of_those_that_have_not_answered():
    made = adopting(start_deadline_s=300.0)
    do(made, PlanAdopted(0, 1), 200.0)
    assert do(made, Tick(), 300.0) == [RequestStacks((1,))] and do(made, Tick(), 300.3) == []
    *_, end = do(made, StacksReported("worker 1 waits in connect"), 301.0)
    assert isinstance(end, Teardown) and end.end == "failed"
    assert "worker 1 did not answer within 301 s" in end.error.what and "waits in connect" in end.error.what
    made = adopting(start_deadline_s=300.0)
    do(made, Tick(), 300.0)
    assert [type(a) for event in (PlanAdopted(0, 1), PlanAdopted(1, 1)) for a in do(made, event, 300.5)] == [RunStep] * 2
    assert do(made, StacksReported(""), 301.0) == [], "they have answered in the meantime"


def test_a_stop_before_the_first_step_ends_the_run_at_once():
    assert do(adopting(), StopRequested("enough")) == [Teardown("stopped", "enough", 0)]
    assert do(adopting(), StopRequested("Ctrl-C", interrupt=True)) == [Teardown("interrupted", "Ctrl-C", 0)]


def test_a_run_that_has_begun_is_recovered_as_ever():
    made = machine()
    begin(made)
    assert made.begins and made.health.disturbed_at_s is None
    assert do(made, CallFailed("lost", WorkerLost("worker 1 died"), 1)) == [ClaimGeneration(2)] and not made.begins


def test_a_call_of_a_former_generation_brings_no_value_that_learning_rates_follow():
    """A driver that was stopped and replaced goes on with a value which its successor has found anew."""
    core = SimpleNamespace(validated={}, data=SimpleNamespace(streams=SimpleNamespace()), step_timeout_s=1.0)
    backend = SimpleNamespace(abort=lambda reason: None, core=core)
    worker = WorkerActor.__new__(WorkerActor)
    worker.core, worker.elastic_worker, worker.generation_guard = core, backend, GenerationGuard(0, backend)
    worker._run_call, worker._free_peers = (lambda doing, call: call()), (lambda: None)
    worker.generation_guard.enter_generation(2, "generation 2 begins")
    with pytest.raises(StaleGeneration):
        worker.step(StepCall(1, 4, trace=False, into_mirror=False, validated=0.5).to_bytes())
    assert core.validated == {}


def test_a_step_call_of_a_former_generation_breaks_no_connection_of_the_present_one():
    """An agent that stood still may pass on a call of the generation before, once its workers have adopted the next plan."""
    aborted = []
    core = SimpleNamespace(data=SimpleNamespace(streams=SimpleNamespace()), step_timeout_s=1.0, abort=aborted.append)
    backend = SimpleNamespace(abort=lambda reason: None, core=core)
    worker = WorkerActor.__new__(WorkerActor)
    worker.core, worker.elastic_worker, worker.coordinate, worker.calls = core, backend, "stage 0", {}
    worker.working_dir, worker.torch_guard, worker.endpoint = SimpleNamespace(keep=lambda: None), None, None
    worker.generation_guard = GenerationGuard(0, backend, newest_generation=2, generation=2, seated=True)
    failure = worker.step(StepCall(1, 4, trace=False, into_mirror=False).to_bytes())
    assert failure.kind == "aborted" and isinstance(failure.error, StaleGeneration) and aborted == []
    worker.generation_guard.broken = True
    assert isinstance(worker.step(StepCall(2, 4, trace=False, into_mirror=False).to_bytes()).error, GroupAborted)
    assert aborted == ["stage 0 has failed"]


def test_a_call_that_comes_before_the_one_it_carries_answers_with_the_failure_of_that():
    """Whose own call brings it, too; the later step is not executed. A call of a step that is long done breaks nothing."""
    executed, aborted = [], []

    def step(number, into_mirror):
        executed.append(number)
        raise UserCodeError("the loss raised ZeroDivisionError", cure="look at it")
        yield

    core = SimpleNamespace(data=SimpleNamespace(streams=SimpleNamespace()), step_timeout_s=1.0, abort=aborted.append)
    backend = SimpleNamespace(abort=lambda reason: None, core=core, step=step, applied=lambda: 4)
    worker = WorkerActor.__new__(WorkerActor)
    worker.core, worker.elastic_worker, worker.coordinate, worker.calls = core, backend, "stage 0", {}
    worker.working_dir, worker.torch_guard, worker.endpoint = SimpleNamespace(keep=lambda: None), None, None
    worker.generation_guard = GenerationGuard(0, backend, newest_generation=1, generation=1, seated=True)
    late = worker.step(StepCall(1, 1, trace=False, into_mirror=False).to_bytes())
    assert isinstance(late.error, StaleGeneration) and aborted == []
    before = StepCall(1, 4, trace=False, into_mirror=False)
    found = [worker.step(replace(before, step=5, before=before).to_bytes()), worker.step(before.to_bytes())]
    assert executed == [4] and [failure.kind for failure in found] == ["user", "user"]
    assert all("in step 5: the loss raised ZeroDivisionError" in str(failure.error) for failure in found)


def test_what_a_failed_step_has_computed_goes_before_the_next_plan_is_adopted():
    """Its error is kept for who asks again, and has the step's frames: activations, gradients, the former optimizers."""

    class Backend:
        alive = None

        def step(self, step, into_mirror):
            activations = torch.ones(3)
            self.computed = weakref.ref(activations)
            yield None
            raise CommError("a peer is gone")

        def adopt(self, order):
            self.alive = self.computed() is not None
            yield None

    backend = Backend()
    backend.applied, backend.vote_result, backend.abort = (lambda: 0), (lambda: None), (lambda reason: None)
    backend.can_apply_late, backend.pieces, backend.steps_skipped = (lambda: False), tuple, tuple
    backend.held_snapshots = backend.digests = dict
    guard = GenerationGuard(0, backend, newest_generation=1, generation=1, seated=True)
    for _ in range(2):  # asked twice, answered twice
        with pytest.raises(CommError, match="a peer is gone"):
            list(guard.step(1, 0))
    guard.enter_generation(2, "a worker was lost")
    guard.report_status(2)
    list(guard.adopt(2, None))
    assert backend.alive is False


def test_an_announcement_that_comes_late_breaks_no_connection_of_the_generation_that_it_announces():
    """The worker's status, which comes another way, may have entered the generation before."""
    aborted = []
    worker = WorkerActor.__new__(WorkerActor)
    worker.generation_guard = GenerationGuard(0, SimpleNamespace(abort=lambda reason: None))
    worker.endpoint = SimpleNamespace(abort_connect=aborted.append, unended_communicators=())
    assert worker.announce_generation(1, "generation 1 begins") is None and aborted == ["generation 1 begins"]
    assert worker.announce_generation(1, "generation 1 begins") is None and len(aborted) == 1
