"""Optimizers by name, and the arithmetic of norm and hash."""

import hashlib
import math
import time

import pytest
import torch
from helpers import tiny_job
from torch import nn

import raypar
from raypar.actors.step_reports import merge_reports
from raypar.errors import ConfigError, StateNotKeptError
from raypar.job import OptimizerConfig
from raypar.plan import ParallelPlan
from raypar.plan.exact_sum import ExactSum
from raypar.worker.norm_and_weights_hash import gradient_norm_and_factor, read_together, square_gradients, weights_hash
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.optimizer_and_parameter_groups import (
    build_optimizer,
    check_optimizer_groups,
    read_learning_rate,
    set_learning_rate,
)
from raypar.worker.step.optimizer_state import OptimizerState, read_optimizer_state, write_optimizer_state


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(2)
    return {name: nn.Parameter(torch.randn(3)) for name in ("a.weight", "a.bias", "norm.weight", "b.weight")}


def spec(target="torch.optim:AdamW", groups=(), **args) -> OptimizerConfig:
    return OptimizerConfig(function=target, args=args, groups=tuple({"match": pattern, **given} for pattern, given in groups))


def step(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> None:
    for index, parameter in enumerate(named.values()):
        parameter.grad = torch.full((3,), index + 1.0)
    optimizer.step()


def test_the_first_matching_pattern_takes_a_parameter_and_the_rest_form_the_last_group():
    named = parameters()
    named["b.weight"].requires_grad_(False)
    made = build_optimizer(spec(groups=(("*norm*", {"lr": 0.5}), ("*.weight", {"weight_decay": 0.0})), lr=0.1), named)
    assert [g["raypar_names"] for g in made.param_groups] == [["norm.weight"], ["a.weight"], ["a.bias"]]
    assert [g["lr"] for g in made.param_groups] == [0.5, 0.1, 0.1]
    set_learning_rate(made, 0.5)
    set_learning_rate(made, 0.25)
    assert [g["lr"] for g in made.param_groups] == [0.125, 0.025, 0.025]


def test_state_goes_by_name_and_survives_another_grouping_of_layers():
    named = parameters()
    whole = build_optimizer(spec(lr=0.1), named)
    step(whole, named)
    saved = {
        name: {k: torch.as_tensor(v).clone() for k, v in s.items()}
        for name, s in read_optimizer_state(whole).parameters.items()
    }
    values = {name: p.detach().clone() for name, p in named.items()}
    step(whole, named)

    for names in (["a.weight", "a.bias"], ["norm.weight", "b.weight"]):
        part = {name: nn.Parameter(values[name].clone()) for name in names}
        half = build_optimizer(spec(lr=0.1), part)
        write_optimizer_state(half, OptimizerState(saved))
        for name, parameter in part.items():
            parameter.grad = torch.full((3,), list(named).index(name) + 1.0)
        half.step()
        assert all(torch.equal(p, named[n]) for n, p in part.items())
        assert all(v.data_ptr() % 64 == 0 for s in half.state.values() for v in s.values() if v.dim())


class Closing(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class SharingLists(torch.optim.SGD):
    """Keeps a list that holds another twice, which holds another twice, ...: 2 ** 24 ways lead to the last."""

    def __init__(self, params, **more):
        super().__init__(params, **more)
        self.last = self.kept = [0]
        for _ in range(24):
            self.kept = [self.kept, self.kept]


def test_lists_of_an_optimizer_that_share_others_are_compared_once():
    named = parameters()
    optimizer = build_optimizer(spec(SharingLists, lr=0.1), named)
    start = time.process_time()
    assert read_optimizer_state(optimizer).attributes == {"*": {}}
    assert time.process_time() - start < 0.5
    optimizer.last[0] = 7
    with pytest.raises(StateNotKeptError, match=r"'(kept|last)', an attribute of the optimizer, which a step has changed"):
        read_optimizer_state(optimizer)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (spec("torch.optim:LBFGS"), "closure"),
        (spec(Closing), "closure"),
        (spec(lrr=0.1), "lrr"),
        (spec(lr=-1.0), "refused its arguments"),
        (spec(groups=(("*norm*", {"weigth_decay": 0.0}),)), "sets 'weigth_decay', which torch.optim:AdamW does not know"),
        (spec("builtins:list"), "made a list"),
    ],
)
def test_what_is_no_optimizer_or_misspelt_is_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        build_optimizer(wrong, parameters())


