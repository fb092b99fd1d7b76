"""What many workers cost their driver, as a share of a processor at steps of one second. Part of `control.py`.

The driver's own loop, with its recorder, files and metrics, runs in this process without Ray; its workers answer pings at once
and every step after a second. What Ray takes for its calls is measured with a few real actors, and multiplied by the calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from harness import BenchError
from ours import sleeping_job

from raypar.actors import (
    answer_batch,
    driver_actor,
    metrics_publisher,
    node_agents,
    run_state_in_ray_kv,
)
from raypar.actors.driver_actor import DriverActor
from raypar.actors.messages import GatheredAnswers, RunRequest, StepCall, WorkerHello
from raypar.actors.ray_connection import connect_ray
from raypar.comm.tcp.handshake import RunCredential
from raypar.elastic import events as on
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.phases import Phase
from raypar.job import CheckpointConfig
from raypar.launch.choose_plan import choose_plan
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.make_run_request import contract_fields, make_run_request
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.schedule import registry
from raypar.schedule.program_assignment import ProgramAssignment, assign_programs_to_ranks
from raypar.storage.run_folder import RunFolder
from raypar.telemetry.metric_definitions import METRIC_DEFINITIONS
from raypar.worker.job_preflight import preflight

WORKERS = (64, 256, 1024)
WANTED_SHARE, OF_WORKERS, SLOPE_TO = 0.05, 1024, 10_000
STAGES = PER_NODE = 8
MOST_DIRECT = node_agents.MOST_DIRECT
STEP_S, STEPS, WARM_STEPS = 1.0, 13, 3
LOOK_S = 0.1
RAY_ACTORS, RAY_CALLS, RAY_ROUNDS, MANY_REPORTS = 4, 64, 20, 256


@dataclass(frozen=True)
class RayCost:
    """Microseconds that Ray takes of the driver's processor."""

    direct: float
    """For one call of many that are made together, and its answer."""
    by_agent: float
    """For one call of an agent, and an answer with one report."""
    report: float
    """For each further report in an answer."""

    def share(self, workers: int, by_agents: bool, calls: float) -> float:
        """Share of a processor for so many calls a second."""
        if not by_agents:
            return calls * self.direct / 1e6
        return (calls * self.by_agent + max(0.0, workers - calls) * self.report) / 1e6


@dataclass(frozen=True)
class DriverCost:
    """What so many workers cost the driver at steps of one second: shares of a processor."""

    workers: int
    by_agents: bool
    """Whether it calls them by way of agents."""
    own: float
    """Its own code."""
    calls: float
    """Calls of actors a second: of steps and pings."""
    ray: float
    """What Ray takes for them."""

    @property
    def share(self) -> float:
        """All of it."""
        return self.own + self.ray


class Answered:
    """What a call of a fake worker returns: as `ray.wait`, `ray.get`, asyncio and threads see it."""

    def __init__(self, answer: Future[Any]) -> None:
        self.answer = answer

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.answer).__await__()

    def future(self) -> Future[Any]:
        return self.answer

    @staticmethod
    def wait(refs: Sequence[Any], num_returns: int, timeout: float) -> tuple[Sequence[Any], Sequence[Any]]:
        concurrent.futures.wait([ref.answer for ref in refs], timeout)
        return [ref for ref in refs if ref.answer.done()], [ref for ref in refs if not ref.answer.done()]

    @staticmethod
    def get(refs: Any) -> Any:
        return [ref.answer.result() for ref in refs] if isinstance(refs, list) else refs.answer.result()


PING = (0, "in step 1", False, 0.0, None)


def at_once(answer: Any) -> Answered:
    """A call that is answered already."""
    done: Future[Any] = Future()
    done.set_result(answer)
    return Answered(done)


