"""The nccl transport beyond what all transports do: what NCCL adds, its faults, and what it refuses before anything starts.

CuPy's real bindings run over the stand-in for its library (`helpers.standin`), on host memory.
"""

import contextlib
import gc
import os
import random
import re
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from helpers import standin
from helpers.nccl_group import PAIR, Group, every, in_threads
from helpers.standin import Count, HostDevice, HostStream, Setting, set_to
from helpers.transport_cases import CREDENTIAL, LIMIT_S, noise, over_tree

from raypar.comm.nccl import bindings, communicator_stream, transport
from raypar.comm.nccl import device as nccl_device
from raypar.comm.nccl import tagged_messages as nccl_messages
from raypar.comm.nccl.connect import check_ranks_compatible, connect_nccl, wait_for_message_from_each_rank
from raypar.comm.nccl.device import CudaDevice
from raypar.comm.nccl.operation_handle import NcclHandle
from raypar.comm.nccl.pending_operations import PendingOperations
from raypar.comm.nccl.tagged_messages import ARRIVED
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.transport import COLLECTIVES, CommunicatorKey
from raypar.errors import ClusterError, CommError, CommTimeout, GroupAborted

pytestmark = [pytest.mark.skipif(not standin.SUPPORTED, reason="CuPy has a wheel for Linux x86-64 only"), pytest.mark.part(4)]

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def library():
    return standin.load()


# -- the stand-in does what NCCL does


@pytest.mark.parametrize("dtype", bindings.NCCL_DTYPES)
def test_the_standin_adds_each_dtype_as_torch_does(dtype):
    """For 16-bit floats: every number there is, plus one of all magnitudes."""
    generator = torch.Generator().manual_seed(1)
    if dtype.itemsize == 2:
        first = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        second = first[torch.randperm(first.numel(), generator=generator)]
    elif dtype.is_floating_point:
        first, second = noise(0, 5000).to(dtype), noise(1, 5000).to(dtype)
    else:
        limits = torch.iinfo(dtype)
        first, second = (
            torch.randint(limits.min, limits.max, (5000,), generator=generator, dtype=torch.int64).to(dtype) for _ in range(2)
        )
    with Group(2, [CommunicatorKey((0, 1), "all_reduce")]) as ends:
        flats = [first.clone(), second.clone()]
        before = standin.count(Count.NATIVE)
        handles = [end.all_reduce(flat, group=[0, 1]) for end, flat in zip(ends, flats, strict=True)]
        for handle in handles:
            handle.wait(LIMIT_S)
        assert standin.count(Count.NATIVE) == before + 2
    want = first + second
    for flat in flats:
        same = (flat == want) | ((flat != flat) & (want != want))
        assert bool(same.all()), (first[~same][:5], second[~same][:5], flat[~same][:5], want[~same][:5])


@pytest.mark.parametrize("code", range(10))
def test_the_standin_has_the_other_operations_and_dtypes_too(code):
    """Raw calls of CuPy's bindings; codes of dtypes and operations as in nccl.h."""
    dtype = (torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64)[code] if code < 6 else None
    dtype = dtype or (torch.float16, torch.float32, torch.float64, torch.bfloat16)[code - 6]
    values = [torch.tensor([3, 8, 5, 0]).to(dtype), torch.tensor([5, 2, 5, 4]).to(dtype)]
    want = {0: [8, 10, 10, 4], 1: [15, 16, 25, 0], 2: [5, 8, 5, 4], 3: [3, 2, 5, 0], 4: [4, 5, 5, 2]}
    with Group(2, [CommunicatorKey((0, 1), "all_reduce")]) as ends:
        streams = [next(iter(end._streams.values())) for end in ends]
        for operation, expected in want.items():
            outs = [torch.zeros(4).to(dtype) for _ in streams]
            roots = [torch.zeros(4).to(dtype) for _ in streams]
            for stream, value, out, root in zip(streams, values, outs, roots, strict=True):
                raw, number = stream.communicator._comm, stream.device_stream.cuda_stream
                raw.allReduce(value.data_ptr(), out.data_ptr(), 4, code, operation, number)
                raw.reduce(value.data_ptr(), root.data_ptr(), 4, code, operation, 1, number)
                raw.bcast(root.data_ptr(), 4, code, 1, number)
            for stream in streams:
                stream.device_stream.record_event().make_stream_wait(lambda: None)
            assert [out.tolist() for out in (*outs, *roots)] == [expected] * 4, operation


def test_nccls_own_sum_of_three_has_other_bits_than_the_tree_of_ranks_and_the_transports_has_not():
    with Group(3, [CommunicatorKey((0, 1, 2), "all_reduce")]) as ends:
        want = over_tree([noise(rank, 3000) for rank in range(3)])
        flats = [noise(rank, 3000) for rank in range(3)]
        every(ends, lambda end: end.all_reduce(flats[end.rank], group=[0, 1, 2]))
        assert all(torch.equal(flat, want) for flat in flats)
        flats = [noise(rank, 3000) for rank in range(3)]
        streams = [next(iter(end._streams.values())) for end in ends]
        for stream, flat in zip(streams, flats, strict=True):
            stream.communicator.all_reduce(flat.data_ptr(), flat.numel(), flat.dtype, stream.device_stream.cuda_stream)
        for stream in streams:
            stream.device_stream.record_event().make_stream_wait(lambda: None)
        assert torch.equal(flats[0], flats[1]) and torch.allclose(flats[0], want) and not torch.equal(flats[0], want)


def test_a_group_sends_to_all_before_it_receives_from_all_more_than_any_buffer_holds():
    with Group(3, [CommunicatorKey((0, 1, 2), "all_to_all")]) as ends:
        outs = [[torch.empty(700_000) for _ in range(3)] for _ in range(3)]
        every(
            ends,
            lambda end: end.all_to_all(
                outs[end.rank], [torch.full((700_000,), 10.0 * end.rank + to) for to in range(3)], group=[0, 1, 2]
            ),
        )
        assert [[int(out[-1]) for out in row] for row in outs] == [[10 * a + b for a in range(3)] for b in range(3)]


def test_a_missing_compiler_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError, match=r"no C compiler.*apt-get install gcc"):
        standin.compiler()


def test_the_transport_loads_no_library_by_itself_and_knows_no_path_to_the_standin():
    texts = {path.name: path.read_text() for path in (REPOSITORY / "raypar" / "comm" / "nccl").glob("*.py")}
    assert len(texts) >= 6
    assert not [name for name, text in texts.items() if "CDLL" in text or "ctypes" in text or re.search(r"nccl\.c\b", text)]


# -- collectives


