"""Workers on GPUs as the driver sees them: the actor's code, real CuPy over the stand-in for NCCL, in processes without Ray.

A rank is killed inside a collective; the others abort, form a smaller generation, and end with the bits of one process."""

import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from types import SimpleNamespace

import pytest
import torch
from helpers import gpu_calls, standin, ugly_models
from helpers.parity import expected, with_shares
from helpers.processes import Workers
from helpers.shard_grid import DEPTH, Cell, one_process, seeded_gpt
from helpers.shard_grid import graph as grid_graph
from helpers.standin import Setting

from raypar.actors.messages import StepCall
from raypar.actors.worker_actor import WorkerActor
from raypar.job import Job, ModelConfig
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import make_model_outline
from raypar.model.tensor_parallel.compute_shard_layout import make_model_outline_with_layouts
from raypar.plan import MicrobatchRouting, ModelOutline, ParallelPlan
from raypar.plan.bundle_parts import node_of_each_replica
from raypar.plan.ownership import Ownership
from raypar.plan.pieces import AdoptPlanCommand, may_move_directly, moves_by_worker, plan_moves
from raypar.schedule import registry
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.make_worker_assignments import make_worker_assignments

pytestmark = pytest.mark.skipif(not standin.SUPPORTED, reason="CuPy has a wheel for Linux x86-64 only")

LIMIT_S = 20.0


@dataclass(frozen=True)
class Job:
    """What the workers train."""

    spec: Job
    graph: Graph
    outline: ModelOutline


SPEC = ugly_models.job("tangled", microbatches=4, steps=5).replace(device="gpu")
GRAPH = make_layer_graph(SPEC)
TANGLED = Job(SPEC, GRAPH, make_model_outline(GRAPH))
runs = (f"gpu-{os.getpid()}-{number}" for number in range(10**6))


def plan_of(*replicas):
    return ParallelPlan.of(replicas, layers=len(GRAPH.layers))


@pytest.fixture(scope="module")
def workers():
    made = Workers(4)
    yield made
    made.end()


class Run:
    """What a driver does, by hand. `plan` and `members` of the present generation."""

    job = TANGLED

    def __init__(self, workers, plan):
        self.workers, self.generation, self.done = workers, 0, 0
        on = list(range(plan.world))
        self.addresses = dict(
            zip(on, workers.each(gpu_calls.start, next(runs), pickle.dumps(self.job.spec), on=on, timeout_s=60.0), strict=True)
        )
        self.adopt(plan, on)

    def ask(self, method, *args, timeout_s=LIMIT_S):
        """All members' answers."""
        return self.workers.each(gpu_calls.call, method, *args, on=self.members, timeout_s=timeout_s)

    def parts(self, plan, members, stands=None):
        """`stands`: of those that hold state; None at the beginning."""
        spec = self.job.spec
        made = make_worker_assignments(
            spec, self.job.graph, plan, registry.build_schedule("1f1b", MicrobatchRouting(plan, spec.batching))
        )
        ways, ranks = (), {worker: rank for rank, worker in enumerate(members)}
        if stands is not None:
            have = {stand.worker: stand.pieces for stand in stands}
            ways = plan_moves(have, dict(zip(members, Ownership(plan, self.job.outline).held, strict=True)))
            assert {way.source for way in ways} <= set(members)
        fresh = stands is None
        own, more = moves_by_worker(ways), {"run_begins": fresh, "direct": may_move_directly(ways)}
        return {w: AdoptPlanCommand(made[rank], ranks, self.done, own.get(w, ()), **more) for w, rank in ranks.items()}, ways

    def adopt(self, plan, members, stands=None):
        """A new generation of these workers."""
        self.generation += 1
        self.plan, self.members = plan, list(members)
        parts, ways = self.parts(plan, self.members, stands)
        addresses = [self.addresses[worker] for worker in self.members]
        found = self.workers.each(
            gpu_calls.adopt, self.generation, parts, addresses, LIMIT_S, on=self.members, timeout_s=2 * LIMIT_S
        )
        assert all(isinstance(answer, dict) for answer in found), found
        return ways

    def step(self):
        """All answers."""
        answers = self.ask("step", step_call(self), timeout_s=30.0)
        assert all(isinstance(answer, dict) for answer in answers), answers
        self.done += 1
        return answers

    def recover(self, left, plan):
        """The others leave what they do and form the next generation; what moved, and how long it took."""
        start = time.monotonic()
        for worker in left:
            self.workers.workers[worker].control(gpu_calls.ctl, "announce_generation", self.generation + 1, "a worker was lost")
        self.members = list(left)
        stands = self.ask("report_status", self.generation + 1)
        assert {stand.done for stand in stands} == {self.done}
        return self.adopt(plan, left, stands), time.monotonic() - start

    losses = property(lambda self: expected("tangled", 4, 0).losses)

    def wanted(self, rank, name):
        return expected("tangled", 4, 0).parameters[name]

    def check(self, left_inside=0):
        """The bits of one process, and no communicator of earlier generations, but those that NCCL was still making."""
        losses = []
        while self.done < self.job.spec.steps:
            losses.append({answer["loss"] for answer in self.step()})
        assert losses == [{loss} for loss in self.losses[-len(losses) :]]
        for rank, found in enumerate(self.workers.each(gpu_calls.parameters, on=self.members)):
            for name, copy in found.items():
                assert torch.equal(torch.from_numpy(copy), self.wanted(rank, name)), name
        made = self.workers.each(gpu_calls.communicator_calls, on=self.members)
        alive = self.workers.each(gpu_calls.alive, on=self.members)
        assert all(len(own) <= there <= len(own) + left_inside for own, there in zip(made, alive, strict=True))
        check_one_order(self.workers.each(gpu_calls.launch_order, on=self.members))


