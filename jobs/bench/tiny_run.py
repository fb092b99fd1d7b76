"""A run of `raypar train` that takes seconds, for benches that disturb one and show what the terminal says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 240.0
JOB = """
seed: 3
steps: 40
batch_size: 8
microbatches: 4
model: {function: helpers.tiny_job:model, args: {sleep_s: 0.02}}
loss: helpers.tiny_job:loss
data: {function: helpers.tiny_job:data}
optimizer: {function: torch.optim:AdamW, args: {lr: 1.0e-2}}
"""


class TinyRun:
    """`raypar train` of a tiny model in a process of its own; its output is printed as it comes."""

    folder: Path
    """The run folder."""
    exit_code: int | None = None
    """None until `finish`."""
    output: list[str]
    """The lines that it has printed so far."""

    def __init__(
        self,
        place: Path,
        name: str,
        *settings: str,
        command: Sequence[str] = ("train",),
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        show: bool = True,
    ) -> None:
        """The run folder is `place / name`. `settings`: for `--set`. `command`: of raypar, with its options. `prefix`: a
        program that runs the rest of its command line. `env`: more variables. `show`: whether to print the output, too."""
        self.folder = place / name
        self.output, self._show = [], show
        job = self.folder
        if command[0] == "train":
            job = place / f"{name}.yaml"
            job.write_text(JOB)
            settings = (f"run_dir={place}", f"name={name}", *settings)
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        words = [word for value in settings for word in ("--set", value)]
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "raypar", command[0], str(job), *command[1:], *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0", **(env or {})},
            stdin=subprocess.DEVNULL,
        )
        self._weights = ""
        self._printer = threading.Thread(target=self._print)
        self._printer.start()

    def _print(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append(line)
            if self._show:
                print(f"    {line}", end="", flush=True)
            self._weights = line.split()[-1] if line.startswith("weights sha256") else self._weights

    def finish(self, limit_s: float | None = None) -> str:
        """Wait for the end; returns the hash of the weights. Raises `subprocess.TimeoutExpired` after `limit_s`."""
        self.exit_code = self._process.wait(limit_s)
        self._printer.join()
        print(f"    exit code {self.exit_code}", flush=True)
        return self._weights

    def steps(self) -> list[int]:
        """The steps in metrics.jsonl, in the order of its whole lines."""
        try:
            text = (self.folder / "metrics.jsonl").read_text()
        except OSError:
            return []
        return [json.loads(line)["step"] for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def pid(self) -> int:
        """The process id of `raypar`."""
        return self._process.pid

    def has_said(self, words: str) -> bool:
        """Whether a line with these words was printed."""
        return any(words in line for line in self.output)

    def wait_for_steps(self, count: int) -> None:
        """Until so many steps are in metrics.jsonl. Raises `RuntimeError` if the run is over, or after `PATIENCE_S`."""
        self.wait(f"{count} steps", lambda: len(self.steps()) >= count)

    def wait(self, what: str, there: Callable[[], bool]) -> None:
        """Until it is there. Raises `RuntimeError` if the run is over, or after `PATIENCE_S`."""
        until = time.monotonic() + PATIENCE_S
        while not there():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.folder.name}: {what} not there after {PATIENCE_S:.0f} s, or the run is over")
            time.sleep(0.02)

    def pids(self) -> tuple[int, list[int]]:
        """Process ids of (the driver, the workers)."""
        told = json.loads((self.folder / "members.json").read_text())
        return told["driver_pid"], [member["pid"] for member in told["members"]]
