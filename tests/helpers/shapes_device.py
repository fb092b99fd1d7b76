"""The pretended device without numbers: what is asked of it is known by shapes, so that models can have real sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from helpers import operation_budget, pretend
from helpers.operation_budget import SIZED_BY_VALUES, writes
from helpers.pretend import OnDevice
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from raypar.plan.ownership import CANONICAL_PIECE

META = torch.device("meta")
LOOK_UPS = {"embedding", "index_select", "gather", "index"}
"""Operations that read as much of their first tensor as they write."""


@dataclass(frozen=True)
class Asked:
    """An operation that writes memory of the device, or a read of the host."""

    name: str
    flops: int = 0
    bytes: int = 0
    """Read and written, each tensor whole and once."""
    bf16: bool = False
    """Whether its first tensor is bfloat16."""
    read: bool = False


@dataclass
class ShapesDevice:
    """Stands in the place of `pretend.late`, from `with device():` on."""

    asked: list[Asked] = field(default_factory=list)
    """What was asked while somebody watched (`operation_budget.counting`), in order."""
    after_read_s: float = 0.0
    """Of the processor, from the last read that was watched to what was asked next: what the host does with the numbers."""
    _read_at: float | None = None

    @contextmanager
    def __call__(self) -> Iterator[ShapesDevice]:
        _squares_without_numbers()
        before, pretend.late = pretend.late, self
        try:
            yield self
        finally:
            pretend.late = before

    def finish(self, tensor: OnDevice) -> None:
        """The host reads it: any numbers will do."""
        tensor.raw = torch.ones(tensor.shape, dtype=tensor.dtype)
        self._read("tolist")

    def compute(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What an operation of PyTorch returns, without numbers."""
        if self._read_at is not None:
            self.after_read_s, self._read_at = time.process_time() - self._read_at, None
        name = pretend._name_of(op)
        own: dict[int, OnDevice] = {}
        to_host = name == "_to_copy" and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        on_host = name == "_copy_from" and not isinstance(args[1], OnDevice)
        on_host |= (name == "copy_" and not isinstance(args[0], OnDevice)) or to_host
        for watcher in pretend.watchers:
            watcher(op, args, on_host)
        if on_host or name == "_local_scalar_dense" or name in SIZED_BY_VALUES:
            found = _to_host(name, args)
            self._read(name)
            return found

        def lowered(value: Any) -> Any:
            if isinstance(value, OnDevice):
                if value.raw.device != META:
                    value.raw = value.raw.to(META)
                own[id(value.raw)] = value
                return value.raw
            if isinstance(value, Tensor):
                return value.to(META) if name in pretend.BOTH else value
            if isinstance(value, (list, tuple)):
                return [lowered(each) for each in value]
            return META if isinstance(value, torch.device) else value

        def raised(value: Any) -> Any:
            if isinstance(value, Tensor):
                return own[id(value)] if id(value) in own else OnDevice(value)
            return type(value)(raised(each) for each in value) if type(value) in (list, tuple) else value

        given = [lowered(value) for value in args]
        named = {key: lowered(value) for key, value in kwargs.items() if key not in ("pin_memory", "generator")}
        out = op(*given, **named)
        if pretend.watchers and writes(op):
            self.asked.append(_asked(op, name, given, named, out))
        return raised(out)

    def _read(self, name: str) -> None:
        if pretend.watchers:
            self.asked.append(Asked(name, read=True))
            self._read_at = time.process_time()


def _to_host(name: str, args: Sequence[Any]) -> Any:
    """Ones: of masks they say that nothing is masked."""
    if name == "equal":
        return True
    if name == "_local_scalar_dense":
        return torch.ones((), dtype=args[0].dtype).item()
    if name == "_to_copy":
        return torch.ones(args[0].shape, dtype=args[0].dtype)
    return (args[1] if name == "_copy_from" else args[0]).fill_(1)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def nbytes(tensor: Tensor) -> int:
    """Of the tensor's own elements; those that an expanded dim repeats are there once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


def _asked(op: Any, name: str, given: list[Any], named: dict[str, Any], out: Any) -> Asked:
    inputs = [*_tensors(given), *_tensors(list(named.values()))]
    written = list(_tensors(out)) or [one for one in inputs if name.startswith("_foreach")]
    read = sum(map(nbytes, inputs))
    if name in LOOK_UPS:
        read += nbytes(written[0]) - nbytes(inputs[0])
    formula = flop_registry.get(op.overloadpacket)
    flops = int(formula(*given, **named, out_val=out)) if formula is not None else 0
    return Asked(name, flops, read + sum(map(nbytes, written)), bool(inputs) and inputs[0].dtype is torch.bfloat16)


@cache
def _squares_without_numbers() -> None:
    library = torch.library.Library("raypar", "IMPL")

    def squares(gradients: Sequence[Tensor]) -> Tensor:
        pieces = sum(-(-one.numel() // CANONICAL_PIECE) for one in gradients)
        return torch.empty(pieces, dtype=torch.float64, device=META)

    library.impl("squares", squares, "Meta")
    pretend._kept.append(library)


class _Attention(torch.autograd.Function):
    """In one kernel each way, as on CUDA."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, bias, *how = given
        ctx.how = how
        op = torch.ops.aten._scaled_dot_product_efficient_attention
        out, *more = op(query, key, value, bias, True, how[0], how[1], scale=how[2])
        ctx.save_for_backward(query, key, value, bias, out, *more)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (query, key, value, bias, *more), (dropout, causal, scale) = ctx.saved_tensors, ctx.how
        op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        wanted = [True, True, True, False]
        found = op(gradients[0], query, key, value, bias, *more, dropout, wanted, causal, scale=scale)
        return *found[:3], None, None, None, None


@cache
def attention_in_one_kernel() -> None:
    """From now on in this process, on this device: it has none otherwise, and computes attention in parts."""

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, dropout: float = 0.0,
                  causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
        if enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
        return _Attention.apply(query, key, value, bias, dropout, causal, scale)  # type: ignore[no-any-return]

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    pretend._kept.append(library)


def asked_by(model: str, plan: str) -> tuple[ShapesDevice, ShapesDevice]:
    """What raypar's step asks of the device, and the plain loop's."""
    pretend.device()
    torch.backends.cuda.enable_flash_sdp(False)  # as in `operation_budget.measure`
    ours, loop = ShapesDevice(), ShapesDevice()
    with ours():
        operation_budget.ours(model, operation_budget.PLANS[plan], operation_budget.MORE)
    with loop():
        operation_budget.loop(model, operation_budget.PLANS[plan], operation_budget.MORE)
    return ours, loop


def asked_in_worker(state: dict[str, Any], model: str, plan: str) -> tuple[list[Asked], list[Asked]]:
    """The same, for `helpers.processes`."""
    ours, loop = asked_by(model, plan)
    return ours.asked, loop.asked
