"""Running statistics of batch and instance norms: recorded for each call, and folded into the averages at the commit.

In training a norm normalises by the statistics of its own input, and only adds them to running averages. So each call runs with
stand-in buffers, which then hold the call's own mean and unbiased variance, wherever and whenever it runs. `fold_norm_calls`
makes of all calls, in their order, the averages that the norm itself would have.

The arithmetic is that of PyTorch's CPU kernel, which depends on the input's dtype and memory layout
(`batch_norm_cpu_update_stats_template` in aten/src/ATen/native/Normalization.cpp). `check_update_arithmetic` compares both on
this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raypar.errors import ModelError, UserCodeError, with_article
from raypar.torch_compat.modules import BatchNorm, InstanceNorm, NormBase, dims_without_batch

Arithmetic = Literal["dense", "mixed", "strided"]
"""How PyTorch's kernel computes an update. `dense`: of a contiguous input (channels_last too); `mixed`: of one in bfloat16, the
averages being float32; `strided`: of all other inputs."""


class NormCall(NamedTuple):
    """One call of a norm in training: what it adds to the running averages."""

    norm: str
    """The norm's path in its layer."""
    arithmetic: Arithmetic
    """How the call's statistics are added."""
    mean: Tensor
    """Mean by channel [C]; of an instance norm by instance and channel [B, C]."""
    variance: Tensor
    """Unbiased variance, in the shape of `mean`; float64 where the kernel adds it before it is rounded to float32."""


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of the buffers that a norm's forward changes."""


class RunningNorm:
    """Takes the place of a norm's forward: the norm's buffers keep their values, and each call's statistics are handed over."""

    path: str
    """The norm's path in its layer."""
    norm: NormBase
    """The norm."""
    take: Callable[[NormCall], None] | None
    """Takes the statistics of a call; None: they are dropped, because the call repeats one that has been counted."""
    _forward: Callable[..., Tensor]
    """The norm's own forward."""
    _has_own_forward: bool
    """Whether a subclass or the user has replaced PyTorch's forward, so that it may normalise something else than its input."""

    def __init__(self, path: str, norm: NormBase) -> None:
        self.path, self.norm, self.take = path, norm, None
        self._forward = norm.forward
        self._has_own_forward = "forward" in vars(norm) or type(norm).forward not in _PYTORCH_FORWARDS
        norm.forward = self.__call__  # `Stage.release` takes it away

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The norm's forward. Raises what that raises, and `UserCodeError` for a forward of its own that cannot be followed."""
        norm = self.norm
        if not (norm.training and norm.track_running_stats):
            return self._forward(*args, **kwargs)
        buffers, momentum = norm._buffers, norm.momentum
        kept = [(name, buffers[name]) for name in STATISTICS]
        mean, variance = (torch.zeros_like(buffer) for _, buffer in kept[:2] if buffer is not None)
        # PyTorch's own forward only counts with it, which the commit does for all calls at once.
        count = torch.zeros_like(kept[2][1]) if self._has_own_forward and kept[2][1] is not None else None
        buffers.update(running_mean=mean, running_var=variance, num_batches_tracked=count)
        norm.momentum = 1.0
        try:
            if self._has_own_forward:
                with _NormalisedInput(mean) as seen:
                    result = self._forward(*args, **kwargs)
                x = seen.only_input(self._label)
            else:
                result = self._forward(*args, **kwargs)
                x = args[0] if args else kwargs["input"]
        finally:
            buffers.update(kept)
            norm.momentum = momentum
        if self.take is not None:
            self.take(self._call_of(x.detach(), mean, variance))
        return result

    @property
    def _label(self) -> str:
        """The norm in messages."""
        return f"{with_article(type(self.norm).__name__)} ({self.path or 'the layer itself'})"

    def _call_of(self, x: Tensor, mean: Tensor, variance: Tensor) -> NormCall:
        """What a call has left in the stand-ins. `x`: what was normalised."""
        if isinstance(self.norm, InstanceNorm):
            return self._call_of_instances(x, mean)
        arithmetic = update_arithmetic_of(x, mean.dtype)
        if arithmetic == "strided" and x.dtype == torch.float32:
            variance = unrounded_variance(x, mean)
        return NormCall(self.path, arithmetic, mean, variance)

    def _call_of_instances(self, x: Tensor, averages: Tensor) -> NormCall:
        """The statistics by instance: PyTorch updates the averages for each, then takes the mean of these. It keeps none, so
        its kernel computes them again."""
        if not self._has_own_forward and x.dim() == dims_without_batch(self.norm):
            x = x.unsqueeze(0)
        if self.norm.weight is None and x.dtype != averages.dtype:
            raise UserCodeError(
                f"{self._label} without weights gets {x.dtype}, to which PyTorch would round its running averages, "
                f"{averages.dtype}",
                cure="give it affine=True, or track_running_stats=False, or its input as x.float()",
            )
        instances = x.contiguous().view(1, x.shape[0] * x.shape[1], *x.shape[2:])
        mean, variance = (averages.new_zeros(instances.shape[1]) for _ in range(2))
        torch.batch_norm_update_stats(instances, mean, variance, 1.0)
        shape = x.shape[0], x.shape[1]
        return NormCall(self.path, update_arithmetic_of(instances, mean.dtype), mean.view(shape), variance.view(shape))


