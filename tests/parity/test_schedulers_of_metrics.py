"""Learning rates that follow a metric of validations, as `ReduceLROnPlateau`: the bits of the plain loop, in every layout."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import checkpoint_folders as checkpoint_files
from helpers import reference, tiny_job
from helpers.generations import Generations
from helpers.optimizer_layouts import LAYERS, Points, job_of, model
from helpers.torch_flesh import TorchJob
from torch import Tensor
from torch.optim import lr_scheduler

import raypar
from raypar.errors import CheckpointError, ConfigError, UserCodeError
from raypar.job import Job, LrScheduleConfig, MetricConfig, OptimizerConfig, ValidationConfig
from raypar.job.contract import VALIDATED, contract_of_job
from raypar.job.lr_schedule_metric import FollowedMetric, values_in_checkpoint
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.make_run_request import contract_fields
from raypar.launch.resume import prepare_resumed_run
from raypar.plan import ParallelPlan
from raypar.storage.checkpoint_store import open_checkpoint
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.learning_rates import SchedulerRates, make_learning_rates

pytestmark = pytest.mark.part(5)

GROUPS = ({"match": "*.bias", "lr": 3.0}, {"match": "block0.*", "lr": 0.7})
SGD = OptimizerConfig(function=torch.optim.SGD, args={"lr": 1.0, "momentum": 0.9}, groups=GROUPS)
STEPS, EVERY = 13, 2
PLANS = {
    "one worker": ParallelPlan.mesh(layers=LAYERS),
    "2 x 2": ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS),
    "3 replicas": ParallelPlan.mesh(dp=3, layers=LAYERS),
}


def near(output: Tensor, target: Tensor) -> tuple[int, int]:
    return int(((output - target).abs() < 0.5).sum()), target.numel()


def nothing(output: Tensor, target: Tensor) -> tuple[float, int]:
    return math.nan, 1


def by_plateau(optimizer: torch.optim.Optimizer, factor: float) -> lr_scheduler.ReduceLROnPlateau:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=factor, patience=0)


class Follows:
    """A scheduler of one's own: the rates are what the metric says."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, metric: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1.0 + metric)


SCHEDULES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "loss": (lr_scheduler.ReduceLROnPlateau, {"factor": 0.5, "patience": 0}, "validation_loss"),
    "patience, cooldown, threshold": (
        "torch.optim.lr_scheduler:ReduceLROnPlateau",
        {"factor": 0.3, "patience": 1, "cooldown": 1, "threshold": 0.3, "threshold_mode": "abs"},
        "validation_loss",
    ),
    "least rates by group": (
        lr_scheduler.ReduceLROnPlateau,
        {"factor": 0.1, "patience": 0, "threshold": 1.0, "min_lr": [0.5, 0.1, 0.01]},
        "validation_loss",
    ),
    "largest values": (lr_scheduler.ReduceLROnPlateau, {"mode": "max", "patience": 0, "factor": 0.6}, "validation_near"),
    "not a number": (lr_scheduler.ReduceLROnPlateau, {"patience": 1, "factor": 0.6}, "validation_nothing"),
    "a function of the optimizer": (by_plateau, {"factor": 0.4}, "validation_loss"),
    "of one's own": (Follows, {}, "validation_loss"),
}


def following(what: str, **more: Any) -> Job:
    function, args, metric = SCHEDULES[what]
    given = {
        "steps": STEPS,
        "lr_schedule": LrScheduleConfig(function=function, args=args, metric=metric),
        "validation": ValidationConfig(function=Points, every=EVERY, samples=11),
        "metrics": {name.__name__: MetricConfig(function=name) for name in (near, nothing)},
    }
    return job_of(SGD, **{**given, **more})


def run_steps(local: OneProcessRun, steps: range) -> list[float]:
    """These steps, with the validations that they follow; the learning rates of groups that no pattern names."""
    return [local.step(step)[0].lr for step in steps]


def equal(found: dict[str, list[Tensor]], want: reference.Result) -> bool:
    return found.keys() == want.parameters.keys() and all(
        torch.equal(copy, want.parameters[name]) for name, copies in found.items() for copy in copies
    )


