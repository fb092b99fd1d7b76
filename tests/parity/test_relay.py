"""Gradients by relay, strides that travel: each microbatch's gradients are those of the plain module under plain autograd."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import reference, relayed_models, ugly_models
from helpers.relayed_models import PlainModel
from torch import Tensor

from raypar.model.layer_skeletons import canonical_names
from raypar.plan import ParallelPlan
from raypar.schedule import registry
from raypar.worker.job_spec import JobSpec, Precision
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.gradient_accumulator import GradientAccumulator
from raypar.worker.worker_assignments import make_layer_graph

LAYERS = 10


def job(compute: Any = None) -> JobSpec:
    return ugly_models.job("relayed", microbatches=3, virtual_replicas=3, steps=1, precision=Precision(compute))


def plan_of(schedule: str, cuts: Sequence[int], *, replicas: int = 1, recompute: Sequence[int] = ()) -> ParallelPlan:
    chunks = registry.resolve_chunks_per_worker(schedule)
    positions = (len(cuts) + 1) // chunks
    return ParallelPlan.of(
        [replicas] * positions,
        layers=LAYERS,
        chunks=chunks,
        placement=registry.placement_of_schedule(schedule),
        cuts=cuts,
        recompute=recompute,
    )


def gradients_of_microbatches(
    monkeypatch: pytest.MonkeyPatch, spec: JobSpec, plan: ParallelPlan, schedule: str
) -> list[dict[str, Tensor | None]]:
    """By microbatch: parameter -> gradient of the first step, before anything is added over microbatches."""
    rows: dict[tuple[int, int], dict[str, Tensor | None]] = defaultdict(dict)
    add, enter = GradientAccumulator._add, GradientAccumulator.enter

    def keep(self: GradientAccumulator, block: int, uses: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        for use, gradient in zip(uses, gradients, strict=True):
            rows[0, block][self.names[use]] = None if gradient is None else gradient.clone()
        add(self, block, uses, gradients)

    monkeypatch.setattr(GradientAccumulator, "_add", keep)
    monkeypatch.setattr(GradientAccumulator, "enter", lambda self, block, *, join=False: enter(self, block))
    with OneProcessRun(spec, plan, schedule) as run:
        run.step(0)
        canonical = canonical_names(run.graph)
        order = [f"{layer.name}." for layer in run.graph.layers]
    found = []
    for microbatch in range(spec.microbatches):
        sums: dict[str, Tensor | None] = {}
        uses = rows[0, microbatch]
        # The uses of a tie, last layer first.
        for prefix in reversed(order):
            for name, gradient in ((n, g) for n, g in uses.items() if n.startswith(prefix)):
                name = canonical.get(name, name)
                before = sums.get(name)
                sums[name] = gradient if before is None else before if gradient is None else before + gradient
        found.append(sums)
    return found


def plain_gradients(spec: JobSpec) -> list[dict[str, Tensor | None]]:
    torch.set_num_threads(1)
    model, data = PlainModel(make_layer_graph(spec), spec), spec.data.dataset.call()
    m, batch = spec.microbatches, spec.batch_size
    fields = [reference.samples(data, spec, i * batch // m, (i + 1) * batch // m) for i in range(m)]
    return [model.gradients(i, each, relayed_models.loss) for i, each in enumerate(fields)]


def unequal(found: list[dict[str, Tensor | None]], want: list[dict[str, Tensor | None]]) -> list[str]:
    bad = []
    for microbatch, (got, wanted) in enumerate(zip(found, want, strict=True)):
        assert got.keys() == wanted.keys()
        for name, gradient in wanted.items():
            other = got[name]
            if (gradient is None) != (other is None) or not (gradient is None or torch.equal(gradient, other)):
                bad.append(f"{name} of microbatch {microbatch}")
    return bad


CUTS = [(1,), (3,), (5,), (8,), (2, 4, 7), (1, 3, 5, 6), tuple(range(1, 10))]
CELLS = [("1f1b", cuts, (), None) for cuts in CUTS]
CELLS += [("zb-h1", (3, 5), (), None), ("zb-v", (3, 5, 7), (), None), ("interleaved", (2, 4, 6), (), None)]
CELLS += [("gpipe", (4, 7), (1, 2, 3, 6), None), ("zb-v", (2, 5, 6), (3, 4, 8, 9), None), ("1f1b", (3, 6), (), "bf16")]
EVERY_CUT = [(cut,) for cut in range(1, LAYERS)]
ALL = [
    (schedule, cuts, recompute, compute)
    for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
    for cuts in [*EVERY_CUT, (2, 4, 7), (1, 3, 5), (3, 6, 8), (1, 2, 4, 5, 7), tuple(range(1, 10))]
    if (len(cuts) + 1) % registry.resolve_chunks_per_worker(schedule) == 0
    for recompute in ((), tuple(range(LAYERS)), (1, 4, 7))
    for compute in (None, "bf16")
]


@pytest.mark.parametrize("schedule, cuts, recompute, compute", CELLS, ids=str)
def test_each_microbatch_has_the_gradients_of_the_plain_module(monkeypatch, schedule, cuts, recompute, compute):
    spec = job(compute)
    found = gradients_of_microbatches(monkeypatch, spec, plan_of(schedule, cuts, recompute=recompute), schedule)
    want = plain_gradients(spec)
    assert all(gradient is not None for gradient in want[0].values())
    assert unequal(found, want) == []


@pytest.mark.full
@pytest.mark.parametrize("schedule, cuts, recompute, compute", ALL, ids=str)
def test_each_microbatch_has_the_gradients_of_the_plain_module_in_every_layout(monkeypatch, schedule, cuts, recompute, compute):
    test_each_microbatch_has_the_gradients_of_the_plain_module(monkeypatch, schedule, cuts, recompute, compute)