def test_two_ranks_and_even_pieces_use_the_collectives_of_nccl():
    everything = [CommunicatorKey((0, 1), name) for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")]
    with Group(2, everything) as ends:
        whole = [noise(rank, 2000).view(2, 1000) for rank in range(2)]
        outs = [torch.empty(1000) for _ in range(2)]
        apart = [[torch.empty(7, 3), torch.empty(7, 3)] for _ in range(2)]
        calls = (
            lambda end: end.reduce_scatter(outs[end.rank], list(whole[end.rank]), group=[0, 1]),
            lambda end: end.all_gather(apart[end.rank], torch.full((7, 3), float(end.rank)), group=[0, 1]),
            lambda end: end.broadcast(outs[end.rank], root=1, group=[0, 1]),
        )
        for call in calls:
            before = standin.count(Count.NATIVE)
            every(ends, call)
            assert standin.count(Count.NATIVE) == before + 2
        assert all(torch.equal(out, noise(0, 2000)[1000:] + noise(1, 2000)[1000:]) for out in outs)
        assert all([float(a.mean()), float(b.mean())] == [0.0, 1.0] for a, b in apart)


def test_a_call_that_no_communicator_was_made_for_says_how_to_name_it():
    with Group(3, [CommunicatorKey((0, 1), "message")]) as ends:
        for call, name in (
            (
                lambda: ends[0].all_reduce(torch.ones(2), group=[0, 1], channel=4),
                r"CommunicatorKey\(\(0, 1\), 'all_reduce', 4\)",
            ),
            (lambda: ends[0].send(torch.ones(2), to=2, tag=0), r"CommunicatorKey\(\(0, 2\), 'message', 0\)"),
            (lambda: ends[1].recv(torch.ones(2), source=2, tag=0), r"CommunicatorKey\(\(2, 1\), 'message', 0\)"),
        ):
            with pytest.raises(CommError, match=name):
                call()
        alone = torch.ones(2)
        ends[2].all_reduce(alone, group=[2]).wait(LIMIT_S)
        assert alone.tolist() == [1, 1]


def test_a_tensor_elsewhere_is_refused():
    with Group(2, PAIR) as ends, pytest.raises(CommError, match="on meta cannot be moved"):
        ends[0].send(torch.ones(2, device="meta"), to=1, tag=0)


def test_tensors_of_the_host_match_like_those_of_the_device_without_a_communicator():
    """The votes of a step, states and checkpoints are the host's."""

    def device(rank):
        return HostDevice(f"device {rank}", only=frozenset({torch.float32}))

    with Group(2, PAIR, device=device) as ends:
        sends = [
            ends[0].send(torch.full((4,), 1.0), to=1, tag=1),
            ends[0].send(torch.full((300, 1000), 2.0, dtype=torch.float64), to=1, tag=1),
            ends[0].send(torch.zeros(0, dtype=torch.int64), to=1, tag=1),
            ends[0].send(torch.full((3,), 5), to=1, tag=9),
            ends[0].send(torch.full((4,), 3.0), to=1, tag=1),
        ]
        last = ends[1].recv(torch.zeros(3, dtype=torch.int64), source=0, tag=9)
        last.wait(LIMIT_S)
        assert last.tensor().tolist() == [5, 5, 5]
        given = torch.zeros(300, 1000, dtype=torch.float64)
        handles = [ends[1].recv(out, source=0, tag=1) for out in (None, given, None, None)]
        for handle in (*handles, *sends):
            handle.wait(LIMIT_S)
        assert [float(h.tensor().sum()) for h in handles] == [4.0, 600_000.0, 0.0, 12.0]
        assert [h.tensor().dtype for h in handles] == [torch.float32, torch.float64, torch.int64, torch.float32]
        count = torch.ones(5, dtype=torch.int32)
        every(ends, lambda end: end.all_reduce(count.clone(), group=[0, 1]))
        ends[0].send(torch.ones(2), to=1, tag=2)
        with pytest.raises(CommError, match=r"sent torch.float32 \(2,\) on cpu, not the host"):
            ends[1].recv(torch.ones(2, dtype=torch.float64), source=0, tag=2).wait(LIMIT_S)


# -- asynchrony


def test_calls_return_before_the_device_is_done_and_memory_lives_until_it_is():
    with Group(2, PAIR) as ends, set_to(Setting.DELAY_US, 100_000):
        tensor = torch.full((5000,), 3.0)
        held = weakref.ref(tensor)
        start = time.monotonic()
        sending = ends[0].send(tensor, to=1, tag=1)
        receiving = ends[1].recv(None, source=0, tag=1)
        assert time.monotonic() - start < 0.09 and not sending.done()
        del tensor
        gc.collect()
        garbage = [torch.full((5000,), -1.0) for _ in range(20)]  # takes the memory, if it were free
        receiving.wait(LIMIT_S)
        assert bool((receiving.tensor() == 3).all()) and len(garbage) == 20
        sending.wait(LIMIT_S)
        assert sending.kept == () and held() is None


COLLECTIVES_OF_A_FUZZ = [("all_reduce", 0), ("all_reduce", 1), ("all_gather", 0), ("all_to_all", 5)]


def any_order(end, seed, count=60):
    """One rank of a program that all make from `seed`: messages and collectives, which each posts in an order of its own."""
    shared, own = random.Random(seed), random.Random(1000 * seed + end.rank)
    everybody = list(range(end.size))
    collectives = {key: [] for key in COLLECTIVES_OF_A_FUZZ}
    messages, checks, handles = [], [], []
    for number in range(count):
        numel, dtype = shared.choice((0, 1, 300, 5000, 150_000)), shared.choice((torch.float32, torch.float64, torch.int64))
        if shared.random() < 0.6:
            source, to = shared.choice(everybody), shared.choice(everybody)
            value, given = torch.full((numel,), number).to(dtype), shared.random() < 0.5
            if end.rank == source:
                messages.append(lambda v=value, to=to, tag=number: handles.append(end.send(v, to=to, tag=tag)))
            if end.rank == to:
                out = torch.empty_like(value) if given else None
                messages.append(
                    lambda out=out, source=source, tag=number, v=value: (
                        handles.append(end.recv(out, source=source, tag=tag)),
                        checks.append(lambda h=handles[-1], v=v: torch.equal(h.tensor(), v)),
                    )
                )
        else:
            collectives[shared.choice(COLLECTIVES_OF_A_FUZZ)].append((numel, number))

    def collective(operation, channel, numel, number):
        mine = [noise(100 * number + 10 * end.rank + to, numel) for to in everybody]
        outs = [torch.empty(numel) for _ in everybody]
        if operation == "all_reduce":
            handle = end.all_reduce(mine[0], group=everybody, channel=channel)
            want, got = [over_tree([noise(100 * number + 10 * r, numel) for r in everybody])], [mine[0]]
        elif operation == "all_gather":
            handle = end.all_gather(outs, mine[0], group=everybody, channel=channel)
            want, got = [noise(100 * number + 10 * r, numel) for r in everybody], outs
        else:
            handle = end.all_to_all(outs, mine, group=everybody, channel=channel)
            want, got = [noise(100 * number + 10 * r + end.rank, numel) for r in everybody], outs
        handles.append(handle)
        checks.append(lambda: all(torch.equal(a, b) for a, b in zip(got, want, strict=True)))

    own.shuffle(messages)
    queues = [
        messages,
        *([lambda k=key, a=arguments: collective(*k, *a) for arguments in calls] for key, calls in collectives.items()),
    ]
    while any(queues):
        own.choice([queue for queue in queues if queue]).pop(0)()
    own.shuffle(handles)
    for handle in handles:
        handle.wait(LIMIT_S)
    return all(check() for check in checks)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 40))])
