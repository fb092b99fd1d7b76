"""An hour of faults: what becomes of a small run when memory, disks, callbacks, numbers or its driver go wrong, also at once.

`python jobs/bench/hour_of_faults.py [NAME ...]` (`--list` names all): each scenario disturbs a run of `raypar train` of a tiny
model and prints a row: whether it ended, in time, with the weights of the undisturbed run, and what it left behind. Scenarios
that limit memory or mount a file system of their own need root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from helpers import reference  # noqa: E402
from helpers.run_processes import RunProcesses, command_of, kill_node  # noqa: E402

from jobs.bench.tiny_run import JOB, TinyRun  # noqa: E402
from raypar.callbacks import Callback  # noqa: E402
from raypar.comm.tcp.handshake import CHALLENGE, HELLO, MAGIC  # noqa: E402
from raypar.job.read_job import load_job  # noqa: E402
from raypar.worker.layer_graph_of_job import make_layer_graph  # noqa: E402
from raypar.worker.norm_and_weights_hash import weights_hash  # noqa: E402

RUN_PATHS = [str(ROOT), str(ROOT / "tests")]
"""PYTHONPATH of a run."""
LIMIT_S = 240.0
"""By when a run has ended, whatever befell it."""
ELASTIC = "elastic={min_workers: 1, step_deadline_s: 2.0}"
FOUR = "plan={stages: 2, replicas: 2}"


class Misbehaving(Callback):
    """A callback that raises, or sleeps for `seconds`, in a hook at a step; `note`: a file that then exists."""

    def __init__(self, hook: str, how: str = "raise", at: int = 0, seconds: float = 1e6, note: str = "") -> None:
        self.hook, self.how, self.at, self.seconds, self.note = hook, how, at, seconds, note

    def _do(self, hook: str, step: int) -> Any:
        if hook != self.hook or (self.at and step != self.at):
            return None
        if self.note:
            Path(self.note).touch()
        if self.how == "raise":
            raise ZeroDivisionError("the fault that was asked for")
        if self.how == "sleep":
            time.sleep(self.seconds)
        if self.how == "answer":
            return {"mine": torch.ones(2)}
        if self.how == "exit":
            sys.exit(3)
        if self.how == "die":
            os._exit(7)
        if self.how == "torch":
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float64)
            torch.manual_seed(0)
            os.chdir("/")
        return None

    def on_start(self, info: Any) -> Any:
        return self._do("on_start", 0)

    def on_step(self, info: Any) -> Any:
        return self._do("on_step", info.step)

    def on_validation(self, info: Any) -> Any:
        return self._do("on_validation", info.step)

    def on_checkpoint(self, info: Any) -> Any:
        if self.hook == "on_checkpoint" and self.how == "weights" and info.step == self.at:
            for file in Path(info.path).glob("*.safetensors"):
                content = bytearray(file.read_bytes())
                content[-1] ^= 1
                file.write_bytes(content)
        return self._do("on_checkpoint", info.step)

    def on_exception(self, info: Any) -> Any:
        return self._do("on_exception", info.step)

    def on_end(self, info: Any) -> Any:
        return self._do("on_end", info.step)


def misbehaving(hook: str, **how: Any) -> str:
    """The setting for one `Misbehaving`."""
    args = ", ".join(f"{key}: {value}" for key, value in {"hook": hook, **how}.items())
    return "callbacks=[{function: jobs.bench.hour_of_faults:Misbehaving, args: {" + args + "}}]"


# -- the run and what is done to it ------------------------------------------------------------------------------------------

MEMORY = Path("/sys/fs/cgroup/memory")


class Place:
    """Folder and processes of one scenario."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temp = Path(tempfile.mkdtemp(prefix="hf", dir="/tmp"))
        """TMPDIR of the run, short: Ray puts its sockets in it."""
        self.processes = RunProcesses()
        self.run: TinyRun | None = None
        self.steps = "steps=40"
        """How long the run is, as a setting."""

    def start(self, *settings: str, env: dict[str, str] | None = None, **more: Any) -> TinyRun:
        """Start the run, or another command about it."""
        self.steps = next((word for word in settings if word.startswith("steps=")), self.steps)
        env = {"TMPDIR": str(self.temp), **self.processes.env, **(env or {})}
        self.run = TinyRun(self.folder, "run", *settings, env=env, **more)
        return self.run

    def finish(self, limit_s: float = LIMIT_S) -> str:
        """The weights of the run, which must end within `limit_s`; else it is killed, and that is said."""
        assert self.run is not None
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            self.processes.see()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.run.finish(1.0)
        print(f"--- HANGS: not over after {limit_s:.0f} s", flush=True)
        self.processes.end()
        return self.run.finish()

    def close(self) -> list[str]:
        """End everything; returns what the run has left behind."""
        left = self.processes.left(15.0)
        left += [str(path) for path in self.temp.iterdir() if not path.name.startswith("torchinductor_")]
        self.processes.end()
        subprocess.run(["rm", "-rf", str(self.temp)], check=True)
        return left


