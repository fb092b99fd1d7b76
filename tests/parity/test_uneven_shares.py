"""Replicas with uneven shares of the blocks change no bit: every layout has the bits of one process, as even ones have."""

import pytest
import torch
from helpers.parity import Layout, check_local, share_out_anew
from helpers.shard_grid import STEPS, Cell, check

from raypar.schedule import registry
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

ONE = ((1, 3, 12),)
TWO = ((5, 5, 2), (7, 5))
THREE = ((), (9, 1, 2), (1, 11))
CELLS = [
    Layout("tangled", "1f1b", (3,), 16, blocks=16, shares=ONE),
    Layout("tangled", "gpipe", (3,), 21, blocks=16, shares=ONE),
    Layout("tangled", "1f1b", (3,), 16, blocks=16, compute="bf16", shares=ONE),
    Layout("relayed", "1f1b", (1, 2, 1), 4, shares=((), (1, 3), ())),
    Layout("branching", "1f1b", (1, 3, 2), 8, blocks=8, shares=((), (1, 5, 2), (3, 5))),
    Layout("branching", "zb-h1", (2, 3), 8, blocks=8, shares=((7, 1), ())),
    Layout("plain", "zb-v", (2, 2), 3, blocks=7, shares=((6, 1), ())),
    Layout("norms", "1f1b", (3, 1), 8, blocks=8, shares=((1, 5, 2), ())),
    *(Layout("tangled", name, (3, 2), 16, blocks=12, shares=TWO) for name in registry.NAMES),
    *(Layout("plain", name, (2, 3, 2), 12, blocks=12, shares=THREE) for name in registry.NAMES),
    *(Layout("tangled", name, (2, 2), 5, blocks=4, shares=((3, 1), (3, 1))) for name in registry.NAMES),
]
SHARDED = [
    Cell("shallow gpt", "1f1b", (3,), (2,), 10, blocks=10, shares=((1, 7, 2),)),
    Cell("shallow gpt", "zb-h1", (2, 1), (2, 3), 7, blocks=5, shares=((4, 1), ())),
    Cell("gpt", "interleaved", (2, 2), (2, 1), 5, blocks=5, shares=((4, 1), (1, 4))),
    Cell("gpt", "zb-v", (2, 2), (1, 2), 10, True, blocks=8, shares=((), (7, 1))),
    Cell("dropped", "gpipe", (2, 1), (2, 2), 4, shares=((3, 1), ())),
]


@pytest.mark.parametrize("layout", CELLS, ids=str)
def test_uneven_shares_have_the_bits_of_one_process(layout):
    check_local(layout)


@pytest.mark.parametrize("cell", SHARDED, ids=str)
def test_uneven_shares_of_shards_have_the_bits_of_the_same_shards_in_one_process(cell):
    check(cell)


CHANGED = [
    *(Layout("tangled", name, (3, 2), 16, blocks=12) for name in registry.NAMES),
    Layout("norms", "1f1b", (3, 2), 12, blocks=12, compute="bf16"),
    Layout("tangled", "1f1b", (3, 2), 12, blocks=12, compute="bf16 gradients"),
]
LATER = {1: ((5, 5, 2), ()), 2: ((1, 10, 1), (11, 1)), 4: ()}


@pytest.mark.parametrize("layout", CHANGED, ids=str)
def test_shares_that_change_between_steps_have_the_bits_of_one_process(layout):
    """Stages, optimizers and connections stay; what replicas have written into buffers is told anew."""
    check_local(layout, later=LATER)


@pytest.mark.parametrize("sequence", [False, True])
def test_shares_of_shards_change_between_steps_with_the_bits_of_a_run_that_changes_none(sequence):
    cell = Cell("shallow gpt", "1f1b", (2, 1), (2, 3), 8, sequence, blocks=8)
    found = []
    for later in ({}, {1: ((7, 1), ()), 2: ((2, 6), ())}):
        with OneProcessRun(cell.job, cell.plan, cell.schedule, graph=cell.graph) as run:
            for step in range(STEPS):
                if step in later:
                    share_out_anew(run, cell.schedule, later[step])
                losses = {report.loss for report in run.step(step)}
            found.append((losses, run.parameters()))
    (losses, parameters), (again, others) = found
    assert losses == again and len(losses) == 1
    assert all(torch.equal(a, b) for name in parameters for a, b in zip(parameters[name], others[name], strict=True))


def test_stages_that_do_not_suffice_for_another_plan_say_so():
    """Nothing has changed then: a new generation builds what is needed."""
    layout = Layout("tangled", "1f1b", (3, 2), 16, blocks=12)
    with OneProcessRun(layout.job, layout.plan, "1f1b", graph=layout.graph) as run:
        others = [layout, Layout("tangled", "zb-h1", (3, 2), 16, blocks=12), Layout("tangled", "1f1b", (2, 3), 16, blocks=12)]
        can = []
        for other in others:
            with OneProcessRun(other.job, other.plan, other.schedule, graph=other.graph) as there:
                can.append(run.cores[0].can_share_out_anew(there.cores[0].assignment))
    assert can == [True, False, False]
