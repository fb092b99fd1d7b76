"""ZeRO stage 3 whose parameters come for each use, or layer by layer: the bits of one process, and two layers at most."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import shard_grid, torch_flesh, ugly_models
from helpers.generations import SHARDS, Generations, mesh
from helpers.offloaded_layouts import in_folder, offloaded_layouts, small_memory_offloaded
from helpers.parity import STEPS, Layout, layouts
from helpers.recomputed_layouts import recomputed_layouts
from helpers.shard_grid import SHALLOW, Cell, graph
from helpers.virtual_shards import divided
from helpers.zero_layouts import check_cell, check_zero, expected, small_pieces, storages

from raypar.errors import PlanError
from raypar.job import ValidationConfig
from raypar.model.layer_skeletons import make_model_outline
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.state_bytes import StateBytes
from raypar.planner.gathered_parameters import gather_traffic, gathered_bytes
from raypar.planner.model_profile import ModelProfile
from raypar.schedule import registry
from raypar.worker.backend import refuse_gathers_on_request
from raypar.worker.measure_profile import profile_layers, read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.layer_gather import LayerGather
from raypar.worker.step.step_commit import StepCommit
from raypar.worker.worker_core import WorkerCore

pytestmark = pytest.mark.part(4)

SPANS = ("layer", "microbatch")
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
RECOMPUTED = [cell for cell in recomputed_layouts() if max(cell.layout.replicas) > 1]


def some(sample, others, first):
    """(cell, span): the first of the sample in the default suite, by layer; the rest in CI, all others in the full one."""
    found = []
    for number, cell in enumerate([*sample, *(cell for cell in others if cell not in sample)]):
        for gather in SPANS:
            early = number < first and gather == "layer"
            marks = () if early else pytest.mark.ci if number < len(sample) else pytest.mark.full
            found.append(pytest.param(cell, gather, marks=marks, id=f"{cell} {gather}"))
    return found


@pytest.mark.parametrize("layout, gather", some(SAMPLE, CELLS, 3))
def test_a_layout_gives_the_bits_of_one_process(layout, gather):
    assert check_zero(layout, 3, gather=gather) or layout not in SAMPLE, "some parameter is divided"


@pytest.mark.parametrize("cell, gather", some(SHARDED_SAMPLE, SHARDED, 1))
def test_each_shard_gathers_for_itself(cell, gather):
    check_cell(cell, cell.plan.with_zero(3).with_gather(gather))


@pytest.mark.ci
@pytest.mark.parametrize("gather", SPANS)
@pytest.mark.parametrize("runs", [(4,), (2, 2), (1, 3)], ids=str)
def test_so_does_each_virtual_shard_of_a_worker(runs, gather):
    for model in (SHALLOW, "llama"):
        cell = Cell(model, "1f1b", (2,), (len(runs),), 4)
        check_cell(cell, divided(cell.plan, runs).with_zero(3).with_gather(gather))


HELD_TWICE = [Layout("tangled", "1f1b", (2, 3), 5), Layout("tangled", "1f1b", (4,), 4, compute="bf16 parameters")]


@pytest.mark.parametrize("layout, gather", some(HELD_TWICE, [cell for cell in CELLS if max(cell.replicas) > 2], 1))
def test_two_replicas_hold_each_part(layout, gather):
    check_zero(layout, 3, holders=2, gather=gather)


@pytest.mark.parametrize("cell, gather", some(RECOMPUTED[:14], RECOMPUTED, 2))
def test_layouts_that_recompute(cell, gather):
    check_zero(cell.layout, 3, cell.plan, gather=gather)


OFFLOADED = [cell for cell in offloaded_layouts() if max(cell.layout.replicas) > 1][::9]


@pytest.mark.parametrize("cell, gather", some(OFFLOADED[:4], OFFLOADED, 1))
def test_layouts_that_offload(cell, gather, tmp_path: Path):
    """Layers' activations come back from a file, and their parameters from their owners."""
    cell = in_folder(cell, tmp_path)
    facts = {name: getattr(cell.layout, name) for name in ("graph", "schedule", "model", "microbatches", "blocks", "compute")}
    with small_memory_offloaded():
        check_zero(SimpleNamespace(job=cell.job, plan=cell.plan, **facts), 3, gather=gather)


