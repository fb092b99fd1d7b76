"""A worker that answers pings and reads one sample for longer than a step may take is not replaced by another one."""

import threading
import time
from dataclasses import replace

import pytest
from test_last_copy import PAIR, do, stand, trained
from test_recovery_rules import lost

from raypar.elastic.actions import AdoptPlan, ClaimGeneration, FenceWorkers, KillWorker, RequestStacks
from raypar.elastic.deadlines import answer_deadline_s, step_deadline_s
from raypar.elastic.events import GenerationClaimed, PlanAdopted, StepEmitted, StepJournalled, StepReported, Tick
from raypar.elastic.phases import Phase
from raypar.job import DataConfig
from raypar.plan import ParallelPlan
from raypar.plan.microbatches import Microbatches
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.process.thread_activity import reads_samples

READS = frozenset({0})


def ticks(machine, until_s, since_s=0.0, **facts):
    """The actions of ticks, four a second."""
    return [
        action for now in range(int(4 * since_s), int(4 * until_s) + 1) for action in do(machine, Tick(**facts), now_s=now / 4)
    ]


def test_a_worker_that_reads_one_slow_sample_is_not_replaced_and_has_the_whole_limit_afterwards():
    """It was killed after the step's limit of 3 s, and the worker in its place read the same sample."""
    machine = trained(PAIR)
    assert ticks(machine, 25.0, reading=READS) == []
    assert ticks(machine, 27.75, since_s=25.25) == [], "it has read the sample and computes"
    limit_s = step_deadline_s(machine)
    for worker in (0, 1):
        do(machine, StepReported((worker,), 4, 26.0), now_s=27.8)
    do(machine, StepJournalled(4), StepEmitted(4), now_s=27.8)
    assert machine.progress.committed == 5 and machine.membership.generation == 1
    assert step_deadline_s(machine) == limit_s, "the next steps are not allowed to take as long"
    assert ClaimGeneration(2) in do(machine, Tick(), now_s=31.0)


def test_a_worker_that_stops_computing_after_its_slow_sample_is_found_after_the_usual_limit():
    machine = trained(PAIR)
    assert ticks(machine, 10.0, reading=READS) == []
    assert ticks(machine, 13.0, since_s=10.25) == []
    assert do(machine, Tick(), now_s=13.25) == [ClaimGeneration(2)]


def test_a_sample_that_takes_more_than_two_minutes_is_waited_for_no_longer():
    machine = trained(PAIR)
    assert ticks(machine, 120.0, reading=READS) == []
    assert ClaimGeneration(2) in ticks(machine, 123.5, since_s=120.25, reading=READS)


def test_a_worker_that_comes_further_in_finding_its_place_in_a_stream_is_waited_for_as_long_as_that_takes():
    machine = trained(PAIR)
    assert ticks(machine, 600.0, reading=READS, searching=READS) == []
    assert ticks(machine, 719.0, since_s=600.25, reading=READS) == [], "one sample"
    assert ClaimGeneration(2) in ticks(machine, 723.5, since_s=719.25, reading=READS)


def test_a_worker_that_reads_and_answers_no_pings_is_replaced_after_the_usual_limit():
    """One sample holds the interpreter: when it last answered it was reading."""
    machine = trained(PAIR)
    assert ClaimGeneration(2) in ticks(machine, 3.25, reading=READS, unheard=READS)


def test_another_worker_that_falls_silent_meanwhile_is_found_as_fast_as_ever():
    machine = trained(PAIR)
    assert ticks(machine, 10.0, reading=READS) == []
    assert ClaimGeneration(2) in ticks(machine, 12.25, since_s=10.25, reading=READS, unheard=frozenset({1}))


def test_a_worker_that_has_reported_and_reads_ahead_excuses_nobody():
    machine = trained(PAIR)
    do(machine, StepReported((0,), 4, 0.1))
    assert ClaimGeneration(2) in ticks(machine, 3.25, reading=READS)


def test_a_run_that_is_not_elastic_does_not_take_a_slow_sample_for_a_step_that_hangs():
    machine = trained(PAIR)
    machine.policy = replace(machine.policy, elastic=False)
    assert ticks(machine, 30.0, reading=READS) == [] and machine.phase is Phase.RUNNING
    assert RequestStacks((0, 1)) in ticks(machine, 33.5, since_s=30.25)


TRIO = ParallelPlan.mesh(dp=3, layers=2)


