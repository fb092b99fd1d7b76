"""The values that a layer reads, each through an alias of the layer's own (rule 4 of the numerics contract)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from raypar.comm.buffer_pool import as_aligned
from raypar.errors import UserCodeError
from raypar.model.graph import Layer
from raypar.worker.microbatch_loader import WHERE_FIELDS_ARE_NAMED

Hook = Callable[[Tensor | None], Tensor | None]
"""Called with the gradient that comes back for an alias; returns the gradient to go on with."""
Hooks = OrderedDict[int, Hook]
"""A tensor's hooks as PyTorch keeps them. Aliases share the dict, so that a hook can be exchanged in all of them at once."""


def aligned_gradient(gradient: Tensor | None) -> Tensor | None:
    """Hook that returns the gradient contiguous and aligned, like a gradient that comes from another stage."""
    return None if gradient is None else as_aligned(gradient)


ALIGN_GRADIENT: Hooks = OrderedDict({0: aligned_gradient})
"""Hooks that align the gradient and do nothing else."""


def make_input_alias(x: Tensor, hooks: Hooks) -> Tensor:
    """A layer's own alias of a value that requires a gradient, contiguous and aligned. `hooks` see the gradient of the alias.

    It is made of a view and a hook, because an autograd function of our own costs ten times as much in a forward pass. The hook
    is looked up in `hooks` when a gradient comes. The last two lines do what `Tensor.register_hook` does, except for the handle
    that removes the hook: the handle's Python code takes a third of a percent of a small GPT's step.
    """
    aligned = as_aligned(x)
    alias = x.view_as(x) if aligned is x else aligned
    alias._backward_hooks = hooks
    alias.grad_fn._register_hook_dict(alias)  # type: ignore[union-attr]
    return alias


def require_value(values: Mapping[str, Tensor], name: str, reader: str) -> Tensor:
    """The value `name`. Raises `UserCodeError` if no layer has written it and the batch has no such field."""
    if name not in values:
        raise UserCodeError(
            f"{reader} reads {name!r}, which no layer writes and the batch does not have (it has {sorted(values)})",
            cure=WHERE_FIELDS_ARE_NAMED,
        )
    return values[name]


class LayerInputs:
    """How one layer of a stage reads its values.

    Worked out once for each stage: the Python code of a step is slow, because it finds the processor's caches cold.
    """

    layer: Layer
    """The layer that reads."""
    hooks: Hooks
    """Hooks of the aliases of values that layers of the same stage have written."""
    _reads: tuple[tuple[str, str], ...]
    """(value, its source: "here" for a layer of this stage, "elsewhere" for another stage, "batch"), each value once."""
    _order: tuple[int, ...] | None
    """Index in `_reads` of each of the layer's arguments; None if the arguments are `_reads` as they are."""

    def __init__(self, layer: Layer, *, written_here: Collection[str], batch_fields: Collection[str], hooks: Hooks) -> None:
        names = tuple(dict.fromkeys(layer.inputs))
        self.layer, self.hooks = layer, hooks
        self._reads = tuple(
            (name, "here" if name in written_here else "batch" if name in batch_fields else "elsewhere") for name in names
        )
        self._order = tuple(names.index(name) for name in layer.inputs) if names != layer.inputs else None

    def read(self, values: Mapping[str, Tensor], received: dict[str, list[Tensor]]) -> list[Tensor]:
        """The layer's arguments in training: an alias of each value that carries a gradient.

        A value from another stage that requires a gradient there gets a leaf of this layer's own, which is appended to
        `received[value]`: its `.grad` is the gradient to send back. Others require none here either: kernels, reentrant
        checkpoints and users' code ask whether an input does.
        """
        found: list[Tensor] = []
        for name, source in self._reads:
            value = values[name] if name in values else require_value(values, name, f"layer {self.layer.name!r}")
            if source == "here":
                value = make_input_alias(value, self.hooks) if value.requires_grad else as_aligned(value)
            elif source == "elsewhere" and value.requires_grad:
                value = value.detach().requires_grad_()
                received.setdefault(name, []).append(value)
                value = value.view_as(value)  # of a leaf itself autocast would keep one cast for several readers
            found.append(value)
        return found if self._order is None else [found[index] for index in self._order]

    def read_for_evaluation(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """The layer's arguments in validation: the values themselves, contiguous and aligned."""
        reader = f"layer {self.layer.name!r}"
        return [as_aligned(require_value(values, name, reader)) for name in self.layer.inputs]
