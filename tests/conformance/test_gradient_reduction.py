"""The canonical reduction has the bits of one process; its bytes are those of a ring."""

import contextlib
import gc
import os
import threading
import time
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from helpers import standin
from helpers.transport_cases import CREDENTIAL, over_nccl
from torch.utils._pytree import tree_leaves

from raypar.comm import shared_memory, shared_memory_buckets
from raypar.comm.bucket_layout import BucketRoom, bucket_layouts
from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.gradient_buckets import CanonicalBucket, HalvingBucket, ReplicaGroup
from raypar.comm.gradient_reduction import CanonicalReduction, FastReduction
from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import RoutineWork, run_routine
from raypar.comm.shared_memory_buckets import SharedMemoryBucket
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.errors import CommError
from raypar.plan.addition_tree import covering_nodes, fold_tree
from raypar.plan.microbatches import contiguous_part

pytestmark = pytest.mark.part(5)

SHAPES = [(48,), (33, 7), (5,), (128, 16), (1,), (0,), (64,), (3, 17)]
UNUSED = 4
"""This parameter has no gradient anywhere."""


def block_gradients(blocks, dtype=torch.float32, seed=0):
    """Gradients [block][parameter] whose sums depend on the order; some undefined, some negative zero."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for block in range(blocks):
        scale = [10.0 ** torch.randint(-3, 5, (1,), generator=generator).item() for _ in SHAPES]
        row = [(torch.randn(s, generator=generator) * k).to(dtype) for s, k in zip(SHAPES, scale, strict=True)]
        row[UNUSED] = None
        row[6] = torch.full(SHAPES[6], -0.0, dtype=dtype)
        if block % 3 == 1:
            row[2] = None
        made.append(row)
    return made


def by_one_process(gradients):
    blocks = len(gradients)
    return [fold_tree({(b, b + 1): gradients[b][i] for b in range(blocks)}, (0, blocks), torch.add) for i in range(len(SHAPES))]


def parameters(dtype=torch.float32):
    return [(torch.Size(s), dtype) for s in SHAPES]


def sums_of(gradients, index, run):
    """A parameter's sums over the subtrees of some blocks, which a reduction may write to."""
    leaves = {(b, b + 1): None if gradients[b][index] is None else gradients[b][index].clone() for b in run}
    return {node: {index: fold_tree(leaves, node, torch.add)} for node in covering_nodes(run, len(gradients))}


POOLS = [8 << 20, 16 << 10]
"""Memory of all buckets: room for the gradients; less."""


def replica(transport, kind, runs, gradients, steps=2, bucket_bytes=1500, pool_bytes=8 << 20):
    """The routine of one replica: declares gradients ready in its own order, works in between."""
    blocks = len(gradients)
    dtype = gradients[0][0].dtype
    group = range(len(runs))
    made = kind(
        transport,
        group=group,
        runs=runs,
        block_count=blocks,
        parameters=parameters(dtype),
        bucket_bytes=bucket_bytes,
        pool_bytes=pool_bytes,
    )
    run = runs[transport.rank]
    results = []
    for step in range(steps):
        made.start()
        order = sorted(range(len(SHAPES)), key=lambda i: (i * 5 + transport.rank + step) % len(SHAPES))
        for index in order if len(run) else ():
            yield RoutineWork("backward", 1 + transport.rank)
            made.submit_gradients([index], sums_of(gradients, index, run))
        results = yield from made.finish()
        yield from made.stream_waits.finish()
    return results


def as_reduced(totals):
    """Totals as several replicas have them: -0.0 where there is no gradient, which only the votes tell."""
    return [torch.full(SHAPES[i], -0.0) if total is None else total for i, total in enumerate(totals)]


def same_bits(got, want):
    if got is None or want is None:
        return got is want
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and bytes(got.view(-1).view(torch.uint8)) == bytes(want.view(-1).view(torch.uint8))
    )


@pytest.mark.parametrize("pool_bytes", POOLS)
@pytest.mark.parametrize("replicas", range(1, 6))
@pytest.mark.parametrize("blocks", range(1, 10))
def test_every_number_of_replicas_has_the_bits_of_one_process(replicas, blocks, pool_bytes):
    gradients = block_gradients(blocks, seed=10 * replicas + blocks)
    want = by_one_process(gradients)
    want = want if replicas == 1 else as_reduced(want)
    mesh = LocalMesh(replicas)
    runs = [contiguous_part(r, replicas, blocks) for r in range(replicas)]
    routines = [replica(t, CanonicalReduction, runs, gradients, pool_bytes=pool_bytes) for t in mesh.transports]
    for results in CooperativeScheduler(seed=blocks).run(routines, mesh):
        assert [same_bits(got, one) for got, one in zip(results, want, strict=True)] == [True] * len(SHAPES)
        assert all(t is None or t.data_ptr() % 64 == 0 or t.numel() == 0 for t in results)


