"""The section `placement` of a job: on which nodes of a cluster its workers are placed."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator, model_validator

from raypar.elastic.placement_constraints import NODE_LABEL, ON_DEMAND, PlacementConstraints, is_label_selector
from raypar.errors import ConfigError
from raypar.job.key import CLIENT
from raypar.job.section import MAX_WORKERS, Section


class PlacementConfig(Section):
    """The nodes of a cluster on which workers may be placed. An autoscaler adds nodes like that."""

    label_selector: Annotated[dict[str, str], CLIENT] = {}
    """Labels that nodes must have, each with its value in Ray's syntax: `spot`, `!spot`, `in(zone-a,zone-b)`,
    `!in(zone-a,zone-b)`."""
    accelerator_type: Annotated[Annotated[str, Field(min_length=1)] | None, CLIENT] = None
    """Ray's name of the accelerator that nodes must have, such as `H100`; None: any node."""
    on_demand: Annotated[NonNegativeInt, Field(le=MAX_WORKERS), CLIENT] = 0
    """At least so many workers are on nodes that the cloud does not take back; one copy of every stage goes there first."""
    on_demand_label_selector: Annotated[dict[str, str], CLIENT] = ON_DEMAND
    """The labels of those nodes; they are added to `label_selector`, and replace its values for the same labels."""
    worker_memory_mib: Annotated[Annotated[PositiveFloat, Field(allow_inf_nan=False)] | None, CLIENT] = None
    """What a worker may use beside what it takes empty, in MiB. A plan whose memory sheet says more is refused before the run,
    and the planner looks for one that fits. None: it counts with each worker's part of this machine's free memory, and a plan
    that needs more gets a warning."""

    @field_validator("label_selector", "on_demand_label_selector")
    @classmethod
    def _usable(cls, selector: dict[str, str]) -> dict[str, str]:
        """Raises ValueError for what Ray would refuse when the workers are placed."""
        for label, value in selector.items():
            if label == NODE_LABEL:
                raise ValueError(f"{NODE_LABEL} is set by raypar, which avoids nodes that were lost")
            if not is_label_selector(label, value):
                raise ValueError(f"{label}={value} is not a label selector of Ray: write VALUE, !VALUE, in(A,B) or !in(A,B)")
        return selector

    @model_validator(mode="after")
    def _on_demand_is_known(self) -> PlacementConfig:
        if self.on_demand and not self.on_demand_label_selector:
            raise ConfigError(
                f"placement.on_demand is {self.on_demand}, and on_demand_label_selector is empty: every node would do",
                cure="give the labels of on-demand nodes, or leave on_demand out",
            )
        return self

    def to_constraints(self) -> PlacementConstraints:
        """The section as plain data for the driver."""
        return PlacementConstraints(
            accelerator_type=self.accelerator_type,
            label_selector=dict(self.label_selector),
            on_demand=self.on_demand,
            on_demand_label_selector=dict(self.on_demand_label_selector),
        )
