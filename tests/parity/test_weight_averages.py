"""`average`: a moving average of the weights, with the bits of one process under every plan, saved, and through faults."""

import argparse
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import optimizers, reference
from helpers.optimizer_layouts import LAYERS, Points, job_of
from helpers.protocol import Change, World
from helpers.torch_flesh import TorchFlesh, TorchJob
from helpers.zero_layouts import small_pieces
from torch import Tensor

from raypar.commands import export as export_command
from raypar.errors import CheckpointError, ConfigError
from raypar.job import AverageConfig, LossConfig, LrScheduleConfig, OptimizerConfig, ValidationConfig
from raypar.job.contract import contract_of_job
from raypar.job.read_job import parse_job
from raypar.plan import ParallelPlan
from raypar.storage.checkpoint_store import open_checkpoint
from raypar.worker.checkpoint.checkpoint_files import CheckpointTensors, load_manifest, read_checkpoint_state
from raypar.worker.checkpoint.state_key import AVERAGE, PARAMETER
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.optimizer_state import read_optimizer_state

SPEC = AverageConfig(decay=0.8, every=2, from_step=2)
ADAMW = OptimizerConfig(function="torch.optim:AdamW", args={"lr": 0.01})
ONE = ParallelPlan.mesh(layers=LAYERS)
PLANS = {
    "one": ONE,
    "2 stages x 2 replicas": ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS),
    "3 stages": ParallelPlan.mesh(pp=3, layers=LAYERS),
    "2 stages x 2 replicas that divide state": ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS).with_zero(3),
}


@pytest.fixture(autouse=True, scope="module")
def small_runs():
    """Owners have runs of these small parameters, too."""
    with small_pieces():
        yield


def of_plain_loop(job, steps: int) -> dict[str, Tensor]:
    """The averages that a plain loop over the reference's weights makes."""
    averages: dict[str, Tensor] = {}
    for done in range(1, steps + 1):
        weights = reference.train(make_layer_graph(job), job.replace(steps=done)).parameters
        for name, value in weights.items() if done >= job.average.from_step else ():
            if name not in averages:
                averages[name] = value.clone()
            elif (done - job.average.from_step) % job.average.every == 0:
                averages[name].lerp_(value, 1 - job.average.decay)
    return averages


def averages_of(run: OneProcessRun) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for core in run.cores:
        for optimizer in core.step_commit.optimizers.values():
            for name, value in read_optimizer_state(optimizer).averages.items():
                found.setdefault(name, []).append(value)
    return found


def job(optimizer=ADAMW, **changes):
    return job_of(optimizer, **{"average": SPEC, **changes})


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return of_plain_loop(job(), 6)


@pytest.mark.parametrize("plan", PLANS)
def test_every_holder_has_the_averages_of_a_plain_loop(plan: str, plain: dict[str, Tensor]):
    with OneProcessRun(job(), PLANS[plan], "1f1b") as run:
        run.step(0)
        assert averages_of(run) == {}, "it begins after from_step"
        for step in range(1, 6):
            run.step(step)
        found = averages_of(run)
    assert {name.partition("[")[0] for name in found} == plain.keys()
    if "divide" in plan:
        assert any("[" in name for name in found), "owners have runs"
    assert all(torch.equal(copy, plain_run(plain, name)) for name, copies in found.items() for copy in copies)


def plain_run(plain: dict[str, Tensor], key: str) -> Tensor:
    """What goes under a key: a parameter's average, or that of a run of its elements."""
    name, _, run = key.partition("[")
    start, _, stop = run.removesuffix("]").partition(":")
    return plain[name].reshape(-1)[int(start) : int(stop)] if run else plain[name]


def test_the_weights_are_those_without_an_average():
    with OneProcessRun(job(), PLANS["2 stages x 2 replicas"], "1f1b") as run:
        rates = [{report.lr for report in run.step(step)} for step in range(6)]
        found = run.parameters()
    want = reference.train(make_layer_graph(job()), job())
    assert all(torch.equal(copy, want.parameters[name]) for name, copies in found.items() for copy in copies)
    assert rates == [{0.01 * ((step + 1) / 6)} for step in range(6)]


def saved(spec, plan: ParallelPlan, folder: Path, steps: int) -> Path:
    with OneProcessRun(spec, plan, "1f1b") as run:
        for step in range(steps):
            run.step(step)
        return checkpoint_files.save_run(run, folder, steps)


