"""Parameters that several stages share, on the same and on other numbers of shards, trained and frozen."""

from collections import OrderedDict

import pytest
import torch
from helpers.shard_grid import SEQ, STEPS, VOCAB, WIDTH, Cell, layout_for
from torch import nn

from examples import gpt
from raypar.job import ModelConfig
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)


def tied(frozen: bool = False) -> nn.Sequential:
    """The example GPT whose output layer is its embedding."""
    parts = OrderedDict(gpt.layers(VOCAB, WIDTH, 2, 5, SEQ + 1).named_children())
    parts["head"].logits.weight = parts["embed"].token.weight
    if frozen:
        parts["embed"].token.weight.requires_grad_(False)
    return nn.Sequential(parts)


def trained(spec, plan):
    """Losses, and the embedding as every holder has it, with the number of shards and the shard."""
    with OneProcessRun(spec, plan, "1f1b", graph=make_layer_graph(spec)) as local:
        losses = [local.step(step)[0].loss for step in range(STEPS)]
        found = []
        for core in local.cores:
            for (index, _), stage in core.stages.items():
                for name, parameter in stage.parameters.items():
                    if name == "embed.token.weight":
                        found.append((plan.stages[index].shards, plan.roles[core.rank][0].shard, parameter.detach().clone()))
        return losses, found


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("replicas, shards", [((1, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 1), (2, 2)), ((1, 2), (2, 2))])
def test_a_tie_between_stages_has_the_bits_of_one_stage(replicas, shards, frozen):
    spec = Cell("gpt", "1f1b", (1,), (1,), 4).job.replace(model=ModelConfig(function=tied, args={"frozen": frozen}))
    want, (first, *_) = trained(spec, ParallelPlan.of((1,), shards[:1], layers=4))
    got, found = trained(spec, ParallelPlan.of(replicas, shards, layers=4))
    assert got == want
    assert len(found) == sum(r * s for r, s in zip(replicas, shards, strict=True))
    assert all(torch.equal(held, first[2]) for count, shard, held in found if shard == first[1])


@pytest.mark.parametrize("shards", [(1, 2), (2, 1), (2, 3), (4, 2), (3, 4)], ids=str)
def test_a_tie_between_stages_of_other_shards_is_one_parameter(shards):
    """Each holder gets of the gradient what it has of the parameter: all slices stay slices of one."""
    spec = Cell("gpt", "1f1b", (1,), (1,), 4).job.replace(model=ModelConfig(function=tied))
    whole = trained(spec, ParallelPlan.mesh(layers=4))[1][0][2]
    _, found = trained(spec, ParallelPlan.of((1, 1), shards, layers=4))
    joined = {t: torch.cat([held for count, _, held in found if count == t]) for t in set(shards)}
    first, *others = joined.values()
    assert all(torch.equal(first, other) for other in others)
    assert (first - whole).abs().max() <= 1e-12 * whole.abs().max()
    for count, shard, held in found:
        assert torch.equal(held, shard_slice_of(layout_for("gpt", count), "embed.token.weight", first, shard))