def test_a_pattern_that_matches_no_parameter_of_the_model_is_refused():
    check_optimizer_groups(spec(groups=(("*norm*", {}),)), parameters())
    with pytest.raises(ConfigError, match=r"'\*nrom\*' matches none of the 4 parameters"):
        check_optimizer_groups(spec(groups=(("*nrom*", {}),)), parameters())


@pytest.mark.parametrize("size", [0, 1, 32768, 32769, 100_000])
def test_squares_of_pieces_of_32768_are_added_exactly(size):
    torch.manual_seed(size)
    gradient = torch.randn(size)
    pieces = [gradient[start : start + 32768] for start in range(0, size, 32768)]
    want = math.fsum([2.0, *(torch.dot(piece, piece).item() for piece in pieces)])
    squares = square_gradients([gradient.view(-1, 1), torch.ones(2)])
    assert ExactSum.of(read_together(squares)).rounded() == want and len(squares) == 1  # not one by one: that takes longer


def test_numbers_are_read_as_they_are_in_their_places():
    half, whole = torch.tensor(0.1, dtype=torch.bfloat16), torch.tensor(2**53 - 1)
    given = [half, 3, torch.tensor(0.1), whole, 0.1, torch.tensor(0.1, dtype=torch.float64), torch.tensor(math.inf)]
    assert (
        read_together(given) == [float(number) for number in given] and read_together([]) == [] and read_together([2]) == [2.0]
    )


def test_the_factor_clips_and_counts_in_one_multiplication():
    assert gradient_norm_and_factor(25.0, 2.0, None) == (2.5, 0.5)
    assert gradient_norm_and_factor(25.0, 2.0, 1.0) == (2.5, 1.0 / (2.5 + 1e-6) / 2.0)
    assert gradient_norm_and_factor(25.0, 2.0, 5.0) == (2.5, 0.5)
    assert gradient_norm_and_factor(math.inf, 1.0, 1.0) == (math.inf, 0.0)
    assert math.isnan(gradient_norm_and_factor(math.nan, 1.0, 1.0)[0])
    for count in (0.0, -2.0, math.inf, -math.inf, math.nan):  # by which nothing can be divided
        norm, factor = gradient_norm_and_factor(4.0, count, 1.0)
        assert math.isnan(norm) and factor == 0.0, count


def test_the_hash_is_over_names_and_bytes_in_the_order_of_names():
    named = parameters()
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(f"{name}\0".encode() + named[name].detach().numpy().tobytes())
    assert weights_hash(named) == digest.hexdigest() == weights_hash(dict(reversed(named.items())))


def test_a_number_given_as_a_text_is_named():
    with pytest.raises(ConfigError, match="refused its arguments") as x:
        build_optimizer(spec(lr="1e-3"), parameters())
    assert "lr is the text '1e-3': write the number without quotes" in x.value.cure
    with pytest.raises(ConfigError, match="refused its arguments") as x:
        build_optimizer(spec(learning_rate=1e-3), parameters())
    assert "signature" in x.value.cure


def falling(step: int) -> float:
    return 1 / (1 + step)


def test_a_step_reports_its_learning_rate_which_is_that_of_the_schedule_and_of_no_group():
    given = {"model": tiny_job.model, "loss": tiny_job.loss, "data": tiny_job.data, "steps": 3}
    groups = [{"match": "*bias", "lr": 7.0}, {"match": "layer0*", "lr": 5.0}]
    optimizer = {"function": torch.optim.SGD, "args": {"lr": 0.5}, "groups": groups}
    job = raypar.Trainer(**given, batch_size=8, microbatches=4, optimizer=optimizer, lr_schedule=falling).job
    with OneProcessRun(job, ParallelPlan.mesh(pp=2, layers=4), "1f1b") as run:
        for step in range(3):
            reports = run.step(step)
            assert [report.lr for report in reports] == [0.5 * falling(step)] * 2
            assert merge_reports({rank: vars(report) for rank, report in enumerate(reports)})["lr"] == 0.5 * falling(step)
    assert read_learning_rate(torch.optim.AdamW([nn.Parameter(torch.ones(1))]), 0.5) == 0.5e-3, "the class's own"
    assert read_learning_rate(torch.optim.Rprop([nn.Parameter(torch.ones(1))]), 1.0) == 1e-2
    without = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    without.defaults.pop("lr")
    assert read_learning_rate(without, 1.0) is None
