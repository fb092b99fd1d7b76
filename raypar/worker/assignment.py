"""What the driver ships to each worker once per plan: the plan, the worker's programs and what crosses between stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raypar.errors import ModelError, RayparError, UserCodeError
from raypar.model.capture import capture
from raypar.model.graph import Graph
from raypar.plan import Crossing, Microbatches, ParallelPlan, Routing
from raypar.schedule.instructions import BackwardInput, Program, Schedule
from raypar.schedule.lower import lower, lower_forward
from raypar.schedule.validate import validate
from raypar.worker.spec import JobSpec


@dataclass(frozen=True)
class Assignment:
    """One worker's part of a plan. `validation_cut` is the cut of one whole validation pass, if there is one."""

    plan: ParallelPlan
    crossing: Crossing
    program: Program
    splits_backward: bool
    validation_cut: Microbatches | None = None
    validation_program: Program = ()


def make_graph(spec: JobSpec) -> Graph:
    """Call the user's model function under the meta device and read its layers."""
    try:
        with torch.device("meta"):
            made = spec.model.call()
    except RayparError:
        raise
    except Exception as error:
        raise UserCodeError(
            f"the model function {spec.model.label} raised {type(error).__name__}: {error}",
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
    routing = Routing(plan, spec.cut)
    crossing = graph.crossing(plan)
    programs = lower(schedule, routing, crossing)
    validate(programs, routing, crossing)
    cut = validation_cut(spec, validation_samples)
    forward: tuple[Program, ...] = ((),) * plan.world
    if cut is not None:
        forward = lower_forward(Routing(plan, cut), crossing)
    return tuple(
        Assignment(
            plan,
            crossing,
            program,
            any(isinstance(i, BackwardInput) for i in program),
            cut,
            forward[rank],
        )
        for rank, program in enumerate(programs)
    )
