"""The example GPT's job on shards in one plain process, from a job file: as `examples/plain_gpt.py` for a run without.

    cd tests && python -m helpers.quick_reference ../jobs/quickstart.yaml --shards 2 [--steps 20] [--sequence] [--set a.b=c]

prints the loss of every step and, as `raypar train` does, the hash of the weights. No raypar in here.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from helpers.same_shards import add, gpt_on_shards, gpt_slices, gpt_whole, over_shards, tree

from examples.plain_gpt import function, read_job, sample, seed_of

CUT = ("qkv", "up", "token", "logits")
ROWS = ("project", "down")


def held_by_all(name: str) -> bool:
    """Norms, positions and the biases of row layers."""
    _, module, kind = name.split(".")
    return module not in CUT and (kind == "bias" or module not in ROWS)


def trained(job: dict[str, Any], shards: int, *, sequence: bool = False) -> tuple[list[float], str]:
    """Losses and the hash of the weights (raypar/NUMERICS.md, the numerics contract, with rule 11). `shards`: 1 is without."""
    torch.set_num_threads(1)
    seed, batch, m, args = job["seed"], job["batch_size"], job["microbatches"], job["model"]["args"]
    blocks, compute = job.get("virtual_replicas") or min(m, 16), (job.get("precision") or {}).get("compute")
    random.seed(seed), numpy.random.seed(seed % 2**32), torch.manual_seed(seed)
    model, data = function(job["model"])(), function(job["data"])()
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    slices = gpt_slices(state, args["heads"], shards)
    optimizers = [function(job["optimizer"])(list(mine.values())) for mine in slices]
    base_lr, factor_of = optimizers[0].defaults["lr"], function(job["lr_schedule"])
    losses = []
    for step in range(job["steps"]):
        sums, parts, count = [], [], 0.0
        for block in range(blocks):
            total: Any = None
            for microbatch in range(block * m // blocks, (block + 1) * m // blocks):
                x, y = samples_of(data, job, step, range(microbatch * batch // m, (microbatch + 1) * batch // m))
                loss, gradients = gpt_on_shards(
                    slices, x, y, depth=args["depth"], heads=args["heads"], shards=shards, sequence=sequence, compute=compute
                )
                parts.append(loss.item())
                count += y.numel()
                total = add(total, gradients)
            sums.append(total)
        scale(tree(sums), slices, count, job["clip_norm"], sequence and shards > 1)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base_lr * factor_of(step)
            optimizer.step()
        losses.append(math.fsum(parts) / count)
    weights = gpt_whole(slices, state, args["heads"])
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}\0".encode() + weights[name].contiguous().numpy().tobytes())
    return losses, digest.hexdigest()


def samples_of(data: Any, job: dict[str, Any], step: int, places: range) -> tuple[Tensor, Tensor]:
    """A microbatch, as `examples.plain_gpt` reads it."""
    found = []
    for place in places:
        epoch, entry = divmod(step * job["batch_size"] + place, len(data))
        generator = torch.Generator().manual_seed(seed_of(job["seed"], "epoch", epoch))
        index = torch.randperm(len(data), generator=generator)[entry].item()
        found.append(sample(data, job["seed"], epoch, index))
    x, y = (torch.stack(field) for field in zip(*found, strict=True))
    return x, y


def scale(
    gradients: list[dict[str, Tensor]], slices: list[dict[str, Tensor]], count: float, clip: float, partial: bool
) -> None:
    """Complete what is partial, norm, clip; into `grad` of the slices."""
    names = list(slices[0])
    for name in names if partial else ():
        if ".norm" in name:
            whole = over_shards([mine[name] for mine in gradients])
            for mine in gradients:
                mine[name] = whole.clone()
    parts = [mine[name] for name in names for mine in gradients[: 1 if held_by_all(name) else None]]
    squares = math.fsum(float(torch.dot(p, p)) for part in parts for p in part.flatten().split(32768))
    factor = min(1.0, clip / (math.sqrt(squares) / count + 1e-6)) / count
    for mine, scaled in zip(slices, gradients, strict=True):
        for name, parameter in mine.items():
            parameter.grad = scaled[name] * factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--sequence", action="store_true", help="sequence_parallel")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c")
    given = parser.parse_args()
    job = read_job(given.job, given.overrides)
    losses, digest = trained({**job, "steps": given.steps or job["steps"]}, given.shards, sequence=given.sequence)
    for step, loss in enumerate(losses):
        print(f"step {step + 1} loss {loss:.6f}")
    print(f"weights sha256 {digest}")


if __name__ == "__main__":
    main()
