"""Layouts that offload activations, compared with one process that keeps all in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

from helpers.recomputed_layouts import RecomputedLayout, recomputed_layouts
from helpers.shard_grid import Cell, recomputing_cells

from raypar.job import Job, PlanConfig
from raypar.plan import MicrobatchRouting, ParallelPlan, offloading
from raypar.schedule import registry
from raypar.schedule.instructions import RESIDENT

SMALL = 32
"""Bytes of the smallest memory that is offloaded in these tests, whose models are small."""


@contextmanager
def small_memory_offloaded() -> Iterator[None]:
    """Context in which memory of small models is offloaded, and little of it may be unwritten."""
    with (
        mock.patch.object(offloading, "SMALLEST_OFFLOADED_BYTES", SMALL),
        mock.patch.object(offloading, "MOST_UNWRITTEN_BYTES", 128 * SMALL),
    ):
        yield


def with_rest_offloaded(plan: ParallelPlan) -> ParallelPlan:
    """The plan, which offloads all layers that it does not recompute."""
    return plan.with_offload(set(range(plan.stages[-1].last)).difference(plan.recompute))


def offloads(plan: ParallelPlan, schedule: str, job: Job) -> bool:
    """Whether some forward writes activations out of memory under the schedule."""
    orders = registry.build_schedule(schedule, MicrobatchRouting(plan, job.batching))
    return any(RESIDENT in i.allocates for order in orders for i in order)


@dataclass(frozen=True)
class OffloadedLayout(RecomputedLayout):
    """A layout that offloads what it does not recompute; all if the policy is `none`."""

    folder: str = field(default="", compare=False)
    """Where to."""

    def __str__(self) -> str:
        return f"offloaded {super().__str__()}"

    @property
    def job(self) -> Job:
        """The layout's job with the folder."""
        return self.layout.job.replace(plan=PlanConfig(activations_in=self.folder))

    @property
    def plan(self) -> ParallelPlan:
        """The layout's plan with recomputation and offloading."""
        return with_rest_offloaded(super().plan)


@dataclass(frozen=True)
class OffloadedCell(Cell):
    """A cell with shards that offloads what it does not recompute."""

    folder: str = field(default="", compare=False)
    """Where to."""

    def __str__(self) -> str:
        return f"offloaded {super().__str__()}"

    @property
    def job(self) -> Job:
        """The cell's job with the folder."""
        given = super().job
        return given.replace(plan=given.plan.model_copy(update={"activations_in": self.folder}))

    @property
    def plan(self) -> ParallelPlan:
        """The cell's plan with recomputation and offloading."""
        return with_rest_offloaded(super().plan)


def offloaded_layouts() -> list[OffloadedLayout]:
    """Layouts of every schedule, stages and replicas, of which every second one recomputes some layers."""
    found = []
    for number, given in enumerate(recomputed_layouts()):
        policy = "none" if number % 2 or given.policy == "full" else given.policy
        cell = OffloadedLayout(given.layout, policy)
        found += [cell] if offloads(cell.plan, cell.layout.schedule, given.job) else []
    return found


def offloaded_cells() -> list[OffloadedCell]:
    """Cells with shards, of which every second one recomputes some layers."""
    found = []
    for number, given in enumerate(recomputing_cells()):
        layers = len(given.graph.layers)
        recompute = given.recompute if number % 2 and len(given.recompute) < layers else ()
        cell = OffloadedCell(**{**vars(given), "recompute": recompute})
        found += [cell] if offloads(cell.plan, cell.schedule, given.job) else []
    return found


def in_folder(cell: OffloadedLayout | OffloadedCell, folder: object) -> OffloadedLayout | OffloadedCell:
    """The cell with its folder."""
    return replace(cell, folder=str(folder))
