"""`loss: {..., sample_weight: FIELD}`: the weighted mean over all samples of a step, in whichever microbatches they are."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reference
from helpers.optimizer_layouts import LAYERS, LAYOUTS, model
from torch import Tensor, nn

import raypar
from raypar.errors import ConfigError, DataError, ModelError, RayparError, UserCodeError
from raypar.job import Job
from raypar.job.contract import contract_of_job
from raypar.plan import ParallelPlan
from raypar.worker.check_model_can_shard import check_model_can_shard
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)


class Weighted(torch.utils.data.Dataset):
    """Sample i: x [8], y [3], and its weight w, which for some is 0; `of_each`: a weight for each value of y."""

    def __init__(self, of_each: bool = False, least: float = 0.0, whole: bool = False) -> None:
        self.of_each, self.least, self.whole = of_each, least, whole

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(index)
        x, y = torch.randn(8, generator=dice), torch.randn(3, generator=dice)
        weights = torch.tensor([float((index + place) % 4) for place in range(3)]) + self.least
        weights = weights if self.of_each else weights[0]
        return {"x": x, "y": y, "w": weights.long() if self.whole else weights}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([Weighted()[index] for index in range(29)])


def of_sample(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target, reduction="none").mean(1)


def job(loss: Any = of_sample, data: Any = Weighted, **more: Any) -> Job:
    given: dict[str, Any] = {"steps": 6, "batch_size": 10, "microbatches": 4, "clip_norm": 1.0, "seed": 5}
    given["optimizer"] = (torch.optim.AdamW, {"lr": 0.01})
    loss = loss if isinstance(loss, dict) else {"function": loss, "sample_weight": "w"}
    return raypar.Trainer(**{"model": model, "loss": loss, "data": data, **given, **more}).job


MSE = {"function": nn.functional.mse_loss, "args": {"reduction": "none"}}
CASES: dict[str, Job] = {
    "samples": job(),
    "whole numbers": job(data=(Weighted, {"whole": True})),
    "each value": job({**MSE, "sample_weight": "w"}, (Weighted, {"of_each": True})),
    "microbatches without weight": job(microbatches=10),
    "recomputed": job(plan={"recompute": "full"}),
}


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "2 shards"])
@pytest.mark.parametrize("what", CASES)
def test_weighted_samples_have_the_bits_of_one_process_in_every_layout(what: str, layout: str, tmp_path: Path):
    """Rule 5: sum = (losses * weights).sum(), count = weights.sum(), of each microbatch."""
    spec = CASES[what]
    preflight(spec)
    assert LAYOUTS[layout][1](spec, make_layer_graph(spec), tmp_path) == "equal"


@pytest.mark.parametrize("plan", [ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS), ParallelPlan.mesh(tp=2, layers=LAYERS)])
def test_loss_and_gradients_are_those_of_the_weighted_mean_of_the_whole_batch(plan: ParallelPlan):
    spec = job(steps=1, clip_norm=None, data={"function": Weighted, "shuffle": False})
    torch.manual_seed(spec.seed)
    module, rows = model(), [Weighted()[index] for index in range(10)]
    x, y, w = (torch.stack([row[name] for row in rows]) for name in ("x", "y", "w"))
    loss = (of_sample(module(x), y) * w).sum() / w.sum()
    loss.backward()
    with OneProcessRun(spec, plan, "1f1b") as run:
        report = run.step(0)[0]
        found = run.gradients()
    assert report.loss == pytest.approx(loss.item(), rel=1e-6) and report.count == float(w.sum())
    bias = module.head.bias.grad
    assert torch.allclose(found["head.bias"][0], bias, rtol=1e-5, atol=1e-7)


class Residual(nn.Module):
    """Has a forward of its own, and so is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


@pytest.mark.ci
def test_an_unmodified_module_has_the_bits_of_its_plain_loop():
    spec = job(model=Residual)
    preflight(spec)
    graph = make_layer_graph(spec)
    want = reference.train(graph, spec)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        assert [run.step(step)[0].loss for step in range(spec.steps)] == want.losses
        for name, copies in run.parameters().items():
            assert all(torch.equal(copy, want.parameters[name]) for copy in copies), name


def token_losses(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.movedim(-1, 1), target, reduction="none")


