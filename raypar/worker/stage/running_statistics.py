"""Running statistics of batch and instance norms: recorded for each call, and folded into the averages at the commit.

In training a norm normalises by the statistics of its own input, and only adds them to running averages. So each call runs with
stand-in buffers, which then hold the call's own mean and unbiased variance, wherever and whenever it runs. `fold_norm_calls`
makes of all calls, in their order, the averages that the norm itself would have: of all norms of a stage together, in a number
of operations that does not depend on how many norms there are.

On CPUs the arithmetic is that of PyTorch's kernel, which depends on the input's dtype and memory layout
(`batch_norm_cpu_update_stats_template` in aten/src/ATen/native/Normalization.cpp). `check_update_arithmetic` compares both on
this machine. On other devices it is one for all inputs: which kernel of PyTorch's or cuDNN's would run there, and whether it
rounds a product before it adds it, depends on the input and on the build.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raypar.errors import ModelError, UserCodeError, with_article
from raypar.model.tensor_parallel.sharded_value import ShardedValue
from raypar.torch_compat.modules import BatchNorm, InstanceNorm, NormBase, dims_without_batch
from raypar.torch_compat.multi_tensor import add_to_all, copy_all, zero_all

R = TypeVar("R")

Arithmetic = Literal["dense", "rounded", "strided"]
"""How an update is computed. `dense`: of a contiguous input (channels_last too). `rounded`: every product and every sum is
rounded to the averages' dtype; of an input in bfloat16, the averages being float32, and of every input that is not on a CPU.
`strided`: of all other inputs."""


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


class NormCallRecorder:
    """Takes the place of a norm's forward: the norm's buffers keep their values, and each call's statistics are handed over."""

    path: str
    """The norm's path in its layer."""
    norm: NormBase
    """The norm."""
    take: Callable[[NormCall], None] | None
    """Takes the statistics of a call; None: they are dropped, because the call repeats one that has been counted."""
    stand_ins: tuple[Tensor, Tensor] | None
    """Zeros in the place of both averages in the next call; None: that call makes its own."""
    _forward: Callable[..., Tensor]
    """The norm's own forward."""
    _has_own_forward: bool
    """Whether a subclass or the user has replaced PyTorch's forward, so that it may normalise something else than its input."""

    def __init__(self, path: str, norm: NormBase) -> None:
        self.path, self.norm, self.take, self.stand_ins = path, norm, None, None
        self._forward = norm.forward
        self._has_own_forward = "forward" in vars(norm) or type(norm).forward not in _PYTORCH_FORWARDS
        norm.forward = self.__call__  # `Stage.release` takes it away

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The norm's forward. Raises what that raises, and `UserCodeError` for a forward of its own that cannot be followed."""
        if not self.changes_averages:
            return self._forward(*args, **kwargs)
        norm = self.norm
        buffers, momentum = norm._buffers, norm.momentum
        kept = {name: buffers[name] for name in STATISTICS}
        mean, variance = self.stand_ins or map(torch.zeros_like, _running_averages(norm))
        self.stand_ins = None
        # PyTorch's own forward only counts with it, which the commit does for all calls at once.
        counted = kept["num_batches_tracked"] if self._has_own_forward else None
        count = None if counted is None else torch.zeros_like(counted)
        buffers.update(running_mean=mean, running_var=variance, num_batches_tracked=count)
        object.__setattr__(norm, "momentum", 1.0)  # a module's own setter takes as long as it does to normalise
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
            object.__setattr__(norm, "momentum", momentum)
        if self.take is not None:
            x = x.local.contiguous() if isinstance(x, ShardedValue) else x  # as the norm on a part has seen it
            self.take(self._call_of(x.detach(), mean, variance))
        return result

    @property
    def changes_averages(self) -> bool:
        """Whether the norm itself would change its averages in a call, as it is set now."""
        return self.norm.training and self.norm.track_running_stats

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

    def __torch_function__(
        self, func: Callable[..., R], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> R:
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


def make_stand_ins(norms: Iterable[NormCallRecorder]) -> None:
    """Make the `stand_ins` of norms, in one operation, for a forward that is about to call each of them once."""
    made = {norm: tuple(map(torch.empty_like, _running_averages(norm.norm))) for norm in norms if norm.changes_averages}
    if made:
        zero_all([one for pair in made.values() for one in pair])
    for norm, (mean, variance) in made.items():
        norm.stand_ins = mean, variance


# -- the update --------------------------------------------------------------------------------------------------------------


def update_arithmetic_of(x: Tensor, averages: torch.dtype) -> Arithmetic:
    """How averages of this dtype are updated for an input."""
    if x.device.type != "cpu":
        return "rounded"
    dense = x.is_contiguous()
    dense = dense or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    dense = dense or (x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d))
    return "strided" if not dense else "dense" if x.dtype == averages else "rounded"


