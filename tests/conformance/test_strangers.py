"""Whatever a stranger sends to a worker's port, and whatever is damaged on the way of a peer: the connection is closed, or the
peer is named; the worker serves its real peers, and nothing is left behind.

Every byte of every message of the handshake and of every header is changed, left out, put in and cut off. The terminal says
how many cases there were; `pytest -m "full or not full"` tries them all.
"""

import gc
import json
import os
import re
import resource
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.strangers import (
    CASES,
    FalseAcceptor,
    Wiretap,
    challenge_to,
    footprint,
    hello_of,
    knock,
    memory_bytes,
    mutations,
    some,
)
from helpers.transport_cases import CREDENTIAL, LIMIT_S

from raypar.actors.worker_actor import is_out_of_memory
from raypar.comm import sent_tensor_layout, shared_memory
from raypar.comm.nccl import connect, tagged_messages
from raypar.comm.tcp import acceptor as tcp_accept
from raypar.comm.tcp import message_header, rendezvous
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import (
    ACCEPTOR,
    ANSWER,
    CHALLENGE,
    DIALER,
    HELLO,
    MAGIC,
    MAX_REASON_BYTES,
    PROOF_BYTES,
    VERSION,
    AcceptorHandshake,
    DialerHandshake,
    RankClaim,
    RunCredential,
    pack_answer,
)
from raypar.comm.tcp.transport import TcpTransport
from raypar.errors import CommError, CommTimeout

HANDSHAKE_S = 0.12
CLOSED_S = HANDSHAKE_S + 3.0
"""By then every bad connection is closed; a busy machine has its part in it."""
ROOM_BYTES = 64 << 20
SHARES = [12, pytest.param(1, marks=pytest.mark.full)]
"""One of so many cases."""

OLD_GREETING = struct.pack("<IHHQII", MAGIC, 1, 30_000, 1, 1, 2) + b"\xff" * 30_000
"""It once ended a run: well-formed, and the name of the run too long for the answer."""


@pytest.fixture(scope="module", autouse=True)
def no_garbage_of_others():
    """Their descriptors are not counted."""
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """Threads and descriptors are back to where they were, no thread has raised, memory is what it was."""
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args))
    monkeypatch.setattr(tcp_accept, "HANDSHAKE_S", HANDSHAKE_S)
    before, held = footprint(), memory_bytes()
    yield
    if footprint() != before:
        gc.collect()
    assert not raised, raised
    assert footprint() == before
    assert memory_bytes() - held < ROOM_BYTES


class Peers:
    """Two real workers, and the doors of the first: its TCP port and its Unix name."""

    def __init__(self) -> None:
        self.meshes = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(2)]
        self.addresses = [mesh.address for mesh in self.meshes]
        host, _, port = self.addresses[0].rpartition(":")
        self.doors = [(host, int(port)), rendezvous.unix_socket_name(self.addresses[0], CREDENTIAL)]
        self.generation = 100

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for mesh in self.meshes:
            mesh.close()

    def connect(self, rank):
        return self.meshes[rank].connect(
            rank=rank, size=2, addresses=self.addresses, generation=self.generation, deadline_s=LIMIT_S
        )

    def work(self, meanwhile=lambda: None):
        """They meet and exchange a tensor; what happens `meanwhile`, happens while the first waits for the second."""
        self.generation += 1
        with ThreadPoolExecutor(1) as other:
            waiting = other.submit(self.connect, 0)
            result = meanwhile()
            start = time.monotonic()
            ends = [self.connect(1), waiting.result()]
            took = time.monotonic() - start
        handles = [end.all_reduce(torch.arange(1000.0), group=[0, 1]) for end in ends]
        for handle in handles:
            handle.wait(LIMIT_S)
        for end in ends:
            end.close()
        return result, took


@pytest.fixture
def peers():
    with Peers() as made:
        yield made


def refused(knocks, names):
    """None was let in, all were closed; the worker has said no more than its challenge, or why not."""
    left = [name for one, name in zip(knocks, names, strict=True) if not one.closed]
    assert not left, left[:10]
    let_in = [name for one, name in zip(knocks, names, strict=True) if pack_answer() in one.heard[CHALLENGE.size :]]
    assert not let_in, let_in[:10]
    assert all(len(one.heard) <= CHALLENGE.size + ANSWER.size + MAX_REASON_BYTES for one in knocks)


