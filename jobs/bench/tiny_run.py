"""A run of `raypar train` that takes seconds, for benches that disturb one and show what the terminal says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
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

    def __init__(self, place: Path, name: str, *settings: str) -> None:
        """The run folder is `place / name`. `settings`: for `--set`."""
        self.folder = place / name
        job = place / f"{name}.yaml"
        job.write_text(JOB)
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        words = [word for value in (f"run_dir={place}", f"name={name}", *settings) for word in ("--set", value)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "raypar", "train", str(job), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"},
        )
        self._weights = ""
        self._printer = threading.Thread(target=self._print)
        self._printer.start()

    def _print(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"    {line}", end="", flush=True)
            self._weights = line.split()[-1] if line.startswith("weights sha256") else self._weights

    def finish(self) -> str:
        """Wait for the end; returns the hash of the weights."""
        self.exit_code = self._process.wait()
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
