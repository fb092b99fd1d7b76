"""Settings of a process or thread that PyTorch's public functions can only read or only set."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from raypar.fences.private_api_fence import Fence
from raypar.torch_compat import TESTED

_REASON = "PyTorch's public functions can only set it, or only read it"
_WITHOUT = "if the job's code changes it and does not restore it, raypar neither notices nor restores it"


def _functions(*paths: str) -> Callable[[], SimpleNamespace]:
    """A probe: an object that has the functions at these paths below `torch._C`, by their last name."""

    def look() -> SimpleNamespace:
        found = {}
        for path in paths:
            owner: Any = torch._C
            for name in path.split("."):
                owner = getattr(owner, name)
            if not callable(owner):
                raise TypeError(f"{path} cannot be called")
            found[path.rpartition(".")[2]] = owner
        return SimpleNamespace(**found)

    return look


def _setting(feature: str, *paths: str) -> Fence[SimpleNamespace]:
    """A fence around the functions that read and set one setting."""
    return Fence(
        api=f"torch._C.{paths[0]}",
        reason=_REASON,
        versions=TESTED,
        feature=f"guarding {feature}",
        without=_WITHOUT,
        probe=_functions(*paths),
    )


def _look_for_modes() -> SimpleNamespace:
    """The functions of `torch._C` that count entered modes, and the Python functions that leave them."""
    from torch import overrides
    from torch.utils import _python_dispatch

    found = _functions("_len_torch_function_stack", "_len_torch_dispatch_stack")()
    found.pop_function_mode, found.pop_dispatch_mode = overrides._pop_mode, _python_dispatch._pop_mode
    return found


INFERENCE = _setting("torch.inference_mode", "_InferenceMode")
AUTOCAST = _setting("torch.autocast", "_is_any_autocast_enabled")
MODES = Fence(
    api="torch._C._len_torch_function_stack",
    reason=_REASON,
    versions=TESTED,
    feature="guarding torch.set_default_device and modes of torch.utils",
    without=_WITHOUT,
    probe=_look_for_modes,
)
SAVED_TENSORS = _setting(
    "torch.autograd.graph.saved_tensors_hooks",
    "_autograd._top_saved_tensors_default_hooks",
    "_autograd._pop_saved_tensors_default_hooks",
)
DETERMINISTIC = _setting(
    "torch.use_deterministic_algorithms",
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory",
    "_set_deterministic_algorithms",
    "_set_deterministic_fill_uninitialized_memory",
)
PRECISIONS = _setting("the precisions of float32 products", "_get_fp32_precision_getter", "_set_fp32_precision_setter")
MKLDNN = _setting(
    "torch.backends.mkldnn",
    "_get_mkldnn_enabled",
    "_get_mkldnn_deterministic",
    "_set_mkldnn_enabled",
    "_set_mkldnn_deterministic",
)
CUDNN = _setting(
    "torch.backends.cudnn",
    "_get_cudnn_enabled",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_set_cudnn_enabled",
    "_set_cudnn_benchmark",
    "_set_cudnn_deterministic",
)
ATTENTION = _setting(
    "the attention kernels that may be used",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
    "_set_sdp_use_flash",
    "_set_sdp_use_mem_efficient",
    "_set_sdp_use_math",
    "_set_sdp_use_cudnn",
)

Flags = tuple[bool, ...]


def torch_state_reader(fence: Fence[SimpleNamespace], name: str, default: Any) -> Callable[..., Any]:
    """PyTorch's own function `name`, unwrapped since it is called often; one that returns `default` if it is gone."""
    found = fence.find()
    if found is None:
        return lambda *args: default
    function: Callable[..., Any] = getattr(found, name)
    return function


is_any_autocast_enabled = torch_state_reader(AUTOCAST, "_is_any_autocast_enabled", False)
"""Whether autocast is on for any kind of device in this thread."""
count_function_modes = torch_state_reader(MODES, "_len_torch_function_stack", 0)
"""Number of `TorchFunctionMode`s entered in this thread."""
count_dispatch_modes = torch_state_reader(MODES, "_len_torch_dispatch_stack", 0)
"""Number of `TorchDispatchMode`s entered in this thread."""
is_deterministic = torch_state_reader(DETERMINISTIC, "_get_deterministic_algorithms", False)
"""Whether `torch.use_deterministic_algorithms` is on in this process."""
float32_precision: Callable[[str, str], str] = torch_state_reader(PRECISIONS, "_get_fp32_precision_getter", "none")
"""The precision of a backend's float32 products by (backend, operation); `none` if it was not set."""
saved_tensors_hooks = torch_state_reader(SAVED_TENSORS, "_top_saved_tensors_default_hooks", None)
"""Called with True: the innermost pair of `saved_tensors_hooks` of this thread; None if there is none."""