@pytest.mark.ci
@pytest.mark.parametrize("gather", SPANS)
def test_gradients_may_be_scattered_too(gather):
    for layout in (Layout("tangled", "1f1b", (2, 3), 5), Layout("tangled", "zb-v", (2, 2), 5)):
        check_zero(layout, 3, layout.plan.with_zero(3).with_gradients("scatter"), gather=gather)


@pytest.mark.ci
@pytest.mark.parametrize("gather", SPANS)
def test_replicas_with_other_shares_of_the_blocks_from_a_step_on(gather):
    check_zero(Layout("tangled", "1f1b", (3,), 8, blocks=8), 3, later=((1, 5, 2),), gather=gather)


@pytest.mark.ci
@pytest.mark.parametrize("order_seed", range(3))
def test_the_order_in_which_workers_run_does_not_matter(order_seed):
    check_zero(SAMPLE[0], 3, order_seed=order_seed, gather="layer")


@pytest.mark.ci
def test_grids_of_a_plan_gather_for_different_spans():
    layout = Layout("tangled", "1f1b", (2, 3, 2), 6)
    plan = layout.plan.with_zero((3, 3, 1)).with_gather(("layer", "microbatch", "step"))
    assert [stage.gather for stage in plan.stages] == ["layer", "microbatch", "step"]
    with small_pieces(), OneProcessRun(layout.job, plan, "1f1b", graph=layout.graph) as run:
        want = expected(layout.model, layout.microbatches, layout.blocks)
        for step in range(STEPS):
            assert {r.loss for r in run.step(step)} == {want.losses[step]}
        assert all(torch.equal(copy, want.parameters[name]) for name, copies in run.parameters().items() for copy in copies)


# -- memory ------------------------------------------------------------------------------------------------------------------


def live_parameters(core: WorkerCore) -> int:
    """Bytes of the storages of parameters and of what the worker owns of them."""
    found = []
    for index, stage in core.stages.items():
        found += [p for name, p in stage.parameters.items() if name not in stage.weights.freed_masters]
        found += [*stage.weights.rounded.values(), *(each.parameter for each in core.step_commit.owned[index])]
    return storages(tensor for tensor in found if tensor.untyped_storage().nbytes())


LIVE = [
    Layout("tangled", "1f1b", (2, 3), 6),
    Layout("tangled", "zb-v", (2, 2), 5),
    Layout("plain", "interleaved", (2, 2), 5, chunks=4),
    Layout("tangled", "1f1b", (3,), 7, compute="bf16 parameters"),
]


@pytest.mark.parametrize("layout, gather", some(LIVE, (), 1))
def test_two_layers_of_a_worker_are_there_at_most_and_none_between_steps(layout, gather, monkeypatch):
    plan, looked = layout.plan.with_zero(3).with_gather(gather), dict[int, int]()
    ask, apply = LayerGather._ask, StepCommit.apply

    def asks_and_looks(own, number):
        ask(own, number)
        core = next(core for core in run.cores if own in core.step_commit.gather.layers.values())
        gathers = core.step_commit.gather.layers.values()
        there = [gather.groups[number] for gather in gathers for number in gather._there]
        assert len(there) <= 2
        names = {name for names in there for name in names}
        room = sum(gather.memory._nbytes[name] for gather in gathers for name in names if name in gather.memory._nbytes)
        live = live_parameters(core)
        assert live <= kept[core.rank] + room
        looked[core.rank] = max(looked.get(core.rank, 0), live)

    def applies_and_looks(commit):
        assert live_parameters(next(core for core in run.cores if core.step_commit is commit)) == kept[commit.rank]
        apply(commit)

    monkeypatch.setattr(LayerGather, "_ask", asks_and_looks)
    monkeypatch.setattr(StepCommit, "apply", applies_and_looks)
    with small_pieces(), OneProcessRun(layout.job, plan, layout.schedule, graph=layout.graph) as run:
        kept = [live_parameters(core) for core in run.cores]
        for step in range(2):
            run.step(step)
            assert [live_parameters(core) for core in run.cores] == kept
        owned = [sum(e.parameter.nbytes for of in core.step_commit.owned.values() for e in of) for core in run.cores]
        assert kept == owned, "what is owned, and nothing else"
        assert all(looked[core.rank] > kept[core.rank] for core in run.cores)