def weights_of_one_process(place: Place) -> str:
    """The weights that one plain process gives."""
    path = place.folder / "reference.yaml"
    path.write_text(f"name: reference\n{JOB}")
    spec = load_job(path, [place.steps, "model.args.sleep_s=0"])
    return weights_hash(reference.train(make_layer_graph(spec), spec).parameters)


def mounted(where: Path | str, size: str) -> list[str]:
    """The prefix of a command that has a tmpfs of its own there."""
    return ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs {where} && exec "$@"', "sh"]


def fill(place: Place, where: str, spare: int = 0) -> Path:
    """Fill a file system as the run sees it, but for `spare` bytes; returns the file to remove."""
    assert place.run is not None
    path = Path(f"/proc/{place.run.pid}/root{where}/filler")
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        file.truncate(max(0, file.tell() - spare))
    print(f"--- {where} is full: {path.stat().st_size} bytes", flush=True)
    return path


@contextlib.contextmanager
def memory_limit(mb: int) -> Iterator[list[str]]:
    """The prefix of a command all of whose processes may use so much memory together, as in a container."""
    group = MEMORY / f"raypar-hour-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(mb * 2**20))
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        print(f"--- most memory used: {int((group / 'memory.max_usage_in_bytes').read_text()) >> 20} MB", flush=True)
        print(f"--- {(group / 'memory.oom_control').read_text().split()}", flush=True)
        until = time.monotonic() + 20.0
        while (group / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.5)
        with contextlib.suppress(OSError):
            group.rmdir()


def kill(what: str, *pids: int, number: int = signal.SIGKILL) -> None:
    print(f"--- {signal.Signals(number).name} to {what}", flush=True)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_driver(run: TinyRun, times: int = 1) -> None:
    """Kill the driver, then the next as soon as members.json names it."""
    before = 0
    for _ in range(times):
        run.wait("a new driver", lambda: run.pids()[0] != before)  # noqa: B023
        before = run.pids()[0]
        kill("the driver", before)


SCENARIOS: dict[str, Callable[[Place], str]] = {}


def scenario(function: Callable[[Place], str]) -> Callable[[Place], str]:
    SCENARIOS[function.__name__.replace("_", "-")] = function
    return function


@scenario
def undisturbed(place: Place) -> str:
    place.start(ELASTIC, FOUR)
    return place.finish()


for _mb in (700, 900, 1100, 1600):

    def _limited(place: Place, mb: int = _mb) -> str:
        with memory_limit(mb) as prefix:
            place.start(ELASTIC, FOUR, "steps=200", prefix=prefix)
            return place.finish()

    SCENARIOS[f"container-of-{_mb}-MB"] = _limited

