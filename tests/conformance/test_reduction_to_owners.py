"""Gradients that are reduced to the owners of runs alone: the totals of one process, in half of the bytes."""

import pytest
import torch
from test_gradient_reduction import POOLS, SHAPES, as_reduced, block_gradients, by_one_process, parameters, same_bits, sums_of

from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.gradient_buckets import OwnerBucket
from raypar.comm.gradient_reduction import CanonicalReduction
from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import RoutineWork
from raypar.comm.shared_memory_buckets import SharedMemoryOwnerBucket
from raypar.plan.addition_tree import covering_nodes
from raypar.plan.microbatches import contiguous_part
from raypar.plan.nested_shares import NestedTensorShares

pytestmark = pytest.mark.part(4)
PIECE = 16
WHOLE = 3
"""This parameter is reduced to all: it is tied to one of another stage."""


def owners_of(replicas):
    """By parameter: the runs of each replica; None for the one that all get."""
    shares = NestedTensorShares(tuple(torch.Size(s).numel() for s in SHAPES), replicas, PIECE)
    found = [[[] for _ in range(replicas)] for _ in SHAPES]
    for replica in range(replicas):
        for index, start, stop in shares.runs_of_owner(replica):
            found[index][replica].append((start, stop))
    found[WHOLE] = None
    return found


def replica(transport, runs, gradients, steps=3, pool_bytes=8 << 20):
    """One replica's routine: declares gradients ready in an order of its own. Returns what each step gave, and its buckets."""
    blocks, dtype = len(gradients), gradients[0][0].dtype
    made = CanonicalReduction(
        transport,
        group=range(len(runs)),
        runs=runs,
        block_count=blocks,
        parameters=parameters(dtype),
        bucket_bytes=1500,
        owners=owners_of(len(runs)),
        pool_bytes=pool_bytes,
    )
    run, found = runs[transport.rank], []
    for step in range(steps):
        made.start()
        for index in (
            sorted(range(len(SHAPES)), key=lambda i: (i * 5 + transport.rank + step) % len(SHAPES)) if len(run) else ()
        ):
            yield RoutineWork("backward", 1 + transport.rank)
            made.submit_gradients([index], sums_of(gradients, index, run))
        results = yield from made.finish()
        yield from made.stream_waits.finish()
        totals = {index: [one.clone() for one in of] for index, of in made.owned_totals.items()}
        assert all(one.data_ptr() % 64 == 0 for of in made.owned_totals.values() for one in of)
        found.append((results[WHOLE].clone(), totals, [index for index, one in enumerate(results) if one is not None]))
    return found, made.buckets


def check(results, gradients):
    """Each owner has the totals of its runs, and nobody anything else."""
    want = as_reduced(by_one_process(gradients))
    owners = owners_of(len(results))
    for number, (steps, _) in enumerate(results):
        for whole, totals, given in steps:
            assert same_bits(whole, want[WHOLE]) and given == [WHOLE]
            assert totals.keys() == set(range(len(SHAPES))) - {WHOLE}
            for index, mine in totals.items():
                runs = [want[index].reshape(-1)[start:stop] for start, stop in owners[index][number]]
                assert len(mine) == len(runs) and all(map(same_bits, mine, runs)), (number, index)


@pytest.mark.parametrize("pool_bytes", POOLS)
@pytest.mark.parametrize("replicas", range(2, 6))
@pytest.mark.parametrize("blocks", [1, 2, 4, 5, 7, 8])
def test_owners_have_the_bits_of_one_process(replicas, blocks, pool_bytes):
    gradients = block_gradients(blocks, seed=10 * replicas + blocks)
    mesh = LocalMesh(replicas)
    runs = [contiguous_part(r, replicas, blocks) for r in range(replicas)]
    routines = [replica(t, runs, gradients, pool_bytes=pool_bytes) for t in mesh.transports]
    results = CooperativeScheduler(seed=blocks).run(routines, mesh)
    check(results, gradients)
    kinds = {type(bucket) for _, buckets in results for bucket in buckets}
    in_place = replicas == 2 and blocks in (2, 4, 8) and pool_bytes is not None
    assert (SharedMemoryOwnerBucket if in_place else OwnerBucket) in kinds, "two replicas read each other's memory"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    gradients = block_gradients(5, dtype, seed=3)
    mesh = LocalMesh(3)
    runs = [contiguous_part(r, 3, 5) for r in range(3)]
    results = CooperativeScheduler(seed=1).run([replica(t, runs, gradients) for t in mesh.transports], mesh)
    want, owners = by_one_process(gradients), owners_of(3)
    for number, (steps, _) in enumerate(results):
        for _, totals, _ in steps:
            for index, mine in totals.items():
                if want[index] is not None:
                    runs = [want[index].reshape(-1)[start:stop] for start, stop in owners[index][number]]
                    assert all(map(same_bits, mine, runs))


@pytest.mark.parametrize("replicas, blocks", [(2, 2), (3, 3), (4, 8)])
def test_the_bytes_are_half_of_a_ring(replicas, blocks):
    size = 16 * 60
    mesh = LocalMesh(replicas)
    runs = [contiguous_part(r, replicas, blocks) for r in range(replicas)]
    shares = NestedTensorShares((size,) * 7, replicas, PIECE)
    owners = [[[] for _ in range(replicas)] for _ in range(7)]
    for number in range(replicas):
        for index, start, stop in shares.runs_of_owner(number):
            owners[index][number].append((start, stop))

    def routine(transport):
        made = CanonicalReduction(
            transport,
            group=range(replicas),
            runs=runs,
            block_count=blocks,
            parameters=[(torch.Size((size,)), torch.float32)] * 7,
            bucket_bytes=size,
            owners=owners,
        )
        made.start()
        for index in reversed(range(7)):
            nodes = covering_nodes(runs[transport.rank], blocks)
            made.submit_gradients([index], {node: {index: torch.ones(size)} for node in nodes})
        return (yield from made.finish())

    CooperativeScheduler().run([routine(t) for t in mesh.transports], mesh)
    sent = [transport.ledger.as_dict()["all_to_all"]["sent"] for transport in mesh.transports]
    assert sum(sent) == (replicas - 1) * 7 * size * 4
