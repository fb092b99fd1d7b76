"""One sample takes 25 s to read, once: what a run says and does meanwhile, and that its weights are those of a run without it.

`python jobs/bench/slow_sample.py [--seconds 25] [--layout stages one no-mirror]`: 2 stages x 1 replica with the mirror, a plan
of one worker, 2 stages x 1 replica without the mirror. Prints what `raypar train` prints, then whether the weights are equal.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    "stages": ["plan={stages: 2, replicas: 1}", "elastic={min_workers: 1}"],
    "one": ["plan={stages: 1, replicas: 1}", "elastic={min_workers: 1}"],
    "no-mirror": ["plan={stages: 2, replicas: 1}", "elastic={min_workers: 1, mirror: off}"],
}
JOB = """
name: slow
seed: 3
steps: 40
batch_size: 8
microbatches: 4
model: {function: helpers.tiny_job:model, args: {sleep_s: 0.02}}
loss: helpers.tiny_job:loss
data: {function: helpers.tiny_job:data}
optimizer: {function: torch.optim:AdamW, args: {lr: 1.0e-2}}
"""


def train(folder: Path, name: str, layout: str, *more: str) -> str:
    """Train the job and show what it prints; returns the hash of its weights."""
    job = folder / "slow.yaml"
    job.write_text(JOB)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    words = [w for value in (*LAYOUTS[layout], f"run_dir={folder}", f"name={name}", *more) for w in ("--set", value)]
    command = [sys.executable, "-m", "raypar", "train", str(job), *words]
    env = {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env)
    found = ""
    assert process.stdout is not None
    for line in process.stdout:
        print(f"    {line}", end="", flush=True)
        found = line.split()[-1] if line.startswith("weights sha256") else found
    print(f"    exit code {process.wait()}", flush=True)
    return found


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--layout", choices=LAYOUTS, nargs="*", default=list(LAYOUTS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raypar-slow-") as place:
        folder = Path(place)
        print("undisturbed:", flush=True)
        plain = train(folder, "plain", "one")
        same = True
        for layout in given.layout:
            print(f"{layout}: one sample takes {given.seconds:g} s", flush=True)
            slow = f"data.args={{slow: {folder / f'slow-{layout}'}, slow_s: {given.seconds}}}"
            found = train(folder, layout, layout, slow)
            assert (folder / f"slow-{layout}").exists(), "no sample was slow"
            same &= found == plain
            print(f"{layout}: {'the same weights' if found == plain else 'OTHER WEIGHTS'}", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