# -- every byte of the handshake, at a worker's doors


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("said", ["HELLO", "PROOF"])
def test_a_damaged_hello_or_proof_is_closed_and_the_worker_serves_its_peers(said, share, peers):
    """The strongest case: all but the damaged bytes come from somebody of the run, who asks for a place that is not there."""
    kinds = mutations(HELLO.size if said == "HELLO" else PROOF_BYTES)
    cases = some([(what, mutate, hangs_up) for what, mutate in kinds for hangs_up in (False, True)], share)

    def saying(mutate, hangs_up):
        hello, answer = hello_of(CREDENTIAL, RankClaim(peers.generation + 1, 7, 0, 9))
        if said == "HELLO":
            return mutate(hello), answer, hangs_up
        return hello, lambda challenge: mutate(answer(challenge)), hangs_up

    for start in range(0, len(cases), 100):
        batch = cases[start : start + 100]
        sayings = [saying(mutate, hangs_up) for _, mutate, hangs_up in batch]
        if start % 200:  # between two generations
            knocks = knock(peers.doors, sayings, CLOSED_S)
            peers.work()
        else:
            knocks, _ = peers.work(lambda sayings=sayings: knock(peers.doors, sayings, CLOSED_S))
        refused(knocks, [f"{what}, {'hangs up' if hangs_up else 'stays'}" for what, _, hangs_up in batch])
    CASES[said] += len(cases)


def test_noise_is_closed(peers):
    noise = [OLD_GREETING, b"GET / HTTP/1.1\r\n\r\n", b"", b"\x00" * 10, b"\xff" * 30_000, os.urandom(1 << 20)]
    noise += [struct.pack("<II", MAGIC, VERSION) + os.urandom(rest) for rest in (0, 1, 51, 52, 53, 83, 84, 85, 1 << 20)]
    sayings = [(data, lambda challenge: os.urandom(PROOF_BYTES), False) for data in noise for _ in peers.doors]
    knocks, _ = peers.work(lambda: knock(peers.doors, sayings, CLOSED_S))
    refused(knocks, [repr(data[:20]) for data, _, _ in sayings])
    CASES["noise"] += len(sayings)


# -- every byte of the handshake, at a worker that dials


def dialed(play, hangs_up, deadline_s):
    """What `connect` of rank 1 raises when rank 0 plays so, or the first receive."""
    false, mesh = FalseAcceptor(play, hangs_up), TcpEndpoint.listen(credential=CREDENTIAL)
    try:
        end = mesh.connect(rank=1, size=2, addresses=[false.address, mesh.address], generation=1, deadline_s=deadline_s)
        try:
            end.recv(torch.empty(3), source=0, tag=1).wait(LIMIT_S)
        finally:
            end.close()
    except CommError as error:
        return error
    finally:
        mesh.close()
        false.close()
    return None


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("said", ["CHALLENGE", "welcome", "refusal"])
def test_a_damaged_challenge_or_answer_is_an_error_that_names_the_rank(said, share, monkeypatch):
    monkeypatch.setattr(rendezvous, "MAX_DIALS", 2)
    if said == "CHALLENGE":
        monkeypatch.setattr(rendezvous, "CHALLENGE_S", HANDSHAKE_S)
    answer = pack_answer("generation 3 is over, this is 4" if said == "refusal" else "")
    cases = some(mutations(CHALLENGE.size if said == "CHALLENGE" else len(answer)), share)
    header = message_header.pack_header(torch.zeros(4), 1, 0, 1)

    def case(what, mutate, hangs_up):
        def play(sock, hello):
            challenge = challenge_to(CREDENTIAL, hello)
            if said == "CHALLENGE":
                sock.sendall(mutate(challenge))
                return
            sock.sendall(challenge)
            played.append(sock.recv(PROOF_BYTES, socket.MSG_WAITALL))
            sock.sendall(mutate(answer) + header * (said == "welcome"))

        played: list[bytes] = []
        deadline_s = LIMIT_S if said == "CHALLENGE" else 2 * HANDSHAKE_S
        error = dialed(play, hangs_up, deadline_s)
        while said != "CHALLENGE" and b"" in (played or [b""]) and deadline_s < LIMIT_S:
            played.clear()  # a busy machine: the time was over before there was an answer
            deadline_s *= 2
            error = dialed(play, hangs_up, deadline_s)
        proven = said == "CHALLENGE" or {len(proof) for proof in played} == {PROOF_BYTES}
        named = isinstance(error, CommError) and re.search(r"ranks? \[?0", error.what)
        return None if proven and named else f"{what}: {error!r}, {played}"

    with ThreadPoolExecutor(16) as at_once:
        both = [at_once.submit(case, *one, hangs_up) for one in cases for hangs_up in (False, True)]
        wrong = [future.result() for future in both]
    assert not any(wrong), [one for one in wrong if one][:10]
    CASES[said] += len(wrong)


