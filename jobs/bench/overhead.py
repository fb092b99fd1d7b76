"""What do metrics, tracing and a long run cost, and how many workers can one driver serve?

`python jobs/bench/overhead.py [--parts paired memory driver fake] [--page FILE] [--json]`

- paired: one run of 2 stages x 2 replicas, whose steps come in blocks: metrics published four times a second (a run does
  it every two) and every instruction traced, then neither, in turn. Ratios are of neighbouring blocks, alike in mood.
- memory: 10,000 steps of next to nothing on two workers: resident memory of driver and workers, sizes of files.
- driver: 8 workers whose layers sleep, 20 steps a second: the driver's processor time.
- fake: the driver's own loop, with its recorder, files and metrics, in this process, without Ray: workers that answer every
  call at once. Steps for each second of processor time with 8 to 1,024 workers, and what the slope up to 64 says of 1,024.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from harness import BenchError, environment, page, ratio, table
from ours import sleeping_job

from raypar.actors import answer_batch, driver_actor, driver_client, metrics_publisher, run_state_in_ray_kv
from raypar.actors.driver_actor import DriverActor
from raypar.actors.messages import StepCall, WorkerHello
from raypar.comm.tcp.handshake import RunCredential
from raypar.elastic import events as on
from raypar.elastic.phases import Phase
from raypar.job import CheckpointConfig, Job
from raypar.launch.choose_plan import choose_plan
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.launch_run import launch_run
from raypar.launch.make_run_request import make_run_request
from raypar.plan import ParallelPlan
from raypar.record.events import Event, StepRecord
from raypar.storage.run_folder import RunFolder
from raypar.user_code.user_code_errors import make_importable
from raypar.worker.job_preflight import preflight

PAIRED_LIMIT, BYTES_LIMIT, DRIVER_LIMIT, STEPS_LIMIT = 0.02, 1024.0, 0.12, 200.0
"""The limits: share of a step, bytes a step, share of a processor, steps a second with 64 workers."""
BLOCK, ROUNDS, OFTEN_S = 24, 60, 0.25
LONG_STEPS, WARM_STEPS, EVERY = 10_000, 2_000, 200
RATE, RATE_SECONDS = 20, 40
FAKE_WORKERS = {8: 1000, 16: 600, 32: 400, 64: 400, 128: 200, 256: 100, 1024: 40}
"""Workers -> steps."""
PARTS = ("paired", "memory", "driver", "fake")


class BlockDriver(DriverActor):
    """The driver; in every other block of steps metrics and tracing are off."""

    def _set_up(self, request: Any, credential: Any) -> None:
        metrics_publisher.PUBLISH_S = OFTEN_S
        traced = frozenset(step for step in range(request.policy.job_steps) if step // BLOCK % 2 == 0)
        DriverActor._set_up(self, replace(request, traced_steps=traced), credential)
        recorder = self.parts.recorder
        add, publish, steps = recorder.telemetry.add_step, recorder.publish_metrics, [0]

        def counted(line: Any, *rest: Any) -> None:
            steps[0] = line["step"]
            if line["step"] - 1 in traced:
                add(line, *rest)

        recorder.telemetry.add_step = counted
        recorder.publish_metrics = lambda counts: publish(counts) if steps[0] in traced else None


@dataclass
class Watch:
    """Looks at the processes of a run now and then, from the events of its client."""

    folder: Path
    every: int
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Process -> (step, resident bytes)."""
    driver: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, time, processor seconds) of the driver."""

    def __call__(self, event: Event) -> None:
        if not isinstance(event, StepRecord) or event.step % self.every:
            return
        told = json.loads((self.folder / "members.json").read_text())
        pids = {"driver": told["driver_pid"]} | {f"worker {one['worker']}": one["pid"] for one in told["members"]}
        for name, pid in pids.items():
            if not psutil.pid_exists(pid):  # of the last step a client may hear when the run has ended
                continue
            process = psutil.Process(pid)
            self.memory.setdefault(name, []).append((event.step, process.memory_info().rss))
            if name == "driver":
                times = process.cpu_times()
                self.driver.append((event.step, time.monotonic(), times.user + times.system))


def train(spec: Job, plan: ParallelPlan, watch: Callable[[Path], Callable[[Any], None]], driver: Any = DriverActor) -> Path:
    """Train on a Ray of its own; returns the run folder, in a new folder that the caller removes (`removed`)."""
    driver_client.DriverActor = driver
    place = RunFolder.create(tempfile.mkdtemp(prefix="rp-"), "overhead")
    options = LaunchOptions(spec.replace(checkpoint=CheckpointConfig(at_end=False)), lambda chosen: place)
    tell = watch(place.path)
    result = launch_run(lambda checked: chosen_of(spec, checked, plan), options, tell)
    if result.error is not None:
        raise result.error
    return place.path


def removed(folder: Path) -> None:
    """Remove a run folder and the new folder that it is in."""
    shutil.rmtree(folder.parent, ignore_errors=True)


def chosen_of(spec: Job, checked: Any, plan: ParallelPlan) -> Any:
    return choose_plan(spec, checked, lambda layers: plan, "1f1b", plan.world)


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Bytes a step, by least squares."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    mean = statistics.fmean(xs)
    return sum((x - mean) * y for x, y in zip(xs, ys, strict=True)) / sum((x - mean) ** 2 for x in xs)


# -- the parts -----------------------------------------------------------------------------------------------------------


def paired() -> dict[str, Any]:
    """Step time with metrics and tracing over step time without."""
    steps = BLOCK * 2 * ROUNDS
    spec = sleeping_job([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], 8, 8).replace(steps=steps)
    folder = train(spec, ParallelPlan.mesh(dp=2, pp=2, layers=2), lambda path: lambda event: None, BlockDriver)
    seconds = [json.loads(line)["seconds"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    removed(folder)
    # The fastest fifth of a block: what else runs on the machine makes steps slower, never faster. Without the warm-up.
    blocks = [statistics.quantiles(seconds[at + 4 : at + BLOCK], n=5)[0] for at in range(0, steps, BLOCK)][2:]
    found = ratio(blocks[1::2], blocks[::2])
    cost = 1 / found.median - 1
    return {
        "step_ms": 1000 * statistics.median(blocks[1::2]),
        "cost": cost,
        "least": 1 / found.upper - 1,
        "most": 1 / found.lower - 1,
        "pairs": found.pairs,
        "good": cost <= PAIRED_LIMIT,
    }


def memory() -> dict[str, Any]:
    """Growth of processes and files over many steps."""
    spec = sleeping_job([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 4, 4).replace(steps=LONG_STEPS)
    watches: list[Watch] = []

    def watch(path: Path) -> Watch:
        watches.append(Watch(path, EVERY))
        return watches[0]

    start = time.monotonic()
    folder = train(spec, ParallelPlan.mesh(pp=2, layers=2), watch)
    seconds = time.monotonic() - start
    grown = {name: slope([p for p in points if p[0] >= WARM_STEPS]) for name, points in watches[0].memory.items()}
    last = {name: points[-1][1] for name, points in watches[0].memory.items()}
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    removed(folder)
    return {"steps": LONG_STEPS, "seconds": seconds, "bytes_a_step": grown, "rss": last, "files": files,
            "good": max(grown.values()) <= BYTES_LIMIT}  # fmt: skip


def driver() -> dict[str, Any]:
    """Processor time of the driver of 8 workers."""
    half_ms = 1000 / RATE / 2 - 6.5  # with 8 workers on two processors the rest of a step takes some 13 ms
    spec = sleeping_job([half_ms], [half_ms], [0.0], 8, 8).replace(steps=RATE * RATE_SECONDS)
    watches: list[Watch] = []

    def watch(path: Path) -> Watch:
        watches.append(Watch(path, RATE))
        return watches[0]

    removed(train(spec, ParallelPlan.mesh(dp=8, layers=1), watch))
    (first, from_s, before), (last, to_s, after) = watches[0].driver[4], watches[0].driver[-1]
    share = (after - before) / (to_s - from_s)
    rate = (last - first) / (to_s - from_s)
    return {
        "steps_per_s": rate,
        "share": share,
        "ms_a_step": 1000 * (after - before) / (last - first),
        "good": share <= DRIVER_LIMIT,
    }


# -- a driver without Ray ------------------------------------------------------------------------------------------------


class Answered:
    """What a call of a fake worker returns: awaited by the driver, or as a future."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self.answer

    @staticmethod
    def wait(refs: Sequence[Any], num_returns: int, timeout: float) -> tuple[Sequence[Any], Sequence[Any]]:
        """As `ray.wait`."""
        return refs, ()

    @staticmethod
    def get(refs: Sequence[Any]) -> list[Any]:
        """As `ray.get`."""
        return [ref.answer for ref in refs]

    def future(self) -> concurrent.futures.Future[Any]:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_result(self.answer)
        return done