@pytest.mark.parametrize("plan", ["2 stages x 2 replicas", "2 stages x 2 replicas that divide state"])
def test_a_run_that_is_resumed_under_another_plan_goes_on_with_its_averages(plan, tmp_path: Path, plain: dict[str, Tensor]):
    path = saved(job(), PLANS[plan], tmp_path, 3)
    for goes_on in ("3 stages", "2 stages x 2 replicas that divide state"):
        with OneProcessRun(job(), PLANS[goes_on], "1f1b") as run:
            for core in run.cores:
                core.load(path)
            for step in range(3, 6):
                run.step(step)
            found = averages_of(run)
        assert all(torch.equal(copy, plain_run(plain, name)) for name, copies in found.items() for copy in copies)


def test_a_checkpoint_read_as_its_averages_has_these_in_the_place_of_weights(tmp_path: Path, plain: dict[str, Tensor]):
    path = saved(job(), PLANS["2 stages x 2 replicas"], tmp_path, 6)
    of_averages = open_checkpoint(f"{path}@average")
    assert of_averages.averages and str(of_averages).endswith("@average")
    found = CheckpointTensors(of_averages)
    assert {name: found[name].tolist() for name in found} == {name: value.tolist() for name, value in plain.items()}
    state = read_checkpoint_state(of_averages, only_weights=True)
    assert all(torch.equal(next(iter(of.values())), plain[name]) for name, of in state.items())
    weights = read_checkpoint_state(path)
    assert all(torch.equal(of[AVERAGE], plain[name]) for name, of in weights.items())
    out = tmp_path / "averages.safetensors"
    parser = argparse.ArgumentParser()
    export_command.add_arguments(parser)
    assert export_command.run(parser.parse_args([str(path), "--out", str(out), "--average"])) == 0
    assert torch.equal(checkpoint_files_tensors(out)["head.weight"], plain["head.weight"])


def checkpoint_files_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize(
    ("average", "said"), [(None, "without the key `average`"), (AverageConfig(from_step=9), "average.from_step is not reached")]
)
def test_an_export_of_averages_that_are_not_there_is_one_error_that_names_the_key(average, said: str, tmp_path: Path):
    path = saved(job().replace(average=average), ONE, tmp_path, 1)
    parser = argparse.ArgumentParser()
    export_command.add_arguments(parser)
    with pytest.raises(CheckpointError) as found:
        export_command.run(parser.parse_args([str(path), "--out", str(tmp_path / "a.pt"), "--average"]))
    assert said in found.value.what and f"checkpoint {path} has no averages" in found.value.what
    assert "weights, without the average" in found.value.cure and not (tmp_path / "a.pt").exists()


@pytest.mark.ci
def test_on_shards_each_has_the_averages_of_its_slices(tmp_path: Path):
    plan, averages = ParallelPlan.mesh(tp=2, layers=LAYERS), dict[str, Tensor]()
    for done in range(1, 7):
        path = saved(job(), plan, tmp_path / str(done), done)
        state = read_checkpoint_state(path)
        for name, of in state.items() if done >= SPEC.from_step else ():
            if name not in averages:
                averages[name] = of[PARAMETER].clone()
            elif (done - SPEC.from_step) % SPEC.every == 0:
                averages[name].lerp_(of[PARAMETER], 1 - SPEC.decay)
    assert all(torch.equal(of[AVERAGE], averages[name]) for name, of in state.items())
    with OneProcessRun(job(), ONE, "1f1b") as run:
        run.cores[0].load(path)
        assert all(torch.equal(copies[0], averages[name]) for name, copies in averages_of(run).items())


def test_a_checkpoint_without_averages_says_so(tmp_path: Path):
    path = saved(job(average=None), ONE, tmp_path, 1)
    assert not any(entry.kind == AVERAGE for entry in load_manifest(path).entries)
    with pytest.raises(CheckpointError, match="has no averages of the weights"):
        CheckpointTensors(open_checkpoint(f"{path}@average"))


VALIDATED = ValidationConfig(function=Points, every=1)


