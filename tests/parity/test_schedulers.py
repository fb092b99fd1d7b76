"""Schedulers of learning rates, of torch and transformers, stepped after the optimizer: the bits of the plain loop."""

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_job
from helpers.optimizer_layouts import LAYERS, LAYOUTS, STEPS, job_of
from torch.optim import lr_scheduler

import raypar
from raypar.errors import ConfigError, UserCodeError
from raypar.job import FunctionConfig, Job, LrScheduleConfig, OptimizerConfig
from raypar.job.contract import contract_of_job
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.worker.check_model_can_shard import check_model_can_shard
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.learning_rates import RECENT, SchedulerRates, is_scheduler, make_learning_rates

pytestmark = pytest.mark.part(5)

GROUPS = ({"match": "*.bias", "lr": 0.3}, {"match": "block0.*", "lr": 0.07})
SGD = OptimizerConfig(function=torch.optim.SGD, args={"lr": 0.1, "momentum": 0.9}, groups=GROUPS)
ADAMW = OptimizerConfig(function=torch.optim.AdamW, args={"lr": 0.01}, groups=GROUPS)


def warm_then_cosine(optimizer: torch.optim.Optimizer, warmup: int) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup), lr_scheduler.CosineAnnealingLR(optimizer, 40)]
    return lr_scheduler.SequentialLR(optimizer, parts, [warmup])


def chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.ChainedScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 7), lr_scheduler.ExponentialLR(optimizer, 0.93)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def by_annotation(of: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(of, 4)


def wave(step: int) -> float:
    return 1 / (1 + step % 7)


SCHEDULERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "LambdaLR": (lr_scheduler.LambdaLR, {"lr_lambda": wave}),
    "MultiplicativeLR": (lr_scheduler.MultiplicativeLR, {"lr_lambda": lambda step: 0.97 if step % 3 else 1.01}),
    "StepLR": (lr_scheduler.StepLR, {"step_size": 5, "gamma": 0.7}),
    "MultiStepLR": (lr_scheduler.MultiStepLR, {"milestones": [3, 8, 30], "gamma": 0.3}),
    "ConstantLR": (lr_scheduler.ConstantLR, {"factor": 0.3, "total_iters": 4}),
    "LinearLR": (lr_scheduler.LinearLR, {"start_factor": 0.1, "total_iters": 9}),
    "ExponentialLR": (lr_scheduler.ExponentialLR, {"gamma": 0.9}),
    "PolynomialLR": (lr_scheduler.PolynomialLR, {"total_iters": 40, "power": 1.5}),
    "CosineAnnealingLR": (lr_scheduler.CosineAnnealingLR, {"T_max": 30, "eta_min": 1e-4}),
    "CosineAnnealingWarmRestarts": (lr_scheduler.CosineAnnealingWarmRestarts, {"T_0": 5, "T_mult": 2}),
    "CyclicLR": (lr_scheduler.CyclicLR, {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 4, "mode": "exp_range"}),
    "OneCycleLR": (lr_scheduler.OneCycleLR, {"max_lr": 0.2, "total_steps": 100}),
    "SWALR": (torch.optim.swa_utils.SWALR, {"swa_lr": 0.05}),
    "SequentialLR": (warm_then_cosine, {"warmup": 5}),
    "ChainedScheduler": (chained, {}),
    "by annotation": (by_annotation, {}),
    "linear of transformers": (
        "transformers:get_linear_schedule_with_warmup",
        {"num_warmup_steps": 5, "num_training_steps": "job.steps"},
    ),
    "cosine of transformers": (
        "transformers:get_cosine_schedule_with_warmup",
        {"num_warmup_steps": 5, "num_training_steps": 80},
    ),
    "any of transformers": (
        "transformers:get_scheduler",
        {"name": "inverse_sqrt", "num_warmup_steps": 5, "scheduler_specific_kwargs": {"timescale": 10}},
    ),
}


def scheduled(what: str, optimizer: OptimizerConfig = SGD, **more: Any) -> Job:
    function, args = SCHEDULERS[what]
    return job_of(optimizer, lr_schedule=LrScheduleConfig(function=function, args=args), **more)


