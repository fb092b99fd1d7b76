"""The base class of sharding styles, and what the styles of linear layers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Self

from torch import nn

from raypar.errors import PlanError
from raypar.model.tensor_parallel.convolution import CONVOLUTIONS, convolution_class, is_transposed_convolution
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.transposed_linear import is_linear, is_transposed_linear, linear_features
from raypar.plan.shard_ranges import IndexRanges, TensorCut, even_ranges_by_shard
from raypar.plan.stage_connections import parameter_of
from raypar.plan.tensor_parallel_layout import (
    LayerCollective,
    LayerCollectives,
    ShardWorkShare,
    TensorParallelLayout,
    shard_slice_shape,
)
from raypar.torch_compat.modules import has_hooks


@dataclass(frozen=True, slots=True)
class ShardingStyle(ABC):
    """How one layer (a module that owns parameters) is cut over shards. Fields are the options written after the name.

    A style answers five questions: does it fit a module (`check_fits`), which slice of each parameter does each shard hold
    (`slices`), which module does a shard run (`build`), what does that send over shards (`collectives`), and which share of the
    work and memory has each shard (`cost`). A style holds its options alone: equal text is an equal style.
    """

    name: ClassVar[str]
    """What `plan.styles` calls it."""
    summary: ClassVar[str]
    """One line for people: what it is for."""
    input_group: ClassVar[str | None] = None
    """Layers of one module that are in the same group read the same value (q, k and v), which is then communicated once."""

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


class LinearStyle(ShardingStyle):
    """A style of linear layers alone: `nn.Linear`, and those whose weight is transposed."""

    __slots__ = ()

    def check_fits(self, name: str, module: nn.Module) -> None:
        """See `ShardingStyle`."""
        if not is_plain_linear(module):
            raise style_misfit_error(self, name, module)


_FALCON_LINEAR = ("transformers.models.falcon.modeling_falcon", "FalconLinear")

COLUMN_COLLECTIVES = LayerCollectives(
    plain=(LayerCollective("all_reduce", "backward", "input"),),
    sequence=(LayerCollective("all_gather", "forward", "input"), LayerCollective("reduce_scatter", "backward", "input")),
)
"""A layer that needs all of its input and makes a part of its output (Megatron's f)."""

ROW_COLLECTIVES = LayerCollectives(
    plain=(LayerCollective("all_reduce", "forward", "output"),),
    sequence=(LayerCollective("reduce_scatter", "forward", "output"), LayerCollective("all_gather", "backward", "output")),
)
"""A layer that needs a part of its input and makes a part of a sum (Megatron's g)."""


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
        cure="vocabulary is for nn.Embedding and nn.Linear, groups for convolutions with groups, column, row and gathered for "
        "convolutions, nn.Linear and Conv1D of transformers, whole for any layer, all others for the last two (subclasses that "
        "keep its forward)",
    )


def share_evenly(name: str, what: str, total: int, shards: int) -> tuple[IndexRanges, ...]:
    """`total` indices over shards, as even as possible. Raises `PlanError` when a shard would have none."""
    if shards > total:
        raise PlanError(
            f"{name} has {total} {what} for {shards} shards: some would have none",
            cure=f"set plan.shards <= {total} (or virtual_shards, if it is given), or give it and the layers it works with "
            "the style whole (plan.styles)",
        )
    return even_ranges_by_shard(total, shards)


def features_per_part(name: str, style: ShardingStyle, features: int, parts: int, which: str) -> int:
    """How many features one head or part has. Raises `PlanError` when they do not come out even."""
    if features % parts:
        raise PlanError(
            f"the style {style} does not fit {name}: {features} {which} features are no multiple of {parts}",
            cure="check the numbers of heads or parts in plan.styles",
        )
    return features // parts


def cut_linear_by_output(module: nn.Module, held: tuple[IndexRanges, ...]) -> dict[str, TensorCut]:
    """Slices of a linear layer of which shard t makes the output features `held[t]`: of the weight and the bias."""
    features = linear_features(module)[1]
    cut = TensorCut(0, features, held)
    cuts = {key: cut for key, parameter in module._parameters.items() if parameter is not None}
    return cuts | {"weight": TensorCut(1, features, held)} if is_transposed_linear(module) else cuts


def cut_linear_by_input(module: nn.Module, held: tuple[IndexRanges, ...]) -> dict[str, TensorCut]:
    """Slices of a linear layer of which shard t reads the input features `held[t]`; the bias is whole."""
    return {"weight": TensorCut(0 if is_transposed_linear(module) else 1, linear_features(module)[0], held)}


def features_of(module: nn.Module) -> tuple[int, int]:
    """(input features, output features) of a linear layer, or the channels of a convolution."""
    if isinstance(module, CONVOLUTIONS):
        return module.in_channels, module.out_channels
    return linear_features(module)


def cut_by_output(module: nn.Module, held: tuple[IndexRanges, ...]) -> dict[str, TensorCut]:
    """Slices of a linear layer or convolution of which shard t makes the output features (channels) `held[t]`."""
    if not isinstance(module, CONVOLUTIONS):
        return cut_linear_by_output(module, held)
    cut = TensorCut(0, module.out_channels, held)
    cuts = {key: cut for key, parameter in module._parameters.items() if parameter is not None}
    return cuts | {"weight": TensorCut(1, module.out_channels, held)} if is_transposed_convolution(module) else cuts


def cut_by_input(module: nn.Module, held: tuple[IndexRanges, ...]) -> dict[str, TensorCut]:
    """Slices of a linear layer or convolution of which shard t reads the input features (channels) `held[t]`."""
    if not isinstance(module, CONVOLUTIONS):
        return cut_linear_by_input(module, held)
    return {"weight": TensorCut(0 if is_transposed_convolution(module) else 1, module.in_channels, held)}


def indices_on_shard(name: str, layout: TensorParallelLayout, group: ShardGroup) -> IndexRanges:
    """The indices of the cut dim of a layer's weight that this shard has; `name`: of the layer."""
    return layout.cuts[parameter_of(name, "weight")].indices_by_shard[group.shard]
