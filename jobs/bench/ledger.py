"""Whether the bytes that a step with shards moves are those of the formulas, as integers.

`python jobs/bench/ledger.py [--json] [--page FILE] [--shards 2 4] [--width 64] [--depth 4] [--microbatches 4]`
Every worker runs in this process over the `local` transport, whose ledger counts what is sent. Exit code 1 when a row differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import environment, page, table
from models import Workload
from ours import gpt_job

from raypar.comm.collectives import ONE_PHASE_BYTES
from raypar.job import Job, PlanConfig
from raypar.model.layer_skeletons import parameter_shapes
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

WORD = 4
"""Bytes of a float32."""
PADDED = 16
"""Elements to whose multiple every parameter is padded in a replica's buffer."""


def moved(spec: Job, plan: ParallelPlan) -> list[dict[str, int]]:
    """By rank: operation -> bytes sent in one step, the second: in the first replicas get acquainted."""
    with OneProcessRun(spec, plan, "1f1b", graph=make_layer_graph(spec)) as local:
        local.step(0)
        before = [core.transport.ledger.as_dict() for core in local.cores]
        local.step(1)
        after = [core.transport.ledger.as_dict() for core in local.cores]
    return [
        {name: now[name]["sent"] - then.get(name, {}).get("sent", 0) for name in now}
        for then, now in zip(before, after, strict=True)
    ]


def all_reduce(shards: int, elements: int) -> int:
    """Bytes that all shards send together: as a ring, 2 (t-1)/t of the value each; of small ones all to everybody."""
    phases = shards if elements * WORD <= ONE_PHASE_BYTES else 2
    return phases * (shards - 1) * elements * WORD


def rows(size: Workload, microbatches: int, shards: int) -> Iterator[tuple[str, str, int, int]]:
    """(what, formula, its bytes, the ledger's bytes), over all workers."""
    plain = gpt_job(size, microbatches, "canonical")
    spec = plain.replace(virtual_replicas=2)
    layers, t = size.depth + 2, shards
    tokens = size.batch_size * size.context
    value = size.batch_size // microbatches * size.context * size.width
    one = moved(spec, ParallelPlan.mesh(tp=t, layers=layers))

    def total(ledgers: list[dict[str, int]], name: str) -> int:
        return sum(ledger.get(name, 0) for ledger in ledgers)

    loss = t * (t - 1) * 3 * tokens * WORD
    reduced = microbatches * (4 * size.depth + 2) * all_reduce(t, value)
    yield (
        "4 all-reduces a block (2 forward, 2 backward), embedding, head",
        "m (4 d + 2) 2 (t-1) b s h",
        reduced,
        total(one, "all_reduce"),
    )
    yield "loss, all-gather", "t (t-1) 3 numbers a token", loss, total(one, "all_gather")

    cut = moved(spec.replace(plan=PlanConfig(sequence_parallel=True)), ParallelPlan.mesh(tp=t, layers=layers))
    half = microbatches * (4 * size.depth + 2) * (t - 1) * value * WORD
    partial = microbatches * all_reduce(t, size.context * size.width) + all_reduce(t, (4 * size.depth + 2) * size.width)
    yield "sequence_parallel, reduce-scatter", "m (4 d + 2) (t-1) b s h", half, total(cut, "reduce_scatter")
    yield (
        "sequence_parallel, all-gather",
        "the same, and the loss",
        half + loss,
        total(cut, "all_gather"),
    )
    yield (
        "sequence_parallel, sums of gradients",
        "positions a microbatch, norms a step",
        partial,
        total(cut, "all_reduce"),
    )

    plan = ParallelPlan.mesh(dp=2, tp=t, layers=layers)
    both = moved(spec, plan)
    graph = make_layer_graph(spec)
    layout, shapes = compute_shard_layout(graph, t), parameter_shapes(graph)
    padded = 0
    for (role,) in plan.roles:
        for name, shape in shapes.items():
            padded += -(-layout.elements_on_shard(name, shape.numel(), role.shard) // PADDED) * PADDED
    yield (
        "2 replicas, gradients of what each shard holds",
        "2 (R-1)/R, R = 2, each parameter padded to 16",
        padded * WORD,
        total(both, "window"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    size = Workload(depth=given.depth, width=given.width, heads=4, context=32, batch_size=8)
    found: list[dict[str, Any]] = [
        {"shards": shards, "what": what, "formula": formula, "bytes": wanted, "ledger": counted}
        for shards in given.shards
        for what, formula, wanted, counted in rows(size, given.microbatches, shards)
    ]
    good = all(row["bytes"] == row["ledger"] for row in found)
    cells = []
    for row in found:
        sizes = [f"{row[key]:,}" for key in ("bytes", "ledger")]
        cells.append(
            [str(row["shards"]), row["what"], row["formula"], *sizes, "yes" if row["bytes"] == row["ledger"] else "NO"]
        )
    note = (
        f"The example GPT: d = {size.depth} blocks, h = {size.width}, s = {size.context}, {size.batch_size} samples a step in "
        f"m = {given.microbatches} microbatches of b, t shards, float32. Sent by all workers in one step."
    )
    text = note + "\n\n" + table(["t", "what", "formula (elements)", "bytes", "ledger", "equal"], cells)
    print(json.dumps({"environment": environment(), "rows": found}) if given.json else text)
    if given.page:
        command = "python jobs/bench/ledger.py " + " ".join(a for a in sys.argv[1:] if a != "--json")
        given.page.write_text(page("Are the bytes that shards move those of the formulas?", command.strip(), text))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
