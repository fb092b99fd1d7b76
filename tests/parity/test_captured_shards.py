"""Unmodified models of libraries on two shards: the plain module's gradients, and the same bits in every layout."""

import fnmatch
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.captured_shards import errors_on_shards, run_step, share_of_largest_shard, zoo_graph, zoo_job
from helpers.on_shards import TOLERANCE
from torch import nn

import raypar
from raypar.errors import PlanError
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

CUT = (
    "gpt2", "gpt2_mask", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3", "bert", "roberta", "albert", "vit", "vitmae",
    "t5", "bart", "whisper", "clip",
)  # fmt: skip
"""Models whose attention and MLP can be cut."""
FEW = ("gpt2", "bert", "t5")
"""Models of the default suite."""
FLOAT32_SUMS = {"gemma3": "*_norm.weight"}
"""Model -> parameters whose gradients its own code sums over heads in float32, whatever its dtype: Gemma 3's norms of heads."""


def bound_of(name: str, tensor: str) -> float:
    """How far from the plain module a gradient or parameter may be, relative to what is summed."""
    return 1e-6 if fnmatch.fnmatchcase(tensor, FLOAT32_SUMS.get(name, "")) and ".self_attn." in tensor else TOLERANCE


@pytest.mark.full
def test_nothing_but_float32_in_its_own_code_keeps_gemma3_from_the_plain_modules_gradients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    spec, graph = zoo_job("gemma3"), zoo_graph("gemma3")
    assert errors_on_shards(spec, graph, run_step(spec, graph, tp=2), 2) == {}


def values_of(found: OneProcessRun) -> dict[str, list[torch.Tensor]]:
    """Name -> every slice of the parameter, each once, in the order of shards."""
    values = {}
    for name, copies in found.parameters().items():
        slices = copies[:2]
        assert all(torch.equal(slices[i % 2], copy) for i, copy in enumerate(copies)), name
        values[name] = slices
    return values


def have_the_same_slices(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether two layouts hold the same slices of a parameter, in whichever order (two stages of one worker may have a tie)."""
    one, other = list(some), list(others)
    return all(any(map(torch.equal, [each] * len(b), b)) for a, b in ((one, other), (other, one)) for each in a)


def check(name: str, meshes: list[dict[str, int]]) -> None:
    """Gradients and parameters are the plain module's; other layouts with two shards have the bits of one stage."""
    spec = zoo_job(name)
    graph = zoo_graph(name)
    found = errors_on_shards(spec, graph, run_step(spec, graph, tp=2), 2)
    assert {tensor: error for tensor, error in found.items() if not error <= bound_of(name, tensor)} == {}
    dropped = zoo_job(name, 0.1, microbatches=2, steps=2)
    graph = zoo_graph(name, 0.1)
    wanted = values_of(run_step(dropped, graph, tp=2))
    for mesh in meshes:
        found = values_of(run_step(dropped, graph, tp=2, **mesh))
        assert found.keys() == wanted.keys()
        assert [n for n, slices in found.items() if not all(map(torch.equal, slices, wanted[n]))] == []


@pytest.mark.parametrize("name", FEW)
def test_two_shards_have_the_plain_modules_gradients(name: str):
    check(name, [{"pp": 2, "dp": 2}])


@pytest.mark.full
@pytest.mark.parametrize("name", CUT)
def test_every_model_that_can_be_cut_has_the_plain_modules_gradients_on_two_shards(name: str):
    check(name, [{"pp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}])


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.full) for name in CUT if name not in FEW)])
def test_a_shard_holds_at_most_60_percent_of_all_parameters(name: str):
    graph = zoo_graph(name)
    assert share_of_largest_shard(graph, compute_shard_layout(graph, 2)) <= 0.6


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("compute", [None, "bf16"])
@pytest.mark.parametrize(
    "schedule, mesh", [("zb-h1", {"pp": 2}), ("zb-v", {"pp": 2, "chunks": 2, "placement": "v"}), ("gpipe", {"pp": 3, "dp": 2})]
)
def test_zero_bubble_and_bf16_have_the_same_bits_in_every_layout(
    name: str, compute: str | None, schedule: str, mesh: dict[str, Any]
):
    spec = zoo_job(name, 0.1, microbatches=3, steps=2, dtype="float32", precision={"compute": compute})
    graph = make_layer_graph(spec)
    wanted, found = run_step(spec, graph, tp=2).parameters(), run_step(spec, graph, schedule, tp=2, **mesh).parameters()
    assert [name for name, copies in found.items() if not have_the_same_slices(copies, wanted[name])] == []


class Plan:
    """A configuration with a tensor-parallel plan."""

    def __init__(self, plan: dict[str, str]) -> None:
        self.base_model_tp_plan = plan


class Planned(nn.Module):
    """A model with a plan, whose layers have names that say nothing."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.config, self.blocks = (
            Plan(plan),
            nn.ModuleList(
                nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(8, 6), "norm": nn.LayerNorm(6)}) for _ in range(2)
            ),
        )

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["norm"](block["b"](block["a"](x).tanh()))
        return x.sum(-1)


class Pairs:
    """Samples (x, y)."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), torch.tensor(float(index))


def layout_of_planned(plan: dict[str, str], styles: dict[str, str] | None = None) -> dict[str, str]:
    """Module -> style on two shards."""
    trainer = raypar.Trainer(
        model=(Planned, {"plan": plan}), loss=nn.functional.mse_loss, data=Pairs, steps=1, batch_size=4, microbatches=1
    )
    return dict(compute_shard_layout(make_layer_graph(trainer.job), 2, styles).styles)


def test_the_plan_that_a_model_brings_along_chooses_styles():
    found = layout_of_planned({"blocks.*.a": "colwise", "blocks.*.b": "rowwise"})
    assert found == {f"blocks.{i}.{name}": style for i in range(2) for name, style in (("a", "column"), ("b", "row"))}
    gathered = layout_of_planned({"blocks.*.a": "colwise_gather_output", "blocks.*.b": "rowwise_split_input"})
    assert set(gathered.values()) == {"gathered", "row"}


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan, what",
    [
        (
            {"blocks.*.a": "local_params"},
            r"gives blocks\.0\.a, a Linear, the style local_params, which raypar does not",
        ),
        (
            {"blocks.*.norm": "colwise"},
            r"\(colwise\) cannot be kept: the style column does not fit blocks\.0\.norm, a Layer",
        ),
    ],
)
def test_a_plan_that_cannot_be_kept_names_the_module_and_the_cure(plan: dict[str, str], what: str):
    with pytest.raises(PlanError, match=what) as raised:
        layout_of_planned(plan)
    (pattern,) = plan
    assert f"plan.styles: {{'{pattern}': whole}}" in raised.value.cure
    assert pattern.rpartition(".")[2] not in {n.rpartition(".")[2] for n in layout_of_planned(plan, {pattern: "whole"})}
