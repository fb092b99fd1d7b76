"""Simulated against real step time: stages sleep for random given times in real worker processes joined by real sockets.

`python jobs/bench/sleep.py [--json] [--page FILE] [--configurations 20] [--seed 7]`. The simulator is given the sleeping
times, what this machine adds to an instruction, a message and a step, and nothing of the runs it predicts. What the machine
adds is measured before, in two runs with other sleeping times (`calibrate`): a processor that wakes from a sleep finds cold
caches, so an instruction costs many times what it does in a loop, and so does a message.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from harness import Contender, environment, page, table, worker_command

from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.schedule import registry
from raypar.schedule.simulate import SimulationCosts, simulate_schedule

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
    chunks = registry.resolve_chunks_per_worker(schedule)
    stages = len(replicas) * chunks
    microbatches = chance.randint(4, 12)
    forward, inputs, weights = ([round(chance.uniform(4, 20) / chunks, 2) for _ in range(stages)] for _ in range(3))
    return Configuration(schedule, replicas, chunks, microbatches, min(microbatches, 4), forward, inputs, weights)


FOUR_STAGES = Configuration("1f1b", [1, 1, 1, 1], 1, 8, 8, [10.0] * 4, [10.0] * 4, [10.0] * 4)


@dataclass(frozen=True)
class Machine:
    """What sleeping workers pay beside their sleep, in ms, on the average: for an instruction by its kind, the gap between
    two instructions, a message, the end of a step, and a reduction over replicas."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    input_ms: float = 0.0
    weight_ms: float = 0.0
    gap_ms: float = 0.0
    latency_ms: float = 0.0
    step_ms: float = 0.0
    reduce_ms: float = 0.0


def simulated_ms(configuration: Configuration, machine: Machine) -> float:
    """Makespan and what follows it in each step."""
    plan = ParallelPlan.of(
        configuration.replicas, chunks=configuration.chunks, placement=registry.placement_of_schedule(configuration.schedule)
    )
    routing = MicrobatchRouting(plan, Microbatches(configuration.microbatches, configuration.blocks))
    split = configuration.schedule.startswith("zb")
    input_ms, weight_ms = (machine.input_ms, machine.weight_ms) if split else (machine.backward_ms, 0.0)
    costs = SimulationCosts(
        tuple(ms + machine.forward_ms for ms in configuration.forward_ms),
        tuple(ms + input_ms for ms in configuration.input_ms),
        tuple(ms + weight_ms for ms in configuration.weight_ms),
        overhead_ms=machine.gap_ms,
        latency_ms=machine.latency_ms,
        reduce_ms=tuple(machine.reduce_ms if stage.replicas > 1 else 0.0 for stage in plan.stages),
        step_ms=machine.step_ms,
    )
    crossing = StageConnections.chain(len(plan.stages), nbytes=4)
    return simulate_schedule(registry.build_schedule(configuration.schedule, routing), routing, crossing, costs).makespan_ms


Row = list[tuple[str, float, float]]
"""One worker's step: label, start and end in ms of each instruction."""


def run(configuration: Configuration) -> tuple[list[float], list[list[Row]]]:
    """Measured step times, `REPEATS` means of `STEPS` steps; and what ran when, [step][rank], without the first step."""
    options = asdict(configuration)
    world = sum(configuration.replicas)
    contender = Contender(
        configuration.label, world, lambda a: [worker_command("sleep", a, rank, **options) for rank in range(world)]
    )
    try:
        contender.start()
        contender.run(1)
        measured = [1e3 * contender.run(STEPS) for _ in range(REPEATS)]
        workers = sorted(contender.info(), key=lambda told: told["rank"])
    finally:
        contender.stop()
    return measured, [list(rows) for rows in zip(*(told["spans"][1:] for told in workers), strict=True)]


def calibrate() -> Machine:
    """From pipelines of four, whole backward and split, and from two stages of two replicas; sleeping times of their own."""
    asleep = {"F": 12.0, "I": 9.0, "W": 11.0, "B": 20.0}
    times = [[asleep[kind]] * 4 for kind in "FIW"]
    whole, split = ([*run(Configuration(name, [1] * 4, 1, 6, 3, *times))[1]] for name in ("1f1b", "zb-h1"))
    replicated = run(Configuration("1f1b", [2, 2], 1, 6, 3, *(ms[:2] for ms in times)))[1]
    over: dict[str, list[float]] = {kind: [] for kind in asleep}
    for rows in whole + split:
        for kind, start, end in chain.from_iterable(map(_computing, rows)):
            over[kind].append(end - start - asleep[kind])
    gap_ms = statistics.mean(gap for rows in whole + split for gap in _gaps(rows))
    step_ms = statistics.mean(chain(_between(whole), _between(split))) - gap_ms
    return Machine(
        *(statistics.mean(over[kind]) for kind in "FBIW"),
        gap_ms=gap_ms,
        latency_ms=statistics.mean(delay for rows in whole + split for delay in _delays(rows)) - gap_ms,
        step_ms=step_ms,
        reduce_ms=max(0.0, statistics.mean(_between(replicated)) - gap_ms - step_ms),
    )