for _gb in (1, 4, 8, 20):

    def _address_space(place: Place, gb: int = _gb) -> str:
        place.start(ELASTIC, FOUR, prefix=["sh", "-c", f'ulimit -v {gb * 2**20} && exec "$@"', "sh"])
        return place.finish()

    SCENARIOS[f"address-space-of-{_gb}-GB"] = _address_space

for _size in ("64k", "1m", "8m", "64m"):

    def _small_shm(place: Place, size: str = _size) -> str:
        place.start(ELASTIC, FOUR, prefix=mounted("/dev/shm", size))
        return place.finish()

    SCENARIOS[f"shm-of-{_size}"] = _small_shm

for _size in ("16k", "256k", "1m", "4m"):

    def _small_tmp(place: Place, size: str = _size) -> str:
        place.start(ELASTIC, FOUR, prefix=mounted(place.temp, size))
        return place.finish()

    SCENARIOS[f"tmp-of-{_size}"] = _small_tmp


@scenario
def the_memory_monitor_of_ray_kills_from_the_start(place: Place) -> str:
    place.start(ELASTIC, FOUR, env={"RAY_memory_usage_threshold": "0.02"})
    return place.finish()


@scenario
def tmp_fills_while_it_trains(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=200", prefix=mounted(place.temp, "400m"))
    run.wait_for_steps(20)
    fill(place, str(place.temp))
    return place.finish()


@scenario
def tmp_fills_and_a_worker_dies(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=300", prefix=mounted(place.temp, "400m"))
    run.wait_for_steps(20)
    fill(place, str(place.temp))
    kill("a worker", run.pids()[1][3])
    return place.finish()


@scenario
def tmp_fills_and_the_driver_dies(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=300", prefix=mounted(place.temp, "400m"))
    run.wait_for_steps(20)
    fill(place, str(place.temp))
    kill_driver(run)
    return place.finish()


@scenario
def tmp_is_kept_full_and_the_driver_dies(place: Place) -> str:
    settings = (ELASTIC, FOUR, "steps=300", "checkpoint={every: 10}")
    run = place.start(*settings, prefix=mounted(place.temp, "400m"))
    run.wait_for_steps(40)
    root = Path(f"/proc/{run.pid}/root{place.temp}")
    over = threading.Event()

    def keep_full() -> None:
        with contextlib.suppress(OSError), (root / "filler-2").open("ab", buffering=0) as file:
            while not over.wait(0.01):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"x" * 512)

    fill(place, str(place.temp))
    filling = threading.Thread(target=keep_full)
    filling.start()
    kill_driver(run)
    place.finish()
    over.set()
    filling.join()
    place.start(command=["resume"])
    return place.finish()


@scenario
def shm_fills_while_it_trains(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=300", prefix=mounted("/dev/shm", "400m"))
    run.wait_for_steps(20)
    fill(place, "/dev/shm")
    kill("a worker", run.pids()[1][3])
    return place.finish()


@scenario
def the_driver_dies_twice(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=300")
    run.wait_for_steps(20)
    kill_driver(run, 2)
    return place.finish()


@scenario
def the_driver_dies_while_a_worker_is_replaced(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=600")
    run.wait_for_steps(20)
    kill("a worker", run.pids()[1][3])
    run.wait("a worker wanted", lambda: run.has_said("is wanted"))
    kill_driver(run)
    run.wait("a joined worker", lambda: run.has_said("joined") or run.has_said("generation 4"))
    kill_driver(run)
    return place.finish()


EXPORT_THAT_SIGNALS_ITSELF = """
import os, sys
from raypar.cli import main
replace = os.replace
def signalled(*given):
    os.replace = replace
    os.kill(os.getpid(), {number})
    return replace(*given)
os.replace = signalled
sys.exit(main(["export", {run!r}, "--out", {out!r}]))
"""
"""A program that gets a signal when the exported file is written, and not yet under its name."""
SLOW_BUILD = ("model.args={sleep_s: 0.02, build_s: 4.0}", "optimizer.function=helpers.tiny_job:SlowToBuild")
"""Who holds the last layer takes that long to build its stage."""


@scenario
def the_driver_dies_twice_in_an_adopt(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=300", *SLOW_BUILD)
    run.wait_for_steps(20)
    kill("a worker", run.pids()[1][1])
    run.wait("a plan to adopt", lambda: run.has_said("trying generation 2"))
    time.sleep(1.0)
    kill_driver(run)
    run.wait("a plan to adopt", lambda: run.has_said("trying generation 3"))
    time.sleep(1.0)
    kill_driver(run)
    return place.finish()


def new_driver(place: Place, known: set[int]) -> int:
    """The process id of a driver that Ray has started, which need not have begun; 0 if all are known."""
    drivers = [p.pid for p in place.processes.see() if command_of(p)[:1] and command_of(p)[0].startswith("ray::DriverActor")]
    return next((pid for pid in drivers if pid not in known), 0)


@scenario
def the_driver_dies_while_it_takes_workers_over(place: Place) -> str:
    """No worker dies: the driver is killed, the next one while it finds the workers, the third while they adopt its plan."""
    run = place.start(ELASTIC, FOUR, "steps=300", *SLOW_BUILD)
    run.wait_for_steps(20)
    known = {run.pids()[0]}
    kill_driver(run)
    run.wait("a new driver's process", lambda: new_driver(place, known) != 0)
    known.add(second := new_driver(place, known))
    kill("the driver that looks for the workers", second)
    run.wait("a plan to adopt", lambda: run.has_said("trying generation"))
    kill("the driver whose plan is adopted", new_driver(place, known))
    return place.finish()


@scenario
def the_driver_dies_while_the_run_is_exported(place: Place) -> str:
    """`raypar export` is stopped while it writes, the driver is killed, the run goes on and removes that checkpoint, and the
    export goes on too; another export is killed while it writes."""
    run = place.start(ELASTIC, FOUR, "steps=300", "checkpoint={every: 40, keep: 1}")
    run.wait_for_steps(45)
    out, exports = place.folder / "model.safetensors", []
    for number in (signal.SIGSTOP, signal.SIGKILL):
        words = ["-c", EXPORT_THAT_SIGNALS_ITSELF.format(number=int(number), run=str(run.folder), out=str(out))]
        env = {**os.environ, **place.processes.env, "PYTHONPATH": os.pathsep.join(RUN_PATHS)}
        exports.append(subprocess.Popen([sys.executable, *words], env=env, stdout=subprocess.PIPE, text=True))
    stopped, killed = exports
    killed.wait(60)
    run.wait("an export that is stopped while it writes", lambda: len([*place.folder.glob(".model*.tmp")]) == 2)
    kill_driver(run)
    run.wait("a new driver", lambda: run.has_said("a new one has found"))
    steps = len(run.steps())
    run.wait_for_steps(steps + 60)
    kill("the export", stopped.pid, number=signal.SIGCONT)
    said = stopped.communicate(timeout=60)[0]
    print(f"--- exports: exit codes {stopped.returncode} and {killed.returncode}; {said.strip()!r}", flush=True)
    print(f"--- beside the export: {sorted(path.name for path in place.folder.glob('.model*'))}", flush=True)
    return place.finish()


@scenario
def the_driver_dies_in_a_checkpoint(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=300", "checkpoint={every: 20}")
    run.wait("a checkpoint that is being written", lambda: any((run.folder / "checkpoints").glob(".tmp-*")))
    kill_driver(run)
    return place.finish()


@scenario
def the_driver_dies_at_the_end(place: Place) -> str:
    note = place.folder / "note"
    run = place.start(ELASTIC, FOUR, misbehaving("on_end", how="sleep", seconds=3.0, note=note))
    run.wait("the last callback", note.exists)
    kill_driver(run)
    return place.finish()


@scenario
def three_nodes_lose_a_worker_and_the_driver_at_once(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=300", command=["train", "--local-nodes", "3"])
    run.wait_for_steps(20)
    driver, workers = run.pids()
    kill("a worker and the driver", workers[2], driver)
    return place.finish()


@scenario
def sigterm_in_a_recovery(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=300")
    run.wait_for_steps(20)
    kill("a worker", run.pids()[1][3])
    run.wait("a lost worker", lambda: run.has_said("lost worker"))
    kill("raypar train", run.pid, number=signal.SIGTERM)
    place.finish()
    place.start(command=["resume"])
    return place.finish()


for _stage, _when in ((1, "in-the-preflight"), (3, "while-ray-starts"), (4, "while-workers-start")):
    for _number in (signal.SIGINT, signal.SIGTERM):

        def _stopped(place: Place, stage: int = _stage, number: int = _number) -> str:
            run = place.start(ELASTIC, FOUR)
            run.wait("the start", lambda: run.has_said(f"[{stage}/"))
            time.sleep(0.3)
            place.processes.see()
            kill("raypar train", run.pid, number=number)
            return place.finish()

        SCENARIOS[f"{_number.name.lower()}-{_when}"] = _stopped


@scenario
def ctrl_c_twice(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=300", "checkpoint={every: 10}")
    run.wait_for_steps(35)
    kill("raypar train", run.pid, number=signal.SIGINT)
    time.sleep(0.2)
    kill("raypar train", run.pid, number=signal.SIGINT)
    place.finish()
    place.start(command=["resume"])
    return place.finish()


@scenario
def two_resumes_at_once(place: Place) -> str:
    place.start(ELASTIC, FOUR, "steps=200", command=["train", "--stop-at-step", "20"])
    place.finish()
    weights = {}
    for run in [place.start(command=["resume"]) for _ in range(2)]:
        place.run = run
        weights[run] = place.finish()
    place.run = next((run for run in weights if run.exit_code == 0), place.run)
    print(f"--- exit codes {sorted(run.exit_code for run in weights)}", flush=True)
    return weights[place.run]


@scenario
def disk_full_in_a_checkpoint_while_a_worker_dies(place: Place) -> str:
    disk = place.folder / "disk"
    disk.mkdir()
    run = place.start(ELASTIC, FOUR, "steps=400", "checkpoint={every: 30}", f"run_dir={disk}", prefix=mounted(disk, "1m"))
    run.folder = Path(f"/proc/{run.pid}/root{disk}/run")  # as the run sees it
    run.wait_for_steps(20)
    pids = run.pids()[1]
    filler = fill(place, str(disk))
    run.wait("a checkpoint that does not fit", lambda: run.has_said("No space left"))
    kill("a worker", pids[3])
    time.sleep(2.0)
    filler.unlink()
    return place.finish()


@scenario
def a_callback_hangs_and_ctrl_c(place: Place) -> str:
    run = place.start(ELASTIC, FOUR, "steps=300", misbehaving("on_step", how="sleep", at=20))
    run.wait_for_steps(19)
    time.sleep(15.0)
    kill("raypar train", run.pid, number=signal.SIGINT)
    return place.finish()


@scenario
def a_callback_hangs(place: Place) -> str:
    place.start(ELASTIC, FOUR, "steps=60", misbehaving("on_step", how="sleep", at=20))
    return place.finish()


@scenario
def a_callback_hangs_at_the_end(place: Place) -> str:
    place.start(ELASTIC, FOUR, misbehaving("on_end", how="sleep"))
    return place.finish()


@scenario
def the_run_dir_is_read_only_from_the_start(place: Place) -> str:
    disk = place.folder / "disk"
    disk.mkdir()
    only = ["unshare", "-m", "sh", "-c", f'mount --bind -o ro {disk} {disk} && exec "$@"', "sh"]
    place.start(ELASTIC, FOUR, f"run_dir={disk}", prefix=only)
    return place.finish()


@contextlib.contextmanager
def disk_of_its_own(place: Place) -> Iterator[tuple[Path, str]]:
    """A new ext4 file system that becomes read-only at its first error: (where it is mounted, its loop device)."""
    image, disk = place.folder / "image", place.folder / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop,errors=remount-ro", str(image), str(disk)], check=True)
    device = subprocess.run(["findmnt", "-no", "SOURCE", str(disk)], check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield disk, Path(device).name
    finally:
        while subprocess.run(["umount", "-l", str(disk)], capture_output=True).returncode == 0:
            pass


def change_mounts(*commands: str) -> None:
    for command in commands:
        print(f"--- {command}", flush=True)
        subprocess.run(command.split(), check=True)


@scenario
def the_run_dir_becomes_read_only_for_good(place: Place) -> str:
    with disk_of_its_own(place) as (disk, device):
        run = place.start(ELASTIC, FOUR, "steps=300", "checkpoint={every: 60}", f"run_dir={disk}")
        run.folder = disk / "run"
        run.wait_for_steps(100)
        print("--- an error of the file system: it is read-only", flush=True)
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")
        return place.finish(LIMIT_S + 300.0)  # so long it waits for the disk


@scenario
def the_run_dir_becomes_read_only_for_a_while(place: Place) -> str:
    with disk_of_its_own(place) as (disk, _):
        run = place.start(ELASTIC, FOUR, "steps=400", "checkpoint={every: 60}", f"run_dir={disk}")
        run.folder = disk / "run"
        run.wait_for_steps(100)
        change_mounts(f"mount --bind {disk} {disk}", f"mount -o remount,bind,ro {disk}")
        kill("a worker", run.pids()[1][3])
        time.sleep(10.0)
        change_mounts(f"umount -l {disk}")
        weights = place.finish()
        print(f"--- steps in metrics.jsonl: {run.steps() == list(range(1, 401))}", flush=True)
        return weights


@scenario
def the_disk_of_the_run_dir_is_unmounted_for_a_while(place: Place) -> str:
    with disk_of_its_own(place) as (disk, device):
        run = place.start(ELASTIC, FOUR, "steps=400", "checkpoint={every: 60}", f"run_dir={disk}")
        run.folder = disk / "run"
        run.wait_for_steps(100)
        change_mounts(f"umount -l {disk}")
        time.sleep(10.0)
        print(f"--- below the mount point: {sorted(path.name for path in disk.rglob('*'))}", flush=True)
        change_mounts(f"mount /dev/{device} {disk}")
        weights = place.finish()
        print(f"--- steps in metrics.jsonl: {run.steps() == list(range(1, 401))}", flush=True)
        return weights


@scenario
def the_disk_of_the_run_dir_is_replaced_by_an_empty_one(place: Place) -> str:
    with disk_of_its_own(place) as (disk, _):
        run = place.start(ELASTIC, FOUR, "steps=300", "checkpoint={every: 60}", f"run_dir={disk}")
        run.folder = disk / "run"
        run.wait_for_steps(100)
        change_mounts(f"umount -l {disk}", f"mount -t tmpfs -o size=16m tmpfs {disk}")
        weights = place.finish()
        print(f"--- on the new disk: {sorted(str(path.relative_to(disk)) for path in disk.rglob('*'))}", flush=True)
        return weights


RAY_START = [str(Path(sys.executable).with_name("ray")), "start", "--disable-usage-stats", "--num-gpus", "0"]


def ray_start(place: Place, *words: str) -> None:
    """Start a node of a Ray cluster on this machine, as its user would."""
    env = {**os.environ, **place.processes.env, "RAY_AUTH_MODE": "disabled", "TMPDIR": str(place.temp)}
    env["PYTHONPATH"] = os.pathsep.join(RUN_PATHS)
    subprocess.run([*RAY_START, *words], check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)


def flap(place: Place, least_s: float, steps: int, seconds: float) -> str:
    """A run of 2 of 4 wanted workers which nodes join that are lost after `least_s` to 4 x `least_s` seconds, one at a time."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    temp = ["--temp-dir", str(place.temp / "r")]
    ports = [f"--{name}-port=0" for name in ("dashboard-agent-listen", "runtime-env-agent", "metrics-export")]
    here = ["--node-ip-address", "127.0.0.1", "--object-store-memory", "100000000", *ports]
    ray_start(place, "--head", "--port", str(port), "--include-dashboard", "false", "--num-cpus", "2", *temp, *here)
    address = f"127.0.0.1:{port}"
    elastic = "elastic={min_workers: 1, max_workers: 4, step_deadline_s: 2.0, grow_after_s: 1.0}"
    command, env = ["train", "--address", address], {"RAY_AUTH_MODE": "disabled"}
    run = place.start(elastic, "plan={stages: 2, replicas: 1}", f"steps={steps}", command=command, env=env)
    run.wait_for_steps(20)
    flaps = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ray_start(place, "--address", address, "--num-cpus", "2", "--resources", '{"flaps": 1}', *here)
        time.sleep(least_s * (1 + flaps % 4))
        for raylet in list(place.processes.raylets().values())[1:]:
            kill_node(raylet)
            flaps += 1
        done, told = len(run.steps()), [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
        moves = sum(event["kind"] in ("recovering", "generation") for event in told)
        print(f"--- {flaps} nodes have flapped, {done} steps are done, {moves} recoveries and generations", flush=True)
    weights = place.finish()
    place.processes.end()
    return weights


TCP_ONLY = """
import socket
_connect = socket.socket.connect
def connect(self, address):
    if self.family == socket.AF_UNIX and isinstance(address, bytes) and address[:1] == bytes(1):
        raise ConnectionRefusedError
    return _connect(self, address)
socket.socket.connect = connect
"""
"""A sitecustomize.py with which the workers of one machine talk over TCP, as those of two machines do."""


class LoopbackRecorder(threading.Thread):
    """Records what all TCP connections over the loopback device say, from their first byte on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
        self._packets.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        self._packets.bind(("lo", 0))
        self._packets.settimeout(0.5)
        self._begins: dict[tuple[int, int], int] = {}
        """(source port, target port) -> sequence number before the first byte."""
        self.said: dict[tuple[int, int], bytearray] = {}
        """(source port, target port) -> what was said, without gaps."""
        self.over = False

    def run(self) -> None:
        while not self.over:
            with contextlib.suppress(TimeoutError):
                self._note(self._packets.recv(1 << 17)[14:])
        self._packets.close()

    def _note(self, packet: bytes) -> None:
        start = 4 * (packet[0] & 15)
        if packet[9] != socket.IPPROTO_TCP or len(packet) < start + 20:
            return
        source, target, number = struct.unpack_from(">HHI", packet, start)
        pair, data = (source, target), packet[start + 4 * (packet[start + 12] >> 4) : struct.unpack_from(">H", packet, 2)[0]]
        if packet[start + 13] & 2:  # SYN
            self._begins[pair], self.said[pair] = number + 1, bytearray()
        elif data and pair in self._begins:
            said, at = self.said[pair], (number - self._begins[pair]) % 2**32
            if at <= len(said) < at + len(data):
                said += data[len(said) - at :]


@scenario
def recorded_conversations_are_sent_again(place: Place) -> str:
    (place.folder / "sitecustomize.py").write_text(TCP_ONLY)
    recorder = LoopbackRecorder()
    recorder.start()
    run = place.start(ELASTIC, FOUR, "steps=400", env={"PYTHONPATH": os.pathsep.join([str(place.folder), *RUN_PATHS])})
    run.wait_for_steps(40)
    for turn in range(3):
        heads = {pair: bytes(said) for pair, said in list(recorder.said.items()) if said[:4] == struct.pack("<I", MAGIC)}
        dialed = {
            pair: said for pair, said in heads.items() if HELLO.unpack_from(said)[2] < 1000
        }  # a challenge has a nonce there
        answers = [replay(port, said) for (_, port), said in dialed.items()]
        kilobytes = sum(map(len, dialed.values())) // 1024
        print(f"--- {len(answers)} conversations of {kilobytes} kB sent again; answered: {sorted(set(answers))}", flush=True)
        if turn == 1:
            kill("a worker", run.pids()[1][3])
        time.sleep(1.0)
    recorder.over = True
    return place.finish()


def replay(port: int, said: bytes) -> str:
    """What comes of sending this to a port: HELLO, then the rest once it has answered."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as stranger:
            stranger.sendall(said[: HELLO.size])
            heard = stranger.recv(CHALLENGE.size, socket.MSG_WAITALL)
            stranger.sendall(said[HELLO.size :])
            more = stranger.recv(1 << 16)
            return f"challenge of {len(heard)} bytes, then {len(more)} bytes and the end"
    except OSError as error:
        return type(error).__name__


@scenario
def nodes_that_flap(place: Place) -> str:
    return flap(place, 3.0, 1500, 90.0)


@scenario
def nodes_that_flap_slowly(place: Place) -> str:
    return flap(place, 9.0, 2400, 150.0)


def shift_clock(place: Place, *hours: float) -> str:
    """A run whose wall clock jumps to so many hours from the right time, one after the other; at the second a worker dies."""
    library, shift = place.folder / "clock.so", place.folder / "shift"
    source = ROOT / "jobs/bench/shifted_clock.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    shift.write_bytes(struct.pack("d", 0.0))
    run = place.start(ELASTIC, FOUR, "steps=600", env={"LD_PRELOAD": str(library), "SHIFT_FILE": str(shift)})
    for number, hour in enumerate(hours):
        run.wait_for_steps(20 + 100 * number)
        with shift.open("r+b") as file:
            file.write(struct.pack("d", hour * 3600.0))
        print(f"--- the clock is {hour:+g} h", flush=True)
        if number == 1:
            kill("a worker", run.pids()[1][3])
        run.wait_for_steps(20 + 100 * number + 40)
        last = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-2])
        print(f"--- the time of step {last['step']} is {(last['time'] - time.time()) / 3600:+.2f} h from ours", flush=True)
    return place.finish()


@scenario
def the_clock_jumps_forwards_and_back(place: Place) -> str:
    return shift_clock(place, 1.0, 0.0, 1.0)


@scenario
def the_clock_jumps_back_and_forwards(place: Place) -> str:
    return shift_clock(place, -1.0, 0.0, -1.0)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name all scenarios")
    given = parser.parse_args()
    if given.list:
        print("\n".join(SCENARIOS))
        return 0
    rows = []
    for name in given.names or SCENARIOS:
        print(f"=== {name}, load {os.getloadavg()[0]:.1f}", flush=True)
        with tempfile.TemporaryDirectory(prefix="raypar-hour-") as folder:
            place, began_s = Place(Path(folder)), time.monotonic()
            try:
                weights = SCENARIOS[name](place)
            except RuntimeError as error:
                print(f"--- {error}", flush=True)
                weights = place.finish()
            seconds, left = time.monotonic() - began_s, place.close()
            same = "no weights" if not weights else "SAME" if weights == weights_of_one_process(place) else "OTHER WEIGHTS"
        code = place.run.exit_code if place.run is not None else None
        rows.append(f"{name}: exit code {code}, {same}, {seconds:.0f} s, left {left or 'nothing'}")
        print(f"--- {rows[-1]}", flush=True)
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
