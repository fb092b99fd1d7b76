"""Each worker's part of a plan: its program, and the microbatches that it measures in validations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import make_model_outline
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import Microbatches, MicrobatchesOfSets, ModelOutline, ParallelPlan
from raypar.plan.forward_pass_batching import whole_batching
from raypar.plan.gradient_pool import GradientPool
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.schedule.instructions import Schedule
from raypar.schedule.program_assignment import ProgramAssignment, assign_programs_to_ranks


def make_validation_batching(spec: Job, samples: Mapping[str, int]) -> Microbatches | None:
    """The samples of all validation sets in microbatches; None if the job has no validation. `samples`: those of each set.

    Of a run that makes forward passes only those of one pass, as if all were of that size.
    """
    if spec.validation is None or not samples:
        return None
    if spec.forward_passes is not None:
        count = spec.forward_passes.microbatches
        return Microbatches(count, count, count * -(-spec.batch_size // spec.microbatches))
    sets = {name: batching_of_set(spec, name, count) for name, count in samples.items()}
    return sets[""] if "" in sets else MicrobatchesOfSets.of(sets)


def batching_of_set(spec: Job, name: str, samples: int) -> Microbatches:
    """The samples of one validation set in microbatches of at most its batch size, or the size of those of training."""
    own = spec.validation_sets[name].batch_size
    return whole_batching(samples, *((spec.batch_size, spec.microbatches) if own is None else (own, 1)))


def make_worker_assignments(
    spec: Job,
    graph: Graph,
    plan: ParallelPlan,
    schedule: Schedule,
    *,
    validation_samples: Mapping[str, int] = MappingProxyType({}),
    shards: Collection[int] = (),
) -> tuple[ProgramAssignment, ...]:
    """The assignment of each rank, by rank, lowered from the schedule. `validation_samples`: those of each validation set;
    without any there is no validation. `shards`: numbers of shards that other plans of the run may have.

    Raises `ScheduleError` if the result would not run.
    """
    layouts = _layouts(spec, graph, plan.virtual_shard_counts | set(shards))
    validation = make_validation_batching(spec, validation_samples)
    outline = make_model_outline(graph)
    pool = _pool(spec, outline, layouts)
    return assign_programs_to_ranks(
        schedule, plan, outline.crossing(plan), spec.batching, validation, layouts=layouts, pool=pool
    )


def _layouts(spec: Job, graph: Graph, counts: Collection[int]) -> dict[int, TensorParallelLayout]:
    """Number of shards -> the layout for them; empty if all layers are whole."""
    cut_into = {*counts, 1} if max(counts) > 1 else ()
    return {count: compute_shard_layout(graph, count, dict(spec.styles), dict(spec.layout)) for count in cut_into}


def gradient_pool(spec: Job, graph: Graph, plan: ParallelPlan) -> GradientPool:
    """The memory of a stage for gradients that are scattered."""
    return _pool(spec, make_model_outline(graph), _layouts(spec, graph, plan.virtual_shard_counts))


def _pool(spec: Job, outline: ModelOutline, layouts: Mapping[int, TensorParallelLayout]) -> GradientPool:
    shardings = {count: layout.cuts for count, layout in layouts.items()}
    outline = replace(outline, undivided=spec.undivided, shardings=shardings, layouts=layouts)
    return GradientPool(spec.reduction_buffer_bytes, outline, 8 if spec.dtype == "float64" else 4)
