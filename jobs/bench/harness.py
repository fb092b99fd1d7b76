"""Contenders that live side by side, blocked while idle, and are told in turn to run some steps.

Each contender is one or more worker processes (`worker.py`) connected to the bench by a Unix socket; a worker waits for a
command in a blocking read, so that an idle contender uses no processor. The bench alternates: one round runs every
contender once, in an order that turns round by round, and ratios are taken inside a round.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `examples` is imported from the repository

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that contenders are stopped then, too

START_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
SETTLE_S = 0.2
"""After a stop, before a run: timers that were due in the meantime go off."""


class BenchError(RuntimeError):
    """A contender did not start, answer or finish; the text ends with its last output."""


@dataclass
class Contender:
    """One way to train. `launch(address)` gives the command lines to start; `workers` processes then connect and serve."""

    name: str
    workers: int
    commands: Callable[[str], list[list[str]]]
    env: Mapping[str, str] = field(default_factory=dict)
    never_idle: bool = False
    """It uses processor also when nothing runs in it, as Ray's daemons do: all its processes are stopped between its turns."""
    root: Path = ROOT
    """The checkout whose raypar it imports; another one is an older commit to compare with."""

    _connections: list[Connection] = field(default_factory=list)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _folder: Path | None = None

    def start(self) -> None:
        """Start the processes and wait until all workers are ready to run."""
        self._folder = Path(tempfile.mkdtemp(prefix="raypar-bench."))
        address = str(self._folder / "bench.sock")
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"} | dict(self.env)
        env["PYTHONPATH"] = os.pathsep.join([str(self.root), str(worker_of(self.root).parent), env.get("PYTHONPATH", "")])
        with Listener(address, "AF_UNIX") as listener, (self._folder / "log").open("wb") as log:
            for command in self.commands(address):
                # Each in a session of its own, as torchrun starts its workers: Linux shares processors out by session first
                # (autogroups), so two workers of one session would get half as much beside anything else that runs.
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=env,
                        cwd=self.root,
                        start_new_session=True,
                    )
                )
            deadline = time.monotonic() + START_TIMEOUT_S
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            while len(self._connections) < self.workers:
                try:
                    self._connections.append(listener.accept())
                except TimeoutError:
                    self._check(time.monotonic() < deadline, f"was not up after {START_TIMEOUT_S:.0f} s")
            hellos = [self._receive(connection, deadline) for connection in self._connections]
            if all("address" in hello for hello in hellos):
                addresses = [hello["address"] for hello in sorted(hellos, key=lambda hello: hello["rank"])]
                self._ask(("connect", addresses), START_TIMEOUT_S)

    def run(self, steps: int) -> float:
        """Seconds a step: from the first worker's start to the last worker's end, over `steps`."""
        self._signal(signal.SIGCONT)
        answers = self._ask(("run", steps), RUN_TIMEOUT_S)
        self._signal(signal.SIGSTOP)
        return (max(a["end_ns"] for a in answers) - min(a["start_ns"] for a in answers)) / 1e9 / steps

    def info(self) -> list[dict[str, Any]]:
        """What each worker says of itself: peak_rss_bytes, loss, and more by kind."""
        self._signal(signal.SIGCONT)
        return self._ask(("info",), RUN_TIMEOUT_S)

    def _signal(self, number: signal.Signals) -> None:
        """Stop everything that belongs to a contender that is never idle, or let it go on and settle."""
        if not self.never_idle:
            return
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in (top := psutil.Process(process.pid), *top.children(recursive=True)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one.pid, number)
        if number == signal.SIGCONT:
            time.sleep(SETTLE_S)

    def stop(self) -> None:
        """End the processes and remove their folder; idempotent."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            try:
                connection.send(("stop",))
            except OSError:
                continue
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._processes.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _ask(self, command: tuple[Any, ...], timeout_s: float) -> list[dict[str, Any]]:
        for connection in self._connections:
            connection.send(command)
        deadline = time.monotonic() + timeout_s
        return [self._receive(connection, deadline) for connection in self._connections]

    def _receive(self, connection: Connection, deadline: float) -> dict[str, Any]:
        self._check(bool(wait([connection], max(0.0, deadline - time.monotonic()))), "did not answer in time")
        try:
            kind, value = connection.recv()
        except (EOFError, ConnectionResetError):
            kind, value = "error", "closed its connection"
        self._check(kind == "ok", str(value))
        return value  # type: ignore[no-any-return]

    def _check(self, holds: bool, what: str) -> None:
        dead = [p.returncode for p in self._processes if p.poll()]
        if holds and not dead:
            return
        log = (self._folder / "log").read_text(errors="replace")[-3000:] if self._folder else ""
        raise BenchError(f"{self.name}: {what}{f' (exit codes {dead})' if dead else ''}\n{log}")


def worker_of(root: Path) -> Path:
    """The program of a contender's worker processes, in a checkout of raypar."""
    return root / "jobs" / "bench" / "worker.py"