def check_one_order(orders: Sequence[Sequence[str]]) -> int:
    """All group operations can be put into one order that is each rank's own: else ranks may wait for each other in a circle.

    But for messages: each pair of ranks enqueues those of its two directions in crossed orders, so that each needs a channel.
    How many there were.
    """
    behind: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for order in orders:
        count, before = Counter[str](), None
        for name in order:
            if not name.startswith("messages"):
                count[name] += 1
                behind.setdefault((name, count[name]), set()).update(() if before is None else (before,))
                before = (name, count[name])
    return len(list(TopologicalSorter(behind).static_order()))


def step_call(run: Run) -> bytes:
    """The argument of the call of the run's next step."""
    return StepCall(run.generation, run.done, trace=False, into_mirror=False).to_bytes()


def test_a_run_makes_the_communicators_of_its_plan_and_uses_them(workers):
    run = Run(workers, plan_of(2, 2))
    run.check()
    made = run.workers.each(gpu_calls.communicator_calls, on=run.members)
    assert set(made[0]) == {"all_gather of 0,1 channel 0", "messages 0 -> 2", "messages 2 -> 0"}
    assert all(calls for own in made for calls in own.values())


@pytest.mark.parametrize(
    "replicas, shares, fits", [((3, 1), ((2, 1, 1), ()), True), pytest.param((2, 2), ((3, 1), ()), False, marks=pytest.mark.ci)]
)
def test_other_shares_keep_communicators_that_suffice_and_else_change_nothing(workers, replicas, shares, fits):
    """Two replicas whose runs are no subtrees send each other more than one sum, and stages with other runs cross: then all
    begin a new generation, also who has taken its blocks already."""
    run = Run(workers, plan_of(*replicas))
    run.step()
    before = run.workers.each(gpu_calls.communicator_calls, on=run.members)
    plan = with_shares(run.plan, shares)
    parts, _ = run.parts(plan, run.members)
    answers = []
    for worker in run.members:
        asked = ("share_out_anew", run.generation, pickle.dumps(parts[worker]))
        answers += workers.each(gpu_calls.call, *asked, on=[worker], timeout_s=LIMIT_S)
    assert all(answers) is fits, answers
    if not fits:
        run.recover(run.members, plan)
    run.check()
    after = run.workers.each(gpu_calls.communicator_calls, on=run.members)
    assert fits is all(set(old) == set(new) for old, new in zip(before, after, strict=True))


REROUTED, ANEW = (2, 1), (1, 1, 1)


@pytest.mark.parametrize(
    "operation, smaller, silent",
    [
        ("all_gather", REROUTED, False),
        ("send", ANEW, True),
        pytest.param("all_gather", ANEW, True, marks=pytest.mark.full),
        pytest.param("send", REROUTED, False, marks=pytest.mark.full),
    ],
)
def test_a_rank_killed_inside_an_operation_costs_no_bit(workers, operation, smaller, silent):
    """`silent`: NCCL does not notice, else it may do so before the others hear of it."""
    run = Run(workers, plan_of(2, 2))
    workers.each(gpu_calls.fault, Setting.SILENT_LOSSES, silent, on=run.members)
    run.step(), run.step()
    victim = 3
    workers.each(gpu_calls.die_inside, operation, on=[victim])
    for worker in run.members:
        workers.workers[worker].call(gpu_calls.call, worker, "step", step_call(run))
    failed = [workers.workers[worker].result() for worker in (0, 1, 2)]
    assert all(answer[0] == "aborted" for answer in failed), failed
    assert any("rank 3" in answer[2] for answer in failed)
    workers.replace(victim)
    ways, seconds = run.recover([0, 1, 2], plan_of(*smaller))
    assert bool(ways) == (smaller == ANEW) and seconds < LIMIT_S
    run.check()
    workers.each(gpu_calls.fault, Setting.SILENT_LOSSES, 0, on=run.members)


