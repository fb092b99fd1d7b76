"""Measures one model for `capture.py`, in a process of its own: `capture_one.py raypar|pipelining|list NAME`.

Prints a line of JSON after each measurement, so that a time limit costs only what comes after it.
"""

from __future__ import annotations

import copy
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from helpers.captured_stages import Captured, capture, differences, make_stages, run_plain, run_stages
from helpers.model_zoo import ZOO, make_zoo_model
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import raypar
from raypar.errors import RayparError
from raypar.job import ModelConfig
from raypar.job.read_job import load_job
from raypar.model.capture.units import find_units
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import parameter_shapes
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

STAGES, SHARDS = 3, 2
PAIRS, PAIRS_S = 61, 4.0
"""Most pairs of a comparison of times, and the seconds after which no more are taken."""


def say(**found: Any) -> None:
    """Print results."""
    print(json.dumps(found), flush=True)


def first_line(error: BaseException) -> str:
    """The error's class and first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:160]


def pairs_of(one: Callable[[], object], other: Callable[[], object]) -> list[tuple[float, float]]:
    """Processor seconds of both, called in turn; which comes first turns too."""
    found: list[tuple[float, float]] = []
    begin = time.monotonic()
    while len(found) < 3 or (len(found) < PAIRS and time.monotonic() - begin < PAIRS_S):
        seconds = {}
        for place in (0, 1) if len(found) % 2 else (1, 0):
            start = time.process_time()
            (one, other)[place]()
            seconds[place] = time.process_time() - start
        found.append((seconds[0], seconds[1]))
    return found[1:]


# -- raypar ------------------------------------------------------------------------------------------------------------------


class Rows:
    """The batch of a model of the zoo in float64, sample by sample; `nothing` is the target of a loss of the output alone."""

    def __init__(self, name: str) -> None:
        self.batch = ZOO[name].batch()

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        fields = {key: value.double() if value.is_floating_point() else value for key, value in self.batch.items()}
        return {key: value[index] for key, value in fields.items()} | {"nothing": torch.zeros(())}


def loss_of_output(output: Any, target: Tensor, name: str) -> Tensor:
    """The zoo's loss."""
    return ZOO[name].loss(output)


