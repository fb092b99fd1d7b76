"""A run on a cluster whose autoscaler adds nodes: it begins small, grows, loses a node, grows again, and gives all nodes back.

`python examples/autoscale.py [FOLDER]` starts Ray's fake autoscaler on this machine: a head without CPUs, and at most three
nodes with one CPU each. A small GPT is planned for four workers, may begin with one, and ends with the weights of a run in
one process. One and a half to four minutes. `--autoscaler 1` uses the first version of Ray's autoscaler, which tells less.

Each growth should cost no more than the step that it delays and half a second. The first ones happen while a callback makes
every step take a second, the last one at full speed.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from raypar.callbacks import Callback, StepInfo

ROOT = Path(__file__).parents[1]
RAYPAR = [sys.executable, "-m", "raypar"]
STEPS, PACE_S, CHAPTER_S = 300, 1.0, 300.0
GROWTH_S = 0.5
"""Most seconds by which a growth should delay training, beside the step that it contains."""
SMALL = [
    f"steps={STEPS}",
    "model.args.width=64",
    *(f"{part}.args.context=64" for part in ("model", "data", "validation")),
    "validation.every=0",
    "checkpoint.every=0",
]


class Pace(Callback):
    """Makes every step take a second, until a file is there: nodes take a while to come."""

    def __init__(self, until: str) -> None:
        self.until = Path(until)

    def on_step(self, info: StepInfo) -> None:
        if not self.until.exists():
            time.sleep(PACE_S)


def train(run: Path, *settings: str, address: str = "", env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`raypar train` of the quickstart in small; what it prints is in a file beside the run's folder."""
    words = [word for one in (*SMALL, *settings, f"name={run.name}", f"run_dir={run.parent}") for word in ("--set", one)]
    command = [*RAYPAR, "train", str(ROOT / "jobs/quickstart.yaml"), *(["--address", address] if address else []), *words]
    run.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{run}.txt", "w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, text=True, cwd=ROOT, env=env or dict(os.environ))


def ended(training: subprocess.Popen[str], run: Path) -> str:
    """The hash of the weights, once the run has ended."""
    training.wait()
    text = Path(f"{run}.txt").read_text()
    return text.split()[-1] if training.returncode == 0 else sys.exit(f"{text}\nthe run {run.name} has failed")


def lines(path: Path) -> list[dict]:
    """The lines of a run's file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def seated(run: Path) -> set[int]:
    """The workers that train now."""
    path = run / "members.json"
    found = json.loads(path.read_text()) if path.exists() else {"phase": "", "members": []}
    return {member["worker"] for member in found["members"]} if found["phase"] == "running" else set()


def story(run: Path, cluster, training: subprocess.Popen[str], flag: Path) -> None:
    """What happens to the cluster while the run trains."""

    def wait(true, what: str) -> None:
        taken_s = cluster.wait(lambda: true() or training.poll() is not None, CHAPTER_S, what)
        if training.poll() is not None:
            sys.exit(f"{Path(f'{run}.txt').read_text()}\nthe run has ended before {what}")
        print(
            f">>> {what}, after {taken_s:.0f} s more: workers {sorted(seated(run))}, {len(cluster.nodes())} nodes", flush=True
        )

    wait(lambda: lines(run / "metrics.jsonl"), "the run has begun")
    wait(lambda: len(seated(run)) == 3, "the run has three workers")
    first = seated(run)
    time.sleep(5 * PACE_S)
    lost = sorted(cluster.nodes())[-1]
    cluster.kill_node(lost)
    print(">>> a node has lost its power", flush=True)
    wait(lambda: len(seated(run)) == 2, "the run goes on with two workers")
    wait(lambda: lost not in cluster.nodes() and len(cluster.nodes()) == 3, "the autoscaler has replaced the node")
    flag.touch()
    print(">>> steps are quick from now on", flush=True)
    wait(lambda: len(seated(run)) == 3 and seated(run) != first, "the run has three workers again")


def growths(run: Path) -> list[tuple[int, int, float, float]]:
    """(workers before, workers after, Unix time, pause in seconds) of each growth.

    A pause is the time from the last step before the growth to the end of the first step after it, that step included.
    """
    found, before = [], 0
    for event in lines(run / "events.jsonl"):
        if event["kind"] in ("started", "generation"):
            now = len(event["workers"])
            if event["kind"] == "generation" and now > before:
                found.append((before, now, event["time"], event["pause_s"]))
            before = now
    return found


def report_growths(run: Path, quick_from: float) -> None:
    """Print the pause of each growth beside the median step of the same speed: before `quick_from`, or after the growth.

    `quick_from`: Unix time from which on no callback slows the steps.
    """
    ends = [line["time"] for line in lines(run / "metrics.jsonl") if "loss" in line]
    print("\ngrowth                a step     pause    beyond a step")
    for before, after, at, pause_s in growths(run):
        slow = at < quick_from
        among = [end for end in ends if (end < quick_from if slow else end > at)]
        usual_s = statistics.median(b - a for a, b in itertools.pairwise(among)) if len(among) > 1 else 0.0
        more_s = pause_s - usual_s
        print(
            f"from {before} to {after} workers  {usual_s:6.2f} s  {pause_s:6.2f} s  {more_s:6.2f} s"
            + (" (a callback sleeps in every step)" if slow else " (steps at full speed)")
            + f": MORE THAN {GROWTH_S} s" * (more_s > GROWTH_S)
        )


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from cluster.fake_autoscaler import FakeAutoscaledCluster

    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("folder", nargs="?", default=f"runs/autoscale-{time.strftime('%Y%m%d-%H%M%S')}")
    words.add_argument("--autoscaler", type=int, choices=(1, 2), default=2)
    given = words.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the cluster would stay
    folder = Path(given.folder).resolve()

    alone = ended(train(folder / "alone", "plan.stages=1", "plan.replicas=1", "elastic=false"), folder / "alone")
    run, flag = folder / "autoscaled", folder / "steps_are_quick"
    cluster = FakeAutoscaledCluster(3, version=given.autoscaler, idle_s=12.0, python_path=[str(ROOT)])
    try:
        training = train(
            run,
            "plan.stages=2",
            "plan.replicas=2",
            "elastic.min_workers=1",
            "elastic.grow_after_s=0.5",
            f"callbacks=[{{function: 'examples.autoscale:Pace', args: {{until: '{flag}'}}}}]",
            address=cluster.address,
            env=cluster.env,
        )
        try:
            story(run, cluster, training, flag)
            autoscaled = ended(training, run)
        finally:
            training.terminate()
            training.wait()
        left_s = cluster.wait(lambda: not cluster.nodes(), CHAPTER_S, "only the head is left")
        print(f">>> the run has ended; only the head is left, after {left_s:.0f} s", flush=True)
    finally:
        cluster.end()

    picture = folder / "throughput.svg"
    subprocess.run([*RAYPAR, "status", str(run), "--svg", str(picture)], check=True, cwd=ROOT)
    report_growths(run, flag.stat().st_mtime)
    print(f"\none process  {alone}\nautoscaled   {autoscaled}")
    print("equal" if alone == autoscaled else "DIFFERENT")
    sys.exit(alone != autoscaled)


if __name__ == "__main__":
    main()
