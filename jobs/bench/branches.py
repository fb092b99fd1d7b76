"""The branches of one block of Inception-v3 and of GoogLeNet on two workers: the gain by simulation, and in real processes.

`python jobs/bench/branches.py [--json] [--page FILE] [--rounds 9] [--steps 3] [--batch 32] [--blocks NAME ...]`
Layers are timed on one thread. The placement is the one that `raypar plan` advises; it is simulated beside one worker, with
this machine's links and a processor for each worker. Then one worker, and two over raypar's own transport, train in turn; a
round runs each of them once. Exit code 1 if the measured gain is more than 10 % below the simulated one, if a step of one
worker takes less than 100 ms, or if losses differ. It wants two idle processors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from typing import Any

import ours
import torch
from branch_blocks import SIZES
from harness import BenchError, Contender, environment, ratio, table, worker_command
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

from raypar.plan import ParallelPlan
from raypar.planner.branch_advice import place_branches
from raypar.planner.predicted_step import predict_step
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_job

WITHIN = 0.10
LEAST_MS = 100.0
"""A step of one worker takes so long at least, so that what a step costs beside computing is little of it."""
WORKERS = 2


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The simulated and measured steps of a block on one worker and on two."""
    spec = ours.block_job(name, given.batch)
    graph = make_layer_graph(spec)
    profile = profile_job(spec, workers=WORKERS, graph=graph)
    placed = place_branches(profile, WORKERS)
    if placed is None:
        raise BenchError(f"{name}: all layers end sooner on one worker")
    plans = {"one worker": ParallelPlan.mesh(layers=len(graph.layers)), "two workers": placed}
    simulated = {key: predict_step(profile, plan, "list", spec.batching)[0].makespan_ms for key, plan in plans.items()}
    contenders = []
    for key, plan in plans.items():
        stages = [[stage.first, stage.last, stage.workers[0][0]] for stage in plan.stages]
        options = {"name": name, "batch": given.batch, "stages": stages}
        commands = lambda a, plan=plan, options=options: [  # noqa: E731
            worker_command("block", a, rank, **options) for rank in range(plan.world)
        ]
        contenders.append(Contender(key, plan.world, commands))
    seconds, infos = train_in_turn(contenders, given)
    names = [layer.name for layer in graph.layers]
    return {
        "block": name,
        "simulated_ms": simulated,
        "seconds": seconds,
        "simulated_gain": simulated["one worker"] / simulated["two workers"],
        "measured_gain": asdict(ratio(seconds["one worker"], seconds["two workers"])),
        "same_loss": len(set(last_losses(infos).values())) == 1,
        "placed": {rank: [names[i] for s in placed.stages if s.workers == ((rank,),) for i in range(s.first, s.last)]
                   for rank in range(WORKERS)},
    }  # fmt: skip


def text_of(found: list[dict[str, Any]], given: argparse.Namespace) -> tuple[str, bool]:
    """(the page's text, whether the limits hold)."""
    rows, told, good = [], [], True
    for one in found:
        gain, alone_ms = one["measured_gain"], 1e3 * statistics.median(one["seconds"]["one worker"])
        holds = gain["median"] >= (1 - WITHIN) * one["simulated_gain"] and alone_ms >= LEAST_MS
        good &= holds and one["same_loss"]
        for key, seconds in one["seconds"].items():
            rows.append([one["block"], key, f"{one['simulated_ms'][key]:.1f}", *ms_cells(seconds)])
        second = ", ".join(name.removeprefix("block.") for name in one["placed"][1])
        told.append(
            f"{one['block']}: simulated gain {one['simulated_gain']:.3f}, measured {gain['median']:.3f} "
            f"({interval_text(gain)}); wanted: at least {1 - WITHIN:.0%} of the simulated one, and a step of "
            f"{LEAST_MS:.0f} ms: {verdict(holds)}. The second worker has {second}. {losses_text(equal=one['same_loss'])}"
        )
    header = ["block", "on", "simulated ms", "measured ms", "quartiles"]
    how = (
        f"Batches of {given.batch} in one microbatch, one thread a worker; {turns_text(given)} A step is forward, backward and "
        "optimizer."
    )
    return "\n\n".join([how, table(header, rows), *told]), good


def main() -> None:
    parser = bench_parser(__doc__, rounds=9, steps=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--blocks", nargs="*", choices=list(SIZES), default=list(SIZES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = environment()
    found = []
    for name in given.blocks:
        say(name)
        found.append(measure(name, given))
    text, good = text_of(found, given)
    title = "The branches of one block on two workers: simulated and real"
    print_and_write(given, title, text, {"environment": facts, "blocks": found})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
