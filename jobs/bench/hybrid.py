"""VGG-11 on two workers that are replicas of its convolutions and shards of its dense layers, beside the uniform plans.

`python jobs/bench/hybrid.py [--json] [--page FILE] [--rounds 7] [--steps 1] [--batch 8] [--microbatches 2]`
The uniform plans are two replicas, two shards, and two stages cut where the simulated step is shortest. All train in turn, each
in two processes over raypar's own transport; a round runs each of them once. Exit code 1 if a step of the hybrid takes more
than 0.90 of that of the best uniform plan. It wants two idle processors, and 18 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ours
import torch
from harness import Contender, alternate, environment, page, ratio, spread, table, worker_command

from raypar.plan import ParallelPlan, StagePlan
from raypar.planner.predicted_step import predict_step
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_job

AT_MOST = 0.90
CONVOLUTIONS = 8
HYBRID = "replicas, then shards"


def plans_of(given: argparse.Namespace) -> tuple[dict[str, tuple[str, ParallelPlan]], dict[str, float]]:
    """(name -> schedule and plan, name -> simulated milliseconds)."""
    spec = ours.vgg_job(given.batch, given.microbatches)
    graph = make_layer_graph(spec)
    layers = len(graph.layers)
    profile = profile_job(spec, workers=2, graph=graph, shards={1, 2})

    def simulated(schedule: str, plan: ParallelPlan) -> float:
        return predict_step(profile, plan, schedule, spec.batching)[0].makespan_ms

    pipelines = [ParallelPlan.mesh(pp=2, layers=layers, cuts=[cut]) for cut in range(1, layers)]
    hybrid = ParallelPlan((StagePlan(0, CONVOLUTIONS, ((0,), (1,))), StagePlan(CONVOLUTIONS, layers, ((0, 1),))))
    plans = {
        HYBRID: ("list", hybrid),
        "two replicas": ("1f1b", ParallelPlan.mesh(dp=2, layers=layers)),
        "two shards": ("1f1b", ParallelPlan.mesh(tp=2, layers=layers)),
        "two stages": ("1f1b", min(pipelines, key=lambda plan: simulated("1f1b", plan))),
    }
    return plans, {name: simulated(*each) for name, each in plans.items()}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The simulated and measured steps of all plans."""
    plans, simulated = plans_of(given)
    started: list[Contender] = []
    try:
        for name, (schedule, plan) in plans.items():
            stages = [[stage.first, stage.last, stage.workers] for stage in plan.stages]
            options = {"batch": given.batch, "microbatches": given.microbatches, "schedule": schedule, "stages": stages}
            commands = lambda a, options=options: [worker_command("vgg", a, rank, **options) for rank in range(2)]  # noqa: E731
            started.append(Contender(name, 2, commands))
            started[-1].start()
        seconds = alternate(started, rounds=given.rounds, steps=given.steps, say=say)
        losses = {c.name: next(i["loss"] for i in c.info() if i["loss"] is not None) for c in started}
    finally:
        for contender in started:
            contender.stop()
    best = min((name for name in plans if name != HYBRID), key=lambda name: statistics.median(seconds[name]))
    return {
        "simulated_ms": simulated,
        "seconds": seconds,
        "losses": losses,
        "best": best,
        "of_best": asdict(ratio(seconds[HYBRID], seconds[best])),
    }


def text_of(found: dict[str, Any], given: argparse.Namespace) -> tuple[str, bool]:
    """(the page's text, whether the limit holds)."""
    rows = []
    for name, seconds in found["seconds"].items():
        low, high = spread(seconds)
        median = 1e3 * statistics.median(seconds)
        cells = [f"{found['simulated_ms'][name]:.0f}", f"{median:.0f}", f"{1e3 * low:.0f} to {1e3 * high:.0f}"]
        rows.append([name, *cells, f"{found['losses'][name]:.6f}"])
    of_best = found["of_best"]
    good = of_best["median"] <= AT_MOST
    how = (
        f"VGG-11 with its own dense layers, {given.batch} images of 224 x 224 in {given.microbatches} microbatches, SGD, one "
        f"thread a worker; {given.rounds} rounds of {given.steps} steps of each in turn, in an order that is reversed every "
        "other round. Ratios are taken inside a round; the interval is a bootstrap's of their median. Whole dense layers and "
        "those on shards have other bits."
    )
    told = (
        f"A step of the hybrid takes {of_best['median']:.3f} of that of the best uniform plan, {found['best']} "
        f"({of_best['lower']:.3f} to {of_best['upper']:.3f}, {of_best['pairs']} pairs); wanted: at most {AT_MOST}: "
        f"{'holds' if good else 'DOES NOT HOLD'}."
    )
    return "\n\n".join([how, table(["plan", "simulated ms", "measured ms", "quartiles", "last loss"], rows), told]), good


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="steps of each in a round")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = environment()
    found = measure(given)
    text, good = text_of(found, given)
    print(json.dumps({"environment": facts, **found}) if given.json else text)
    if given.page:
        command = "python jobs/bench/hybrid.py " + " ".join(a for a in sys.argv[1:] if a != "--json")
        given.page.write_text(
            page("Replicas of convolutions and shards of dense layers on the same workers", command.strip(), text)
        )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
