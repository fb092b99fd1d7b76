"""Flattens values that contain dataclasses, which PyTorch's pytree does not: models return them and pass them on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from raypar.torch_compat.pytree import TreeSpec, register_pytree_node, tree_flatten

_NOT_ONLY_ATTRIBUTES = (type, Tensor, nn.Module, dict, list, tuple)
"""Classes whose objects hold more than their attributes say, dataclasses or not."""


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves and the structure of a value, as `tree_flatten` returns them, but with dataclasses as containers."""
    while True:
        leaves, structure = tree_flatten(value)
        unknown = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, _NOT_ONLY_ATTRIBUTES)}
        if not unknown:
            return leaves, structure
        for kind in unknown:
            register_pytree_node(kind, _parts, _rebuild)


def _parts(value: Any) -> tuple[list[Any], Any]:
    """(values of the attributes, (class, names of the attributes)) of a dataclass."""
    names = tuple(vars(value)) if hasattr(value, "__dict__") else tuple(each.name for each in fields(value))
    return [getattr(value, name) for name in names], (type(value), names)


def _rebuild(parts: Iterable[Any], context: Any) -> Any:
    """A dataclass with these attributes. Its constructor is not called: it might refuse values that stand for tensors."""
    kind, names = context
    made = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made
