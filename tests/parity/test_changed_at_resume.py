"""A run that is resumed with other values of keys that decide bits: as one process that makes the same change at that step."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import reference, stream_cases, ugly_models

from raypar.errors import CheckpointError
from raypar.job import DataConfig, FunctionConfig, Job, LrScheduleConfig, OptimizerConfig, WeightsConfig
from raypar.job.contract import CHANGES, SAMPLES, contract_of_job
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.make_run_request import contract_fields
from raypar.launch.resume import prepare_resumed_run
from raypar.plan import ParallelPlan
from raypar.storage.checkpoint_store import open_checkpoint
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

STEPS, LAYERS = 6, 9
PLANS = [
    ParallelPlan.mesh(layers=LAYERS),
    ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS),
    ParallelPlan.mesh(pp=3, layers=LAYERS),
    ParallelPlan.mesh(dp=3, layers=LAYERS),
]
SPEC = ugly_models.job("tangled", steps=STEPS)
SHORT = SPEC.replace(steps=3)
ADAMW = SPEC.optimizer


def adamw(lr: float = 1e-2, decay: float = 0.1, of_group: float = 0.0, **more: Any) -> OptimizerConfig:
    (group,) = ADAMW.groups
    return ADAMW.replace(args={"lr": lr, "weight_decay": decay, **more}, groups=({**group, "weight_decay": of_group},))


def cosine(step: int) -> float:
    return 1 / (1 + step)


def backwards(dataset: Sized, epoch: int) -> list[int]:
    return [epoch, *range(len(dataset) - 1, 0, -1), *torch.randperm(len(dataset)).tolist()]


def rising(dataset: Sized) -> list[int]:
    return [1 + index % 5 for index in range(len(dataset))]


def masked(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = map(torch.stack, zip(*samples, strict=True))
    return torch.where(torch.rand(x.shape) < 0.2, 1, x), y


def resumed(path: Path, spec: Job) -> tuple[LaunchOptions, list[str]]:
    """The options of a run that goes on from a checkpoint, all checks before the run made; and what was told."""
    told: list[str] = []
    options = LaunchOptions(spec, lambda chosen: pytest.fail("no run is made"))
    options, choose = prepare_resumed_run(
        open_checkpoint(str(path)), options, lambda checked: None, lambda event: told.append(event.line() or "")
    )
    choose(preflight(options.job))
    return options, told


def train(
    options: LaunchOptions, plan: ParallelPlan, steps: Sequence[int], root: Path, **beside: int
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Runs these steps; returns a checkpoint with the contract of the run and what is `beside` it, and the parameters."""
    with OneProcessRun(options.job, plan, "1f1b") as local:
        for core in local.cores if options.resume is not None else ():
            core.load(str(options.resume))
        for step in steps:
            local.step(step)
        found = {name: copies[0].clone() for name, copies in local.parameters().items()}
        folder = checkpoint_files.create_checkpoint(root, steps[-1] + 1)
        for core in local.cores:
            core.start_save(folder)
        records = [core.save_result() for core in local.cores]
    contract = contract_fields(options)["contract"] | beside
    return checkpoint_files.commit_checkpoint(folder, records, steps_done=steps[-1] + 1, contract=contract), found


def chain(jobs: dict[int, Job], plans: Sequence[ParallelPlan], root: Path) -> tuple[list[list[str]], Path]:
    """Trains the jobs one after the other, each from its step on, and compares the weights with one process."""
    first, *_ = jobs.values()
    starts, path, said = [*jobs, first.steps], None, []
    for place, (start, spec) in enumerate(jobs.items()):
        options = LaunchOptions(spec, lambda chosen: pytest.fail("no run is made"))
        if path is not None:
            options, told = resumed(path, spec)
            assert not any("values" in line for line in contract_fields(options)["warnings"]), "it has been said"
            said.append(told)
        path, found = train(options, plans[place % len(plans)], range(start, starts[place + 1]), root)
    want = reference.train(make_layer_graph(first), first, jobs)
    assert found.keys() == want.parameters.keys()
    for name, value in want.parameters.items():
        assert torch.equal(found[name], value), name
    assert path is not None
    return said, path


