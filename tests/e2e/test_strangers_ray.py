"""Strangers on the ports of a real run's workers: the run does not notice them, neither at once nor at the next recovery."""

import contextlib
import socket
import struct
import time
from pathlib import Path

import psutil
import pytest
from helpers.trainee import Trainee, kill

from raypar.actors.local_ray import connected

MAGIC = 0x72617970

OLD_GREETING = struct.pack("<IHHQII", MAGIC, 1, 30_000, 1, 1, 4) + b"\xff" * 30_000
"""Well-formed for a worker of raypar before it asked for a proof: a run whose name is 30 kB long."""

GREETINGS = (
    OLD_GREETING,
    struct.pack("<IHHQIII", MAGIC, 2, 0, 2, 3, 0, 4) + b"\xff" * 30_000,
    b"\xff" * 30_000,
    b"GET / HTTP/1.1\r\n\r\n",
    b"",
)


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    with connected(None, 4, Path(__file__).parents[1]):
        yield


def listening(pid: int) -> list[tuple[str, int]]:
    """Every TCP port that a process listens on: raypar's, and Ray's own."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    return sorted({(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN})


def greet(pids: list[int], stay: list[socket.socket]) -> int:
    """Every greeting on every port; the connections stay open. How many there were."""
    for pid in pids:
        for host, port in listening(pid):
            for greeting in GREETINGS:
                with contextlib.suppress(OSError):
                    stay.append(socket.create_connection(("127.0.0.1" if host in ("0.0.0.0", "::") else host, port), timeout=5))
                    stay[-1].sendall(greeting)
    return len(stay)


@pytest.mark.chaos
def test_strangers_that_greet_every_worker_do_not_disturb_the_recovery_that_follows(tmp_path):
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    undisturbed = Trainee(tmp_path / "undisturbed").run()
    layout = ("plan.stages=2", "plan.replicas=2")
    trainee = Trainee(tmp_path / "disturbed", "elastic.min_workers=1", *layout)
    strangers: list[socket.socket] = []
    greeted = []

    def act(pids: list[int]) -> None:
        greeted.append(greet(pids, strangers))
        time.sleep(0.3)
        kill(3)(pids)

    try:
        result = trainee.run(act)
    finally:
        for stranger in strangers:
            stranger.close()
    assert greeted[0] >= 4 * len(GREETINGS), "every worker listens"
    assert result.end == "done", result.why
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert any("generation 2" in event["text"] for event in trainee.told("recovering"))
