"""Unmodified models of libraries on two shards: the plain module's gradients, and the same bits in every layout."""

import pytest
import torch
from helpers.captured_shards import errors_on_shards, run_step, share_of_largest_shard, zoo_graph, zoo_job

from raypar.model.tensor_parallel.layout import compute_shard_layout
from raypar.worker.run_in_one_process import OneProcessRun

CUT = (
    "gpt2", "gpt2_mask", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3", "bert", "roberta", "albert", "vit", "vitmae",
    "t5", "bart", "whisper", "clip",
)  # fmt: skip
"""Models whose attention and MLP can be cut."""
FEW = ("gpt2", "bert", "t5")
"""Models of the default suite."""


def values_of(found: OneProcessRun) -> dict[str, list[torch.Tensor]]:
    """Name -> every slice of the parameter, each once, in the order of shards."""
    values = {}
    for name, copies in found.parameters().items():
        slices = copies[:2]
        assert all(torch.equal(slices[i % 2], copy) for i, copy in enumerate(copies)), name
        values[name] = slices
    return values


def check(name: str, meshes: list[dict[str, int]]) -> None:
    """Gradients and parameters are the plain module's; other layouts with two shards have the bits of one stage."""
    spec = zoo_job(name)
    graph = zoo_graph(name)
    assert errors_on_shards(spec, graph, run_step(spec, graph, tp=2), 2) == {}
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


@pytest.mark.parametrize("name", [*FEW, pytest.param("llama", marks=pytest.mark.full)])
def test_each_shard_holds_half_of_attention_and_mlps(name: str):
    graph = zoo_graph(name)
    assert share_of_largest_shard(graph, compute_shard_layout(graph, 2)) <= 0.6