class FakeWorker:
    """Has done every step before it is asked."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step = SimpleNamespace(remote=self._step)
        self.ping = SimpleNamespace(remote=lambda: Answered((0, "", False, 0.0, False)))
        self.activity = SimpleNamespace(remote=lambda: Answered("nothing"))

    def _step(self, call: bytes) -> Answered:
        step = StepCall.from_bytes(call).step
        sampled = step % 400 == 0
        sent = {"send": {"sent": 100 * step, "received": 100 * step, "messages": step}}
        report = {
            "rank": self.rank, "step": step, "loss": 1.0 / (step + 1), "count": 8.0, "norm": 1.0, "skipped": False,
            "seconds": 0.004, "busy_seconds": 0.003, "started_ns": 0, "spans": [], "ledger": sent if sampled else {},
            "memory": {"rss": 1 << 28} if sampled else {}, "peak_rss_bytes": 1 << 28, "mirror_seconds": 0.0, "digest": None,
            "warnings": (),
        }  # fmt: skip
        return Answered(report)


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


class FakeMetric:
    """Takes what Ray's metrics take."""

    def _record(self, value: float, tags: dict[str, str]) -> None:
        return None

    set = inc = observe = _record


def fake_driver(workers: int, steps: int, folder: Path) -> DriverActor:
    """A driver with so many fake workers, ready to run."""
    from raypar.actors import metrics_publisher
    from raypar.telemetry.metric_definitions import METRIC_DEFINITIONS

    metrics_publisher.make_ray_metrics = lambda: {metric.name: FakeMetric() for metric in METRIC_DEFINITIONS}
    store_in_memory()
    answer_batch.ray = Answered
    driver_actor.ray.get_runtime_context = lambda: SimpleNamespace(was_current_actor_reconstructed=False, current_actor=None)
    spec = sleeping_job([0.0], [0.0], [0.0], workers, workers).replace(steps=steps)
    plan = ParallelPlan.mesh(dp=workers, layers=1)
    checked = preflight(spec)
    place = RunFolder.create(folder, f"fake-{workers}")
    options = LaunchOptions(spec.replace(checkpoint=CheckpointConfig(at_end=False)), lambda chosen: place)
    request = make_run_request(checked, chosen_of(spec, checked, plan), options)(place, None)
    made = DriverActor("fake")
    made.journal.erase()
    made._set_up(request, RunCredential.fresh("fake"))
    parts = made.parts
    for rank in range(workers):
        parts.pool.workers[rank] = FakeWorker(rank)
        parts.pool.groups[rank] = SimpleNamespace(id=rank)  # type: ignore[assignment]
        parts.registry.hellos[rank] = WorkerHello(f"fake:{rank}", "node", rank, {}, "fake")
    parts.registry._look_at_nodes = _nothing  # type: ignore[method-assign]
    parts.recorder.start_callbacks()
    parts.recorder.note_generation(plan, ["node"] * workers)

    async def over(teardown: Any, step_calls: int) -> None:
        if teardown.error is not None:
            print(f"the fake run failed: {teardown.error}", file=sys.stderr)

    made.shutdown.end_run = over  # type: ignore[method-assign]
    return made


