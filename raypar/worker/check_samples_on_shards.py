"""Checks, before a run, that shards that divide the samples of microbatches have some of each, in training and validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from raypar.errors import PlanError, RayparError
from raypar.job import Job
from raypar.model.capture.module_graph import trace_ahead, traces_of
from raypar.model.graph import Graph
from raypar.worker.data.check_and_count_streams import key_of_set
from raypar.worker.make_worker_assignments import batching_of_set


class CheckedModel(Protocol):
    """What a preflight has found."""

    @property
    def graph(self) -> Graph:
        """The layer graph of the model."""

    @property
    def samples_of_sets(self) -> Mapping[str, int]:
        """Validation set -> number of its samples."""

    @property
    def batch(self) -> Mapping[str, Tensor]:
        """A microbatch of training."""


def check_samples_suffice(spec: Job, shards: int) -> None:
    """Raise `PlanError` where shards divide the samples and one would have none, where they are packed, or where the
    sequence would be divided, too."""
    fewest = spec.batch_size // spec.batching.count
    if fewest < shards:
        raise PlanError(
            f"plan.layout divides the samples of a microbatch, {fewest} at least, over {shards} shards: some would have none",
            cure=f"set microbatches <= {max(1, spec.batch_size // shards)}, or fewer shards",
        )
    own = [(key_of_set(name), one.pack) for name, one in spec.validation_sets.items()]
    if packing := [key for key, pack in (("data", spec.data.pack), *own) if pack is not None]:
        raise PlanError(
            f"plan.layout divides the samples of a microbatch over {shards} shards, and {packing[0]}.pack puts several into a "
            "row and says in fields of all samples where they are",
            cure=f"use {packing[0]}.pad, or take samples out of plan.layout",
        )
    if spec.sequence_parallel:
        raise PlanError(
            "plan.layout divides samples, and plan.sequence_parallel the sequence, over the same shards",
            cure="leave one of them out",
        )


def check_samples_of_validation(
    spec: Job, checked: CheckedModel, shards: int, check: Callable[[Mapping[str, Tensor]], bool]
) -> None:
    """Raise `PlanError` where a microbatch of validation has fewer samples than there are shards, and layers do not run so.

    Most layers do: a shard without samples computes nothing. `check`: raises what layers raise for a batch
    on shards, and returns whether they could be run.
    """
    for name, count in checked.samples_of_sets.items():
        if not count or (fewest := count // batching_of_set(spec, name, count).count) >= shards:
            continue
        try:
            few = {key: field[:fewest] if field.dim() else field for key, field in checked.batch.items()}
            if (cache := traces_of(checked.graph)) is not None:
                trace_ahead(checked.graph, [{key: few[key] for key in cache.first_batch}], training=False)
            if check(few):
                continue
            why = "code that reads numbers is not known to run on none"
        except RayparError as error:
            why = error.what
        key = key_of_set(name)
        more = f"give {key} {shards} samples or more" if count < shards else f"set {key}.batch_size: {2 * shards}, or more"
        raise PlanError(
            f"plan.layout divides samples over {shards} shards, and a microbatch of {key} has {fewest} of them: {why}",
            cure=f"{more}; or use fewer shards",
        )
