"""One suite for all transports: local on the virtual clock and in threads; TCP, Unix sockets and NCCL in threads and processes.

NCCL is CuPy's real bindings over the stand-in for its library (`helpers.standin`), and host memory."""

import contextlib
import gc
import os
import socket
import threading
import time
from functools import partial

import pytest
import torch
from helpers import standin, transport_cases
from helpers.processes import CpuWait, Workers
from helpers.standin import needs_cupy
from helpers.transport_cases import CASES, CREDENTIAL, LIMIT_S

from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import run_routine
from raypar.comm.tcp import rendezvous
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import RunCredential
from raypar.comm.transport import Transport
from raypar.errors import CommError, CommTimeout, GroupAborted

pytestmark = pytest.mark.part(5)


def connected(size, generation=1, unix_sockets=True):
    """`size` ends in this process, over TCP or Unix sockets, and their listeners."""
    meshes = [TcpEndpoint.listen(credential=CREDENTIAL, unix_sockets=unix_sockets) for _ in range(size)]
    addresses = [mesh.address for mesh in meshes]

    def connect(rank):
        return meshes[rank].connect(rank=rank, size=size, addresses=addresses, generation=generation, deadline_s=LIMIT_S)

    return meshes, in_threads(size, connect)


def test_ranks_that_are_no_peers_have_no_socket_and_a_message_to_one_is_an_error():
    size = 5
    meshes = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(size)]
    addresses = [mesh.address for mesh in meshes]

    def beside(rank):
        return {(rank - 1) % size, (rank + 1) % size}

    def connect(rank):
        given = {"rank": rank, "size": size, "addresses": addresses, "generation": 1, "deadline_s": LIMIT_S}
        return meshes[rank].connect(**given, peers=beside(rank))

    ends = in_threads(size, connect)
    try:
        assert [end.peers for end in ends] == [frozenset(beside(rank)) for rank in range(size)]
        sent = ends[1].send(torch.arange(3.0), to=2, tag=4)
        assert torch.equal(_received(ends[2], source=1, tag=4), torch.arange(3.0))
        sent.wait(LIMIT_S)
        for call in (
            lambda: ends[0].send(torch.zeros(1), to=2, tag=0),
            lambda: ends[0].recv(None, source=3, tag=0),
            lambda: ends[0].all_reduce(torch.zeros(1), group=(0, 1, 2)),
        ):
            with pytest.raises(
                CommError, match=r"rank 0 has a message for, or from, ranks \[[23]\], with which it has no conn"
            ):
                call()
    finally:
        for end in (*ends, *meshes):
            end.close()


def _received(end, *, source, tag):
    handle = end.recv(None, source=source, tag=tag)
    handle.wait(LIMIT_S)
    return handle.tensor()


def test_a_rank_that_only_one_end_names_is_missed_by_name():
    meshes = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(2)]
    addresses = [mesh.address for mesh in meshes]
    end = meshes[1].connect(rank=1, size=2, addresses=addresses, generation=1, deadline_s=LIMIT_S, peers=())
    try:
        with pytest.raises(CommTimeout, match=r"ranks \[1\] did not connect within"):
            meshes[0].connect(rank=0, size=2, addresses=addresses, generation=1, deadline_s=0.2, peers=(1,))
    finally:
        for one in (end, *meshes):
            one.close()


def in_threads(size, body):
    """`body(rank)` in a thread per rank; results, or the first error."""
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


def connected_by(kind, size):
    """`connected`, by the transport's name."""
    meshes, ends = connected(size, unix_sockets=kind != "tcp")
    if kind in ("nccl", "mixed"):
        standin.load()
        only = frozenset({torch.float32, torch.bfloat16, torch.bool}) if kind == "mixed" else None
        ends = in_threads(size, lambda rank: transport_cases.over_nccl(ends[rank], f"rank {rank}", only))
    return meshes, ends


