"""The tensors that values are to autograd inside a stage (rule 4 of the numerics contract).

A layer reads the very tensor that another layer of the stage returned, so autograd adds the gradients of a value in its own
order. A value from another stage is read through one alias, whose complete gradient is what the stage hands on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from raypar.errors import UserCodeError
from raypar.worker.microbatch_loader import WHERE_FIELDS_ARE_NAMED

Hook = Callable[[Tensor | None], None]
"""Called with the gradient of a value once it is complete. Returns None, so autograd goes on with the very gradient."""
Hooks = OrderedDict[int, Hook]
"""A tensor's hooks as PyTorch keeps them. The tensors of all microbatches share the dict, so that a hook can be exchanged in
all of them at once."""


def _attach_hooks(tensor: Tensor, hooks: Hooks) -> None:
    """Do what `Tensor.register_hook` does, except for the handle that removes the hook.

    The handle's Python code takes a third of a percent of a small GPT's step. The hook is looked up in `hooks` when a gradient
    comes. `tensor` must not be a leaf.
    """
    tensor._backward_hooks = hooks
    tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]


def own_tensor(output: Tensor, hooks: Hooks) -> Tensor:
    """The tensor of a value that requires a gradient and that a layer returned as `output`: as a rule `output` itself.

    It is an alias if `output` is a leaf (a parameter), or has hooks: those of another value (the layer has returned what it
    read, or one tensor under two names), whose gradients are added apart, or those of the user. A leaf's gradient
    would come at another time than that of what a layer computes, and autocast would keep one cast of it for several readers.
    """
    if output.is_leaf or output._backward_hooks is not None:
        output = output.view_as(output)
    _attach_hooks(output, hooks)
    return output


def alias_received(value: Tensor, hooks: Hooks) -> Tensor:
    """The tensor through which all layers of a stage read a value from another stage that requires a gradient.

    The gradient reaches `hooks`, with the strides that autograd gave it, and goes no further: the leaf behind the alias takes
    none, because it would copy a gradient that somebody else refers to.
    """
    leaf = value.detach().requires_grad_()
    alias = leaf.view_as(leaf)
    leaf.requires_grad_(False)
    _attach_hooks(alias, hooks)
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