def test_whatever_the_order_of_calls_on_each_rank_everything_arrives(seed):
    size = 2 + seed % 3
    keys = [CommunicatorKey((a, b), "message") for a in range(size) for b in range(size) if a != b]
    keys += [CommunicatorKey(tuple(range(size)), *key) for key in COLLECTIVES_OF_A_FUZZ]

    def device(rank):
        return HostDevice(f"device {rank}", only=frozenset({torch.float32, torch.float64}))

    with Group(size, keys, device=device) as ends:
        assert in_threads(size, lambda rank: any_order(ends[rank], seed)) == [True] * size


class Lagging(HostDevice):
    """Its current stream is one too: what it is given is done later than it is asked for, as on a GPU."""

    def __init__(self, identity):
        super().__init__(identity)
        self.current = HostStream()

    def record_event(self):
        return self.current.record_event()


def posted(operation, end, mine, busy):
    """`mine` [2, n] is read (and maybe written), `busy` [2, n] only written."""
    group = [0, 1]
    if operation == "message":
        return end.recv(busy, source=0, tag=1) if end.rank else end.send(mine, to=1, tag=1)
    if operation == "message that came first":
        if end.rank == 0:
            return end.send(mine, to=1, tag=1)
        deadline = time.monotonic() + LIMIT_S
        while not end.mailbox._arrived:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return end.recv(busy, source=0, tag=1)
    if operation == "all_reduce":
        return end.all_reduce(mine, group=group)
    if operation == "reduce_scatter":
        return end.reduce_scatter(busy[end.rank], list(mine), group=group)
    if operation == "ragged reduce_scatter":
        return end.reduce_scatter(busy[end.rank][: 9 + end.rank], [mine[0][:9], mine[1][:10]], group=group)
    if operation == "all_gather":
        return end.all_gather(list(busy), mine[0], group=group)
    if operation == "ragged all_gather":
        return end.all_gather([busy[0][:9], busy[1][:10]], mine[0][: 9 + end.rank], group=group)
    if operation == "all_to_all":
        return end.all_to_all(list(busy), list(mine), group=group)
    return end.broadcast(mine, root=0, group=group)


@pytest.mark.parametrize(
    "operation, of_mine, of_busy",
    [
        ("message", [1.0, 2.0], [None, 1.0]),
        ("message that came first", [1.0, 2.0], [None, 1.0]),
        ("all_reduce", [3.0, 3.0], [None, None]),
        ("reduce_scatter", [1.0, 2.0], [3.0, 3.0]),
        ("ragged reduce_scatter", [1.0, 2.0], [3.0, 3.0]),
        ("all_gather", [1.0, 2.0], [1.5, 1.5]),
        ("ragged all_gather", [1.0, 2.0], [1.5, 1.5]),
        ("all_to_all", [1.0, 2.0], [1.5, 1.5]),
        ("broadcast", [1.0, 1.0], [None, None]),
    ],
)
def test_an_operation_takes_its_turn_after_what_the_current_stream_was_given(operation, of_mine, of_busy):
    """What it reads is still to be written, what it writes still to be read, when it is posted."""
    devices = [Lagging(f"device {rank}") for rank in range(2)]
    keys = [*PAIR, *(CommunicatorKey((0, 1), name) for name in COLLECTIVES)]
    with Group(2, keys, device=devices.__getitem__) as ends:
        mine = [torch.full((2, 700), -1.0) for _ in ends]
        busy = [torch.full((2, 700), -2.0) for _ in ends]
        seen = [torch.zeros(2, 700) for _ in ends]
        for rank, device in enumerate(devices):
            device.current.run(lambda rank=rank: (time.sleep(0.1), mine[rank].fill_(1.0 + rank), seen[rank].copy_(busy[rank])))
        every(ends, lambda end: posted(operation, end, mine[end.rank], busy[end.rank]))
        assert [float(values.mean()) for values in mine] == of_mine
        for rank, want in enumerate(of_busy):
            assert bool((seen[rank] == -2.0).all()), "it was overwritten while it was still to be read"
            written = busy[rank][busy[rank] != -2.0]
            firsts = [row[row != -2.0][:9] for row in busy[rank]]
            means = [float(first.mean()) for first in firsts if len(first)]
            assert (sum(means) / len(means) == want) if want is not None else not len(written), operation
    for device in devices:
        device.current.close()


def test_a_stream_can_wait_instead_of_the_host():
    with Group(2, PAIR) as ends:
        early = ends[1].recv(None, source=0, tag=1)
        with pytest.raises(CommTimeout, match=r"recv tag 1 of rank 1 with 0"):
            early.wait_on_stream(0.02)  # nobody has sent, so there is nothing yet that a stream could wait for
        sending = ends[0].send(torch.full((3,), 2.0), to=1, tag=1)
        sending.wait_on_stream(LIMIT_S)
        early.wait_on_stream(LIMIT_S)
        assert early.tensor().tolist() == [2, 2, 2]
        both = ends[1].batch([(torch.ones(2), 0, 5)], [(None, 0, 6)])
        back = ends[0].batch([(torch.zeros(2), 1, 6)], [(None, 1, 5)])
        both.wait_on_stream(LIMIT_S)
        back.wait_on_stream(LIMIT_S)
        assert both.tensor().tolist() == [0, 0] and back.tensor().tolist() == [1, 1]


def test_waiting_on_a_stream_for_a_send_from_host_memory_waits_on_the_host(monkeypatch):
    """The host's memory may be written again once the wait returns: no stream keeps anybody from that."""
    left, query = threading.Event(), nccl_messages.HostMessageEvent.query
    monkeypatch.setattr(nccl_messages.HostMessageEvent, "query", lambda event: left.is_set() and query(event))
    with Group(2, PAIR, device=lambda rank: HostDevice(f"device {rank}", only=frozenset({torch.float32}))) as ends:
        sending = ends[0].send(torch.ones(3, dtype=torch.float64), to=1, tag=1)
        with pytest.raises(CommTimeout, match="send tag 1 of rank 0 with 1"):
            sending.wait_on_stream(0.02)
        left.set()
        sending.wait_on_stream(LIMIT_S)
        assert sending.done()
        arrives = ends[1].recv(None, source=0, tag=1)
        arrives.wait_on_stream(LIMIT_S)
        assert arrives.tensor().tolist() == [1.0] * 3


