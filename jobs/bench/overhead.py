"""What do metrics, tracing and a long run cost?

`python jobs/bench/overhead.py [--parts paired memory driver] [--page FILE] [--json]`

- paired: one run of 2 stages x 2 replicas, whose steps come in blocks: metrics published four times a second (a run does
  it every two) and every instruction traced, then neither, in turn. Ratios are of neighbouring blocks, alike in mood.
- memory: 10,000 steps of next to nothing on two workers: resident memory of driver and workers, sizes of files.
- driver: 8 workers whose layers sleep, 20 steps a second: the driver's processor time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from harness import environment, page, ratio, table
from ours import sleeping_job

from raypar.actors import driver_client, metrics_publisher
from raypar.actors.driver_actor import DriverActor
from raypar.job import CheckpointConfig, Job
from raypar.launch.choose_plan import choose_plan
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.launch_run import launch_run
from raypar.plan import ParallelPlan
from raypar.record.events import Event, StepRecord
from raypar.storage.run_folder import RunFolder
from raypar.user_code.user_code_errors import make_importable

PAIRED_LIMIT, BYTES_LIMIT, DRIVER_LIMIT = 0.02, 1024.0, 0.12
"""The limits: share of a step, bytes a step, share of a processor."""
BLOCK, ROUNDS, OFTEN_S = 24, 60, 0.25
LONG_STEPS, WARM_STEPS, EVERY = 10_000, 2_000, 200
RATE, RATE_SECONDS = 20, 40
PARTS = ("paired", "memory", "driver")


class BlockDriver(DriverActor):
    """The driver; in every other block of steps metrics and tracing are off."""

    def _set_up(self, request: Any, credential: Any) -> None:
        metrics_publisher.PUBLISH_S = OFTEN_S
        traced = frozenset(step for step in range(request.policy.job_steps) if step // BLOCK % 2 == 0)
        DriverActor._set_up(self, replace(request, traced_steps=traced), credential)
        recorder = self.recorder
        add, publish, steps = recorder.telemetry.add_step, recorder.publish_metrics, [0]

        def counted(line: Any, *rest: Any) -> None:
            steps[0] = line.step
            if line.step - 1 in traced:
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
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    given = parser.parse_args()
    make_importable(Path(__file__).parent)
    torch.set_num_threads(1)
    measure = {"paired": paired, "memory": memory, "driver": driver}
    found = {part: measure[part]() for part in PARTS if part in given.parts}
    text = describe(found)
    print(json.dumps({"environment": environment(), **found}) if given.json else text)
    if given.page:
        command = "python jobs/bench/overhead.py" + (
            " --parts " + " ".join(given.parts) if set(given.parts) != {*PARTS} else ""
        )
        given.page.write_text(page("What do metrics, tracing and long runs cost?", command, text))
    sys.exit(0 if all(one["good"] for one in found.values()) else 1)


if __name__ == "__main__":
    main()