def plain_loop(job: Job, steps: int) -> list[list[dict[str, Any]]]:
    """The options of each group in each step, in the order of the job's groups."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    of = [*({key: value for key, value in group.items() if key != "match"} for group in job.optimizer.groups), {}]
    groups = [{"params": [parameter], **more} for parameter, more in zip(parameters, of, strict=True)]
    optimizer = job.optimizer.resolve()(groups, **job.optimizer.args)
    assert job.scheduled is not None
    function, args = job.scheduled.resolve(), dict(job.scheduled.args)
    scheduler = function(args.pop("name"), optimizer, **args) if "name" in args else function(optimizer, **args)
    found = []
    for _ in range(steps):
        found.append([{key: group[key] for key in optimizer.defaults} for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


@functools.cache
def graph() -> Graph:
    """The layers of all jobs here."""
    return make_layer_graph(job_of(SGD))


def made(job: Job) -> SchedulerRates:
    rates = make_learning_rates(job, graph(), {})
    assert isinstance(rates, SchedulerRates)
    return rates


@pytest.mark.ci
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("what", SCHEDULERS)
def test_every_group_has_in_every_step_what_the_plain_loop_gives_it(what: str, optimizer: OptimizerConfig):
    """Exactly, in any order of asking, momenta too, and nothing else is set than what the scheduler changes."""
    job = scheduled(what, optimizer, steps=90)
    assert job.lr_schedule is not None and is_scheduler(job.lr_schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates, expected = made(job), plain_loop(job, 90)
        for step in (0, 1, 2, 7, 6, 40, 41, 3, 89, 20, 21):
            values = rates.at(step)
            assert list(values) == ["*.bias", "block0.*", "*"]
            for group, wanted in zip(values.values(), expected[step], strict=True):
                assert {**wanted, **group} == wanted and "lr" in group, step
    changed = {
        key
        for of_step in expected
        for one, first in zip(of_step, expected[0], strict=True)
        for key in one
        if one[key] != first[key]
    }
    assert changed - {"lr"} <= {key for group in rates.at(89).values() for key in group} <= {"lr", "momentum", "betas"}


def test_a_step_that_runs_again_has_its_values_of_the_first_time_also_where_they_changed_later_only():
    class Late(lr_scheduler.StepLR):
        def step(self, epoch: Any = None) -> None:
            super().step()
            if self.last_epoch == 5:
                for group in self.optimizer.param_groups:
                    group["momentum"] = 0.5

    job = job_of(SGD, steps=200, lr_schedule=LrScheduleConfig(function=Late, args={"step_size": 50}))
    rates, optimizer = made(job), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["raypar_pattern"] = "*"
    for step, momentum, lr in ((4, 0.9, 0.1), (5, 0.5, 0.1), (4, 0.9, 0.1), (RECENT + 90, 0.5, 0.1**4), (4, 0.9, 0.1)):
        assert rates.set(optimizer, step) == optimizer.param_groups[0]["lr"] == pytest.approx(lr)
        assert optimizer.param_groups[0]["momentum"] == momentum, step


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "2 shards"])
@pytest.mark.parametrize("what, optimizer", [("OneCycleLR", ADAMW), ("CyclicLR", SGD), ("CosineAnnealingLR", ADAMW)])
def test_layouts_have_the_bits_of_the_plain_loop(what: str, optimizer: OptimizerConfig, layout: str, tmp_path: Path):
    """In stages and replicas, saved and resumed, and where workers join and leave: with schedulers that change momenta too."""
    job = scheduled(what, optimizer)
    plan, run = LAYOUTS[layout]
    check_model_can_shard(job, preflight(job), plan)
    assert run(job, make_layer_graph(job), tmp_path) == "equal"


def test_the_learning_rate_that_a_step_reports_is_that_of_no_group():
    job = scheduled("OneCycleLR", ADAMW)
    expected = plain_loop(job, STEPS)
    with OneProcessRun(job, ParallelPlan.mesh(pp=2, layers=LAYERS), "1f1b") as run:
        for step in range(STEPS):
            assert [report.lr for report in run.step(step)] == [expected[step][-1]["lr"]] * 2


def test_a_function_of_the_step_is_none():
    def of_step(step: int, warmup: int = 3) -> float:
        return 1.0

    assert not is_scheduler(FunctionConfig(function=of_step)) and not is_scheduler(FunctionConfig(function=wave))
    assert not is_scheduler(FunctionConfig(function=tiny_job.noting_schedule, args={"folder": "f"}))


GIVEN: dict[str, Any] = {
    "model": tiny_job.model,
    "loss": tiny_job.loss,
    "data": tiny_job.data,
    "batch_size": 8,
    "microbatches": 4,
}


def of_parameters(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    assert optimizer.param_groups[0]["params"][0].numel() > 1, "where are they?"
    return lr_scheduler.StepLR(optimizer, 1)


def chance(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, float(torch.rand(())))


def no_scheduler(optimizer: torch.optim.Optimizer) -> float:
    return 0.5


def plateau(optimizer: torch.optim.Optimizer) -> object:
    return lr_scheduler.ReduceLROnPlateau(optimizer)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "needs a metric": (plateau, ConfigError, r"plateau makes a ReduceLROnPlateau, whose step needs a metric"),
    "lacks an argument": ((lr_scheduler.StepLR, {}), ConfigError, r"lr_schedule.args lacks step_size, which .*StepLR needs"),
    "an unknown argument": (
        (lr_scheduler.StepLR, {"step_size": 1, "gama": 2}),
        ConfigError,
        r"lr_schedule.args.gama: .*StepLR has no such argument\n.*did you mean gamma\?",
    ),
    "a wrong argument": (
        (lr_scheduler.OneCycleLR, {"max_lr": 1}),
        UserCodeError,
        r"OneCycleLR, made for .* raised ValueError: ",
    ),
    "needs parameters": (of_parameters, UserCodeError, r"(?s)of_parameters, made for .*where are they\?.*function of the step"),
    "of schedulers": (
        (lr_scheduler.ChainedScheduler, {"schedulers": []}),
        UserCodeError,
        r"(?s)ChainedScheduler, made for .*by a function of the optimizer",
    ),
    "by chance": (chance, ConfigError, r"chance is not the same when it is made again: in step 2 it has"),
    "no scheduler": (no_scheduler, ConfigError, r"no_scheduler returned a float for an optimizer, which is no scheduler"),
    "too short": (
        (lr_scheduler.OneCycleLR, {"max_lr": 1, "total_steps": 5}),
        UserCodeError,
        r"OneCycleLR raised ValueError: Tried to step 6 times.*\n  on its way to step 7 of 9\n.*job.steps among",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_function_of_the_step_is_refused_before_the_run(what: str):
    schedule, kind, says = REFUSED[what]
    with pytest.raises(kind, match=says) as found:
        preflight(raypar.Trainer(**GIVEN, steps=9, lr_schedule=schedule).job)
    assert "raypar_pattern" not in str(found.value)


def test_a_schedule_as_long_as_the_run_follows_its_steps_and_is_in_the_contract():
    def job(**length: Any) -> Job:
        return raypar.Trainer(
            **GIVEN, lr_schedule=(lr_scheduler.OneCycleLR, {"max_lr": 1.0, "total_steps": "job.steps"}), **length
        ).job

    preflight(job(steps=9))
    held = contract_of_job(job(steps=9))["lr_schedule"]
    assert held["args"] == {"max_lr": 1.0, "total_steps": 9}
    assert contract_of_job(job(epochs=3).replace(steps=9)) == contract_of_job(job(steps=9)) != contract_of_job(job(steps=10))
    assert job(steps=9).lr_schedule.args["total_steps"] == "job.steps", "as a run's job file keeps it"
    plain = raypar.Trainer(**GIVEN, steps=9, lr_schedule=(tiny_job.noting_schedule, {"folder": "job.steps/x"})).job
    assert plain.scheduled is plain.lr_schedule


def test_a_function_of_the_step_gets_the_number_of_steps_too():
    def falling(step: int, total: int) -> float:
        return 1 - step / total

    job = raypar.Trainer(
        **GIVEN, steps=4, optimizer=(torch.optim.SGD, {"lr": 1.0}), lr_schedule=(falling, {"total": "job.steps"})
    ).job
    preflight(job)
    with OneProcessRun(job, ParallelPlan.mesh(layers=4), "1f1b") as run:
        assert [run.step(step)[0].lr for step in range(4)] == [1.0, 0.75, 0.5, 0.25]


def test_a_scheduler_of_an_optimizer_that_is_made_is_refused_with_its_class():
    of = lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 1)
    with pytest.raises(ConfigError, match=re.escape("lr_schedule is a StepLR of an optimizer that is made already")) as found:
        raypar.Trainer(**GIVEN, steps=1, lr_schedule=of)
    assert "lr_schedule=(StepLR, {...})" in found.value.cure