@pytest.mark.parametrize("precision", [None, {"parameters": "bf16", "master": "float32"}])
def test_validations_may_compute_with_the_averages_and_training_goes_on_with_the_weights(precision, tmp_path: Path):
    given = {"validation": VALIDATED} | ({"precision": precision} if precision else {})
    with_averages = job(average=SPEC.replace(validate_with="average"), **given)
    with OneProcessRun(job(**given), ONE, "1f1b") as run:
        of_weights = []
        for step in range(6):
            run.step(step)
            of_weights.append(run.validate(step + 1))
        weights = {name: copies[0].clone() for name, copies in run.parameters().items()}
    losses = {}
    plans = {name: PLANS[name] for name in ("one", "2 stages x 2 replicas", "2 stages x 2 replicas that divide state")}
    for span in ("microbatch", "layer"):
        plans[f"replicas that divide parameters, by {span}"] = PLANS["2 stages x 2 replicas"].with_zero(3).with_gather(span)
    for plan, found in plans.items():
        with OneProcessRun(with_averages, found, "1f1b") as run:
            losses[plan] = []
            for step in range(6):
                run.step(step)
                losses[plan].append(run.validate(step + 1))
            found = run.parameters()
        if not (precision and "divide" in plan):  # where owners alone have masters
            assert all(torch.equal(copy, weights[name]) for name, copies in found.items() for copy in copies), plan
    assert all(of_plan == losses["one"] for of_plan in losses.values())
    assert losses["one"][:2] == of_weights[:2] and losses["one"][3] != of_weights[3]
    path = saved(with_averages, ONE, tmp_path, 6)
    with OneProcessRun(job(**given), ONE, "1f1b") as run:
        run.cores[0].load(open_checkpoint(f"{path}@average"), only_weights=True)
        assert run.validate(6) == losses["one"][-1]


def test_a_skipped_step_is_no_update():
    skips = job(
        loss=LossConfig(function=optimizers.no_number), non_finite="skip", average=AverageConfig(decay=0.5, from_step=0)
    )
    with OneProcessRun(skips, ONE, "1f1b") as run:
        for step in range(3):
            run.step(step)
        assert averages_of(run) == {}


HISTORIES = {
    "a replica dies": ("2 stages x 2 replicas", 0, Change(4, 0.0, "kill")),
    "an owner dies": ("2 stages x 2 replicas that divide state", 1, Change(4, 0.0, "kill")),
    "a worker joins": ("3 stages", 0, Change(4, 0.0, "join")),
    "the only copy of a stage dies": ("3 stages", 1, Change(4, 0.0, "kill")),
}


def final_hash(plan: ParallelPlan, mirror_every: int = 0, *changes: Change) -> int:
    spec = job(
        OptimizerConfig(function=optimizers.CountsInGroup),
        steps=8,
        average=AverageConfig(decay=0.8, from_step=2, validate_with="average"),
        validation=VALIDATED,
        lr_schedule=LrScheduleConfig(function=optimizers.zero_at_first),
    )
    made = TorchJob(spec, make_layer_graph(spec), mirror_every=mirror_every)
    world = World(made, plan, changes=changes, flesh=TorchFlesh, tick_ms=5.0, max_workers=8, grow_after_s=0.0)
    try:
        world.run()
        assert world.over is not None and world.over.end == "done", world.tell(str(world.over))
        assert any(AVERAGE in kept for body in world.flesh.bodies for kept in body._stages_state().values())
        return world.final_hash()
    finally:
        world.flesh.close()


@pytest.mark.parametrize(
    "history", [*list(HISTORIES)[:2], *(pytest.param(one, marks=pytest.mark.ci) for one in list(HISTORIES)[2:])]
)
def test_averages_come_through_recovery(history: str):
    plan, mirror_every, change = HISTORIES[history]
    assert final_hash(PLANS[plan], mirror_every, change) == final_hash(ONE)


BASE = """
name: averages
steps: 2
batch_size: 4
microbatches: 2
model: helpers.optimizer_layouts:model
loss: torch.nn.functional:mse_loss
data: helpers.optimizer_layouts:Points
average: {decay: 0.999, every: 1, from: 100}
"""


def test_from_may_be_written_for_from_step():
    made = parse_job(BASE)
    assert made.average == AverageConfig(decay=0.999, every=1, from_step=100)
    assert contract_of_job(made)["average"] == {"from_step": 100}


def test_both_names_of_the_first_step_are_one_error():
    with pytest.raises(ConfigError, match="average has from: 100 and from_step: 3, which is the same"):
        parse_job(BASE, ["average.from_step=3"])


@pytest.mark.parametrize(
    "override", ["average.decay=1", "average.decay=0", "average.every=0", "average.from=-1", "average.dekay=1"]
)
def test_wrong_values_are_refused(override: str):
    with pytest.raises(ConfigError, match="average"):
        parse_job(BASE.replace(", from: 100", ""), [f"average.{override}"])


def test_names_of_other_frameworks_are_answered_with_ours():
    with pytest.raises(ConfigError, match="unknown key ema") as found:
        parse_job(BASE + "ema: 0.999\n")
    assert "`average`" in str(found.value)
