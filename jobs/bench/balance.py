"""The default split points beside all others: predicted for all of them, measured for the best.

`python jobs/bench/balance.py [--json] [--page FILE] [--rounds 12] [--steps 3] [--no-measure]`
Predicted: layers are timed once; then every cut (all split points of a plan) is simulated under a schedule. Measured: two
workers over raypar's own transport run the default, the cut by number of layers and the next best predicted ones, in turn; a
round runs each of them once. Exit code 1 if the default is more than 2 % slower than the best, predicted or measured.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import ours
import torch
from harness import Contender, environment, ratio, table, worker_command
from models import Workload
from side_by_side import (
    bench_parser,
    interval_text,
    last_losses,
    losses_text,
    ms_cells,
    print_and_write,
    say,
    train_in_turn,
    turns_text,
    verdict,
)

from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.planner.model_profile import ModelProfile
from raypar.planner.plan_search import balance_stages
from raypar.planner.predicted_step import predict_step
from raypar.schedule import registry
from raypar.worker.measure_profile import profile_job

WITHIN = 0.02
MICROBATCHES = 8
CONTENDERS = 5
"""Cuts that are measured of a model under a schedule."""
MODELS = {
    "quickstart, 6 layers": {"depth": 4},
    "10 layers": {"depth": 8},
    "6 layers, 4096 tokens": {"depth": 4, "vocab": 4096},
}
"""Name -> the example GPT's size; with 4096 tokens its output layer is as large as two blocks."""
PREDICTED = [
    ("1f1b", 2),
    ("gpipe", 2),
    ("zb-h1", 2),
    ("interleaved", 2),
    ("zb-v", 2),
    ("1f1b", 3),
    ("zb-v", 3),
    ("1f1b", 4),
    ("interleaved", 4),
    ("zb-v", 4),
]
"""(schedule, workers) of the predicted cells, where the model has layers enough."""
MEASURED = [
    ("quickstart, 6 layers", "1f1b"),
    ("6 layers, 4096 tokens", "1f1b"),
    ("10 layers", "zb-v"),
    ("10 layers", "interleaved"),
]
"""(model, schedule) of the measured cells, with two workers."""


@dataclass(frozen=True)
class Cell:
    """All cuts of one model under one schedule, by their predicted steps."""

    model: str
    schedule: str
    workers: int
    even: tuple[int, ...]
    """Split points with nearly equal numbers of layers."""
    default: tuple[int, ...]
    """Split points that a run takes."""
    predicted_ms: dict[tuple[int, ...], float]
    """Split points -> predicted step; all of them, the fastest first."""

    @property
    def best(self) -> tuple[int, ...]:
        """The split points that are predicted to be the fastest."""
        return next(iter(self.predicted_ms))

    @property
    def slowdown(self) -> float:
        """By how much the default is predicted to be slower than the best, as a fraction."""
        return self.predicted_ms[self.default] / self.predicted_ms[self.best] - 1


def profile_of(work: dict[str, int]) -> ModelProfile:
    """The example's layers, timed on this machine."""
    spec = ours.gpt_job(Workload(**work), MICROBATCHES, "canonical")
    return profile_job(spec, workers=2)


def predict_all_cuts(model: str, profile: ModelProfile, schedule: str, workers: int) -> Cell | None:
    """The predicted step of every cut; None where the model has too few layers."""
    layers, chunks = len(profile.layers), registry.resolve_chunks_per_worker(schedule, None)
    if workers * chunks > layers:
        return None
    batching = ours.gpt_job(Workload(), MICROBATCHES, "canonical").batching
    even = ours.plan_of(schedule, [1] * workers, layers)
    orders = registry.build_schedule(schedule, MicrobatchRouting(even, batching))

    alone = replace(profile, processors=None)

    def step_ms(plan: ParallelPlan) -> float:
        timeline, _ = predict_step(alone, plan, orders, batching)
        return timeline.makespan_ms

    cuts = itertools.combinations(range(1, layers), len(even.stages) - 1)
    found = sorted((step_ms(even.with_split_points(points)), points) for points in cuts)
    default = balance_stages(profile, even, schedule, batching).plan.split_points
    return Cell(model, schedule, workers, even.split_points, default, {points: ms for ms, points in found})


