"""ZeRO on shards: gradients go to owners of runs alone, as many bytes as that takes, and level 2 keeps only these."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from helpers.shard_grid import SHALLOW, Cell
from helpers.virtual_shards import divided
from helpers.zero_layouts import small_pieces

from raypar.comm.collectives import ALIGN
from raypar.comm.holder_buckets import OwnerBucket
from raypar.plan.addition_tree import covering_nodes
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

CELLS = [
    Cell("llama", "1f1b", (2, 1), (4, 2), 5, True),
    pytest.param(Cell("gpt", "1f1b", (3,), (2,), 6, True), marks=pytest.mark.ci),
    pytest.param(Cell("gpt", "zb-h1", (2, 2), (1, 2), 5, dtype="float32"), marks=pytest.mark.ci),
]


def sent(core, kind: str) -> int:
    return core.transport.ledger.sent[kind]


def bytes_to_owners(core, index: int, number: int) -> int:
    """What a worker sends of the gradients of one virtual shard of a stage: each of its subtree sums of the runs of all others,
    each run padded to the alignment of new tensors."""
    place, stage = core.step_commit.routing.plan.stages[index], core.stages[index, number]
    replica = core.step_commit.routing.plan.role_in(core.rank, index).replica
    uses = Counter(name for name, places in core.step_commit._places[index, number].items() for _ in places)
    subtrees = len(covering_nodes(core.step_commit.routing.blocks_of_replica(index, replica), core.spec.batching.blocks))
    elements = 0
    for other in set(range(place.replicas)) - {replica}:
        for run in core.ownership.runs(index, number, other):
            elements += uses[run.name] * -(-(run.stop - run.start) // ALIGN) * ALIGN
    return subtrees * elements * next(iter(stage.parameters.values())).itemsize


@pytest.mark.parametrize("holders", [1, 2])
@pytest.mark.parametrize("cell", [Cell("gpt", "1f1b", (4,), (2,), 8, True), Cell("gpt", "1f1b", (3,), (1,), 7)], ids=str)
def test_each_subtree_sum_goes_to_the_holders_of_its_runs_alone(cell, holders):
    for plan in (cell.plan.with_zero(1, holders), divided(cell.plan, (2,) * cell.shards[0]).with_zero(2, holders)):
        with small_pieces(), OneProcessRun(cell.job, plan, "1f1b", graph=cell.graph) as run:
            run.step(0)
            before = [sent(core, "all_to_all") for core in run.cores]
            run.step(1)
            gathered = [0 if holders == 1 else gathered_bytes(core) for core in run.cores]
            want = [sum(bytes_to_owners(core, *key) for key in core.stages) for core in run.cores]
            assert [sent(c, "all_to_all") - was for c, was in zip(run.cores, before, strict=True)] == [
                a + b for a, b in zip(want, gathered, strict=True)
            ]
            kinds = {type(bucket) for core in run.cores for of in core.step_commit.reductions.values() for bucket in of.buckets}
            assert kinds == {OwnerBucket}, "no gradient is gathered"


def gathered_bytes(core) -> int:
    """What a worker sends of its parameters: each owned run to all replicas that do not hold it."""
    found = 0
    for gather in core.step_commit.gather.stages.values():
        own = gather.group.index(core.rank)
        nbytes = sum(view.nbytes for each in gather.rounds for view in each.views[own])
        found += nbytes * (len(gather.group) - gather.holders)
    return found


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_of_gradients_on_shards_what_is_owned_alone_lives_when_they_are_reduced_at_level_2(cell):
    with small_pieces(), OneProcessRun(cell.job, cell.plan.with_zero(2), cell.schedule, graph=cell.graph) as run:
        run.step(0)
        for core in run.cores:
            elements, divides = 0, False
            for index, owned in core.step_commit.owned.items():
                kept = [each.parameter.grad for each in owned if each.parameter.grad is not None]
                elements += sum(map(torch.numel, kept))
                divides |= core.ownership.divides(index[0], "gradient")
                storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
                assert not core.ownership.divides(index[0], "gradient") or sum(storages.values()) == sum(
                    one.nbytes for one in kept
                ), "no part of a larger tensor"
            assert not divides or elements == core.ownership.elements(core.rank, "gradient"), "what the sheet says"


@pytest.mark.parametrize("model", [SHALLOW, "llama"])
def test_partial_gradients_of_owned_runs_alone_are_added_up_over_shards(model):
    """Norms under sequence parallelism, and key heads that shards share: each replica completes what it owns."""
    cell, added = Cell(model, "1f1b", (3,), (4,), 3, True), {}
    for level in (0, 1):
        with small_pieces(), OneProcessRun(cell.job, cell.plan.with_zero(level), "1f1b", graph=cell.graph) as run:
            run.step(0)
            before = [sent(core, "all_reduce") for core in run.cores]
            run.step(1)
            added[level] = sum(sent(core, "all_reduce") - was for core, was in zip(run.cores, before, strict=True))
    assert added[1] < added[0], added
