"""Sharding styles that cut values along a spatial dim: the height of images (`spatial`), or another one (`spatial:width`).

Spatial parallelism (Dryden et al. 2019, arXiv:1903.06681). Every shard holds the whole parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import nn

from raypar.errors import PlanError
from raypar.model.convolution_call import CONVOLUTIONS
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.spatial_convolution import AXES, SpatialConvolution
from raypar.model.tensor_parallel.styles.layer_kinds import NORM, convolution_dimensions
from raypar.model.tensor_parallel.styles.style import DimensionStyle, is_plain_convolution, is_replaceable, style_misfit_error
from raypar.plan.layer_dimensions import LayerDimensions
from raypar.plan.tensor_parallel_layout import TensorParallelLayout

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
class SpatialStyle(DimensionStyle):
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

    def dimensions(self, name: str, module: nn.Module) -> LayerDimensions:
        """See `DimensionStyle`. No parameter has the dimension; of norms none is divided. Rows travel where the kernel has
        several, or parts of input and output do not meet."""
        if not isinstance(module, CONVOLUTIONS):
            return LayerDimensions(NORM, (), ())
        axis = AXES[len(module.kernel_size)][self._axis(name, module)]
        return replace(convolution_dimensions(module), divided=axis, gathers_output=self.gathers)

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        if not isinstance(module, CONVOLUTIONS):
            return module
        return SpatialConvolution(module, name, group, self._axis(name, module), gather_output=self.gathers)

    @property
    def gathers(self) -> bool:
        """Whether the output is made whole again."""
        return False


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