def test_the_last_layer_of_a_forward_pass_stays_for_the_backward_pass_of_its_microbatch():
    """A worker with one stage asks for 2L - 2 layers a microbatch but the first: the last one and the first one stay."""
    layout = Layout("plain", "1f1b", (2,), 4)
    asked = []
    plan = layout.plan.with_zero(3).with_gather("layer")
    with small_pieces(), OneProcessRun(layout.job, plan, "1f1b", graph=layout.graph) as run:
        gather = run.cores[0].step_commit.gather.layers[0, 0]
        layers = [position for position, names in enumerate(gather.groups[:-1]) if names]
        ask = gather.requests.ask
        gather.requests.ask = lambda number: (asked.append(number), ask(number))[1]
        run.step(0)
    there_and_back = [*layers, *reversed(layers[:-1])]
    assert asked == there_and_back + there_and_back[1:]


TRAFFIC = [
    Layout("tangled", "1f1b", (2, 3), 6),
    Layout("tangled", "zb-v", (2, 2), 5),
    Layout("plain", "interleaved", (2, 2), 5, chunks=4),
    Layout("plain", "1f1b", (4,), 6),
]


@pytest.mark.parametrize("layout, gather", some(TRAFFIC, (), 1))
def test_memory_and_bytes_on_their_way_are_what_the_sheet_and_the_plan_say(layout, gather):
    """Whole parameters that are there together, when they are most; and what is sent and received in a step, to the byte."""
    plan = layout.plan.with_zero(3).with_gather(gather)
    orders = registry.build_schedule(layout.schedule, MicrobatchRouting(plan, layout.job.batching))
    measured = profile_layers(layout.job, layout.graph, read_microbatches(layout.job, layout.graph, [0]))
    state = StateBytes(make_model_outline(layout.graph), measured.state, measured.copies)
    profile = ModelProfile(measured.layers, outputs=measured.outputs, kept=measured.kept, state=state)
    with small_pieces(), OneProcessRun(layout.job, plan, layout.schedule, graph=layout.graph) as run:
        run.step(0)
        most, traffic = gathered_bytes(profile, plan, orders), gather_traffic(profile, plan, orders)
        assert [core.step_commit.gather.gathered_bytes.most for core in run.cores] == list(most)
        before = [core.transport.ledger.as_dict()["gather"] for core in run.cores]
        run.step(1)
        after = [core.transport.ledger.as_dict()["gather"] for core in run.cores]
    for way, predicted in (("sent", [one.sent for one in traffic]), ("received", [one.received for one in traffic])):
        assert [now[way] - was[way] for now, was in zip(after, before, strict=True)] == predicted


# -- validation --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gather", SPANS)
def test_validations_between_steps_gather_for_themselves(gather):
    job = ugly_models.job("tangled", microbatches=4)
    job = job.replace(validation=ValidationConfig(function=job.data.function, args=job.data.args, every=1))
    made, found = Layout("tangled", "1f1b", (1,), 4).graph, []
    one = ParallelPlan.mesh(layers=len(made.layers))
    for plan in (one, ParallelPlan.of((2, 3), layers=len(made.layers)).with_zero(3).with_gather(gather)):
        with small_pieces(), OneProcessRun(job, plan, "1f1b", graph=made) as run:
            losses = [run.validate(0)]
            for step in range(2):
                run.step(step)
                losses.append(run.validate(step + 1))
            found.append((losses, {name: copies[0].clone() for name, copies in run.parameters().items()}))
    (losses, parameters), (same_losses, same_parameters) = found
    assert losses == same_losses and all(torch.equal(value, same_parameters[name]) for name, value in parameters.items())


# -- checkpoints and changes of the plan -------------------------------------------------------------------------------------

PLANS = [
    ((3,), 3, 1, "layer"),
    ((2, 2), 3, 1, "microbatch"),
    ((1, 3), 1, 1, "step"),
    ((4,), 3, 2, "layer"),
    ((1,), 0, 1, "step"),
]
PAIRS = [(before, after) for before in PLANS for after in PLANS if {before[3], after[3]} != {"step"}]


def plan_of(replicas, level, holders, gather, layers):
    return ParallelPlan.of(replicas, layers=layers).with_zero(level, holders).with_gather(gather)


