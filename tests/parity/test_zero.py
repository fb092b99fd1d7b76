"""ZeRO: replicas divide state, and every bit is that of one process: losses, norms, gradients, parameters, optimizer state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import shard_grid, torch_flesh
from helpers.generations import SHARDS, Generations, mesh
from helpers.parity import STEPS, Layout, layouts
from helpers.recomputed_layouts import recomputed_layouts
from helpers.shard_grid import SHALLOW, Cell, graph
from helpers.virtual_shards import divided
from helpers.zero_layouts import PIECE, check_cell, check_zero, expected, small_pieces, storages

from raypar.plan import ParallelPlan, ownership
from raypar.plan.nested_shares import NestedTensorShares
from raypar.plan.pieces import merge_pieces
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

LEVELS = (3, pytest.param(1, marks=pytest.mark.ci), pytest.param(2, marks=pytest.mark.ci))
"""Each has what the one below it has: the default suite has the highest."""
CELLS = [cell for cell in layouts() if max(cell.replicas) > 1]
SAMPLE = [
    Layout("tangled", "1f1b", (2, 1, 3), 8),
    Layout("tangled", "zb-v", (2, 2), 5),
    Layout("tangled", "1f1b", (2,), 4, compute="bf16 parameters"),
    Layout("tangled", "1f1b", (3,), 7),
    Layout("plain", "interleaved", (2, 2), 5, chunks=4),
    Layout("tangled", "gpipe", (1, 3), 3),
    Layout("tangled", "1f1b", (2, 2), 5, blocks=1),
    Layout("tangled", "1f1b", (3, 3), 3, blocks=7),
    Layout("plain", "zb-h1", (2, 3), 5, compute="bf16 gradients"),
]
SHARDED = [cell for cell in shard_grid.cells() if max(cell.replicas) > 1]
SHARDED_SAMPLE = [
    Cell("llama", "1f1b", (2, 1), (2, 2), 5),
    Cell("gpt", "1f1b", (2, 1), (2, 2), 4, True),
    Cell("gpt", "zb-h1", (2, 2), (1, 2), 5, False, "float32"),
    Cell("gpt", "1f1b", (2,), (2,), 4, False, "float32", compute="bf16 parameters"),
]


def some(sample, others):
    """The first of the sample in the default suite, the rest of it in CI, all others in the full one."""
    later = [pytest.param(cell, marks=pytest.mark.ci) for cell in sample[3:]]
    return [*sample[:3], *later, *(pytest.param(cell, marks=pytest.mark.full) for cell in others if cell not in sample)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", some(SAMPLE, CELLS), ids=str)
def test_a_layout_gives_the_bits_of_one_process(layout, level):
    runs = check_zero(layout, level)
    assert runs or layout not in SAMPLE, "some parameter is divided"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cell", some(SHARDED_SAMPLE, SHARDED), ids=str)
def test_each_shard_is_divided_by_itself(cell, level):
    check_cell(cell, cell.plan.with_zero(level))


HELD_TWICE = [
    Layout("tangled", "1f1b", (2, 3), 5),
    Layout("tangled", "1f1b", (4,), 4, compute="bf16 parameters"),
    *(cell for cell in CELLS if max(cell.replicas) > 2),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", some(HELD_TWICE[:1], HELD_TWICE[1:]), ids=str)
def test_two_replicas_hold_and_step_each_part(layout, level):
    assert check_zero(layout, level, holders=2)


@pytest.mark.ci
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cell", [Cell("llama", "1f1b", (3, 1), (2, 2), 5), Cell("gpt", "1f1b", (1, 4), (1, 2), 4)], ids=str)
def test_two_replicas_hold_each_part_of_a_shard(cell, level):
    check_cell(cell, cell.plan.with_zero(level, 2))


@pytest.mark.ci
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("runs", [(4,), (2, 2), (1, 3)], ids=str)
def test_so_is_each_virtual_shard_of_a_worker(runs, level):
    for model in (SHALLOW, "llama"):
        cell = Cell(model, "1f1b", (2,), (len(runs),), 4)
        check_cell(cell, divided(cell.plan, runs).with_zero(level))


@pytest.mark.parametrize("level", LEVELS)
def test_stages_may_divide_and_others_not(level):
    layout = Layout("tangled", "1f1b", (2, 3), 5)
    stages = tuple(replace(stage, zero=of) for stage, of in zip(layout.plan.stages, (0, level), strict=True))
    check_zero_plan = replace(layout.plan, stages=stages)
    with small_pieces(), OneProcessRun(layout.job, check_zero_plan, "1f1b", graph=layout.graph) as run:
        want = expected(layout.model, layout.microbatches, layout.blocks)
        for step in range(STEPS):
            assert {r.loss for r in run.step(step)} == {want.losses[step]}
        assert all(torch.equal(copy, want.parameters[name]) for name, copies in run.parameters().items() for copy in copies)
        divides = [any(each.run for each in core.step_commit.owned[next(iter(core.stages))]) for core in run.cores]
        assert divides == [False, False, True, True, True]


RECOMPUTED = [cell for cell in recomputed_layouts() if max(cell.layout.replicas) > 1]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cell", some(RECOMPUTED[:1], RECOMPUTED), ids=str)
def test_layouts_that_recompute(cell, level):
    check_zero(cell.layout, level, cell.plan)


@pytest.mark.ci
@pytest.mark.parametrize("level", LEVELS)
def test_replicas_with_other_shares_of_the_blocks_from_a_step_on(level):
    check_zero(Layout("tangled", "1f1b", (3,), 8, blocks=8), level, later=((1, 5, 2),))


@pytest.mark.ci
@pytest.mark.parametrize("order_seed", range(3))
def test_the_order_in_which_workers_run_does_not_matter(order_seed):
    check_zero(SAMPLE[0], 1, order_seed=order_seed)


# -- memory ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        Layout("tangled", "1f1b", (2, 3), 6),
        pytest.param(Layout("tangled", "zb-v", (2, 2), 5), marks=pytest.mark.ci),
        pytest.param(Layout("tangled", "1f1b", (3,), 7, compute="bf16 gradients"), marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_of_gradients_what_is_owned_alone_lives_when_they_are_reduced_at_level_2(layout):
    """Ties over stages included."""
    assert check_zero(layout, 2)
    with small_pieces(), OneProcessRun(layout.job, layout.plan.with_zero(2), layout.schedule, graph=layout.graph) as run:
        run.step(0)
        for core in run.cores:
            assert not any(part is not None for uses in core.step_commit._reduced_uses.values() for part in uses)
            for index, owned in core.step_commit.owned.items():
                kept = [each.parameter.grad for each in owned if each.parameter.grad is not None]
                assert storages(kept) == sum(one.nbytes for one in kept)
                assert not any(one is not None for one in core.step_commit._settled[index].values()), "none is whole"


@pytest.mark.parametrize("compute", [None, "bf16 parameters"])
def test_owners_alone_hold_state_and_masters_as_many_bytes_as_ownership_says(compute):
    layout = Layout("tangled", "1f1b", (3,), 4, compute=compute)
    with small_pieces(), OneProcessRun(layout.job, layout.plan.with_zero(1), "1f1b", graph=layout.graph) as run:
        run.step(0)
        for core in run.cores:
            for index, stage in core.stages.items():
                of_optimizer = core.step_commit.optimizers[index].state
                mine = [each.parameter for each in core.step_commit.owned[index]]
                assert sum(map(torch.numel, mine)) == core.ownership.elements(core.rank, "optimizer")
                assert {id(parameter) for parameter in of_optimizer} <= set(map(id, mine))
                for parameter, kept in of_optimizer.items():
                    assert {value.shape for value in kept.values()} == {torch.Size(), parameter.shape}
                masters = [stage.parameters[name] for name in stage.weights.freed_masters]
                assert bool(masters) == (compute is not None)
                assert storages(masters) <= 4 * len(masters), "no memory but one element's"
        elements = {core.rank: core.ownership.elements(core.rank, "optimizer") for core in run.cores}
        assert max(elements.values()) - min(elements.values()) <= PIECE


def test_with_two_holders_each_replica_sends_and_keeps_twice_its_part_and_gathers_less():
    """Gradients go to both holders of a part; parameters to the replicas that do not hold it."""
    layout = Layout("tangled", "1f1b", (4,), 8, blocks=8)
    with small_pieces(), OneProcessRun(layout.job, layout.plan.with_zero(1, 2), "1f1b", graph=layout.graph) as run:
        gathered = []
        for core in run.cores:
            stages = core.step_commit.gather.stages.values()
            views = [view for stage in stages for each in stage.rounds for view in each.views[core.rank]]
            gathered.append(sum(view.nbytes for view in views))
            held = sum(each.parameter.nbytes for each in core.step_commit.owned[0, 0])
            assert held == 4 * core.ownership.elements(core.rank, "optimizer")
        run.step(0)
        before = [core.transport.ledger.sent["all_to_all"] for core in run.cores]
        run.step(1)
        sent = [core.transport.ledger.sent["all_to_all"] - was for core, was in zip(run.cores, before, strict=True)]
    whole, padding = sum(gathered), 4 * 64 * len(layout.graph.layers) * 8
    assert all(abs(one - (2 * 3 / 4 * whole + 2 * own)) <= padding for one, own in zip(sent, gathered, strict=True)), sent


def test_the_bytes_of_a_step_are_those_of_level_0():
    """Each replica's gradients go to their owners, and owners' parameters to all: n - 1 parts of n, twice."""
    layout = Layout("tangled", "1f1b", (3,), 6, blocks=6)
    sent = {}
    for level in (0, 1):
        with small_pieces(), OneProcessRun(layout.job, layout.plan.with_zero(level), "1f1b", graph=layout.graph) as run:
            run.step(0)
            before = [dict(core.transport.ledger.sent) for core in run.cores]
            run.step(1)
            found = [core.transport.ledger.sent for core in run.cores]
            kinds = ("all_to_all", "all_gather")
            sent[level] = [sum(now[kind] - was.get(kind, 0) for kind in kinds) for now, was in zip(found, before, strict=True)]
            if level:
                own = [sum(e.parameter.nbytes for e in core.step_commit.owned[0, 0]) for core in run.cores]
                gathered = [now["all_gather"] - was.get("all_gather", 0) for now, was in zip(found, before, strict=True)]
                assert gathered == [2 * nbytes for nbytes in own]
    padding = 3 * 64 * len(layout.graph.layers) * 4
    assert all(abs(one - other) <= padding for one, other in zip(*sent.values(), strict=True)), sent


# -- checkpoints and changes of the plan ----------------------------------------------------------------------------------


def save(run: OneProcessRun, root: Path, done: int) -> Path:
    return checkpoint_files.save_run(run, root, done)


PLANS = [((3,), 0), ((3,), 3), ((2, 2), 2), ((1, 3), 1), ((2,), 0), ((1,), 0), ((2, 3), 3)]
PAIRS = [(before, after) for before in PLANS for after in PLANS if before[1] or after[1]]
PAIRS += [(((3,), 1, 2), ((2, 2), 1)), (((1, 3), 1), ((4,), 1, 2)), (((3,), 1, 2), ((2,), 1, 2)), (((4,), 3, 2), ((3,), 3, 2))]
MARKS = {1: (), 9: (pytest.mark.ci,), len(PAIRS) - 3: (pytest.mark.ci,), len(PAIRS) - 1: (pytest.mark.ci,)}
"""Pairs that other suites than the full one run."""


@pytest.mark.parametrize(
    "before, after",
    [pytest.param(*pair, marks=MARKS.get(i, (pytest.mark.full,))) for i, pair in enumerate(PAIRS)],
    ids=str,
)
@pytest.mark.parametrize("compute", [None, pytest.param("bf16 parameters", marks=pytest.mark.ci)])
def test_a_checkpoint_of_any_level_resumes_under_any_other(before, after, compute, tmp_path: Path):
    layout = Layout("tangled", "1f1b", (1,), 5, compute=compute)
    layers, want = len(layout.graph.layers), expected("tangled", 5, 0, compute)
    with small_pieces():
        with OneProcessRun(
            layout.job, ParallelPlan.of(before[0], layers=layers).with_zero(*before[1:]), "1f1b", graph=layout.graph
        ) as run:
            run.step(0), run.step(1)
            path = save(run, tmp_path, 2)
        checkpoint_files.verify_checkpoint(path)
        with OneProcessRun(
            layout.job, ParallelPlan.of(after[0], layers=layers).with_zero(*after[1:]), "1f1b", graph=layout.graph
        ) as run:
            for core in run.cores:
                core.load(path)
            for step in range(2, STEPS):
                assert {r.loss for r in run.step(step)} == {want.losses[step]}
            last = save(run, tmp_path, STEPS)
    found = checkpoint_files.read_checkpoint_state(last)
    assert found.keys() == want.parameters.keys()
    for name, kinds in found.items():
        assert torch.equal(kinds[checkpoint_files.PARAMETER], want.parameters[name]), name
        for key, value in want.state.get(name, {}).items():
            assert torch.equal(kinds[checkpoint_files.optimizer_key(key)], torch.as_tensor(value)), (name, key)


class PartsOfEachTensor(NestedTensorShares):
    """Another way to divide tensors, as of an earlier raypar: equal parts of each, in order."""

    def runs_of_owner(self, owner):
        for index, size in enumerate(self.sizes):
            ends = [size if i == self.owners else i * size // self.owners // PIECE * PIECE for i in (owner, owner + 1)]
            if ends[0] < ends[1]:
                yield index, *ends


def test_a_checkpoint_of_owners_who_had_other_runs_resumes(tmp_path: Path):
    layout, want = Layout("tangled", "1f1b", (3,), 5), expected("tangled", 5, 0)
    with small_pieces():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ownership, "NestedTensorShares", PartsOfEachTensor)
            with OneProcessRun(layout.job, layout.plan.with_zero(1), "1f1b", graph=layout.graph) as run:
                run.step(0), run.step(1)
                path, older = save(run, tmp_path, 2), [core.ownership.held[core.rank] for core in run.cores]
        with OneProcessRun(layout.job, layout.plan.with_zero(1), "1f1b", graph=layout.graph) as run:
            assert all(core.ownership.held[core.rank] != older[core.rank] for core in run.cores)
            for core in run.cores:
                core.load(path)
            for step in range(2, STEPS):
                assert {r.loss for r in run.step(step)} == {want.losses[step]}
            assert all(torch.equal(copy, want.parameters[name]) for name, of in run.parameters().items() for copy in of)


@pytest.mark.parametrize("virtual", [2, 4])
def test_owners_alone_write_each_virtual_shards_slice_of_what_two_hold(virtual, tmp_path: Path):
    """A worker that owns one virtual shard's slice of a tensor, and only holds all of another one's, wrote both."""
    cell = Cell(SHALLOW, "1f1b", (3,), (1,), 4)
    one, two = (replace(cell, replicas=(n,) * n, shards=(n,) * n).plan for n in (1, 2))
    plans = {
        "never saved": [divided(one, (virtual,))] * 2,
        "held twice": [divided(cell.plan, (virtual,)).with_zero(1, 2), divided(two, (virtual // 2,) * 2).with_zero(1)],
        "held twice after": [divided(two, (virtual // 2,) * 2), divided(cell.plan, (virtual,)).with_zero(1, 2)],
    }
    ends = []
    for name, (before, after) in plans.items():
        with small_pieces(), OneProcessRun(cell.job, before, "1f1b", graph=cell.graph) as run:
            run.step(0)
            path = save(run, tmp_path / name, 1)
            checkpoint_files.verify_checkpoint(path)
        with small_pieces(), OneProcessRun(cell.job, after, "1f1b", graph=cell.graph) as run:
            for core in run.cores:
                core.load(path)
            run.step(1)
            ends.append(checkpoint_files.read_checkpoint_state(save(run, tmp_path / name, 2)))
    assert all(same_state(end, ends[0]) for end in ends[1:])


def same_state(first, second) -> bool:
    """Whether checkpoints have the same bits under the same names."""
    return first.keys() == second.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(second[name][key]))
        for name, kinds in first.items()
        for key, value in kinds.items()
    )


def test_weights_alone_are_saved_from_owners_too(tmp_path: Path):
    layout = Layout("tangled", "1f1b", (3,), 5)
    with small_pieces(), OneProcessRun(layout.job, layout.plan.with_zero(1), "1f1b", graph=layout.graph) as run:
        run.step(0)
        folder = checkpoint_files.create_checkpoint(tmp_path, 1)
        for core in run.cores:
            core.start_save(folder, only_weights=True)
        path = checkpoint_files.commit_checkpoint(folder, [core.save_result() for core in run.cores], steps_done=1, contract={})
        parameters = run.parameters()
    found = checkpoint_files.read_checkpoint_state(path, only_weights=True)
    assert all(torch.equal(kinds[checkpoint_files.PARAMETER], parameters[name][0]) for name, kinds in found.items())


PATHS = {
    "levels": [((2,), 0), ((2,), 3), ((3,), 3), ((1, 2), 1), ((2, 2), 0), ((2, 2), 3), ((1,), 1)],
    "replicas": [((3,), 1), ((2,), 1), ((4,), 1), ((1,), 1), ((5,), 1)],
    "holders": [((3,), 1, 2), ((4,), 3, 2), ((2,), 1, 2), ((3,), 3, 1), ((5,), 1, 2)],
    "stages": [((1, 1), 1), ((2, 2), 1), ((3, 1), 1), ((1, 2, 1), 1), ((2,), 1)],
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "levels" else pytest.mark.ci) for n in PATHS])
@pytest.mark.parametrize("compute", [None, pytest.param("bf16 parameters", marks=pytest.mark.ci)])
def test_plans_follow_each_other_and_only_owners_state_moves(name, compute, tmp_path: Path):
    layout = Layout("tangled", "1f1b", (1,), 5, compute=compute)
    job, want = torch_flesh.TorchJob(layout.job, layout.graph), expected("tangled", 5, 0, compute)
    with small_pieces():
        live = Generations(job)
        for done, (replicas, *level) in enumerate(PATHS[name][: STEPS - 1]):
            plan = ParallelPlan.of(replicas, layers=len(layout.graph.layers)).with_zero(*level)
            first = done % 2 if name == "stages" else 0
            live.adopt(plan, list(range(first, first + plan.world)), done)
            live.step(done)
            held = [piece for body in live.bodies.values() for piece in body.pieces()]
            assert merge_pieces(held) == merge_pieces(p for rank in job.layout(plan) for p in rank)
            assert {w: body.pieces() for w, body in live.bodies.items()} == {
                w: merge_pieces(pieces) for w, pieces in zip(live.members, job.layout(plan), strict=True)
            }
        path = live.save(tmp_path, done + 1)
        with OneProcessRun(layout.job, layout.plan, "1f1b", graph=layout.graph) as run:
            for core in run.cores:
                core.load(path)
            for step in range(done + 1, STEPS):
                run.step(step)
            parameters = run.parameters()
    assert all(torch.equal(parameters[n][0], p) for n, p in want.parameters.items())


@pytest.mark.ci
def test_shards_and_levels_change_together(tmp_path: Path):
    """The same path at level 0 and at level 1 ends in the same bits."""
    job = torch_flesh.TorchJob(Cell(SHALLOW, "1f1b", (1,), (1,), 4).job, graph(SHALLOW), shards=SHARDS)
    path = [(2, 1, 2), (2, 1, 1), (3, 1, 2), (1, 2, 2), (2, 1, 4)]
    ends = []
    for levels in ((0,) * 5, (3,) * 5, (1, 0, 3, 3, 0)):
        with small_pieces():
            live = Generations(job)
            for done, (shape, level) in enumerate(zip(path, levels, strict=True)):
                plan = mesh(SHALLOW, *shape).with_zero(level)
                live.adopt(plan, list(range(plan.world)), done)
                live.step(done)
            ends.append(live.save(tmp_path / str(len(ends)), 5))
    first, *others = (checkpoint_files.read_checkpoint_state(end) for end in ends)
    assert all(same_state(first, other) for other in others)


@pytest.mark.ci
@pytest.mark.parametrize("virtual", [2, 4])
def test_state_of_virtual_shards_that_two_hold_moves_to_other_plans_and_back(virtual, tmp_path: Path):
    cell = Cell(SHALLOW, "1f1b", (1,), (1,), 4)
    job = torch_flesh.TorchJob(cell.job, graph(SHALLOW), shards=SHARDS)
    path = [((3,), (virtual,)), ((1, 1), (virtual // 2,) * 2), ((4,), (virtual,)), ((3,), (virtual,))]
    ends = []
    for holders in (0, 1, 2):
        with small_pieces():
            live = Generations(job)
            for done, (replicas, runs) in enumerate(path):
                plan = divided(replace(cell, replicas=replicas, shards=(len(runs),) * len(replicas)).plan, runs)
                plan = plan.with_zero(1 + 2 * (done % 2), holders) if holders else plan
                first = done % 2
                live.adopt(plan, list(range(first, first + plan.world)), done)
                live.step(done)
            ends.append(checkpoint_files.read_checkpoint_state(live.save(tmp_path / str(holders), len(path))))
    assert same_state(ends[0], ends[1]) and same_state(ends[0], ends[2])
