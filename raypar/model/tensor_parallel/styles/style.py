"""The base class of sharding styles, and what the styles of linear layers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Self

from torch import nn

from raypar.errors import PlanError
from raypar.model.convolution_call import CONVOLUTIONS, convolution_class
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.transposed_linear import is_linear, is_transposed_linear
from raypar.plan.layer_dimensions import LayerDimensions, LayerDivision, divide
from raypar.plan.shard_ranges import IndexRanges, TensorCut, even_ranges_by_shard
from raypar.plan.stage_connections import parameter_of
from raypar.plan.tensor_parallel_layout import LayerCollectives, ShardWorkShare, TensorParallelLayout, shard_slice_shape
from raypar.torch_compat.modules import has_hooks


@dataclass(frozen=True, slots=True)
class ShardingStyle(ABC):
    """How one layer (a module that owns parameters) is cut over shards. Fields are the options written after the name.

    A style answers five questions: does it fit a module (`check_fits`), which slice of each parameter does each shard hold
    (`slices`), which module does a shard run (`build`), what does that send over shards (`collectives`), and which share of the
    work and memory has each shard (`cost`). Of a `DimensionStyle`, which says what dimension it divides, three answers follow.
    A style holds its options alone: equal text is an equal style.
    """

    name: ClassVar[str]
    """What `plan.styles` calls it."""
    summary: ClassVar[str]
    """One line for people: what it is for."""
    input_group: ClassVar[str | None] = None
    """Layers of one module that are in the same group read the same value (q, k and v), which is then communicated once."""
    divides_values: ClassVar[bool] = False
    """Whether shards compute parts of values with whole parameters, so that a layer without slices is built anew, too."""

    @classmethod
    def parse(cls, options: str) -> Self:
        """The style with what is written after its name, for example `:8/2`. Raises `ValueError` for bad options."""
        if options:
            raise ValueError(options)
        return cls()

    @property
    def options(self) -> str:
        """What stands after the name in `plan.styles`; `parse` reads it."""
        return ""

    def __str__(self) -> str:
        return self.name + self.options

    def complete_options(self, name: str, parents: Sequence[nn.Module]) -> ShardingStyle:
        """The style with its missing options taken from the modules around the layer (`parents`, innermost first).

        Raises `PlanError` if they do not say it.
        """
        return self

    @abstractmethod
    def check_fits(self, name: str, module: nn.Module) -> None:
        """Raises the `PlanError` that says why a module cannot be cut in this style; `name`: its qualified name."""

    @abstractmethod
    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """Parameter (`weight`, `bias`) -> which part each shard holds. What is not named, buffers too, is whole on every shard.

        Raises `PlanError` with the numbers that do not fit.
        """

    @abstractmethod
    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """The `ShardedModule` that this shard runs in the place of `module`, whose parameters are slices already."""

    @abstractmethod
    def collectives(self, module: nn.Module) -> LayerCollectives:
        """What the layer sends over shards for each microbatch."""

    def cost(self, name: str, module: nn.Module, shards: int) -> tuple[ShardWorkShare, ...]:
        """By shard: its share of the layer's work and memory. By default the work goes by the elements of the weight."""
        slices = self.slices(name, module, shards)
        parameters = {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None}

        def share(shard: int, keys: Sequence[str]) -> float:
            here = {key: shard_slice_shape(slices[key], parameters[key], shard) for key in keys if key in slices}
            whole = sum(prod(parameters[key]) for key in keys)
            return sum(prod(here.get(key, parameters[key])) for key in keys) / whole if whole else 1.0

        return tuple(ShardWorkShare(share(shard, ["weight"]), share(shard, [*parameters])) for shard in range(shards))