@pytest.fixture(params=["local", "tcp", "unix", needs_cupy("nccl")])
def pair(request):
    """Two ends in this process."""
    if request.param == "local":
        yield LocalMesh(2).transports
        return
    meshes, ends = connected_by(request.param, 2)
    yield ends
    for end in (*ends, *meshes):
        end.close()


@pytest.fixture(scope="module", params=["tcp", pytest.param("unix", marks=pytest.mark.full), needs_cupy("nccl")])
def workers(request):
    """Four processes. Over Unix sockets, `full`, every run on Ray of the default suite goes; and threads, below."""
    made = Workers(4)
    made.kind = request.param
    yield made
    made.end()


@pytest.fixture(scope="module", params=["tcp", "unix", needs_cupy("nccl"), needs_cupy("mixed")])
def three_ends(request):
    """In this process, used by all cases: nothing of one case disturbs the next. `mixed`: `nccl` for some dtypes only."""
    meshes, ends = connected_by(request.param, 3)
    yield ends
    for end in (*ends, *meshes):
        end.close()


generations = iter(range(1, 10**6))


LARGE = ("big_both_ways", "unexpected_then_posted", "batches", "sends_do_not_wait_for_each_other")
"""Cases with tensors of many MB: run in one order only."""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name, seed", [(n, s) for n in CASES for s in (None, 1, 2) if n not in LARGE or s is None])
def test_on_the_virtual_clock(name, size, seed):
    mesh = LocalMesh(size)
    CooperativeScheduler(seed).run([CASES[name](t) for t in mesh.transports], mesh)


@pytest.mark.parametrize("name", CASES)
def test_local_in_threads(name):
    mesh = LocalMesh(3)
    in_threads(3, lambda rank: run_routine(CASES[name](mesh.transports[rank]), LIMIT_S))


@pytest.mark.parametrize("name", CASES)
def test_in_threads(name, three_ends):
    for end in three_ends:
        for counter in (end.ledger.sent, end.ledger.received, end.ledger.messages):
            counter.clear()
    in_threads(3, lambda rank: run_routine(CASES[name](three_ends[rank]), LIMIT_S))


@pytest.mark.parametrize("name", CASES)
def test_in_four_processes_with_the_ledger_of_local(name, workers):
    generation = next(generations)
    addresses = workers.each(transport_cases.listen, workers.kind)
    workers.each(transport_cases.connect, addresses, [0, 1, 2, 3], generation)
    ledgers = workers.each(transport_cases.run_case, name)
    workers.each(transport_cases.close)
    mesh = LocalMesh(4)
    CooperativeScheduler().run([CASES[name](t) for t in mesh.transports], mesh)
    assert ledgers == [t.ledger.as_dict() for t in mesh.transports]


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4, 5])
def test_tcp_in_threads_again_and_again(size):
    meshes, ends = connected(size)
    for _ in range(5):
        for name in (n for n in CASES if n not in ("big_both_ways", "all_reduce_bytes")):
            for end in ends:
                for counter in (end.ledger.sent, end.ledger.received, end.ledger.messages):
                    counter.clear()
            in_threads(size, lambda rank, name=name: run_routine(CASES[name](ends[rank]), LIMIT_S))
    for end in (*ends, *meshes):
        end.close()


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(10))
def test_many_interleavings_on_the_virtual_clock(size, seed):
    for name in (n for n in CASES if n not in LARGE):
        mesh = LocalMesh(size)
        CooperativeScheduler(seed).run([CASES[name](t) for t in mesh.transports], mesh)


def test_every_transport_has_the_protocol(pair):
    assert all(isinstance(end, Transport) for end in pair)


def test_memory_of_messages_is_kept_until_it_is_to_be_forgotten_and_what_was_received_stays(pair):
    def receive(value):
        sent = torch.full((1 << 18,), value)
        handles = [pair[1].send(sent, to=0, tag=1), pair[0].recv(None, source=1, tag=1)]
        for handle in handles:
            handle.wait(LIMIT_S)
        return handles[1].tensor()

    receive(1.0)
    pool = getattr(pair[0], "control", pair[0]).pool
    kept = pool.held_bytes
    held = receive(2.0)
    assert pool.held_bytes == kept and isinstance(held, torch.Tensor)
    pair[0].forget_freed_memory()
    assert pool.held_bytes == 0 and (held == 2).all() and (receive(3.0) == 3).all() and (held == 2).all()


