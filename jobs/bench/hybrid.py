"""VGG-11 on two workers that are replicas of its convolutions and shards of its dense layers, beside the uniform plans.

`python jobs/bench/hybrid.py [--json] [--page FILE] [--rounds 7] [--steps 1] [--batch 16] [--microbatches 2] [--gbit 0 10]`
The uniform plans are two replicas, two shards, and two stages cut where the simulated step is shortest. All train in turn, each
in two processes over raypar's own transport; a round runs each of them once. `--gbit`: rates of the link between the workers,
each of which is then a host of its own (`linked_hosts.py`, as root); 0: both are on one machine, and exchange what they can
through its memory. Exit code 1 if on hosts of their own a step of the hybrid takes more than 0.90 of that of the best uniform
plan. It wants two idle processors, and 18 GB of memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import ours
import torch
from harness import Contender, environment, ratio, table, worker_command
from linked_hosts import two_linked_hosts
from side_by_side import bench_parser, interval_text, last_losses, ms_cells, print_and_write, train_in_turn, turns_text, verdict

from raypar.plan import ParallelPlan, StagePlan
from raypar.planner.model_profile import LinkProfile, ModelProfile
from raypar.planner.predicted_step import predict_step
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_job

AT_MOST = 0.90
CONVOLUTIONS = 8
HYBRID = "replicas, then shards"


def profile_vgg(given: argparse.Namespace) -> ModelProfile:
    """Times of the layers, on this machine."""
    spec = ours.vgg_job(given.batch, given.microbatches)
    return profile_job(spec, workers=2, graph=make_layer_graph(spec), shards={1, 2})


def plans_of(
    profile: ModelProfile, given: argparse.Namespace, gbit: float
) -> tuple[dict[str, tuple[str, ParallelPlan]], dict[str, float]]:
    """(name -> schedule and plan, name -> simulated milliseconds)."""
    spec = ours.vgg_job(given.batch, given.microbatches)
    layers = len(profile.layers)
    if gbit:
        profile = replace(profile, link=LinkProfile(profile.link.latency_ms, gbit * 1e9 / 8 / 1e3))

    def simulated(schedule: str, plan: ParallelPlan) -> float:
        return predict_step(profile, plan, schedule, spec.batching, nodes=(0, 1) if gbit else ())[0].makespan_ms

    pipelines = [ParallelPlan.mesh(pp=2, layers=layers, cuts=[cut]) for cut in range(1, layers)]
    hybrid = ParallelPlan((StagePlan(0, CONVOLUTIONS, ((0,), (1,))), StagePlan(CONVOLUTIONS, layers, ((0, 1),))))
    plans = {
        HYBRID: ("list", hybrid),
        "two replicas": ("1f1b", ParallelPlan.mesh(dp=2, layers=layers)),
        "two shards": ("1f1b", ParallelPlan.mesh(tp=2, layers=layers)),
        "two stages": ("1f1b", min(pipelines, key=lambda plan: simulated("1f1b", plan))),
    }
    return plans, {name: simulated(*each) for name, each in plans.items()}


def measure(profile: ModelProfile, given: argparse.Namespace, gbit: float) -> dict[str, Any]:
    """The simulated and measured steps of all plans, with workers that a link of this rate joins."""
    plans, simulated = plans_of(profile, given, gbit)
    with two_linked_hosts(gbit) if gbit else nullcontext() as hosts:

        def commands(address: str, options: dict[str, Any]) -> list[list[str]]:
            if hosts is None:
                return [worker_command("vgg", address, rank, **options) for rank in range(2)]
            return [h.command(worker_command("vgg", address, n, host=h.address, **options)) for n, h in enumerate(hosts)]

        contenders = []
        for name, (schedule, plan) in plans.items():
            stages = [[stage.first, stage.last, stage.workers] for stage in plan.stages]
            options = {"batch": given.batch, "microbatches": given.microbatches, "schedule": schedule, "stages": stages}
            contenders.append(Contender(name, 2, partial(commands, options=options)))
        seconds, infos = train_in_turn(contenders, given)
    best = min((name for name in plans if name != HYBRID), key=lambda name: statistics.median(seconds[name]))
    return {
        "gbit": gbit,
        "simulated_ms": simulated,
        "seconds": seconds,
        "losses": last_losses(infos),
        "best": best,
        "of_best": asdict(ratio(seconds[HYBRID], seconds[best])),
    }


def text_of(found: list[dict[str, Any]], given: argparse.Namespace) -> tuple[str, bool]:
    """(the page's text, whether the limit holds)."""
    rows, told, good = [], [], True
    for one in found:
        link = f"{one['gbit']:g} Gbit/s" if one["gbit"] else "one machine"
        for name, seconds in one["seconds"].items():
            simulated, loss = f"{one['simulated_ms'][name]:.0f}", f"{one['losses'][name]:.6f}"
            rows.append([link, name, simulated, *ms_cells(seconds, 0), loss])
        of_best, wanted = one["of_best"], "no limit, for comparison"
        if one["gbit"]:
            holds = of_best["median"] <= AT_MOST
            good &= holds
            wanted = f"wanted: at most {AT_MOST}: {verdict(holds)}"
        told.append(
            f"{link}: a step of the hybrid takes {of_best['median']:.3f} of that of the best uniform plan, {one['best']} "
            f"({interval_text(of_best)}); {wanted}."
        )
    how = (
        f"VGG-11 with its own dense layers, {given.batch} images of 224 x 224 in {given.microbatches} microbatches, SGD, one "
        f"thread a worker; {turns_text(given)} Whole dense layers and those on shards have other bits. Workers on one machine "
        "read each other's gradients in its memory; with a link each is a host of its own, and all travels over TCP at the "
        "link's rate."
    )
    return "\n\n".join(
        [how, table(["workers", "plan", "simulated ms", "measured ms", "quartiles", "last loss"], rows), *told]
    ), good


def main() -> None:
    parser = bench_parser(__doc__, rounds=7, steps=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.0, 10.0], help="rates of links; 0: one machine")
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = environment()
    profile = profile_vgg(given)
    found = [measure(profile, given, gbit) for gbit in given.gbit]
    text, good = text_of(found, given)
    title = "Replicas of convolutions and shards of dense layers on the same workers"
    print_and_write(given, title, text, {"environment": facts, "links": found})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
