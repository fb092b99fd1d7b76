"""Simulated against real step time: stages sleep for random given times in real worker processes joined by real sockets.

`python jobs/bench/sleep.py [--json] [--page FILE] [--configurations 20] [--seed 7]`. The simulator is given the sleeping
times, the measured latency and bandwidth of the transport, and nothing of the runs it predicts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, Contender, environment, page, table, worker_command

from raypar.plan import Crossing, Microbatches, ParallelPlan, Routing
from raypar.planner.profile import LinkProfile
from raypar.schedule import registry
from raypar.schedule.simulate import Costs, simulate

MOST_WORKERS = 6
STEPS, REPEATS = 3, 4


@dataclass(frozen=True)
class Configuration:
    """One run. Times are lists over stages (chunks), in ms, of one microbatch."""

    schedule: str
    replicas: list[int]
    chunks: int
    microbatches: int
    blocks: int
    forward_ms: list[float]
    input_ms: list[float]
    weight_ms: list[float]

    @property
    def label(self) -> str:
        """For tables."""
        chunks = f" x{self.chunks}" if self.chunks > 1 else ""
        return f"{self.schedule}{chunks}, replicas {'-'.join(map(str, self.replicas))}, m={self.microbatches}"


def random_configuration(chance: random.Random) -> Configuration:
    """2 to 4 positions, 1 or 2 replicas each, at most `MOST_WORKERS` workers, 4 to 12 microbatches, 4 to 20 ms of forward."""
    schedule = chance.choice(("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"))
    replicas = [chance.choice((1, 1, 2)) for _ in range(chance.randint(2, 4))]
    while sum(replicas) > MOST_WORKERS:
        replicas[chance.randrange(len(replicas))] = 1
    chunks = registry.default_chunks(schedule)
    stages = len(replicas) * chunks
    microbatches = chance.randint(4, 12)
    forward, inputs, weights = ([round(chance.uniform(4, 20) / chunks, 2) for _ in range(stages)] for _ in range(3))
    return Configuration(schedule, replicas, chunks, microbatches, min(microbatches, 4), forward, inputs, weights)


FOUR_STAGES = Configuration("1f1b", [1, 1, 1, 1], 1, 8, 8, [10.0] * 4, [10.0] * 4, [10.0] * 4)


def simulated_ms(configuration: Configuration, link: LinkProfile) -> float:
    """Makespan, and one latency more for the vote."""
    plan = ParallelPlan.of(
        configuration.replicas, chunks=configuration.chunks, placement=registry.placement(configuration.schedule)
    )
    routing = Routing(plan, Microbatches(configuration.microbatches, configuration.blocks))
    costs = Costs(
        tuple(configuration.forward_ms),
        tuple(configuration.input_ms),
        tuple(configuration.weight_ms),
        latency_ms=link.latency_ms,
        bandwidth_bytes_per_ms=link.bandwidth,
        reduce_ms=tuple(2 * link.latency_ms if stage.replicas > 1 else 0.0 for stage in plan.stages),
        step_ms=link.latency_ms,
    )
    crossing = Crossing.chain(len(plan.stages), nbytes=4)
    return simulate(registry.build(configuration.schedule, routing), routing, crossing, costs).makespan_ms


def real_ms(configuration: Configuration) -> list[float]:
    """Measured step times: `REPEATS` means of `STEPS` steps."""
    options = asdict(configuration)
    world = sum(configuration.replicas)
    contender = Contender(
        configuration.label, world, lambda a: [worker_command("sleep", a, rank, **options) for rank in range(world)]
    )
    try:
        contender.start()
        contender.run(1)
        return [1e3 * contender.run(STEPS) for _ in range(REPEATS)]
    finally:
        contender.stop()


def measured_link() -> LinkProfile:
    """Of the TCP transport on this machine, measured in a process of its own: this one stays free of torch."""
    code = "from raypar.worker.profile import profile_loopback as p; l = p(); print(l.latency_ms, l.bandwidth)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
    latency, bandwidth = map(float, found.stdout.split())
    return LinkProfile(latency, bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--configurations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    facts = environment()
    chance = random.Random(given.seed)
    link = measured_link()
    rows: list[dict[str, Any]] = []
    for configuration in [FOUR_STAGES, *(random_configuration(chance) for _ in range(given.configurations))]:
        predicted = simulated_ms(configuration, link)
        measured = real_ms(configuration)
        real = statistics.median(measured)
        row = {"predicted_ms": predicted, "real_ms": real, "measured_ms": measured, "error": predicted / real - 1}
        rows.append({"label": configuration.label, **row, "configuration": asdict(configuration)})
        print(f"{configuration.label}: {predicted:.1f} / {real:.1f} ms", file=sys.stderr, flush=True)
    four, others = rows[0], rows[1:]
    errors = [abs(row["error"]) for row in others] or [abs(four["error"])]
    summary = {
        "four_stages_error": abs(four["error"]),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "latency_ms": link.latency_ms,
        "bandwidth_bytes_per_ms": link.bandwidth,
        "configurations": len(others),
    }
    text = "\n\n".join(
        [
            f"Latency {link.latency_ms:.3f} ms and {link.bandwidth / 1e6:.2f} GB/s were measured before the runs.",
            table(
                ["configuration", "simulated ms", "real ms", "error"],
                [[r["label"], f"{r['predicted_ms']:.1f}", f"{r['real_ms']:.1f}", f"{100 * r['error']:+.2f} %"] for r in rows],
            ),
            f"Four equal stages: {100 * summary['four_stages_error']:.2f} % (wanted: 2). {len(others)} random "
            f"configurations: median {100 * summary['median_error']:.2f} % (wanted: 3), "
            f"worst {100 * summary['worst_error']:.2f} % (wanted: 10).",
        ]
    )
    print(json.dumps({"environment": facts, "summary": summary, "runs": rows}) if given.json else text)
    if given.page:
        command = f"python jobs/bench/sleep.py --configurations {given.configurations} --seed {given.seed}"
        given.page.write_text(page("Does the simulator predict real runs?", command, text))


if __name__ == "__main__":
    main()