def test_what_waits_on_a_stream_is_freed_by_the_loss_of_a_peer_and_by_its_limit():
    with Group(2, [*PAIR, CommunicatorKey((0, 1), "all_reduce")]) as ends:
        with pytest.raises(CommTimeout, match="all_reduce of rank 1 with 0"):
            ends[1].all_reduce(torch.ones(3), group=[0, 1]).wait_on_stream(0.05)
        waiting = ends[1].all_reduce(torch.ones(3), group=[0, 1])
        leaving = threading.Timer(0.1, ends[0].close)
        leaving.start()
        with pytest.raises(CommError, match="rank 0"):
            waiting.wait_on_stream(LIMIT_S)
        leaving.join(LIMIT_S)


# -- ending


def test_who_closes_first_after_a_last_exchange_disturbs_nobody():
    for _ in range(8):
        with Group(2, [*PAIR, *(CommunicatorKey((0, 1), "all_gather", channel) for channel in range(3))]) as ends:

            def body(rank, ends=ends):
                pieces = [torch.zeros(20_000) for _ in range(2)]
                handles = [ends[rank].all_gather(pieces, pieces[rank], group=[0, 1], channel=c) for c in range(3)]
                handles += [ends[rank].send(pieces[0], to=1 - rank, tag=1), ends[rank].recv(None, source=1 - rank, tag=1)]
                for handle in handles:
                    handle.wait(LIMIT_S)
                ends[rank].close()

            assert in_threads(2, body) == [None, None]


def test_what_was_under_way_completes_after_a_goodbye_and_what_can_never_complete_fails():
    with Group(2, [*PAIR, CommunicatorKey((0, 1), "all_reduce")]) as ends:
        ends[0].send(torch.ones(3), to=1, tag=1).wait(LIMIT_S)
        every(ends, lambda end: end.all_reduce(torch.ones(3), group=[0, 1]))
        every(ends, lambda end: end.barrier(group=[0, 1]))
        ends[0].close()
        assert ends[1].recv(None, source=0, tag=1).wait(LIMIT_S) is None
        for late in (
            ends[1].recv(None, source=0, tag=2),
            ends[1].send(torch.ones(3), to=0, tag=2),
            ends[1].all_reduce(torch.ones(3), group=[0, 1]),
        ):
            with pytest.raises(CommError, match=r"with 0 .*: rank 0 closed its end"):
                late.wait(LIMIT_S)
        host = HostDevice("host", only=frozenset())
        ends[1].device = host
        with pytest.raises(CommError, match=r"send tag 3 of rank 1 with 0 .*rank 0"):
            ends[1].send(torch.ones(3), to=0, tag=3).wait(LIMIT_S)
        with pytest.raises(CommError, match=r"barrier .* with 0 .*lost rank 0"):
            ends[1].barrier(group=[0, 1]).wait(LIMIT_S)


def test_a_root_that_leaves_after_its_broadcast_has_still_sent_it_to_those_who_come_later():
    with Group(2, [*PAIR, CommunicatorKey((0, 1), "broadcast")]) as ends, set_to(Setting.SENDS_ARE_BUFFERED, 1):
        ends[0].broadcast(torch.full((5,), 7.0), root=0, group=[0, 1]).wait(LIMIT_S)
        ends[0].close()
        deadline = time.monotonic() + LIMIT_S
        while 0 not in ends[1]._gone:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        late = torch.zeros(5)
        ends[1].broadcast(late, root=0, group=[0, 1]).wait(LIMIT_S)
        assert late.tolist() == [7.0] * 5
        with pytest.raises(CommError, match="rank 0 closed its end"):
            ends[1].broadcast(late, root=0, group=[0, 1]).wait(LIMIT_S)


def test_a_message_in_host_memory_that_its_receiver_has_taken_before_it_left_was_sent(monkeypatch):
    """The last votes of a run: who has them all closes, while a sender has not yet looked whether its own has gone out."""
    looked, query = threading.Event(), nccl_messages.HostMessageEvent.query
    monkeypatch.setattr(
        nccl_messages.HostMessageEvent, "query", lambda event: (event is ARRIVED or looked.is_set()) and query(event)
    )
    with Group(2, PAIR, device=lambda rank: HostDevice(f"device {rank}", only=frozenset({torch.float32}))) as ends:
        arrives = ends[1].recv(None, source=0, tag=1)
        sent = ends[0].send(torch.ones(3, dtype=torch.float64), to=1, tag=1)
        arrives.wait(LIMIT_S)
        assert arrives.tensor().tolist() == [1.0] * 3
        ends[1].close()
        deadline = time.monotonic() + LIMIT_S
        while 1 not in ends[0]._gone:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not sent.done()
        looked.set()
        sent.wait(LIMIT_S)
        with pytest.raises(CommError, match="rank 1 closed its end"):
            ends[0].send(torch.ones(3, dtype=torch.float64), to=1, tag=2).wait(LIMIT_S)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("elements", [10, 100_000])
def test_sums_that_need_no_order_are_ncclAllReduce_and_ncclReduceScatter_also_of_more_than_two_ranks(elements, exact):
    everybody = (0, 1, 2)
    values = [torch.randn(3 * elements, generator=torch.Generator().manual_seed(rank)) for rank in everybody]
    total = values[0].double() + values[1].double() + values[2].double()
    keys = [CommunicatorKey(everybody, name) for name in ("all_reduce", "reduce_scatter")]
    with Group(3, keys, exact=exact) as ends:
        before = standin.count(Count.NATIVE)
        flats = [value.clone() for value in values]
        every(ends, lambda end: end.all_reduce(flats[end.rank], group=everybody))
        outs = [torch.empty(elements) for _ in ends]
        every(ends, lambda end: end.reduce_scatter(outs[end.rank], list(values[end.rank].chunk(3)), group=everybody))
        assert standin.count(Count.NATIVE) - before == (0 if exact else 6)
    assert torch.equal(flats[0], flats[1]) and torch.equal(flats[0], flats[2])
    for found in (flats[0], torch.cat(outs)):
        torch.testing.assert_close(found.double(), total, rtol=1e-5, atol=1e-6)


