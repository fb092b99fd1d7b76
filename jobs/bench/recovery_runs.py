"""The contenders of the recovery bench, seen from outside: processes that are started, hurt by pid, read and ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, ClassVar

import psutil
from harness import ROOT, BenchError

HERE = Path(__file__).parent
START_LIMIT_S, ANSWER_LIMIT_S, STOP_LIMIT_S = 60.0, 60.0, 15.0
APART_S = 1.0
CONTEXT = 16
"""Tokens a sample (`recovery_work.WORK`, which needs torch)."""

PER_NODE = 2
"""Workers on a node of the cluster."""

HEAD = {"num_cpus": 0, "include_dashboard": False}
NODE = {"num_cpus": PER_NODE}


@dataclass(frozen=True)
class RunSettings:
    """What every run of a bench shares. `every`: steps between checkpoints; `resize_s`: how often Ray Train looks for nodes."""

    steps: int = 60
    every: int = 5
    resize_s: float = 60.0


@dataclass(frozen=True)
class Commit:
    """A line about a committed step, counted from 1. `workers`: that computed it; `samples`: in its gradient."""

    at_s: float
    step: int
    workers: int
    samples: int


class Seen:
    """What is seen of a run: the lines that its processes write into `diary`."""

    def __init__(self, settings: RunSettings, workers: int, diary: Path) -> None:
        self.settings, self.workers, self.diary = settings, workers, diary
        self._lines: list[dict[str, Any]] = []
        self._read: dict[Path, int] = {}

    def lines(self) -> list[dict[str, Any]]:
        """All that was written so far, in order of time."""
        for path in self.diary.glob("*.jsonl"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                while (line := file.readline()).endswith("\n"):
                    self._lines.append(json.loads(line))
                    self._read[path] = file.tell()
        self._lines.sort(key=lambda line: line["at_s"])
        return self._lines

    def commits(self) -> list[Commit]:
        """All so far, in order of time; a worker each may have written one about the same step."""
        return [
            Commit(line["at_s"], line["step"], line["workers"], line["samples"])
            for line in self.lines()
            if line["kind"] == "step"
        ]

    def repeated(self) -> int:
        """How many steps were done again: workers in step write of one at nearly the same time."""
        first: dict[int, float] = {}
        return len({c.step for c in self.commits() if c.at_s > first.setdefault(c.step, c.at_s) + APART_S})

    def weights(self) -> str | None:
        """Hash of the final weights, once all that know it agree."""
        found = {line["weights_sha256"] for line in self.lines() if line["kind"] == "end" and "weights_sha256" in line}
        return found.pop() if len(found) == 1 else None


class Run(Seen, ABC):
    """One run of one contender in a folder of its own; a context that leaves no process and no file behind."""

    name: ClassVar[str]

    def __init__(self, settings: RunSettings, workers: int, chance: random.Random) -> None:
        self.folder, self.chance = Path(tempfile.mkdtemp(prefix="rp-")), chance
        super().__init__(settings, workers, self.folder / "diary")
        self.diary.mkdir()
        self.main: list[subprocess.Popen[bytes]] = []
        """The run is over when all of these have ended."""
        self._started: list[subprocess.Popen[bytes]] = []
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Run:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None:
        """Start everything; training begins some seconds later."""

    # -- what is hurt ------------------------------------------------------------------------------------------------------

    def kill_worker(self) -> set[int]:
        """kill -9 of one worker; its pid."""
        victim = self.chance.choice(sorted(self.training()))
        os.kill(victim, signal.SIGKILL)
        return {victim}

    @abstractmethod
    def kill_node(self) -> set[int]:
        """kill -9 of everything on one node of two workers, which does not come back; the pids of its workers."""

    @abstractmethod
    def join(self) -> None:
        """Two more workers can be had from now on."""

    # -- who is there ------------------------------------------------------------------------------------------------------

    def training(self) -> set[int]:
        """The pids of the workers that train now."""
        return self.alive({line["pid"] for line in self.lines() if line["kind"] == "step"})

    def alive(self, pids: Iterable[int]) -> set[int]:
        """Those that have not ended (a zombie has)."""
        found = set()
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.add(pid)
        return found

    def over(self) -> bool:
        """Whether the run has ended. Raises `BenchError` when it has failed."""
        codes = [process.poll() for process in self.main]
        if any(codes):
            raise BenchError(f"{self.name}: exit codes {codes}\n{self.log()}")
        return all(code == 0 for code in codes)

    def log(self) -> str:
        """The last output of each process."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("*.log"))
        )

    # -- processes ---------------------------------------------------------------------------------------------------------

    def spawn(self, name: str, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A process in a session of its own, with its output in NAME.log."""
        quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | quiet | {"TMPDIR": str(self.folder)} | dict(env),
                cwd=ROOT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def look(self) -> None:
        """Take note of every process of this run, also of those whose parents may be killed."""
        for process in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                top = psutil.Process(process.pid)
                for one in (top, *top.children(recursive=True)):
                    self._seen[one.pid] = one

    def stop(self) -> None:
        """End every process of the run by its pid, and remove its folder. Idempotent."""
        self.look()
        self.close()
        for process in self._started:
            process.terminate()
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT_S)
        for one in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()  # psutil compares the time of creation, so that another process with this pid is safe
        for process in self._started:
            process.wait()
        self._started.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """What ends in an orderly way before the rest is terminated."""


def contender_command(python: str, kind: str, options: Mapping[str, Any]) -> list[str]:
    """The command line of one process of a contender."""
    return [python, str(HERE / "recovery_contender.py"), kind, "--options", json.dumps(options)]


class OnRay(Run):
    """A driver on a Ray cluster of a head without CPUs and nodes of two, with Ray's default settings."""

    needles: ClassVar[tuple[str, ...]]
    """In the titles of processes whose node is spared: another fault than the one asked for."""

    def start(self) -> None:
        self.env = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(self.folder)}
        address = str(self.folder / "cluster.sock")
        nodes = [NODE] * (self.workers // PER_NODE)
        head = HEAD | {"temp_dir": str(self.folder / "ray")}
        with Listener(address, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(START_LIMIT_S)  # type: ignore[attr-defined]
            options = {"address": address, "head": head, "nodes": nodes}
            self.spawn("cluster", contender_command(sys.executable, "cluster", options), self.env)
            try:
                self.connection: Connection | None = listener.accept()
            except TimeoutError:
                raise BenchError(f"the cluster was not up after {START_LIMIT_S:.0f} s\n{self.log()}") from None
        self.address, self.raylets = self._answer()
        self.main = [self.spawn("driver", self.command(), self.env | {"RAY_ADDRESS": self.address})]

    @abstractmethod
    def command(self) -> list[str]:
        """The driver's command line."""

    def kill_node(self) -> set[int]:
        training = self.training()
        titles = {raylet: self._on(raylet) for raylet in self.raylets}
        spared = {r for r, found in titles.items() if any(n in title for title in found.values() for n in self.needles)}
        victim = self.chance.choice([r for r in self.raylets if r not in spared and training & set(titles[r])])
        self.raylets.remove(victim)
        for pid in (victim, *titles[victim]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._ask("reap", victim)
        return training & set(titles[victim])

    def join(self) -> None:
        self.raylets.append(self._ask("add", NODE))

    def _on(self, raylet: int) -> dict[int, str]:
        """Pid and title of every process on a node."""
        found = {}
        for one in psutil.Process(raylet).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[one.pid] = " ".join(one.cmdline())
        return found

    def _ask(self, command: str, value: Any) -> Any:
        assert self.connection is not None
        self.connection.send((command, value))
        return self._answer()

    def _answer(self) -> Any:
        assert self.connection is not None
        if not self.connection.poll(ANSWER_LIMIT_S):
            raise BenchError(f"the cluster did not answer within {ANSWER_LIMIT_S:.0f} s\n{self.log()}")
        try:
            return self.connection.recv()
        except EOFError:
            raise BenchError(f"the cluster has ended\n{self.log()}") from None

    def close(self) -> None:
        if getattr(self, "connection", None) is not None:
            assert self.connection is not None
            self.connection.close()
            self.connection = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._started[0].wait(STOP_LIMIT_S)


class RayTrain(OnRay):
    """`ScalingConfig(num_workers=(1, 4))`."""

    name = "Ray Train"
    needles = ("TrainController", "AutoscalingCoordinator")

    def command(self) -> list[str]:
        options = {
            "address": self.address,
            "diary": str(self.diary),
            "storage": str(self.folder / "storage"),
            "workers": (1, 4),
            "steps": self.settings.steps,
            "every": self.settings.every,
            "resize_s": self.settings.resize_s,
        }
        return contender_command(sys.executable, "ray-train", options)


class Raypar(OnRay):
    """The `elastic` section; data parallel as the peers are."""

    name = "raypar 4 replicas"
    needles = ("DriverActor",)
    stages: ClassVar[int] = 1

    def command(self) -> list[str]:
        job = {
            "name": "recovery",
            "steps": self.settings.steps,
            "batch_size": 24,
            "microbatches": 12,
            "model": "recovery_work:layers",
            "loss": "examples.gpt:loss",
            "data": {"function": "examples.gpt:text", "args": {"context": CONTEXT}},
            "optimizer": {"function": "torch.optim:AdamW", "args": {"lr": 1e-3}},
            "plan": {"stages": self.stages, "replicas": self.workers // self.stages},
            "elastic": {"min_workers": 1, "max_workers": 4},
            "checkpoint": {"every": self.settings.every},
            "run_dir": str(self.folder / "runs"),
        }
        path = self.folder / "job.yaml"
        path.write_text(json.dumps(job))  # JSON is YAML
        return contender_command(
            sys.executable, "raypar", {"address": self.address, "diary": str(self.diary), "job": str(path)}
        )

    def commits(self) -> list[Commit]:
        found, workers = [], self.workers
        for line in self.lines():
            if line["kind"] == "generation":
                workers = len(line["workers"])
            elif line["kind"] == "step":
                found.append(Commit(line["at_s"], line["step"], workers, int(line["count"]) // CONTEXT))
        return found

    def repeated(self) -> int:
        """People see every step once; what a new generation does again unseen is told."""
        return sum(line["again"] for line in self.lines() if line["kind"] == "generation")

    def training(self) -> set[int]:
        members = json.loads((self.folder / "runs" / "recovery" / "members.json").read_text())["members"]
        return self.alive(one["pid"] for one in members)


class RayparPipelines(Raypar):
    """Two stages by two replicas, which no peer can do."""

    name = "raypar 2 x 2"
    stages = 2


class Torchft(Run):
    """Replica groups of one process under torchrun, which starts a killed process again, and a lighthouse; the flags are those
    of torchft's README and `torchx.py`."""

    name = "torchft, its DDP"
    ddp: ClassVar[bool] = True
    python: ClassVar[str]
    """Of the environment that has it (`torchft_python`)."""

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        lighthouse = str(Path(self.python).with_name("torchft_lighthouse"))
        flags = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000", "--bind", f"[::]:{port}"]
        self.spawn("lighthouse", [lighthouse, *flags], {})
        self.lighthouse = f"http://localhost:{port}"
        self.main = [self.group(number) for number in range(self.workers)]

    def group(self, number: int) -> subprocess.Popen[bytes]:
        """Start a replica group."""
        options = {
            "diary": str(self.diary),
            "steps": self.settings.steps,
            "groups": 4,
            "ready": self.workers,
            "ddp": self.ddp,
        }
        launcher = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1"]
        launcher += ["--nproc_per_node=1", "--max_restarts=10"]
        command = [self.python, *launcher, *contender_command(self.python, "torchft", options)[1:]]
        return self.spawn(f"group{number}", command, {"REPLICA_GROUP_ID": str(number), "TORCHFT_LIGHTHOUSE": self.lighthouse})

    def kill_node(self) -> set[int]:
        victims = self.chance.sample(range(self.workers), 2)
        killed = set()
        for group in [self.main[number] for number in victims]:
            below = psutil.Process(group.pid).children(recursive=True)
            for one in (psutil.Process(group.pid), *below):
                one.kill()
            killed |= {one.pid for one in below}
            group.wait()
            self.main.remove(group)
        return killed & {line["pid"] for line in self.lines()}

    def join(self) -> None:
        self.main += [self.group(number) for number in range(self.workers, 4)]


class TorchftManager(Torchft):
    """The same without its DDP, whose hook raises where gloo reports a lost peer (release 0.2.0): survivors survive."""

    name = "torchft, Manager.allreduce"
    ddp = False


def torchft_python(folder: Path, packages: Iterable[str] = ("torchft",)) -> str:
    """The interpreter of a virtual environment in `folder` with torchft's release and the torch of constraints.txt."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
        command = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        # Who comes back gets its state through numpy, which torchft does not ask for.
        subprocess.run([*command, "torch", "numpy", *packages], check=True, timeout=900)
    return str(python)