def test_a_timeout_names_operation_peer_and_tag(pair):
    handle = pair[0].recv(None, source=1, tag=77)
    start = time.monotonic()
    with pytest.raises(CommTimeout, match=r"recv tag 77 of rank 0 with 1 .*0\.05 s"):
        handle.wait(0.05)
    assert 0.04 < time.monotonic() - start < 1
    with pytest.raises(CommTimeout, match="all_reduce of rank 0 with 1"):
        pair[0].all_reduce(torch.ones(3), group=[0, 1]).wait(0.01)


def test_a_handle_says_when_it_is_done_without_blocking(pair):
    handle = pair[0].recv(None, source=1, tag=1)
    assert not handle.done()
    with pytest.raises(CommError, match="not done"):
        handle.tensor()
    pair[1].send(torch.ones(3), to=0, tag=1).wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while not handle.done():
        assert time.monotonic() < deadline
    assert handle.tensor().tolist() == [1, 1, 1]


@pytest.mark.parametrize("waits", ["recv", "all_reduce", "barrier"])
def test_abort_from_another_thread_frees_a_waiting_call_within_100_ms(pair, waits):
    handle = {
        "recv": lambda: pair[0].recv(None, source=1, tag=1),
        "all_reduce": lambda: pair[0].all_reduce(torch.ones(5), group=[0, 1]),
        "barrier": lambda: pair[0].barrier(group=[0, 1]),
    }[waits]()
    times = {}

    def abort():
        time.sleep(0.05)
        times["abort"] = time.monotonic()
        pair[0].abort("the test says so")

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(GroupAborted, match="the test says so"):
        handle.wait(LIMIT_S)
    assert time.monotonic() - times["abort"] < 0.1
    thread.join()
    with pytest.raises(GroupAborted, match="the test says so"):
        handle.done()
    for call in (
        lambda: pair[0].recv(None, source=1, tag=2),
        lambda: pair[0].send(torch.ones(2), to=1, tag=2),
        lambda: pair[0].barrier(group=[0]),
    ):
        with pytest.raises(GroupAborted, match="the test says so"):
            call()


def test_what_a_peer_has_pending_with_one_that_left_fails_naming_it(pair):
    before = pair[1].recv(None, source=0, tag=1)
    pair[0].close()
    start = time.monotonic()
    with pytest.raises(CommError, match="rank 0"):
        before.wait(LIMIT_S)
    after = pair[1].recv(None, source=0, tag=2)
    with pytest.raises(CommError, match="rank 0"):
        after.wait(LIMIT_S)
    assert time.monotonic() - start < 0.1


def test_two_threads_may_wait_on_one_transport(pair):
    handles = [pair[0].recv(None, source=1, tag=tag) for tag in (1, 2)]
    got = []

    def wait(handle):
        handle.wait(LIMIT_S)
        got.append(int(handle.tensor()))

    threads = [threading.Thread(target=wait, args=(h,)) for h in handles]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    for tag in (2, 1):
        pair[1].send(torch.tensor(tag), to=0, tag=tag)
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(got) == [1, 2]


def test_a_tcp_send_of_more_than_the_buffers_goes_on_while_the_sender_computes():
    meshes, ends = connected(2)
    handle = ends[0].send(torch.ones(transport_cases.BIG * 2), to=1, tag=1)
    got = ends[1].recv(None, source=0, tag=1)
    deadline = time.monotonic() + LIMIT_S
    while not (handle.done() and got.done()):  # neither end waits in the transport
        time.sleep(0.001)
        assert time.monotonic() < deadline
    assert got.tensor().sum() == transport_cases.BIG * 2
    for end in (*ends, *meshes):
        end.close()