class DimensionStyle(ShardingStyle):
    """A style that divides a named dimension of a layer: what each shard holds, sends and computes follows from that."""

    __slots__ = ()

    @abstractmethod
    def dimensions(self, name: str, module: nn.Module) -> LayerDimensions:
        """The dimensions of the module, and which of them is divided. Raises `PlanError` for numbers that do not fit."""

    def divide(self, name: str, module: nn.Module, shards: int) -> LayerDivision:
        """What follows for these shards. Raises `PlanError` when a shard would have none of the divided dimension."""
        layer = self.dimensions(name, module)
        if layer.divided in (sizes := dict(layer.sizes)):  # else values alone have it
            check_enough(name, layer.noun, sizes[layer.divided], shards)
        return divide(layer, shards)

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        return self.divide(name, module, shards).cuts

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        return self.divide("", module, 1).collectives

    def cost(self, name: str, module: nn.Module, shards: int) -> tuple[ShardWorkShare, ...]:
        """See `ShardingStyle`."""
        return self.divide(name, module, shards).shares


_FALCON_LINEAR = ("transformers.models.falcon.modeling_falcon", "FalconLinear")


def is_plain_linear(module: object) -> bool:
    """Whether it is a linear layer, transposed or not, that a sharded layer can stand in for."""
    return (
        isinstance(module, nn.Module)
        and (is_linear(module) or _is_linear_in_other_words(module))
        and _has_weight(module)
        and is_replaceable(module)
    )


def _is_linear_in_other_words(module: nn.Module) -> bool:
    """Whether it is Falcon's linear layer, which computes x W^T + b in two steps; known by its name, to import nothing."""
    kind = type(module)
    return isinstance(module, nn.Linear) and (kind.__module__, kind.__qualname__) == _FALCON_LINEAR


def is_plain_convolution(module: nn.Module) -> bool:
    """Whether it is a convolution that a sharded layer can stand in for."""
    return convolution_class(module) is not None and _has_weight(module) and is_replaceable(module)


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether it is an `nn.Embedding` that a sharded layer can stand in for."""
    own = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return own and _has_weight(module) and is_replaceable(module)


def _has_weight(module: nn.Module) -> bool:
    """Whether its weight is a parameter, not computed."""
    return module._parameters.get("weight") is not None


def is_replaceable(module: nn.Module) -> bool:
    """Whether a sharded layer can replace the module: no hooks, no forward set on the object."""
    return "forward" not in vars(module) and not has_hooks(module)


def style_misfit_error(style: ShardingStyle, name: str, module: nn.Module) -> PlanError:
    """The error for a module of another class than the style is for, or one that does more than its class."""
    known = isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS)) or is_transposed_linear(module)
    return PlanError(
        f"the style {style} does not fit {name}, a {type(module).__name__}"
        + " with a forward of its own, hooks or a computed weight" * known,
        cure="vocabulary is for nn.Embedding and nn.Linear, groups for convolutions with groups, spatial for convolutions and "
        "norms, column, row and gathered for convolutions, nn.Linear and Conv1D of transformers, whole for any layer, all "
        "others for nn.Linear and Conv1D (subclasses that keep its forward); nn.LSTM, nn.GRU, nn.RNN and their cells have "
        "gates and gates-column",
    )


def share_evenly(name: str, what: str, total: int, shards: int) -> tuple[IndexRanges, ...]:
    """`total` indices over shards, as even as possible. Raises `PlanError` when a shard would have none."""
    check_enough(name, what, total, shards)
    return even_ranges_by_shard(total, shards)


def check_enough(name: str, what: str, total: int, shards: int) -> None:
    """Raises `PlanError` for more shards than there are indices to share out."""
    if shards > total:
        raise PlanError(
            f"{name} has {total} {what} for {shards} shards: some would have none",
            cure=f"set plan.shards <= {total} (or virtual_shards, if it is given), or give it and the layers it works with "
            "the style whole (plan.styles)",
        )


def features_per_part(name: str, style: ShardingStyle, features: int, parts: int, which: str) -> int:
    """How many features one head or part has. Raises `PlanError` when they do not come out even."""
    if features % parts:
        raise PlanError(
            f"the style {style} does not fit {name}: {features} {which} features are no multiple of {parts}",
            cure="check the numbers of heads or parts in plan.styles",
        )
    return features // parts


def indices_on_shard(name: str, layout: TensorParallelLayout, group: ShardGroup) -> IndexRanges:
    """The indices of the cut dim of a layer's weight that this shard has; `name`: of the layer."""
    return layout.cuts[parameter_of(name, "weight")].indices_by_shard[group.shard]