def fold_running_averages(
    averages: Tensor, means: Sequence[Tensor], variances: Sequence[Tensor], factor: float, arithmetic: Arithmetic
) -> None:
    """Fold the statistics of calls, given as the tensors that make up [calls, n], into running averages [2, n] of mean and
    variance, in place, one call after the other: factor * call + (1 - factor) * average."""
    calls = sum(map(torch.numel, means)) // averages.shape[1]
    wide = arithmetic == "strided" or (arithmetic == "dense" and averages.dtype == torch.float32)
    dtype = torch.float64 if wide else averages.dtype
    added = torch.empty((2, calls * averages.shape[1]), dtype=dtype, device=averages.device)
    by_turn = added.view(2, calls, -1).unbind(1)
    if arithmetic == "strided":  # the kernel computes in double
        torch.cat([*means, *variances], out=added.view(-1)).mul_(factor)
        for new in by_turn:
            torch.add(new, averages.double().mul_(1 - factor), out=averages)
        return
    rounded = torch.tensor(factor, dtype=averages.dtype)
    new_factor, old_factor = float(rounded), float(1 - rounded)
    if wide:  # products of variances are made in double; those of means are rounded, and their sum in double is rounded alike
        torch.mul(torch.cat(list(means)), new_factor, out=added[0])
        torch.cat(list(variances), out=added[1]).mul_(new_factor)
    else:
        torch.cat([*means, *variances], out=added.view(-1)).mul_(new_factor)
    for new in by_turn:
        averages.mul_(old_factor)
        torch.add(new, averages, out=averages)


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
    mean, variance = norm._buffers["running_mean"], norm._buffers["running_var"]
    assert mean is not None and variance is not None
    return mean, variance


class _Rule(NamedTuple):
    """How one call of a norm is added to its averages. Calls by equal rules may be added together."""

    factor: float
    arithmetic: Arithmetic
    variance: torch.dtype
    """Of the call's variance."""


@torch.no_grad()
def fold_norm_calls(calls: Iterable[tuple[NormBase, Sequence[NormCall]]]) -> None:
    """Fold the calls of norms, each norm's in order, into its running averages, in place; count those of batch norms.

    Norms whose calls are added by the same rules are folded together.
    """
    alike: dict[tuple[tuple[_Rule, ...], Hashable], list[tuple[NormBase, Sequence[NormCall]]]] = {}
    counted: dict[int, list[Tensor]] = {}
    for norm, own in calls:
        if not own:
            continue
        average, by_instance = _running_averages(norm)[0], id(norm) if own[0].mean.dim() > 1 else None
        kind = average.dtype, average.device, by_instance
        alike.setdefault((_rules(norm, own), kind), []).append((norm, own))
        if norm.num_batches_tracked is not None and not isinstance(norm, InstanceNorm):
            counted.setdefault(len(own), []).append(norm.num_batches_tracked)
    for (rules, _), together in alike.items():
        averages = [_running_averages(norm) for norm, _ in together]
        by_turn = list(zip(*(own for _, own in together), strict=True))
        if by_turn[0][0].mean.dim() > 1:
            _fold_instances(averages[0], together[0][1], rules)
        else:
            _fold_together(averages, by_turn, rules)
    for number, counts in counted.items():
        add_to_all(counts, number)


def _rules(norm: NormBase, calls: Sequence[NormCall]) -> tuple[_Rule, ...]:
    first = _counted_batches(norm) + 1
    return tuple(_Rule(_factor(norm, first + n), call.arithmetic, call.variance.dtype) for n, call in enumerate(calls))


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
    averages: Sequence[tuple[Tensor, Tensor]], calls: Sequence[Sequence[NormCall]], rules: Sequence[_Rule]
) -> None:
    """Fold the calls of several norms, calls[turn][norm], each turn by its rule, into their averages (mean, variance)."""
    each = [pair[place] for place in (0, 1) for pair in averages]
    joined, start = torch.cat(each).view(2, -1), 0
    for rule, run in groupby(rules):
        stop = start + len(list(run))
        alike = [call for turn in calls[start:stop] for call in turn]
        means, variances = [call.mean for call in alike], [call.variance for call in alike]
        fold_running_averages(joined, means, variances, rule.factor, rule.arithmetic)
        start = stop
    copy_all(each, joined.view(-1).split([one.numel() for one in each]))


def _fold_instances(averages: tuple[Tensor, Tensor], calls: Sequence[NormCall], rules: Sequence[_Rule]) -> None:
    """Fold the calls of one instance norm: an update for each instance, of which the mean is taken."""
    for call, rule in zip(calls, rules, strict=True):
        by_instance = torch.stack(averages).repeat(1, len(call.mean))
        means, variances = [call.mean.reshape(-1)], [call.variance.reshape(-1)]
        fold_running_averages(by_instance, means, variances, rule.factor, rule.arithmetic)
        for average, found in zip(averages, by_instance, strict=True):
            average.copy_(found.view_as(call.mean).mean(0))


# -- whether it is PyTorch's -------------------------------------------------------------------------------------------------


@cache
def check_update_arithmetic() -> None:
    """Raises `ModelError` unless `fold_running_averages` has the bits of PyTorch's own kernel here: builds may differ."""
    generator = torch.Generator().manual_seed(0)
    for dtype, given in ((torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.bfloat16)):
        for strided in (False, True):
            plain, own = (nn.BatchNorm1d(64, momentum=0.1).to(dtype) for _ in range(2))
            calls: list[NormCall] = []
            recorded = NormCallRecorder("", own)
            recorded.take = calls.append
            for _ in range(4):
                x = 3 * torch.randn((5, 64), dtype=torch.float64, generator=generator) + 1
                x = x.t().contiguous().t().to(given) if strided else x.to(given)
                with torch.no_grad():
                    plain(x)
                    own(x)
            fold_norm_calls([(own, calls)])
            if not all(torch.equal(a, b) for a, b in zip(plain.buffers(), own.buffers(), strict=True)):
                raise ModelError(
                    f"this build of PyTorch ({torch.__version__}) updates running statistics by another arithmetic than the "
                    f"one that raypar knows ({given}, {'strided' if strided else 'contiguous'} input)",
                    cure="use a PyTorch with which raypar is tested (2.13, x86-64), or GroupNorm in place of BatchNorm",
                )
