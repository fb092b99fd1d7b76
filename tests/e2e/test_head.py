"""The control store of a cluster that keeps its tables in Redis dies under a run and is started again."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers.trainee import Trainee

from raypar.actors.ray_connection import make_short_temp_dir, worker_python_path

REDIS = shutil.which("redis-server")

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(REDIS is None, reason="no redis-server on this machine (Debian: apt-get install redis-server)"),
]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Head:
    """`ray start --head` with its tables in a Redis of its own, all in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, redis = folder, free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.environment = {
            **os.environ,
            "PYTHONPATH": worker_python_path(Path(__file__).parents[1]),
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        words = ["--port", str(redis), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
        with open(folder / "redis.log", "w") as log:
            self.redis = subprocess.Popen([str(REDIS), *words], stdout=log, stderr=log)
        words = ["--port", str(self.port), "--node-ip-address", "127.0.0.1", "--temp-dir", str(folder), "--num-cpus", "6"]
        words += ["--include-dashboard", "false", "--object-store-memory", str(100 * 2**20), "--disable-usage-stats"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *words]
        subprocess.run(ray, check=True, env=self.environment, stdout=subprocess.DEVNULL, timeout=90)

    def processes(self) -> list[psutil.Process]:
        """Everything that was started with a path of the folder; workers of Ray are children of those."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and str(self.folder) in " ".join(process.cmdline()):
                    found += [process, *process.children(recursive=True)]
        return found

    def store(self) -> psutil.Process:
        """Ray's control store (GCS)."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.name() == "gcs_server":
                    found.append(process)
        assert found, "the control store of this head runs"
        return found[0]

    def store_dies_for(self, seconds: float) -> None:
        """kill -9, and the same command once more, as whoever looks after a head does."""
        store = self.store()
        command = store.cmdline()
        store.kill()
        time.sleep(seconds)
        with open(self.folder / "gcs.log", "w") as log:
            subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)

    def close(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.redis.kill()
        self.redis.wait(10)


@pytest.fixture
def head() -> Iterator[Head]:
    folder = make_short_temp_dir()
    made = Head(folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_goes_on_while_the_control_store_dies_and_comes_back(head, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", head.address)
    for name in ("whole", "disturbed"):
        (tmp_path / name).mkdir()
    whole = Trainee(tmp_path / "whole", "plan.stages=1", "steps=60", "elastic.min_workers=1")
    undisturbed = whole.run()
    trainee = Trainee(tmp_path / "disturbed", "plan.stages=2", "plan.replicas=2", "steps=60", "elastic.min_workers=1")
    result = trainee.run(lambda pids: head.store_dies_for(12.0))  # longer than workers may be silent
    assert result.end == "done", result.why
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert trainee.losses == whole.losses, "every step was seen once, with the same loss"
    assert not trainee.told("lost") and not trainee.told("driver"), "nobody but the control store was hurt"
