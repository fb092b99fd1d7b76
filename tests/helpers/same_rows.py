"""A chain of modules on shards by rows, written down in plain PyTorch in one process: the reference of spatial shards.

No raypar in here. A value is a list of pieces, one a shard: even runs of rows. Which rows a piece needs is found by trying.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from helpers.same_shards import over_shards, run_of
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def runs(total: int, shards: int) -> list[slice]:
    return [run_of(total, shards, i) for i in range(shards)]


def rows_of(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Rows [start, stop) in memory of their own, zeros where there are none."""
    sides = [0, 0] * (x.dim() - 1 - dim) + [max(0, -start), max(0, stop - x.shape[dim])]
    inside = x.narrow(dim, max(0, start), max(0, min(stop, x.shape[dim]) - max(0, start)))
    return F.pad(inside, sides).clone(memory_format=torch.contiguous_format)


class Convolve(torch.autograd.Function):
    """A convolution by rows: pieces of the input, then the weight and the bias of every shard -> pieces of the output."""

    @staticmethod
    def forward(ctx: Any, module: Any, dim: int, shards: int, *given: Tensor) -> tuple[Tensor, ...]:
        pieces, weights, biases = given[:shards], given[shards : 2 * shards], given[2 * shards :]
        whole = torch.cat(pieces, dim)
        axis = dim - 2
        k, s, d, p = (each[axis] for each in (module.kernel_size, module.stride, module.dilation, module.padding))
        padding = [0 if i == axis else each for i, each in enumerate(module.padding)]
        ctx.calls = module.stride, padding, module.dilation, False, [0] * len(padding), module.groups
        total = (whole.shape[dim] + 2 * p - d * (k - 1) - 1) // s + 1
        found, wides = [], []
        for run, weight, bias in zip(runs(total, shards), weights, biases or [None] * shards, strict=True):
            wides.append(rows_of(whole, dim, run.start * s - p, (run.stop - 1) * s - p + d * (k - 1) + 1))
            found.append(torch.convolution(wides[-1], weight, bias, *ctx.calls))
        ctx.kept = dim, shards, whole.shape, total, (k, s, d, p), wides, weights, bool(biases)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dim, shards, shape, total, (k, s, d, p), wides, weights, has_bias = ctx.kept
        gradients = tuple(g.contiguous() for g in gradients)
        whole = torch.cat(gradients, dim)
        inputs, of_weights, of_biases = [], [], []
        for i, run in enumerate(runs(shape[dim], shards)):
            readers = [o for o in range(total) if any(run.start <= o * s - p + j * d < run.stop for j in range(k))]
            first, last = readers[0], readers[-1] + 1
            begin, end = first * s - p, max((last - 1) * s - p + d * (k - 1) + 1, run.stop)
            like = whole.new_empty(1).expand([end - begin if n == dim else size for n, size in enumerate(shape)])
            own = rows_of(whole, dim, first, last)
            made = torch.ops.aten.convolution_backward(own, like, weights[i], None, *ctx.calls, (True, False, False))[0]
            inputs.append(rows_of(made, dim, run.start - begin, run.stop - begin))
            sizes = [whole.shape[1]] if has_bias else None
            _, of_weight, of_bias = torch.ops.aten.convolution_backward(
                gradients[i], wides[i], weights[i], sizes, *ctx.calls, (False, True, has_bias)
            )
            of_weights.append(of_weight)
            of_biases += [of_bias] * has_bias
        return None, None, None, *inputs, *of_weights, *of_biases


class Transposed(torch.autograd.Function):
    """A transposed convolution by rows, without its bias."""

    @staticmethod
    def forward(ctx: Any, module: Any, dim: int, shards: int, *given: Tensor) -> tuple[Tensor, ...]:
        pieces, weights = given[:shards], given[shards:]
        whole = torch.cat(pieces, dim)
        axis = dim - 2
        k, s, d, p, more = (
            each[axis] for each in (module.kernel_size, module.stride, module.dilation, module.padding, module.output_padding)
        )
        padding, extra = (
            [0 if i == axis else e for i, e in enumerate(each)] for each in (module.padding, module.output_padding)
        )
        ctx.calls = module.stride, padding, module.dilation, True, extra, module.groups
        total = (whole.shape[dim] - 1) * s - 2 * p + d * (k - 1) + 1 + more
        found = []
        for run, weight in zip(runs(total, shards), weights, strict=True):
            reach = [n for n in range(whole.shape[dim]) if any(run.start <= n * s - p + j * d < run.stop for j in range(k))]
            made = torch.convolution(rows_of(whole, dim, reach[0], reach[-1] + 1), weight, None, *ctx.calls)
            begin = reach[0] * s - p
            found.append(rows_of(made, dim, run.start - begin, run.stop - begin))
        ctx.kept = dim, pieces, weights, whole.shape[dim], (k, s, d, p)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dim, pieces, weights, size, (k, s, d, p) = ctx.kept
        whole = torch.cat([g.contiguous() for g in gradients], dim)
        inputs, of_weights = [], []
        for piece, weight, run in zip(pieces, weights, runs(size, len(pieces)), strict=True):
            wide = rows_of(whole, dim, run.start * s - p, (run.stop - 1) * s - p + d * (k - 1) + 1)
            of_input, of_weight, _ = torch.ops.aten.convolution_backward(
                wide, piece, weight, None, *ctx.calls, (True, True, False)
            )
            inputs.append(of_input)
            of_weights.append(of_weight)
        return None, None, None, *inputs, *of_weights


