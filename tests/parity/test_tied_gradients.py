"""Parameters that several stages share, on the same and on other numbers of shards, trained and frozen, whole and divided."""

from collections import Counter, OrderedDict
from dataclasses import replace

import pytest
import torch
from helpers.shard_grid import SEQ, STEPS, VOCAB, WIDTH, Cell, layout_for
from helpers.zero_layouts import put_together, small_pieces
from torch import nn

from examples import gpt
from raypar.job import ModelConfig
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.tied_gradients import TiedGradientExchange

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


def divided(plan, levels, holders=1):
    """The plan with a level of ZeRO for each stage."""
    stages = (replace(each, zero=level, zero_holders=holders) for each, level in zip(plan.stages, levels, strict=True))
    return replace(plan, stages=tuple(stages))


def exchanged(spec, plan):
    """Losses, and what owners have of each parameter by stage and virtual shard. The bytes of tied parameters' gradients that a
    rank sends are those of the elements that others need."""
    bytes_of_ties = Counter()

    def counted(exchange, *args, send=TiedGradientExchange._send):
        before = exchange.transport.ledger.sent["send"]
        posted = list(send(exchange, *args))
        bytes_of_ties[exchange.rank] += exchange.transport.ledger.sent["send"] - before
        return posted

    with (
        pytest.MonkeyPatch.context() as patch,
        small_pieces(),
        OneProcessRun(spec, plan, "1f1b", graph=make_layer_graph(spec)) as local,
    ):
        patch.setattr(TiedGradientExchange, "_send", counted)
        losses = [local.step(step)[0].loss for step in range(STEPS)]
        for core in local.cores:
            exchange = core.step_commit._exchange
            of_all = [each for tie in exchange.ties for each in exchange._transfers(tie) if each.sender == core.rank]
            elements = sum(stop - start for each in of_all for start, stop in each.elements)
            assert bytes_of_ties[core.rank] == STEPS * 8 * elements, "the integers of the transfers"
            for index in core.stages:
                if core.ownership.divides(index[0], "gradient"):
                    assert not any(one is not None for one in core.step_commit._settled[index].values()), "none is whole"
        return losses, put_together(local, lambda core, index, each: each.parameter.detach().clone())


@pytest.mark.parametrize("levels, holders", [((2, 2), 1), ((0, 1), 1), ((2, 0), 1), ((1, 2), 2)], ids=str)
@pytest.mark.parametrize("replicas, shards", [((2, 3), (1, 1)), ((3, 1), (1, 1)), ((3, 2), (2, 2)), ((3, 3), (2, 1))], ids=str)
def test_owners_of_a_tied_parameter_exchange_what_they_own(replicas, shards, levels, holders):
    """The bits are those of whole gradients."""
    spec = Cell("gpt", "1f1b", (1,), (1,), 4).job.replace(model=ModelConfig(function=tied))
    plan = ParallelPlan.of(replicas, shards, layers=4)
    want_losses, want = exchanged(spec, plan)
    losses, found = exchanged(spec, divided(plan, levels, holders))
    assert losses == want_losses and found.keys() == want.keys()
    assert all(torch.equal(one, want[key][0]) for key, of in found.items() for one in of)
