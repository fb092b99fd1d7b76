"""Strangers on the ports of a real run's workers: the run does not notice them, neither at once nor at the next recovery."""

import base64
import contextlib
import os
import signal
import socket
import struct
from pathlib import Path

import psutil
import pytest
import ray
from helpers.trainee import Trainee, kill

from raypar.actors.ray_connection import connect_ray
from raypar.actors.run_state_in_ray_kv import Journal

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
    with connect_ray(None, 4, Path(__file__).parents[1]):
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
    undisturbed = Trainee(tmp_path / "undisturbed", "steps=60").run()
    layout = ("plan.stages=2", "plan.replicas=2")
    trainee = Trainee(tmp_path / "disturbed", "steps=60", "elastic.min_workers=1", *layout)
    strangers: list[socket.socket] = []
    greeted: list[int] = []
    secrets: list[bytes] = []

    def act(pids: list[int]) -> None:
        secrets.append(Journal("tiny").credential().secret)
        greeted.append(greet(pids, strangers))
        kill(3)(pids)

    def again() -> None:
        """Its driver dies too: a new one has to know the secret of the workers that are left."""
        for pid in (trainee.members["driver_pid"], trainee.members["members"][-1]["pid"]):
            os.kill(pid, signal.SIGKILL)

    try:
        result = trainee.run(act, then={30: again})
    finally:
        for stranger in strangers:
            stranger.close()
    assert greeted[0] >= 4 * len(GREETINGS), "every worker listens"
    assert result.end == "done", result.why
    assert result.weights_sha256 == undisturbed.weights_sha256
    generations = [event["text"] for event in trainee.told("generation")]
    assert len(generations) >= 2 and trainee.told("driver") and len(trainee.told("lost")) == 2, generations
    assert not [path for folder in (tmp_path, session_folder()) for path in folder.rglob("*") if holds(path, secrets[0])]


def session_folder() -> Path:
    """Where this Ray's logs lie."""
    return Path(ray._private.worker.global_worker.node.get_session_dir_path())


def holds(path: Path, secret: bytes) -> bool:
    """Whether a file has the secret in it, in any spelling."""
    if not path.is_file():
        return False
    data = path.read_bytes()
    return any(text in data for text in (secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()))
