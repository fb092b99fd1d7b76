"""Seconds and processor time from `ray job submit` to the first step of the quickstart, by phase, beside an empty job.

`startup.py --submitted` runs it. A Ray cluster with room for the job is started on this machine; each round submits an empty
job without files, then the quickstart with a fresh copy of the repository as its working directory, both by `ray job submit`. A
first round is not counted. The empty job's time until its command starts is Ray's own; all other time counts as raypar's, also
what the working directory costs. Exit code 1 if raypar's time is more than `BEYOND_LIMIT_S`.
"""

from __future__ import annotations

import bisect
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import ROOT, BenchError, table

from examples.submit_and_stop import RAY, cluster, cluster_environment

BEYOND_LIMIT_S = 20.0
"""Most seconds that the first step may come after the time at which an empty job's command starts."""
SAMPLE_S = 0.2
"""Time from one look at the processes to the next."""
SUBMIT_TIMEOUT_S = 180.0
SUBMITTING, COMMAND, DRIVER, WORKER, RAY_KIND = "ray job submit", "raypar train", "driver", "workers", "Ray"
KINDS = (SUBMITTING, COMMAND, DRIVER, WORKER, RAY_KIND)
TITLES = (
    ("WorkerActor", WORKER),
    ("DriverActor", DRIVER),
    ("job submit", SUBMITTING),
    ("JobSupervisor", RAY_KIND),
    ("raypar train", COMMAND),
)
"""A part of a process's command line -> its kind. The first that fits counts; all others are Ray's."""
STAGES = {
    "read": "imports of raypar, the job file",
    "checked": "imports of PyTorch and the job's code, its check",
    "planned": "the plan: measured and simulated",
    "connected": "joining the cluster (import of Ray), the queue",
}
"""Stage of the start-up, as `--json` names it -> the phase that it ends."""
OWN, FILES = "Ray's own submission (an empty job)", "the runtime environment: the working directory"
DRIVER_STARTS, WORKERS_START, WORKERS_IMPORT = "the driver starts", "the workers' processes start", "the workers' imports"
BUILT, FIRST_STEP = "stages built and connected", "the first step"
PHASES = (OWN, FILES, *STAGES.values(), DRIVER_STARTS, WORKERS_START, WORKERS_IMPORT, BUILT, FIRST_STEP)
NOT_SENT = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache", "*.egg-info", "*.bin")

ReadProcesses = Callable[[], Mapping[int, tuple[float, str]]]
"""`startup.read_descendants`."""


@dataclass
class ProcessorLog:
    """Processor-seconds of all kinds of processes, looked at five times a second. Times are Unix seconds."""

    read: ReadProcesses
    """Reads all processes."""
    times: list[float] = field(default_factory=list)
    """When it was looked."""
    seconds: list[dict[str, float]] = field(default_factory=list)
    """At each look: kind -> processor-seconds so far."""
    first_seen: dict[str, list[float]] = field(default_factory=dict)
    """Kind -> when each of its processes was seen first under its title."""

    def watch(self, over: threading.Event) -> None:
        """Look until `over` is set."""
        most: dict[int, tuple[str, float]] = {}
        while not over.is_set():
            now, found = time.time(), self.read()
            for pid, (seconds, title) in found.items():
                kind = next((kind for part, kind in TITLES if part in title), RAY_KIND)
                if most.get(pid, ("", 0.0))[0] != kind:
                    self.first_seen.setdefault(kind, []).append(now)
                most[pid] = kind, max(seconds, most.get(pid, ("", 0.0))[1])
            sums = dict.fromkeys(KINDS, 0.0)
            for kind, seconds in most.values():
                sums[kind] += seconds
            self.times.append(now)
            self.seconds.append(sums)
            over.wait(SAMPLE_S)

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Kind -> processor-seconds from `begin_s` to `end_s`, read off between the looks."""
        return {kind: self._at(kind, end_s) - self._at(kind, begin_s) for kind in KINDS}

    def _at(self, kind: str, at_s: float) -> float:
        after = min(bisect.bisect_left(self.times, at_s), len(self.times) - 1)
        before = max(after - 1, 0)
        span = self.times[after] - self.times[before]
        share = min(max((at_s - self.times[before]) / span, 0.0), 1.0) if span else 0.0
        first, last = self.seconds[before][kind], self.seconds[after][kind]
        return first + share * (last - first)


@dataclass
class Submission:
    """One round: how long each phase took."""

    wall_s: dict[str, float]
    """Phase -> its seconds by the clock."""
    cpu_s: dict[str, dict[str, float]]
    """Phase -> kind of process -> processor-seconds."""

    @property
    def beyond_s(self) -> float:
        """Seconds until the first step, without Ray's own submission."""
        return sum(self.wall_s.values()) - self.wall_s[OWN]