class FakeWorkers:
    """All workers of a run, and agents. They do one step after the other, each in `STEP_S`, and calls are counted."""

    def __init__(self, count: int) -> None:
        self.count, self.calls = count, 0
        self.used_s = 0.0
        """Processor time that went into making reports: in a real run into unpickling them, which is counted with Ray's."""
        self._asked: dict[int, list[tuple[Sequence[int], bool, Future[Any]]]] = {}
        self._begun: set[int] = set()
        self.workers = [self._worker(rank) for rank in range(count)]

    def _worker(self, rank: int) -> Any:
        return SimpleNamespace(
            step=SimpleNamespace(remote=lambda call: self._step(call, [rank], gathered=False)),
            ping=SimpleNamespace(remote=lambda: self._counted(PING)),
            activity=SimpleNamespace(remote=lambda: at_once("nothing")),
            announce_generation=SimpleNamespace(remote=lambda generation, reason: at_once(None)),
            report_status=SimpleNamespace(remote=lambda generation: at_once(WorkerStatus(rank))),
            adopt=SimpleNamespace(remote=lambda *given: at_once(None)),
        )

    def agent(self, node: str) -> Any:
        """An agent, who hands back the answers of all workers on a route together."""
        return SimpleNamespace(
            meet=SimpleNamespace(remote=lambda workers, agents: at_once(None)),
            step=SimpleNamespace(remote=lambda call, part, within_s: self._step(call, [*part], gathered=True)),
            ping=SimpleNamespace(remote=lambda part, within_s: self._counted(GatheredAnswers(dict.fromkeys(part, PING)))),
        )

    def _counted(self, answer: Any) -> Answered:
        self.calls += 1
        return at_once(answer)

    def _step(self, call: bytes, ranks: Sequence[int], gathered: bool) -> Answered:
        self.calls += 1
        step, answer = StepCall.from_bytes(call).step, Future[Any]()
        self._asked.setdefault(step, []).append((ranks, gathered, answer))
        if step == min(self._asked):
            self._begin_if_all_are_asked(step)
        return Answered(answer)

    def _begin_if_all_are_asked(self, step: int) -> None:
        if step not in self._begun and sum(len(ranks) for ranks, _, _ in self._asked.get(step, ())) == self.count:
            self._begun.add(step)
            timer = threading.Timer(STEP_S, self._end, [step])
            timer.daemon = True
            timer.start()

    def _end(self, step: int) -> None:
        start_s = time.thread_time()
        asked = [
            (gathered, answer, {rank: report(rank, step) for rank in ranks})
            for ranks, gathered, answer in self._asked.pop(step)
        ]
        self.used_s += time.thread_time() - start_s
        for gathered, answer, reports in asked:
            answer.set_result(GatheredAnswers(reports) if gathered else next(iter(reports.values())))
        self._begin_if_all_are_asked(step + 1)


def report(rank: int, step: int) -> dict[str, Any]:
    """What a worker says of a step that was not traced; its times and memory are its own."""
    own = 1 + rank * 1e-6
    return {
        "rank": rank, "step": step, "loss": 1.0 / (step + 1), "count": 8.0, "norm": 1.0, "skipped": False, "lr": 0.1,
        "seconds": own * STEP_S, "busy_seconds": 0.9 * own * STEP_S, "read_seconds": 1e-4 * own, "started_ns": rank << 20,
        "spans": [], "ledger": {}, "memory": {}, "peak_rss_bytes": (1 << 28) + rank, "mirror_seconds": 0.0,
        "digest": None, "streams": None, "warnings": (),
    }  # fmt: skip


class FakeMetric:
    """Takes what Ray's metrics take."""

    def _record(self, value: float, tags: dict[str, str]) -> None:
        return None

    set = inc = observe = _record


def store_in_memory() -> None:
    """Let journals keep their keys in this process, in place of Ray's key-value store."""
    kept: dict[str, bytes] = {}

    def put(key: str, value: bytes, overwrite: bool = True) -> bool:
        there = key in kept
        if overwrite or not there:
            kept[key] = value
        return there

    def delete(key: str, prefix: bool = False) -> None:
        for one in [one for one in kept if one == key or (prefix and one.startswith(key))]:
            del kept[one]

    run_state_in_ray_kv.kv_put = put
    run_state_in_ray_kv.kv_get = kept.get
    run_state_in_ray_kv.kv_delete = delete
    run_state_in_ray_kv.kv_list = lambda prefix: [key.encode() for key in kept if key.startswith(prefix)]


async def _nothing() -> None:
    return None


