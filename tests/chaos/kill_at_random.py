"""`kill -9` at random moments of a real run, which must end with the weights of a run that nobody has disturbed.

`python tests/chaos/kill_at_random.py --seed 7 --target worker`: starts `raypar train jobs/quickstart.yaml --local-nodes 3`,
shows what it prints, kills a worker, a raylet with all its processes (but the head's, which is the client's own machine) or
the driver, and says at the end whether the run kept its promises: same weights, every step seen once, the survivors' processes
unharmed, the terminal told, nothing left running. Exit code 0 or 1. The seed decides when, and which of those there are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import psutil  # noqa: E402
from helpers.run_processes import RunProcesses, kill_node  # noqa: E402

from raypar.job.read_job import load_job  # noqa: E402
from raypar.record.parse_events import parse_event  # noqa: E402

TARGETS = ("worker", "raylet", "driver")
FIRST, LAST = 0.1, 0.8
"""Between which parts of the run's steps the kills lie."""

SOON_S = 0.5
"""A step that was all but done may still come within this time after a fault."""
LOOK_S = 0.2
"""How often all processes are looked at, so that none of the run's escapes."""


@dataclass
class Kill:
    """One that has been done. `at`: steps that had been seen; `survivors`: pids of the other members."""

    what: str
    at: int
    time: float
    survivors: set[int]


