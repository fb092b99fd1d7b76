"""The example GPT on shards, written down in plain PyTorch in one process: the reference whose bits a sharded run must have.

No raypar in here. A list has one entry a shard. Weights of the whole model are cut by rules written anew: heads and features
[floor(i n / t), floor((i+1) n / t)), sums over shards as over blocks (`over_shards`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from helpers import reference
from torch import Tensor


def run_of(total: int, shards: int, i: int) -> slice:
    return slice(i * total // shards, (i + 1) * total // shards)


def in_order(parts: Any) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def over_shards(parts: Any) -> Tensor:
    """A sum over shards: over the tree, bfloat16 in float32 and rounded once."""
    if parts[0].dtype in (torch.bfloat16, torch.float16):
        return over_shards([part.float() for part in parts]).to(parts[0].dtype)
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1
    return over_shards(parts[:left]) + over_shards(parts[left:])


class Fan(torch.autograd.Function):
    """One value for every shard; their gradients are added over shards."""

    @staticmethod
    def forward(ctx, x, shards):
        return tuple(x.clone() for _ in range(shards))

    @staticmethod
    def backward(ctx, *gradients):
        return over_shards([g.contiguous() for g in gradients]), None


class VocabularyLoss(torch.autograd.Function):
    """Summed cross-entropy of logits [n, vocab] given in parts."""

    @staticmethod
    def forward(ctx, targets, *parts):
        tops = [p.max(1).values for p in parts]
        powers = [(p - top[:, None]).exp() for p, top in zip(parts, tops, strict=True)]
        highest = torch.stack(tops).max(0).values
        normaliser = in_order([w.sum(1) * (top - highest).exp() for w, top in zip(powers, tops, strict=True)])
        start, chosen, places = 0, [], []
        for part in parts:
            here = (targets >= start) & (targets < start + part.shape[1])
            place = torch.where(here, targets - start, 0)
            chosen.append(torch.where(here, part[torch.arange(len(part)), place], torch.zeros((), dtype=part.dtype)))
            places.append((here, place))
            start += part.shape[1]
        ctx.probabilities = [w * ((top - highest).exp() / normaliser)[:, None] for w, top in zip(powers, tops, strict=True)]
        ctx.places = places
        return (normaliser.log() + highest - in_order(chosen)).sum()

    @staticmethod
    def backward(ctx, gradient):
        found = []
        for p, (here, place) in zip(ctx.probabilities, ctx.places, strict=True):
            p = p.clone()
            p[torch.arange(len(p)), place] -= here.to(p.dtype)
            found.append(p * gradient)
        return (None, *found)


def gpt_on_shards(
    slices: list[dict[str, Tensor]],
    tokens: Tensor,
    targets: Tensor,
    *,
    depth: int,
    heads: int,
    shards: int | dict[str, int],
    sequence: bool,
    compute: str | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Loss, and by shard the gradients of its `slices` (as `gpt_slices` makes them; of layers with fewer shards, in the first).

    `shards`: of all layers, or by layer. With `sequence` the norms' gradients are parts of a sum over shards; else all are
    whole, and those of what every shard holds whole are equal. `compute`: bf16 for PyTorch's autocast; results of sums over
    shards are bfloat16 then (added in float32, rounded once), but for the embedding's, which is not cast. `bf16 parameters`:
    layers have rounded copies of the slices; `bf16 gradients`: their gradients stay in bfloat16. With `fp16` in the place of
    bf16 all is float16. `scale`: where the backward pass starts.
    """
    rounded = compute is not None and " " in compute
    lower = torch.float16 if compute is not None and compute.startswith("fp16") else torch.bfloat16
    mixed = torch.autocast("cpu", lower, enabled=compute is not None and not rounded, cache_enabled=False)

    def cast(x: Tensor) -> Tensor:
        return x.to(lower) if compute is not None and not rounded else x

    width, vocab = slices[0]["block0.project.bias"].shape[0], sum(len(s.get("head.logits.weight", ())) for s in slices)
    each = width // heads
    batch, seq = tokens.shape
    leaves: list[dict[str, Tensor]] = [{} for _ in slices]

    def of(layer: str) -> int:
        return shards if isinstance(shards, int) else shards[layer]

    def part(name: str, i: int) -> Tensor:
        given = slices[i][name].detach()
        return leaves[i].setdefault(name, (given.to(lower) if rounded else given).requires_grad_())

    def whole(name: str) -> Tensor:
        """Held by every shard, used once: all of them compute the same."""
        leaf = part(name, 0)
        for i in range(1, of(name.split(".")[0])):
            leaves[i][name] = leaf
        return leaf

    def norm(name: str, x: list[Tensor]) -> list[Tensor]:
        """On rows of a value: by sequence each shard norms its own, else the one value is normed once."""
        if len(x) == 1:
            return [F.layer_norm(x[0], (width,), whole(f"{name}.weight"), whole(f"{name}.bias"))]
        return [F.layer_norm(v, (width,), part(f"{name}.weight", i), part(f"{name}.bias", i)) for i, v in enumerate(x)]

    def between(x: list[Tensor], count: int) -> list[Tensor]:
        """As the layers of a stage with `count` shards hold a value."""
        if not sequence or len(x) == count:
            return x
        whole = torch.cat(x, 1)
        return (
            [whole]
            if count == 1
            else [*whole.split([s.stop - s.start for s in (run_of(seq, count, i) for i in range(count))], 1)]
        )

    def gathered(x: list[Tensor], count: int) -> tuple[Tensor, ...]:
        return Fan.apply(cast(torch.cat(x, 1) if len(x) > 1 else x[0]), count)

    def row(inputs: list[Tensor], name: str) -> list[Tensor]:
        bias = whole(f"{name}.bias")
        if len(inputs) == 1:
            return [F.linear(inputs[0], part(f"{name}.weight", 0), bias)]
        total = over_shards([F.linear(h, part(f"{name}.weight", i)) for i, h in enumerate(inputs)]) + cast(bias)
        return between([total], len(inputs))

    with mixed:
        count = of("embed")
        looked_up, start = [], 0
        for i in range(count):
            table = part("embed.token.weight", i)
            absent = (tokens < start) | (tokens >= start + len(table))
            looked_up.append(F.embedding((tokens - start).masked_fill(absent, 0), table).masked_fill(absent[..., None], 0.0))
            start += len(table)
        x = between([over_shards(looked_up)], count)
        positions = F.embedding(torch.arange(seq), whole("embed.position.weight"))
        x = [v + p for v, p in zip(x, positions.split([v.shape[1] for v in x]), strict=True)]
        for n in range(depth):
            block = f"block{n}"
            count = of(block)
            x = between(x, count)
            out = []
            for i, h in enumerate(gathered(norm(f"{block}.norm1", x), count)):
                mine = run_of(heads, count, i)
                qkv = F.linear(h, part(f"{block}.qkv.weight", i), part(f"{block}.qkv.bias", i))
                q, k, v = qkv.view(batch, seq, 3, mine.stop - mine.start, each).permute(2, 0, 3, 1, 4)
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                out.append(attended.transpose(1, 2).reshape(batch, seq, -1))
            x = [a + b for a, b in zip(x, row(out, f"{block}.project"), strict=True)]
            out = []
            for i, h in enumerate(gathered(norm(f"{block}.norm2", x), count)):
                out.append(F.gelu(F.linear(h, part(f"{block}.up.weight", i), part(f"{block}.up.bias", i)), approximate="tanh"))
            x = [a + b for a, b in zip(x, row(out, f"{block}.down"), strict=True)]
        count = of("head")
        x = norm("head.norm", between(x, count))
        logits = [F.linear(h, part("head.logits.weight", i)).flatten(0, 1) for i, h in enumerate(gathered(x, count))]
        if count == 1:
            loss = F.cross_entropy(logits[0].float() if rounded else logits[0], targets.flatten(), reduction="sum")
        else:
            loss = VocabularyLoss.apply(targets.flatten(), *[part.float() if compute else part for part in logits])
    assert sum(part.shape[1] for part in logits) == vocab
    loss.backward(torch.tensor(scale, dtype=loss.dtype))
    gradients = [{name: leaf.grad for name, leaf in mine.items()} for mine in leaves]
    widens = rounded and compute is not None and compute.endswith(" parameters")
    return loss.detach(), [{n: g.float() if widens else g for n, g in mine.items()} for mine in gradients]


