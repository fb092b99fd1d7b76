"""A device that only pretends to be one: its numbers are computed on the CPU, but it will not be mixed with the CPU.

PyTorch lets a backend be written in Python under the name it keeps for other people's devices. Code that runs on it with the
bits of the CPU has put every tensor where it belongs, and asks the device for numbers only in the ways that a GPU allows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration

NAME = "pretend"
NEEDED = pytest.mark.skipif(
    torch.__version__ < "2.13" and not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"PyTorch {torch.__version__} has no backends in Python yet, as 2.13 has",
)
"""Of tests on this device. They are left out with older releases alone: a later one without such backends fails them."""
BOTH = ("copy_", "_to_copy", "_copy_from", "_copy_from_and_resize")
"""Operations that take tensors of several devices."""
watchers: list[Callable[[Any, Any, bool], None]] = []
"""Called with (operation, its arguments, whether the result is the host's) whenever the device is asked for something."""
late: Any = None
"""A `late_device.World` that computes for the device, later than it is asked to; None: all is computed at once."""


class OnDevice(Tensor):
    """A tensor "on the device"; `raw` has its numbers."""

    raw: Tensor
    memory: Any = None
    """What holds its block of a late device's memory, as all tensors in the block do."""

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=device()
        )
        made.raw = raw
        return made

    def tolist(self) -> Any:
        """As a GPU's tensor: it is waited for."""
        for watcher in watchers:
            watcher(torch.ops.aten._local_scalar_dense.default, (self,), True)
        if late is not None:
            late.finish(self)
        return self.raw.tolist()

    def record_stream(self, stream: Any) -> None:
        """As a GPU's tensor: its memory is used by that stream, too."""
        self.memory.used_by(stream)

    def data_ptr(self) -> int:
        """Where it lies."""
        return self.raw.data_ptr()

    @property
    def data(self) -> Tensor:
        """The same memory, without history."""
        return self.detach()

    @data.setter
    def data(self, other: OnDevice) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]  # dtype, shape and strides
        self.raw, self.memory = other.raw, other.memory

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(op, *args, **(kwargs or {}))


def computed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What the device does: as the CPU, or an error where a GPU would have one."""
    if late is not None:
        return late.compute(op, args, kwargs)
    own: dict[int, OnDevice] = {}
    on_cpu = [False]

    def lowered(
        value: Any,
    ) -> Any:  # by hand: this is called for every operation, and PyTorch's pytree takes three times as long
        if isinstance(value, OnDevice):
            own[id(value.raw)] = value
            return value.raw
        if isinstance(value, Tensor):
            on_cpu[0] |= value.dim() > 0
        elif isinstance(value, (list, tuple)):
            return [lowered(each) for each in value]
        elif isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    name = _name_of(op)
    to_host = name == "_to_copy" and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    on_host = name == "_copy_from" or (name == "copy_" and not isinstance(args[0], OnDevice)) or to_host
    for watcher in watchers:
        watcher(op, args, on_host)
    given = [lowered(value) for value in args]
    named = {key: lowered(value) for key, value in kwargs.items() if key != "pin_memory"}
    if on_cpu[0] and own and name not in BOTH:
        raise RuntimeError(f"{op}: expected all tensors to be on the same device, but found cpu and {NAME}")

    def raised(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if on_host else _own_or_new(own, value)
        return type(value)(raised(each) for each in value) if type(value) in (list, tuple) else value

    return raised(op(*given, **named))


def _own_or_new(own: dict[int, OnDevice], value: Tensor) -> OnDevice:
    return own[id(value)] if id(value) in own else OnDevice(value)


@functools.cache
def _name_of(op: Any) -> str:
    name: str = op._schema.name.partition("::")[2]
    return name


@functools.cache
def device() -> torch.device:
    """The device; it exists from the first call on."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(computed, "PrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    aten = torch.ops.aten
    for name, op in {
        "silu_backward": aten.silu_backward.default,  # else in parts
        "arange": aten.arange.default,  # else an empty tensor that is resized
        "arange.start": aten.arange.start,
        "arange.start_step": aten.arange.start_step,
    }.items():
        own.impl(name, functools.partial(computed, op), "PrivateUse1")
    _kept.extend((library, own))
    torch.tensor = functools.partial(_made, torch.tensor)
    _allow_autocast()
    return torch.device(NAME, 0)


def differentiable() -> Any:
    """Context in which backward passes run on the device, in the thread that asks for them, also in a process that had one
    before the device was made: PyTorch has threads for those devices alone that there were at its first backward pass."""
    return torch.autograd.set_multithreading_enabled(False)


IN_COMPUTE_DTYPE = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv2d", "scaled_dot_product_attention")
IN_FLOAT32 = ("layer_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss", "nll_loss", "rsqrt", "pow.Tensor_Scalar")
"""Operations of PyTorch's lists for autocast on GPUs, as far as models here need them."""


def _allow_autocast() -> None:
    """PyTorch has lists of what autocast casts for each kind of device but the one that others may write."""
    torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    for names, dtype in ((IN_COMPUTE_DTYPE, torch.bfloat16), (IN_FLOAT32, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            own.impl(name, functools.partial(_cast, op, dtype), "AutocastPrivateUse1")
    _kept.extend((library, own))


def _cast(op: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """An operation with its numbers in another dtype, under autocast."""

    def cast(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.bfloat16)
        return value.to(dtype) if floats and value.device.type == NAME else value

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return op(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def _made(make: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """`torch.tensor`, which fills a tensor by a call that no backend in Python gets."""
    made: Tensor = make(*args, **kwargs)
    return made if device is None else made.to(device)


_kept: list[Any] = []
"""A library ends with its last reference."""
