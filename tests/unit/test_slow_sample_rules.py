"""A worker that answers pings and reads one sample for longer than a step may take is not replaced by another one."""

import threading
import time
from dataclasses import replace

from test_last_copy import PAIR, do, trained

from raypar.elastic.actions import ClaimGeneration, RequestStacks
from raypar.elastic.deadlines import step_deadline_s
from raypar.elastic.events import StepEmitted, StepJournalled, StepReported, Tick
from raypar.elastic.phases import Phase
from raypar.plan.microbatches import Microbatches
from raypar.worker.job_spec import DataSpec, Ref
from raypar.worker.microbatch_loader import MicrobatchLoader, SampleOrder
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
        do(machine, StepReported(worker, 4, 26.0), now_s=27.8)
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
    do(machine, StepReported(0, 4, 0.1))
    assert ClaimGeneration(2) in ticks(machine, 3.25, reading=READS)


def test_a_run_that_is_not_elastic_does_not_take_a_slow_sample_for_a_step_that_hangs():
    machine = trained(PAIR)
    machine.policy = replace(machine.policy, elastic=False)
    assert ticks(machine, 30.0, reading=READS) == [] and machine.phase is Phase.RUNNING
    assert RequestStacks((0, 1)) in ticks(machine, 33.5, since_s=30.25)


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
    spec = DataSpec(Ref(lambda: data))
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