# -- what only looks like the run's


def test_a_recorded_conversation_that_is_sent_again_is_refused_at_both_ends_and_changes_nothing():
    """Every byte that a peer has said, its proof and its tensors: in the same generation, and while the next one meets."""
    meshes = [TcpEndpoint.listen(credential=CREDENTIAL, unix_sockets=False) for _ in range(2)]
    real = [mesh.address for mesh in meshes]
    host, _, port = real[0].rpartition(":")
    door = (host, int(port))
    tap = Wiretap(door)

    def meet(generation, dialed_address=real[0], meanwhile=lambda: None):
        """The ends of ranks 0 and 1, which dials; what happens `meanwhile` happens while rank 0 waits."""
        how = {"size": 2, "generation": generation, "deadline_s": LIMIT_S}
        with ThreadPoolExecutor(1) as other:
            waiting = other.submit(meshes[0].connect, rank=0, addresses=real, **how)
            meanwhile()
            dialer = meshes[1].connect(rank=1, addresses=[dialed_address, real[1]], **how)
            return [waiting.result(), dialer]

    def add(ends):
        values = [torch.arange(1000.0) + rank for rank in range(2)]
        for handle in [end.all_reduce(value, group=[0, 1]) for end, value in zip(ends, values, strict=True)]:
            handle.wait(LIMIT_S)
        return all(torch.equal(value, 2 * torch.arange(1000.0) + 1) for value in values)

    def again():
        said = tap.dialer_said
        assert len(said) > HELLO.size + PROOF_BYTES + 4000, "its tensor, too"
        sayings = [(said, None, False), (said, None, True), (said[: HELLO.size], lambda challenge: said[HELLO.size :], False)]
        knocks = knock([door], sayings, CLOSED_S)
        refused(knocks, ["at once", "at once, and hangs up", "word by word"])

    ends = meet(7, tap.address)
    assert add(ends)
    again()
    assert add(ends), "the two go on"
    for generation, meanwhile in ((8, again), (9, lambda: None)):
        for end in ends:
            end.close()
        ends = meet(generation, meanwhile=meanwhile)
        assert add(ends)
    for end in ends:
        end.close()
    for mesh in meshes:
        mesh.close()
    tap.close()

    def play(sock, hello):
        sock.sendall(tap.acceptor_said)

    error = dialed(play, True, 4 * HANDSHAKE_S)
    assert isinstance(error, CommError) and re.search(r"ranks? \[?0", error.what)
    CASES["replays"] += 7


def test_only_who_has_the_secret_is_let_in_and_only_for_the_place_it_has_asked_for():
    claim = RankClaim(4, 2, 0, 3)
    hello, answer = hello_of(CREDENTIAL, claim)

    def let_in(say, answer):
        side = AcceptorHandshake(CREDENTIAL)
        challenge = side.feed(say)
        assert side.claim is None, "nothing is believed before the proof"
        try:
            assert side.feed(answer(challenge)) == b""
        except CommError:
            assert side.claim is None
        return side.claim

    assert let_in(hello, answer) == claim
    others = [RunCredential.fresh("test"), RunCredential("another run", CREDENTIAL.secret)]
    for other in others:
        assert let_in(*hello_of(other, claim)) is None, "another secret, or another run's name"
    for place in (RankClaim(5, 2, 0, 3), RankClaim(4, 1, 0, 3), RankClaim(4, 2, 1, 3), RankClaim(4, 2, 0, 4)):
        assert let_in(hello_of(CREDENTIAL, place)[0], answer) is None, "the proof is for one place"
    recorded = []
    assert let_in(hello, lambda challenge: recorded.append(answer(challenge)) or recorded[0]) == claim
    assert let_in(hello, lambda challenge: recorded[0]) is None, "a recording is worth nothing: the challenge is another one"
    assert let_in(hello, lambda challenge: challenge[-PROOF_BYTES:]) is None, "the acceptor's own proof, given back"


