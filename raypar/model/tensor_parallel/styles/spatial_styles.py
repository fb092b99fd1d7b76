"""Sharding styles that cut values along a spatial dim: the height of images (`spatial`), or another one (`spatial:width`).

Spatial parallelism (Dryden et al. 2019, arXiv:1903.06681). Every shard holds the whole parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import nn

from raypar.errors import PlanError
from raypar.model.tensor_parallel.convolution import CONVOLUTIONS
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.spatial_convolution import AXES, SpatialConvolution, halo_formula
from raypar.model.tensor_parallel.styles.style import ShardingStyle, is_plain_convolution, is_replaceable, style_misfit_error
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.tensor_parallel_layout import LayerCollective, LayerCollectives, ShardWorkShare, TensorParallelLayout

SPATIAL_DIMENSIONS = frozenset(name for names in AXES.values() for name in names)
"""All of these names."""
_OTHERS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.PReLU,
)
"""Layers beside convolutions that may have the style, so that one pattern suits a whole network. They compute with whatever
they get."""


@dataclass(frozen=True, slots=True)
class SpatialStyle(ShardingStyle):
    """Each shard makes some rows of the output, of its rows of the input and a halo of its neighbours' rows."""

    name: ClassVar[str] = "spatial"
    summary: ClassVar[str] = (
        "convolution: cut along its first spatial dim, the height of images, with halos; spatial:width: along another"
    )
    divides_values: ClassVar[bool] = True
    axis: str = ""
    """The dim's name (`:width`); empty: the first spatial one."""

    @classmethod
    def parse(cls, options: str) -> Self:
        """Reads `:width`, `:height`, `:depth`, `:length` or nothing."""
        if options and (options[0] != ":" or not any(options[1:] in names for names in AXES.values())):
            raise ValueError(options)
        return cls(options[1:])

    @property
    def options(self) -> str:
        """See `ShardingStyle`."""
        return f":{self.axis}" if self.axis else ""

    def check_fits(self, name: str, module: nn.Module) -> None:
        """See `ShardingStyle`."""
        if isinstance(module, _OTHERS) and is_replaceable(module):
            return
        if not isinstance(module, (*CONVOLUTIONS, *_OTHERS)):
            raise PlanError(
                f"the style {self} does not fit {name or 'the model itself'}, a {type(module).__name__}",
                cure=f"{self} is for convolutions and norms; of the patterns of plan.styles the first that matches counts: put "
                f"{name or 'a pattern for it'}: whole before the one that gives it this style",
            )
        if not is_plain_convolution(module):
            raise style_misfit_error(self, name, module)
        self._axis(name, module)

    def _axis(self, name: str, module: nn.Module) -> int:
        """Which spatial dim of a convolution is cut, the first one being 0."""
        assert isinstance(module, CONVOLUTIONS)
        names = AXES[len(module.kernel_size)]
        if self.axis and self.axis not in names:
            raise PlanError(
                f"the style {self} does not fit {name}: the spatial dims of a {type(module).__name__} are {', '.join(names)}",
                cure=f"use one of {', '.join(f'{self.name}:{each}' for each in names)}",
            )
        return names.index(self.axis) if self.axis else 0

    def dimension(self, name: str, module: nn.Module) -> str:
        """The name of the dim that is cut; empty for norms, which cut none themselves. Raises `PlanError` as `check_fits`."""
        return AXES[len(module.kernel_size)][self._axis(name, module)] if isinstance(module, CONVOLUTIONS) else ""

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`. No slices: every shard has the whole parameters."""
        return {}

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        if not isinstance(module, CONVOLUTIONS):
            return module
        return SpatialConvolution(module, name, group, self._axis(name, module), gather_output=self.gathers)

    @property
    def gathers(self) -> bool:
        """Whether the output is made whole again."""
        return False

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`. Rows travel where the kernel has several, or parts of input and output do not meet."""
        if not isinstance(module, CONVOLUTIONS):
            return LayerCollectives()
        dims, names = len(module.kernel_size), AXES[len(module.kernel_size)]
        whole = " ".join(["B C_out", *(name[0].upper() for name in names)])
        gather = (LayerCollective("all_gather", "forward", "output", whole),) * self.gathers
        axis = self._axis("", module)
        forward = LayerCollective("all_to_all", "forward", "input", halo_formula("C_in", dims, axis))
        backward = LayerCollective("all_to_all", "backward", "output", halo_formula("C_out", dims, axis))
        return LayerCollectives((forward, backward, *gather), (forward, backward, *gather))

    def cost(self, name: str, module: nn.Module, shards: int) -> tuple[ShardWorkShare, ...]:
        """See `ShardingStyle`. Each shard computes its rows, with whole parameters."""
        return (ShardWorkShare(1 / shards, 1.0),) * shards


@dataclass(frozen=True, slots=True)
class SpatialGatheredStyle(SpatialStyle):
    """Each shard makes some rows of the output, which are then gathered."""

    name: ClassVar[str] = "spatial-gathered"
    summary: ClassVar[str] = "convolution: as spatial; what comes after it sees the whole output"

    @property
    def gathers(self) -> bool:
        """See `SpatialStyle`."""
        return True

    def check_fits(self, name: str, module: nn.Module) -> None:
        """See `ShardingStyle`."""
        if not is_plain_convolution(module):
            raise style_misfit_error(self, name, module)
        self._axis(name, module)