@pytest.mark.parametrize("what", SCHEDULES)
def test_a_scheduler_that_steps_after_validations_has_the_bits_of_the_plain_loop(what: str):
    """Rule 8, in three layouts: one scheduler on the real optimizer, which makes a step after each validation."""
    job = following(what)
    preflight(job)
    graph = make_layer_graph(job)
    want = reference.train(graph, job)
    assert len({tuple(rates) for rates in want.rates}) > 1, "the rates fall"
    for plan in PLANS.values():
        with OneProcessRun(job, plan, "1f1b", graph=graph) as local:
            rates = run_steps(local, range(STEPS))
            assert rates[1:] == [of_groups[-1] for of_groups in want.rates[:-1]]
            assert equal(local.parameters(), want)
            assert str(local.followed.values) == str(want.validated)


def test_the_rate_of_a_step_depends_on_the_validations_before_it_alone_also_when_it_runs_again():
    job = following("loss")
    with OneProcessRun(job, PLANS["one worker"], "1f1b") as local:
        rates = run_steps(local, range(STEPS))
        core = local.cores[0]
        optimizer = core.step_commit.optimizers[0, 0]
        for step in (3, 12, 0, 7, 8, 2, 11):
            assert core.learning_rates.set(optimizer, step) == rates[step], step
        assert rates[0] == 1.0 and rates[-1] == 0.25


def test_a_validation_that_finds_another_value_when_it_is_run_again_gives_the_rates_of_that_value():
    """As where the state was wrong the first time: the scheduler is run again from the first value on."""
    job = following("loss")
    with OneProcessRun(job, PLANS["one worker"], "1f1b") as local:
        core = local.cores[0]
        optimizer = core.step_commit.optimizers[0, 0]
        rates = []
        for first in (9.0, 1.0):
            core.validated.update({EVERY: first, 2 * EVERY: 5.0, 3 * EVERY: 5.0})
            rates.append([core.learning_rates.set(optimizer, step) for step in range(3 * EVERY + 1)])
        fresh = make_learning_rates(job, local.graph, core.validated)
        assert rates[1] == [fresh.set(optimizer, step) for step in range(3 * EVERY + 1)] != rates[0]


def test_a_worker_that_joins_late_and_one_that_goes_on_have_the_same_rates():
    """Worker 1 joins worker 0, which leaves; worker 2 joins as a stage. Each adopts the values of all validations so far."""
    job = following("loss")
    graph = make_layer_graph(job)
    want, run = reference.train(graph, job), Generations(TorchJob(job, graph))
    generations = {0: (PLANS["one worker"], [0]), 5: (ParallelPlan.mesh(dp=2, layers=LAYERS), [0, 1])}
    generations |= {8: (PLANS["one worker"], [1]), 11: (ParallelPlan.mesh(pp=2, layers=LAYERS), [1, 2])}
    for step in range(STEPS):
        known = {done: value for done, value in want.validated.items() if done <= step}
        if step in generations:
            run.adopt(*generations[step], step, validated=known)
        else:
            for body in run.bodies.values():
                body.core.validated.update({done: value for done, value in known.items() if done == step})
        run.step(step)
    for body in run.bodies.values():
        for stage in body.core.stages.values():
            for name, parameter in stage.parameters.items():
                assert torch.equal(parameter, want.parameters[name]), name
        body.core.close()


def saved(local: OneProcessRun, options: LaunchOptions, root: Path, done: int) -> Path:
    """A checkpoint after these steps, with what a run's driver puts beside the contract."""
    folder = checkpoint_files.create_checkpoint(root, done)
    for core in local.cores:
        core.start_save(folder)
    records = [core.save_result() for core in local.cores]
    contract = contract_fields(options)["contract"] | {VALIDATED: local.followed.as_json(done)}
    return checkpoint_files.commit_checkpoint(folder, records, steps_done=done, contract=contract)


def resumed(path: Path, job: Job) -> tuple[LaunchOptions, list[str]]:
    told: list[str] = []
    options, _ = prepare_resumed_run(
        open_checkpoint(str(path)),
        LaunchOptions(job, lambda chosen: pytest.fail("no run is made")),
        lambda checked: None,
        lambda event: told.append(event.line() or ""),
    )
    return options, told