def recovering(at_s=1.0, *, before=(), dead=2):
    """A run of three replicas; worker 0 reads a slow sample while `dead` dies. All that live are asked for their status."""
    machine = trained(TRIO)
    for facts in before:
        do(machine, Tick(**facts[1]), now_s=facts[0])
    assert do(machine, lost(dead), now_s=at_s) == [ClaimGeneration(2)]
    rest = tuple(sorted({0, 1, 2} - {dead}))
    assert do(machine, GenerationClaimed(2, True), now_s=at_s) == [FenceWorkers(2, rest)]
    return machine


def test_a_recovery_waits_for_a_worker_that_reads_a_slow_sample():
    """It was given up after the second that workers have to answer, although it answered pings."""
    machine = recovering()
    do(machine, stand(machine, 1), now_s=1.1)
    assert ticks(machine, 25.0, since_s=1.25, reading=READS) == [] and machine.phase is Phase.STANDING
    assert ticks(machine, 25.5, since_s=25.25) == [], "it has read the sample, and ends its step"
    order = do(machine, stand(machine, 0), now_s=25.6)[-1]
    assert isinstance(order, AdoptPlan) and set(order.members) == {0, 1} and order.done == 4
    do(machine, PlanAdopted(0, 2), PlanAdopted(1, 2), now_s=25.7)
    assert machine.phase is Phase.RUNNING and machine.membership.gone == {2} and machine.health.attempts == 1
    assert ClaimGeneration(3) in ticks(machine, 29.0, since_s=25.75), "later steps have the usual limit"


def test_a_worker_that_does_not_answer_after_its_slow_sample_is_given_up_after_the_usual_limit():
    machine = recovering()
    do(machine, stand(machine, 1), now_s=1.1)
    limit_s = answer_deadline_s(machine)
    assert ticks(machine, 10.0, since_s=1.25, reading=READS) == []
    assert ticks(machine, 10.0 + limit_s - 0.25, since_s=10.25) == []
    assert ClaimGeneration(3) in do(machine, Tick(), now_s=10.0 + limit_s)
    assert machine.membership.gone == {0, 2}


@pytest.mark.parametrize("begun_s", [0.0, 40.0])
def test_a_recovery_waits_for_no_slow_sample_for_more_than_two_minutes(begun_s):
    """Also those that the step was waited for count."""
    machine = recovering(1.0 + begun_s, before=[(now / 4, {"reading": READS}) for now in range(int(begun_s * 4))])
    do(machine, stand(machine, 1), now_s=1.1 + begun_s)
    assert ticks(machine, 120.0, since_s=1.25 + begun_s, reading=READS) == []
    assert ClaimGeneration(3) in ticks(machine, 123.0, since_s=120.25, reading=READS)
    assert machine.membership.gone == {0, 2}


@pytest.mark.parametrize("facts", [{"reading": READS, "unheard": READS}, {}])
def test_a_recovery_waits_for_no_worker_that_answers_no_pings_or_reads_nothing(facts):
    machine = recovering()
    do(machine, stand(machine, 1), now_s=1.1)
    assert ClaimGeneration(3) in ticks(machine, 2.5, since_s=1.25, **facts)
    assert machine.membership.gone == {0, 2}


def test_another_worker_that_does_not_answer_is_given_up_once_the_sample_is_read_and_its_reader_is_kept():
    machine = recovering()
    silent = {"unheard": frozenset({1})}
    assert ticks(machine, 10.0, since_s=1.25, reading=READS, **silent) == []
    assert do(machine, stand(machine, 0), Tick(**silent), now_s=10.1) == [ClaimGeneration(3)]
    assert machine.membership.gone == {1, 2} and KillWorker(1, "did not answer") in do(machine, GenerationClaimed(3, True))


class SlowSamples:
    """A sample takes until `go`."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float]:
        self.asked.set()
        self.go.wait(10)
        return float(index), 0.0


def test_the_stack_of_a_thread_says_whether_it_reads_samples():
    data = SlowSamples()
    spec = DataConfig(function=lambda: data)
    loader = MicrobatchLoader(data, spec, SampleOrder(0, 4), Microbatches(2, 0, 4), seed=0, fields=("x", "y"))
    reader = threading.Thread(target=loader.get, args=(0, 0))
    reader.start()
    assert data.asked.wait(10) and reads_samples(reader.ident)
    data.go.set()
    reader.join()
    idle = threading.Thread(target=time.sleep, args=(0.2,))
    idle.start()
    assert not reads_samples(idle.ident) and not reads_samples(reader.ident)
    idle.join()