def test_posting_an_operation_costs_the_same_however_many_are_pending_and_those_that_are_over_are_let_go_of(monkeypatch):
    looks, tracked, released, track = [], [], NcclHandle.released, PendingOperations.track
    monkeypatch.setattr(NcclHandle, "released", property(lambda handle: looks.append(handle) or released.fget(handle)))
    monkeypatch.setattr(PendingOperations, "track", lambda own, handle: tracked.append(handle) or track(own, handle))
    with Group(2, PAIR) as ends:
        pending = [ends[0].recv(None, source=1, tag=tag) for tag in range(100)]
        for tag in range(100):
            ends[1].send(torch.ones(3), to=0, tag=tag).wait(LIMIT_S)
        for handle in pending:
            handle.wait(LIMIT_S)
        for tag in range(200, 300):
            ends[0].send(torch.ones(3), to=1, tag=tag)
        assert len(tracked) >= 300 and 0 < len(looks) <= 2 * len(tracked)
        assert not set(pending) & set(ends[0]._handles)


def test_closing_looks_at_pending_operations_while_another_thread_posts(monkeypatch):
    in_flight, looked = NcclHandle.in_flight, []
    with Group(2, PAIR) as ends:
        ends[0].send(torch.ones(3), to=1, tag=1).wait(LIMIT_S)
        ends[1].recv(None, source=0, tag=1).wait(LIMIT_S)

        def look(handle):
            if not looked:  # as the control transport's thread does when a message is announced
                looked.append(handle)
                thread = threading.Thread(target=ends[0].track, args=(NcclHandle(ends[0], "recv", (1,)),))
                thread.start()
                thread.join(LIMIT_S)
            return in_flight.fget(handle)

        monkeypatch.setattr(NcclHandle, "in_flight", property(look))
        monkeypatch.setattr(NcclHandle, "released", property(lambda handle: False))
        ends[0].close()
        assert looked


def test_closing_leaves_no_thread_no_open_file_and_no_communicator():
    keys = standin.all_communicators(3)
    Group(3, keys).__exit__()  # whatever is made once is made now
    found = threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for turn in range(4):
        with Group(3, keys) as ends:
            pending = ends[0].recv(None, source=1, tag=1)
            ends[1].send(torch.ones(1_000_000), to=2, tag=1)
            if turn % 2:
                ends[2].abort("early")
        with pytest.raises(CommError):
            pending.wait(1)
        assert not any(end.unended_communicators for end in ends)
    assert standin.count(Count.ALIVE) == 0
    until = time.monotonic() + LIMIT_S
    while True:  # the system takes a moment to let go of a thread that has ended, also of another test's
        left = threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if all(now <= before for now, before in zip(left, found, strict=True)):
            break
        assert time.monotonic() < until, (left, found)
        time.sleep(0.01)


@pytest.mark.parametrize("end_s, stuck", [(LIMIT_S, []), (0.6, ["messages 0 -> 1", "messages 1 -> 0"])])
def test_an_abort_that_is_slow_in_nccl_frees_waiting_calls_at_once_and_what_comes_next_waits_for_its_end(
    end_s, stuck, monkeypatch
):
    monkeypatch.setattr(transport, "ABORT_S", 0.3)
    monkeypatch.setattr(transport, "END_S", end_s)
    with Group(2, PAIR) as ends, set_to(Setting.ABORT_TAKES_MS, 1500):
        waiting = ends[0].recv(None, source=1, tag=1)
        times = {}

        def abort():
            times["start"] = time.monotonic()
            ends[0].abort("the test says so")
            times["end"] = time.monotonic()

        thread = threading.Thread(target=abort)
        thread.start()
        with pytest.raises(GroupAborted, match="the test says so"):
            waiting.wait(LIMIT_S)
        times["freed"] = time.monotonic()
        thread.join()
        assert times["freed"] < times["end"]
        assert 0.3 <= times["end"] - times["start"] < 1.4
        assert not ends[0].unended_communicators, "it may still end: who would exit now would do so with all others"
        ends[1].abort("too")
        ends[0].close()
        assert time.monotonic() - times["start"] >= (0.6 if stuck else 1.5)
        assert sorted(ends[0].unended_communicators) == stuck
    deadline = time.monotonic() + LIMIT_S
    while standin.count(Count.ALIVE):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_abort_frees_who_waits_for_a_launch_that_hangs_in_nccl():
    with Group(2, PAIR) as ends:
        freed = {}

        def send(name):
            try:
                ends[0].send(torch.ones(3), to=1, tag=1)
            except GroupAborted:
                freed[name] = time.monotonic()

        with set_to(Setting.LAUNCH_TAKES_MS, 1200):
            threads = [threading.Thread(target=send, args=(name,)) for name in ("hangs", "waits")]
            threads[0].start()
            time.sleep(0.1)
            threads[1].start()
            time.sleep(0.1)
            at = time.monotonic()
            ends[0].abort("the test says so")
            for thread in threads:
                thread.join(LIMIT_S)
        assert freed.keys() == {"waits"} and freed["waits"] - at < 0.9
        assert not ends[0].unended_communicators


@pytest.mark.parametrize("patience_s, takes_s, stuck", [(LIMIT_S, 0.4, False), (0.2, 0.8, True)])
def test_a_closed_transport_has_ended_when_nothing_writes_to_anybodys_memory_any_more(patience_s, takes_s, stuck, monkeypatch):
    """NCCL has let go; the additions that follow in the communicator's stream are still to come, into memory of others then."""
    monkeypatch.setattr(transport, "END_S", patience_s)
    added, begun = [], threading.Event()

    def slowly(parts, me, out):
        begun.set()
        time.sleep(takes_s)
        added.append(out.data_ptr())

    monkeypatch.setattr(communicator_stream, "add_over_tree_on_device", slowly)
    with Group(3, [CommunicatorKey((0, 1, 2), "all_reduce")]) as ends:
        flats = [torch.ones(10) for _ in ends]
        handles = [end.all_reduce(flat, group=[0, 1, 2]) for end, flat in zip(ends, flats, strict=True)]
        assert begun.wait(LIMIT_S)
        ends[0].abort("the test says so")
        ends[0].close()
        assert bool(ends[0].unended_communicators) == stuck and (flats[0].data_ptr() in added) != stuck
        with pytest.raises(GroupAborted):
            handles[0].done()
        deadline = time.monotonic() + LIMIT_S
        while len(added) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_closing_beside_a_launch_that_hangs_in_nccl_is_bounded_and_promises_nothing(monkeypatch):
    monkeypatch.setattr(transport, "LAUNCH_S", 0.2)
    monkeypatch.setattr(transport, "END_S", 0.6)
    with Group(2, PAIR) as ends:

        def send():
            with contextlib.suppress(CommError):
                ends[0].send(torch.ones(3), to=1, tag=1)

        with set_to(Setting.LAUNCH_TAKES_MS, 3000):
            thread = threading.Thread(target=send)
            thread.start()
            time.sleep(0.1)
            start = time.monotonic()
            ends[0].close()
            took = time.monotonic() - start
            thread.join(LIMIT_S)
        assert took < 2.0 and ends[0].unended_communicators == ("messages 0 -> 1",)
        with pytest.raises(CommError, match="rank 0"):
            ends[1].recv(None, source=0, tag=1).wait(LIMIT_S)
        assert 0 not in ends[1]._posted_by, "who was not counted in would be waited for"


