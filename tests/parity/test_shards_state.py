"""Checkpoints of runs with shards: by name and slice, read under any other number of shards, and by one process."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import same_shards
from helpers.shard_grid import HEADS, SHALLOW, Cell, graph, held, initial, layout_for, steps_of

from raypar.job import PlanConfig
from raypar.job.contract import contract_of_job
from raypar.model.layer_skeletons import parameter_shapes
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.plan import ParallelPlan, StagePlan
from raypar.worker.checkpoint import contract_comparison
from raypar.worker.checkpoint.checkpoint_files import PARAMETER, StateKey, optimizer_key
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

BEFORE, AFTER = 2, 4
"""Steps."""


def by_key(state: dict[str, torch.Tensor]) -> dict[StateKey, torch.Tensor]:
    """An optimizer's state of a parameter, as checkpoints name it."""
    return {optimizer_key(name): value for name, value in state.items()}


def mesh(model: str, replicas: int, stages: int, shards: int) -> ParallelPlan:
    return ParallelPlan.mesh(dp=replicas, pp=stages, tp=shards, layers=len(graph(model).layers))


def trained(
    spec, plan, steps: range, root: Path, resume: Path | None = None, *, model: str = SHALLOW, schedule: str = "1f1b"
) -> Path:
    """The checkpoint after these steps."""
    with OneProcessRun(spec, plan, schedule, graph=graph(model)) as local:
        for core in local.cores if resume is not None else ():
            core.load(resume)
        for step in steps:
            local.step(step)
        return checkpoint_files.save_run(local, root, steps.stop)


@pytest.mark.parametrize(
    "before, after, sequence",
    [
        pytest.param(
            before,
            after,
            sequence,
            marks=[] if quick is sequence else pytest.mark.full,
            id="-".join(["x".join(map(str, shape)) for shape in (before, after)] + ["sequence" if sequence else "plain"]),
        )
        for before, after, quick in (
            ((1, 2, 2), (2, 1, 3), False),
            ((2, 1, 3), (1, 2, 1), None),
            ((1, 1, 1), (1, 2, 4), None),
            ((1, 1, 4), (2, 2, 2), True),
        )
        for sequence in (False, True)
    ],
)
def test_a_run_that_changes_its_shards_has_the_bits_of_a_reference_that_changes_them_at_the_same_step(
    before, after, sequence, tmp_path
):
    """replicas x stages x shards"""
    job = Cell(SHALLOW, "1f1b", (1,), (1,), 5, sequence).job
    path = trained(job, mesh(SHALLOW, *before), range(BEFORE), tmp_path)
    checkpoint_files.check_checkpoint_fits_model(checkpoint_files.verify_checkpoint(path), parameter_shapes(graph(SHALLOW)))
    last = trained(job, mesh(SHALLOW, *after), range(BEFORE, AFTER), tmp_path, path)

    like, (first, second) = initial(job, SHALLOW), (before[2], after[2])
    made = steps_of(job, range(BEFORE), first, same_shards.gpt_slices(like, HEADS, first), model=SHALLOW)
    whole = same_shards.gpt_whole(made.slices, like, HEADS)
    assert checkpoint_files.checkpoint_weights_hash(path) == weights_hash(whole)
    kinds = {
        kind: same_shards.gpt_slices(
            same_shards.gpt_whole([{n: s[kind] for n, s in mine.items()} for mine in made.state], like, HEADS), HEADS, second
        )
        for kind in ("exp_avg", "exp_avg_sq")
    }
    state = [
        {name: {"step": torch.tensor(float(BEFORE)), **{kind: kinds[kind][i][name] for kind in kinds}} for name in like}
        for i in range(second)
    ]
    end = steps_of(job, range(BEFORE, AFTER), second, same_shards.gpt_slices(whole, HEADS, second), state, model=SHALLOW)
    assert checkpoint_files.checkpoint_weights_hash(last) == weights_hash(same_shards.gpt_whole(end.slices, like, HEADS))


@pytest.mark.parametrize("grids", [(((0,), (1,)), ((0, 1),)), (((0,), (1,)), ((0, 1),), ((1, 2),))], ids=len)
def test_a_worker_reads_every_stage_as_the_shard_that_it_is_there(grids, tmp_path):
    """Worker 1 has its first stage whole, and is the second shard of the next one; of the third it is the first shard."""
    job = Cell(SHALLOW, "list", (1,), (1,), 4).job
    apart = ParallelPlan.of((1, 1), (1, 2), layers=4, cuts=[2])
    bounds = [0, *range(2, 1 + len(grids)), 4]
    shared = ParallelPlan(tuple(StagePlan(a, b, grid) for (a, b), grid in zip(pairwise(bounds), grids, strict=True)))
    plans = {"apart": apart, "shared": shared}
    half = [trained(job, plan, range(BEFORE), tmp_path / name, schedule="list") for name, plan in plans.items()]
    ends = [
        trained(job, plan, range(BEFORE, AFTER), tmp_path / f"{number}-{name}", path, schedule="list")
        for number, path in enumerate(half)
        for name, plan in plans.items()
    ]
    assert len({checkpoint_files.checkpoint_weights_hash(path) for path in half}) == 1
    assert len({checkpoint_files.checkpoint_weights_hash(path) for path in ends}) == 1


