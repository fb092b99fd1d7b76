"""Linear layers whose weight is [in, out]: `transformers.pytorch_utils.Conv1D`, of which GPT-2 is made.

They are known by the name of their class, so that nothing here imports `transformers`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_CLASS = ("transformers.pytorch_utils", "Conv1D")


def is_transposed_linear(module: object) -> bool:
    """Whether it is a Conv1D, or of a subclass that keeps its forward."""
    for kind in type(module).__mro__:
        if (kind.__module__, kind.__qualname__) == _CLASS:
            return type(module).forward is kind.forward  # type: ignore[attr-defined]
    return False


def is_linear(module: object) -> bool:
    """Whether it is an `nn.Linear` or a transposed one, and computes what its class computes."""
    return (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward) or is_transposed_linear(module)


def linear_features(module: nn.Module) -> tuple[int, int]:
    """(input features, output features) of a linear layer, transposed or not."""
    found: Any = module
    if is_transposed_linear(module):
        return found.nx, found.nf
    return found.in_features, found.out_features