def test_closing_while_the_thread_that_reads_announcements_hangs_in_nccl_is_bounded(monkeypatch):
    monkeypatch.setattr(transport, "LAUNCH_S", 0.1)
    monkeypatch.setattr(transport, "END_S", 0.4)
    with Group(2, PAIR) as ends, set_to(Setting.LAUNCH_TAKES_MS, 2000):
        ends[0].send(torch.ones(3), to=1, tag=1)
        time.sleep(0.2)  # its counterpart is being launched by now
        start = time.monotonic()
        ends[1].close()
        assert time.monotonic() - start < 1.5
        # the other direction's has ended too, unless this machine is so busy that it could not within END_S
        assert "messages 0 -> 1" in ends[1].unended_communicators and len(ends[1].unended_communicators) <= 2
        for stream in ends[1]._streams.values():
            assert stream.lock.acquire(timeout=LIMIT_S), "the launch is over before the group's memory goes"


def test_an_abort_frees_who_posts_a_receive_while_another_one_hangs_in_nccl():
    with Group(2, PAIR) as ends:
        freed = []

        def receive():
            with pytest.raises(GroupAborted):
                ends[1].recv(None, source=0, tag=2)
            freed.append(time.monotonic())

        with set_to(Setting.LAUNCH_TAKES_MS, 1500):
            ends[0].send(torch.ones(3), to=1, tag=1)
            time.sleep(0.2)  # its counterpart is being launched by now
            thread = threading.Thread(target=receive)
            thread.start()
            time.sleep(0.1)
            at = time.monotonic()
            ends[1].abort("the test says so")
            thread.join(LIMIT_S)
        assert freed and freed[0] - at < 0.8


def test_own_parts_of_other_sizes_are_refused_before_nccl_writes_over_other_memory():
    group = [0, 1]
    with Group(2, [CommunicatorKey((0, 1), name) for name in COLLECTIVES]) as ends:
        for call in (
            lambda: ends[0].all_gather([torch.ones(3), torch.ones(3)], torch.ones(4), group=group),
            lambda: ends[0].all_gather([torch.ones(3), torch.ones(3)], torch.ones(3, dtype=torch.float64), group=group),
            lambda: ends[0].reduce_scatter(torch.ones(2), [torch.ones(3), torch.ones(3)], group=group),
            lambda: ends[0].all_to_all([torch.ones(2), torch.ones(3)], [torch.ones(3), torch.ones(3)], group=group),
        ):
            with pytest.raises(CommError, match=r"for this rank's own part(.|\n)*the same size"):
                call()


def test_an_error_that_nccl_finds_in_the_background_breaks_the_group():
    with Group(2, [*PAIR, CommunicatorKey((0, 1), "all_reduce")]) as ends:
        standin.load().standin_set(Setting.OPERATIONS_UNTIL_ERROR, 1)
        reducing = ends[0].all_reduce(torch.ones(5), group=[0, 1])
        with pytest.raises(
            CommError, match=r"all_reduce of rank 0 with 1 .*all_reduce of 0,1 channel 0: NCCL failed.*system error"
        ):
            reducing.wait(LIMIT_S)
        with pytest.raises(CommError, match="unhandled system error"):
            ends[0].send(torch.ones(5), to=1, tag=1)
        ends[0].abort("after an error")
        with pytest.raises(CommError, match="rank 0"):
            ends[1].recv(None, source=0, tag=1).wait(LIMIT_S)
        assert not ends[0].unended_communicators


def test_an_error_at_a_call_is_raised_there():
    with Group(2, PAIR) as ends:
        standin.load().standin_set(Setting.LAUNCHES_UNTIL_ERROR, 1)
        with pytest.raises(CommError, match=r"NCCL failed at a send: .*unhandled system error"):
            ends[0].send(torch.ones(5), to=1, tag=1)


def test_an_error_between_the_parts_of_a_collective_keeps_the_memory_of_those_that_are_under_way():
    with Group(3, [CommunicatorKey((0, 1, 2), "all_reduce")]) as ends, set_to(Setting.DELAY_US, 200_000):
        standin.load().standin_set(Setting.LAUNCHES_UNTIL_ERROR, 2)
        with pytest.raises(CommError, match="NCCL failed at a group of operations"):
            ends[0].all_reduce(torch.ones(300_000), group=[0, 1, 2])
        (handle,) = ends[0]._handles
        assert handle.in_flight and handle.kept and not handle.released
        ends[0].abort("after an error")
        assert handle.released and not handle.release_if_done() and not handle.kept and not ends[0].unended_communicators


# -- connecting


def test_making_communicators_has_a_deadline_although_nccl_has_none():
    start = time.monotonic()
    with set_to(Setting.INIT_HANGS, 1):
        failed = Group(2, PAIR, deadline_s=0.5)
        assert time.monotonic() - start < LIMIT_S / 2
        for rank, error in enumerate(failed.ends):
            assert (isinstance(error, CommError) and f"rank {1 - rank}" in str(error)) or "could not make" in str(error), error
        late = [error for error in failed.ends if isinstance(error, CommTimeout)]
        assert late and "the NCCL communicator for messages 0 -> 1 within 0.5 s" in late[0].what
        assert "replace the worker" in late[0].cure
    failed.__exit__()
    deadline = time.monotonic() + LIMIT_S
    while standin.count(Count.ALIVE) or any(t.name.startswith("raypar-nccl") for t in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread that was left behind ends its communicator when it gets it"
        time.sleep(0.01)


def test_what_goes_wrong_in_the_first_exchange_is_told_before_the_deadline():
    start = time.monotonic()
    standin.load().standin_set(Setting.OPERATIONS_UNTIL_ERROR, 1)
    failed = Group(2, PAIR, deadline_s=2 * LIMIT_S)
    assert time.monotonic() - start < LIMIT_S
    for error in failed.ends:
        assert type(error) is CommError, error
        assert "messages 0 -> 1: NCCL failed at work in the background" in error.what and "NCCL_DEBUG" in error.cure
    failed.__exit__()
    assert standin.count(Count.ALIVE) == 0


class Full(HostDevice):
    """Has memory for one stream."""

    made = 0

    def stream(self):
        self.made += 1
        if self.made > 1:
            raise CommError("no memory is left", cure="none")
        return super().stream()


def test_who_gives_up_tells_the_others_at_once_and_what_they_cannot_end_is_known(monkeypatch):
    monkeypatch.setattr(transport, "END_S", 0.2)
    meshes = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(2)]
    addresses = [mesh.address for mesh in meshes]
    stuck, start = [], time.monotonic()

    def end(rank):
        control = meshes[rank].connect(rank=rank, size=2, addresses=addresses, generation=1, deadline_s=LIMIT_S)
        device = Full("full") if rank else HostDevice("other")
        return connect_nccl(control, device=device, communicators=PAIR, deadline_s=10 * LIMIT_S, report_unended=stuck.extend)

    with set_to(Setting.ABORT_TAKES_MS, 1000):
        first, second = in_threads(2, end)
    assert "messages 1 -> 0: no memory is left" in first.what and "no memory is left" in second.what
    assert "messages 0 -> 1" in stuck and time.monotonic() - start < LIMIT_S
    deadline = time.monotonic() + LIMIT_S
    while standin.count(Count.ALIVE):
        assert time.monotonic() < deadline, "a communicator without a stream is aborted, too"
        time.sleep(0.01)
    for mesh in meshes:
        mesh.close()


