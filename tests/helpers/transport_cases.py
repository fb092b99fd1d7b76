"""What every transport must do, as routines: the same text runs in threads, in processes and on the virtual clock.

A case is a routine of one rank; it checks its own results with `assert`. All cases work for any number of ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from helpers import standin

from raypar.comm.collectives import even_slices
from raypar.comm.nccl.connect import connect_nccl as connect_nccl
from raypar.comm.recursive_halving import halving_scratch, halving_steps
from raypar.comm.routine import Routine, RoutineWait, RoutineWork, run_routine
from raypar.comm.routines_in_turn import run_in_turn
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import RunCredential
from raypar.comm.transport import Transport
from raypar.comm.virtual_shards import VirtualShards
from raypar.errors import CommError, GroupAborted

BIG = 3 << 20
"""Elements (fp32) of a message that no socket buffer can hold."""
LIMIT_S = 20.0
CREDENTIAL = RunCredential("test", b"by which the tests know each other")

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def noise(rank: int, numel: int, seed: int = 0) -> torch.Tensor:
    """Numbers that only this rank has, of sizes that make sums depend on their order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-4, 5, (numel,), generator=generator)


def over_tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """The left subtree is the largest power of two below their number; short dtypes are added in float32, rounded once."""
    if parts[0].dtype in (torch.bfloat16, torch.float16):
        return over_tree([part.float() for part in parts]).to(parts[0].dtype)
    if len(parts) == 1:
        return parts[0].clone()
    left = 1
    while left * 2 < len(parts):
        left *= 2
    return over_tree(parts[:left]) + over_tree(parts[left:])


