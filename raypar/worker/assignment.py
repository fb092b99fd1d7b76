"""From a job to its graph, and to what the driver ships to each worker once per plan."""

from __future__ import annotations

import torch

from raypar.errors import ModelError, RayparError, UserCodeError
from raypar.model.capture import capture
from raypar.model.graph import Graph
from raypar.plan import Microbatches, ParallelPlan
from raypar.schedule.assignment import Assignment, assign
from raypar.schedule.instructions import Schedule
from raypar.user_code import ENDS, said, unless_ctrl_c
from raypar.worker.spec import JobSpec

__all__ = ["Assignment", "assignments", "make_graph", "validation_cut"]


def make_graph(spec: JobSpec) -> Graph:
    """Call the user's model function under the meta device and read its layers."""
    try:
        with torch.device("meta"):
            made = spec.model.call()
    except RayparError:
        raise
    except ENDS as error:
        unless_ctrl_c(error)
        raise UserCodeError(
            f"the model function {spec.model.label} raised {said(error)}",
            cure="it is called with model.args under torch.device('meta'): it may not read values of tensors",
        ) from error
    if made is None:
        raise ModelError(f"the model function {spec.model.label} returned None", cure="return nn.Sequential, layers or a Graph")
    return capture(made, input=spec.data.input or "x")


def validation_cut(spec: JobSpec, samples: int) -> Microbatches | None:
    """Validation samples in microbatches of the training size (the last cut evens out), spread over all blocks."""
    if spec.validation is None or samples == 0:
        return None
    size = -(-spec.batch_size // spec.microbatches)
    count = -(-samples // size)
    return Microbatches(count, count, samples)


def assignments(
    spec: JobSpec, graph: Graph, plan: ParallelPlan, schedule: Schedule, *, validation_samples: int = 0
) -> tuple[Assignment, ...]:
    """Lower a schedule to one assignment per rank. Raises `ScheduleError` when the result would not run."""
    return assign(schedule, plan, graph.crossing(plan), spec.cut, validation_cut(spec, validation_samples))