_PYTORCH_FORWARDS = (BatchNorm.forward, InstanceNorm.forward)
"""The forwards that normalise their argument itself."""


class _NormalisedInput(TorchFunctionMode):
    """Context that notes what a norm's own forward gives PyTorch to normalise."""

    _average: Tensor
    """The stand-in of the running mean, by which the norm's call is known."""
    _seen: list[tuple[Tensor, float]]
    """(input, momentum) of each such call."""

    def __init__(self, average: Tensor) -> None:
        super().__init__()
        self._average, self._seen = average, []

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in _NORMALISING and any(each is self._average for each in (*args, *named.values())):
            self._seen.append((args[0] if args else named["input"], args[6] if len(args) > 6 else named.get("momentum", 0.1)))
        return func(*args, **named)

    def only_input(self, norm: str) -> Tensor:
        """What was normalised. Raises `UserCodeError` unless it was once, by the norm's momentum."""
        if len(self._seen) != 1:
            raise UserCodeError(
                f"{norm} has a forward of its own that updates its running statistics {len(self._seen)} times",
                cure="let its forward call F.batch_norm or F.instance_norm once, or use PyTorch's own norm",
            )
        ((x, momentum),) = self._seen
        if momentum != 1.0:  # which the norm has for the time of the call
            raise UserCodeError(
                f"{norm} has a forward of its own that updates its running statistics by another factor than its momentum",
                cure="let its forward pass self.momentum on as it is, or use PyTorch's own norm",
            )
        return x


_NORMALISING = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)


# -- the update --------------------------------------------------------------------------------------------------------------


def update_arithmetic_of(x: Tensor, averages: torch.dtype) -> Arithmetic:
    """How PyTorch's kernel updates averages of this dtype for an input."""
    dense = x.is_contiguous()
    dense = dense or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    dense = dense or (x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d))
    return "strided" if not dense else "dense" if x.dtype == averages else "mixed"


def fold_running_average(average: Tensor, found: Tensor, factor: float, arithmetic: Arithmetic, *, is_variance: bool) -> Tensor:
    """What PyTorch's kernel makes of a running average and a call's statistics: factor * found + (1 - factor) * average."""
    if arithmetic == "strided":  # the kernel computes in double
        return (found.double() * factor + average.double() * (1 - factor)).to(average.dtype)
    rounded = torch.tensor(factor, dtype=average.dtype)
    new, old = float(rounded), float(1 - rounded)
    if is_variance and arithmetic == "dense" and average.dtype == torch.float32:  # a float plus a product in double
        return (found.double() * new + (average * old).double()).float()
    return found * new + average * old


def unrounded_variance(x: Tensor, mean: Tensor) -> Tensor:
    """Unbiased variance by channel [C] of a strided float32 input [N, C, ...] in float64, as the kernel has it.

    The kernel adds squares one after the other, in the order in which the input lies in memory. `mean`: float32 [C].
    """
    order = [dim for dim in _dims_in_memory_order(x) if dim != 1]
    away = x.permute(*order, 1).reshape(-1, x.shape[1]).double() - mean.double()
    return away.square_().cumsum(0)[-1] / (len(away) - 1)


def _dims_in_memory_order(x: Tensor) -> list[int]:
    """The dims of `x`, slowest first, as PyTorch's TensorIterator sorts them: by strides, which says nothing of a stride 0."""
    shape, strides = [1 if dim == 1 else size for dim, size in enumerate(x.shape)], x.stride()
    fastest_first = list(reversed(range(x.dim())))
    for start in range(1, x.dim()):
        here = start
        for before in reversed(range(start)):
            a, b = fastest_first[before], fastest_first[here]
            if 0 in (strides[a], strides[b]):
                continue
            if (strides[a], shape[a]) > (strides[b], shape[b]):
                fastest_first[before], fastest_first[here], here = b, a, before
            elif strides[a] < strides[b]:
                break
    return fastest_first[::-1]


def _running_averages(norm: NormBase) -> tuple[Tensor, Tensor]:
    """The buffers of a norm that keeps statistics: mean and variance."""
    assert norm.running_mean is not None and norm.running_var is not None
    return norm.running_mean, norm.running_var