CELL = Cell("gpt", "1f1b", (2,), (2,), 4, dtype="float32")
MODEL = ModelConfig(function=seeded_gpt)
SHARDED = CELL.job.replace(model=MODEL, device="gpu")


class RunOnShards(Run):
    """Of two shards each."""

    job = Job(SHARDED, grid_graph("gpt"), make_model_outline_with_layouts(CELL.graph, [2], {}))
    want = property(lambda self: one_process(replace(CELL, schedule="gpipe", replicas=(1,), shards=()), (2,) * (DEPTH + 2)))
    losses = property(lambda self: self.want.losses)

    def wanted(self, rank, name):
        return self.want.parameters[name, 2, self.plan.roles[rank][0].shard][0]


def test_a_rank_killed_inside_an_all_reduce_of_shards_costs_no_bit(workers):
    """One replica of two shards is left; the other shard of the one that is lost has nothing to do any more."""

    def plan(replicas):
        return ParallelPlan.of((replicas,), shards=(2,), layers=DEPTH + 2)

    run = RunOnShards(workers, plan(2))
    run.step()
    victim = 3
    workers.each(gpu_calls.die_inside, "all_reduce", on=[victim])
    for worker in run.members:
        workers.workers[worker].call(gpu_calls.call, worker, "step", step_call(run))
    failed = [workers.workers[worker].result() for worker in (0, 1, 2)]
    assert all(answer[0] == "aborted" for answer in failed), failed
    workers.replace(victim)
    ways, seconds = run.recover([0, 1], plan(1))
    assert not ways and seconds < LIMIT_S
    run.check()


class RunOnNodes(RunOnShards):
    """Of two replicas of two shards and one whole stage behind them, each on a node of its own."""

    plans = tuple(ParallelPlan.of(replicas, shards=(2, 1), layers=DEPTH + 2) for replicas in ((2, 1), (1, 1)))
    cell = replace(CELL, schedule="gpipe", replicas=(1, 1), shards=(2, 1))
    want = property(lambda self: one_process(self.cell, self.plan.shards_by_layer))

    def parts(self, plan, members, stands=None):
        parts, ways = super().parts(plan, members, stands)
        return {w: replace(part, nodes=node_of_each_replica(plan)) for w, part in parts.items()}, ways

    def wanted(self, rank, name):
        role = self.plan.roles[rank][0]
        return self.want.parameters[name, self.plan.stages[role.grid].shards, role.shard][0]


@pytest.mark.ci
def test_a_rank_killed_inside_a_gather_of_what_came_in_parts_costs_no_bit():
    """The layers of the first stage gather nothing else."""
    group = Workers(5)
    try:
        group.each(gpu_calls.cut_everything)
        run = RunOnNodes(group, RunOnNodes.plans[0])
        run.step(), run.step()
        group.each(gpu_calls.die_inside, "all_gather", on=[3])
        for worker in run.members:
            group.workers[worker].call(gpu_calls.call, worker, "step", step_call(run))
        failed = [group.workers[worker].result() for worker in (0, 1, 2, 4)]
        assert all(answer[0] == "aborted" for answer in failed), failed
        group.replace(3)
        _, seconds = run.recover([0, 1, 4], RunOnNodes.plans[1])
        assert seconds < LIMIT_S
        run.check()
    finally:
        group.end()


def plan_on_shards(*replicas):
    return ParallelPlan.of(replicas, shards=(2,) * len(replicas), layers=DEPTH + 2)


@pytest.mark.parametrize(
    "kind, plan",
    [
        (RunOnShards, plan_on_shards(2)),
        (RunOnShards, plan_on_shards(1, 1)),
        (Run, plan_of(4)),
        pytest.param(Run, plan_of(1, 3), marks=pytest.mark.full),
        pytest.param(Run, plan_of(3, 1), marks=pytest.mark.full),
    ],
    ids=["2 replicas of 2 shards", "2 stages of 2 shards", "4 replicas", "1 and 3 replicas", "3 and 1 replicas"],
)
def test_the_operations_of_groups_have_one_order_for_all_ranks(workers, kind, plan):
    run = kind(workers, plan)
    run.step()
    count = check_one_order(run.workers.each(gpu_calls.launch_order, on=run.members))
    for _ in range(2):
        run.step()
    orders = run.workers.each(gpu_calls.launch_order, on=run.members)
    groups = {name for order in orders for name in order if not name.startswith("messages")}
    assert groups and check_one_order(orders) > count


