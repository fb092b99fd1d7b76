"""The disk of a run is full, and then its driver dies: what the run says meanwhile, and that no step and no line is lost.

`python jobs/bench/full_disk.py`, as root: it mounts a file system of 1 MiB, fills it after 30 steps, kills the driver a second
later, and frees the disk when a new driver has gone on. Prints what `raypar train` prints, then whether every step is in
metrics.jsonl once, and whether the weights are those of a run on a disk with room.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from jobs.bench.tiny_run import TinyRun

STEPS = 400
SETTINGS = [f"steps={STEPS}", "elastic={min_workers: 1}", "plan={stages: 2, replicas: 2}"]
PIECE = b"x" * 512


def main() -> int:
    """Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="raypar-full-disk-") as place:
        print("undisturbed:", flush=True)
        plain = TinyRun(Path(place), "plain", *SETTINGS).finish()
        disk = Path(place) / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
        try:
            run = TinyRun(disk, "full", *SETTINGS)
            run.wait_for_steps(30)
            driver, _ = run.pids()
            fill(disk / "filler")
            time.sleep(1.0)
            print(f"--- kill -9 of the driver; metrics.jsonl has {len(run.steps())} steps", flush=True)
            os.kill(driver, signal.SIGKILL)
            time.sleep(3.0)  # the new driver begins on the full disk
            (disk / "filler").unlink()
            print("--- the disk has room again", flush=True)
            found = run.finish()
            whole = run.steps() == list(range(1, STEPS + 1))
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    print(f"steps 1 to {STEPS} {'each once' if whole else 'NOT EACH ONCE'}", flush=True)
    print("the same weights" if found == plain else "OTHER WEIGHTS", flush=True)
    return 0 if whole and found == plain and run.exit_code == 0 else 1


def fill(path: Path) -> None:
    """Write a file until the disk takes nothing more."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(PIECE)
        except OSError as error:
            print(f"--- {error} after {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
