"""How long the votes of many workers on a step take: directly, and up and down the tree. Part of `control.py`.

No machine here has a thousand workers, so a vote is played on a virtual clock: a worker handles one message after the other,
each in the measured time of one, half a round trip of a ballot between two processes over TCP (both ends' work and the way).
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection

import torch

from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import RunCredential
from raypar.plan.ballot import Ballot
from raypar.plan.exact_sum import ExactSum
from raypar.plan.vote_tree import FANOUT, MOST_DIRECT, TreeNeighbours

WORKERS = (32, 64, 256, 1024, 10_000)
WANTED_MS, OF_WORKERS = 10.0, 1024
ROUND_TRIPS, WARM_UP = 2000, 200
DEADLINE_S = 60.0
CREDENTIAL = RunCredential("bench", b"no secret: a bench has this machine to itself")


@dataclass(frozen=True)
class VoteCost:
    """What one vote of so many workers costs."""

    workers: int
    """Number of workers."""
    messages: int
    """Of all workers, by the tree."""
    tree_ms: float
    """From the last worker's ballot to the last worker that knows the result, by the tree."""
    direct_messages: int
    """Of all workers, if votes go directly."""
    direct_ms: float
    """As `tree_ms`, if votes go directly."""


def play(workers: int, message_ms: float) -> VoteCost:
    """A vote of workers that are all ready at the same time; each takes `message_ms` for each message."""
    places = [TreeNeighbours.of(rank, workers, FANOUT) for rank in range(workers)]
    handed_up = [0.0] * workers
    for rank in reversed(range(workers)):  # those below have higher ranks
        clock = 0.0
        for arrived in sorted(handed_up[below] for below in places[rank].below):
            clock = max(clock, arrived) + message_ms
        handed_up[rank] = clock
    told = [0.0] * workers
    told[0] = handed_up[0]
    for rank, place in enumerate(places):
        for number, below in enumerate(place.below, 1):
            told[below] = told[rank] + number * message_ms
    others = workers - 1
    return VoteCost(workers, 2 * others, max(told), workers * others, others * message_ms)


@cache
def message_ms() -> float:
    """Half a round trip of a ballot between two processes of this machine over TCP, median."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=_echo, args=(rank, pipes[rank][1])) for rank in range(2)]
    for process in processes:
        process.start()
    addresses = [near.recv() for near, _ in pipes]
    for near, _ in pipes:
        near.send(addresses)
    found: float = pipes[0][0].recv()
    for process in processes:
        process.join(DEADLINE_S)
    return found


def _echo(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    endpoint = TcpEndpoint.listen(credential=CREDENTIAL, unix_sockets=False)
    pipe.send(endpoint.address)
    transport = endpoint.connect(rank=rank, size=2, addresses=pipe.recv(), generation=1, deadline_s=DEADLINE_S)
    ballot = Ballot(1, *(ExactSum.of([0.1, 0.7]) for _ in range(3)))
    times = []
    for _ in range(ROUND_TRIPS + WARM_UP):
        start = time.perf_counter()
        back = transport.recv(None, source=1 - rank, tag=0)
        for turn in (0, 1):
            if rank == turn:
                transport.send(torch.tensor(ballot.to_floats(), dtype=torch.float64), to=1 - rank, tag=0)
            else:
                back.wait(DEADLINE_S)
                Ballot.from_floats(back.tensor().tolist())
        times.append(1000 * (time.perf_counter() - start) / 2)
    pipe.send(statistics.median(times[WARM_UP:]))
    transport.close()
    endpoint.close()


def header() -> list[str]:
    """Of `rows`."""
    return ["workers", "messages", "vote by the tree, ms", "messages directly", "directly, ms", "used"]


def rows(costs: list[VoteCost]) -> list[list[str]]:
    """The table's."""
    return [
        [
            *(f"{c.workers:,}", f"{c.messages:,}", f"{c.tree_ms:.2f}", f"{c.direct_messages:,}", f"{c.direct_ms:.2f}"),
            "directly" if c.workers <= MOST_DIRECT else "tree",
        ]
        for c in costs
    ]


def measure() -> list[VoteCost]:
    """Votes of all `WORKERS`."""
    return [play(workers, message_ms()) for workers in WORKERS]


def holds(costs: list[VoteCost]) -> bool:
    """Whether a vote is as short as wanted."""
    return all(cost.tree_ms <= WANTED_MS for cost in costs if cost.workers == OF_WORKERS)