def measure(cell: Cell, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step of each cut, one number a round, and which cut was the fastest."""
    others = [points for points in cell.predicted_ms if points not in (cell.default, cell.even)]
    kept = list(dict.fromkeys([cell.default, cell.even, *others]))[:CONTENDERS]
    work = MODELS[cell.model]
    contenders = []
    for points in kept:
        options: dict[str, Any] = {"work": work, "microbatches": MICROBATCHES, "stages": cell.workers}
        options |= {"schedule": cell.schedule, "cuts": list(points)}
        commands = lambda a, o=options: [worker_command("raypar", a, rank, **o) for rank in range(cell.workers)]  # noqa: E731
        contenders.append(Contender(str(list(points)), cell.workers, commands))
    seconds, infos = train_in_turn(contenders, given)
    fastest = min(seconds, key=lambda name: statistics.median(seconds[name]))
    default, even = str(list(cell.default)), str(list(cell.even))
    return {
        "cell": f"{cell.model}, {cell.schedule}",
        "seconds": seconds,
        "same_loss": len(set(last_losses(infos).values())) == 1,
        "default": default,
        "even": even,
        "fastest": fastest,
        "default_over_fastest": asdict(ratio(seconds[default], seconds[fastest])),
        "even_over_default": asdict(ratio(seconds[even], seconds[default])),
        "predicted_ms": {str(list(points)): cell.predicted_ms[points] for points in kept},
    }


def predicted_text(cells: list[Cell]) -> tuple[list[str], bool]:
    """(parts of the results page, whether the limit holds)."""
    rows = [
        [
            cell.model,
            f"{cell.schedule}, {cell.workers}",
            str(len(cell.predicted_ms)),
            f"{list(cell.even)}: {cell.predicted_ms[cell.even]:.1f}",
            f"{list(cell.default)}: {cell.predicted_ms[cell.default]:.1f}",
            f"{list(cell.best)}: {cell.predicted_ms[cell.best]:.1f}",
            f"{cell.slowdown:.1%}",
        ]
        for cell in cells
    ]
    good = all(cell.slowdown <= WITHIN for cell in cells)
    header = ["model", "schedule, workers", "cuts", "by number of layers: ms", "default: ms", "best of all: ms", "off by"]
    told = [
        "## Predicted",
        f"The example GPT in {MICROBATCHES} microbatches of 4 x 128 tokens; the simulated step of every cut of its layers, on "
        "workers that have a processor each and this machine's links.",
        table(header, rows),
        f"Wanted: the default within {WITHIN:.0%} of the best of all cuts: {verdict(good)}.",
    ]
    return told, good


def measured_text(found: list[dict[str, Any]], given: argparse.Namespace) -> tuple[list[str], bool]:
    """(parts of the results page, whether the limit holds)."""
    told = [
        "## Measured",
        f"Two workers, one thread each, over raypar's own transport; {turns_text(given, 'of each cut')}",
    ]
    good = True
    for one in found:
        rows = []
        for name, values in one["seconds"].items():
            role = []
            role += ["default"] if name == one["default"] else []
            role += ["by number of layers"] if name == one["even"] else []
            role += ["fastest"] if name == one["fastest"] else []
            rows.append([name, *ms_cells(values), f"{one['predicted_ms'][name]:.1f}", ", ".join(role)])
        slower, gain = one["default_over_fastest"], one["even_over_default"]
        holds = slower["median"] <= 1 + WITHIN and one["same_loss"]
        good &= holds
        told += [
            f"### {one['cell']}",
            table(["cut", "step ms", "quartiles", "predicted ms", ""], rows),
            f"The default takes {slower['median']:.3f} of the time of the fastest ({interval_text(slower)}); wanted at most "
            f"{1 + WITHIN:.2f}: {verdict(holds)}. The cut by number of layers takes {gain['median']:.3f} of the default's "
            f"({interval_text(gain)}). {losses_text(equal=one['same_loss'])}",
        ]
    return told, good


def main() -> None:
    parser = bench_parser(__doc__, rounds=12, steps=3, of_each="of each cut")
    parser.add_argument("--no-measure", action="store_true", help="predictions only")
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = environment()
    profiles = {name: profile_of(work) for name, work in MODELS.items()}
    every = [predict_all_cuts(name, profile, *how) for name, profile in profiles.items() for how in PREDICTED]
    cells = [cell for cell in every if cell is not None]
    told, good = predicted_text(cells)
    measured = []
    if not given.no_measure:
        for model, schedule in MEASURED:
            say(f"{model}, {schedule}")
            measured.append(measure(next(c for c in cells if (c.model, c.schedule, c.workers) == (model, schedule, 2)), given))
        more, holds = measured_text(measured, given)
        told, good = told + more, good and holds
    text = "\n\n".join(told)
    predicted = [{**asdict(cell), "predicted_ms": {str(k): v for k, v in cell.predicted_ms.items()}} for cell in cells]
    title = "Stages cut by measured times beside every other cut"
    print_and_write(given, title, text, {"environment": facts, "predicted": predicted, "measured": measured})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
