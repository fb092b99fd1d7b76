"""Flattens nested containers as PyTorch does: `torch.utils._pytree`, whose public form (`torch.utils.pytree`) came later."""

from __future__ import annotations

from types import ModuleType

from raypar.errors import ModelError
from raypar.fences.private_api_fence import Fence
from raypar.torch_compat import TESTED

NAMES = ("TreeSpec", "register_pytree_node", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten")
"""The functions and classes that raypar uses."""


def _look_for_trees() -> ModuleType:
    from torch.utils import _pytree

    for name in NAMES:
        assert callable(getattr(_pytree, name))
    leaves, tree = _pytree.tree_flatten({"a": [1, (2,)]})
    assert leaves == [1, 2] and _pytree.tree_unflatten(leaves, tree) == {"a": [1, (2,)]}
    return _pytree


TREES = Fence(
    api="torch.utils._pytree",
    reason="containers must be taken apart as PyTorch's own functions do; the public package is not in all releases",
    versions=TESTED,
    feature="finding tensors in nested containers",
    without="no model can be read",
    probe=_look_for_trees,
    error=ModelError,
)

_trees = TREES.require()  # on import: no module that imports this one works without it
TreeSpec = _trees.TreeSpec
register_pytree_node = _trees.register_pytree_node
tree_flatten = _trees.tree_flatten
tree_leaves = _trees.tree_leaves
tree_map = _trees.tree_map
tree_unflatten = _trees.tree_unflatten
