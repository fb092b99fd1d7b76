"""A residual network in two stages: what zero-bubble schedules gain over 1F1B with split convolutions.

`python jobs/bench/convolution_pipeline.py [--json] [--page FILE] [--rounds 12] [--steps 2] [--microbatches 4]`, three minutes.
Each schedule is simulated from the profile of this machine, under the split points that are simulated best for it, and run by
two workers; in turns. Beside it run zero-bubble schedules with whole convolutions, where W is of linear layers alone: of this
network that is its last layer. Losses are equal to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from dataclasses import asdict
from typing import Any

import ours
from harness import Contender, environment, ratio, table, worker_command
from side_by_side import bench_parser, last_losses, losses_text, ms_cells, print_and_write, say, train_in_turn, turns_text

from raypar.planner.model_profile import ModelProfile
from raypar.planner.predicted_step import predict_step
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_job

BASE, WHOLE, SPLIT = "1f1b", "whole convolutions", "split convolutions"
SCHEDULES = ("zb-h1", "zb-v")


def profiles_of(given: argparse.Namespace) -> dict[str, ModelProfile]:
    """The profile of the network with whole convolutions, and with split ones."""
    spec = ours.residual_job(given.microbatches)
    graph = make_layer_graph(spec)
    found = {}
    for how in (WHOLE, SPLIT):
        with contextlib.nullcontext() if how == SPLIT else ours.convolutions_not_split():
            found[how] = profile_job(spec, workers=2, graph=graph)
    return found


def best_cuts(profile: ModelProfile, schedule: str, given: argparse.Namespace) -> tuple[list[int], float]:
    """The split points with the fastest simulated step, and its milliseconds."""
    batching, layers = ours.residual_job(given.microbatches).batching, len(profile.layers)
    plan = ours.plan_of(schedule, [1, 1], layers)
    cuts = itertools.combinations(range(1, layers), len(plan.stages) - 1)
    steps = {cut: predict_step(profile, plan.with_split_points(cut), schedule, batching)[0].makespan_ms for cut in cuts}
    best = min(steps, key=steps.__getitem__)
    return list(best), steps[best]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Simulated and measured steps of all contenders."""
    profiles, simulated, contenders = profiles_of(given), dict[str, float](), list[Contender]()
    wanted = [(BASE, BASE, SPLIT), *((f"{name}, {how}", name, how) for name in SCHEDULES for how in (WHOLE, SPLIT))]
    for name, schedule, how in wanted:
        cuts, simulated[name] = best_cuts(profiles[how], schedule, given)
        options = {"microbatches": given.microbatches, "schedule": schedule, "cuts": cuts, "splits": how == SPLIT}
        commands = lambda a, o=options: [worker_command("residual", a, rank, **o) for rank in range(2)]  # noqa: E731
        contenders.append(Contender(name, 2, commands))
        say(f"{name}: cuts {cuts}, simulated {simulated[name]:.0f} ms")
    seconds, infos = train_in_turn(contenders, given)
    return {
        "simulated_ms": simulated,
        "seconds": seconds,
        "loss": last_losses(infos),
        "ratio": {name: asdict(ratio(seconds[BASE], own)) for name, own in seconds.items()},
        "weight_ms": {how: sum(layer.weight_ms for layer in profile.layers) for how, profile in profiles.items()},
        "backward_ms": sum(layer.backward_ms for layer in profiles[SPLIT].layers),
    }


def text_of(given: argparse.Namespace, found: dict[str, Any]) -> str:
    """The page's text."""
    rows = []
    for name, values in found["seconds"].items():
        gained, simulated = found["ratio"][name], found["simulated_ms"]
        predicted = [f"{simulated[name]:.0f}", f"{simulated[BASE] / simulated[name]:.3f}"]
        interval = f"{gained['median']:.3f} ({gained['lower']:.3f} to {gained['upper']:.3f})"
        rows.append([name, *predicted, *ms_cells(values, 0), interval])
    equal = len(set(found["loss"].values())) == 1
    header = ["schedule", "simulated ms", "1F1B / it", "measured ms", "quartiles", "1F1B / it (95 %)"]
    return "\n\n".join(
        [
            f"Two workers, one thread each; {given.microbatches} microbatches, {ours.RESIDUAL}. {turns_text(given)}",
            table(header, rows),
            f"Of {found['backward_ms']:.1f} ms that the backward passes of all layers take for a microbatch, W has "
            f"{found['weight_ms'][SPLIT]:.1f} ms; with whole convolutions {found['weight_ms'][WHOLE]:.1f} ms.",
            losses_text(equal=equal),
        ]
    )


def main() -> None:
    parser = bench_parser(__doc__, rounds=12, steps=2)
    parser.add_argument("--microbatches", type=int, default=4)
    given = parser.parse_args()
    facts = environment()
    found = measure(given)
    title = "A residual network under zero-bubble schedules"
    print_and_write(given, title, text_of(given, found), {"environment": facts, **found})
    sys.exit(0 if len(set(found["loss"].values())) == 1 else 1)


if __name__ == "__main__":
    main()