def test_crossed_orders_are_found():
    with pytest.raises(CycleError):
        check_one_order([["a", "messages 0 -> 1", "b"], ["b", "a"]])
    with pytest.raises(CycleError):
        check_one_order([["a", "b"], ["b", "c"], ["c", "a"]])
    assert check_one_order([["a", "messages 0 -> 1", "b", "a"], ["messages 0 -> 1", "a", "b", "a"]]) == 3


@pytest.mark.parametrize(
    "kind, plan",
    [(Run, plan_of(2, 2)), pytest.param(RunOnShards, plan_on_shards(1, 1), marks=pytest.mark.full)],
    ids=["replicas", "shards"],
)
def test_devices_that_free_memory_all_the_time_wait_for_what_is_enqueued_and_cost_no_bit(workers, kind, plan):
    """Each `cudaFree` waits for the device, beside which the peers' messages ask for memory."""
    run = kind(workers, plan)
    workers.each(gpu_calls.free_before_computing, on=run.members)
    run.check()
    assert min(workers.each(gpu_calls.frees, on=run.members)) >= 2 * (run.job.spec.steps - 1)


def test_a_stopped_rank_holds_nobody_up_once_the_others_are_told(workers):
    run = Run(workers, plan_of(2, 2))
    run.step()
    victim = workers.workers[3]
    victim.signal(signal.SIGSTOP)
    for worker in run.members:
        workers.workers[worker].call(gpu_calls.call, worker, "step", step_call(run))
    time.sleep(0.3)  # inside
    for worker in (0, 1, 2):
        workers.workers[worker].control(gpu_calls.ctl, "announce_generation", run.generation + 1, "worker 3 does not answer")
    failed = [workers.workers[worker].result() for worker in (0, 1, 2)]
    assert all(answer[0] == "aborted" for answer in failed), failed
    run.recover([0, 1, 2], plan_of(2, 1))
    run.check()
    victim.signal(signal.SIGKILL)
    workers.replace(3)


def test_who_hangs_inside_nccl_while_it_connects_is_left_behind(workers):
    """The others are told, and connect again without it."""
    run = Run(workers, plan_of(2, 2))
    run.step()
    workers.each(gpu_calls.fault, Setting.INIT_HANGS, 1, on=[3])
    stands = run.ask("report_status", run.generation + 1)
    parts, _ = run.parts(plan_of(2, 2), run.members, stands)
    addresses = [run.addresses[worker] for worker in run.members]
    for worker in run.members:
        workers.workers[worker].call(gpu_calls.adopt, worker, run.generation + 1, parts, addresses, 60.0)
    time.sleep(0.5)  # inside
    run.generation += 1
    for worker in (0, 1, 2):
        workers.workers[worker].control(gpu_calls.ctl, "announce_generation", run.generation + 1, "worker 3 does not answer")
    failed = [workers.workers[worker].result() for worker in (0, 1, 2)]
    assert all(answer[0] == "aborted" for answer in failed), failed
    ways, seconds = run.recover([0, 1, 2], plan_of(2, 1))
    assert not ways and seconds < LIMIT_S
    run.check(left_inside=1)
    workers.workers[3].signal(signal.SIGKILL)
    workers.replace(3)


@pytest.fixture
def fresh():
    """A process that has loaded no library yet."""
    made = Workers(1)
    yield made
    made.end()


