"""Every byte that a training step with shards moves is in a formula (integers, not bounds)."""

import pytest
import torch
from helpers.shard_grid import BATCH, DEPTHS, HEADS, SEQ, SHALLOW, VOCAB, WIDTH, Cell, graph, layout_for

from raypar.comm.collectives import ONE_PHASE_BYTES
from raypar.model.layer_skeletons import parameter_shapes
from raypar.model.tensor_parallel.compute_shard_layout import held_elements_by_layer
from raypar.plan import ParallelPlan
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

WORD = 8
"""Bytes of a float64."""
DEPTH = DEPTHS[SHALLOW]
LAYERS = DEPTH + 2


def moved(plan: ParallelPlan, microbatches: int, *, sequence: bool = False) -> list[dict[str, dict[str, int]]]:
    """By rank, the ledger of one training step after the first, in which replicas may get acquainted."""
    job = Cell(SHALLOW, "1f1b", (1,), (1,), microbatches, sequence).job
    with OneProcessRun(job, plan, "1f1b", graph=graph(SHALLOW)) as local:
        local.step(0)
        before = [core.transport.ledger.as_dict() for core in local.cores]
        local.step(1)
        after = [core.transport.ledger.as_dict() for core in local.cores]
    return [
        {name: {key: now[name][key] - then.get(name, {}).get(key, 0) for key in now[name]} for name in now}
        for then, now in zip(before, after, strict=True)
    ]


def total(ledgers: list[dict[str, dict[str, int]]], name: str, key: str = "sent") -> int:
    return sum(ledger.get(name, {}).get(key, 0) for ledger in ledgers)


def all_reduce(t: int, elements: int) -> int:
    """Bytes that t shards send together: as a ring, each 2 (t-1)/t of all; up to 4 KiB all to everybody, in one phase."""
    return (t if elements * WORD <= ONE_PHASE_BYTES else 2) * (t - 1) * elements * WORD


