"""Layouts that recompute, compared with one process that recomputes nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product

from helpers import ugly_models
from helpers.parity import STEPS, Layout, differences, different_gradients, expected

from raypar.job import Job
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan
from raypar.plan.recomputation import RecomputePolicy, resolve_recomputed_layers
from raypar.schedule import registry
from raypar.schedule.instructions import Recompute
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

POLICIES: dict[str, Sequence[RecomputePolicy]] = {
    "tangled": ("full", ("mix*", "skip1"), ("embed", "conv", "drop", "tail"), ("skip0", "frozen")),
    "plain": ("full", ("0", "1", "4"), ("2", "7"), ("5",)),
}
"""Model -> its policies: all layers; inner layers; first, last and single layers between layers that are not recomputed."""


@dataclass(frozen=True)
class RecomputedLayout:
    """A layout with what it recomputes."""

    layout: Layout
    policy: RecomputePolicy

    def __str__(self) -> str:
        return f"{self.layout} recompute {self.policy if isinstance(self.policy, str) else '+'.join(self.policy)}"

    @property
    def job(self) -> Job:
        """The layout's job."""
        return self.layout.job

    @property
    def plan(self) -> ParallelPlan:
        """The layout's plan with the recomputation."""
        return replace(self.layout.plan, recompute=resolve_recomputed_layers(self.policy, _layer_names(self.layout.model)))

    @property
    def recomputations(self) -> int:
        """Number of recomputations in a step."""
        return count_recomputations(self.plan, self.layout.schedule, self.layout.job.batching)


@functools.cache
def _layer_names(model: str) -> list[str]:
    return [layer.name for layer in make_layer_graph(ugly_models.job(model)).layers]


def count_recomputations(plan: ParallelPlan, schedule: str, batching: Microbatches) -> int:
    """Number of `Recompute` instructions of all workers in a step; 0 if each backward follows its forward at once."""
    orders = registry.build_schedule(schedule, MicrobatchRouting(plan, batching))
    return sum(type(instruction) is Recompute for order in orders for instruction in order)


def recomputed_layouts() -> list[RecomputedLayout]:
    """Every schedule x stages x replicas, with the policies of both models in turn; also uneven replicas and idle replicas.

    Layouts under which nothing is recomputed (all of the naive schedule, single stages under 1F1B) are left out.
    """
    found = []
    counts, turns = cycle((1, 2, 3, 4, 5, 7, 8)), {model: cycle(policies) for model, policies in POLICIES.items()}
    for schedule in registry.NAMES:
        for stages, replicas in product(range(1, 5), range(1, 4)):
            model = "tangled" if (stages + replicas) % 3 else "plain"
            found.append(RecomputedLayout(Layout(model, schedule, (replicas,) * stages, next(counts)), next(turns[model])))
        found += [
            RecomputedLayout(Layout("tangled", schedule, uneven, 3 + next(counts) % 4), next(turns["tangled"]))
            for uneven in ((1, 2), (2, 1, 3), (1, 2, 3, 1))
        ]
        found.append(RecomputedLayout(Layout("tangled", schedule, (2, 2), 5, blocks=1), "full"))
        found.append(RecomputedLayout(Layout("plain", schedule, (1, 4, 1), 8, blocks=8), ("?",)))
    return [cell for cell in found if cell.recomputations]


def check_recomputed(cell: RecomputedLayout, order_seed: int = 0) -> None:
    """Run the layout in one process; loss, norm, gradients and parameters must equal those of the reference."""
    layout = cell.layout
    want = expected(layout.model, layout.microbatches, layout.blocks, layout.compute)
    with OneProcessRun(cell.job, cell.plan, layout.schedule, graph=layout.graph, seed=order_seed) as run:
        for step in range(STEPS):
            reports = run.step(step, trace=True)
            assert {r.loss for r in reports} == {want.losses[step]}, f"{cell}, step {step}: loss"
            assert {r.norm for r in reports} == {want.norms[step]}, f"{cell}, step {step}: norm"
            bad = different_gradients(run, want, step)
            assert not bad, f"{cell}, step {step}: gradients of {bad}"
        parameters = run.parameters()
        assert parameters.keys() == want.parameters.keys()
        bad = [d for n, p in want.parameters.items() for d in differences(n, parameters[n], p)]
        assert not bad and not run.warnings, f"{cell}: {bad}, {run.warnings}"
        assert sum("R" in span.label for report in reports for span in report.spans) == cell.recomputations