@torch.no_grad()
def fold_norm_calls(norms: Mapping[str, NormBase], calls: Sequence[NormCall]) -> None:
    """Fold calls of norms (path -> norm), in order, into the norms' running averages, in place; count those of batch norms.

    The n-th calls of all norms are added together, for speed; each norm's own calls stay in their order.
    """
    counts = {path: _counted_batches(norm) for path, norm in norms.items()}
    by_norm: dict[str, list[NormCall]] = {}
    for call in calls:
        by_norm.setdefault(call.norm, []).append(call)
    averages = {path: _running_averages(norms[path]) for path in by_norm}
    for turn in range(max(map(len, by_norm.values()), default=0)):
        alike: dict[Any, list[NormCall]] = {}
        for path, own in by_norm.items():
            if turn < len(own):
                factor = _factor(norms[path], counts[path] + turn + 1)
                alone = path if own[turn].mean.dim() > 1 else None
                mean = averages[path][0]
                alike.setdefault((factor, own[turn].arithmetic, mean.dtype, own[turn].variance.dtype, alone), []).append(
                    own[turn]
                )
        for (factor, arithmetic, *_), together in alike.items():
            old = [averages[call.norm] for call in together]
            means = _fold_together([a[0] for a in old], [c.mean for c in together], factor, arithmetic, is_variance=False)
            variances = _fold_together(
                [a[1] for a in old], [c.variance for c in together], factor, arithmetic, is_variance=True
            )
            averages.update({call.norm: pair for call, pair in zip(together, zip(means, variances, strict=True), strict=True)})
    for path, own in by_norm.items():
        norm = norms[path]
        for running, folded in zip(_running_averages(norm), averages[path], strict=True):
            running.copy_(folded)
        if norm.num_batches_tracked is not None and not isinstance(norm, InstanceNorm):
            norm.num_batches_tracked.add_(len(own))


def _counted_batches(norm: NormBase) -> int:
    """How many calls a norm has counted; asked only where its momentum depends on it."""
    return int(norm.num_batches_tracked) if norm.momentum is None and norm.num_batches_tracked is not None else 0


def _factor(norm: NormBase, count: int) -> float:
    """The weight of call number `count`, from 1: the momentum, or 1 / count for a cumulative average."""
    momentum: float | None = norm.momentum
    if momentum is not None:
        return momentum
    return 0.0 if isinstance(norm, InstanceNorm) or norm.num_batches_tracked is None else 1.0 / float(count)


def _fold_together(
    averages: Sequence[Tensor], found: Sequence[Tensor], factor: float, arithmetic: Arithmetic, *, is_variance: bool
) -> list[Tensor]:
    """As `fold_running_average`, of several norms at once; or of the instances of one norm, their results averaged."""
    if found[0].dim() > 1:
        (average,), (by_instance,) = averages, found
        repeated = average.expand_as(by_instance).reshape(-1)
        new = fold_running_average(repeated, by_instance.reshape(-1), factor, arithmetic, is_variance=is_variance)
        return [new.view_as(by_instance).mean(0, keepdim=False)]
    sizes = [average.numel() for average in averages]
    new = fold_running_average(torch.cat(list(averages)), torch.cat(list(found)), factor, arithmetic, is_variance=is_variance)
    return list(new.split(sizes))


# -- whether it is PyTorch's -------------------------------------------------------------------------------------------------


@cache
def check_update_arithmetic() -> None:
    """Raises `ModelError` unless `fold_running_average` has the bits of PyTorch's own kernel here: builds may differ."""
    generator = torch.Generator().manual_seed(0)
    for dtype, given in ((torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.bfloat16)):
        for strided in (False, True):
            plain, own = (nn.BatchNorm1d(64, momentum=0.1).to(dtype) for _ in range(2))
            calls: list[NormCall] = []
            recorded = RunningNorm("", own)
            recorded.take = calls.append
            for _ in range(4):
                x = 3 * torch.randn((5, 64), dtype=torch.float64, generator=generator) + 1
                x = x.t().contiguous().t().to(given) if strided else x.to(given)
                with torch.no_grad():
                    plain(x)
                    own(x)
            fold_norm_calls({"": own}, calls)
            if not all(torch.equal(a, b) for a, b in zip(plain.buffers(), own.buffers(), strict=True)):
                raise ModelError(
                    f"this build of PyTorch ({torch.__version__}) updates running statistics by another arithmetic than the "
                    f"one that raypar knows ({given}, {'strided' if strided else 'contiguous'} input)",
                    cure="use a PyTorch with which raypar is tested (2.13, x86-64), or GroupNorm in place of BatchNorm",
                )
