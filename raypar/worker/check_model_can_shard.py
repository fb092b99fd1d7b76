"""Checks, before a run, that a model can be cut over a plan's shards, and over those that an elastic run may come to have."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from raypar.errors import InputError, PlanError
from raypar.job import Job
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.infer_styles_by_structure import has_inferred_structure
from raypar.model.tensor_parallel.meta_check import check_shards_on_meta
from raypar.model.tensor_parallel.styles.linear_styles import ExpertsStyle
from raypar.plan import ParallelPlan
from raypar.worker.check_layers_with_numbers import check_shards_with_numbers
from raypar.worker.check_samples_on_shards import check_samples_of_validation, check_samples_suffice
from raypar.worker.job_preflight import PreflightResult
from raypar.worker.layer_precisions import dtype_of_job
from raypar.worker.stage.loss import make_loss_function


def check_model_can_shard(spec: Job, checked: PreflightResult, plan: ParallelPlan) -> tuple[str, ...]:
    """Check that the model can be cut over the plan's shards by `spec.styles` and run so; that the optimizer allows the plan.

    Returns lines for the user: what could not be compared on numbers.
    Raises `PlanError` for styles and numbers that do not fit, `ModelError` for layers that need other shards' parts,
    `ConfigError` for an optimizer that would train otherwise than in one process (`OptimizerTrial.check_plan`).
    """
    lines: list[str] = []
    if checked.optimizer is not None:
        checked.optimizer.check_plan(plan)
        if spec.optimizer_in is not None:
            checked.optimizer.check_steps_in_windows()
    for shards in sorted(plan.virtual_shard_counts):
        if shards > 1 or spec.styles or spec.layout:
            layout = compute_shard_layout(checked.graph, shards, dict(spec.styles), dict(spec.layout))
        if shards > 1:
            if not layout.styles and not layout.divides_samples:
                raise PlanError(
                    f"{'virtual_shards' if spec.virtual_shards else 'plan.shards'} is {shards}, but none of the model's layers "
                    "has a style: every shard would compute all of it",
                    cure="name layers in plan.styles (for example '*.up': column, '*.down': row), or set it to 1",
                )
            if layout.divides_samples:
                check_samples_suffice(spec, shards)
            (target, *weights), loss = spec.loss_fields, make_loss_function(spec.loss)
            on_meta: dict[str, Any] = {"weights": weights, "sequence": spec.sequence_parallel, "dtype": dtype_of_job(spec)}
            runs = check_shards_on_meta(checked.graph, layout, loss, checked.batch, target, **on_meta)
            reads_numbers = layout.divides_samples and not runs
            if layout.divides_samples:
                check = partial(check_shards_on_meta, checked.graph, layout, loss, target=target, training=False, **on_meta)
                check_samples_of_validation(spec, checked, shards, check)
            if reads_numbers or has_inferred_structure(checked.graph, layout) or ExpertsStyle.name in layout.styles.values():
                not_compared = check_shards_with_numbers(spec, checked.graph, layout)
                if not_compared is not None:
                    lines.append(
                        f"the layers on {shards} shards were not compared with the whole ones on numbers: {not_compared}; code "
                        "that reads the size or the numbers of its own weights is not seen then: try a smaller model once"
                    )
    return tuple(lines)


def check_other_shard_counts(spec: Job, checked: PreflightResult, plan: ParallelPlan, possible: Iterable[int]) -> None:
    """Check the model for the other numbers of shards (`possible`) that an elastic run may come to have.

    Raises as `check_model_can_shard` does.
    """
    for shards in set(possible) - plan.virtual_shard_counts - {1}:
        try:
            check_model_can_shard(spec, checked, ParallelPlan.mesh(tp=shards, layers=len(checked.graph.layers)))
        except InputError as error:
            what = f"with {shards} shards, to which an elastic run comes when workers are lost: {error.what}"
            raise type(error)(what, error.cure) from error