@pytest.mark.parametrize(
    "there, said, cure",
    [
        ({"version": 21700}, "NCCL 2.17.0", "newer PyTorch"),
        ({}, "was built without CUDA", "install a CUDA build of PyTorch"),
        ({"torch_cuda": 13}, "wants GPU 0 and sees 0", "nvidia-smi"),
        ({"torch_cuda": 12}, "PyTorch is for CUDA 12, CuPy", "pip install 'raypar[cuda12]'"),
        ({"cupy": False}, "needs CuPy, which cannot be imported", "pip install 'raypar[cuda1"),
        ({"environment": {"NCCL_COMM_BLOCKING": "0"}}, "which CuPy does not understand", "unset NCCL_COMM_BLOCKING"),
    ],
    ids=["old NCCL", "no CUDA", "no GPU", "other CUDA", "no CuPy", "setting"],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_worker_that_cannot_use_a_gpu_says_why_when_it_is_asked_to_start(fresh, there, said, cure):
    (answer,) = fresh.each(gpu_calls.start_without, next(runs), pickle.dumps(SPEC), there, on=[0], timeout_s=60.0)
    kind, name, text = answer
    assert (kind, name) == ("error", "ClusterError") and said in text and cure in text, text


def test_two_workers_on_one_gpu_are_refused_before_anything_is_built(workers):
    addresses = workers.each(gpu_calls.start, next(runs), pickle.dumps(SPEC), "the only one", on=[0, 1], timeout_s=60.0)
    run = Run.__new__(Run)
    run.workers, run.generation, run.done = workers, 0, 0
    parts, _ = run.parts(plan_of(2), [0, 1])
    for kind, name, text in workers.each(gpu_calls.adopt, 1, parts, addresses, LIMIT_S, on=[0, 1], timeout_s=2 * LIMIT_S):
        assert (kind, name) == ("error", "ClusterError")
        assert "ranks [0, 1] are on one device, the only one" in text and "NCCL_HOSTID" in text


def test_communicators_that_are_never_made_end_in_an_error_that_names_one(workers):
    addresses = workers.each(gpu_calls.start, next(runs), pickle.dumps(SPEC), on=[0, 1], timeout_s=60.0)
    workers.each(gpu_calls.fault, Setting.INIT_HANGS, 1, on=[0, 1])
    run = Run.__new__(Run)
    run.workers, run.generation, run.done = workers, 0, 0
    parts, _ = run.parts(plan_of(1, 1), [0, 1])
    answers = workers.each(gpu_calls.adopt, 1, parts, addresses, 2.0, on=[0, 1], timeout_s=LIMIT_S)
    for index in (0, 1):
        workers.replace(index)
    assert "CommTimeout" in {name for _, name, _ in answers}
    for kind, _, text in answers:
        assert kind == "aborted"
        assert "could not make the NCCL communicator for messages 0 -> 1 within" in text and "NCCL_SOCKET_IFNAME" in text


def test_a_process_that_nccl_does_not_let_go_of_ends(workers):
    """Its driver hears of it at once, and goes on with the others."""
    run = Run(workers, plan_of(2, 2))
    run.step()
    workers.each(gpu_calls.fault, Setting.ABORT_TAKES_MS, 60_000, on=[3])
    workers.each(gpu_calls.patience, 0.5, on=[3])
    start = time.monotonic()
    with pytest.raises((EOFError, TimeoutError)):
        workers.workers[3].control(gpu_calls.ctl, "announce_generation", run.generation + 1, "a test", timeout_s=LIMIT_S)
    assert time.monotonic() - start < LIMIT_S
    workers.workers[3].process.join(5.0)
    assert workers.workers[3].process.exitcode == 1
    workers.replace(3)
    run.recover([0, 1, 2], plan_of(2, 1))
    run.check()


def test_a_process_that_nccl_does_not_let_go_of_while_it_moves_to_another_plan_ends(monkeypatch):
    """The former transport is closed before the worker connects. Its next generation would find its GPU busy."""
    order = pickle.dumps(AdoptPlanCommand(None, {0: 0}, 0, (), run_begins=True))
    worker = WorkerActor.__new__(WorkerActor)
    worker.coordinate, worker.working_dir, worker.torch_guard = "worker 0", SimpleNamespace(keep=lambda: None), None
    worker.endpoint, worker.calls = SimpleNamespace(unended_communicators=()), {}

    def adopt(generation, made_and_connect):
        worker.endpoint.unended_communicators = ("messages 0 -> 1",)
        _, connect = made_and_connect
        yield connect()

    worker.generation_guard = SimpleNamespace(enter_generation=lambda generation, reason: None, adopt=adopt)

    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    worker.adopt(2, order, "rank 0", ["here"], LIMIT_S)
    assert set(ended) == {1}


def test_survivors_whose_aborts_are_all_slow_wait_for_nccl_and_keep_their_state(workers):
    """Who exits holds state; all would exit together, because an abort is slow on all workers of a group."""
    run = Run(workers, plan_of(2, 2))
    run.step()
    survivors = [0, 1, 2]
    workers.workers[3].signal(signal.SIGKILL)
    workers.each(gpu_calls.slow_to_end, 0.2, on=survivors)
    workers.each(gpu_calls.fault, Setting.ABORT_TAKES_MS, 1500, on=survivors)
    before = [workers.workers[index].process.pid for index in survivors]
    run.recover(survivors, plan_of(2, 1))
    workers.each(gpu_calls.fault, Setting.ABORT_TAKES_MS, 0, on=survivors)
    workers.each(gpu_calls.slow_to_end, 5.0, on=survivors)
    assert [workers.workers[index].process.pid for index in survivors] == before
    run.check()
    workers.replace(3)