def test_closing_leaves_no_thread_and_no_open_file():
    meshes, ends = connected(2)  # whatever is made once is made now
    for end in (*ends, *meshes):
        end.close()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for generation in range(1, 6):
        meshes, ends = connected(3, generation)
        pending = ends[0].recv(None, source=1, tag=1)
        ends[1].send(torch.ones(100_000), to=2, tag=1)
        if generation % 2:
            ends[2].abort("early")
        for end in (*ends, *ends, *meshes, *meshes):
            end.close()
        with pytest.raises(CommError):
            pending.wait(1)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


def test_who_closes_first_after_a_last_exchange_disturbs_nobody():
    def body(rank, ends):
        pieces = [torch.zeros(20_000) for _ in range(2)]
        handles = [ends[rank].all_gather(pieces, pieces[rank], group=[0, 1], channel=c) for c in range(3)]
        for handle in handles:
            handle.wait(LIMIT_S)
        ends[rank].close()

    for generation in range(40):
        meshes, ends = connected(2, generation)
        in_threads(2, partial(body, ends=ends))
        for mesh in meshes:
            mesh.close()


def test_buffers_are_used_again_without_the_help_of_the_garbage_collector():
    meshes, ends = connected(2)
    gc.collect()
    gc.disable()
    try:

        def body(rank):
            held = []
            for _ in range(30):
                ends[rank].all_reduce(torch.ones(100_000), group=[0, 1]).wait(LIMIT_S)
                ends[rank].send(torch.ones(50_000), to=1 - rank, tag=1)
                handle = ends[rank].recv(None, source=1 - rank, tag=1)
                handle.wait(LIMIT_S)
                ends[rank].barrier(group=[0, 1]).wait(LIMIT_S)
                del handle
                held.append(ends[rank].pool.held_bytes)
            return held

        for held in in_threads(2, body):
            assert held[-1] <= 4 * 262_144, "a few blocks of 256 KB, for messages that overlapped; not one for each message"
    finally:
        gc.enable()
    for end in (*ends, *meshes):
        end.close()


def test_another_run_is_refused():
    meshes = [TcpEndpoint.listen(credential=RunCredential.fresh(f"run {rank}"), unix_sockets=False) for rank in range(2)]
    addresses = [mesh.address for mesh in meshes]

    def connect(rank):
        with pytest.raises(CommError) as caught:
            meshes[rank].connect(rank=rank, size=2, addresses=addresses, generation=1, deadline_s=0.3)
        return str(caught.value)

    first, second = in_threads(2, connect)
    assert "ranks [1] did not connect" in first
    assert "rank 1 cannot reach rank 0" in second and "does not prove that it belongs to run 'run 1'" in second
    for mesh in meshes:
        mesh.close()


def test_an_old_generation_is_refused_and_a_newer_one_waits():
    meshes = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(3)]
    addresses = [mesh.address for mesh in meshes]
    seen = {}

    def connect(rank):
        if rank == 2:  # comes with the old generation, first
            try:
                meshes[2].connect(rank=2, size=3, addresses=addresses, generation=4, deadline_s=LIMIT_S)
            except GroupAborted as error:
                seen["old"] = str(error)
            return None
        if rank == 0:  # is told of the new generation late; until then it tries an older one
            with pytest.raises(CommTimeout):
                meshes[0].connect(rank=0, size=2, addresses=addresses[:2], generation=3, deadline_s=0.2)
        return meshes[rank].connect(rank=rank, size=2, addresses=addresses[:2], generation=5, deadline_s=LIMIT_S)

    ends = in_threads(3, connect)
    assert "generation 4 is over, this is 5" in seen["old"]
    in_threads(2, lambda rank: ends[rank].barrier(group=[0, 1]).wait(LIMIT_S))
    for end in (*ends[:2], *meshes):
        end.close()


