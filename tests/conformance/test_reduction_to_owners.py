"""Gradients that are reduced to the owners of runs alone: the totals of one process, in half of the bytes."""

import pytest
import torch
from test_gradient_reduction import POOLS, SHAPES, as_reduced, block_gradients, by_one_process, parameters, same_bits, sums_of

from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.gradient_reduction import CanonicalReduction
from raypar.comm.holder_buckets import OwnerBucket
from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import RoutineWork
from raypar.comm.shared_memory_buckets import SharedMemoryOwnerBucket
from raypar.plan.addition_tree import covering_nodes
from raypar.plan.microbatches import contiguous_part
from raypar.plan.nested_shares import NestedTensorShares

pytestmark = pytest.mark.part(4)
PIECE = 16


def owners_of(replicas):
    """By parameter: the runs of each replica."""
    shares = NestedTensorShares(tuple(torch.Size(s).numel() for s in SHAPES), replicas, PIECE)
    found = [[[] for _ in range(replicas)] for _ in SHAPES]
    for replica in range(replicas):
        for index, start, stop in shares.runs_of_owner(replica):
            found[index][replica].append((start, stop))
    return found


def replica(transport, runs, gradients, steps=3, pool_bytes=8 << 20, holders=1):
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
        holders=holders,
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
        assert not any(one is not None for one in results), "nobody has a whole one"
        found.append(totals)
    return found, made.buckets


def runs_held(owners, index, number, holders):
    """The runs of a parameter that a replica holds, ascending."""
    return sorted(run for before in range(holders) for run in owners[index][number - before])


def check(results, gradients, holders=1):
    """Each holder has the totals of its runs, and nobody anything else."""
    want = as_reduced(by_one_process(gradients))
    owners = owners_of(len(results))
    for number, (steps, _) in enumerate(results):
        for totals in steps:
            assert totals.keys() == set(range(len(SHAPES)))
            for index, mine in totals.items():
                runs = [want[index].reshape(-1)[start:stop] for start, stop in runs_held(owners, index, number, holders)]
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
    in_place = replicas == 2 and blocks in (2, 4, 8)
    assert (SharedMemoryOwnerBucket if in_place else OwnerBucket) in kinds, "two replicas read each other's memory"


@pytest.mark.parametrize("pool_bytes", POOLS)
@pytest.mark.parametrize("replicas", range(3, 6))
@pytest.mark.parametrize("blocks", [1, 3, 4, 7])
def test_two_holders_have_the_bits_of_one_process_and_each_bucket_has_each_element_once(replicas, blocks, pool_bytes):
    gradients = block_gradients(blocks, seed=10 * replicas + blocks)
    mesh = LocalMesh(replicas)
    runs = [contiguous_part(r, replicas, blocks) for r in range(replicas)]
    routines = [replica(t, runs, gradients, pool_bytes=pool_bytes, holders=2) for t in mesh.transports]
    results = CooperativeScheduler(seed=blocks).run(routines, mesh)
    check(results, gradients, holders=2)
    for number, (_, buckets) in enumerate(results):
        parts = sorted(part[:3] for bucket in buckets for part in bucket.layout.parts)
        assert sum(stop - start for _, start, stop in parts) == sum(torch.Size(shape).numel() for shape in SHAPES)
        subtrees = len(covering_nodes(runs[number], blocks))
        for bucket in buckets:
            first = min((piece for piece in bucket.pieces if piece.numel()), key=torch.Tensor.data_ptr, default=None)
            last = max(
                (piece for piece in bucket.pieces if piece.numel()), key=lambda of: of.data_ptr() + of.nbytes, default=first
            )
            if first is not None:
                room = last.data_ptr() + last.nbytes - first.data_ptr()
                assert room <= subtrees * bucket.layout.nbytes, "what goes to two holders is there once"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    gradients = block_gradients(5, dtype, seed=3)
    mesh = LocalMesh(3)
    runs = [contiguous_part(r, 3, 5) for r in range(3)]
    results = CooperativeScheduler(seed=1).run([replica(t, runs, gradients) for t in mesh.transports], mesh)
    want, owners = by_one_process(gradients), owners_of(3)
    for number, (steps, _) in enumerate(results):
        for totals in steps:
            for index, mine in totals.items():
                if want[index] is not None:
                    runs = [want[index].reshape(-1)[start:stop] for start, stop in owners[index][number]]
                    assert all(map(same_bits, mine, runs))


@pytest.mark.parametrize("replicas, blocks, holders", [(2, 2, 1), (3, 3, 1), (4, 8, 1), (3, 3, 2), (4, 8, 2), (5, 5, 2)])
def test_the_bytes_are_half_of_a_ring_for_each_holder(replicas, blocks, holders):
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
            holders=holders,
        )
        made.start()
        for index in reversed(range(7)):
            nodes = covering_nodes(runs[transport.rank], blocks)
            made.submit_gradients([index], {node: {index: torch.ones(size)} for node in nodes})
        return (yield from made.finish())

    CooperativeScheduler().run([routine(t) for t in mesh.transports], mesh)
    sent = [transport.ledger.as_dict()["all_to_all"]["sent"] for transport in mesh.transports]
    assert sum(sent) == holders * (replicas - 1) * 7 * size * 4