def partial_elements() -> int:
    """Norms: 4 tensors a block and 2 of the head, [width] each."""
    return (4 * DEPTH + 2) * WIDTH


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_megatrons_four_all_reduces_a_layer_and_microbatch(shards, microbatches):
    """Of b s h elements, 2 forward and 2 backward; the embedding's and the head's are one more each; nothing is partial."""
    ledgers = moved(ParallelPlan.mesh(tp=shards, layers=LAYERS), microbatches)
    each = all_reduce(shards, BATCH // microbatches * SEQ * WIDTH)
    assert total(ledgers, "all_reduce") == microbatches * (4 * DEPTH + 2) * each
    assert total(ledgers, "all_reduce", "messages") == shards * microbatches * (4 * DEPTH + 2)
    # The loss: maximum, sum and target's logit of every token, from every shard to every other.
    assert total(ledgers, "all_gather") == shards * (shards - 1) * 3 * BATCH * SEQ * WORD
    assert not any("reduce_scatter" in ledger or "all_to_all" in ledger for ledger in ledgers)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_sequence_parallelism_moves_the_same_volume(shards, microbatches):
    """Half of it gathered, half scattered; the positions' gradients and the norms' are all-reduced besides."""
    ledgers = moved(ParallelPlan.mesh(tp=shards, layers=LAYERS), microbatches, sequence=True)
    half = (shards - 1) * (4 * DEPTH + 2) * BATCH * SEQ * WIDTH * WORD
    loss = shards * (shards - 1) * 3 * BATCH * SEQ * WORD
    assert total(ledgers, "reduce_scatter") == half
    assert total(ledgers, "all_gather") == half + loss
    positions = microbatches * all_reduce(shards, SEQ * WIDTH)
    assert total(ledgers, "all_reduce") == positions + all_reduce(shards, partial_elements())
    assert total(ledgers, "all_reduce", "messages") == shards * (microbatches + 1)


@pytest.mark.ci
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_replicas_reduce_what_each_shard_holds_and_no_more(shards, sequence):
    """Two replicas read each other's sums of their shard's gradients: 2 (R-1)/R of their bytes, each parameter padded to 16
    elements; and where there are shards 4 bytes a parameter say which gradients are parts of sums over them."""
    plan = ParallelPlan.mesh(dp=2, tp=shards, layers=LAYERS)
    alone = moved(ParallelPlan.mesh(tp=shards, layers=LAYERS), 2, sequence=sequence)
    both = moved(plan, 2, sequence=sequence)
    layout = layout_for(SHALLOW, shards)
    shapes = parameter_shapes(graph(SHALLOW))
    for rank, ledger in enumerate(both):
        shard = plan.roles[rank][0].shard
        sizes = [
            (
                layout.cuts[n].element_ranges(layout.cuts[n].indices_by_shard[shard], s.numel())
                if n in layout.cuts
                else ((0, s.numel()),)
            )
            for n, s in shapes.items()
        ]
        padded = sum(-(-sum(b - a for a, b in spans) // 16) * 16 for spans in sizes)
        assert sum(b - a for spans in sizes for a, b in spans) == sum(held_elements_by_layer(graph(SHALLOW), layout, shard))
        assert ledger["window"]["sent"] == padded * WORD
    more = total(both, "all_reduce") - total(alone, "all_reduce")
    counts = 2 * shards * len(shapes) * 4 if shards > 1 else 0
    assert more == counts + (all_reduce(shards, partial_elements()) if sequence and shards > 1 else 0)


NUMBERS_OF_A_BALLOT = range(1 + 3 * 3, 1 + 3 * 3 + 3 * 3 + 1)
"""A vote says that the worker is ready, and three sums of three numbers and at most three digits each, however many parameters
and microbatches there are."""


def test_values_between_stages_are_sent_once_to_every_shard_of_the_next():
    """Whole values: b s h forward to each shard of the second stage, the same back to the first's; the votes besides."""
    for shards in ((1, 2), (2, 1), (2, 4), (4, 2), (2, 2)):
        ledgers = moved(ParallelPlan.of((1, 1), shards, layers=LAYERS), 2)
        value = BATCH * SEQ * WIDTH * WORD
        votes = sum(shards) - 1
        ranks = range(sum(shards))
        sent = [ledger["send"]["sent"] for ledger in ledgers]
        forward = [len(range(rank, shards[1], shards[0])) if rank < shards[0] else 0 for rank in ranks]
        back = [0 if rank < shards[0] else len(range(rank - shards[0], shards[0], shards[1])) for rank in ranks]
        for whole, f, b in zip(sent, forward, back, strict=True):
            ballot, rest = divmod(whole - (f + b) * value, votes)
            assert not rest and ballot // WORD in NUMBERS_OF_A_BALLOT


def test_shards_hold_their_part_of_what_is_cut_and_all_of_the_rest():
    """Memory a shard: parameters, and twice as much for AdamW."""
    for shards in (1, 2, 4):
        job = Cell(SHALLOW, "1f1b", (1,), (1,), 2).job
        with OneProcessRun(job, ParallelPlan.mesh(tp=shards, layers=LAYERS), "1f1b", graph=graph(SHALLOW)) as local:
            local.step(0)
            for core in local.cores:
                want = sum(held_elements_by_layer(graph(SHALLOW), layout_for(SHALLOW, shards), core.rank))
                (stage,) = core.stages.values()
                state = core.step_commit.optimizers[0, core.rank].state
                assert sum(p.numel() for p in stage.parameters.values()) == want
                kept = [state[p][kind] for p in stage.parameters.values() for kind in ("exp_avg", "exp_avg_sq")]
                assert sum(tensor.numel() for tensor in kept) == 2 * want
    whole = sum(shape.numel() for shape in parameter_shapes(graph(SHALLOW)).values())
    ends = 2 * VOCAB * WIDTH
    assert HEADS * 4 == WIDTH and whole == DEPTH * (12 * WIDTH**2 + 13 * WIDTH) + ends + (SEQ + 1) * WIDTH + 2 * WIDTH
    assert torch.get_num_threads() == 1
