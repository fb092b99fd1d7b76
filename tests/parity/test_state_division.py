"""Into which parts an optimizer's state may be divided is found by a trial: by runs, by whole parameters, or not at all."""

import re

import pytest
import torch
from helpers import optimizers

from raypar.errors import ConfigError
from raypar.job import OptimizerConfig
from raypar.plan import ParallelPlan
from raypar.plan.ownership import CANONICAL_PIECE
from raypar.plan.state_division import StateDivision
from raypar.worker.step.optimizer_trial import OptimizerKind, OptimizerTrial, try_optimizer
from raypar.worker.step.state_division_trial import find_difference_of_runs

VECTORS = {"a.weight": (300, 120), "b.weight": (6, 4), "a.bias": (300,), "scale": ()}
MATRICES = {"a.weight": (300, 120), "b.weight": (6, 4)}


def divided(kind: type, shapes=VECTORS, **args) -> tuple[StateDivision, OptimizerTrial]:
    trial = try_optimizer(OptimizerConfig(function=kind, args=args), shapes)
    return trial.division, trial


BY_RUNS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


@pytest.mark.parametrize("name", [n if n in ("AdamW", "SGD") else pytest.param(n, marks=pytest.mark.ci) for n in BY_RUNS])
def test_optimizers_of_pytorch_that_take_each_element_by_itself_are_divided_by_runs(name: str):
    division, trial = divided(getattr(torch.optim, name), lr=0.01)
    assert division is StateDivision.BY_RUNS, trial.why_not_by_runs


@pytest.mark.parametrize(
    "name, shapes, said", [("Muon", MATRICES, "which are flat"), ("Adafactor", VECTORS, "flat runs of 32,768")]
)
def test_muon_and_adafactor_are_divided_by_whole_parameters(name: str, shapes, said: str):
    division, trial = divided(getattr(torch.optim, name), shapes, lr=0.01)
    assert (division, trial.kind) == (StateDivision.BY_PARAMETERS, OptimizerKind.PER_PARAMETER)
    assert said in trial.why_not_by_runs
    assert trial.difference_of_elements