@dataclass
class Run:
    """One `raypar train` and what it left. `losses`: (step, loss) in the order of metrics.jsonl."""

    code: int | None = None
    output: str = ""
    losses: list[tuple[int, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    harmed: set[int] = field(default_factory=set)
    """Survivors of a kill that died before the run's end."""
    left: list[str] = field(default_factory=list)

    @property
    def weights(self) -> str | None:
        """The hash in the last line of a run that is done."""
        found = re.search(r"^weights sha256 (\w+)", self.output, re.MULTILINE)
        return found[1] if found else None


class Killer(threading.Thread):
    """Kills `count` times: each at a seeded step, some way into it; the last look at `members.json` says who is there."""

    def __init__(self, seed: int, target: str, count: int, steps: int, folder: Path, processes: RunProcesses) -> None:
        super().__init__(daemon=True)
        self.chance = random.Random(seed)
        self.target, self.steps, self.folder, self.processes = target, steps, folder, processes
        self.moments = sorted(self.chance.uniform(FIRST, LAST) * steps for _ in range(count))
        self.kills: list[Kill] = []
        self.harmed: set[int] = set()
        self.over = threading.Event()

    def run(self) -> None:
        """Until the run is over."""
        seen, since, step_s, looked = 0, time.monotonic(), 0.1, 0.0
        while not self.over.wait(0.01):
            members = self._members()
            now = self._steps_seen()
            if now != seen:
                step_s, since, seen = (time.monotonic() - since) / (now - seen), time.monotonic(), now
            if time.monotonic() - looked > LOOK_S:
                self._look(seen)
                looked = time.monotonic()
            if members and len(self.kills) < len(self.moments):
                moment = self.moments[len(self.kills)]
                if (seen, time.monotonic() - since) >= (int(moment), moment % 1 * step_s):
                    self._kill(members, seen)

    def _steps_seen(self) -> int:
        with contextlib.suppress(OSError):
            return (self.folder / "metrics.jsonl").read_text().count('"loss"')
        return 0

    def _members(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            return dict(json.loads((self.folder / "members.json").read_text()))
        return {}

    def _look(self, seen: int) -> None:
        self.processes.see()
        if seen < self.steps:  # after the last step the workers end
            for kill in self.kills:
                self.harmed |= {pid for pid in kill.survivors if not psutil.pid_exists(pid)}

    def _kill(self, members: dict[str, Any], seen: int) -> None:
        alive = [member for member in members["members"] if psutil.pid_exists(member["pid"])]
        raylets = self.processes.raylets()
        nodes = [node for node in list(raylets)[1:] if any(node.startswith(m["node"]) for m in alive)]
        there = {"worker": alive, "raylet": nodes, "driver": [members["driver_pid"]]}[self.target]
        if not there:
            return
        chosen = self.chance.choice(there)
        now = time.time()
        if self.target == "raylet":
            killed = kill_node(raylets[chosen])
            what = f"node {chosen[:8]} (raylet {killed[0]} and {len(killed) - 1} processes)"
        else:
            killed = [chosen if self.target == "driver" else chosen["pid"]]
            what = f"the driver (pid {chosen})" if self.target == "driver" else f"{chosen['coordinate']} (pid {chosen['pid']})"
            with contextlib.suppress(ProcessLookupError):
                psutil.Process(killed[0]).kill()
        for kill in self.kills:
            kill.survivors -= set(killed)
        self.kills.append(Kill(what, seen, now, {m["pid"] for m in alive} - set(killed)))
        print(f"--- kill -9 {what}, {seen} steps seen", flush=True)


def train(words: Sequence[str], folder: Path, timeout_s: float, killer: Killer | None, processes: RunProcesses) -> Run:
    """Run `raypar train` to its end, or to its deadline; what it prints is shown and kept."""
    command = [sys.executable, "-m", "raypar", "train", *words]
    print("---", *command, flush=True)
    environment = {**os.environ, **processes.env, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = Run()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as child:
        alarm = threading.Timer(timeout_s, processes.end)
        alarm.start()
        if killer is not None:
            killer.start()
        assert child.stdout is not None
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                run.output += line
        except KeyboardInterrupt:  # the child has heard it too
            child.wait()
            raise
        finally:
            alarm.cancel()
            if killer is not None:
                killer.over.set()
                killer.join()
    run.code = child.returncode
    metrics = read_lines(folder / "metrics.jsonl", "loss")
    run.losses, run.times = [(line["step"], line["loss"]) for line in metrics], [line["time"] for line in metrics]
    run.events = read_lines(folder / "events.jsonl", "kind")
    if killer is not None:
        run.kills, run.harmed = killer.kills, killer.harmed
    run.left = processes.left()
    processes.end()
    return run


def read_lines(path: Path, key: str) -> list[dict[str, Any]]:
    """The JSON lines with this key; a line that is being written is left out."""
    if not path.exists():
        return []
    lines = [line for line in path.read_text().split("\n")[:-1] if f'"{key}"' in line]
    return [json.loads(line) for line in lines]


def judge(run: Run, steps: int, expected: str, undisturbed: Run | None, kills: int) -> list[str]:
    """What the run did not keep."""
    wrong = []
    if run.code != 0:
        wrong.append(f"exit code {run.code}")
    if len(run.kills) != kills:
        wrong.append(f"{len(run.kills)} of {kills} kills were done before the run was over")
    if run.weights != expected:
        wrong.append(f"weights {run.weights}, undisturbed {expected}")
    numbers = [step for step, _ in run.losses]
    if numbers != list(range(1, steps + 1)):
        missing, extra = sorted({*range(1, steps + 1)} - {*numbers}), len(numbers) - len({*numbers})
        wrong.append(f"steps in metrics.jsonl: {len(numbers)} lines, missing {missing[:5]}, {extra} more than once")
    if undisturbed is not None and run.losses != undisturbed.losses:
        different = [a for a, b in zip(run.losses, undisturbed.losses, strict=False) if a != b]
        wrong.append(f"losses differ from step {different[:1]} on")
    if run.harmed:
        wrong.append(f"survivors were ended or restarted: pids {sorted(run.harmed)}")
    told = [parse_event(event).line() or "" for event in run.events if event["kind"] in ("lost", "driver")]
    if run.kills and not told:
        wrong.append("events.jsonl tells of no loss")
    if unsaid := [text for text in told if text not in run.output]:
        wrong.append(f"the terminal was not told: {unsaid[0]!r}")
    if run.left:
        wrong.append("left behind: " + "; ".join(run.left))
    return wrong


def pauses(run: Run) -> list[float]:
    """Seconds by kill: until the first step that it could hold up; one that was all but done may still come."""
    gaps = list(zip(run.times, run.times[1:], strict=False))
    return [
        max((b - max(a, kill.time) for a, b in gaps if b > kill.time and a < kill.time + SOON_S), default=float("inf"))
        for kill in run.kills
    ]


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--target", choices=TARGETS, default="worker")
    parser.add_argument("--job", default=str(ROOT / "jobs/quickstart.yaml"))
    parser.add_argument("--nodes", type=int, default=3, help="raylets of the local Ray")
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="override a job key")
    parser.add_argument("--expect", metavar="HASH", help="weights of the undisturbed run (default: it is run first)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of each run")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="raypar-kill.") as place:
        overrides = ["elastic.min_workers=1", *given.overrides, f"run_dir={place}"]
        job = load_job(given.job, overrides)
        words = [given.job, "--local-nodes", str(given.nodes), *(word for o in overrides for word in ("--set", o))]
        undisturbed = None
        if given.expect is None:
            undisturbed = train(
                [*words, "--set", "name=undisturbed"], Path(place, "undisturbed"), given.timeout, None, RunProcesses()
            )
            if undisturbed.weights is None:
                print("verdict: FAILED, the undisturbed run has no weights")
                return 1
        expected = given.expect or undisturbed.weights
        processes = RunProcesses()
        folder = Path(place, job.name)
        killer = Killer(given.seed, given.target, given.kills, job.steps, folder, processes)
        try:
            run = train(words, folder, given.timeout, killer, processes)
        finally:
            processes.end()
        wrong = judge(run, job.steps, expected, undisturbed, given.kills)
    print("--- what events.jsonl tells:")
    for event in run.events:
        if event["kind"] != "checkpoint":
            print(f"    {event['kind']:<12} {event.get('text') or event.get('why') or ''}")
    done = "; ".join(f"{k.what} after {k.at} steps, no step for {p:.2f} s" for k, p in zip(run.kills, pauses(run), strict=True))
    if wrong:
        print(f"verdict: FAILED, seed {given.seed}, killed {done or 'nothing'}")
        print("\n".join(f"  - {line}" for line in wrong))
        return 1
    same = f"{job.steps} steps seen once each, weights {expected[:12]}... are those of the undisturbed run"
    print(f"verdict: good, seed {given.seed}, killed {done}; {same}, nothing left running")
    return 0


if __name__ == "__main__":
    sys.exit(main())