CHANGES_OF_A_JOB: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate": ({"optimizer": adamw(lr=5e-3)}, "optimizer.args.lr 0.01 -> 0.005"),
    "weight decay": ({"optimizer": adamw(decay=0.3)}, "optimizer.args.weight_decay 0.1 -> 0.3"),
    "weight decay of a group": ({"optimizer": adamw(of_group=0.2)}, "optimizer.groups.0.weight_decay 0.0 -> 0.2"),
    "another option": ({"optimizer": adamw(eps=1e-3)}, "optimizer.args.eps none -> 0.001"),
    "schedule": ({"lr_schedule": LrScheduleConfig(function=cosine)}, "lr_schedule.function '"),
    "no schedule": ({"lr_schedule": None}, "lr_schedule {"),
    "clipping": ({"clip_norm": 0.1}, "clip_norm 0.5 -> 0.1"),
    "no clipping": ({"clip_norm": None}, "clip_norm 0.5 -> none"),
    "batch size": ({"batch_size": 17}, "batch_size 11 -> 17"),
    "microbatches": ({"microbatches": 3}, "microbatches 4 -> 3"),
    "blocks": ({"virtual_replicas": 1}, "virtual_replicas 4 -> 1"),
    "batch size and microbatches": ({"batch_size": 9, "microbatches": 2}, "batch_size 11 -> 9; microbatches 4 -> 2"),
    "data": ({"data": DataConfig(function=ugly_models.Tokens, args={"size": 19})}, "data.args.size none -> 19"),
    "order": ({"data": SPEC.data.replace(shuffle=False)}, "data.shuffle none -> False"),
    "indexed order": ({"data": SPEC.data.replace(shuffle="indexed")}, "data.shuffle none -> 'indexed'"),
    "whole batches": ({"data": SPEC.data.replace(drop_last=True)}, "data.drop_last none -> True"),
    "sampler": ({"data": SPEC.data.replace(sampler=FunctionConfig(function=backwards))}, "data.sampler none -> {"),
    "weights": ({"data": SPEC.data.replace(weights=WeightsConfig(function=rising))}, "data.weights none -> {"),
    "lengths": ({"data": SPEC.data.replace(group_by=FunctionConfig(function=rising))}, "data.group_by none -> {"),
    "collation": ({"data": SPEC.data.replace(collate=FunctionConfig(function=masked))}, "data.collate none -> {"),
}


@pytest.fixture(scope="module")
def unchanged() -> str:
    return weights_hash(reference.train(make_layer_graph(SHORT), SHORT).parameters)


SECOND_OF_A_KIND = {
    "weight decay", "another option", "no schedule", "no clipping", "microbatches", "blocks", "order", "whole batches",
    "lengths",
}  # fmt: skip
"""Changes that go through the same code as one before them: in the long suite."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(*change, id=name, marks=[pytest.mark.full] * (name in SECOND_OF_A_KIND))
        for name, change in CHANGES_OF_A_JOB.items()
    ],
)
def test_a_change_at_a_resume_gives_the_bits_of_one_process_that_makes_it_at_that_step(
    change, words, unchanged: str, tmp_path: Path
):
    (told,), path = chain({0: SHORT, 1: SHORT.replace(**change)}, PLANS[:2], tmp_path)
    assert f"; from step 2 on: {words}" in told[-1]
    assert sum("from step 2 on" in line for line in told) == 1
    assert checkpoint_files.checkpoint_weights_hash(path) != unchanged, "without the change the bits are others"


@pytest.mark.ci
@pytest.mark.parametrize("first", [1, *(pytest.param(first, marks=pytest.mark.full) for first in (0, 2, 3))])
def test_several_changes_under_several_plans(first: int, tmp_path: Path):
    bigger = SPEC.replace(batch_size=17, microbatches=5)
    jobs = {
        0: SPEC,
        2: bigger.replace(optimizer=adamw(lr=5e-3)),
        3: bigger.replace(optimizer=adamw(lr=5e-3), clip_norm=None),
        5: SPEC.replace(optimizer=adamw(lr=5e-3, decay=0.0)),
    }
    said, path = chain(jobs, PLANS[first:] + PLANS[:first], tmp_path)
    assert [line.partition(" on: ")[0].rpartition("; ")[2] for (*_, line) in said] == [
        "from step 3",
        "from step 4",
        "from step 6",
    ]
    history = checkpoint_files.load_manifest(path).contract[CHANGES]
    assert [(entry["steps_done"], sorted(entry["was"])) for entry in history] == [
        (2, ["batch_size", "microbatches", "optimizer", "virtual_replicas"]),
        (3, ["clip_norm"]),
        (5, ["batch_size", "clip_norm", "microbatches", "optimizer", "virtual_replicas"]),
    ]


@pytest.mark.ci
def test_a_second_resume_says_nothing_and_reads_on_after_the_samples_that_were_read(tmp_path: Path):
    bigger = SPEC.replace(batch_size=17)
    said, path = chain({0: SPEC, 2: bigger, 4: bigger}, PLANS, tmp_path)
    assert "from step 3 on: batch_size 11 -> 17" in said[0][-1] and " on: " not in " ".join(said[1])
    options, _ = resumed(path, bigger.replace(steps=10))
    assert options.job.batching.samples_before(6) == 2 * 11 + 4 * 17 and options.changes.lines == ()


@pytest.mark.ci
@pytest.mark.parametrize("batches", [{"batch_size": 13}, {"batch_size": 10, "microbatches": 6}, {"microbatches": 3}])
def test_streams_go_on_after_their_last_samples(batches: dict[str, int], tmp_path: Path):
    made = ugly_models.job("plain", microbatches=4, steps=STEPS).replace(
        data=DataConfig(function=stream_cases.Divided, streams=3, shuffle_window=4)
    )
    spec = resolve_streams(made).job
    plans = [ParallelPlan.mesh(pp=2, dp=2, layers=8), ParallelPlan.mesh(dp=3, layers=8)]
    chain({0: spec, 2: spec.replace(**batches), 4: spec}, plans, tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint of a job after two steps, with this beside its contract; each is made once."""
    made: dict[str, Path] = {}

    def make(spec: Job = SPEC, **beside: int) -> Path:
        key = f"{spec!r} {beside}"
        if key not in made:
            options = LaunchOptions(spec, lambda chosen: pytest.fail("no run is made"))
            plan = ParallelPlan.mesh(layers=len(make_layer_graph(spec).layers))
            made[key], _ = train(options, plan, range(2), tmp_path_factory.mktemp("saved"), **beside)
        return made[key]

    return make