def test_an_acceptor_proves_itself_too_and_for_this_dialer_only():
    dial = DialerHandshake(CREDENTIAL, RankClaim(4, 2, 0, 3))
    right = challenge_to(CREDENTIAL, dial.hello)
    wrong = [
        challenge_to(RunCredential.fresh("test"), dial.hello),
        challenge_to(CREDENTIAL, DialerHandshake(CREDENTIAL, RankClaim(4, 2, 0, 3)).hello),
        right[:-PROOF_BYTES] + CREDENTIAL.proof(DIALER, dial.hello, right[8 : 8 + 32]),
    ]
    for challenge in wrong:
        with pytest.raises(CommError, match="does not prove that it belongs to run 'test'"):
            DialerHandshake.feed(same(dial), challenge)
    assert dial.feed(right) == CREDENTIAL.proof(DIALER, dial.hello, right[8 : 8 + 32])
    assert dial.feed(pack_answer()) == b"" and dial.answer == "" and dial.wanted_bytes == 0
    assert CREDENTIAL.proof(ACCEPTOR, dial.hello, bytes(32)) != CREDENTIAL.proof(DIALER, dial.hello, bytes(32))


def same(dial):
    """A dialer that has said the same."""
    twin = DialerHandshake(CREDENTIAL, RankClaim(0, 0, 0, 0))
    twin.hello = dial.hello
    return twin


def test_the_secret_is_shown_nowhere_and_is_long_enough():
    credential = RunCredential.fresh("nightly")
    for text in (repr(credential), str(credential), f"{[credential]}"):
        assert text.strip("[]") == "RunCredential(run='nightly')"
    assert credential.secret != RunCredential.fresh("nightly").secret and len(credential.secret) == 32
    with pytest.raises(CommError, match="the secret of run 'nightly' has 31 bytes, 32 are needed"):
        RunCredential("nightly", bytes(31))


def test_an_answer_has_a_longest_reason_whatever_is_refused():
    for reason in ("no", "\ufffd" * 30_000):
        dial = DialerHandshake(CREDENTIAL, RankClaim(1, 1, 0, 2))
        dial.feed(challenge_to(CREDENTIAL, dial.hello))
        packed = pack_answer(reason)
        while dial.answer is None:
            dial.feed(packed[:1])
            packed = packed[1:]
        assert not packed and 0 < len(dial.answer) <= MAX_REASON_BYTES and dial.answer[0] == reason[0]


def test_a_stranger_on_the_port_of_a_dead_worker_is_named_at_once():
    false, mesh = (
        FalseAcceptor(lambda sock, hello: sock.sendall(os.urandom(1000)), False),
        TcpEndpoint.listen(credential=CREDENTIAL),
    )
    start = time.monotonic()
    with pytest.raises(CommError, match=f"rank 1 cannot reach rank 0 at {false.address}: it does not prove that it belongs"):
        mesh.connect(rank=1, size=2, addresses=[false.address, mesh.address], generation=1, deadline_s=LIMIT_S)
    assert time.monotonic() - start < LIMIT_S / 4
    mesh.close()
    false.close()


def test_a_peer_that_waits_for_a_generation_to_come_and_gives_up_is_forgotten(peers):
    acceptor = peers.meshes[0]._listener._acceptor

    def gives_up():
        with pytest.raises(CommTimeout, match=r"ranks \[0\] did not connect"):
            peers.meshes[1].connect(rank=1, size=2, addresses=peers.addresses, generation=101, deadline_s=0.05)

    for _ in range(3):
        gives_up()
    deadline = time.monotonic() + CLOSED_S
    while acceptor._proven and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not acceptor._proven and not acceptor._by_fd
    peers.work()

    hello, answer = hello_of(CREDENTIAL, RankClaim(500, 1, 0, 2))
    lost = [socket.create_connection(peers.doors[0], timeout=LIMIT_S) for _ in range(3)]
    for one in lost:
        one.sendall(hello)
        one.sendall(answer(one.recv(CHALLENGE.size, socket.MSG_WAITALL)))
    while len(lost) > 1:
        oldest = lost.pop(0)
        assert oldest.recv(1) == b"", "a newer connection has its place"
        oldest.close()
    lost.pop().close()
    peers.work()