@contextlib.contextmanager
def aborting(mesh):
    """Aborts what `mesh` connects, every 0.05 s: an abort before connecting has begun is meant for another generation."""
    over = threading.Event()

    def abort():
        while not over.wait(0.05):
            mesh.abort_connect("a newer plan")

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_connecting_can_be_aborted_and_has_a_deadline():
    meshes = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(2)]
    addresses = [mesh.address for mesh in meshes]
    waited, start = CpuWait(os.getpid()), time.monotonic()
    with aborting(meshes[0]), pytest.raises(GroupAborted, match="a newer plan"):
        meshes[0].connect(rank=0, size=2, addresses=addresses, generation=1, deadline_s=LIMIT_S)
    assert time.monotonic() - start - waited.seconds() < 0.15
    with pytest.raises(CommTimeout, match=r"ranks \[1\] did not connect within 0.1 s"):
        meshes[0].connect(rank=0, size=2, addresses=addresses, generation=2, deadline_s=0.1)
    meshes[0].close()
    with pytest.raises(CommError, match="cannot reach rank 0"):
        meshes[1].connect(rank=1, size=2, addresses=addresses, generation=2, deadline_s=1)
    meshes[1].close()


@contextlib.contextmanager
def machine_that_cannot_be_reached():
    """An address where nothing is refused and nothing answers: packets are dropped, as those of a broken network."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as clients:
        for _ in range(3):  # more than the queue has room for; the kernel drops what comes then
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


def test_a_machine_that_cannot_be_reached_keeps_no_rank_from_leaving_the_rendezvous():
    """A rank that waited for the connection answered nobody for 5 s, and was taken for one that hangs."""
    mesh = TcpEndpoint.listen(credential=CREDENTIAL)
    with machine_that_cannot_be_reached() as nowhere:
        start = time.monotonic()
        with aborting(mesh), pytest.raises(GroupAborted, match="a newer plan"):
            mesh.connect(rank=1, size=2, addresses=[nowhere, mesh.address], generation=1, deadline_s=LIMIT_S)
        with pytest.raises(CommTimeout, match=r"ranks \[0\] did not connect within 0.1 s"):
            mesh.connect(rank=1, size=2, addresses=[nowhere, mesh.address], generation=2, deadline_s=0.1)
        assert time.monotonic() - start < rendezvous.CONNECT_SOCKET_S / 2
    mesh.close()


def test_a_rank_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous, "CONNECT_SOCKET_S", 0.05)
    mesh = TcpEndpoint.listen(credential=CREDENTIAL)
    said = "rank 1 cannot reach rank 0 at 127.0.0.1:.*: no connection within 0.05 s"
    with machine_that_cannot_be_reached() as nowhere, pytest.raises(CommError, match=said):
        mesh.connect(rank=1, size=2, addresses=[nowhere, mesh.address], generation=1, deadline_s=LIMIT_S)
    mesh.close()


@pytest.mark.parametrize("taken", [False, True])
def test_workers_of_one_machine_meet_over_unix_sockets_or_tcp_where_the_name_is_taken(taken, monkeypatch):
    squatter = socket.socket(socket.AF_UNIX)
    if taken:  # by one that does not answer
        squatter.bind(b"\0raypar-test")
        monkeypatch.setattr(rendezvous, "unix_socket_name", lambda address, credential: b"\0raypar-test")
    meshes, ends = connected(2)
    families = {c.socket.family for end in ends for c in end._connections.values()}
    assert families == {socket.AF_INET if taken else socket.AF_UNIX}
    in_threads(2, lambda rank: ends[rank].barrier(group=[0, 1]).wait(LIMIT_S))
    for end in (*ends, *meshes, squatter):
        end.close()


def test_garbage_on_the_port_is_ignored():
    meshes = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(2)]
    addresses = [mesh.address for mesh in meshes]
    noise = []
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\x00" * 10):
        host, port = addresses[0].split(":")
        noise.append(socket.create_connection((host, int(port))))
        noise[-1].send(data)
    noise[1].close()
    ends = in_threads(
        2,
        lambda rank: meshes[rank].connect(rank=rank, size=2, addresses=addresses, generation=1, deadline_s=LIMIT_S),
    )
    in_threads(2, lambda rank: ends[rank].barrier(group=[0, 1]).wait(LIMIT_S))
    for end in (*ends, *meshes, *noise):
        end.close()