def dtypes_and_shapes(t: Transport) -> Routine[None]:
    """Every dtype and odd shape round the ring, into a given tensor and into a fresh one."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    tag = 0
    for dtype in DTYPES:
        for shape in ((), (1,), (0,), (3, 0, 2), (2, 3, 4), (1, 1, 1, 1, 1, 7), (300, 31)):
            mine = (torch.arange(torch.Size(shape).numel()) % 7 + t.rank).to(dtype).view(shape)
            want = (torch.arange(torch.Size(shape).numel()) % 7 + left).to(dtype).view(shape)
            out = torch.full(shape, 9).to(dtype)
            fresh = t.recv(None, source=left, tag=tag)
            given = t.recv(out, source=left, tag=tag + 1)
            sends = [t.send(mine, to=right, tag=tag), t.send(mine, to=right, tag=tag + 1)]
            tag += 2
            for handle in (fresh, given, *sends):
                yield RoutineWait(handle, f"{dtype} {shape}")
            got = fresh.tensor()
            assert got.dtype == dtype and got.shape == torch.Size(shape) and got.is_contiguous()
            assert torch.equal(got, want) and torch.equal(out, want)
            assert got.data_ptr() % 64 == 0 or got.numel() == 0
            assert got.data_ptr() != mine.data_ptr() or got.numel() == 0
    assert t.ledger.messages["send"] == t.ledger.messages["recv"] == tag
    assert t.ledger.sent["send"] == t.ledger.received["recv"]


def messages_say_whether_their_tensor_requires_a_gradient(t: Transport) -> Routine[None]:
    """Into a fresh tensor, received early or late, of every kind of number that can; a given tensor stays as it is."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    cases = [(dtype, needs) for dtype in DTYPES for needs in {False, dtype.is_floating_point or dtype.is_complex}]

    def post(tag: int) -> Any:
        dtype, needs = cases[tag // 2]
        return t.send(torch.ones(3, dtype=dtype, requires_grad=needs), to=right, tag=tag)

    sends = [post(2 * place) for place in range(len(cases))]
    for place, (dtype, needs) in enumerate(cases):
        out = torch.zeros(3, dtype=dtype)
        handles = [t.recv(None, source=left, tag=2 * place), t.recv(out, source=left, tag=2 * place + 1)]
        sends.append(post(2 * place + 1))
        for handle in handles:
            yield RoutineWait(handle, f"a message of {dtype}")
        fresh = handles[0].tensor()
        assert (fresh.requires_grad, fresh.is_leaf, out.requires_grad) == (needs, True, False), dtype
        assert torch.equal(fresh, out)
    for handle in sends:
        yield RoutineWait(handle, "send")


def lying_otherwise() -> dict[str, torch.Tensor]:
    """Tensors that do not lie in memory as new ones do, and some that nearly do."""
    flat = torch.arange(3000.0)
    waves = torch.complex(flat[:12], flat[12:24]).view(3, 4)
    return {
        "transposed": flat.view(50, 60).t(),
        "channels last": flat[:120].view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "permuted": flat.view(10, 20, 15).permute(2, 0, 1),
        "expanded": flat[:5].view(5, 1).expand(5, 7),
        "expanded from one number": torch.tensor(3.0).expand(4, 5),
        "every second row": flat.view(50, 60)[::2],
        "a part of each row": flat.view(50, 60)[:, 3:8],
        "overlapping": flat[:20].unfold(0, 6, 2),
        "at another place": flat[7:100],
        "transposed at another place": flat[5:605].view(20, 30).t(),
        "expanded and transposed": flat[:6].view(2, 1, 3).expand(2, 4, 3).transpose(0, 2),
        "empty": flat.view(50, 60)[:, :0].t(),
        "one channel, channels last": flat[:40].view(2, 1, 4, 5).to(memory_format=torch.channels_last),
        "one pixel, channels last": flat[:6].view(2, 3, 1, 1).to(memory_format=torch.channels_last),
        "one row of many": flat.view(50, 60)[:1],
        "conjugated": waves.t().conj(),
        "conjugated, as a new one": torch.complex(flat[:12], flat[12:24]).view(3, 4).conj(),
        "negated": waves.conj().imag,
        "half": flat.to(torch.bfloat16)[3:903].view(30, 30).t(),
        "numbers": torch.arange(24).view(4, 6).t(),
        "large": torch.arange(float(BIG // 8)).view(-1, 64).t(),
        "as a new one": flat.view(3, 1000),
        "a number": torch.tensor(2.5),
    }


def layouts_are_kept(t: Transport) -> Routine[None]:
    """Strides and place modulo 64 bytes, received early or late into a fresh tensor, and the numbers into a given one."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    cases = list(lying_otherwise().values())
    cases += [case.detach().requires_grad_() for case in cases if case.is_floating_point()]

    def post(tag: int) -> Any:
        return t.send(cases[tag // 2], to=right, tag=tag, keep_layout=True)

    sends = [post(2 * place) for place in range(len(cases))]
    for place, case in enumerate(cases):
        out = torch.zeros(case.shape, dtype=case.dtype)
        handles = [t.recv(None, source=left, tag=2 * place), t.recv(out, source=left, tag=2 * place + 1)]
        sends.append(post(2 * place + 1))
        for handle in handles:
            yield RoutineWait(handle, f"a tensor of {tuple(case.shape)} with strides {case.stride()}")
        fresh = handles[0].tensor()
        assert torch.equal(fresh, case) and torch.equal(out, case), place
        assert fresh.stride() == case.stride() or not case.numel(), place
        assert not case.numel() or fresh.data_ptr() % 64 == case.data_ptr() % 64, place
        assert (fresh.requires_grad, fresh.is_leaf, fresh._is_view()) == (case.requires_grad, True, False), place
    for handle in sends:
        yield RoutineWait(handle, "send")


def tags_overtake(t: Transport) -> Routine[None]:
    """Messages match by tag, whatever the order of posting on both ends; equal tags match in order."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    sends = [t.send(torch.full((1 + tag * 50,), 100 * t.rank + tag), to=right, tag=tag) for tag in range(20)]
    for tag in reversed(range(20)):
        handle = t.recv(None, source=left, tag=tag)
        yield RoutineWait(handle, f"tag {tag}")
        assert torch.equal(handle.tensor(), torch.full((1 + tag * 50,), 100 * left + tag))
    sends += [t.send(torch.tensor([number]), to=right, tag=7) for number in range(5)]
    handles = [t.recv(None, source=left, tag=7) for _ in range(5)]
    for number, handle in enumerate(handles):
        yield RoutineWait(handle, "equal tags")
        assert handle.tensor().item() == number
    big = 2**63 + 5
    sends.append(t.send(torch.tensor([1.5]), to=right, tag=big))
    handle = t.recv(None, source=left, tag=big)
    yield RoutineWait(handle, "a 64-bit tag")
    for handle in sends:
        yield RoutineWait(handle, "send")


def unexpected_then_posted(t: Transport) -> Routine[None]:
    """Messages that come before their receive, into given tensors, small and large, wait without blocking others."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    large = torch.full((BIG,), float(t.rank))
    sends = [t.send(large, to=right, tag=1), t.send(torch.tensor([t.rank]), to=right, tag=2)]
    second = t.recv(torch.zeros(1, dtype=torch.int64), source=left, tag=2)
    yield RoutineWait(second, "the message behind the large one")
    assert second.tensor().item() == left
    out = torch.empty(BIG)
    first = t.recv(out, source=left, tag=1)
    yield RoutineWait(first, "the large one")
    assert bool((out == left).all())
    for handle in sends:
        yield RoutineWait(handle, "send")


def big_both_ways(t: Transport) -> Routine[None]:
    """Everybody sends more than all buffers hold to everybody at once, before anybody receives; nothing deadlocks."""
    mine = torch.arange(t.rank, t.rank + BIG, dtype=torch.float32)  # nothing is added up: no other place, or rank, has these
    sends = [t.send(mine, to=r, tag=5) for r in range(t.size)]
    outs = [torch.empty(BIG) for _ in range(t.size)]
    recvs = [t.recv(outs[r], source=r, tag=5) for r in range(t.size)]
    for handle in recvs + sends:
        yield RoutineWait(handle, "a big message")
    for rank, out in enumerate(outs):
        assert torch.equal(out, torch.arange(rank, rank + BIG, dtype=torch.float32))


def sends_do_not_wait_for_each_other(t: Transport) -> Routine[None]:
    """A send that nobody receives yet does not hold up a later exchange."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    late = t.send(torch.ones(BIG), to=right, tag=1)
    flat = torch.ones(5)
    reduced = t.all_reduce(flat, group=range(t.size))
    yield RoutineWait(reduced, "the exchange behind it")
    assert flat.tolist() == [t.size] * 5
    got = t.recv(None, source=left, tag=1)
    yield RoutineWait(got, "receive")
    yield RoutineWait(late, "send")


def batches(t: Transport) -> Routine[None]:
    """Both ends post both directions as one batch, ring-wise and with themselves."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    out = torch.empty(BIG)
    handle = t.batch(
        [(torch.full((BIG,), float(t.rank)), right, 3), (torch.tensor([t.rank]), left, 4), (torch.tensor([5]), t.rank, 6)],
        [(out, left, 3), (None, right, 4), (None, t.rank, 6)],
    )
    yield RoutineWait(handle, "batch")
    first, second, third = handle.tensors()
    assert first.data_ptr() == out.data_ptr() and bool((out == left).all())
    assert second.item() == right and third.item() == 5
    empty = t.batch([], [])
    yield RoutineWait(empty, "empty batch")


def all_reduces(t: Transport) -> Routine[None]:
    """Sums are bit for bit those of rank order, for sizes around every internal boundary."""
    for seed, numel in enumerate((0, 1, 15, 16, 17, 1023, 1024, 1025, 5000, 70_001)):
        want = over_tree([noise(r, numel, seed) for r in range(t.size)])
        flat = noise(t.rank, numel, seed)
        handle = t.all_reduce(flat, group=range(t.size))
        yield RoutineWait(handle, f"all_reduce of {numel}")
        assert torch.equal(flat, want), numel
    for dtype, factor in ((torch.float64, 10.0), (torch.bfloat16, 10.0), (torch.float16, 0.1), (torch.int64, 10.0)):
        flat = (noise(t.rank, 3000) * factor).to(dtype)
        handle = t.all_reduce(flat, group=range(t.size))
        yield RoutineWait(handle, f"all_reduce of {dtype}")
        assert torch.equal(flat, over_tree([(noise(r, 3000) * factor).to(dtype) for r in range(t.size)]))


def all_reduce_bytes(t: Transport) -> Routine[None]:
    """A large all-reduce moves the bytes of a ring: 2 (n-1)/n N per rank."""
    flat = torch.ones(16 * 100 * t.size)
    handle = t.all_reduce(flat, group=range(t.size))
    yield RoutineWait(handle, "all_reduce")
    moved = t.ledger.as_dict()["all_reduce"]
    assert moved == {"sent": 2 * (t.size - 1) * 6400, "received": 2 * (t.size - 1) * 6400, "messages": 1}


def halving_group(size: int) -> tuple[int, ...]:
    """All of 2^k ranks, of other numbers the first and the last."""
    return tuple(range(size)) if size.bit_count() == 1 else (0, size - 1)


def halving_all_reduces(t: Transport) -> Routine[None]:
    """Sums over the tree of 2^k ranks, each rounded to the dtype."""
    group = halving_group(t.size)
    if t.rank not in group:
        return
    sent, ranks, me = 0, len(group), group.index(t.rank)
    for seed, (numel, dtype) in enumerate(
        [(n, torch.float32) for n in (0, 1, 17, 5000, 70_001)] + [(3000, d) for d in (torch.float64, torch.bfloat16)]
    ):
        slices = even_slices(numel, ranks)
        flat = noise(t.rank, numel, seed).to(dtype)
        scratch = torch.empty(halving_scratch(slices), dtype=dtype)
        handle = t.halving_all_reduce(flat, scratch, group=group)
        yield RoutineWait(handle, f"halving_all_reduce of {numel}")
        sums = [noise(r, numel, seed).to(dtype) for r in group]
        while len(sums) > 1:
            sums = [lower + upper for lower, upper in zip(sums[::2], sums[1::2], strict=True)]
        assert torch.equal(flat, sums[0]), (numel, dtype)
        steps = halving_steps(slices, me)
        sent += sum(flat[part].nbytes for step in steps for part in (step.kept, step.given))
    assert t.ledger.as_dict()["halving_all_reduce"] == {"sent": sent, "received": sent, "messages": 7}


def reduce_scatters(t: Transport) -> Routine[None]:
    """Ragged pieces, some empty; the output may be the own piece."""
    sizes = [37 * r % 50 * 100 for r in range(t.size)]
    pieces = [noise(10 * t.rank + i, n) for i, n in enumerate(sizes)]
    want = over_tree([noise(10 * r + t.rank, sizes[t.rank]) for r in range(t.size)])
    out = torch.empty(sizes[t.rank])
    handle = t.reduce_scatter(out, pieces, group=range(t.size))
    yield RoutineWait(handle, "reduce_scatter")
    assert torch.equal(out, want)
    assert t.ledger.sent["reduce_scatter"] == 4 * (sum(sizes) - sizes[t.rank])
    assert t.ledger.received["reduce_scatter"] == 4 * sizes[t.rank] * (t.size - 1)
    handle = t.reduce_scatter(pieces[t.rank], pieces, group=range(t.size))
    yield RoutineWait(handle, "reduce_scatter in place")
    assert torch.equal(pieces[t.rank], want)


def all_gathers(t: Transport) -> Routine[None]:
    """Ragged pieces, some empty, own piece in place or copied; multi-dimensional."""
    sizes = [37 * r % 50 * 100 for r in range(t.size)]
    mine = noise(t.rank, sizes[t.rank])
    pieces = [torch.zeros(n) for n in sizes]
    handle = t.all_gather(pieces, mine, group=range(t.size))
    yield RoutineWait(handle, "all_gather")
    assert all(torch.equal(p, noise(r, n)) for r, (p, n) in enumerate(zip(pieces, sizes, strict=True)))
    assert t.ledger.sent["all_gather"] == 4 * sizes[t.rank] * (t.size - 1)
    assert t.ledger.received["all_gather"] == 4 * (sum(sizes) - sizes[t.rank])
    whole = torch.zeros(t.size, 4, 5)
    whole[t.rank] = t.rank + 1
    handle = t.all_gather(list(whole), whole[t.rank], group=range(t.size))
    yield RoutineWait(handle, "all_gather in place")
    assert whole[:, 0, 0].tolist() == [r + 1 for r in range(t.size)]


def all_to_alls(t: Transport) -> Routine[None]:
    """Rank a gives rank b a piece of size f(a, b)."""

    def piece(source: int, to: int) -> torch.Tensor:
        return noise(source * 10 + to, (source * 7 + to * 3) % 5 * 1000)

    outs = [torch.empty_like(piece(r, t.rank)) for r in range(t.size)]
    handle = t.all_to_all(outs, [piece(t.rank, r) for r in range(t.size)], group=range(t.size))
    yield RoutineWait(handle, "all_to_all")
    assert all(torch.equal(out, piece(r, t.rank)) for r, out in enumerate(outs))
    assert t.ledger.sent["all_to_all"] == sum(piece(t.rank, r).nbytes for r in range(t.size) if r != t.rank)


def broadcasts(t: Transport) -> Routine[None]:
    """From every root, small and large."""
    for root in range(t.size):
        for numel in (0, 3, 100_000):
            tensor = noise(root, numel) if t.rank == root else torch.zeros(numel)
            handle = t.broadcast(tensor, root=root, group=range(t.size))
            yield RoutineWait(handle, f"broadcast from {root}")
            assert torch.equal(tensor, noise(root, numel))


def barriers(t: Transport) -> Routine[None]:
    """Nobody leaves before the last one has come (checked with a message that must be there already)."""
    for turn in range(3):
        for peer in range(t.size):
            if peer != t.rank:
                t.send(torch.tensor([turn]), to=peer, tag=turn)
        yield RoutineWork("late", float(t.rank))
        yield RoutineWait(t.barrier(group=range(t.size)), f"barrier {turn}")
    for turn in range(3):
        for peer in range(t.size):
            if peer != t.rank:
                handle = t.recv(None, source=peer, tag=turn)
                yield RoutineWait(handle, "what was sent before the barrier")


def subgroups(t: Transport) -> Routine[None]:
    """Overlapping groups, groups of one, two channels of one group posted in different orders by different ranks."""
    groups = [g for g in ([0], [0, t.size - 1], list(range(1, t.size)), list(range(t.size))) if t.rank in g]
    for group in groups:
        group = sorted(set(group))
        flat = noise(t.rank, 2000)
        pieces = [torch.empty(3) for _ in group]
        handles = [
            t.all_reduce(flat, group=group),
            t.all_gather(pieces, torch.full((3,), float(t.rank)), group=group),
            t.barrier(group=group),
        ]
        for handle in handles:
            yield RoutineWait(handle, f"group {group}")
        assert torch.equal(flat, over_tree([noise(r, 2000) for r in group]))
        assert [int(p[0]) for p in pieces] == group
    order = (1, 2) if t.rank % 2 else (2, 1)
    flats = {channel: noise(t.rank, 3000, channel) for channel in order}
    handles = [t.all_reduce(flats[channel], group=range(t.size), channel=channel) for channel in order]
    for handle in handles:
        yield RoutineWait(handle, "channels")
    for channel in order:
        assert torch.equal(flats[channel], over_tree([noise(r, 3000, channel) for r in range(t.size)]))


def a_handle_goes_on_by_itself(t: Transport) -> Routine[None]:
    """Odd ranks let a posted collective go on while they wait for something that needs its completion elsewhere."""
    flat = torch.ones(200_000)
    handle = t.all_reduce(flat, group=range(t.size))
    if t.rank == 0:
        yield RoutineWait(handle, "all_reduce")
        for peer in range(1, t.size):
            yield RoutineWait(t.send(torch.ones(1), to=peer, tag=1), "permission")
    else:
        yield RoutineWait(t.recv(None, source=0, tag=1), "permission")
        yield RoutineWait(handle, "all_reduce")
    assert bool((flat == t.size).all())


def gradients_may_require_grad(t: Transport) -> Routine[None]:
    """Parameters (leaves that require grad) can be sent, received into and reduced."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    leaf = torch.full((2000,), float(t.rank), requires_grad=True)
    out = torch.zeros(2000, requires_grad=True)
    send = t.send(leaf, to=right, tag=0)
    recv = t.recv(out, source=left, tag=0)
    yield RoutineWait(recv, "recv")
    yield RoutineWait(send, "send")
    assert out.is_leaf and bool((out == left).all())
    handle = t.all_reduce(leaf, group=range(t.size))
    yield RoutineWait(handle, "all_reduce")
    assert bool((leaf == sum(range(t.size))).all())


def wrong_shapes_are_named(t: Transport) -> Routine[None]:
    """A receive for another shape or dtype fails and says what came; the connection goes on."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    sends = [t.send(torch.zeros(5), to=right, tag=tag) for tag in (1, 2, 3)]
    for tag, out in ((1, torch.zeros(6)), (2, torch.zeros(5, dtype=torch.float64))):
        try:
            yield RoutineWait(t.recv(out, source=left, tag=tag), "a wrong tensor")
        except CommError as error:
            assert f"rank {left} sent torch.float32 (5,)" in str(error) and f"tag {tag}" in str(error)
        else:
            raise AssertionError("no error")
    yield RoutineWait(t.recv(None, source=left, tag=3), "the next message")
    for handle in sends:
        yield RoutineWait(handle, "send")


def bad_arguments_raise_at_once(t: Transport) -> Routine[None]:
    """Non-contiguous tensors, ranks outside, groups without the caller, wrong counts."""
    yield RoutineWork("nothing")
    everybody = range(t.size)
    for call, text in (
        (lambda: t.send(torch.zeros(4, 4).t(), to=0, tag=0), "contiguous"),
        (lambda: t.recv(torch.zeros(4, 4)[:, 1], source=0, tag=0), "contiguous"),
        (lambda: t.send(torch.zeros(4), to=t.size, tag=0), f"rank {t.size}"),
        (lambda: t.all_reduce(torch.zeros(4), group=[r for r in everybody if r != t.rank]), "ascending"),
        (lambda: t.all_reduce(torch.zeros(4), group=[*everybody, 0]), "ascending"),
        (lambda: t.halving_all_reduce(torch.zeros(4), torch.zeros(4), group=range(3)), "over 3 ranks"),
        (lambda: t.all_gather([torch.zeros(4)] * (t.size + 1), torch.zeros(4), group=everybody), "one for each"),
        (lambda: t.broadcast(torch.zeros(4), root=t.size, group=everybody), "not in group"),
    ):
        try:
            call()
        except CommError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"no error: {text}")


def virtual_shards(t: Transport) -> Routine[None]:
    """Ranks with several virtual shards: sums, gathers and scatters of a group with a rank for each."""
    for sizes in ([2] * t.size, [1 + rank % 2 for rank in range(t.size)]):
        ends = [0, *itertools.accumulate(sizes)]
        together = VirtualShards(t, range(t.size), [range(a, b) for a, b in itertools.pairwise(ends)])
        yield from run_in_turn([_virtual_shard(together, number) for number in together.own])


def _virtual_shard(together: VirtualShards, number: int) -> Routine[None]:
    member, count = together.member(number), together.count
    group, values = range(count), [noise(v, 5000) for v in range(count)]
    for dtype in (torch.float32, torch.bfloat16):
        flat = values[number].to(dtype, copy=True)
        yield RoutineWait(member.all_reduce(flat, group=group), f"the sum of {dtype}")
        assert torch.equal(flat, over_tree([value.to(dtype) for value in values])), (number, dtype)
    parts = [noise(1000 * number + v, 7 + v) for v in range(count)]
    out = torch.empty_like(parts[number])
    yield RoutineWait(member.reduce_scatter(out, parts, group=group), "the sum of a part")
    assert torch.equal(out, over_tree([noise(1000 * v + number, 7 + number) for v in range(count)]))
    mine, gathered = noise(number, 10 + number), [torch.empty(10 + v) for v in range(count)]
    yield RoutineWait(member.all_gather(gathered, mine, group=group), "the parts")
    assert all(torch.equal(gathered[v], noise(v, 10 + v)) for v in range(count))


CASES: dict[str, Callable[[Transport], Routine[None]]] = {
    case.__name__: case
    for case in (
        dtypes_and_shapes,
        messages_say_whether_their_tensor_requires_a_gradient,
        layouts_are_kept,
        tags_overtake,
        unexpected_then_posted,
        big_both_ways,
        sends_do_not_wait_for_each_other,
        batches,
        all_reduces,
        all_reduce_bytes,
        halving_all_reduces,
        virtual_shards,
        reduce_scatters,
        all_gathers,
        all_to_alls,
        broadcasts,
        barriers,
        subgroups,
        a_handle_goes_on_by_itself,
        gradients_may_require_grad,
        wrong_shapes_are_named,
        bad_arguments_raise_at_once,
    )
}


# -- operations that go on for ever, for the tests that kill or stop somebody inside them


def _ring(t: Transport, turn: int) -> Routine[None]:
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    data, out = torch.ones(BIG // 4), torch.empty(BIG // 4)
    handles = [t.recv(out, source=left, tag=turn), t.send(data, to=right, tag=turn)]
    for handle in handles if turn % 2 else reversed(handles):
        yield RoutineWait(handle, "ring")


def _batch(t: Transport, turn: int) -> Routine[None]:
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    yield RoutineWait(t.batch([(torch.ones(BIG // 4), right, turn)], [(None, left, turn)]), "batch")


def _all_reduce(t: Transport, turn: int) -> Routine[None]:
    yield RoutineWait(t.all_reduce(torch.ones(BIG // 4), group=range(t.size)), "all_reduce")


def _halving_all_reduce(t: Transport, turn: int) -> Routine[None]:
    if t.rank in (group := halving_group(t.size)):
        flat, scratch = torch.ones(BIG // 4), torch.empty(BIG // 8)
        yield RoutineWait(t.halving_all_reduce(flat, scratch, group=group), "halving_all_reduce")


def _reduce_scatter(t: Transport, turn: int) -> Routine[None]:
    pieces = [torch.ones(BIG // 8) for _ in range(t.size)]
    yield RoutineWait(t.reduce_scatter(torch.empty(BIG // 8), pieces, group=range(t.size)), "reduce_scatter")


def _all_gather(t: Transport, turn: int) -> Routine[None]:
    pieces = [torch.ones(BIG // 8) for _ in range(t.size)]
    yield RoutineWait(t.all_gather(pieces, pieces[t.rank], group=range(t.size)), "all_gather")


def _all_to_all(t: Transport, turn: int) -> Routine[None]:
    pieces = [torch.ones(BIG // 8) for _ in range(t.size)]
    yield RoutineWait(t.all_to_all([torch.empty(BIG // 8) for _ in pieces], pieces, group=range(t.size)), "all_to_all")


def _broadcast(t: Transport, turn: int) -> Routine[None]:
    yield RoutineWait(t.broadcast(torch.ones(BIG // 4), root=turn % t.size, group=range(t.size)), "broadcast")


def _barrier(t: Transport, turn: int) -> Routine[None]:
    yield RoutineWait(t.barrier(group=range(t.size)), "barrier")


FOREVER: dict[str, Callable[[Transport, int], Routine[None]]] = {
    "send and recv": _ring,
    "batch": _batch,
    "all_reduce": _all_reduce,
    "halving_all_reduce": _halving_all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
}


# -- calls of worker processes (`helpers.processes`)

State = dict[str, Any]


def listen(state: State, index: int, kind: str) -> str:
    """Listen once per process, for transports of one kind (`tcp`, `unix`, `nccl`); the address."""
    if "mesh" not in state:
        state["mesh"] = TcpEndpoint.listen(credential=CREDENTIAL, unix_sockets=kind != "tcp")
        state["nccl"] = kind == "nccl"
        if state["nccl"]:
            standin.load()
    return state["mesh"].address


def connect(state: State, index: int, addresses: list[str], members: list[int], generation: int) -> int:
    """Form a generation of the workers `members`."""
    mesh: TcpEndpoint = state["mesh"]
    transport: Transport = mesh.connect(
        rank=members.index(index),
        size=len(members),
        addresses=[addresses[i] for i in members],
        generation=generation,
        deadline_s=5.0,
    )
    if state["nccl"]:
        transport = over_nccl(transport, f"worker {index}")
    state["transport"] = transport
    return generation


def over_nccl(control: Any, name: str, only: frozenset[torch.dtype] | None = None) -> Transport:
    """A `cpu` transport becomes the control transport of an `nccl` one, with all that the cases use."""
    device, keys = standin.HostDevice(name, only=only), standin.all_communicators(control.size)
    return connect_nccl(control, device=device, communicators=keys, deadline_s=LIMIT_S)


def run_case(state: State, index: int, name: str) -> dict[str, dict[str, int]]:
    """One case on the connected transport; its ledger."""
    run_routine(CASES[name](state["transport"]), LIMIT_S)
    return state["transport"].ledger.as_dict()


def run_forever(state: State, index: int, name: str) -> tuple[str, str, float]:
    """An operation again and again until it fails; then abort, as a worker does. What it failed with, and when."""
    transport: Transport = state["transport"]
    turn = 0
    try:
        while True:
            run_routine(FOREVER[name](transport, turn), LIMIT_S)
            turn += 1
    except CommError as error:
        at = time.monotonic()
        transport.abort(f"rank {transport.rank} gave up: {error.what}")
        return type(error).__name__, error.what, at


def abort_from_outside(state: State) -> float:
    """Control thread: abort; when."""
    at = time.monotonic()
    state["transport"].abort("told to")
    return at


def close(state: State, index: int) -> None:
    """Close the transport."""
    state.pop("transport").close()


def connect_and_expect_refusal(state: State, index: int, addresses: list[str], members: list[int], generation: int) -> str:
    """A worker that comes back from an old generation: the error's class."""
    with contextlib.suppress(KeyError):
        close(state, index)
    try:
        connect(state, index, addresses, members, generation)
    except GroupAborted as error:
        return f"{type(error).__name__}: {error.what}"
    return "welcome"


def footprint(state: State, index: int) -> tuple[int, int]:
    """(threads, open files) of the process."""
    import os
    import threading

    return threading.active_count(), len(os.listdir("/proc/self/fd"))