@pytest.mark.ci
@pytest.mark.parametrize("done, validated", [(7, True), (6, True), (6, False)], ids=["between", "after", "before"])
def test_a_run_resumed_under_another_plan_goes_on_with_the_validations_of_its_checkpoint(
    done: int, validated: bool, tmp_path: Path
):
    """A checkpoint that was saved before the validation of its step has not its value: the resumed run validates first."""
    job = following("patience, cooldown, threshold")
    want = reference.train(make_layer_graph(job), job)
    options = LaunchOptions(job, lambda chosen: pytest.fail("no run is made"))
    with OneProcessRun(job, PLANS["2 x 2"], "1f1b") as local:
        run_steps(local, range(done))
        if validated and done % EVERY == 0:
            local.validate(done)
        path = saved(local, options, tmp_path, done)
    options, told = resumed(path, job)
    assert told == [f"from step_0000000{done}: {done} steps are done"]
    assert options.validates_first is not validated
    with OneProcessRun(options.job, PLANS["3 replicas"], "1f1b") as local:
        local.follow(options.validated)
        for core in local.cores:
            core.load(str(path))
        run_steps(local, range(done, STEPS))
        assert str(local.followed.values) == str(want.validated) and equal(local.parameters(), want)


def test_a_resume_may_change_what_is_followed_and_says_so(tmp_path: Path):
    job = following("loss")
    options = LaunchOptions(job, lambda chosen: pytest.fail("no run is made"))
    with OneProcessRun(job, PLANS["one worker"], "1f1b") as local:
        run_steps(local, range(5))
        path = saved(local, options, tmp_path, 5)
        known = dict(local.followed.values)
    assert contract_of_job(job)["validation"] == {
        "function": contract_of_job(job)["validation"]["function"], "args": {}, "samples": 11, "every": EVERY
    }  # fmt: skip
    more, told = resumed(path, following("loss", validation=ValidationConfig(function=Points, every=3, samples=11)))
    assert more.validated == known and told[-1].endswith("from step 6 on: validation.every 2 -> 3")
    other, told = resumed(path, following("largest values"))
    assert other.validated == {}, "the values of another metric"
    assert "lr_schedule.metric 'validation_loss' -> 'validation_near'" in told[-1] and "metrics" not in told[-1]
    none, told = resumed(path, following("loss", lr_schedule=None))
    assert none.validated == {} and not none.validates_first and "validation" not in told[-1].partition("lr_schedule")[0]


def test_only_jobs_whose_rates_follow_a_metric_have_its_measuring_in_their_contract():
    plain = contract_of_job(following("loss", lr_schedule=None))
    held = contract_of_job(following("loss"))
    near = contract_of_job(following("largest values"))
    assert not {"validation", "metrics"} & plain.keys() and held["lr_schedule"]["metric"] == "validation_loss"
    assert "metrics" not in held and list(near["metrics"]) == ["near"]
    sets = {name: ValidationConfig.of_set(ValidationConfig(function=Points, samples=n)) for name, n in (("a", 3), ("b", 5))}
    several = ValidationConfig(every=2, sets=dict(sets))
    of_all = contract_of_job(following("loss", validation=several))["validation"]
    assert set(of_all) == {"every", "sets"} and set(of_all["sets"]) == {"a", "b"}
    one = LrScheduleConfig(function=by_plateau, args={"factor": 0.5}, metric="validation/b/loss")
    assert set(contract_of_job(following("loss", validation=several, lr_schedule=one))["validation"]["sets"]) == {"b"}


def test_a_checkpoint_keeps_every_value_exactly_and_none_that_came_after_it():
    followed = FollowedMetric("validation_loss", 10)
    for done, value in ((10, 0.1 + 0.2), (20, math.nan), (30, -math.inf), (37, 1.0), (40, 1e-300)):
        followed.add(done, {"validation_loss": value})
    held = followed.as_json(39)
    assert held == {"metric": "validation_loss", "values": [[10, 0.1 + 0.2], [20, "nan"], [30, "-inf"]]}
    assert str(values_in_checkpoint(held, "validation_loss", 39)) == str({10: 0.1 + 0.2, 20: math.nan, 30: -math.inf})
    assert followed.lacks(50) and not followed.lacks(40) and not followed.lacks(37) and not followed.lacks(0)
    assert values_in_checkpoint(held, "validation_f1", 39) == values_in_checkpoint(None, "validation_loss", 39) == {}
    for wrong in ([[20, 1.0], [10, 1.0]], [[40, 1.0]], [["a", 1]], [[10, "1.0"]], [[10, None]], [[10, True]], "x", [7]):
        with pytest.raises(CheckpointError, match=r"values of .?validation_loss.? with .*39 steps\n  cure: use another"):
            values_in_checkpoint({"metric": "validation_loss", "values": wrong}, "validation_loss", 39)
    with pytest.raises(
        ConfigError, match=r"is validation_f1, which the validation after 10 steps has not measured\n  cure: it"
    ):
        FollowedMetric("validation_f1", 5).add(10, {"validation_loss": 1.0})


