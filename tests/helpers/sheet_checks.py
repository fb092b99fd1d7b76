"""Compares the memory sheet with what workers of one process hold after each compute instruction of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from helpers.live_storages import LiveStorages
from torch import Tensor

from raypar.comm.gradient_scatter import ScatterReduction
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.planner.model_profile import ModelProfile
from raypar.planner.predicted_step import kept_bytes_by_kind, predict_step
from raypar.schedule import registry
from raypar.schedule.instructions import KEPT_SIZE, STASH, Compute
from raypar.worker.measure_profile import one_microbatch_of_each_size, profile_layers, read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.worker_core import WorkerCore


def expected_after_each(order: Sequence[Compute], sizes: Any) -> list[tuple[str, int, int]]:
    """(instruction, bytes kept after it, of which the stash) from the declarations of the instructions."""
    kept, found = dict.fromkeys(KEPT_SIZE, 0), []
    for i in order:
        for kind in i.frees:
            kept[kind] -= sizes[kind][i.stage][i.microbatch]
        for kind in i.allocates:
            kept[kind] += sizes[kind][i.stage][i.microbatch]
        found.append((str(i), sum(kept.values()), kept[STASH]))
    return found


def check_kept(job: Job, graph: Graph, plan: ParallelPlan, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for backward passes after each instruction of each worker is counts times what one process measures."""
    routing = MicrobatchRouting(plan, job.batching)
    orders = registry.build_schedule(schedule, routing, connections=graph.crossing(plan))
    measured = profile_layers(job, graph, read_microbatches(job, graph, one_microbatch_of_each_size(job.batching)))
    assert {kept.samples for kept in measured.kept} == {2, 3}
    profile = ModelProfile(measured.layers, outputs=measured.outputs, kept=measured.kept)
    sizes = kept_bytes_by_kind(profile, routing, orders)

    storages = LiveStorages()
    storages.watch(monkeypatch)

    def settle(rank: int) -> None:
        if (place := run.cores[rank].activation_place) is not None:
            place.settle()  # what was on its way to it is gone

    storages.settle = settle
    with OneProcessRun(job, plan, orders, graph=graph) as run:
        run.step(0)
        storages.kept.clear()
        run.step(1)
    for rank, order in enumerate(orders):
        found = [(kept.after, kept.total, kept.stash) for kept in storages.kept if kept.rank == rank]
        assert found == expected_after_each(order, sizes)
    timeline, _ = predict_step(profile, plan, orders, job.batching)
    peaks = [max((k.total for k in storages.kept if k.rank == rank), default=0) for rank in range(plan.world)]
    if plan.offload:  # inside a backward there is more, of the layers that are read then
        assert all(told >= found > 0 for told, found in zip(timeline.peak_bytes, peaks, strict=True))
    else:
        assert timeline.peak_bytes == tuple(peaks)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of the tensors' storages, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def gradient_bytes(core: WorkerCore) -> int:
    """What a worker holds of gradients inside a step: of the blocks under way, open sums, and what waits for a bucket."""
    held: list[Any] = []
    for index, stage in core.stages.items():
        sums, reduction = stage.gradients, core.step_commit.reductions[index]
        held += [leaf.grad for leaf in (*sums.leaves, *(leaf for leaf, _ in sums.rounded.values()))]
        held += [vars(sums).get(name) for name in ("_open", "_sums", "_deferred")]  # none before the first step
        if isinstance(reduction, ScatterReduction):
            held += [] if reduction._step is None else [list(reduction._step.sums._tensors.values())]
        else:
            held += [reduction._totals, [[one.terms, one.memory] for one in reduction._sums.values()]]
    return bytes_of(tensor for tensor in _leaves(held) if isinstance(tensor, torch.Tensor))


def _leaves(held: Any) -> Iterable[Any]:
    """What containers have, whatever their keys."""
    if isinstance(held, (dict, list, tuple)):
        for one in held.values() if isinstance(held, dict) else held:
            yield from _leaves(one)
    else:
        yield held
