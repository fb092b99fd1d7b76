"""Whether the bytes that a step moves between workers are those of the formulas, as integers.

`python jobs/bench/ledger.py [--json] [--page FILE] [--shards 2 4] [--width 64] [--depth 4] [--microbatches 4]`
Every worker runs in this process over the `local` transport, whose ledger counts what is sent. Exit code 1 when a row differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import environment, page, table
from models import Workload
from ours import gpt_job
from side_by_side import command_line

from raypar.comm.collectives import ONE_PHASE_BYTES
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PlanConfig
from raypar.model.layer_skeletons import parameter_shapes
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import ParallelPlan, StagePlan
from raypar.plan.bundle_parts import node_of_each_replica
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

WORD = 4
"""Bytes of a float32."""
PADDED = 16
"""Elements to whose multiple every parameter is padded in a replica's buffer."""


HALVING = "halving_all_reduce"
SAMPLES, MICROBATCHES = 8, 2
"""Of a step of the small models."""


class Row(NamedTuple):
    """One line of the table."""

    workers: str
    """Shards t, workers or replicas R, as the formula has them."""
    what: str
    formula: str
    wanted: int
    """The formula's bytes."""
    counted: int
    """The ledger's, of all workers."""


def moved(
    spec: Job, plan: ParallelPlan, schedule: str = "1f1b", other: list[int] | None = None, nodes: Sequence[int] = ()
) -> list[dict[str, int]]:
    """By rank: operation -> bytes sent in one step, the second: in the first replicas get acquainted.

    `other` gets the bytes of messages between two workers that are no values or gradients: parts of losses and norms. `nodes`:
    by rank, its node.
    """
    with OneProcessRun(spec, plan, schedule, graph=make_layer_graph(spec), nodes=nodes) as local:
        local.step(0)
        before = [core.transport.ledger.as_dict() for core in local.cores]
        for core in local.cores if other is not None else ():
            core.transport.send = _noting(core.transport.send, other)  # type: ignore[method-assign]
        local.step(1)
        after = [core.transport.ledger.as_dict() for core in local.cores]
    return [
        {name: now[name]["sent"] - then.get(name, {}).get("sent", 0) for name in now}
        for then, now in zip(before, after, strict=True)
    ]


def _noting(send: Callable[..., Any], other: list[int]) -> Callable[..., Any]:
    """A transport's `send` that also notes in `other` the bytes of messages that are not float32."""

    def noting(tensor: torch.Tensor, **given: Any) -> Any:
        if tensor.dtype != torch.float32:
            other.append(tensor.nbytes)
        return send(tensor, **given)

    return noting


def total(ledgers: list[dict[str, int]], name: str) -> int:
    """The bytes that all workers have sent in an operation."""
    return sum(ledger.get(name, 0) for ledger in ledgers)


def small_job(model: str, args: dict[str, Any], shape: Sequence[int], styles: dict[str, str] | None = None) -> Job:
    """A model of `ledger_models.py`."""
    return Job(
        name="ledger",
        seed=1,
        steps=2,
        batch_size=SAMPLES,
        microbatches=MICROBATCHES,
        virtual_replicas=MICROBATCHES,
        model=ModelConfig(function=f"ledger_models:{model}", args=args),
        loss=LossConfig(function="ledger_models:loss"),
        data=DataConfig(function="ledger_models:Values", args={"shape": list(shape)}),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.01}),
        plan=PlanConfig(styles=styles or {}),
    )


def on_shards(spec: Job, shards: int, division: tuple[int, ...] = ()) -> list[dict[str, int]]:
    """What a model on shards moves; `division`: of virtual shards."""
    plan = ParallelPlan.mesh(tp=shards, layers=len(make_layer_graph(spec).layers))
    return moved(spec, replace(plan, stages=tuple(replace(stage, division=division) for stage in plan.stages)))


def all_reduce(shards: int, elements: int) -> int:
    """Bytes that all shards send together: as a ring, 2 (t-1)/t of the value each; of small ones all to everybody."""
    phases = shards if elements * WORD <= ONE_PHASE_BYTES else 2
    return phases * (shards - 1) * elements * WORD


