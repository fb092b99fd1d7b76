"""A residual network in two stages: what zero-bubble schedules gain over 1F1B with split convolutions.

`python jobs/bench/convolution_pipeline.py [--json] [--page FILE] [--rounds 12] [--steps 2] [--microbatches 4]`, three minutes.
Each schedule is simulated from the profile of this machine, under the split points that are simulated best for it, and run by
two workers; in turns. Beside it run zero-bubble schedules as they were before, with W of linear layers alone: of this network
that is its last layer. Losses are equal to the last bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ours
from harness import Contender, alternate, environment, page, ratio, spread, table, worker_command

from raypar.planner.model_profile import ModelProfile
from raypar.planner.predicted_step import predict_step
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_job

BASE, BEFORE, NOW = "1f1b", "before", "now"
SCHEDULES = ("zb-h1", "zb-v")


def profiles_of(given: argparse.Namespace) -> dict[str, ModelProfile]:
    """The profile of the network with whole convolutions, and with split ones."""
    spec = ours.residual_job(given.microbatches)
    graph = make_layer_graph(spec)
    found = {}
    for when, splits in ((BEFORE, False), (NOW, True)):
        with ours.convolutions_split(splits):
            found[when] = profile_job(spec, workers=2, graph=graph)
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
    profiles, simulated, started = profiles_of(given), dict[str, float](), list[Contender]()
    wanted = [(BASE, BASE, NOW), *((f"{name}, {when}", name, when) for name in SCHEDULES for when in (BEFORE, NOW))]
    try:
        for name, schedule, when in wanted:
            cuts, simulated[name] = best_cuts(profiles[when], schedule, given)
            options = {"microbatches": given.microbatches, "schedule": schedule, "cuts": cuts, "splits": when == NOW}
            commands = lambda a, o=options: [worker_command("residual", a, rank, **o) for rank in range(2)]  # noqa: E731
            started.append(Contender(name, 2, commands))
            started[-1].start()
            say(f"{name}: cuts {cuts}, simulated {simulated[name]:.0f} ms")
        seconds = alternate(started, rounds=given.rounds, steps=given.steps, say=say)
        losses = {c.name: next(i["loss"] for i in c.info() if i["loss"] is not None) for c in started}
    finally:
        for contender in started:
            contender.stop()
    weights = {when: sum(layer.weight_ms for layer in profile.layers) for when, profile in profiles.items()}
    backward = sum(layer.backward_ms for layer in profiles[NOW].layers)
    ratios = {name: asdict(ratio(seconds[BASE], own)) for name, own in seconds.items()}
    return {"simulated_ms": simulated, "seconds": seconds, "loss": losses, "ratio": ratios, "weight_ms": weights} | {
        "backward_ms": backward
    }


def text_of(given: argparse.Namespace, found: dict[str, Any]) -> str:
    """The page's text."""
    rows = []
    for name, values in found["seconds"].items():
        low, high = spread(values)
        gained, base = found["ratio"][name], found["simulated_ms"][BASE]
        rows.append(
            [
                name,
                f"{found['simulated_ms'][name]:.0f}",
                f"{base / found['simulated_ms'][name]:.3f}",
                f"{1e3 * statistics.median(values):.0f}",
                f"{1e3 * low:.0f} to {1e3 * high:.0f}",
                f"{gained['median']:.3f} ({gained['lower']:.3f} to {gained['upper']:.3f})",
            ]
        )
    equal = len(set(found["loss"].values())) == 1
    header = ["schedule", "simulated ms", "1F1B / it", "measured ms", "quartiles", "1F1B / it (95 %)"]
    return "\n\n".join(
        [
            f"Two workers, one thread each; {given.microbatches} microbatches, {ours.RESIDUAL}. {given.rounds} rounds of "
            f"{given.steps} steps of each in turn, in an order that is reversed every other round. Ratios are taken inside a "
            "round; the interval is a bootstrap's of their median.",
            table(header, rows),
            f"Of {found['backward_ms']:.1f} ms that the backward passes of all layers take for a microbatch, W has "
            f"{found['weight_ms'][NOW]:.1f} ms; before it had {found['weight_ms'][BEFORE]:.1f} ms.",
            "Losses are equal to the last bit." if equal else f"LOSSES DIFFER: {found['loss']}",
        ]
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in a round")
    parser.add_argument("--microbatches", type=int, default=4)
    given = parser.parse_args()
    facts = environment()
    found = measure(given)
    text = text_of(given, found)
    print(json.dumps({"environment": facts, **found}) if given.json else text)
    if given.page:
        command = "python jobs/bench/convolution_pipeline.py " + " ".join(a for a in sys.argv[1:] if a != "--json")
        given.page.write_text(page("A residual network under zero-bubble schedules", command.strip(), text))
    sys.exit(0 if len(set(found["loss"].values())) == 1 else 1)


if __name__ == "__main__":
    main()
