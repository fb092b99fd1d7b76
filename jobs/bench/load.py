"""A run beside processes that take all processors: does it begin, does it live, is a living worker with the only copy given up?

`python jobs/bench/load.py [--minutes 20] [--starts 10] [--load 12] [--apart] [--page FILE]`: so many cold starts, each to the
second step, then one run of that many minutes, all of them the quickstart with its default settings (4 workers) beside
`--load` processes that compute. Exit code 1 when a start does not begin, the run is lost, or goes back to a checkpoint or the
beginning because no copy was left in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import page, table

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs/quickstart.yaml"
ENDLESS = 100_000
START_S, MORE_S = 600.0, 300.0
"""How long a start may take, and a run more than its minutes, before it counts as lost."""
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"
TOLD = ("lost", "recovering", "waiting", "warning", "generation")


@contextlib.contextmanager
def crowd(processes: int, apart: bool = False) -> Iterator[None]:
    """Within this context so many processes compute; they end with this process too. `apart`: each in a session of its own, so
    that Linux's autogroups give each of them as much as all workers of a run together."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=apart) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


@dataclass
class Run:
    """One `raypar train`: its lines as they came (seconds since the command, event), and how it ended."""

    lines: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    code: int | None = None
    late: bool = False
    said: str = ""

    def told(self, kind: str) -> list[dict[str, Any]]:
        """All events of that kind."""
        return [event for _, event in self.lines if event.get("kind") == kind]

    def first_s(self, step: int = 1) -> float | None:
        """When that step was seen."""
        return next((s for s, event in self.lines if event.get("kind") == "step" and event["step"] >= step), None)

    @property
    def back(self) -> list[dict[str, Any]]:
        """Events of generations that began from a checkpoint or anew, because no copy was left in memory."""
        return [event for event in self.told("generation") if event.get("state") in ("checkpoint", "beginning")]


def train(folder: Path, name: str, limit_s: float, *overrides: str) -> Run:
    """Run `raypar train` to its end, or kill it after `limit_s`."""
    words = [word for value in (f"run_dir={folder}", f"name={name}", *overrides) for word in ("--set", value)]
    command = [sys.executable, "-m", "raypar", "train", str(JOB), "--json", *words]
    run, start_s = Run(), time.monotonic()
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=env)

        def give_up() -> None:
            run.late = True
            process.kill()

        watch = threading.Timer(limit_s, give_up)
        watch.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    event = json.loads(line)
                    if isinstance(event, dict):
                        run.lines.append((time.monotonic() - start_s, event))
                        if event.get("kind") in TOLD:
                            say(f"  {time.monotonic() - start_s:7.1f} s  {event.get('text')}")
            run.code = process.wait()
        finally:
            watch.cancel()
            process.kill()
            process.wait()
        errors.seek(0)
        run.said = errors.read()
    return run


def starts(folder: Path, count: int) -> tuple[list[list[str]], bool]:
    """Start `count` runs, one after the other: rows of the table, and whether all began."""
    rows, well = [], True
    for number in range(1, count + 1):
        load = os.getloadavg()[0]
        run = train(folder, f"start-{number}", START_S, "steps=2", "validation.every=0", "checkpoint.every=0")
        first_s = run.first_s()
        begun = first_s is not None and run.code == 0
        well &= begun
        why = "" if begun else ("not within the time" if run.late else last_line(run.said))
        rows.append([str(number), f"{load:.1f}", "" if first_s is None else f"{first_s:.1f}", "yes" if begun else "NO", why])
        say(f"start {number}: {' | '.join(rows[-1][1:])}")
    return rows, well


def long_run(folder: Path, minutes: float) -> tuple[list[list[str]], bool]:
    """One run of so many minutes: rows of the table, and whether it lived."""
    loads: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(5.0):
            loads.append(os.getloadavg()[0])

    looking = threading.Thread(target=look)
    looking.start()
    try:
        limits = (f"steps={ENDLESS}", f"max_time_s={60 * minutes}")
        run = train(folder, "long", 60 * minutes + START_S + MORE_S, *limits)
    finally:
        over.set()
        looking.join()
    (result,) = run.told("result")[-1:] or [{}]
    lived = run.code == 0 and result.get("end") == "stopped" and not run.back
    seconds = [event["seconds"] for event in run.told("step")]
    told = Counter(
        re.sub(r"\d+(\.\d+)?", "N", event["text"]) for event in run.told("recovering") if "generation" not in event["text"]
    )
    waits = [event["text"] for event in run.told("waiting")]
    steady = sorted(loads[len(loads) // 4 :]) or [0.0]
    rows = [
        [
            "load average of a minute, least and median after the first quarter",
            f"{steady[0]:.1f}, {statistics.median(steady):.1f}",
        ],
        ["end", f"{result.get('end', 'lost')}: {result.get('why', last_line(run.said))}"],
        ["steps, with the median and the longest", measured(seconds)],
        ["workers given up or lost", str(len(run.told("lost")))],
        ["generations", str(len(run.told("generation")))],
        ["of these, back to a checkpoint or the beginning (no copy left in memory)", str(len(run.back))],
        ["times that somebody with the only copy was waited for", str(len(waits))],
        ["lived", "yes" if lived else "NO"],
    ]
    rows += [[f"began a recovery ({count} times)", why] for why, count in told.most_common(6)]
    return rows, lived


def measured(seconds: list[float]) -> str:
    """Number, median and longest of steps' times: `812; 0.9 s, 14.2 s`."""
    return f"{len(seconds)}; {statistics.median(seconds):.2f} s, {max(seconds):.1f} s" if seconds else "0"


def last_line(text: str) -> str:
    """The last line of what a command printed."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of the long run; 0: none")
    parser.add_argument("--starts", type=int, default=10, help="from cold")
    parser.add_argument("--load", type=int, default=12, help="processes that compute beside it")
    parser.add_argument("--apart", action="store_true", help="each of these in a session of its own, which takes far more")
    parser.add_argument("--page", type=Path, help="also write a results page")
    given = parser.parse_args()
    parts, well = [], True
    with tempfile.TemporaryDirectory(prefix="raypar-load-") as folder, crowd(given.load, given.apart):
        if given.starts:
            rows, begun = starts(Path(folder), given.starts)
            well &= begun
            parts.append(table(["start", "load", "first step after s", "begun", "why not"], rows))
        if given.minutes:
            rows, lived = long_run(Path(folder), given.minutes)
            well &= lived
            parts.append(f"{given.minutes:g} minutes:\n\n" + table(["what", "measured"], rows))
    parts.append(
        f"Beside {given.load} processes that compute all the time: `jobs/quickstart.yaml` with its default settings, so 2 "
        "stages x 2 replicas, `elastic` with deadlines of 3 s and the mirror. A start is from cold: with its own Ray."
    )
    body = "\n\n".join(parts)
    print(body)
    if given.page:
        command = (
            f"python jobs/bench/load.py --minutes {given.minutes:g} --starts {given.starts} --load {given.load}"
            + " --apart" * given.apart
        )
        given.page.write_text(page("Does a run live on a machine that is busy with something else?", command, body))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