class Normalise(torch.autograd.Function):
    """A batch norm in training on pieces, then the weight and the bias of every shard; notes the statistics."""

    @staticmethod
    def forward(ctx: Any, module: Any, shards: int, *given: Tensor) -> tuple[Tensor, ...]:
        pieces, weights, biases = given[:shards], given[shards : 2 * shards], given[2 * shards :]
        dims = [0, *range(2, pieces[0].dim())]
        counts = [torch.tensor([float(p.numel() // p.shape[1])], dtype=torch.float64) for p in pieces]
        means = [p.double().sum(dims) / n for p, n in zip(pieces, counts, strict=True)]
        aways = [p.double() - m.view([1, -1, *[1] * (p.dim() - 2)]) for p, m in zip(pieces, means, strict=True)]
        both = [((a * a).sum(dims) / n, m) for a, m, n in zip(aways, means, counts, strict=True)]
        count = over_shards(counts)
        mean = over_shards([n * m for n, (_, m) in zip(counts, both, strict=True)]) / count
        terms = [n * (v + (m - mean) * (m - mean)) for n, (v, m) in zip(counts, both, strict=True)]
        variance = over_shards(terms) / count
        module.running_mean.mul_(1 - module.momentum).add_(mean.float(), alpha=module.momentum)
        unbiased = (variance * (count / (count - 1))).float()
        module.running_var.mul_(1 - module.momentum).add_(unbiased, alpha=module.momentum)
        mean, variance = mean.float(), variance.float()
        ctx.kept = pieces, weights, mean, (variance.double() + module.eps).rsqrt(), count, dims
        return tuple(
            F.batch_norm(p, mean, variance, w, b, False, 0.0, module.eps)
            for p, w, b in zip(pieces, weights, biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pieces, weights, mean, inverse, count, dims = ctx.kept
        shape = [1, -1, *[1] * (pieces[0].dim() - 2)]
        aways = [p - mean.view(shape) for p in pieces]
        sums = [
            torch.stack([g.sum(dims, dtype=torch.float64), (g * away).sum(dims, dtype=torch.float64)])
            for g, away in zip(gradients, aways, strict=True)
        ]
        constant, slope = over_shards(sums) / count
        slope = (slope * inverse.square()).float()
        inputs = []
        for g, away, weight in zip(gradients, aways, weights, strict=True):
            scale = (inverse * weight.double()).float()
            inputs.append((g - constant.float().view(shape) - away * slope.view(shape)) * scale.view(shape))
        of_weights = [(each[1] * inverse).float() for each in sums]
        return None, None, *inputs, *of_weights, *(each[0].float() for each in sums)


class SameRows:
    """Modules in a row on shards, the input cut along `dim`; `run` computes them, each float32 and in training."""

    def __init__(self, modules: Sequence[nn.Module], shards: int, dim: int = 2) -> None:
        self.modules, self.shards, self.dim = [copy.deepcopy(m) for m in modules], shards, dim
        self.leaves: dict[str, list[nn.Parameter]] = {}

    def _own(self, number: int, name: str) -> list[nn.Parameter]:
        """A copy of a parameter for each shard; none if it has none."""
        whole = self.modules[number]._parameters.get(name)
        if whole is None:
            return []
        return self.leaves.setdefault(f"{number}.{name}", [nn.Parameter(whole.detach().clone()) for _ in range(self.shards)])

    def run(self, x: Tensor) -> Tensor:
        """The whole output; gradients are then in `gradients`."""
        pieces = tuple(x.narrow(self.dim, r.start, r.stop - r.start).clone() for r in runs(x.shape[self.dim], self.shards))
        for number, module in enumerate(self.modules):
            weights, biases = self._own(number, "weight"), self._own(number, "bias")
            if isinstance(module, CONVOLUTIONS[3:]):
                pieces = Transposed.apply(module, self.dim, self.shards, *pieces, *weights)
                if biases:
                    spatial = [1] * (x.dim() - 2)
                    pieces = tuple(p + b.view(-1, *spatial) for p, b in zip(pieces, biases, strict=True))
            elif isinstance(module, CONVOLUTIONS):
                pieces = Convolve.apply(module, self.dim, self.shards, *pieces, *weights, *biases)
            elif isinstance(module, nn.BatchNorm2d):
                pieces = Normalise.apply(module, self.shards, *pieces, *weights, *biases)
            else:  # element by element, or so that no piece needs another's rows
                pieces = tuple(module(p) for p in pieces)
        return torch.cat(pieces, self.dim)

    def gradients(self) -> dict[str, Tensor]:
        """Path -> gradient, summed over shards."""
        return {name: over_shards([copy.grad for copy in copies]) for name, copies in self.leaves.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Path -> running statistics after the run."""
        return {
            f"{number}.{name}": buffer
            for number, module in enumerate(self.modules)
            for name, buffer in module.named_buffers()
            if buffer.dim()
        }