def test_the_example_of_the_guide_trains_with_its_metric():
    guide = (Path(__file__).parents[2] / "examples/guides/your_own_model.md").read_text()
    (text,) = [one for one in re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL) if "ReduceLROnPlateau" in one]
    given = yaml.safe_load(text)
    validation, metrics = {**given["validation"], "function": Points}, dict.fromkeys(given["metrics"], near)
    job = raypar.Trainer(
        model=model,
        loss=torch.nn.functional.mse_loss,
        data=Points,
        optimizer=(torch.optim.SGD, {"lr": 0.1}),
        batch_size=8,
        microbatches=2,
        steps=60,
        validation=validation,
        metrics=metrics,
        lr_schedule=given["lr_schedule"],
    ).job
    preflight(job)
    with OneProcessRun(job, PLANS["one worker"], "1f1b") as local:
        local.follow({50 * number: 0.5 for number in range(1, 7)})
        rates = local.cores[0].learning_rates
        assert isinstance(rates, SchedulerRates)
        found = [rates.at(50 * number)["*"]["lr"] for number in range(7)]
    assert found == [0.1] * 5 + [0.05] * 2, "the fourth value in a row that is no better"


PLATEAU = {"function": "torch.optim.lr_scheduler:ReduceLROnPlateau", "metric": "validation_loss"}
STEP = {"function": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 3}}
VALIDATION = {"function": tiny_job.data, "every": 2}
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no metric named": (
        {"lr_schedule": {"function": PLATEAU["function"]}},
        ConfigError,
        r"makes a ReduceLROnPlateau, whose step needs a metric\n  cure: .*metric: validation_loss}, and set validation.every",
    ),
    "no validation": (
        {"validation": None},
        ConfigError,
        r"lr_schedule.metric needs validation losses\n  cure: set validation and validation.every",
    ),
    "validation at the end only": ({"validation": tiny_job.data}, ConfigError, r"lr_schedule.metric needs validation losses"),
    "a metric that nobody computes": (
        {"lr_schedule": {**PLATEAU, "metric": "validation_f1"}},
        ConfigError,
        r"lr_schedule.metric names the metric 'validation_f1', which nobody computes\n  cure: it is one of .*validation_loss",
    ),
    "a number of steps": (
        {"lr_schedule": {**PLATEAU, "metric": "loss"}},
        ConfigError,
        r"lr_schedule.metric is loss, which is not measured in validations\n  cure: give validation_loss",
    ),
    "a scheduler that needs none": (
        {"lr_schedule": {**STEP, "metric": "validation_loss"}},
        ConfigError,
        r"lr_schedule.metric is validation_loss, and the step of a StepLR, .*needs none\n  cure: leave metric out",
    ),
    "a function of the step": (
        {"lr_schedule": {"function": "examples.gpt:cosine", "metric": "validation_loss"}},
        ConfigError,
        r"examples.gpt:cosine is a function of the step, which gets no metric\n  cure: leave metric out",
    ),
    "least rates of other groups": (
        {"lr_schedule": {**PLATEAU, "args": {"min_lr": [0.1, 0.2]}}},
        UserCodeError,
        r"ReduceLROnPlateau, made for .* raised ValueError: expected 1 min_lrs, got 2",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_metric_without_values_or_without_use_is_refused_before_the_run(what: str):
    more, kind, says = REFUSED[what]
    given = {"model": tiny_job.model, "loss": tiny_job.loss, "data": tiny_job.data, "batch_size": 8, "microbatches": 4}
    with pytest.raises(kind, match=says):
        preflight(raypar.Trainer(**{**given, "steps": 9, "lr_schedule": PLATEAU, "validation": VALIDATION, **more}).job)