# -- floods


@pytest.mark.parametrize("strangers", [600, pytest.param(10_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("door", [0, 1], ids=["tcp", "unix"])
@pytest.mark.parametrize("says", [b"", struct.pack("<II", MAGIC, VERSION) + bytes(HELLO.size - 8)], ids=["nothing", "HELLO"])
def test_a_flood_of_silent_connections_neither_takes_all_descriptors_nor_delays_a_peer(says, door, strangers, peers):
    """They come without a pause, from a thread, and stay; meanwhile real peers meet again and again."""
    over, most = threading.Event(), [0]

    def flood():
        held = []
        try:
            for _ in range(strangers):
                stranger = socket.socket(socket.AF_UNIX if door else socket.AF_INET)
                stranger.settimeout(LIMIT_S)
                held.append(stranger)
                try:
                    stranger.connect(peers.doors[door])
                    stranger.sendall(says)
                except BlockingIOError:  # of a Unix socket: the queue is full
                    held.pop().close()
                    time.sleep(0.001)
                except (BrokenPipeError, ConnectionResetError):  # closed already, to make room for those that came later
                    held.pop().close()
                most[0] = max(most[0], len(peers.meshes[0]._listener._acceptor._pending))
                if len(held) > 500:
                    held.pop(0).close()
            time.sleep(0.1)
        finally:
            over.set()
            for stranger in held:
                stranger.close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    took = []
    while not over.is_set() or len(took) < 3:
        took.append(peers.work()[1])
    flooding.join()
    assert max(took) < 2.0, took
    assert most[0] <= tcp_accept.MAX_PENDING
    deadline = time.monotonic() + CLOSED_S
    while peers.meshes[0]._listener._acceptor._pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not peers.meshes[0]._listener._acceptor._pending, "the last ones are closed too, by themselves"
    CASES["floods"] += strangers


def test_a_process_without_a_descriptor_left_serves_its_peers_as_soon_as_there_is_one(peers):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [socket.create_connection(peers.doors[0]) for _ in range(8)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, hard))
        for _ in range(6):
            with socket.socket() as stranger:
                stranger.setblocking(False)
                stranger.connect_ex(peers.doors[0])
                time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    peers.work()
    for stranger in strangers:
        stranger.close()


# -- headers of a connection that is made


class Line:
    """Rank 0's transport, and the raw socket of rank 1."""

    def __init__(self) -> None:
        mine, self.peer = socket.socketpair()
        mine.setblocking(False)
        self.end = TcpTransport(0, 2, 1, {1: mine})

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.end.close()
        self.peer.close()


HEADED = {
    "a matrix": torch.arange(15.0).reshape(3, 5),
    "a number": torch.tensor(7, dtype=torch.int64),
    "nothing": torch.zeros(0, 4),
    "a part of a transposed matrix": torch.arange(15.0).reshape(3, 5).t()[1:],
}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("posted", [True, False], ids=["expected", "unexpected"])
def test_a_damaged_header_is_an_error_that_names_the_peer_before_anything_is_allocated(posted, share, monkeypatch):
    count = 0
    for tensor in HEADED.values():
        layout = sent_tensor_layout.layout_of(tensor)
        header = message_header.pack_header(sent_tensor_layout.message_of(tensor, layout), 1, 0, 7, layout)
        for what, mutate in some(mutations(len(header)), share):
            with Line() as line:
                allocated = []
                monkeypatch.setattr(line.end.pool, "empty", lambda *given, into=allocated: into.append(given))
                out = torch.full(tensor.shape, 3, dtype=tensor.dtype) if posted else None
                handle = line.end.recv(out, source=1, tag=7) if posted else None
                cut = what.startswith("cut")
                line.peer.sendall(mutate(header) + b"\xaa" * (0 if cut else tensor.nbytes))
                if cut or "left out" in what:
                    line.peer.shutdown(socket.SHUT_WR)
                handle = handle or line.end.recv(out, source=1, tag=7)
                with pytest.raises(CommError, match=r"lost rank 1: (a message header is damaged|it closed)"):
                    handle.wait(LIMIT_S)
                assert not allocated, what
                assert out is None or bool((out == 3).all()), what
            count += 1
    CASES["headers"] += count


def lying(dtype_code=0, dims=(3, 5), nbytes=60, generation=1, tag=7, count=None, strides=None, place=0):
    """A header that is whole, and wrong."""
    packed = struct.pack(f"<{len(dims)}Q", *dims)
    if strides is not None:
        packed += struct.pack(f"<{len(dims) + 1}Q", *strides, place)
        dtype_code |= message_header.LAID_OUT
    count = len(dims) if count is None else count
    head = message_header.FIXED_HEADER.pack(
        message_header.MESSAGE_MAGIC, dtype_code, count, generation, 0, tag, nbytes, zlib.crc32(packed)
    )
    return head + message_header.HEADER_CHECKSUM.pack(zlib.crc32(head)) + packed


LIES = {
    "2**63 bytes": lying(dims=(1 << 61,), nbytes=1 << 63),
    "2**64 - 4 bytes": lying(dims=((1 << 62) - 1,), nbytes=(1 << 64) - 4),
    "2**50 bytes": lying(dims=(1 << 48,), nbytes=1 << 50),
    "no bytes, a dim of 2**64 - 1": lying(dims=((1 << 64) - 1, 0), nbytes=0),
    "no bytes, dims that overflow": lying(dims=(1 << 40, 1 << 40, 0), nbytes=0),
    "a shape that wraps round to its bytes": lying(dims=(1 << 32, 1 << 32, 15), nbytes=60),
    "fewer bytes than the shape has": lying(nbytes=56),
    "more bytes than the shape has": lying(nbytes=64),
    "an unknown dtype": lying(dtype_code=len(message_header.SENDABLE_DTYPES)),
    "255 dims": lying(dims=(1,) * 255, nbytes=4),
    "another generation": lying(generation=2),
    "a place behind 64 bytes": lying(strides=(1, 3), place=16),
    "gaps of 2**50 bytes": lying(strides=(1 << 47, 1)),
    "gaps that overflow": lying(strides=(1 << 62, (1 << 64) - 1)),
    "2**50 bytes, of which four travel": lying(dims=(1 << 48,), strides=(0,), nbytes=4),
    "fewer bytes than travel": lying(strides=(0, 1), nbytes=16),
    "more bytes than travel": lying(strides=(0, 1), nbytes=60),
    "strides of nothing": lying(dims=(0, 5), strides=(1 << 63, 1), nbytes=0),
}


@pytest.mark.parametrize("posted", [True, False], ids=["expected", "unexpected"])
@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_an_error_that_names_the_peer_before_anything_is_allocated(lie, posted):
    with Line() as line:
        out = torch.zeros(3, 5)
        handle = line.end.recv(out, source=1, tag=7) if posted else None
        before = memory_bytes()
        line.peer.sendall(LIES[lie])
        handle = handle or line.end.recv(None, source=1, tag=7)
        with pytest.raises(CommError, match=r"lost rank 1: .*(damaged|more than this machine has memory|of generation 2)"):
            handle.wait(LIMIT_S)
        assert line.end.pool.held_bytes == 0 and memory_bytes() - before < 8 << 20
    CASES["headers that lie"] += 1


def test_a_message_that_does_not_fit_what_was_posted_is_read_over_without_room_for_it():
    with Line() as line:
        wrong = line.end.recv(torch.empty(3, 5), source=1, tag=7)
        right = line.end.recv(torch.empty(2), source=1, tag=8)
        large = torch.zeros(3 << 20)
        sending = threading.Thread(
            target=line.peer.sendall,
            args=(
                message_header.pack_header(large, 1, 0, 7)
                + bytes(large.nbytes)
                + message_header.pack_header(torch.ones(2), 1, 0, 8)
                + torch.ones(2).numpy().tobytes(),
            ),
        )
        sending.start()
        with pytest.raises(CommError, match=r"expects torch.float32 \(3, 5\), rank 1 sent torch.float32 \(3145728,\)"):
            wrong.wait(LIMIT_S)
        right.wait(LIMIT_S)
        assert right.tensor().tolist() == [1.0, 1.0]
        assert line.end.pool.held_bytes == 0
        sending.join()


def test_a_message_for_which_there_is_no_memory_is_an_error_that_names_the_peer(monkeypatch):
    def full(shape, dtype):
        raise MemoryError("Unable to allocate")

    with Line() as line:
        monkeypatch.setattr(line.end.pool, "empty", full)
        handle = line.end.recv(None, source=1, tag=7)
        line.peer.sendall(message_header.pack_header(torch.zeros(8), 1, 0, 7) + bytes(32))
        with pytest.raises(CommError, match=r"lost rank 1: it sent .* for which there is no memory here") as error:
            handle.wait(LIMIT_S)
        assert is_out_of_memory(error.value), "and no broken connection, of which a peer would be to blame"


def test_a_tensor_of_more_dims_than_pytorch_computes_with_is_refused_where_it_is_sent():
    with Line() as line, pytest.raises(CommError, match="65 dims"):
        line.end.send(torch.zeros((1,) * 65), to=1, tag=1)


# -- what a rank says of itself, and of its memory


def test_a_mistake_of_our_own_in_the_handshake_costs_one_connection_and_is_told_once(peers, monkeypatch, caplog):
    feed, left = AcceptorHandshake.feed, [2]

    def mistaken(self, data):
        if data.startswith(b"stranger"):
            left[0] -= 1
            raise ZeroDivisionError("a mistake")
        return feed(self, data)

    monkeypatch.setattr(AcceptorHandshake, "feed", mistaken)
    knocks = knock(peers.doors, [(b"stranger", None, False)] * 2, CLOSED_S)
    assert left == [0] and all(one.closed for one in knocks)
    assert [record.getMessage() for record in caplog.records] == [
        "a connection was dropped by a mistake of raypar's own; please report it"
    ]
    peers.work()


def test_memory_that_a_peer_offers_is_opened_only_if_it_is_what_was_expected():
    offered = shared_memory.SharedMemoryBlock(8192)
    pid, fd, _, token = offered.address.tolist()
    assert shared_memory.open_shared_memory(offered.address, 8192).numel() == 8192
    loose = os.memfd_create(shared_memory.PREFIX + format(5, "x"))
    os.ftruncate(loose, 8192)  # its owner could cut it off under its reader
    fifo, _ = pipe = os.pipe()
    for address in (
        (pid, fd, 1 << 62, token),
        (pid, fd, 4096, token),
        (pid, fd, 16384, token),
        (pid, fd, 8192, token + 1),
        (pid, fifo, 8192, token),
        (pid, 0, 8192, token),
        (pid, loose, 8192, 5),
        (-1, fd, 8192, token),
        (pid, -1, 8192, token),
        (0, 0, 0, 0),
    ):
        with pytest.raises(OSError):
            shared_memory.open_shared_memory(torch.tensor(address, dtype=torch.int64), 8192)
    with pytest.raises(OSError):
        shared_memory.open_shared_memory(torch.tensor((pid, fd, 16384, token)), 16384)
    with pytest.raises(OSError):
        os.ftruncate(fd, 4096)
    for one in (loose, *pipe):
        os.close(one)
    offered.close()


@pytest.mark.parametrize(
    "frame",
    [
        (3, 0, 1, 0, 7, 4),
        (0, len(message_header.SENDABLE_DTYPES), 1, 0, 7, 4),
        (0, message_header.REQUIRES_GRAD | message_header.DTYPE_CODES[torch.int64], 1, 0, 7, 4),
        (0, 0, 17, 0, 7, 4),
        (0, 0, 1, 0, 7, 4, 4),
        (0, 0, 1, 0, 7, 1 << 62),
        (1, 0, 2, 0, 7, 1 << 40, 1 << 40),
        (2, 0, 0, (1 << 20) + 1, 0),
        (2, 0, 0, (1 << 32) - 1, 0),
    ],
)
def test_an_announcement_over_nccl_is_checked_before_there_is_room_for_its_message(frame):
    packed = tagged_messages.ANNOUNCEMENT.pack(*frame, *[0] * (5 + tagged_messages.MAX_ANNOUNCED_DIMS - len(frame)))
    with pytest.raises(CommError, match=r"damaged|more than this machine has memory"):
        tagged_messages.unpack_announcement(packed)


@pytest.mark.parametrize(
    "place, strides", [(64, (1, 2)), (0, (1 << 47, 1)), (0, (1 << 62, 1)), (0, (1, 2, 3)), ((1 << 64) - 1, (1, 2))]
)
def test_a_layout_over_nccl_is_checked_before_there_is_room_for_its_message(place, strides):
    rest = [0] * (tagged_messages.MAX_ANNOUNCED_DIMS - len(strides))
    with pytest.raises(CommError, match=r"damaged|more than this machine has memory"):
        tagged_messages.unpack_layout(tagged_messages.LAYOUT.pack(place, *strides, *rest), (2, 3), torch.float32)


def test_a_layout_over_nccl_says_how_the_tensor_lies():
    tensor = torch.arange(12.0)[2:8].view(2, 3).t()
    layout = sent_tensor_layout.layout_of(tensor)
    assert layout == sent_tensor_layout.TensorLayout((3, 2), (1, 3), 2)
    for lies in (layout, layout._replace(offset=16), layout._replace(offset=63)):  # on CUDA it counts modulo 256 bytes
        assert tagged_messages.unpack_layout(bytes(tagged_messages.pack_layout(lies)), (3, 2), torch.float32) == lies
    message = sent_tensor_layout.message_of(tensor, layout)
    frame = bytes(tagged_messages.pack_announcement(tagged_messages.ON_DEVICE, message, 9, True, layout))
    assert tagged_messages.unpack_announcement(frame)[2:] == ((3, 2), 0, 9, True, True)


def test_an_announcement_over_nccl_says_what_was_sent():
    frame = tagged_messages.pack_announcement(tagged_messages.ON_HOST, torch.zeros(2, 3, dtype=torch.int32), 9)
    found = tagged_messages.unpack_announcement(bytes(frame))
    assert found == (tagged_messages.ON_HOST, torch.int32, (2, 3), 0, 9, False, False)
    for text in (b"", b"[1]", b'{"a communicator": "many"}', b'{"a communicator": true}', b"\xff"):
        with pytest.raises(CommError, match="a goodbye is damaged"):
            tagged_messages.unpack_goodbye(text)


class Said:
    """A handle whose message has come."""

    def __init__(self, said):
        self.said = said if isinstance(said, torch.Tensor) else torch.frombuffer(bytearray(said), dtype=torch.uint8)

    def tensor(self):
        return self.said


def test_what_a_rank_says_of_its_nccl_is_checked_and_only_its_own_ids_are_believed():
    mine, theirs = [[2, 3], "all_reduce", 0], [[0, 2], "message", 0]
    good = {
        "version": 22907,
        "device": "GPU 1",
        "blocks": 4,
        "shares": False,
        "communicators": [mine, theirs],
        "ids": {"all_reduce of 2,3 channel 0": "00" * 128},
    }
    assert connect.receive_hello(Said(json.dumps(good).encode()), 2) == good
    bad = [
        *({key: value for key, value in good.items() if key != left_out} for left_out in good),
        good | {"version": "22907"},
        good | {"device": 1},
        good | {"blocks": None},
        good | {"communicators": [[2, 3]]},
        good | {"communicators": [[["2", 3], "all_reduce", 0]]},
        good | {"ids": {}},
        good | {"ids": {"all_reduce of 2,3 channel 0": "00" * 127}},
        good | {"ids": {"all_reduce of 2,3 channel 0": "xx" * 128}},
        good | {"ids": good["ids"] | {"messages 0 -> 2": "00" * 128}},
    ]
    documents = [json.dumps(one).encode() for one in bad]
    documents += [b"[]", b"{", b"\xff", torch.zeros(4), torch.zeros(connect.MAX_DOCUMENT_BYTES + 1, dtype=torch.uint8)]
    for said in documents:
        with pytest.raises(CommError, match=r"what rank 2 (says of itself|tells) is damaged"):
            connect.receive_hello(Said(said), 2)
    CASES["documents of a rank"] += len(documents)
