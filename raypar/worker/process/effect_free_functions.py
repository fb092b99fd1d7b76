"""PyTorch's functions and methods that, given data alone, draw no random numbers and change no state of the process.

`tests/unit/test_effect_analysis.py` compares the names with what PyTorch says of the operations.
"""

from __future__ import annotations

import builtins
import math
import types
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BOTH = _names(
    """
    abs add addmm amax amin argmax argmin argsort baddbmm bincount bmm ceil chunk clamp clone cos count_nonzero cumprod
    cumsum diagonal div eq erf exp expm1 flatten flip floor floor_divide gather ge gt index_select isfinite isinf isnan
    le log log1p log2 log_softmax logical_and logical_not logical_or logsumexp lt masked_fill matmul max maximum mean
    min minimum mm movedim mul nan_to_num narrow ne neg norm numel outer permute pow prod reciprocal relu remainder
    repeat_interleave reshape roll round rsqrt scatter scatter_add select sigmoid sign sin softmax sort split sqrt
    square squeeze std sub sum swapaxes t tanh topk transpose tril triu true_divide unbind unflatten unsqueeze var where
    """
)
"""Functions of `torch` that are methods, too."""

TORCH_FUNCTIONS = _BOTH | _names(
    """
    arange as_tensor broadcast_to cat concat einsum empty_like eye full full_like hstack is_tensor linspace ones
    ones_like stack tensor tensordot vstack zeros zeros_like
    """
)
"""Names in `torch`."""

NN_FUNCTIONS = _names(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d avg_pool3d binary_cross_entropy
    binary_cross_entropy_with_logits conv1d conv2d conv3d cross_entropy elu embedding gelu group_norm hardswish hardtanh
    huber_loss kl_div l1_loss layer_norm leaky_relu linear log_softmax logsigmoid max_pool1d max_pool2d mse_loss
    nll_loss one_hot pad relu relu6 rms_norm sigmoid silu smooth_l1_loss softmax softplus tanh
    """
)
"""Names in `torch.nn.functional`."""

TENSOR_METHODS = _BOTH | _names(
    """
    add_ bfloat16 bool clamp_ contiguous copy_ detach dim div_ double expand expand_as fill_ float half int item long
    masked_fill_ mul_ new_full new_ones new_zeros repeat size sub_ to tolist type_as view view_as zero_
    """
)
"""Names of methods of tensors."""

TENSOR_PROPERTIES = _names("T device dtype imag indices is_cuda mH mT ndim real requires_grad shape values")
"""Attributes of tensors, and of what PyTorch's functions return."""

_BUILTINS = _names(
    "abs bool dict divmod enumerate float int isinstance len list max min range reversed round slice str sum tuple zip"
)
"""Names of Python's functions and types."""


def _is_of_torch(function: object) -> bool:
    """Whether a function is PyTorch's own, not one that somebody has put in its place."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


def _of(owner: object, names: Iterable[str]) -> list[object]:
    found = [getattr(owner, name, None) for name in names]
    return [one for one in found if isinstance(one, types.BuiltinFunctionType) or _is_of_torch(one)]


_FUNCTIONS = {
    id(one): one
    for one in (
        *_of(torch, TORCH_FUNCTIONS),
        *_of(F, NN_FUNCTIONS),
        *(getattr(builtins, name) for name in _BUILTINS),
        *(one for one in vars(math).values() if isinstance(one, types.BuiltinFunctionType)),
    )
}


def is_effect_free_function(function: object) -> bool:
    """Whether a function of PyTorch's or Python's, given data alone, is known to have no effects."""
    return id(function) in _FUNCTIONS


def is_effect_free_method(name: str) -> bool:
    """Whether the method of tensors with this name, or that of other data, is known to have no effects."""
    method = getattr(Tensor, name, None)
    return name in TENSOR_METHODS and (isinstance(method, types.MethodDescriptorType) or _is_of_torch(method))


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def probability_of_drawing(function: object) -> tuple[str, int] | None:
    """(name, position) of the argument of a function by which it draws random numbers unless that is 0; None for others."""
    return ("dropout_p", 4) if function is F.scaled_dot_product_attention else None


def is_dropout(function: object) -> bool:
    """Whether a function draws random numbers unless its argument `training`, the third, is false, or `p`, the second, is 0."""
    return any(function is one for one in _DROPOUTS)