def _computing(row: Row) -> Iterator[tuple[str, float, float]]:
    """(F, B, I or W, start, end) of a worker's compute instructions."""
    for label, start, end in row:
        if label.lstrip("0123456789")[:1] in ("F", "B", "I", "W"):
            yield label.lstrip("0123456789")[0], start, end


def _made_and_used(rows: list[Row]) -> Iterator[tuple[float, float, float]]:
    """(end of the instruction before, end of the one that makes the input or nan, start) of each instruction of a chain."""
    ends = {label: end for row in rows for label, _, end in row}
    for stage, row in enumerate(rows):
        before = math.nan
        for label, start, end in row:
            if label[1:2] in ("F", "B", "I", "W"):
                kind, microbatch = label[1], label[2:]
                makers = {"F": [f"{stage - 1}F{microbatch}"], "W": []}.get(kind, [f"{stage + 1}{k}{microbatch}" for k in "BI"])
                yield before, next((ends[m] for m in makers if m in ends), math.nan), start
            before = end


FAR_MS = 1.0
"""Longer than messages take: who is ready this much earlier has waited for one, this much later has not."""


def _gaps(rows: list[Row]) -> Iterator[float]:
    """From an instruction to the next one of its worker, where nothing is waited for."""
    for before, made, start in _made_and_used(rows):
        if start - before < FAR_MS and not made > before - FAR_MS:
            yield start - before


def _delays(rows: list[Row]) -> Iterator[float]:
    """From the instruction that makes a value to the one that has waited for it."""
    for before, made, start in _made_and_used(rows):
        if made > before + FAR_MS:
            yield start - made


def _between(steps: list[list[Row]]) -> Iterator[float]:
    """From the end of a step's last compute instruction to the first of the next step."""
    for number, (now, then) in enumerate(pairwise(steps)):
        if number % STEPS != STEPS - 1:  # not from one request for steps to the next
            yield min(s for row in then for _, s, _ in _computing(row)) - max(e for row in now for _, _, e in _computing(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--configurations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    facts = environment()
    chance = random.Random(given.seed)
    machine = calibrate()
    rows: list[dict[str, Any]] = []
    for configuration in [FOUR_STAGES, *(random_configuration(chance) for _ in range(given.configurations))]:
        predicted = simulated_ms(configuration, machine)
        measured, _ = run(configuration)
        real = statistics.median(measured)
        bare = simulated_ms(configuration, Machine())
        times = {"bare_ms": bare, "predicted_ms": predicted, "real_ms": real, "measured_ms": measured}
        rows.append(
            {"label": configuration.label, **times, "error": predicted / real - 1, "configuration": asdict(configuration)}
        )
        print(f"{configuration.label}: {predicted:.1f} / {real:.1f} ms", file=sys.stderr, flush=True)
    four, others = rows[0], rows[1:]
    errors = [abs(row["error"]) for row in others] or [abs(four["error"])]
    summary = {
        "four_stages_error": abs(four["error"]),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "machine": asdict(machine),
        "configurations": len(others),
    }
    text = "\n\n".join(
        [
            f"Measured before, in runs with other times, on the average: {machine.forward_ms:.2f} ms beyond the sleep for a "
            f"forward, {machine.backward_ms:.2f} for a whole backward, {machine.input_ms:.2f} and {machine.weight_ms:.2f} for "
            f"its halves; {machine.gap_ms:.2f} ms between instructions, {machine.latency_ms:.2f} ms a message, "
            f"{machine.step_ms:.2f} ms the end of a step, {machine.reduce_ms:.2f} ms more where replicas are reduced. "
            '"Sleep only": the simulator without these.',
            table(
                ["configuration", "sleep only ms", "simulated ms", "real ms", "error"],
                [
                    [r["label"], *(f"{r[k]:.1f}" for k in ("bare_ms", "predicted_ms", "real_ms")), f"{100 * r['error']:+.2f} %"]
                    for r in rows
                ],
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