def request_of(count: int, steps: int, folder: Path) -> tuple[RunRequest, tuple[ProgramAssignment, ...]]:
    """The request of a run of so many workers in `STAGES` stages, and its assignments, which are not pickled for each."""
    first, plan = (ParallelPlan.mesh(pp=STAGES, dp=replicas, layers=STAGES) for replicas in (1, count // STAGES))
    spec = sleeping_job(*[[0.0] * STAGES] * 3, plan.stages[0].replicas, plan.stages[0].replicas).replace(steps=steps)
    checked = preflight(spec)
    place = RunFolder.create(folder, f"fake-{count}")
    options = LaunchOptions(spec.replace(checkpoint=CheckpointConfig(at_end=False)), lambda chosen: place)
    chosen = choose_plan(spec, checked, lambda layers: first, "1f1b", first.world)
    request = make_run_request(checked, chosen, options, contract_fields(options))(place, None)
    order = registry.build_schedule("1f1b", MicrobatchRouting(plan, spec.batching))
    lowered = assign_programs_to_ranks(order, plan, request.crossing, spec.batching)
    return replace(request, plan=plan, policy=replace(request.policy, workers=count), assignments=b""), lowered


def fake_driver(fakes: FakeWorkers, steps: int, folder: Path) -> DriverActor:
    """A driver of these workers, ready to run."""
    count = len(fakes.workers)
    metrics_publisher.make_ray_metrics = lambda: {metric.name: FakeMetric() for metric in METRIC_DEFINITIONS}
    store_in_memory()
    answer_batch.ray = Answered
    driver_actor.ray = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(was_current_actor_reconstructed=False, current_actor=None)
    )
    request, lowered = request_of(count, steps, folder)
    made = DriverActor("fake")
    made.journal.erase()
    made._set_up(request, RunCredential.fresh("fake"))
    made.plans._assignments[request.plan] = lowered
    for rank, worker in enumerate(fakes.workers):
        node = f"node{rank // PER_NODE}"
        made.pool.workers[rank] = worker
        made.pool.groups[rank] = SimpleNamespace(id=rank)  # type: ignore[assignment]
        made.registry.add_started_worker(rank, WorkerHello(f"{node}:{rank}", node, rank, {}))
    made.registry._look_at_nodes = _nothing  # type: ignore[method-assign]
    made.recorder.start_callbacks()
    made.recorder.note_generation(request.plan, [f"node{rank // PER_NODE}" for rank in range(count)])

    async def over(teardown: Any, step_calls: int) -> None:
        if teardown.error is not None:
            print(f"the fake run failed: {teardown.error}", file=sys.stderr)

    made.shutdown.end_run = over  # type: ignore[method-assign]
    return made


async def own_costs(workers: int, by_agents: bool, folder: Path) -> tuple[float, float]:
    """(Seconds a step, calls of actors a step) of the driver of so many fake workers, with all that it does beside steps.

    Seconds are of this process's processor time, of all threads: on a busy machine steps are late, and cost what they cost.
    """
    fakes = FakeWorkers(workers)
    node_agents.MOST_DIRECT = 0 if by_agents else workers
    node_agents.start_node_agent, node_agents.kill_actor = fakes.agent, lambda agent, no_restart: None
    made = fake_driver(fakes, STEPS, folder)
    registry = made.registry
    for _ in range(2):  # agents start, and get to know their workers
        registry.agents.update(made.pool.workers, registry.node_of_worker)
        await asyncio.sleep(0.1)
    made.queue.put_nowait(on.FirstWorkersPlaced(made.request.plan, tuple(range(workers))))
    made.queue.put_nowait(on.WorkersReady())
    running, begun, ended = asyncio.ensure_future(made._run()), None, None
    while made.machine.phase is not Phase.OVER:
        await asyncio.sleep(LOOK_S)
        made.feed._kept.clear()  # as a client that polls
        now = (made.machine.progress.emitted, time.process_time() - fakes.used_s, fakes.calls)
        begun = now if begun is None and now[0] >= WARM_STEPS else begun
        ended = now if ended is None and now[0] >= STEPS - 1 else ended
    await running
    await made.side_effects.awaited(lambda: None)
    written = made.recorder.metrics.path.read_text().count("\n")
    if written != STEPS or begun is None or ended is None:
        raise BenchError(f"{written} of {STEPS} steps were written")
    done, used_s, calls = (after - before for before, after in zip(begun, ended, strict=True))
    return used_s / done, calls / done


class RayWorker:
    """A real actor, called as workers and agents are."""

    def step(self, call: bytes, reports: int) -> Any:
        if reports == 1:
            return report(0, 1)
        return GatheredAnswers({rank: pickle.loads(pickle.dumps(report(rank, 1))) for rank in range(reports)})  # as they come


class RayCaller:
    """A real actor with an event loop, as the driver is; calls others and says what that takes of its processor time."""

    async def us_a_call(self, workers: Sequence[Any], reports: int, by_agents: bool) -> float:
        """Microseconds of all its threads a call, answer and all; calls are made and awaited as the driver does: many workers'
        directly, or one of each of a few agents."""
        call, thread = StepCall(1, 1, False, False).to_bytes(), ThreadPoolExecutor(1)
        calls = len(workers) if by_agents else RAY_CALLS
        for number in range(RAY_ROUNDS + 1):
            if number == 1:  # the first is the warm-up
                start_s = time.process_time()
            refs = [workers[index % len(workers)].step.remote(call, reports) for index in range(calls)]
            if by_agents:
                await asyncio.gather(*(asyncio.wait_for(asyncio.wrap_future(ref.future()), 60.0) for ref in refs))
            else:
                await asyncio.get_running_loop().run_in_executor(thread, answer_batch.wait_for_answers, refs, 60.0)
        return 1e6 * (time.process_time() - start_s) / RAY_ROUNDS / calls


def ray_cost() -> RayCost:
    """What Ray takes of the driver's processor, measured with a few real actors."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    with connect_ray(None, RAY_ACTORS, Path(__file__).parents[2]):
        actor: Callable[..., Any] = ray.remote(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": path}})
        workers = [actor(RayWorker).remote() for _ in range(RAY_ACTORS)]
        caller = actor(RayCaller).remote()
        ways = ((1, False), (1, True), (MANY_REPORTS, True))
        direct, one, many = (ray.get(caller.us_a_call.remote(workers, *way), timeout=300.0) for way in ways)
    return RayCost(direct, one, (many - one) / (MANY_REPORTS - 1))


def measure() -> tuple[RayCost, list[DriverCost]]:
    """What Ray takes, and the costs of all `WORKERS`, called directly and by way of agents."""
    cost, found = ray_cost(), []
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        for by_agents in (False, True):
            for workers in WORKERS:
                place = Path(folder) / f"{workers}-{by_agents}"
                own, calls = asyncio.run(own_costs(workers, by_agents, place))
                found.append(DriverCost(workers, by_agents, own, calls, cost.share(workers, by_agents, calls)))
    return cost, found


def used(costs: Sequence[DriverCost]) -> dict[int, DriverCost]:
    """Workers -> the cost by the way that the driver takes."""
    return {one.workers: one for one in costs if one.by_agents == (one.workers > MOST_DIRECT)}


def header() -> list[str]:
    """Of `rows`."""
    return ["workers", "called", "calls a second", "own code, % of a processor", "Ray, %", "together, %"]


def rows(costs: Sequence[DriverCost]) -> list[list[str]]:
    """The table's."""
    return [
        [
            f"{one.workers:,}",
            "by way of agents" if one.by_agents else "directly",
            f"{one.calls:,.1f}",
            *(f"{100 * share:.1f}" for share in (one.own, one.ray, one.share)),
        ]
        for one in costs
    ]


def describe(ray_cost: RayCost, costs: Sequence[DriverCost]) -> str:
    """What was measured for the table, and the slope."""
    small, large = (used(costs)[workers] for workers in WORKERS[-2:])
    each = (large.share - small.share) / (large.workers - small.workers)
    most = large.share + (SLOPE_TO - large.workers) * each
    return (
        f"What workers cost their driver at steps of one second, {PER_NODE} workers a node. Its own code is measured with "
        f"fake workers, which answer together. Ray takes {ray_cost.direct:.0f} us of its processor time for a call of a "
        f"worker with its answer, {ray_cost.by_agent:.0f} us for one of an agent, {ray_cost.report:.1f} us for each further "
        f"report in it, measured with {RAY_ACTORS} actors and multiplied. "
        f"Wanted: {100 * WANTED_SHARE:.0f} % of a processor with {OF_WORKERS:,} workers. The driver calls more than "
        f"{MOST_DIRECT} workers by way of agents; {1e6 * each:.1f} us a second for each further worker: {100 * most:.0f} % "
        f"with {SLOPE_TO:,}."
    )


def holds(costs: Sequence[DriverCost]) -> bool:
    """Whether the driver needs as little as wanted."""
    return used(costs)[OF_WORKERS].share <= WANTED_SHARE
