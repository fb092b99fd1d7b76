"""raypar commands as processes of their own, which can be killed with all that they have started."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[1]


class Command:
    """A raypar command as a process of its own, with its Ray cluster; all of them can be killed at once."""

    def __init__(self, tmp_path: Path, *words: str) -> None:
        self.log = tmp_path / f"log-{time.monotonic_ns()}"
        self.room = tempfile.mkdtemp(prefix="raypar-t-", dir="/tmp")  # short: Ray's sockets lie in it
        environment = {
            **os.environ,
            "TMPDIR": self.room,
            "PYTHONPATH": f"{TESTS}:{TESTS.parent}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raypar", *words],
            cwd=TESTS,
            env=environment,
            stdout=open(self.log, "w"),  # noqa: SIM115
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, seconds: float) -> int:
        """Its exit code. What it has left in its folder for temporary files is removed."""
        self.process.wait(seconds)
        shutil.rmtree(self.room, ignore_errors=True)
        return int(self.process.returncode)

    def kill_all(self) -> None:
        """SIGKILL to the process and all that it has started, as when its machine is lost."""
        found = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for one in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(found, timeout=30)
        self.wait(30)

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, fact: Callable[[], bool], what: str, seconds: float = 180.0) -> None:
        until = time.monotonic() + seconds
        while not fact():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < until, f"{what} within {seconds:.0f} s\n{self.text()}"
            time.sleep(0.05)
