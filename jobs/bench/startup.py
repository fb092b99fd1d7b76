"""Processor time and seconds from `raypar train jobs/quickstart.yaml` to its first step.

`python jobs/bench/startup.py [--old OLD] [--rounds 5] [--cold] [--json] [--log FILE] [--page FILE]`: starts the job so many
times, stops it after its first step, and reads the processor time of every process at the end of each phase of the start-up.
OLD: a checkout of an older commit (`git worktree add OLD COMMIT`), started in turn with this one. A first start of each is not
counted: it fills the page cache and compiles raypar's files. `--cold`: empty the page cache before each start (as root).

Linux adds the processor time of an ended process to the process that waited for it, so it counts there. Exit code 1 if a median
of this commit exceeds its limit: 32 processor-seconds in all, 4 a worker, 20 s.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT, BenchError, environment, page, table
from startup_submitted import measure_submissions, submission_report

JOB = "jobs/quickstart.yaml"
STAGES = ("read", "checked", "planned", "connected", "started", "built")
"""Stages of the start-up, as `--json` names them. Each ends a phase; the first step ends the last phase."""
FIRST_STEP = "first step"
PHASES = (*STAGES, FIRST_STEP)
WORKER = "worker"
KINDS = ("command", "driver", WORKER, "raylet", "control store", "Ray's agents", "other")
TITLES = (
    ("WorkerActor", WORKER),
    ("DriverActor", "driver"),
    ("gcs_server", "control store"),
    ("raylet/raylet", "raylet"),
    ("Agent", "Ray's agents"),
    ("dashboard", "Ray's agents"),
    ("runtime_env", "Ray's agents"),
    ("log_monitor", "Ray's agents"),
    ("monitor.py", "Ray's agents"),
)
"""A part of a process's command line -> its kind. The first that fits counts."""
LIMIT_S, WORKER_LIMIT_S, WALL_LIMIT_S = 32.0, 4.0, 20.0
"""What the start-up may take: processor-seconds of all processes, of one worker, and seconds."""
START_TIMEOUT_S = 300.0
TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Start:
    """One start: when each phase ended, and the processor time of each process until then."""

    wall_s: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds since the command was started."""
    cpu_s: dict[str, dict[int, float]] = field(default_factory=dict)
    """Phase -> process -> its processor-seconds."""
    kinds: dict[int, str] = field(default_factory=dict)
    """Process -> its kind."""

    def by_kind(self, phase: str) -> dict[str, float]:
        """Processor-seconds of each kind of process when the phase was over."""
        found = dict.fromkeys(KINDS, 0.0)
        for pid, seconds in self.cpu_s[phase].items():
            found[self.kinds[pid]] += seconds
        return found

    def workers(self) -> list[float]:
        """Processor-seconds of each worker."""
        return [seconds for pid, seconds in self.cpu_s[FIRST_STEP].items() if self.kinds[pid] == WORKER]


def measure(root: Path) -> Start:
    """Run the job of a checkout up to its first step; returns when all its processes have ended."""
    with tempfile.TemporaryDirectory(prefix="rp-") as folder, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "raypar", "train", JOB, "--json", "--stop-at-step", "1", "--set", f"run_dir={folder}"]
        env = {**os.environ, "PYTHONPATH": str(root), "RAY_USAGE_STATS_ENABLED": "0"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # as in a user's shell: raypar's files are compiled once
        start, begin_s = Start(), time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=root, env=env)
        watch = threading.Timer(START_TIMEOUT_S, process.kill)
        watch.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                phase = {"stage": event.get("stage"), "step": FIRST_STEP}.get(event["kind"])
                if phase in PHASES and phase not in start.wall_s:
                    start.wall_s[phase] = time.monotonic() - begin_s
                    start.cpu_s[phase] = read_processor_seconds(start.kinds)
            code = process.wait()
        finally:
            watch.cancel()
            process.kill()
            process.wait()
            reap()
        errors.seek(0)
        if code or [*start.wall_s] != [*PHASES]:
            raise BenchError(f"{root}: exit code {code} after {list(start.wall_s)}\n{errors.read()[-3000:]}")
        return start


def read_processor_seconds(kinds: dict[int, str]) -> dict[int, float]:
    """Descendant of this process -> its processor-seconds, with those of children it has waited for. Fills in `kinds`."""
    found = {}
    for pid, (seconds, title) in read_descendants().items():
        found[pid] = seconds
        if title:
            said = next((kind for part, kind in TITLES if part in title), "other")
            kinds[pid] = "command" if "-m raypar train" in title else said
        kinds.setdefault(pid, "other")
    return found


def read_descendants() -> dict[int, tuple[float, str]]:
    """Descendant of this process -> (processor-seconds, with those of children it has waited for; command line)."""
    parents, seconds = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                seconds[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS
    found = {}
    for pid in parents:
        above = pid
        while above in parents and parents[above] != os.getpid():
            above = parents[above]
        if above in parents:
            title = ""
            with contextlib.suppress(OSError):
                title = (Path("/proc") / str(pid) / "cmdline").read_text(errors="replace").replace("\0", " ")
            found[pid] = seconds[pid], title
    return found


def reap() -> None:
    """Wait for orphans of the run, whose parent is now this process; kill those that do not end within 20 s."""
    deadline = time.monotonic() + 20.0
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            if time.monotonic() > deadline:
                for child in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split():
                    os.kill(int(child), signal.SIGKILL)
            time.sleep(0.1)


def drop_page_cache() -> None:
    """Empty the page cache; only root may."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def report(starts: dict[str, list[Start]]) -> tuple[str, bool]:
    """(tables of all commits, whether the last one, this commit, keeps the limits)."""
    whole = {side: [sum(s.cpu_s[FIRST_STEP].values()) for s in of_side] for side, of_side in starts.items()}
    worker = {side: [max(s.workers()) for s in of_side] for side, of_side in starts.items()}
    wall = {side: [s.wall_s[FIRST_STEP] for s in of_side] for side, of_side in starts.items()}
    limits = [
        ("processor-seconds of all processes", whole, LIMIT_S),
        ("processor-seconds of a worker, the most", worker, WORKER_LIMIT_S),
        ("seconds", wall, WALL_LIMIT_S),
    ]
    last, held, rows = [*starts][-1], True, []
    for what, found, limit in limits:
        keeps = statistics.median(found[last]) <= limit
        held &= keeps
        rows.append([what, *(_range(values) for values in found.values()), f"{limit:.0f}", "yes" if keeps else "NO"])
    parts = [table(["from the command to the first step", *starts, "limit", "holds"], rows)]
    for side, of_side in starts.items():
        rows = []
        for kind in KINDS:
            reached = [statistics.median(s.by_kind(phase)[kind] for s in of_side) for phase in PHASES]
            rows.append([kind, *_differences(reached), f"{reached[-1]:.1f}"])
        reached = [statistics.median(sum(s.cpu_s[phase].values()) for s in of_side) for phase in PHASES]
        rows.append(["all", *_differences(reached), f"{reached[-1]:.1f}"])
        reached = [statistics.median(s.wall_s[phase] for s in of_side) for phase in PHASES]
        rows.append(["seconds by the clock", *_differences(reached), f"{reached[-1]:.1f}"])
        parts.append(f"Processor-seconds, {side}:\n\n" + table(["processes", *PHASES, "in all"], rows))
    return "\n\n".join(parts), held


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _differences(reached: Sequence[float]) -> list[str]:
    return [f"{now - before:.1f}" for before, now in zip((0.0, *reached), reached, strict=False)]


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="a checkout of an older commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="empty the page cache before each start")
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--log", type=Path, help="keep finished rounds in this file; those in it are not run again")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument(
        "--submitted", action="store_true", help="by `ray job submit`, beside an empty job (3 rounds: 3 minutes)"
    )
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans come to this process, so that none is missed
    if given.submitted:
        return report_submissions(given.rounds, given.page)
    sides = {"before": given.old.resolve(), "after": ROOT} if given.old else {"this commit": ROOT}
    rounds = json.loads(given.log.read_text()) if given.log and given.log.exists() else []
    if len(rounds) < given.rounds:
        for root in sides.values():
            measure(root)
    while len(rounds) < given.rounds:
        found: dict[str, Any] = {}
        for side in sides if len(rounds) % 2 == 0 else reversed(sides):
            if given.cold:
                drop_page_cache()
            start = measure(sides[side])
            found[side] = asdict(start)
            used = sum(start.cpu_s[FIRST_STEP].values())
            workers = ", ".join(f"{seconds:.1f}" for seconds in start.workers())
            said = f"{start.wall_s[FIRST_STEP]:.1f} s, {used:.1f} processor-seconds, workers {workers}"
            print(f"round {len(rounds) + 1}, {side}: {said}", file=sys.stderr, flush=True)
        rounds.append(found)
        if given.log:
            given.log.write_text(json.dumps(rounds))
    starts = {side: [_read(found[side]) for found in rounds] for side in sides}
    text, held = report(starts)
    print(json.dumps({"environment": environment(), "rounds": rounds}) if given.json else text)
    if given.page:
        note = ""
        if given.old:
            old = subprocess.run(["git", "describe", "--always"], cwd=given.old, capture_output=True, text=True, check=True)
            note = f"Before: {old.stdout.strip()}, after: the commit below; in turn. "
        note += (
            f"{len(rounds)} starts each, page cache {'empty' if given.cold else 'warm'}. Medians, in the first table with the "
        )
        note += "least and the most."
        options = " --old OLD" * bool(given.old) + f" --rounds {len(rounds)}" + " --cold" * given.cold
        command = f"python jobs/bench/startup.py{options}"
        given.page.write_text(page("How much work is it to the first step?", command, f"{note}\n\n{text}"))
    return 0 if held else 1


def report_submissions(rounds: int, file: Path | None) -> int:
    """Measure, and print the table of `startup_submitted.py`; `file`: a results page to write. Returns the exit code."""
    text, held = submission_report(measure_submissions(rounds, read_descendants))
    print(text)
    if file is not None:
        note = f"{rounds} rounds, page cache warm, each an empty job and then the quickstart; medians, least and most."
        command = f"python jobs/bench/startup.py --submitted --rounds {rounds}"
        file.write_text(page("How long from `ray job submit` to the first step?", command, f"{note}\n\n{text}"))
    return 0 if held else 1


def _read(found: dict[str, Any]) -> Start:
    """A start as it was kept in the log, where JSON has made texts of the processes' numbers."""
    cpu_s = {phase: {int(pid): seconds for pid, seconds in of.items()} for phase, of in found["cpu_s"].items()}
    return Start(found["wall_s"], cpu_s, {int(pid): kind for pid, kind in found["kinds"].items()})


if __name__ == "__main__":
    sys.exit(main())