async def _nothing() -> None:
    return None


async def steps_per_second(workers: int, steps: int, folder: Path) -> float:
    """Steps for each second of processor time, all threads of this process together, after a tenth of the steps.

    Not seconds: this process waits for nothing, and others of the machine would be measured with it.
    """
    made = fake_driver(workers, steps, folder)
    made.queue.put_nowait(on.WorkersReady())
    running, begun = asyncio.ensure_future(made._run()), [0, 0.0]
    while made.parts.machine.phase is not Phase.OVER:
        await asyncio.sleep(0.005)
        made.feed._kept.clear()  # as a client that polls
        if not begun[0] and made.parts.machine.progress.emitted >= steps // 10:
            begun = [made.parts.machine.progress.emitted, time.process_time()]
    await running
    await made.parts.side_effects.awaited(lambda: None)
    used_s = time.process_time() - begun[1]
    written = made.parts.recorder.metrics.path.read_text().count("\n")
    if written != steps:
        raise BenchError(f"{written} of {steps} steps were written")
    return (steps - begun[0]) / used_s


def fake() -> dict[str, Any]:
    """Steps a second by number of workers, and the slope up to 64 workers."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        for workers, steps in FAKE_WORKERS.items():
            found[workers] = asyncio.run(steps_per_second(workers, steps, Path(folder) / str(workers)))
    per_worker_s = (1 / found[64] - 1 / found[8]) / (64 - 8)
    base_s = 1 / found[8] - 8 * per_worker_s
    return {
        "steps_per_s": found,
        "us_a_worker": 1e6 * per_worker_s,
        "us_a_step": 1e6 * base_s,
        "predicted_1024": 1 / (base_s + 1024 * per_worker_s),
        "good": found[64] >= STEPS_LIMIT,
    }


# -- the page --------------------------------------------------------------------------------------------------------------


def describe(found: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    parts = []
    if "paired" in found:
        one = found["paired"]
        parts.append(
            f"**Metrics and tracing**: a step of {one['step_ms']:.1f} ms takes {100 * one['cost']:+.2f} % with them "
            f"({100 * one['least']:+.2f} to {100 * one['most']:+.2f} %, 95 % interval of {one['pairs']} pairs of blocks of "
            f"{BLOCK} steps); wanted: {100 * PAIRED_LIMIT:.0f} %. 2 stages x 2 replicas, 8 microbatches, layers that sleep."
        )
    if "memory" in found:
        one = found["memory"]
        rows = [[name, f"{grown:+,.0f}", f"{one['rss'][name] / 2**20:.0f}"] for name, grown in one["bytes_a_step"].items()]
        files = ", ".join(f"{name} {size:,}" for name, size in one["files"].items())
        parts.append(
            f"**Memory over {one['steps']:,} tiny steps** ({one['seconds']:.0f} s with the start; from step {WARM_STEPS:,} on; "
            f"wanted: {BYTES_LIMIT:.0f} bytes a step)\n\n"
            + table(["process", "bytes a step", "MiB at the end"], rows)
            + f"\n\nFiles at the end, in bytes: {files}."
        )
    if "driver" in found:
        one = found["driver"]
        parts.append(
            f"**The driver of 8 workers** at {one['steps_per_s']:.1f} steps/s uses {100 * one['share']:.1f} % of a processor, "
            f"{one['ms_a_step']:.2f} ms a step; wanted: {100 * DRIVER_LIMIT:.0f} %."
        )
    if "fake" in found:
        one = found["fake"]
        rows = [[str(workers), f"{rate:.0f}"] for workers, rate in one["steps_per_s"].items()]
        parts.append(
            "**One driver, workers that answer at once** (its own loop, files and metrics; no Ray, whose calls cost more)\n\n"
            + table(["workers", f"steps for a second of processor time (wanted: {STEPS_LIMIT:.0f} with 64)"], rows)
            + f"\n\n{one['us_a_step']:.0f} us a step and {one['us_a_worker']:.1f} us a worker and step: "
            f"{one['predicted_1024']:.0f} steps with 1,024 workers, by the slope from 8 to 64."
        )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    given = parser.parse_args()
    make_importable(Path(__file__).parent)
    torch.set_num_threads(1)
    measure = {"paired": paired, "memory": memory, "driver": driver, "fake": fake}
    found = {part: measure[part]() for part in PARTS if part in given.parts}
    text = describe(found)
    print(json.dumps({"environment": environment(), **found}) if given.json else text)
    if given.page:
        command = "python jobs/bench/overhead.py" + (
            " --parts " + " ".join(given.parts) if set(given.parts) != {*PARTS} else ""
        )
        given.page.write_text(
            page("What do metrics, tracing and long runs cost, and how many workers can a driver serve?", command, text)
        )
    sys.exit(0 if all(one["good"] for one in found.values()) else 1)


if __name__ == "__main__":
    main()