class DecaysMatrices(torch.optim.Optimizer):
    """Weight decay for what has two dimensions: element by element on shards, but not on flat runs."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.mul_(0.9 if p.ndim > 1 else 1.0).add_(p.grad, alpha=-self.param_groups[0]["lr"])


class ScalesByBlock(optimizers.Written):
    """Divides gradients by the largest of each block of `block` elements, but not of parameters below `least`. `keeps` it."""

    def __init__(self, params, block: int, least: int = 0, keeps: bool = False, **given):
        super().__init__(params, block=block, least=least, keeps=keeps, **given)

    def way(self, parameter, gradient, group, state):
        size = group["block"]
        flat = torch.nn.functional.pad(gradient.reshape(-1), (0, -gradient.numel() % size)).view(-1, size)
        largest = flat.abs().amax(1)
        if group["keeps"]:
            state["largest"] = largest
        if parameter.numel() < group["least"]:
            return gradient
        return gradient / largest.repeat_interleave(size)[: gradient.numel()].view_as(gradient)


def test_rules_for_the_number_of_dimensions_are_found():
    division, trial = divided(DecaysMatrices)
    assert (division, trial.kind) == (StateDivision.BY_PARAMETERS, OptimizerKind.ELEMENTWISE)
    assert "the weights of a parameter of shape" in trial.why_not_by_runs


def test_blocks_that_divide_a_run_may_be_divided_but_not_by_shards():
    division, trial = divided(ScalesByBlock, block=1024)
    assert (division, trial.kind) == (StateDivision.BY_RUNS, OptimizerKind.PER_PARAMETER)
    assert divided(ScalesByBlock, block=1000)[0] is StateDivision.BY_PARAMETERS


class CountsInATensor(optimizers.Written):
    """Keeps its number of steps as a tensor [1], which is as large as a run of one element; or `flat` momentum [N]."""

    def __init__(self, params, flat: bool, **given):
        super().__init__(params, flat=flat, **given)

    def way(self, parameter, gradient, group, state):
        if group["flat"]:
            moment = state.setdefault("moment", torch.zeros(parameter.numel()))
            return moment.mul_(0.9).add_(gradient.reshape(-1)).view_as(gradient).clone()
        state["count"] = state.get("count", torch.zeros(1)) + 1
        return gradient / state["count"]


@pytest.mark.parametrize("flat, key", [(False, "count"), (True, "moment")])
def test_state_whose_shape_does_not_tell_what_it_is_belongs_to_whole_parameters(flat: bool, key: str):
    """From runs it is put together by its shape."""
    division, trial = divided(CountsInATensor, {"a.weight": (300, 120)}, flat=flat)
    assert division is StateDivision.BY_PARAMETERS and f"{key!r}, state that is a tensor of shape [" in trial.why_not_by_runs


def test_one_number_a_block_is_state_of_the_whole_parameter():
    division, trial = divided(ScalesByBlock, block=1024, keeps=True)
    assert division is StateDivision.BY_PARAMETERS and "'largest', state that is a tensor of shape [" in trial.why_not_by_runs


def test_the_shortest_last_piece_of_the_model_decides_about_rules_for_small_tensors():
    # 300 x 120 elements end in a piece of 3,232
    assert divided(ScalesByBlock, block=1024, least=4096)[0] is StateDivision.BY_PARAMETERS
    assert divided(ScalesByBlock, block=1024, least=3000)[0] is StateDivision.BY_RUNS
    shapes = {"w": (2 * CANONICAL_PIECE + 3000,)}
    assert divided(ScalesByBlock, shapes, block=1024, least=3000)[0] is StateDivision.BY_RUNS
    assert divided(ScalesByBlock, {"w": (CANONICAL_PIECE + 2999,)}, block=1024, least=3000)[0] is StateDivision.BY_PARAMETERS


class KeepsRows(optimizers.Written):
    """State that no element decides, but that is one number a row."""

    def way(self, parameter, gradient, group, state):
        state["rows"] = gradient.reshape(len(gradient), -1).sum(1) if gradient.ndim else gradient.clone()
        return gradient


def test_state_that_is_neither_by_element_nor_whole_is_named():
    division, trial = divided(KeepsRows)
    assert division is StateDivision.BY_PARAMETERS
    assert "'rows', state that is a tensor of shape" in trial.why_not_by_runs


def test_an_optimizer_that_couples_parameters_is_not_divided_at_all():
    division, trial = divided(optimizers.NormalisesAll)
    assert division is StateDivision.NOT_AT_ALL and trial.why_not_by_runs == trial.difference


@pytest.mark.ci
def test_late_rules_are_found():
    given = OptimizerConfig(function=optimizers.NormalisesAfter, args={"together": False, "warmup_steps": 2000})
    assert "the weights" in find_difference_of_runs(given, VECTORS, torch.float32)


def test_the_refusal_on_shards_says_what_was_measured_and_the_plan_that_works():
    _, trial = divided(torch.optim.Adafactor, lr=0.01)
    trial.check_plan(ParallelPlan.mesh(pp=2, dp=2, layers=4))
    for plan, what in (
        (ParallelPlan.mesh(tp=2, layers=4), "2 shards"),
        (ParallelPlan.mesh(layers=4).with_virtual_shards(2), "2 virtual shards"),
    ):
        with pytest.raises(ConfigError) as found:
            trial.check_plan(plan)
        said, cure = str(found.value).splitlines()
        assert said.startswith(f"Adafactor cannot be used with {what}: its step of one element depends on other elements")
        assert "set plan.shards: 1 and leave virtual_shards out (stages and replicas may be any number)" in cure
        trial_of = r".*; measured: in a trial of \d+ steps( \(counters set forward to [\d,]+\))? the weights of half"
        assert re.match(rf"{trial_of} of a parameter .* differ by [\d.e-]+ ", cure)