class SubmittedJobs:
    """Submits jobs to one cluster, and reads when things happened."""

    def __init__(self, address: str, home: Path, read: ReadProcesses) -> None:
        self.address = address
        """The job server."""
        self.home = home
        """Where the runs and the copy of the repository lie."""
        self.read = read
        """Reads all processes."""
        self.working_dir = home / "repository"
        """The working directory of the jobs."""
        self.count = 0
        """Number of submissions with files: each has other files, as after an edit."""
        shutil.copytree(ROOT, self.working_dir, ignore=NOT_SENT)

    def submit(self, entrypoint: str, *words: str) -> tuple[float, float, list[str], ProcessorLog]:
        """Submit a job and wait for its end: (submission time, start of its command, printed lines, processes)."""
        log, over = ProcessorLog(self.read), threading.Event()
        watch = threading.Thread(target=log.watch, args=(over,), daemon=True)
        command = [*RAY, "job", "submit", "--address", self.address, *words, "--", "sh", "-c", f"date +%s.%N; {entrypoint}"]
        watch.start()
        begin_s = time.time()
        try:
            done = subprocess.run(
                command,
                env=cluster_environment(self.home),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SUBMIT_TIMEOUT_S,
                cwd=self.home,
                check=False,
            )
        finally:
            over.set()
            watch.join()
        lines = done.stdout.splitlines()
        began = [float(line) for line in lines if line.replace(".", "", 1).isdigit()]
        if done.returncode or not began:
            raise BenchError(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout[-3000:]}")
        return begin_s, began[0], lines, log

    def measure_round(self) -> Submission:
        """Submit an empty job, then the quickstart; returns what was measured."""
        begin_s, began_s, _, empty = self.submit("true")
        own_s, own = began_s - begin_s, empty.between(begin_s, began_s)
        self.count += 1
        (self.working_dir / "submission.txt").write_text(f"{self.count}\n")
        run = f"python -m raypar train jobs/quickstart.yaml --json --no-resume --stop-at-step 1 --set run_dir={self.home}/runs"
        begin_s, began_s, lines, log = self.submit(f"exec {run}", "--working-dir", str(self.working_dir))
        ends = {OWN: begin_s + own_s, FILES: began_s}
        for event in (json.loads(line) for line in lines if line.startswith("{")):
            stage = event.get("stage") if event["kind"] == "stage" else event["kind"]
            if stage in STAGES:
                ends[STAGES[stage]] = event["time"]
            elif stage == "started":
                ends[DRIVER_STARTS] = min(log.first_seen[DRIVER])
                ends[WORKERS_START] = max(log.first_seen[WORKER])
                ends[WORKERS_IMPORT] = event["time"]
            elif stage == "built":
                ends[BUILT] = event["time"]
            elif stage == "step":
                ends.setdefault(FIRST_STEP, event["time"])
        if [phase for phase in PHASES if phase not in ends]:
            raise BenchError("\n".join(["a phase is missing:", *lines[-40:]]))
        wall, cpu, last_s = {}, {}, begin_s
        for phase in PHASES:
            end_s = max(ends[phase], last_s)
            wall[phase], cpu[phase] = end_s - last_s, log.between(last_s, end_s)
            last_s = end_s
        spent = log.between(begin_s, began_s)
        cpu[OWN], cpu[FILES] = own, {kind: spent[kind] - own[kind] for kind in KINDS}
        return Submission(wall, cpu)


def measure_submissions(rounds: int, read: ReadProcesses) -> list[Submission]:
    """Start a cluster and measure `rounds` rounds, after a first one that is not counted."""
    found = []
    with tempfile.TemporaryDirectory(prefix="rp-") as folder, cluster(1, Path(folder)) as address:
        jobs = SubmittedJobs(address, Path(folder), read)
        for number in range(rounds + 1):
            one = jobs.measure_round()
            counted = f"round {number}" if number else "first round, not counted"
            total_s = sum(one.wall_s.values())
            text = f"{counted}: {total_s:.1f} s to the first step, {one.beyond_s:.1f} s beyond Ray's own submission"
            print(text, file=sys.stderr, flush=True)
            found += [one] * (number > 0)
    return found


def submission_report(found: Sequence[Submission]) -> tuple[str, bool]:
    """(the table of phases, whether the limit holds)."""
    rows = [_row(phase, [one.wall_s[phase] for one in found], [one.cpu_s[phase] for one in found]) for phase in PHASES]
    rows.append(
        _row(
            "in all",
            [sum(one.wall_s.values()) for one in found],
            [{kind: sum(cpu[kind] for cpu in one.cpu_s.values()) for kind in KINDS} for one in found],
        )
    )
    beyond = [one.beyond_s for one in found]
    holds = statistics.median(beyond) <= BEYOND_LIMIT_S
    heads = ["from `ray job submit` to the first step", "seconds", "processor-seconds", *KINDS]
    least_and_most = f"{min(beyond):.1f} to {max(beyond):.1f}"
    verdict = (
        f"Beyond Ray's own submission: {statistics.median(beyond):.1f} s ({least_and_most}); limit {BEYOND_LIMIT_S:.0f} s: "
        f"{'holds' if holds else 'DOES NOT HOLD'}."
    )
    return f"{table(heads, rows)}\n\n{verdict}", holds


def _row(name: str, wall: Sequence[float], cpu: Sequence[Mapping[str, float]]) -> list[str]:
    """A row: medians, the seconds with the least and the most."""
    kinds = [f"{statistics.median(one[kind] for one in cpu):.1f}" for kind in KINDS]
    seconds = f"{statistics.median(wall):.1f} ({min(wall):.1f} to {max(wall):.1f})"
    return [name, seconds, f"{statistics.median(sum(one.values()) for one in cpu):.1f}", *kinds]
