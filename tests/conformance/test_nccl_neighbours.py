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
        lambda end: end.barrier(group=(0, 3)),
        lambda end: end.all_reduce(torch.zeros(1), group=(0, 3)),
    ],
    ids=["send", "barrier", "all_reduce"],
)
def test_what_is_asked_of_a_rank_that_is_no_neighbour_is_an_error_at_once(call):
    with ring() as ends, pytest.raises(CommError, match=r"no communicator was made for|\[3\], with which it has no connection"):
        call(ends[0])


def test_a_lost_rank_ends_what_its_neighbours_wait_for_and_the_others_go_on():
    with ring() as ends:
        waiting = [ends[rank].recv(None, source=4, tag=9) for rank in (3, 5)]
        ends[4].abort("killed")
        ends[4].close()
        for handle in waiting:
            with pytest.raises(CommError, match="rank 4"):
                handle.wait(LIMIT_S)
        pass_on(ends, ranks=(0, 1, 2))