def test_whoever_waits_for_several_ranks_hears_what_another_one_says_meanwhile():
    class Never:
        def done(self):
            return False

        def wait(self, timeout_s):
            time.sleep(timeout_s)
            raise CommTimeout("late", cure="none")

    start, looks = time.monotonic(), []

    def look():
        looks.append(1)
        if len(looks) == 3:
            raise CommError("rank 2 gave up", cure="none")

    with pytest.raises(CommError, match="rank 2 gave up"):
        wait_for_message_from_each_rank({1: Never()}, start + LIMIT_S, LIMIT_S, "said a word", look)
    assert time.monotonic() - start < LIMIT_S / 2
    with pytest.raises(CommTimeout, match=r"ranks \[1\] have not said a word within 0\.1 s"):
        wait_for_message_from_each_rank({1: Never()}, time.monotonic() + 0.1, 0.1, "said a word")


def test_a_rank_that_is_lost_while_communicators_are_made_is_named_before_the_deadline():
    meshes = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(2)]
    addresses = [mesh.address for mesh in meshes]
    start = time.monotonic()

    def end(rank):
        control = meshes[rank].connect(rank=rank, size=2, addresses=addresses, generation=1, deadline_s=LIMIT_S)
        if rank == 1:
            time.sleep(0.1)
            control.close()
            return None
        return connect_nccl(control, device=HostDevice("d"), communicators=PAIR, deadline_s=10 * LIMIT_S)

    error, _ = in_threads(2, end)
    assert isinstance(error, CommError) and "lost rank 1" in error.what
    assert time.monotonic() - start < LIMIT_S
    for mesh in meshes:
        mesh.close()


def test_ranks_on_one_device_are_refused_unless_nccl_was_told_to_share_it(monkeypatch):
    failed = Group(2, PAIR, device=lambda rank: HostDevice("GPU abc"))
    for error in failed.ends:
        assert isinstance(error, ClusterError)
        assert "ranks [0, 1] are on one device, GPU abc" in error.what and "NCCL_HOSTID" in error.cure
    failed.__exit__()
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    with set_to(Setting.VERSION, 23000, after=22907), Group(2, PAIR, device=lambda rank: HostDevice("GPU abc")) as ends:
        ends[0].send(torch.ones(1), to=1, tag=1).wait(LIMIT_S)


def test_ranks_that_name_different_communicators_are_told_which():
    failed = Group(2, lambda rank: PAIR if rank else [*PAIR, CommunicatorKey((0, 1), "all_reduce", 7)])
    first, second = failed.ends
    assert "only rank 0 names ['all_reduce of 0,1 channel 7'], only rank 1 nothing" in str(first)
    assert "only rank 0 ['all_reduce of 0,1 channel 7']" in str(second) or "rank 0" in str(second)
    failed.__exit__()


@pytest.mark.parametrize(
    "key",
    [
        CommunicatorKey((0, 0), "message"),
        CommunicatorKey((0, 1, 2), "message"),
        CommunicatorKey((1, 0), "all_reduce"),
        CommunicatorKey((0, 9), "broadcast"),
        CommunicatorKey((0, 1), "sum"),
    ],
    ids=str,
)
def test_communicators_that_mean_nothing_are_refused(key):
    failed = Group(2, lambda rank: [key] if rank == 0 else [])
    assert isinstance(failed.ends[0], CommError) and "names nothing that 2 ranks can do" in failed.ends[0].what
    failed.__exit__()


def test_more_communicators_than_a_device_can_serve_at_once_are_refused():
    failed = Group(2, PAIR, device=lambda rank: HostDevice(f"{rank}", max_communicators=1))
    assert all("would use 2 communicators; of more than 1 on cpu" in str(error) for error in failed.ends)
    assert all("CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_MAX_CTAS=4" in error.cure for error in failed.ends)
    failed.__exit__()


def test_ranks_with_different_versions_of_nccl_are_refused():
    hello = {"version": 22907, "device": "a", "blocks": 4, "shares": False, "communicators": [], "ids": {}}
    with pytest.raises(ClusterError, match=r"2\.28\.9: ranks \[1\]; 2\.29\.7: ranks \[0\]"):
        check_ranks_compatible({0: hello, 1: {**hello, "version": 22809, "device": "b"}}, [], 0)
    with pytest.raises(ClusterError, match=r"(?s)NCCL_MAX_CTAS: 4: ranks \[0, 2\]; 16: ranks \[1\].*NCCL_MAX_CTAS=4 for all"):
        check_ranks_compatible({0: hello, 1: {**hello, "blocks": 16, "device": "b"}, 2: {**hello, "device": "c"}}, [], 0)


# -- what is here


def test_the_library_is_found_logged_and_judged(caplog):
    with caplog.at_level("INFO", logger="raypar"):
        found = bindings.find_nccl_installation()
    assert found.nccl_version == 22907 and any(path.endswith("libnccl.so.2") for path in found.paths)
    assert "NCCL 2.29.7 from /" in caplog.text and f"CuPy {found.cupy_version} for CUDA {found.cupy_cuda}" in caplog.text
    bindings.check_nccl_installation(found, {})
    with (
        set_to(Setting.VERSION, 21703, after=22907),
        pytest.raises(ClusterError, match=r"NCCL 2\.17\.3 .* is too old, 2\.18\.0"),
    ):
        bindings.check_nccl_installation(bindings.find_nccl_installation(), {})
    with pytest.raises(ClusterError, match="NCCL_COMM_BLOCKING=0"):
        bindings.check_nccl_installation(found, {"NCCL_COMM_BLOCKING": "0"})
    with pytest.raises(ClusterError, match=r"(?s)CUDA_LAUNCH_BLOCKING makes a worker stand still.*unset CUDA_LAUNCH_BLOCKING"):
        bindings.check_nccl_installation(found, {"CUDA_LAUNCH_BLOCKING": "1"})
    bindings.check_nccl_installation(found, {"CUDA_LAUNCH_BLOCKING": "0"})
    old = bindings.NcclInstallation("13.4.1", 13, 13, 22707, 22907, ())
    with pytest.raises(ClusterError, match=r"(?s)CuPy 13\.4\.1 is too old, 14.*pip install 'raypar\[cuda13\]'"):
        bindings.check_nccl_installation(old, {})