def index_of(name: str, shape: Sequence[int], heads: int, count: int, i: int) -> Any:
    """Which part of a parameter of the example GPT, by its name, shard i of `count` has."""
    _, module, kind = name.split(".")
    mine = run_of(heads, count, i)
    if module == "qkv":
        return torch.arange(shape[0]).view(3, heads, shape[0] // 3 // heads)[:, mine].flatten()
    if module in ("up", "token", "logits"):
        return run_of(shape[0], count, i)
    if module == "project" and kind == "weight":
        return slice(None), torch.arange(shape[1]).view(heads, shape[1] // heads)[mine].flatten()
    if module == "down" and kind == "weight":
        return slice(None), run_of(shape[1], count, i)
    return slice(None)


def gpt_slices(state: dict[str, Tensor], heads: int, shards: int | dict[str, int]) -> list[dict[str, Tensor]]:
    """What every shard holds of the whole model's parameters; a layer with fewer shards is in the first ones only."""
    most = shards if isinstance(shards, int) else max(shards.values())
    held: list[dict[str, Tensor]] = [{} for _ in range(most)]
    for name, whole in state.items():
        count = shards if isinstance(shards, int) else shards[name.split(".")[0]]
        for i in range(count):
            held[i][name] = whole[index_of(name, whole.shape, heads, count, i)].clone().contiguous()
    return held


def gpt_whole(held: list[dict[str, Tensor]], like: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The opposite of `gpt_slices`; all layers have as many shards. `like`: tensors of the whole model's shapes."""
    whole = {name: torch.full_like(tensor, torch.nan) for name, tensor in like.items()}
    for i, mine in enumerate(held):
        for name, part in mine.items():
            whole[name][index_of(name, whole[name].shape, heads, len(held), i)] = part
    return whole


@dataclass
class Trained:
    """Of `train`: after each step loss, norm and scaled gradients by shard; at the end slices and optimizer state by shard."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[list[dict[str, Tensor]]] = field(default_factory=list)
    slices: list[dict[str, Tensor]] = field(default_factory=list)
    state: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)


def train(
    slices: list[dict[str, Tensor]],
    batches: list[list[tuple[Tensor, Tensor]]],
    *,
    blocks: int,
    depth: int,
    heads: int,
    shards: int | dict[str, int],
    sequence: bool,
    lr: float,
    eps: float,
    clip_norm: float,
    state: Sequence[dict[str, dict[str, Tensor]]] = (),
    compute: str | None = None,
    loss_scale: Any = None,
) -> Trained:
    """AdamW steps on `batches[step][microbatch]` by the numerics contract. `state`: the optimizers', by shard; `compute`: as in
    `gpt_on_shards`; `loss_scale`: how the loss is scaled with float16."""
    slices = [{name: tensor.clone() for name, tensor in mine.items()} for mine in slices]
    optimizers = [torch.optim.AdamW(list(mine.values()), lr=lr, eps=eps) for mine in slices]
    for mine, optimizer, kept in zip(slices, optimizers, state, strict=False):
        for name, parameter in mine.items():
            optimizer.state[parameter] = {key: value.clone() for key, value in kept[name].items()}
    found = Trained(slices=slices)
    cut = ("qkv", "up", "token", "logits")

    def held_by_all(name: str) -> bool:
        _, module, kind = name.split(".")
        return module not in cut and (kind == "bias" or module not in ("project", "down"))

    skipped: list[bool] = []
    for microbatches in batches:
        m = len(microbatches)
        scale = 1.0 if loss_scale is None else 2.0 ** reference.loss_scale_exponent(loss_scale, skipped)
        sums: list[Any] = []
        losses = []
        for block in range(blocks):
            total: Any = None
            for microbatch in range(block * m // blocks, (block + 1) * m // blocks):
                loss, gradients = gpt_on_shards(
                    slices,
                    *microbatches[microbatch],
                    depth=depth,
                    heads=heads,
                    shards=shards,
                    sequence=sequence,
                    compute=compute,
                    scale=scale,
                )
                losses.append(float(loss))
                total = add(total, gradients)
            sums.append(total)
        gradients = tree(sums)
        if sequence:
            for name in slices[0]:
                if ".norm" in name:
                    holders = [i for i, mine in enumerate(gradients) if name in mine]
                    whole = over_shards([gradients[i][name] for i in holders])
                    for i in holders:
                        gradients[i][name] = whole.clone()
        if compute is not None and compute.endswith(" gradients"):
            gradients = [{name: gradient.float() for name, gradient in mine.items()} for mine in gradients]
        count = float(sum(targets.numel() for _, targets in microbatches))
        parts: list[Tensor] = []
        for name in slices[0]:
            parts += [mine[name] for mine in gradients if name in mine][: 1 if held_by_all(name) else None]
        pieces = [piece for part in parts for piece in part.flatten().split(reference.PIECE)]
        norm = math.sqrt(math.fsum(float(torch.dot(piece, piece)) for piece in pieces)) / scale / count
        factor = min(1.0, clip_norm / (norm + 1e-6)) / count / scale
        skipped.append(not math.isfinite(norm))
        if skipped[-1]:
            found.losses.append(math.fsum(losses) / count)
            found.norms.append(norm)
            found.gradients.append([])
            continue
        scaled = []
        for mine, tensors, optimizer in zip(slices, gradients, optimizers, strict=True):
            scaled.append({name: tensor * factor for name, tensor in tensors.items()})
            for name, parameter in mine.items():
                parameter.grad = scaled[-1][name]
            optimizer.step()
        found.losses.append(math.fsum(losses) / count)
        found.norms.append(norm)
        found.gradients.append([{name: tensor.clone() for name, tensor in mine.items()} for mine in scaled])
    found.state = [
        {name: dict(optimizer.state[parameter]) for name, parameter in mine.items()}
        for mine, optimizer in zip(slices, optimizers, strict=True)
    ]
    return found


def add(a: Any, b: Any) -> Any:
    """By shard and name; an empty block is skipped."""
    if a is None or b is None:
        return b if a is None else a
    return [{name: one[name] + other[name] for name in one} for one, other in zip(a, b, strict=True)]


def tree(sums: list[Any]) -> Any:
    """Over blocks: the left subtree is the largest power of two below their number."""
    if len(sums) == 1:
        return sums[0]
    left = 1
    while left * 2 < len(sums):
        left *= 2
    return add(tree(sums[:left]), tree(sums[left:]))
