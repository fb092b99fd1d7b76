"""The section `precision` of a job: the dtypes in which it computes, and how a loss is scaled whose gradients are float16."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from raypar.errors import ConfigError
from raypar.job.precision_and_plan_names import PrecisionName
from raypar.job.section import Section
from raypar.plan.loss_scale import LEAST, MOST, LossScaling


class LossScaleConfig(Section):
    """How the loss is scaled with `fp16`, under the names of `torch.amp.GradScaler`. All factors are powers of two, so that
    scaling rounds nothing."""

    init_scale: PositiveFloat = 65536.0
    """The scale of the first step: what the backward pass of a microbatch's loss starts from. That loss is a sum over samples
    or tokens, so the scale that fits is smaller than that of a mean by about their number."""
    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    """What the scale is multiplied by after `growth_interval` steps without an overflow."""
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """What the scale is multiplied by after a step that was skipped, because its gradients were not finite."""
    growth_interval: PositiveInt = 2000
    """How many steps in a row without an overflow let the scale grow; as many as `steps`: it never grows."""

    @field_validator("init_scale", "growth_factor", "backoff_factor")
    @classmethod
    def _is_power_of_two(cls, value: float) -> float:
        if math.frexp(value)[0] != 0.5 or not LEAST <= math.log2(value) <= MOST:
            raise ValueError(f"a power of two (65536, 2, 0.5, ...) from 2^{LEAST} to 2^{MOST}")
        return value

    @property
    def scaling(self) -> LossScaling:
        """The same, with exponents for the powers of two."""
        first, growth, backoff = (int(math.log2(one)) for one in (self.init_scale, self.growth_factor, self.backoff_factor))
        return LossScaling(first, growth, -backoff, self.growth_interval)


class PrecisionConfig(Section):
    """The dtypes in which a job computes, where they are others than its `dtype`."""

    compute: PrecisionName | None = None
    """`bf16` or `fp16`: layers and the loss run under `torch.autocast` to bfloat16 or float16, parameters, their gradients and
    the optimizer stay float32. None: everything is computed in `dtype`."""
    parameters: PrecisionName | None = None
    """`bf16` or `fp16`: layers compute with copies of the parameters in it, without any cast of their own; the parameters
    themselves (`master`), the optimizer and checkpoints are float32. In place of `compute`. None: layers compute with the
    parameters."""
    master: Literal["float32"] | None = None
    """Dtype of the parameters that the optimizer changes, of which layers have copies; `parameters` needs it."""
    gradients: Literal["float32", "bf16", "fp16"] = "float32"
    """Dtype in which gradients of `parameters` are added up and sent; theirs: half the memory and half the bytes between
    replicas; each addition is rounded, so of what later microbatches of a block add a small part is lost (with `bf16` what is
    less than 1/512 of the sum, with `fp16` less than 1/4096)."""
    loss_scale: LossScaleConfig = LossScaleConfig.model_construct()
    """With `fp16`: how the loss is scaled, so that small gradients are no zeros; a step whose gradients overflow is skipped."""

    @property
    def loss_scaling(self) -> LossScaling | None:
        """How the scale of the loss changes; None: the loss is not scaled."""
        return self.loss_scale.scaling if "fp16" in (self.compute, self.parameters) else None


_LOST: dict[PrecisionName, str] = {"bf16": "1/512", "fp16": "1/4096"}
"""The part of a number below which an addition to it is rounded away."""


def check_precision(found: PrecisionConfig, dtype: str) -> None:
    """Raises `ConfigError` for settings of `precision` that do not go together, or not with the job's `dtype`."""
    if found.compute is not None and found.parameters is not None:
        raise ConfigError(
            "precision.compute and precision.parameters are both set: autocast would cast nothing but what layers keep in "
            "float32 on purpose",
            cure="leave one of them out: compute casts float32 parameters at each use, parameters keeps copies of them",
        )
    if found.parameters is not None and found.master is None:
        raise ConfigError(
            f"precision.parameters is {found.parameters}, and precision.master is not set: without float32 masters an "
            f"update of less than {_LOST[found.parameters]} of a parameter would be rounded away",
            cure="set precision.master: float32",
        )
    if found.master is not None and found.parameters is None:
        raise ConfigError(
            f"precision.master is {found.master}, and precision.parameters, of which it is the master, is not set",
            cure="set precision.parameters: bf16 or fp16, or leave master out",
        )
    if found.gradients != "float32" and found.parameters != found.gradients:
        parameters = f"{found.parameters}, whose gradients are added in it or in float32"
        if found.parameters is None:
            parameters = f"not set: what layers compute with is {dtype}, and so are its gradients"
        raise ConfigError(
            f"precision.gradients is {found.gradients}, and precision.parameters is {parameters}",
            cure=f"set precision.parameters: {found.gradients} and precision.master: float32, or leave gradients out",
        )
    if found.compute is not None and dtype != "float32":
        raise ConfigError(
            f"precision.compute is {found.compute}, but dtype is {dtype}, which autocast leaves as it is",
            cure="set dtype: float32, or leave precision out",
        )
    if found.parameters is not None and dtype != "float32":
        raise ConfigError(
            f"precision.master is {found.master}, but dtype, that of the parameters themselves, is {dtype}",
            cure="set dtype: float32, or leave precision out",
        )
    if found.loss_scaling is None and found.loss_scale != LossScaleConfig.model_construct():
        raise ConfigError(
            "precision.loss_scale is set, and nothing is computed in float16: other gradients need no scale",
            cure="set precision.compute: fp16, or leave loss_scale out",
        )
