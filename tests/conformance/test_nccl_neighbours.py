"""The nccl transport between ranks that are connected with their neighbours only, as a plan's workers are."""

import os

import pytest
import torch
from helpers import standin
from helpers.nccl_group import Group, every
from helpers.transport_cases import LIMIT_S, noise, over_tree

from raypar.comm.transport import CommunicatorKey
from raypar.errors import CommError

pytestmark = [pytest.mark.skipif(not standin.SUPPORTED, reason="CuPy has a wheel for Linux x86-64 only"), pytest.mark.part(4)]
SIZE = 6
SUMMED = (0, 1, 2)
"""Shards of one replica, say; each is connected with the others. All ranks form a ring beside that."""
KEYS = [
    CommunicatorKey(SUMMED, "all_reduce"),
    *(CommunicatorKey((rank, (rank + way) % SIZE), "message") for rank in range(SIZE) for way in (1, -1)),
]


@pytest.fixture(scope="module", autouse=True)
def library():
    return standin.load()


def neighbours(rank):
    """The ranks with which a rank is connected."""
    return {(rank - 1) % SIZE, (rank + 1) % SIZE, *(SUMMED if rank in SUMMED else ())} - {rank}


def ring(**given):
    return Group(SIZE, KEYS, peers=neighbours, **given)


def sockets():
    return sum(
        os.path.realpath(f"/proc/self/fd/{fd}").rpartition("/")[2].startswith("socket:") for fd in os.listdir("/proc/self/fd")
    )


def pass_on(ends, ranks=range(SIZE)):
    """Each rank sends a tensor to both neighbours in the ring, and gets theirs."""
    sent = [torch.arange(5.0) + rank for rank in range(SIZE)]
    waits = [
        ends[r].send(sent[r], to=(r + way) % SIZE, tag=way + 1) for r in ranks for way in (1, -1) if (r + way) % SIZE in ranks
    ]
    for rank in ranks:
        for way in (1, -1):
            if (source := (rank - way) % SIZE) in ranks:
                handle = ends[rank].recv(None, source=source, tag=way + 1)
                handle.wait(LIMIT_S)
                assert torch.equal(handle.tensor(), sent[source])
    for handle in waits:
        handle.wait(LIMIT_S)


def test_neighbours_exchange_and_add_and_there_are_sockets_between_them_alone():
    before = sockets()
    with ring() as ends:
        assert [end.control.peers for end in ends] == [frozenset(neighbours(rank)) for rank in range(SIZE)]
        listening = SIZE * 2  # a TCP and a Unix socket each
        assert sockets() - before <= listening + sum(len(neighbours(rank)) for rank in range(SIZE))
        pass_on(ends)
        parts = [noise(rank, 999) for rank in SUMMED]
        flats = [part.clone() for part in parts]
        every([ends[rank] for rank in SUMMED], lambda end: end.all_reduce(flats[end.rank], group=SUMMED))
        assert all(torch.equal(flat, over_tree(parts)) for flat in flats)
        every([ends[rank] for rank in SUMMED], lambda end: end.barrier(group=SUMMED))


@pytest.mark.parametrize(
    "call",
    [
        lambda end: end.send(torch.zeros(1), to=3, tag=0),
        lambda end: end.send(torch.zeros(1, dtype=torch.float64), to=3, tag=0),
        lambda end: end.recv(None, source=3, tag=0),
        lambda end: end.recv(torch.zeros(1), source=3, tag=0),
        lambda end: end.recv(torch.zeros(1, dtype=torch.float64), source=3, tag=0),
        lambda end: end.batch([], [(None, 3, 0)]),
        lambda end: end.batch([(torch.zeros(1), 1, 0)], [(None, 1, 0), (None, 3, 0)]),
        lambda end: end.barrier(group=(0, 3)),
        lambda end: end.all_reduce(torch.zeros(1, dtype=torch.float64), group=(0, 3)),
        lambda end: end.all_reduce(torch.zeros(1), group=(0, 3)),
    ],
    ids=["send", "send of the host", "recv", "recv into", "recv of the host", "batch", "part of a batch", "barrier",
         "all_reduce of the host", "all_reduce"],
)  # fmt: skip
def test_what_is_asked_of_a_rank_that_is_no_neighbour_is_an_error_at_once_and_nothing_else_is(call):
    """A wait would end at the step's deadline only."""
    with ring(device=lambda rank: standin.HostDevice(f"{rank}", only=frozenset({torch.float32, torch.int32}))) as ends:
        with pytest.raises(CommError, match=r"ranks \[3\], with which it has no connection"):
            call(ends[0])
        pass_on(ends)


@pytest.mark.parametrize(
    "key", [CommunicatorKey((0, 3), "message"), CommunicatorKey((3, 0), "message"), CommunicatorKey((0, 1, 2, 3), "all_reduce")]
)
def test_a_communicator_with_a_rank_that_is_no_neighbour_is_refused_before_nccl_is_asked(key):
    failed = Group(SIZE, lambda rank: [*KEYS, *([key] if rank in key.members else [])], peers=neighbours)
    assert isinstance(failed.ends[0], CommError)
    assert f"{key} with ranks [3], with which rank 0 has no connection" in failed.ends[0].what
    assert all(isinstance(end, CommError) for end in failed.ends)
    assert not standin.count(standin.Count.ALIVE)
    failed.__exit__()


def test_a_lost_rank_ends_what_its_neighbours_wait_for_and_the_others_go_on():
    with ring() as ends:
        waiting = [ends[rank].recv(None, source=4, tag=9) for rank in (3, 5)]
        ends[4].abort("killed")
        ends[4].close()
        for handle in waiting:
            with pytest.raises(CommError, match="rank 4"):
                handle.wait(LIMIT_S)
        pass_on(ends, ranks=(0, 1, 2))