def deterministic_flags() -> Flags:
    """(`torch.use_deterministic_algorithms`, its `warn_only`, `torch.utils.deterministic.fill_uninitialized_memory`)."""
    c = DETERMINISTIC.find()
    if c is None:
        return (False, False, True)
    return (
        c._get_deterministic_algorithms(),
        c._get_deterministic_algorithms_warn_only(),
        c._get_deterministic_fill_uninitialized_memory(),
    )


def mkldnn_flags() -> Flags:
    """(`torch.backends.mkldnn.enabled`, `deterministic`)."""
    c = MKLDNN.find()
    return (True, False) if c is None else (c._get_mkldnn_enabled(), c._get_mkldnn_deterministic())


def cudnn_flags() -> Flags:
    """(`torch.backends.cudnn.enabled`, `benchmark`, `deterministic`)."""
    c = CUDNN.find()
    if c is None:
        return (True, False, False)
    return (c._get_cudnn_enabled(), c._get_cudnn_benchmark(), c._get_cudnn_deterministic())


def attention_flags() -> Flags:
    """Which kernels of `scaled_dot_product_attention` are enabled: (flash, memory-efficient, math, cuDNN)."""
    c = ATTENTION.find()
    if c is None:
        return (True, True, True, True)
    return (
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
    )


_LEFT_INFERENCE_MODE: list[torch.inference_mode] = []
"""Guards that hold inference mode at a value. Freeing one restores the mode before it, so they are never freed."""


def set_inference(value: bool) -> None:
    """Set `torch.inference_mode` of this thread."""
    c = INFERENCE.find()
    if c is not None:
        _LEFT_INFERENCE_MODE.append(c._InferenceMode(value))


def leave_function_modes(value: int) -> None:
    """Leave `TorchFunctionMode`s until `value` of them are entered."""
    c = MODES.find()
    while c is not None and count_function_modes() > value:
        c.pop_function_mode()


def leave_dispatch_modes(value: int) -> None:
    """Leave `TorchDispatchMode`s until `value` of them are entered."""
    c = MODES.find()
    while c is not None and count_dispatch_modes() > value:
        c.pop_dispatch_mode()


def pop_all_saved_tensors_hooks() -> None:
    """Leave all `saved_tensors_hooks` of this thread."""
    c = SAVED_TENSORS.find()
    while c is not None and saved_tensors_hooks(True) is not None:
        c._pop_saved_tensors_default_hooks()


def set_deterministic(value: Flags) -> None:
    """See `deterministic_flags`."""
    c = DETERMINISTIC.find()
    if c is not None:
        on, warn_only, fill = value
        c._set_deterministic_algorithms(on, warn_only=warn_only)
        c._set_deterministic_fill_uninitialized_memory(fill)


def set_float32_precision(backend: str, operation: str, precision: str) -> None:
    """See `float32_precision`."""
    c = PRECISIONS.find()
    if c is not None:
        c._set_fp32_precision_setter(backend, operation, precision)


def set_mkldnn(value: Flags) -> None:
    """See `mkldnn_flags`."""
    c = MKLDNN.find()
    if c is not None:
        c._set_mkldnn_enabled(value[0])
        c._set_mkldnn_deterministic(value[1])


def set_cudnn(value: Flags) -> None:
    """Set how cuDNN is used, as `cudnn_flags` tells it."""
    c = CUDNN.find()
    if c is not None:
        c._set_cudnn_enabled(value[0])
        c._set_cudnn_benchmark(value[1])
        c._set_cudnn_deterministic(value[2])


def set_attention(value: Flags) -> None:
    """Set which kernels attention may use, as `attention_flags` tells them."""
    c = ATTENTION.find()
    if c is not None:
        flash, efficient, plain, cudnn = value
        c._set_sdp_use_flash(flash)
        c._set_sdp_use_mem_efficient(efficient)
        c._set_sdp_use_math(plain)
        c._set_sdp_use_cudnn(cudnn)