def measure_raypar(name: str) -> None:
    """Layers, equality, times and shards of a model."""
    model = ZOO[name]
    torch.manual_seed(0)
    plain, batch = model.make(0.0).train(), model.batch()
    start = time.process_time()
    captured = capture(plain, batch)
    count = len(captured.layers)
    say(capture_s=time.process_time() - start, layers=count)
    say(
        three_stages=differences_in_stages(name, captured, plain, sorted({count * s // STAGES for s in range(1, STAGES)} - {0}))
    )
    say(**cost_of_step(name, captured, plain))
    measure_shards(name, captured)
    say(every_unit=differences_in_stages(name, captured, plain, list(range(1, count))))


def differences_in_stages(name: str, captured: Captured, plain: nn.Module, cuts: list[int]) -> list[str]:
    """What differs from the plain module in stages that begin at these layers."""
    model, plain = ZOO[name], copy.deepcopy(plain)
    stages, batch = make_stages(captured, plain, cuts), model.batch()
    found = run_stages(captured, stages, batch, model.loss, seeded=False)
    return differences(found, run_plain(captured, plain, batch, model.loss, seeded=False))


def cost_of_step(name: str, captured: Captured, plain: nn.Module) -> dict[str, float]:
    """Processor time of forward and backward in one stage beside the plain module's: the ratio less 1, and milliseconds."""
    model, batch = ZOO[name], ZOO[name].batch()
    (stage,) = make_stages(captured, plain, [])

    def ours() -> None:
        values: dict[str, Tensor] = dict(batch)
        for layer, module in zip(stage.layers, stage.modules, strict=True):
            made = module(*(values[key] for key in layer.inputs))
            values |= dict(zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True))
        outputs = [values[key] for key in dict.fromkeys(captured.cache.first_trace.outputs)]
        sum(each.float().pow(2).mean() for each in outputs if each.requires_grad).backward()  # type: ignore[union-attr]

    def theirs() -> None:
        outputs = [t for t in tree_leaves(plain(**batch)) if isinstance(t, Tensor) and t.requires_grad]
        sum(each.float().pow(2).mean() for each in outputs).backward()  # type: ignore[union-attr]

    model.loss(plain(**batch))
    found = pairs_of(ours, theirs)
    ratio, more_s = (statistics.median(values) for values in zip(*((a / b, a - b) for a, b in found), strict=True))
    return {"cost": ratio - 1, "cost_ms": more_s * 1e3}


def measure_shards(name: str, captured: Captured) -> None:
    """The share of the bytes that two shards cut, and the loss of a step beside one shard's, in float64."""
    try:
        graph = Graph(tuple(captured.layers), output=captured.cache.first_trace.outputs[0], ties=tuple(captured.ties))
        layout = compute_shard_layout(graph, SHARDS)
        sizes = {key: shape.numel() for key, shape in parameter_shapes(graph).items()}
        cut = sum(sizes[key] for key in layout.cuts.keys() & sizes.keys())
        say(share_cut=cut / sum(sizes.values()))
        if not cut:
            return
        held = [
            sum(layout.elements_on_shard(key, sizes[key], s) for key in layout.cuts.keys() & sizes.keys())
            for s in range(SHARDS)
        ]
        say(share_held=max(held) / cut)
        losses = {shards: losses_of(name, shards) for shards in (1, SHARDS)}
        say(shards_off=max(abs(a - b) / abs(a) for a, b in zip(losses[1], losses[SHARDS], strict=True)))
    except RayparError as error:
        say(shards_error=first_line(error))


def losses_of(name: str, shards: int) -> list[float]:
    """The losses of two steps in one stage."""
    rows = len(Rows(name))
    spec = raypar.Trainer(
        model=(make_zoo_model, {"name": name}),
        loss=(loss_of_output, {"name": name}),
        data={"function": Rows, "args": {"name": name}, "target": "nothing"},
        steps=2,
        batch_size=rows,
        microbatches=1,
        optimizer=("torch.optim:SGD", {"lr": 0.01}),
        dtype="float64",
    ).job
    graph = make_layer_graph(spec)
    run = OneProcessRun(spec, ParallelPlan.mesh(layers=len(graph.layers), tp=shards), "1f1b", graph=graph)
    found = []
    for step in range(2):
        run.step(step)
        found.append(run.cores[0].step_commit.outcome.loss)  # type: ignore[union-attr]
    return found


# -- torch.distributed.pipelining --------------------------------------------------------------------------------------------


def measure_pipelining(name: str) -> None:
    """Whether it traces a model into three stages, and whether they give the plain module's loss and gradients."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    model = ZOO[name]
    torch.manual_seed(0)
    plain, batch = model.make(0.0).train(), model.batch()
    units = list(find_units(plain))
    split = (
        {units[len(units) * stage // STAGES]: SplitPoint.BEGINNING for stage in range(1, STAGES)}
        if len(units) >= STAGES
        else {}
    )
    given, start = copy.deepcopy(plain), time.process_time()
    try:
        pipe = pipeline(given, (), {key: value.clone() for key, value in batch.items()}, split_spec=split)
    except Exception as error:
        say(traced=False, trace_s=time.process_time() - start, error=first_line(error))
        return
    say(traced=True, trace_s=time.process_time() - start, stages=pipe.num_stages)
    try:
        compare_pipe(model.loss, plain, pipe, batch)
    except Exception as error:
        say(error=first_line(error))


def compare_pipe(loss: Callable[[Any], Tensor], plain: nn.Module, pipe: Any, batch: dict[str, Tensor]) -> None:
    """Say whether loss and gradients are the plain module's; those of copies in several stages are added."""
    del pipe.split_gm.forward  # raises; `pipe(...)` would cut the graph between stages, which a schedule connects by hand
    output = plain(**batch)
    leaves, structure = tree_flatten(output)
    made = tree_flatten(pipe.split_gm(**batch))[0]  # a tuple in the place of a ModelOutput
    wanted, found = loss(output), loss(tree_unflatten(made, structure) if len(made) == len(leaves) else tuple(made))
    say(loss=[] if torch.equal(wanted, found) else ["loss"])
    wanted.backward()
    found.backward()
    theirs: dict[str, Tensor] = {}
    for name, parameter in pipe.split_gm.named_parameters():
        stage, _, path = name.partition(".")
        path = re.sub(r"@\d+", "", path if stage.startswith("submod_") else name)  # `@1`: of a module's second call
        if parameter.grad is not None:
            theirs[path] = theirs[path] + parameter.grad if path in theirs else parameter.grad
    aliases = dict(plain.named_parameters(remove_duplicate=False))
    of = {id(p): name for name, p in reversed(list(plain.named_parameters(remove_duplicate=False)))}
    summed: dict[str, Tensor] = {}
    for path, gradient in theirs.items():
        home = of[id(aliases[path])] if path in aliases else path
        summed[home] = summed[home] + gradient if home in summed else gradient
    own = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    odd = sorted(own.keys() ^ summed.keys())
    say(gradients=odd + [key for key, value in own.items() if key in summed and not torch.equal(value, summed[key])])


# -- beside a list of layers -------------------------------------------------------------------------------------------------


class OneModule(nn.Module):
    """The quickstart's model as a module that calls its layers."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        from examples import gpt

        self.layers = nn.ModuleList(gpt.layers(**sizes))

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens


def measure_list() -> None:
    """Processor seconds of steps of the quickstart, captured from a module and as a list, in turn."""
    from pathlib import Path

    spec = load_job(str(Path(__file__).parents[1] / "quickstart.yaml")).replace(validation=None)
    module = spec.replace(model=ModelConfig(function=OneModule, args=spec.model.args))
    runs = [OneProcessRun(each, ParallelPlan.mesh(layers=6), "1f1b") for each in (module, spec)]
    steps = [0, 0]

    def step(number: int) -> None:
        runs[number].step(steps[number])
        steps[number] += 1

    global PAIRS_S
    PAIRS_S = 120.0
    found = pairs_of(lambda: step(0), lambda: step(1))
    losses = [run.cores[0].step_commit.outcome.loss for run in runs]  # type: ignore[union-attr]
    assert losses[0] == losses[1], losses
    say(module_s=[a for a, _ in found], list_s=[b for _, b in found])


if __name__ == "__main__":
    torch.set_num_threads(1)
    side, model_name = sys.argv[1:]
    if side == "list":
        measure_list()
    else:
        {"raypar": measure_raypar, "pipelining": measure_pipelining}[side](model_name)
