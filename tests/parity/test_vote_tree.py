"""A step whose votes go up and down a tree: the bits of one whose votes go directly, with two messages for each worker."""

import pytest
import torch
from helpers import ugly_models

from raypar.plan import ParallelPlan, vote_tree
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.message_tags import vote_tag

PLAN = ParallelPlan.mesh(pp=2, dp=4, layers=8)


def trained(monkeypatch: pytest.MonkeyPatch) -> tuple[list[object], int]:
    """Losses, norms and parameters after two steps; number of votes that were sent in the second one."""
    spec = ugly_models.job("plain", microbatches=4, steps=2)
    sent = []
    with OneProcessRun(spec, PLAN, "1f1b", graph=make_layer_graph(spec)) as run:
        seen: list[object] = []
        for core in run.cores:
            send = core.transport.send

            def counted(tensor, *, to, tag, send=send, **given):
                sent.append(tag)
                return send(tensor, to=to, tag=tag, **given)

            monkeypatch.setattr(core.transport, "send", counted)
        for step in range(2):
            (first, *_) = run.step(step)
            seen += [first.loss, first.norm]
        seen += [p.clone() for copies in run.parameters().values() for p in copies]
    return seen, sent.count(vote_tag(1))


@pytest.mark.parametrize("fanout", [2, pytest.param(1, marks=pytest.mark.ci), pytest.param(3, marks=pytest.mark.ci)])
def test_votes_by_a_tree_give_the_bits_of_direct_ones_with_two_messages_a_worker(fanout, monkeypatch):
    wanted, direct = trained(monkeypatch)
    assert direct == PLAN.world * (PLAN.world - 1)
    monkeypatch.setattr(vote_tree, "MOST_DIRECT", 2)
    monkeypatch.setattr(vote_tree, "FANOUT", fanout)
    found, by_tree = trained(monkeypatch)
    assert by_tree == 2 * (PLAN.world - 1)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("most_direct", [2, 32])
def test_each_worker_reads_ahead_once_while_it_waits_for_votes_the_root_too(most_direct, monkeypatch):
    monkeypatch.setattr(vote_tree, "MOST_DIRECT", most_direct)
    monkeypatch.setattr(vote_tree, "FANOUT", 2)
    spec, asked = ugly_models.job("plain", microbatches=4, steps=1), list[int]()
    with OneProcessRun(spec, PLAN, "1f1b", graph=make_layer_graph(spec)) as run:
        for rank, core in enumerate(run.cores):
            core.step_commit.while_votes_arrive = lambda step, rank=rank: asked.append(rank)
        run.step(0)
    assert sorted(asked) == list(range(PLAN.world))