@pytest.mark.ci
@pytest.mark.parametrize("shards", [2, 4])
def test_every_plan_of_as_many_shards_writes_the_same_weights(shards, tmp_path):
    job = Cell("llama", "1f1b", (1,), (1,), 2, True).job
    hashes = set()
    for number, (replicas, stages) in enumerate([(1, 1), (2, 1), (1, 2), (2, 2)]):
        if replicas * stages * shards <= 8:
            path = trained(job, mesh("llama", replicas, stages, shards), range(2), tmp_path / str(number), model="llama")
            hashes.add(checkpoint_files.checkpoint_weights_hash(path))
    assert len(hashes) == 1


@pytest.mark.ci
def test_every_element_is_written_once_also_of_key_heads_that_shards_share(tmp_path):
    """Two key heads on four shards; tied ends; what all hold is written by one of them, in turn."""
    job = Cell("llama", "1f1b", (1,), (1,), 4).job
    with OneProcessRun(job, mesh("llama", 2, 1, 4), "1f1b", graph=graph("llama")) as local:
        local.step(0)
        path = checkpoint_files.save_run(local, tmp_path, 1)
        found = checkpoint_files.read_checkpoint_state(path)
        for (name, shards, shard), parameter, state in held(local):
            layout = layout_for("llama", shards)
            for kind, value in {PARAMETER: parameter.detach(), **by_key(state)}.items():
                whole = found[name][kind]
                assert torch.equal(shard_slice_of(layout, name, whole, shard) if value.dim() else whole, value), (name, kind)
    manifest = checkpoint_files.verify_checkpoint(path)
    sizes = {name: shape.numel() for name, shape in parameter_shapes(graph("llama")).items()}
    written = dict.fromkeys(sizes, 0)
    files = set()
    for entry in manifest.entries:
        if entry.kind == PARAMETER:
            written[entry.name] += torch.empty([b - a for a, b in entry.slice], device="meta").numel()
            if entry.name not in layout_for("llama", 4).cuts:
                files.add(entry.file)
    assert written == sizes and len(files) > 4
    assert manifest.ties == {"head.lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.ci
def test_a_run_goes_on_with_another_way_to_cut(tmp_path):
    """Styles and sequence parallelism are parts of the plan: state is by name and slice. What changes is told."""
    job = Cell(SHALLOW, "1f1b", (1,), (1,), 4).job
    path = trained(job, mesh(SHALLOW, 1, 1, 2), range(1), tmp_path / "first")
    manifest = checkpoint_files.load_manifest(path)
    assert not {"styles", "sequence_parallel"} & manifest.contract.keys()
    others = {
        "plan.styles": job.replace(plan=PlanConfig(styles={"*.up": "whole", "*.down": "whole"})),
        "plan.sequence_parallel": job.replace(plan=PlanConfig(sequence_parallel=True)),
    }
    assert not contract_comparison.list_changed_shard_settings(manifest, job)
    for number, (name, other) in enumerate(others.items()):
        assert not contract_comparison.list_contract_differences(manifest, other)
        assert contract_comparison.list_changed_shard_settings(manifest, other) == [name]
        assert contract_comparison.list_changed_shard_settings(replace(manifest, contract=contract_of_job(other)), job) == [
            name
        ]
        found = checkpoint_files.read_checkpoint_state(path)
        with OneProcessRun(other, mesh(SHALLOW, 1, 1, 3), "1f1b", graph=graph(SHALLOW)) as local:
            for core in local.cores:
                core.load(path)
            layout = local.cores[0].layout(3)
            assert ("block0.up.weight" in layout.cuts) == (name != "plan.styles")
            for (parameter, _, shard), value, state in held(local):
                for kind, own in {PARAMETER: value.detach(), **by_key(state)}.items():
                    whole = found[parameter][kind]
                    assert torch.equal(shard_slice_of(layout, parameter, whole, shard) if own.dim() else whole, own)
            local.step(1)
            checkpoint_files.save_run(local, tmp_path / str(number), 2)


@pytest.mark.ci
def test_sequence_parallelism_that_begins_in_the_middle_has_the_bits_of_a_reference_in_which_it_does(tmp_path):
    before, after = (Cell(SHALLOW, "1f1b", (1,), (2,), 5, sequence).job for sequence in (False, True))
    path = trained(before, mesh(SHALLOW, 1, 1, 2), range(BEFORE), tmp_path)
    last = trained(after, mesh(SHALLOW, 1, 2, 2), range(BEFORE, AFTER), tmp_path, path)
    like = initial(before, SHALLOW)
    made = steps_of(before, range(BEFORE), 2, same_shards.gpt_slices(like, HEADS, 2), model=SHALLOW)
    end = steps_of(after, range(BEFORE, AFTER), 2, made.slices, made.state, model=SHALLOW)
    assert checkpoint_files.checkpoint_weights_hash(last) == weights_hash(same_shards.gpt_whole(end.slices, like, HEADS))
