"""Which transformers of libraries are cut over two shards without a word: `python jobs/bench/shard_styles.py [--models ...]`.

A row a model: the share of its parameters that stays whole on every shard, and the largest difference of loss and gradients
from the plain module's, in float64. Packages, of which none pulls PyTorch: `pip install --no-deps diffusers x-transformers
vit-pytorch einops einx loguru accelerate`, and torchvision.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent))
from shard_models import MODELS, SAMPLES

import raypar
from raypar.errors import RayparError
from raypar.job import Job
from raypar.model.layer_skeletons import canonical_names, parameter_shapes
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.infer_styles_by_structure import structure_of
from raypar.plan import ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

SHARDS = 2
UNSEEN = "unused"
"""The target, which the loss does not read."""


class Rows:
    """The samples of a model's batch, in float64."""

    def __init__(self, name: str) -> None:
        self.batch = MODELS[name][1]()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = {name: f[index].double() if f.is_floating_point() else f[index] for name, f in self.batch.items()}
        return found | {UNSEEN: torch.zeros(())}


def make_model(name: str) -> nn.Module:
    """A model, with no parameter at zero: what begins there would hide what is behind it. Labels are not dropped at random."""
    model = MODELS[name][0]()
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0  # type: ignore[assignment]
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.05)
    return model


def loss_of(output: Any, unused: Tensor) -> Tensor:
    """Cubes and squares of everything that the model returns."""
    leaves = tree_leaves(vars(output) if hasattr(output, "__dataclass_fields__") else output)
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum(((leaf**3).mean() + (leaf**2).mean() for leaf in found), torch.zeros(()))


def job_of(name: str) -> Job:
    """One step in float64."""
    return raypar.Trainer(
        model=(make_model, {"name": name}),
        loss=loss_of,
        data={"function": Rows, "args": {"name": name}, "target": UNSEEN},
        steps=1,
        batch_size=SAMPLES,
        microbatches=1,
        optimizer=("torch.optim:SGD", {"lr": 0.1}),
        dtype="float64",
    ).job


def plain_gradients(spec: Job) -> tuple[float, dict[str, Tensor | None]]:
    """(loss, gradients) of the user's own module under plain autograd, on the same batch."""
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(spec.seed)
    model = spec.model.call().double().train()
    samples = spec.data.call()
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed_of(spec.seed, "epoch", 0)))
    chosen = [samples[i] for i in order.tolist()]
    loss = loss_of(
        model(**{name: torch.stack([sample[name] for sample in chosen]) for name in chosen[0] if name != UNSEEN}),
        torch.zeros(()),
    )
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def measure(name: str) -> dict[str, Any]:
    """The row of a model."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    spec = job_of(name)
    graph = make_layer_graph(spec)
    made = time.perf_counter()
    layout = compute_shard_layout(graph, SHARDS)
    row: dict[str, Any] = {"model": name, "capture_s": made - start, "infer_s": time.perf_counter() - made}
    canonical = canonical_names(graph)
    sizes = {n: shape.numel() for n, shape in parameter_shapes(graph).items() if canonical.get(n, n) == n}
    whole = {n: size for n, size in sizes.items() if n not in layout.cuts}
    row["whole"] = sum(whole.values()) / sum(sizes.values())
    refused = structure_of(graph).refused
    row["largest_whole"] = [
        [n, size / sum(sizes.values()), refused.get(n.rpartition(".")[0], "")]
        for n, size in sorted(whole.items(), key=lambda item: -item[1])[:12]
    ]
    row["styles"] = dict(layout.styles)
    if layout.cuts:
        with OneProcessRun(spec, ParallelPlan.mesh(layers=len(graph.layers), tp=SHARDS), "1f1b", graph=graph) as run:
            loss = run.step(0)[0].loss
            found = {n: [None if g is None else g.clone() for g in copies] for n, copies in run.gradients().items()}
        wanted, gradients = plain_gradients(spec)
        largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
        worst = abs(loss - wanted) / abs(wanted)
        for n, copies in found.items():
            own = gradients[n]
            for shard, got in enumerate(copies):
                if (own is None) != (got is None):
                    raise AssertionError(f"{n}: a gradient is missing")
                if own is not None and got is not None:
                    part = shard_slice_of(layout, n, own, shard)
                    top = float(part.abs().max()) if part.numel() else 0.0
                    scale = top if top > 1e-9 * largest else largest
                    worst = max(worst, float((got - part).abs().max()) / scale if part.numel() else 0.0)
        row["difference"] = worst
    return row


def main() -> None:
    """Print a line of JSON a model, or a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["*"], help="patterns of names")
    parser.add_argument("--json", action="store_true", help="a line of JSON a model")
    parser.add_argument("--why", action="store_true", help="the largest parameters that stay whole, and why")
    args = parser.parse_args()
    rows = []
    for name in (n for n in MODELS if any(fnmatch.fnmatchcase(n, pattern) for pattern in args.models)):
        try:
            row = measure(name)
        except (Exception, RayparError) as error:
            row = {"model": name, "error": f"{type(error).__name__}: {error}"}
            if args.why:
                traceback.print_exc()
        rows.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
        elif "error" in row:
            print(f"| {name} | error | {row['error'][:300]} | |", flush=True)
        else:
            print(
                f"| {name} | {'yes' if 'difference' in row else 'no'} | {row['whole']:.1%} | {row.get('difference', 0):.1e} "
                f"| {row['infer_s']:.2f}",
                flush=True,
            )
            for n, share, why in row["largest_whole"] if args.why else ():
                print(f"    {share:.3f} {n}: {why}")
    cut = [row for row in rows if row.get("difference", 1) <= 1e-12 and row["whole"] <= 0.3]
    print(f"\n{len(cut)} of {len(rows)} are cut, at most 30 % of their parameters whole, equal to 1e-12", file=sys.stderr)


if __name__ == "__main__":
    main()