def transformer_rows(size: Workload, microbatches: int, shards: int) -> Iterator[Row]:
    """The example GPT on shards, with and without sequence parallelism, and with two replicas."""
    plain = gpt_job(size, microbatches, "canonical")
    spec = plain.replace(virtual_replicas=2)
    layers, t = size.depth + 2, shards
    tokens = size.batch_size * size.context
    value = size.batch_size // microbatches * size.context * size.width
    one = moved(spec, ParallelPlan.mesh(tp=t, layers=layers))

    loss = t * (t - 1) * 3 * tokens * WORD
    reduced = microbatches * (4 * size.depth + 2) * all_reduce(t, value)
    yield Row(
        str(t),
        "4 all-reduces a block (2 forward, 2 backward), embedding, head",
        "m (4 d + 2) 2 (t-1) b s h",
        reduced,
        total(one, "all_reduce"),
    )
    yield Row(str(t), "loss, all-gather", "t (t-1) 3 numbers a token", loss, total(one, "all_gather"))

    cut = moved(spec.replace(plan=PlanConfig(sequence_parallel=True)), ParallelPlan.mesh(tp=t, layers=layers))
    half = microbatches * (4 * size.depth + 2) * (t - 1) * value * WORD
    partial = microbatches * all_reduce(t, size.context * size.width) + all_reduce(t, (4 * size.depth + 2) * size.width)
    yield Row(str(t), "sequence_parallel, reduce-scatter", "m (4 d + 2) (t-1) b s h", half, total(cut, "reduce_scatter"))
    yield Row(
        str(t),
        "sequence_parallel, all-gather",
        "the same, and the loss",
        half + loss,
        total(cut, "all_gather"),
    )
    yield Row(
        str(t),
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
    yield Row(
        str(t),
        "2 replicas, gradients of what each shard holds",
        "2 (R-1)/R, R = 2, each parameter padded to 16",
        padded * WORD,
        total(both, "window"),
    )


def convolution_rows(t: int) -> Iterator[Row]:
    """Convolutions by channels and by groups: 16, 32 and 24 channels of images of 12 x 12, the first layer whole."""
    channels, positions = (3, 16, 32, 24), SAMPLES * 12 * 12
    pair = {"layers.1": "column", "layers.2": "row"}
    cut = on_shards(small_job("Convolutions", {"channels": channels}, (3, 12, 12), pair), t)
    wanted = MICROBATCHES * sum(all_reduce(t, positions // MICROBATCHES * each) for each in (16, 24))
    yield Row(str(t), "convolutions, column and row", "2 (t-1) B H W (C_in + C_out)", wanted, total(cut, "all_reduce"))
    cut = on_shards(small_job("Convolutions", {"channels": channels[:3]}, (3, 12, 12), {"layers.1": "gathered"}), t)
    wanted = (t - 1) * positions * 32 * WORD
    yield Row(str(t), "convolution, gathered: output", "(t-1) B H W C_out", wanted, total(cut, "all_gather"))
    wanted = MICROBATCHES * all_reduce(t, positions // MICROBATCHES * 16)
    yield Row(str(t), "convolution, gathered: gradient of the input", "2 (t-1) B H W C_in", wanted, total(cut, "all_reduce"))
    styles = {"layers.1": "column:8", "layers.2": "groups", "layers.3": "row:8"}
    args = {"channels": (3, 16, 32, 32, 24), "groups": 8}
    cut = on_shards(small_job("Convolutions", args, (3, 12, 12), styles), t)
    wanted = MICROBATCHES * sum(all_reduce(t, positions // MICROBATCHES * each) for each in (16, 24))
    what = "convolutions, column, groups and row: groups send nothing"
    yield Row(str(t), what, "2 (t-1) B H W (C_in + C_out)", wanted, total(cut, "all_reduce"))


def recurrent_rows(t: int) -> Iterator[Row]:
    """A bidirectional LSTM of two layers, by gates: 64 hidden units, sequences of 10 steps of 48 features."""
    layers, ways, steps, features, hidden = 2, 2, 10, 48, 64
    args = {"features": features, "hidden": hidden, "num_layers": layers, "bidirectional": True}
    cut = on_shards(small_job("Recurrent", args, (steps, features), {"rnn": "gates"}), t)
    one = SAMPLES * hidden * layers * ways * (t - 1) * WORD
    formula = "(t-1) L D N (S+1) H"
    yield Row(str(t), "LSTM by gates: hidden states, last cells", formula, one * (steps + 1), total(cut, "all_gather"))
    wanted = one * (steps - 1) + one // layers * (layers - 1) * steps
    formula = "(t-1) (L D N (S-1) H + (L-1) D N S H)"
    yield Row(str(t), "LSTM by gates: gradients of state and between layers", formula, wanted, total(cut, "reduce_scatter"))
    wanted = MICROBATCHES * all_reduce(t, SAMPLES // MICROBATCHES * steps * features)
    yield Row(str(t), "LSTM by gates: gradient of the input", "2 (t-1) N S C_in", wanted, total(cut, "all_reduce"))


def halo_rows(t: int) -> Iterator[Row]:
    """Convolutions of 3 x 3 by rows: 3, 16 and 24 channels of images of 12 x 12; the first one reads what has no gradient."""
    channels, width, kernel = (3, 16, 24), 12, 3
    spec = small_job("Convolutions", {"channels": channels, "kernel": kernel}, (3, 12, width), {"*": "spatial"})
    cut = on_shards(spec, t)
    row = SAMPLES * width * (kernel - 1) * (t - 1) * WORD
    formula = "(t-1) (k-1) B W (C_in forward, C_out back)"
    yield Row(str(t), "convolutions by rows: halos", formula, row * (3 + 16 + 24), total(cut, "all_to_all"))
    parameters = sum(shape.numel() for shape in parameter_shapes(make_layer_graph(spec)).values())
    what = "convolutions by rows: gradients of weights, once a step"
    yield Row(str(t), what, "2 (t-1) of the parameters", all_reduce(t, parameters), total(cut, "all_reduce"))
    wanted = SAMPLES * 12 * width * 24 * (t - 1) * WORD
    yield Row(str(t), "convolutions by rows: what leaves the model", "(t-1) B H W C_out", wanted, total(cut, "all_gather"))


def virtual_shard_rows() -> Iterator[Row]:
    """Four virtual shards on 1, 2 and 4 workers: w workers send what w shards would, unless their runs are no subtrees."""
    channels, numbers = (3, 16, 32, 24), SAMPLES * 12 * 12 * (16 + 24)
    spec = small_job("Convolutions", {"channels": channels}, (3, 12, 12), {"layers.1": "column", "layers.2": "row"})
    for division, what in (((2, 2), "2 parts each"), ((1, 1, 1, 1), "1 part each")):
        w = len(division)
        found = total(on_shards(spec, w, division), "all_reduce")
        yield Row(str(w), f"4 virtual shards, {what}: sums", "2 (w-1) of each sum", 2 * (w - 1) * numbers * WORD, found)
    uneven = total(on_shards(spec, 2, (1, 3)), "all_gather")
    formula = "(w-1) of each subtree's sum, 1 + 2"
    yield Row("2", "4 virtual shards, 1 and 3 parts: sums", formula, 3 * numbers * WORD, uneven)
    alone = sum(sum(ledger.values()) for ledger in on_shards(spec, 1, (4,)))
    yield Row("1", "4 virtual shards on one worker", "0", 0, alone)
    steps, features, hidden = 10, 24, 32
    spec = small_job("Recurrent", {"features": features, "hidden": hidden}, (steps, features), {"rnn": "gates"})
    found = total(on_shards(spec, 2, (2, 2)), "all_gather")
    wanted = SAMPLES * (steps + 1) * hidden * WORD
    yield Row("2", "4 virtual shards of an LSTM, 2 parts each: states", "(w-1) N (S+1) H", wanted, found)


def branch_rows() -> Iterator[Row]:
    """Values and gradients between stages, each on a worker of its own: 4 samples of 16 features a microbatch."""
    features = 16
    value = SAMPLES * features * WORD

    def staged(model: str, args: dict[str, Any], firsts: dict[str, int]) -> int:
        """Bytes between stages; `firsts`: how the names of a stage's layers begin -> its worker."""
        spec, other = small_job(model, args, (features,)), list[int]()
        names, stages, begin = [layer.name for layer in make_layer_graph(spec).layers], list[StagePlan](), 0
        for prefix, worker in firsts.items():
            end = max(number for number, name in enumerate(names) if name.startswith(prefix)) + 1
            stages.append(StagePlan(begin, end, ((worker,),)))
            begin = end
        return total(moved(spec, ParallelPlan(tuple(stages)), "list", other), "send") - sum(other)

    place = {"before": 0, "branches.0": 1, "branches.1": 2, "after": 0}
    found = staged("Branches", {"features": features, "uses": [1, 1]}, place)
    yield Row("3", "two branches: values and gradients", "(2 + 2) B C each way", 8 * value, found)
    found = staged("Branches", {"features": features, "uses": [2, 1]}, place)
    what = "two branches, straight gradients: one of them reads twice, its uses travel apart"
    yield Row("3", what, "(2 + 2) B C forward, (2 + 2 + 1) B C back", 9 * value, found)
    found = staged("Skip", {"features": features}, {"before": 0, "middle": 1, "after": 2})
    what = "a skip connection read twice and once, relayed: one sum from stage to stage"
    yield Row("3", what, "(2 + 1) B C each way", 6 * value, found)


def hybrid_rows(t: int) -> Iterator[Row]:
    """Workers that are t replicas of the first convolution and t shards of the others: 16 channels of images of 12 x 12.

    Every shard has the whole gradient, so each replica takes it of the shard on its own worker.
    """
    pair = {"layers.1": "column", "layers.2": "row"}
    spec = small_job("Convolutions", {"channels": (3, 16, 32, 24)}, (3, 12, 12), pair)
    spec, other = spec.replace(microbatches=t, virtual_replicas=t), list[int]()
    workers, layers = range(t), len(make_layer_graph(spec).layers)
    plan = ParallelPlan((StagePlan(0, 1, tuple((rank,) for rank in workers)), StagePlan(1, layers, (tuple(workers),))))
    found = total(moved(spec, plan, "list", other), "send") - sum(other)
    what = "replicas, then shards on the same workers: values; gradients are there"
    yield Row(str(t), what, "(t-1) B H W C forward, 0 back", (t - 1) * SAMPLES * 12 * 12 * 16 * WORD, found)


def part_rows(t: int) -> Iterator[Row]:
    """Two stages of t shards on two nodes: one convolution, and the other two, of images of 64 x 64."""
    styles = {"layers.0": "gathered", "layers.1": "column", "layers.2": "row"}
    spec = small_job("Convolutions", {"channels": (3, 16, 32, 24)}, (3, 64, 64), styles)
    plan = ParallelPlan.of((1, 1), (t, t), layers=len(make_layer_graph(spec).layers), cuts=(1,))
    whole, parts = list[int](), list[int]()
    value, between = SAMPLES * 64 * 64 * 16 * WORD, node_of_each_replica(plan)
    found = total(moved(spec, plan, other=whole), "send") - sum(whole)
    yield Row(str(t), "two stages on one node: values and gradients", "t B H W C each way", 2 * t * value, found)
    found = total(moved(spec, plan, other=parts, nodes=between), "send") - sum(parts)
    yield Row(str(t), "two stages on two nodes, in parts, over the network", "B H W C each way", 2 * value, found)
    here = [total(moved(spec, plan, nodes=nodes), "all_gather") for nodes in (between, ())]
    wanted = 2 * (t - 1) * value
    yield Row(str(t), "the same, gathered inside of the nodes", "(t-1) B H W C each way", wanted, here[0] - here[1])


def replica_rows() -> Iterator[Row]:
    """Gradients of replicas, of 3 linear layers of 16 features: 3 (16 16 + 16) numbers, each multiple of 16."""
    numbers = 4 * (16 * 16 + 16)
    spec = small_job("Branches", {"features": 16, "uses": [1, 1]}, (16,)).replace(microbatches=8, virtual_replicas=8)
    layers = len(make_layer_graph(spec).layers)
    for r, operation, what in ((2, "window", "swapped"), (4, HALVING, "halving"), (8, HALVING, "halving")):
        found = total(moved(spec, ParallelPlan.mesh(dp=r, layers=layers)), operation)
        yield Row(str(r), f"{r} replicas, gradients, {what}", "2 (R-1)", 2 * (r - 1) * numbers * WORD, found)
    for r in (2, 4):
        plan, each = ParallelPlan.mesh(dp=r, layers=layers), (r - 1) * numbers * WORD
        found = total(moved(spec, plan.with_zero(2)), "window" if r == 2 else "all_to_all")
        yield Row(str(r), f"{r} replicas, ZeRO 2, gradients folded, to their owners", "R-1", each, found)
        found = total(moved(spec, plan.with_zero(2).with_gradients("scatter")), "scatter")
        yield Row(str(r), f"{r} replicas, ZeRO 2, gradients scattered, m = 8", "(R-1) m/R", each * 8 // r, found)
        ledgers = moved(spec, plan.with_gradients("scatter"))
        found = total(ledgers, "scatter") + total(ledgers, "all_gather")
        yield Row(str(r), f"{r} replicas, gradients scattered, totals gathered", "(R-1) (m/R + 1)", each * (8 // r + 1), found)


def gathered_rows() -> Iterator[Row]:
    """Parameters that replicas divide, of 4 linear layers of 512 features, so that of four replicas none has a layer whole."""
    count, m, numbers = 4, 8, 512 * 512 + 512
    spec = small_job("Branches", {"features": 512, "uses": [1, 1]}, (512,)).replace(microbatches=m, virtual_replicas=m)
    for r in (2, 4):
        plan = ParallelPlan.mesh(dp=r, layers=len(make_layer_graph(spec).layers))
        layer = (r - 1) * numbers * WORD
        by_layer = moved(spec, plan.with_zero(3).with_gather("layer"))
        marks = total(by_layer, "all_gather")  # which parameters have gradients
        found = total(moved(spec, plan.with_zero(3)), "all_gather") - marks
        yield Row(str(r), f"{r} replicas, ZeRO 3, parameters once a step", "R-1", count * layer, found)
        found = total(moved(spec, plan.with_zero(3).with_gather("microbatch")), "gather")
        yield Row(str(r), f"{r} replicas, ZeRO 3, by microbatch, of one stage, which stays", "R-1", count * layer, found)
        if r > 2:  # else a replica has two layers whole
            wanted = (2 * m // r * (count - 1) + 1) * layer
            what = f"{r} replicas, ZeRO 3, by layer, L = 4 of them, m = 8"
            yield Row(str(r), what, "(R-1) (2 m/R (L-1) + 1)/L", wanted, total(by_layer, "gather"))


LAYERS: tuple[Callable[[int], Iterator[Row]], ...] = (convolution_rows, halo_rows, recurrent_rows, hybrid_rows, part_rows)
"""Rows for each number of shards. Another kind of layer is another function here."""
PLANS: tuple[Callable[[], Iterator[Row]], ...] = (virtual_shard_rows, branch_rows, replica_rows, gathered_rows)
"""Rows of what does not depend on a number of shards."""


def all_rows(size: Workload, microbatches: int, shards: Sequence[int]) -> Iterator[Row]:
    """The whole table."""
    for t in shards:
        yield from transformer_rows(size, microbatches, t)
    for of_layers in LAYERS:
        for t in shards:
            yield from of_layers(t)
    for of_plans in PLANS:
        yield from of_plans()


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
        {"workers": row.workers, "what": row.what, "formula": row.formula, "bytes": row.wanted, "ledger": row.counted}
        for row in all_rows(size, given.microbatches, given.shards)
    ]
    good = all(row["bytes"] == row["ledger"] for row in found)
    cells = []
    for row in found:
        sizes = [f"{row[key]:,}" for key in ("bytes", "ledger")]
        cells.append([row["workers"], row["what"], row["formula"], *sizes, "yes" if row["bytes"] == row["ledger"] else "NO"])
    note = (
        f"The example GPT: d = {size.depth} blocks, h = {size.width}, s = {size.context}, {size.batch_size} samples a step in "
        f"m = {given.microbatches} microbatches of b, t shards. Below it small models, {SAMPLES} samples (B) a step in "
        f"{MICROBATCHES} microbatches: convolutions of images H x W; LSTMs of L layers and D directions with H hidden units, N "
        "sequences of S steps; w workers, R replicas. float32; sent by all workers in one step. A sum of at most "
        f"{ONE_PHASE_BYTES:,} bytes is sent by everyone to all, t (t-1) times."
    )
    text = note + "\n\n" + table(["t, w, R", "what", "formula (elements)", "bytes", "ledger", "equal"], cells)
    print(json.dumps({"environment": environment(), "rows": found}) if given.json else text)
    if given.page:
        given.page.write_text(page("Are the bytes that workers send those of the formulas?", command_line(), text))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
