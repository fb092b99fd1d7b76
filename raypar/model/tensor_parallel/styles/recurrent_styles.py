"""Sharding styles of recurrent layers (`nn.LSTM`, `nn.GRU`, `nn.RNN`) and their cells: cut by hidden units, all gates alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from raypar.errors import PlanError, with_article
from raypar.model.tensor_parallel.recurrent import CELLS, LAYERS, RECURRENT, ShardedCell, ShardedRecurrentLayer, gates_of
from raypar.model.tensor_parallel.recurrent_traffic import cell_collectives, layer_collectives
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.styles.style import DimensionStyle, is_replaceable
from raypar.plan.layer_dimensions import LayerDimensions, LayerKind
from raypar.plan.tensor_parallel_layout import LayerCollectives, TensorParallelLayout


@dataclass(frozen=True, slots=True)
class GatesStyle(DimensionStyle):
    """Each shard computes some hidden units: their rows of every gate. The hidden state is gathered after every time step."""

    name: ClassVar[str] = "gates"
    summary: ClassVar[str] = "LSTM, GRU, RNN and their cells: cut by hidden units, all gates alike; the output is whole"
    leaves_part: ClassVar[bool] = False

    def check_fits(self, name: str, module: nn.Module) -> None:
        """See `ShardingStyle`."""
        if not is_plain_recurrent(module):
            raise PlanError(
                f"the style {self} does not fit {name}, {with_article(type(module).__name__)}",
                cure="gates and gates-column are for nn.LSTM, nn.GRU, nn.RNN and their cells with their own forward, without "
                "hooks or computed weights",
            )
        if getattr(module, "proj_size", 0):
            raise PlanError(
                f"{name} projects its hidden state (proj_size={module.proj_size}), which needs the units of all shards",
                cure="give it the style whole, or leave proj_size out and put an nn.Linear behind it",
            )

    def dimensions(self, name: str, module: nn.Module) -> LayerDimensions:
        """See `DimensionStyle`. A layer of a module reads its input, the output of the layer below, and its own state."""
        hidden, ways = int(module.hidden_size), 1 + bool(getattr(module, "bidirectional", False))  # type: ignore[arg-type]
        sizes = {"gates": gates_of(module).gates, "hidden": hidden, "in": int(module.input_size)}  # type: ignore[arg-type]
        sizes |= {"below": ways * hidden, "state": hidden}
        present = tuple(key for key, parameter in module._parameters.items() if parameter is not None)
        kind = LayerKind("samples (in)", "samples (hidden)", tuple((key, _dimensions_of(key)) for key in present))
        return LayerDimensions(kind, tuple(sizes.items()), present, divided="hidden", noun="hidden units")

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        kind = ShardedCell if isinstance(module, CELLS) else ShardedRecurrentLayer
        return kind(module, name, group, leaves_part=self.leaves_part)

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        return cell_collectives(module) if isinstance(module, CELLS) else layer_collectives(module)


@dataclass(frozen=True, slots=True)
class GatesColumnStyle(GatesStyle):
    """As `gates`; the output stays divided by features, for a row layer."""

    name: ClassVar[str] = "gates-column"
    summary: ClassVar[str] = "as gates; the output stays divided by features, for a row layer (bidirectional: row/2)"
    leaves_part: ClassVar[bool] = True


def _dimensions_of(parameter: str) -> str:
    """The named dimensions of a parameter, by its name."""
    if parameter.startswith("bias"):
        return "(gates hidden)"
    if parameter.startswith("weight_hh"):
        return "(gates hidden) state"
    return (
        "(gates hidden) (in)" if parameter.removesuffix("_reverse") in ("weight_ih", "weight_ih_l0") else "(gates hidden) below"
    )


def is_plain_recurrent(module: nn.Module) -> bool:
    """Whether it is a recurrent layer or cell that a sharded one can stand in for."""
    base = next((kind for kind in RECURRENT if isinstance(module, kind)), None)
    names = ["weight_ih", "weight_hh"]
    if isinstance(module, LAYERS):
        directions = ("", "_reverse") if module.bidirectional else ("",)
        layers = [f"l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]
        names = [f"{name}_{layer}" for name in names for layer in layers]
    return (
        base is not None
        and type(module).forward is base.forward
        and is_replaceable(module)
        and all(module._parameters.get(name) is not None for name in names)
    )