@pytest.mark.parametrize("share", [(1, 3, 12), (12, 3, 1), (15, 1), (7, 9), (5, 1, 1, 9), (2, 8, 6)], ids=str)
def test_any_shares_of_the_blocks_have_the_bits_of_one_process(share):
    gradients = block_gradients(16, seed=sum(n * n for n in share))
    want = as_reduced(by_one_process(gradients))
    mesh = LocalMesh(len(share))
    runs = [range(stop - n, stop) for n, stop in zip(share, accumulate(share), strict=True)]
    routines = [replica(t, CanonicalReduction, runs, gradients) for t in mesh.transports]
    for results in CooperativeScheduler(seed=1).run(routines, mesh):
        assert [same_bits(got, one) for got, one in zip(results, want, strict=True)] == [True] * len(SHAPES)


@pytest.mark.parametrize("kind", [CanonicalReduction, FastReduction])
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_what_one_replica_notes_of_a_parameter_all_know_also_those_without_blocks(kind, replicas):
    """In this step alone; it is no gradient."""
    blocks = 3
    mesh, runs = LocalMesh(replicas), [contiguous_part(r, replicas, blocks) for r in range(replicas)]
    gradients = block_gradients(blocks)

    def missing(run):
        return {i for i in range(len(SHAPES)) if all(gradients[block][i] is None for block in run)}

    def routine(transport):
        made = kind(transport, group=range(replicas), runs=runs, block_count=blocks, parameters=parameters())
        run = runs[transport.rank]
        busy, told = bool(run), []
        for notes in ((UNUSED, 1), (), (transport.rank, 7)):
            made.parameters_to_mark = lambda notes=notes: notes if busy else ()
            made.start()
            for index in range(len(SHAPES)) if busy else ():
                made.submit_gradients([index], sums_of(gradients, index, runs[transport.rank]))
            results = yield from made.finish()
            assert results[0] is not None and made.defined_here == (set(range(len(SHAPES))) - {UNUSED, *missing(run)})
            told.append(made.marked_parameters)
        return told

    working = {rank for rank in range(replicas) if runs[rank]}
    for told in CooperativeScheduler().run([routine(t) for t in mesh.transports], mesh):
        assert told == [{UNUSED, 1}, set(), working | {7}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_too(dtype):
    gradients = block_gradients(5, dtype)
    mesh = LocalMesh(3)
    runs = [contiguous_part(r, 3, 5) for r in range(3)]
    for results in CooperativeScheduler().run([replica(t, CanonicalReduction, runs, gradients) for t in mesh.transports], mesh):
        want = [
            total if total is not None else torch.full(SHAPES[i], -0.0, dtype=dtype)
            for i, total in enumerate(by_one_process(gradients))
        ]
        assert all(same_bits(a, b) for a, b in zip(results, want, strict=True))


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("kind", ["local", "cpu", standin.needs_cupy("nccl")])
def test_threads_have_the_bits_of_one_process(kind, replicas):
    if kind == "nccl":
        standin.load()
    gradients = block_gradients(8)
    runs = [contiguous_part(r, replicas, 8) for r in range(replicas)]
    results = [None] * replicas
    local = LocalMesh(replicas)
    meshes = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(replicas)]
    addresses = [mesh.address for mesh in meshes]

    def body(rank):
        end = local.transports[rank]
        if kind != "local":
            end = meshes[rank].connect(rank=rank, size=replicas, addresses=addresses, generation=1, deadline_s=10)
        if kind == "nccl":
            end = over_nccl(end, f"device {rank}")
        results[rank] = run_routine(replica(end, CanonicalReduction, runs, gradients, steps=5), timeout_s=10)
        end.close()

    threads = [threading.Thread(target=body, args=(r,)) for r in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for mesh in meshes:
        mesh.close()
    for result in results:
        assert all(same_bits(a, b) for a, b in zip(result, as_reduced(by_one_process(gradients)), strict=True))


@pytest.mark.parametrize("kind", [CanonicalReduction, FastReduction])
def test_two_stages_of_one_group_do_not_mix_though_their_buckets_are_posted_in_different_orders(kind):
    """Interleaved schedules: the same replicas reduce several chunks at the same time."""
    mesh = LocalMesh(2)
    runs = [range(1), range(1, 2)]

    def routine(t):
        made = [
            kind(
                t,
                group=[0, 1],
                runs=runs,
                block_count=2,
                parameters=[(torch.Size((64,)), torch.float32)] * 3,
                bucket_bytes=64,
                channel=chunk,
            )
            for chunk in range(2)
        ]
        for one in made:
            one.start()
        for chunk in (0, 1) if t.rank else (1, 0):
            for index in range(3):
                yield RoutineWork("backward", 1.0)
                made[chunk].submit_gradients([index], {(t.rank, t.rank + 1): {index: torch.full((64,), 10.0 * chunk + index)}})
        first = yield from made[0].finish()
        second = yield from made[1].finish()
        return [[int(g[0]) for g in grads] for grads in (first, second)]

    assert CooperativeScheduler(1).run([routine(t) for t in mesh.transports], mesh) == [[[0, 2, 4], [20, 22, 24]]] * 2


def test_the_gradients_above_do_depend_on_the_order_of_addition():
    gradients = block_gradients(8)
    straight = [None] * len(SHAPES)
    for row in gradients:
        straight = [g if s is None else s if g is None else s + g for s, g in zip(straight, row, strict=True)]
    assert not all(same_bits(a, b) for a, b in zip(straight, by_one_process(gradients), strict=True))


@pytest.mark.parametrize("replicas, blocks", [(2, 2), (2, 8), (4, 4), (4, 16), (3, 3), (5, 5)])
def test_bytes_are_those_of_a_ring_where_runs_are_complete_subtrees(replicas, blocks):
    numel = 16 * 60 * 7
    mesh = LocalMesh(replicas)
    runs = [contiguous_part(r, replicas, blocks) for r in range(replicas)]

    def routine(transport):
        made = CanonicalReduction(
            transport,
            group=range(replicas),
            runs=runs,
            block_count=blocks,
            parameters=[(torch.Size((numel // 7,)), torch.float32)] * 7,
            bucket_bytes=numel,
        )
        made.start()
        for index in reversed(range(7)):
            made.submit_gradients(
                [index], {n: {index: torch.ones(numel // 7)} for n in covering_nodes(runs[transport.rank], blocks)}
            )
        return (yield from made.finish())

    CooperativeScheduler().run([routine(t) for t in mesh.transports], mesh)
    for transport in mesh.transports:
        ledger = transport.ledger.as_dict()
        moved = sum(ledger[phase]["sent"] for phase in ("halving_all_reduce", "all_to_all", "all_gather") if phase in ledger)
        talk = 33 if replicas == 2 else 0  # once: where the memory is that both can read, and whether they can
        assert (moved - talk) * replicas == 2 * (replicas - 1) * numel * 4
        assert "all_reduce" not in ledger, "which gradients are defined is told with the votes"


def buffers_of(made):
    """Bytes of all memory in which a reduction's buckets lie; what two replicas see counts for the one that made it."""
    found = {}
    for bucket in made.buckets:
        held = bucket._sums[made.own_index] if isinstance(bucket, SharedMemoryBucket) else vars(bucket)
        for tensor in tree_leaves(held):
            if isinstance(tensor, torch.Tensor):
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("replicas, blocks", [(2, 2), (2, 3), (3, 3), (4, 4), (5, 12)])
@pytest.mark.parametrize("kind", [CanonicalReduction, FastReduction])
def test_buckets_take_no_more_than_their_pool_and_totals_lie_where_the_gradients_were(kind, replicas, blocks):
    size, pool_bytes = 40_000, 256 << 10
    mesh, runs = LocalMesh(replicas), [contiguous_part(r, replicas, blocks) for r in range(replicas)]

    def routine(transport):
        made = kind(
            transport,
            group=range(replicas),
            runs=runs,
            block_count=blocks,
            parameters=[(torch.Size((size,)), torch.float32)] * 5,
            pool_bytes=pool_bytes,
        )
        nodes, taken = covering_nodes(runs[transport.rank], blocks), []
        for _ in range(3):
            made.start()
            given = {}
            for index in reversed(range(5)):
                rows = {node: {index: torch.full((size,), 1.0 + index)} for node in nodes}
                given[index] = {row[index].data_ptr() for row in rows.values()}
                made.submit_gradients([index], rows)
                yield RoutineWork("backward", 1.0)
            results = yield from made.finish()
            subtrees = sum(len(covering_nodes(run, blocks)) for run in runs)
            assert all(bool((total == (1.0 + index) * subtrees).all()) for index, total in enumerate(results))
            assert all(total.data_ptr() in given[index] for index, total in enumerate(results))
            taken.append(buffers_of(made))
        return taken

    for taken in CooperativeScheduler().run([routine(t) for t in mesh.transports], mesh):
        assert all(pool_bytes / 2 < one <= pool_bytes for one in taken), taken


class ByOwners(CanonicalReduction):
    """Replicas send each owner its slice, whatever their number."""

    def _bucket(self, layout, replicas):
        return CanonicalBucket(replicas, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("replicas, blocks", [(4, 4), (4, 8), (8, 8), pytest.param(16, 16, marks=pytest.mark.ci)])
def test_halving_has_the_bits_and_bytes_of_owners_in_twice_log2_r_messages_to_the_nearest_first(replicas, blocks, dtype):
    gradients = block_gradients(blocks, dtype, seed=blocks)
    runs = [contiguous_part(r, replicas, blocks) for r in range(replicas)]
    found, meshes = [], []
    for kind in (CanonicalReduction, ByOwners):
        mesh = LocalMesh(replicas)
        sent = [[] for _ in range(replicas)]
        for transport, peers in zip(mesh.transports, sent, strict=True):
            post = transport.post_send

            def noted(message, post=post, peers=peers):
                peers.append(message.peer)
                post(message)

            transport.post_send = noted
        routines = [replica(t, kind, runs, gradients, steps=1, bucket_bytes=1 << 20) for t in mesh.transports]
        found.append(CooperativeScheduler(seed=1).run(routines, mesh))
        meshes.append((mesh, sent))
    for mine, other in zip(*found, strict=True):
        assert all(same_bits(a, b) for a, b in zip(mine, other, strict=True))
    (halved, sent), (owned, _) = meshes
    steps = [1 << step for step in range(replicas.bit_length() - 1)]
    assert sent == [[rank ^ step for step in (*steps, *reversed(steps))] for rank in range(replicas)]
    ledgers = [[t.ledger.as_dict() for t in mesh.transports] for mesh in (halved, owned)]
    assert {name for one in ledgers[0] for name in one} == {"halving_all_reduce"}
    moved = [sum(count["sent"] for one in of_all for count in one.values()) for of_all in ledgers]
    assert moved[0] == moved[1]


def test_halving_needs_no_more_memory_than_owners():
    [layout] = bucket_layouts(parameters(), 1 << 20, torch.device("cpu"), room=BucketRoom(1 << 20, (1,) * 4))
    nodes = tuple(((r, r + 1),) for r in range(4))
    replicas = ReplicaGroup(LocalMesh(4).transports[1], (0, 1, 2, 3), 1, 0, 4, nodes)
    halving, owners = HalvingBucket(replicas, layout), CanonicalBucket(replicas, layout)
    assert halving._scratch.numel() <= sum(part.numel() for r, part in enumerate(owners.parts) if r != 1)


@pytest.mark.parametrize("step", range(4))
def test_a_rank_that_leaves_in_any_step_of_halving_ends_it_for_all_who_need_it(step):
    """After `step` messages of its own: whoever waits for it fails, and those who wait for these once they leave."""
    mesh, left = LocalMesh(4), mesh_leaver()
    handles = []
    leaving = mesh.transports[2]
    post = leaving.post_send

    def leaves(message):
        if left(step):
            leaving.abort("killed")
        post(message)

    leaving.post_send = leaves
    flats = [torch.ones(100) for _ in range(4)]
    for transport in mesh.transports:
        with contextlib.suppress(CommError):
            handles.append(transport.halving_all_reduce(flats[transport.rank], torch.empty(100), group=range(4)))
    failed = []
    for _ in range(4):  # each that fails leaves, too
        for handle in handles:
            try:
                handle.done()
            except CommError:
                if handle.transport.rank not in failed:
                    failed.append(handle.transport.rank)
                    handle.transport.abort("after an error")
    assert 2 in failed
    assert all(handle.settled for handle in handles)


def mesh_leaver():
    """Returns a function that is true from the call on whose number it is given."""
    calls = iter(range(100))
    return lambda number: next(calls) == number


def pair(transport, steps, undefined_in=(), numel=500):
    """The routine of one of two replicas; the sums of every step, copied."""
    runs = [range(1), range(1, 2)]
    made = CanonicalReduction(
        transport,
        group=[0, 1],
        runs=runs,
        block_count=2,
        parameters=[(torch.Size((numel,)), torch.float32)] * 3,
        bucket_bytes=numel,
    )
    sums = []
    for step in range(steps):
        made.start()
        for index in (2, 1, 0):
            yield RoutineWork("backward", 1.0)
            gradient = None if step in undefined_in else torch.full((numel,), 100.0 * step + 10 * index + transport.rank)
            made.submit_gradients([index], {(transport.rank, transport.rank + 1): {index: gradient}})
        results = yield from made.finish()
        yield from made.stream_waits.finish()
        sums.append([r.clone() for r in results])
    return sums


WANTED = [[torch.full((500,), 200.0 * step + 20 * index + 1) for index in range(3)] for step in range(6)]


@pytest.mark.parametrize("seed", range(4))
def test_two_replicas_of_one_machine_read_each_others_memory_from_the_second_step_on(seed):
    mesh = LocalMesh(2)
    for sums in CooperativeScheduler(seed).run([pair(t, 6, undefined_in=(3,)) for t in mesh.transports], mesh):
        for step, (got, want) in enumerate(zip(sums, WANTED, strict=True)):
            want = [torch.zeros_like(one) for one in want] if step == 3 else want
            assert all(map(torch.equal, got, want)), step
    for transport in mesh.transports:
        ledger = transport.ledger.as_dict()
        assert ledger["window"]["received"] == 5 * 3 * 512 * 4
        assert ledger["all_gather"]["sent"] == 3 * 512 * 4 + 33 + 5, "then one byte a step: it is there"


@pytest.mark.parametrize("broken", ["no windows", "one has none", "one cannot read the other's", "another process's file"])
def test_replicas_that_cannot_read_each_others_memory_go_on_with_messages(broken, monkeypatch):
    def refused(*given):
        raise OSError("not here")

    made, opened = shared_memory.SharedMemoryBlock, shared_memory.open_shared_memory
    calls = []

    def sometimes(call, *given):
        calls.append(call)
        return refused() if len(calls) == 2 else call(*given)

    if broken == "no windows":
        monkeypatch.setattr(shared_memory_buckets, "SharedMemoryBlock", refused)
    elif broken == "one has none":
        monkeypatch.setattr(shared_memory_buckets, "SharedMemoryBlock", lambda nbytes: sometimes(made, nbytes))
    elif broken == "one cannot read the other's":
        monkeypatch.setattr(shared_memory_buckets, "open_shared_memory", lambda card, nbytes: sometimes(opened, card, nbytes))
    else:
        monkeypatch.setattr(
            shared_memory_buckets, "open_shared_memory", lambda card, nbytes: opened(card + torch.tensor([0, 0, 0, 1]), nbytes)
        )
    before = set(os.listdir("/proc/self/fd"))
    mesh = LocalMesh(2)
    for sums in CooperativeScheduler().run([pair(t, 3) for t in mesh.transports], mesh):
        assert all(torch.equal(a, b) for got, want in zip(sums, WANTED, strict=False) for a, b in zip(got, want, strict=True))
    assert all("window" not in t.ledger.as_dict() for t in mesh.transports)
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before  # those of former tests may still be closing


def test_windows_leave_no_descriptor_and_no_mapping_behind():
    def mappings():
        return {line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:raypar" in line}

    before, mapped_before = set(os.listdir("/proc/self/fd")), mappings()
    mesh = LocalMesh(2)
    for _ in CooperativeScheduler().run([pair(t, 3) for t in mesh.transports], mesh):
        assert set(os.listdir("/proc/self/fd")) <= before  # those of former tests may still be closing
    deadline = time.monotonic() + 10.0
    while mappings() - mapped_before and time.monotonic() < deadline:
        gc.collect()  # does nothing while a thread of a former test is collecting
    assert not mappings() - mapped_before


def test_fast_adds_the_same_numbers_in_another_order():
    gradients = block_gradients(6)
    mesh = LocalMesh(3)
    runs = [contiguous_part(r, 3, 6) for r in range(3)]
    for results in CooperativeScheduler().run([replica(t, FastReduction, runs, gradients) for t in mesh.transports], mesh):
        for got, want in zip(results, by_one_process(gradients), strict=True):
            torch.testing.assert_close(got, torch.zeros(got.shape) if want is None else want, rtol=1e-4, atol=1e-1)


def test_a_forgotten_parameter_is_named():
    mesh = LocalMesh(2)
    made = CanonicalReduction(
        mesh.transports[0], group=[0, 1], runs=[range(1), range(1, 2)], block_count=2, parameters=parameters()
    )
    made.start()
    with pytest.raises(CommError, match="8 parameters"):
        run_routine(made.finish())
    made.submit_gradients([3], {})
    with pytest.raises(CommError, match="parameter 3 was declared ready twice"):
        made.submit_gradients([3], {})
