"""A node is lost in the middle of a run: the run goes on with the others, and its result does not change by a bit.

`python examples/lose_a_node.py [FOLDER]` trains a small GPT on three nodes that live on this machine, once in peace and once
with a node killed under it; tells the story of that run, draws it, and compares the weights. Two to three minutes.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RAYPAR = [sys.executable, "-m", "raypar"]
STEPS, LOST_AFTER = 240, 80
SMALL = [
    f"steps={STEPS}",
    "model.args.width=64",
    *(f"{part}.args.context=64" for part in ("model", "data", "validation")),
    "checkpoint.every=0",
]
ELASTIC = ["elastic.min_workers=1"]


def train(run: Path, *settings: str, disturb=None) -> str:
    """`raypar train` on three local nodes, while `disturb(run)` does what it wants. Returns the hash of the weights."""
    words = [
        word for setting in (*SMALL, *settings, f"name={run.name}", f"run_dir={run.parent}") for word in ("--set", setting)
    ]
    command = [*RAYPAR, "train", str(ROOT / "jobs/quickstart.yaml"), "--local-nodes", "3", *words]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as training:
        if disturb is not None:
            threading.Thread(target=disturb, args=(run,), daemon=True).start()
        for line in training.stdout:
            print(line, end="", flush=True)
            last = line
    return last.split()[-1] if training.returncode == 0 else sys.exit(f"the run {run.name} has failed")


def steps_done(run: Path) -> int:
    """Each committed step is a line in the run's folder."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.exists() else 0


def lose_a_node(run: Path) -> None:
    """`kill -9` of a raylet, which is what Ray calls a node, and of all it has started: a machine that loses its power."""
    while steps_done(run) < LOST_AFTER:
        time.sleep(0.05)
    table = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in table.splitlines()]
    parent = {int(pid): int(ppid) for pid, ppid, _ in rows}
    head = {int(pid) for pid, _, args in rows if "node:__internal_head__" in args}  # `raypar train` itself lives on this node
    members = json.loads((run / "members.json").read_text())["members"]
    raylet = next(parent[m["pid"]] for m in reversed(members) if parent[m["pid"]] not in head)
    lost = [m["coordinate"] for m in members if parent[m["pid"]] == raylet]
    for pid in (raylet, *(pid for pid, ppid in parent.items() if ppid == raylet)):
        os.kill(pid, signal.SIGKILL)
    print(f">>> after {steps_done(run)} steps a node has lost its power (raylet {raylet}), and with it {', '.join(lost)}")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"runs/lose_a_node-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    in_peace = train(folder / "in_peace")
    disturbed = train(folder / "disturbed", *ELASTIC, disturb=lose_a_node)

    print()
    picture = folder / "throughput.svg"
    subprocess.run([*RAYPAR, "status", str(folder / "disturbed"), "--svg", str(picture)], check=True, cwd=ROOT)
    print(f"\nundisturbed      {in_peace}\na node was lost  {disturbed}")
    print("equal" if in_peace == disturbed else "DIFFERENT")
    sys.exit(in_peace != disturbed)


if __name__ == "__main__":
    main()