class Tokens:
    """Sample i: five ids, the ids after them, and a weight of each token."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(index, index + 6) % 11
        return {"x": ids[:-1], "y": ids[1:], "w": (ids[1:] % 3).float()}


def next_token() -> nn.Sequential:
    return nn.Sequential(OrderedDict(embed=nn.Embedding(11, 8), head=nn.Linear(8, 11)))


def test_tokens_of_logits_that_are_cut_by_vocabulary_are_weighted():
    plan = {"shards": 2, "styles": {"head": "vocabulary"}}
    spec = job(token_losses, Tokens, model=next_token, batch_size=8, steps=1, plan=plan, clip_norm=None)
    check_model_can_shard(spec, preflight(spec), spec.to_plan(2))
    graph = make_layer_graph(spec)
    want = reference.train(graph, spec)
    with OneProcessRun(spec, spec.to_plan(2), "1f1b", graph=graph) as run:
        assert run.step(0)[0].loss == pytest.approx(want.losses[0], rel=1e-6)
        (found, other), wanted = run.gradients()["head.weight"], want.gradients[0]["head.weight"]
        assert torch.allclose(torch.cat([found, other]), wanted, rtol=1e-5, atol=1e-7)


def test_a_stream_hands_the_weights_on_to_the_stage_of_the_loss():
    spec = job(data={"function": Stream, "streams": 4})
    want = reference.train(make_layer_graph(spec), spec)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS), "1f1b") as run:
        assert [run.step(step)[0].loss for step in range(spec.steps)] == want.losses


def test_a_validation_is_weighted_too():
    spec = job(validation={"function": Weighted, "samples": 11}, steps=1)
    with OneProcessRun(spec, ParallelPlan.mesh(dp=2, layers=LAYERS), "1f1b") as run:
        found = run.validate(0)
    torch.manual_seed(spec.seed)
    module, rows = model().eval(), [Weighted()[index] for index in range(11)]
    x, y, w = (torch.stack([row[name] for row in rows]) for name in ("x", "y", "w"))
    assert found == pytest.approx(((of_sample(module(x), y) * w).sum() / w.sum()).item(), rel=1e-6)


def test_only_jobs_with_weights_have_them_in_their_contract():
    assert contract_of_job(job())["loss"]["sample_weight"] == "w"
    assert "sample_weight" not in contract_of_job(job({"function": nn.functional.mse_loss}))["loss"]


class NotOfX(Weighted):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value for name, value in super().__getitem__(index).items() if name != "w"}


REFUSED: dict[str, tuple[dict[str, Any], type[RayparError], str]] = {
    "a mean": (
        {"loss": nn.functional.mse_loss},
        ModelError,
        r"mse_loss returned \[\], and loss.sample_weight has weights \[2\]\n  cure: return a value for each weight: .*none",
    ),
    "other shapes": (
        {"loss": {"function": nn.MSELoss, "args": {"reduction": "none"}, "sample_weight": "w"}},
        ModelError,
        r"MSELoss returned \[2, 3\], and loss.sample_weight has weights \[2\]\n  cure: .*flatten\(1\).mean\(1\)",
    ),
    "a pair": (
        {"loss": lambda output, target: (output.sum(), 3)},
        ModelError,
        r"returned a tuple, and loss.sample_weight has weights \[2\]",
    ),
    "the model's own loss": (
        {"loss": {"function": "model", "sample_weight": "w"}},
        ConfigError,
        r"loss.sample_weight is w, and loss is model, which takes the mean over samples itself\n  cure: give a loss function",
    ),
    "no such field": ({"data": NotOfX}, DataError, r"'w'.*\n  cure"),
    "negative": ({"data": (Weighted, {"least": -1.0})}, DataError, r"field 'w', .* has the weight -1.0\n  cure: give finite"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_weighted_is_refused_before_the_run(what: str):
    more, kind, says = REFUSED[what]
    with pytest.raises(kind, match=says):
        preflight(job(**more))


def test_a_negative_weight_that_comes_later_is_an_error_of_its_step():
    class Late(Weighted):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            found = super().__getitem__(index)
            return {**found, "w": found["w"] - 2.0 * (index == 16)}

    spec = job(data={"function": Late, "shuffle": False})
    preflight(spec)
    with OneProcessRun(spec, ParallelPlan.mesh(layers=LAYERS), "1f1b") as run:
        run.step(0)
        with pytest.raises(UserCodeError, match=r"^a weight of the loss is -2.0\n.*weights >= 0"):
            run.step(1)