def worker_command(kind: str, address: str, rank: int, *, root: Path = ROOT, **options: Any) -> list[str]:
    """The command line of one worker process."""
    return [
        sys.executable,
        str(worker_of(root)),
        kind,
        "--address",
        address,
        "--rank",
        str(rank),
        "--options",
        json.dumps(options),
    ]


def torchrun_command(kind: str, address: str, processes: int, **options: Any) -> list[str]:
    """The same under torchrun, which sets rank and rendezvous. Its logs lie beside the address: it would leave them in /tmp."""
    logs = str(Path(address).with_name("torchrun"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "--log-dir", logs]
    return [sys.executable, *launcher, str(worker_of(ROOT)), kind, "--address", address, "--options", json.dumps(options)]


def alternate(
    contenders: Sequence[Contender], *, rounds: int, steps: int, say: Callable[[str], None] = lambda text: None
) -> dict[str, list[float]]:
    """Seconds a step by contender, one number a round. All are warmed up first. The order is reversed every other round."""
    for contender in contenders:
        contender.run(2)
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            seconds[contender.name].append(contender.run(steps))
        if number % 5 == 4:
            say(f"round {number + 1} of {rounds}")
    return seconds


@dataclass(frozen=True)
class Ratio:
    """Median over rounds of (base seconds / own seconds), and the lower end of its two-sided 95 % bootstrap interval."""

    median: float
    lower: float
    upper: float
    pairs: int


def ratio(base: Sequence[float], own: Sequence[float], *, resamples: int = 4000, seed: int = 0) -> Ratio:
    """How many times faster `own` is than `base`, pair by pair (Efron and Tibshirani 1993, chapter 13: percentile interval)."""
    pairs = [b / o for b, o in zip(base, own, strict=True)]
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(pairs, k=len(pairs))) for _ in range(resamples))
    return Ratio(statistics.median(pairs), medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1], len(pairs))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Quartiles."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def environment_of_children() -> dict[str, str]:
    """Variables for a Python process that imports raypar from this checkout."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}


def environment() -> dict[str, Any]:
    """What the figures depend on; printed on every results page."""
    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    versions = subprocess.run(
        [
            sys.executable,
            "-c",
            "import importlib.metadata as m; there = {d.metadata['Name']: d.version for d in m.distributions()};"
            "print(*[f'{p} {there[p]}' for p in ('torch', 'ray', 'numpy') if p in there], sep=', ')",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT, check=False)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": model,
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "packages": versions.stdout.strip(),
        "commit": commit.stdout.strip() or "unknown",
        "load_average": round(os.getloadavg()[0], 2),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up in a terminal too."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *text[1:]])


def page(question: str, command: str, body: str) -> str:
    """A results page: question, tables, environment and command."""
    facts = "\n".join(f"- {key.replace('_', ' ')}: {value}" for key, value in environment().items())
    return f"# {question}\n\n{body}\n\n## Environment\n\n{facts}\n\n## Command\n\n```\n{command}\n```\n"
