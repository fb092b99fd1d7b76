"""Which tensor stands for a value in a stage's autograd graph (rule 4 of the numerics contract).

A layer reads the very tensor that another layer of the stage returned, so autograd adds the gradients of a value in its own
order. A value from another stage is read through one alias, whose complete gradient is what the stage hands on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from raypar.errors import UserCodeError
from raypar.torch_compat.autograd import has_gradient_hooks, share_hooks, share_hooks_of_leaf
from raypar.worker.microbatch_loader import WHERE_FIELDS_ARE_NAMED

Hook = Callable[[Tensor | None], None]
"""Called with the gradient of a value once it is complete. Returns None, so autograd goes on with the very gradient."""
Hooks = OrderedDict[int, Hook]
"""A tensor's hooks as PyTorch keeps them. The tensors of all microbatches share the dict, so that a hook can be exchanged in
all of them at once."""


def alias_of(value: Tensor) -> Tensor:
    """Another tensor of the same memory, shape and strides, with a node of its own in the autograd graph.

    Not `view_as`, which gives dims of length 1 the strides of a new tensor: a channels_last image of one channel, (4, 1, 2, 1),
    would become (4, 4, 2, 1), and its convolution would choose another kernel.
    """
    return torch.ops.aten.alias.default(value)  # type: ignore[no-any-return]


def own_tensor(output: Tensor, hooks: Hooks, *, is_value: bool) -> Tensor:
    """The tensor of a value that requires a gradient and that a layer returned as `output`: as a rule `output` itself.

    It is an alias if `output` `is_value` already (the layer has returned what it read, or one tensor under two names), because
    the gradients of each value are added apart; if `output` has hooks of users' code, which then come after those that readers
    register, in one stage as in two; and if it is a leaf (a parameter). A leaf's gradient would come at another time than that
    of what a layer computes, and autocast would keep one cast of it for several readers.
    """
    if is_value or output.is_leaf or has_gradient_hooks(output):
        output = alias_of(output)
    share_hooks(output, hooks)
    return output


def alias_received(value: Tensor, hooks: Hooks) -> Tensor:
    """The tensor through which all layers of a stage read a value from another stage that requires a gradient.

    The gradient reaches `hooks`, with the strides that autograd gave it, and goes no further: the leaf behind the alias takes
    none, because it would copy a gradient that somebody else refers to.
    """
    leaf = value.detach().requires_grad_()
    share_hooks_of_leaf(leaf, hooks)
    alias = alias_of(leaf)
    leaf.requires_grad_(False)
    return alias


def require_value(values: Mapping[str, Tensor], name: str, reader: str) -> Tensor:
    """The value `name`. Raises `UserCodeError` if no layer has written it and the batch has no such field."""
    if name not in values:
        raise UserCodeError(
            f"{reader} reads {name!r}, which no layer writes and the batch does not have (it has {sorted(values)})",
            cure=WHERE_FIELDS_ARE_NAMED,
        )
    return values[name]


def read_inputs(values: Mapping[str, Tensor], names: Sequence[str], layer: str) -> list[Tensor]:
    """A layer's arguments."""
    return [values[name] if name in values else require_value(values, name, f"layer {layer!r}") for name in names]