def test_a_job_without_changes_has_the_contract_that_it_had(saved: Callable[..., Path]):
    path = saved()
    options, _ = resumed(path, SPEC)
    assert contract_fields(options)["contract"].keys() - contract_of_job(SPEC).keys() == {"code"}
    assert options.job == SPEC and options.job.batching == SPEC.batching


SGD = OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.1})
REFUSED: dict[str, tuple[Job, dict[str, Any], str]] = {
    "seed": (
        SPEC,
        {"seed": 12, "clip_norm": 0.1},
        r"another job: seed was 11, is 12\n.*may change; and batch_size, microbatches",
    ),
    "class": (SPEC, {"optimizer": SGD}, r"optimizer.function 'torch.optim:AdamW' -> 'torch.optim:SGD'"),
    "pattern": (
        SPEC,
        {"optimizer": ADAMW.replace(groups=({"match": "*.bias", "weight_decay": 0.0},))},
        r"optimizer.groups.0.match '\*norm\*' -> '\*.bias'",
    ),
    "number of groups": (SPEC, {"optimizer": ADAMW.replace(groups=())}, r"another job: optimizer.groups \["),
    "more state": (
        SPEC,
        {"optimizer": adamw(amsgrad=True)},
        r"has 'exp_avg', 'exp_avg_sq', 'step' of each parameter .* it keeps 'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'step'",
    ),
    "momentum where there was none": (
        SPEC.replace(optimizer=SGD),
        {"optimizer": SGD.replace(args={"lr": 0.1, "momentum": 0.9})},
        r"with the changed options it keeps 'momentum_buffer' \(from step 3 on: optimizer.args.momentum none -> 0.9\)",
    ),
    "batch size with drop_last": (
        SPEC.replace(data=SPEC.data.replace(drop_last=True)),
        {"batch_size": 13},
        r"steps of 11 and of 13 samples, and with data.drop_last the length of an epoch depends on it\n  cure: resume with",
    ),
    "batch size with epochs": (SPEC, {"batch_size": 13, "epochs": 3.0}, r"with epochs the number of steps depends on it"),
}


@pytest.mark.parametrize(("spec", "change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_may_not_change_is_refused_by_its_name(spec: Job, change: dict[str, Any], words: str, saved: Callable[..., Path]):
    with pytest.raises(CheckpointError, match=words):
        resumed(saved(spec), spec.replace(**change))


def test_another_number_of_samples_of_the_same_data_set_is_refused(saved: Callable[..., Path]):
    path = saved(**{SAMPLES: 36})
    with pytest.raises(CheckpointError, match="was trained on 36 samples, and data gives 37: the order in which samples are"):
        resumed(path, SPEC)


def test_streams_in_the_place_of_a_map_style_data_set_are_refused(saved: Callable[..., Path]):
    spec = ugly_models.job("plain", steps=STEPS)
    with pytest.raises(CheckpointError, match=r"was trained on a map-style data set, and data is iterable"):
        resumed(saved(spec), spec.replace(data=DataConfig(function=stream_cases.Divided)))


@pytest.mark.parametrize(
    "history",
    ["x", [1], [{"steps_done": 9, "was": {}}], [{"steps_done": 1}], [{"steps_done": 1, "was": {"batch_size": 2**60}}]],
    ids=str,
)
def test_a_history_that_no_run_writes_is_refused(history: Any, saved: Callable[..., Path], tmp_path: Path):
    manifest = checkpoint_files.load_manifest(saved())
    other = checkpoint_files.create_checkpoint(tmp_path / "other", 2)
    contract = {**manifest.contract, CHANGES: history}
    with pytest.raises(CheckpointError, match="a history of changes with"):
        resumed(checkpoint_files.commit_checkpoint(other, [], steps_done=2, contract=contract), SPEC)