@pytest.mark.parametrize(
    "torch_cuda, cupy_cuda, said",
    [
        (None, 13, "built without CUDA"),
        (12, 13, r"PyTorch is for CUDA 12, CuPy \S+ for CUDA 13(.|\n)*cupy-cuda13x && pip install 'raypar\[cuda12\]'"),
        (13, 12, r"PyTorch is for CUDA 13, CuPy \S+ for CUDA 12(.|\n)*cupy-cuda12x && pip install 'raypar\[cuda13\]'"),
    ],
)
def test_cupy_for_another_cuda_than_pytorch_is_explained_with_its_cure(torch_cuda, cupy_cuda, said):
    found = bindings.NcclInstallation("14.2.0", cupy_cuda, torch_cuda, 22707, 22907, ())
    with pytest.raises(ClusterError, match=said):
        bindings.check_cuda_versions(found)


def test_two_packages_of_cupy_are_refused(monkeypatch):
    class Package:
        def __init__(self, name):
            self.metadata = {"Name": name}

    monkeypatch.setattr(bindings, "distributions", lambda: map(Package, ("cupy-cuda12x", "numpy", "cupy-cuda13x")))
    with pytest.raises(ClusterError, match=r"cupy-cuda12x and cupy-cuda13x are installed side by side"):
        bindings.check_nccl_installation(bindings.find_nccl_installation(), {})
    monkeypatch.setattr(bindings, "distributions", lambda: map(Package, ("cupy-cuda13x", "numpy", "cupy_cuda13x")))
    bindings.check_nccl_installation(bindings.find_nccl_installation(), {})  # a folder that is twice on the path
    monkeypatch.setattr(bindings, "distributions", lambda: map(Package, ("cupy-cuda12x",)))
    monkeypatch.setattr(bindings, "cuda_of_torch", lambda: 13)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(
        ClusterError, match=r"(?s)cannot be imported.*pip uninstall -y cupy-cuda12x && pip install 'raypar\[cuda13\]'"
    ):
        bindings.load_nccl_bindings()


def test_a_missing_library_of_cupys_cuda_is_not_asked_for_where_pytorch_has_another(monkeypatch):
    import cupy.cuda.nccl

    monkeypatch.setattr(cupy.cuda.nccl, "available", False)
    mine = bindings.cuda_of_cupy()
    for torch_cuda, said in (
        (mine, "finds no libnccl.so.2"),
        (None, "finds no libnccl.so.2"),
        (11, "PyTorch is for CUDA 11, CuPy"),
    ):
        monkeypatch.setattr(bindings, "cuda_of_torch", lambda torch_cuda=torch_cuda: torch_cuda)
        with pytest.raises(ClusterError, match=said):
            bindings.load_nccl_bindings()


@pytest.mark.parametrize("processors, alone, as_worker", [(132, 4, 31), (108, 3, 26), (40, 1, 9), (20, 0, 4)])
def test_communicators_leave_a_queue_and_a_multiprocessor_to_the_computation(processors, alone, as_worker, monkeypatch):
    for name in nccl_device.WORKER_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert nccl_device.max_concurrent_communicators(processors) == alone
    for name, value in nccl_device.WORKER_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert nccl_device.max_concurrent_communicators(processors) == as_worker
    assert as_worker * 4 < processors and as_worker <= nccl_device.MAX_COMMUNICATORS


@pytest.mark.parametrize(
    "communicators, of_processors",
    [
        (2, {132: 16, 108: 16, 72: 16, 40: 16, 20: 8}),
        (3, {132: 16, 108: 16, 72: 16, 58: 16, 40: 8}),
        (6, {132: 16, 108: 16, 72: 8, 40: 4}),
        (8, {132: 16, 108: 8, 72: 8, 40: 4}),
        (9, {132: 8, 108: 8, 40: 4}),
        (17, {132: 4, 160: 8, 108: 4}),
        (31, {132: 4, 250: 8, 512: 16}),
    ],
)
def test_kernels_have_as_many_blocks_as_all_communicators_at_once_leave_room_for(communicators, of_processors, monkeypatch):
    for processors, blocks in of_processors.items():
        assert nccl_device.blocks_that_fit(communicators, processors) == blocks
        monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        monkeypatch.setenv(nccl_device.COMMUNICATORS, str(communicators))
        nccl_device.limit_blocks(processors)
        assert os.environ["NCCL_MAX_CTAS"] == str(blocks)
        before = min(31, (processors - 1) // 4)  # what workers with 4 blocks for every job could use
        assert nccl_device.max_concurrent_communicators(processors) >= min(communicators, before), "none is refused for it"


@pytest.mark.parametrize("communicators, own, left", [("3", "24", "24"), (None, "24", "24"), (None, None, None)])
def test_who_sets_the_blocks_of_nccls_kernels_keeps_that(communicators, own, left, monkeypatch):
    for name, value in ((nccl_device.COMMUNICATORS, communicators), ("NCCL_MAX_CTAS", own)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    nccl_device.limit_blocks(132)
    assert os.environ.get("NCCL_MAX_CTAS") == left


@pytest.mark.parametrize("text", ["0", "-1", "many", "4.5"])
def test_a_setting_that_is_no_number_is_named(text, monkeypatch):
    monkeypatch.setenv("NCCL_MAX_CTAS", text)
    with pytest.raises(ClusterError, match=f"NCCL_MAX_CTAS={text} is no positive number"):
        nccl_device.positive_setting("NCCL_MAX_CTAS", 32)
    monkeypatch.setenv("NCCL_MAX_CTAS", "")
    assert nccl_device.positive_setting("NCCL_MAX_CTAS", 32) == 32


def test_fewer_gpus_than_the_plan_wants_and_none_at_all_are_said():
    bindings.check_gpu_count(4, 4)
    with pytest.raises(ClusterError, match="4 GPU workers, and there are 3 GPUs"):
        bindings.check_gpu_count(4, 3)
    with pytest.raises(ClusterError, match="4 GPU workers, and there is no GPU"):
        bindings.check_gpu_count(4, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(bindings, "cuda_of_torch", lambda: None)
    with pytest.raises(ClusterError, match="built without CUDA"):
        CudaDevice()
    monkeypatch.setattr(bindings, "cuda_of_torch", lambda: 13)
    with pytest.raises(ClusterError, match="wants GPU 0 and sees 0"):
        CudaDevice()