@pytest.mark.parametrize(
    "before, after",
    [pytest.param(*pair, marks=() if i in (2, 10) else pytest.mark.ci) for i, pair in enumerate(PAIRS)],
    ids=str,
)
@pytest.mark.parametrize("compute", [None, pytest.param("bf16 parameters", marks=pytest.mark.ci)])
def test_a_checkpoint_resumes_under_any_other_span(before, after, compute, tmp_path: Path):
    layout = Layout("tangled", "1f1b", (1,), 5, compute=compute)
    layers, want = len(layout.graph.layers), expected("tangled", 5, 0, compute)
    with small_pieces():
        with OneProcessRun(layout.job, plan_of(*before, layers), "1f1b", graph=layout.graph) as run:
            run.step(0), run.step(1)
            path = checkpoint_files.save_run(run, tmp_path, 2)
        checkpoint_files.verify_checkpoint(path)
        with OneProcessRun(layout.job, plan_of(*after, layers), "1f1b", graph=layout.graph) as run:
            for core in run.cores:
                core.load(path)
            for step in range(2, STEPS):
                assert {r.loss for r in run.step(step)} == {want.losses[step]}
            last = checkpoint_files.save_run(run, tmp_path, STEPS)
    found = checkpoint_files.read_checkpoint_state(last)
    for name, kinds in found.items():
        assert torch.equal(kinds[checkpoint_files.PARAMETER], want.parameters[name]), name
        for key, value in want.state.get(name, {}).items():
            assert torch.equal(kinds[checkpoint_files.optimizer_key(key)], torch.as_tensor(value)), (name, key)


PATHS = {
    "spans": [((2,), 3, 1, "layer"), ((3,), 3, 1, "microbatch"), ((2, 2), 3, 1, "layer"), ((2,), 0, 1, "step")],
    "holders": [((3,), 3, 2, "layer"), ((4,), 3, 1, "step"), ((2, 3), 3, 2, "microbatch"), ((3,), 3, 1, "layer")],
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "spans" else pytest.mark.ci) for n in PATHS])
@pytest.mark.parametrize("compute", [None, pytest.param("bf16 parameters", marks=pytest.mark.ci)])
def test_plans_follow_each_other(name, compute, tmp_path: Path):
    layout = Layout("tangled", "1f1b", (1,), 5, compute=compute)
    job, want = torch_flesh.TorchJob(layout.job, layout.graph), expected("tangled", 5, 0, compute)
    with small_pieces():
        live = Generations(job)
        for done, way in enumerate(PATHS[name][: STEPS - 1]):
            plan = plan_of(*way, len(layout.graph.layers))
            live.adopt(plan, list(range(done % 2, done % 2 + plan.world)), done)
            live.step(done)
        path = live.save(tmp_path, done + 1)
        with OneProcessRun(layout.job, layout.plan, "1f1b", graph=layout.graph) as run:
            for core in run.cores:
                core.load(path)
            for step in range(done + 1, STEPS):
                run.step(step)
            parameters = run.parameters()
    assert all(torch.equal(parameters[n][0], p) for n, p in want.parameters.items())


@pytest.mark.ci
def test_shards_and_spans_change_together(tmp_path: Path):
    job = torch_flesh.TorchJob(Cell(SHALLOW, "1f1b", (1,), (1,), 4).job, graph(SHALLOW), shards=SHARDS)
    path = [(2, 1, 2), (2, 1, 1), (3, 1, 2), (1, 2, 2), (2, 1, 4)]
    ends = []
    for levels in ((0,) * 5, (3,) * 5):
        with small_pieces():
            live = Generations(job)
            for done, (shape, level) in enumerate(zip(path, levels, strict=True)):
                plan = mesh(SHALLOW, *shape).with_zero(level).with_gather(SPANS[done % 2])
                live.adopt(plan, list(range(plan.world)), done)
                live.step(done)
            ends.append(checkpoint_files.read_checkpoint_state(live.save(tmp_path / str(len(ends)), 5)))
    first, other = ends
    assert first.keys() == other.keys()
    for name, kinds in first.items():
        assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(other[name][key])) for key, value in kinds.items()), name


def test_a_plan_without_a_second_replica_gathers_nothing():
    layout = Layout("plain", "1f1b", (1, 1), 4)
    plan = replace(layout.plan, stages=tuple(replace(stage, zero=3, gather="layer") for stage in layout.plan.stages))
    check_zero(layout, 3, plan, gather="layer")


@pytest.mark.parametrize("gather", SPANS)
def test_gpus_refuse_to_gather_on_request(gather):
    plan = ParallelPlan.mesh(dp=2, layers=2).with_zero(3)
    refuse_gathers_on_request(plan)
    with pytest.raises(PlanError, match=f"plan.gather: {gather} .stage 0. does not work on GPUs yet") as error:
        refuse_gathers_on_request(plan.with_gather(gather))
    assert "plan.gather: step" in error.value.cure
