"""Files are not trusted: broken or hostile ones are refused in one clear error, exit code 2, before anything is believed.

Every case spoils one file of a good run, job, schedule or token file, checksums made right again, and runs the command that
reads it. Nothing outside of the folder may be opened, nothing may hang, and no number in a file may allocate memory.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from helpers import checkpoint_folders as checkpoint_files
from helpers.tiny_job import JOB
from safetensors.torch import load_file

from raypar.cli import main
from raypar.doctor.check_machine import ADDRESS_SPACE_BYTES
from raypar.errors import ConfigError
from raypar.job.contract import contract_of_job
from raypar.job.read_job import load_job
from raypar.storage.run_folder import RunFolder
from raypar.worker.checkpoint.checkpoint_files import BUFFER, PARAMETER, TIE, StateKey, TensorSlices, optimizer_key

pytestmark = pytest.mark.part(4)

HANGS_S = 30.0
"""Only a case that hangs takes so long, also on a busy machine."""
MEMORY_BYTES = 1 << 30
"""What a case may map on top of what the process has."""
DEEP = 100_000
STEP = "runs/tiny/checkpoints/step_00000004"


# -- a good run, and what is watched -------------------------------------------------------------------------------------------


def make_good(place: Path) -> None:
    """A run with a checkpoint in two files, its job file, a schedule, a token file; and a folder outside of the run."""
    job = place / "tiny.yaml"
    job.write_text(JOB + f"run_dir: {place / 'runs'}\n")
    run = place / "runs/tiny"
    run.mkdir(parents=True)
    shutil.copy(job, run / "job.yaml")
    weight = torch.arange(12.0).view(4, 3)
    aside = checkpoint_files.create_checkpoint(run / "checkpoints", 4)
    a = checkpoint_files.write_shard(
        aside,
        "a.safetensors",
        {("w", PARAMETER): weight[:3], ("w", optimizer_key("exp_avg")): weight[:3] + 1, ("b", PARAMETER): torch.ones(3)},
        {("w", optimizer_key("step")): 4.0, ("w", optimizer_key("inf")): float("inf"), ("w", optimizer_key("none")): None},
        {
            ("w", PARAMETER): TensorSlices((4, 3), 0, ((0, 3),)),
            ("w", optimizer_key("exp_avg")): TensorSlices((4, 3), 0, ((0, 3),)),
        },
        {"b": ["also_b"]},
    )
    b = checkpoint_files.write_shard(
        aside,
        "b.safetensors",
        {
            ("w", PARAMETER): weight[3:],
            ("w", optimizer_key("exp_avg")): weight[3:] + 1,
            ("mean", BUFFER): torch.zeros(2, dtype=torch.int64),
        },
        slices={
            ("w", PARAMETER): TensorSlices((4, 3), 0, ((3, 4),)),
            ("w", optimizer_key("exp_avg")): TensorSlices((4, 3), 0, ((3, 4),)),
        },
    )
    checkpoint_files.commit_checkpoint(
        aside, [a, b], steps_done=4, contract=contract_of_job(load_job(job)), metrics={"loss": 2.5}
    )
    node = "b09ad58ff304f43b"
    who = {"worker": 0, "coordinate": "worker 0 (stage 0, replica 0)", "node": node, "pid": 5000, "host": "alpha"}
    (run / "plan.json").write_text(json.dumps({"schedule": "1f1b", "stages": [{"replicas": 2, "shards": 1}]}))
    cluster = {"kind": "own", "address": "127.0.0.1:7", "nodes": [{"node": node, "pid": 2**22 + 1, "cpus": 2, "head": True}]}
    (run / "cluster.json").write_text(json.dumps(cluster))
    members = {"time": 1005.0, "phase": "running", "generation": 2, "members": [who], "spares": [], "wanted": 1, "step": 4}
    (run / "members.json").write_text(json.dumps(members))
    lines = [{"step": s, "loss": 2.0, "seconds": 0.1, "samples_per_s": 80.0, "time": 1000.0 + s} for s in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [
        {"kind": "started", "text": "1 worker", "workers": [who], "time": 1000.0},
        {"kind": "lost", "why": "killed", "time": 1002.0, **who},
        {"kind": "generation", "generation": 2, "workers": [0], "step": 2, "pause_s": 0.4, "time": 1002.4},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    (place / "schedule.csv").write_text("0F0,0F1,0B0,0B1\n")
    numpy.arange(100, dtype=numpy.uint16).tofile(place / "text.bin")
    (place / "text.bin.json").write_text(json.dumps({"dtype": "uint16", "tokens": 100}))
    (place / "outside").mkdir()
    shutil.copytree(place / STEP, place / "outside/step_00000004")
    shutil.copy(place / STEP / "a.safetensors", place / "outside/a.safetensors")
    shutil.copy(job, place / "outside/job.yaml")
    shutil.copy(run / "events.jsonl", place / "outside/events.jsonl")


COMMANDS: dict[str, list[str]] = {
    "export": ["export", "{place}/" + STEP, "--out", "{place}/model.safetensors"],
    "export of a run": ["export", "{place}/runs/tiny", "--out", "{place}/model.pt"],
    "resume": ["resume", "{place}/runs/tiny"],
    "status": ["status", "{place}/runs/tiny"],
    "status of the last run": ["status", "--run-dir", "{place}/runs"],
    "report": ["report", "{place}/runs/tiny", "--out", "{place}/run.html"],
    "status --svg": ["status", "{place}/runs/tiny", "--svg", "{place}/run.svg"],
    "top": ["top", "{place}/runs/tiny", "--once"],
    "logs": ["logs", "{place}/runs/tiny"],
    "debug": ["debug", "{place}/runs/tiny"],
    "train": ["train", "{place}/tiny.yaml"],
    "train --resume": ["train", "{place}/tiny.yaml", "--resume"],
    "train on tokens": [
        "train",
        "{place}/tiny.yaml",
        "--set",
        "data={{function: raypar.data.token_files:TokenFile, args: {{path: {place}/text.bin, context: 4}}}}",
    ],
    "train by a schedule": ["train", "{place}/tiny.yaml", "--set", "plan={{schedule_file: {place}/schedule.csv}}"],
    "plan": ["plan", "{place}/tiny.yaml", "--no-profile"],
    "plan by a schedule": [
        "plan",
        "{place}/tiny.yaml",
        "--no-profile",
        "--set",
        "plan={{schedule_file: {place}/schedule.csv}}",
    ],
    "simulate": ["simulate", "--schedule-file", "{place}/schedule.csv"],
}

OPENED: list[str] | None = None
"""Paths that were opened while a case ran."""


def record(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and OPENED is not None and isinstance(arguments[0], (str, bytes, os.PathLike)):
        OPENED.append(os.path.realpath(os.fsdecode(arguments[0])))


sys.addaudithook(record)


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Records what is opened; a hang and a large allocation become exceptions."""
    global OPENED

    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    before, limits = signal.signal(signal.SIGALRM, hangs), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    room = max(used + MEMORY_BYTES, ADDRESS_SPACE_BYTES)  # with less than that, commands refuse to begin
    resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, HANGS_S, HANGS_S)
    OPENED = opened = []
    try:
        yield opened
    finally:
        OPENED = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; what the commands load is loaded."""
    import raypar.actors.driver_client
    import raypar.actors.ray_connection  # noqa: F401

    place = tmp_path_factory.mktemp("good")
    make_good(place)
    return place


@pytest.fixture
def place(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be spoilt."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def connected(*_: object, **__: object) -> None:
        raise AssertionError("Ray is started")

    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", connected)
    made = tmp_path / "p"
    shutil.copytree(good, made)
    for file in (made / "tiny.yaml", made / "runs/tiny/job.yaml"):
        file.write_text(file.read_text().replace(str(good), str(made)))
    return made


# -- spoiling ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`spoil` a good place, then run this command: refused, and `said` why."""

    command: str
    spoil: Callable[[Path], Any]
    said: str


Body = dict[str, Any]


def seal(folder: Path, body: Body) -> None:
    """Write a manifest with its checksum."""
    body = {key: value for key, value in body.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**body, "sha256": digest}))


def manifest(change: Callable[[Body], Any]) -> Callable[[Path], None]:
    """A change of the manifest."""

    def spoil(place: Path) -> None:
        body = json.loads((place / STEP / "manifest.json").read_text())
        change(body)
        seal(place / STEP, body)

    return spoil


def entry(body: Body, name: str = "w", kind: StateKey = PARAMETER, number: int = 0) -> Body:
    """One entry of a manifest."""
    return [e for e in body["entries"] if (e["name"], e["kind"], e.get("state", "")) == (name, kind.kind, kind.name)][number]


def entries(**changes: Any) -> Callable[[Path], None]:
    """Changes of the first slice of parameter w."""
    return manifest(lambda body: entry(body).update(changes))


def of_b(**changes: Any) -> Callable[[Path], None]:
    """Changes of parameter b, [3] float32."""
    return manifest(lambda body: entry(body, "b").update(changes))


def of_mean(**changes: Any) -> Callable[[Path], None]:
    """Changes of buffer mean, [2] int64."""
    return manifest(lambda body: entry(body, "mean", BUFFER).update(changes))


def header(change: Callable[[Body], Any], *, data: Callable[[bytes], bytes] = lambda d: d) -> Callable[[Path], None]:
    """A change of the header of a.safetensors, whose length and checksum the manifest then has; what `change` returns, if
    anything, is the header's text."""

    def spoil(place: Path) -> None:
        file = place / STEP / "a.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        found = json.loads(content[8 : 8 + length])
        text = change(found)
        text = text if isinstance(text, bytes) else json.dumps(found).encode()
        rewrite(place, len(text).to_bytes(8, "little") + text + data(content[8 + length :]))

    return spoil


def rewrite(place: Path, content: bytes) -> None:
    (place / STEP / "a.safetensors").write_bytes(content)
    mine = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest(lambda body: body["files"].update({"a.safetensors": mine}))(place)


def elsewhere(name: str) -> Callable[[Path], None]:
    """The manifest names another file than a.safetensors, as it is there."""

    def spoil(place: Path) -> None:
        def change(body: Body) -> None:
            named = name.format(place=place)
            body["files"][named] = body["files"].pop("a.safetensors")
            for each in body["entries"]:
                if each.get("file") == "a.safetensors":
                    each["file"] = named

        manifest(change)(place)

    return spoil


def instead(file: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Something else in a file's place."""

    def spoil(place: Path) -> None:
        (place / file).unlink()
        make(place / file)

    return spoil


def link(file: str, target: str) -> Callable[[Path], None]:
    def spoil(place: Path) -> None:
        (place / file).unlink()
        (place / file).symlink_to(place / target)

    return spoil


def unix_socket(path: Path) -> None:
    short = Path("/tmp") / f"raypar-{os.getpid()}"  # addresses of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short))
    short.rename(path)


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def text(file: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda place: (place / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def job(*lines: str) -> Callable[[Path], None]:
    """The job file with lines more; what it had under those keys is gone."""

    def spoil(place: Path) -> None:
        keys = {line.split(":")[0] for line in lines}
        kept = [line for line in (place / "tiny.yaml").read_text().splitlines() if line.split(":")[0] not in keys]
        (place / "tiny.yaml").write_text("\n".join([*kept, *lines]) + "\n")

    return spoil


def line(file: str, **facts: Any) -> Callable[[Path], None]:
    """One line more in metrics.jsonl or events.jsonl."""

    def spoil(place: Path) -> None:
        with open(place / "runs/tiny" / file, "a") as opened:
            opened.write(json.dumps(facts) + "\n")

    return spoil


def document(file: str, **facts: Any) -> Callable[[Path], None]:
    """Keys of plan.json, members.json or cluster.json."""

    def spoil(place: Path) -> None:
        path = place / "runs/tiny" / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))

    return spoil


def both(*spoils: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda place: [spoil(place) for spoil in spoils]


def twice(place: Path) -> None:
    """A key of the manifest is there twice; the checksum is that of the last one, as JSON readers take it."""
    file = place / STEP / "manifest.json"
    file.write_text(file.read_text().replace('"steps_done": 4', '"steps_done": 3, "steps_done": 4'))


def laughs(levels: int = 9) -> str:
    """A billion strings, as aliases."""
    lines = ["name: &a0 lol"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels + 1)]
    return "\n".join(lines) + "\n"


def merges() -> str:
    lines = ["a0: &a0 {k: v}"] + [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 9)]
    return "\n".join(lines) + "\n"


A = f"{STEP}/a.safetensors"
M = f"{STEP}/manifest.json"
EVENTS, METRICS = "runs/tiny/events.jsonl", "runs/tiny/metrics.jsonl"

CASES = {
    # names that lead out of the folder
    "file name that leads out": Case("export", elsewhere("../../../../outside/a.safetensors"), "no name of a file"),
    "file name that is absolute": Case("export", elsewhere("{place}/outside/a.safetensors"), "no name of a file"),
    "file name in another folder": Case("export", elsewhere("sub/a.safetensors"), "no name of a file"),
    "file name of the folder above": Case("export", elsewhere(".."), "no name of a file"),
    "file name of the manifest": Case("export", elsewhere("manifest.json"), "no name of a file"),
    "file name without letters": Case("export", elsewhere(""), "no name of a file"),
    "file name with a null": Case("export", elsewhere("a\0b"), "no name of a file"),
    "file name with half a character": Case("export", elsewhere("\ud800"), "no name of a file"),
    "file name with a new line": Case("export", elsewhere("a\nTraceback"), "no name of a file"),
    "file that is a link out": Case("export", link(A, "outside/a.safetensors"), "a symbolic link"),
    "manifest that is a link out": Case("export", link(M, "outside/step_00000004/manifest.json"), "a symbolic link"),
    "resume: file name that leads out": Case("resume", elsewhere("../../../../outside/a.safetensors"), "no name of a file"),
    "resume: file that is a link out": Case("resume", link(A, "outside/a.safetensors"), "a symbolic link"),
    # what is no file
    "file that is a FIFO": Case("export", instead(A, os.mkfifo), "a FIFO"),
    "file that is a socket": Case("export", instead(A, unix_socket), "a socket"),
    "file that is a folder": Case("export", instead(A, os.mkdir), "a folder"),
    "file that is a device": Case("export", instead(A, lambda path: path.symlink_to("/dev/zero")), "a symbolic link"),
    "manifest that is a FIFO": Case("export", instead(M, os.mkfifo), "a FIFO"),
    "manifest that is a folder": Case("export", instead(M, os.mkdir), "a folder"),
    "manifest of a terabyte": Case("export", instead(M, sparse), "more than"),
    "resume: manifest that is a FIFO": Case("resume", instead(M, os.mkfifo), "a FIFO"),
    # which files there are
    "file that is not declared": Case("export", manifest(lambda b: b["files"].pop("a.safetensors")), "not among"),
    "file that is declared and absent": Case("export", lambda place: (place / A).unlink(), "missing"),
    "file longer than declared": Case("export", lambda place: os.truncate(place / A, 10_000), "added to"),
    "file with negative bytes": Case(
        "export", manifest(lambda b: b["files"]["a.safetensors"].update(bytes=-1)), "whole number"
    ),
    "file with a checksum of another kind": Case(
        "export", manifest(lambda b: b["files"]["a.safetensors"].update(sha256=["x"])), "64 hexadecimal"
    ),
    "files that is a list": Case("export", manifest(lambda b: b.update(files=[])), "not keys and values"),
    "file given as a number": Case(
        "export", manifest(lambda b: b["files"].update({"a.safetensors": 7})), "not keys and values"
    ),
    # the manifest's own values
    "steps_done NaN": Case("resume", manifest(lambda b: b.update(steps_done=float("nan"))), "steps_done is nan"),
    "steps_done negative": Case("resume", manifest(lambda b: b.update(steps_done=-4)), "steps_done is -4"),
    "steps_done a text": Case("resume", manifest(lambda b: b.update(steps_done="4")), "steps_done is"),
    "steps_done true": Case("export", manifest(lambda b: b.update(steps_done=True)), "steps_done is True"),
    "steps_done with a fraction": Case("export", manifest(lambda b: b.update(steps_done=4.5)), "steps_done is 4.5"),
    "steps_done with 400 digits": Case("export", manifest(lambda b: b.update(steps_done=10**400)), "steps_done is"),
    "steps_done of another folder": Case("resume", manifest(lambda b: b.update(steps_done=1)), "its folder is step_00000004"),
    "contract null": Case("resume", manifest(lambda b: b.update(contract=None)), "contract is None"),
    "contract a list": Case("resume", manifest(lambda b: b.update(contract=[])), "contract is"),
    "contract of a megabyte": Case("resume", manifest(lambda b: b["contract"].update(seed="9" * 10**6)), "another job"),
    "metrics null": Case("export", manifest(lambda b: b.update(metrics=None)), "metrics is None"),
    "format true": Case("export", manifest(lambda b: b.update(format=True)), "checkpoint format True"),
    "format missing": Case("export", manifest(lambda b: b.pop("format")), "checkpoint format None"),
    "key that nobody knows": Case("export", manifest(lambda b: b.update(code="import os")), "unknown key"),
    "kept missing": Case("export", manifest(lambda b: b.pop("kept")), "has no 'kept'"),
    "kept a list": Case("export", manifest(lambda b: b.update(kept=["w"])), "kept is"),
    "kept of numbers": Case("export", manifest(lambda b: b.update(kept={"w": [1]})), "kept: state is '1', not"),
    "entries an object": Case("export", manifest(lambda b: b.update(entries={})), "entries is {}, not a list"),
    "entries of numbers": Case("export", manifest(lambda b: b.update(entries=[1, 2])), "not keys and values"),
    "key twice": Case("export", twice, "given twice"),
    "manifest that is a list": Case("export", text(M, "[]"), "damaged"),
    "manifest that is a number": Case("export", text(M, "7"), "damaged"),
    "manifest that is no text": Case("export", text(M, b"\xff\xfe\x00"), "damaged"),
    "manifest of 100,000 brackets": Case("export", text(M, "[" * DEEP + "]" * DEEP), "brackets within each other"),
    "manifest of 100,000 objects": Case("export", text(M, '{"a":' * DEEP), "brackets within each other"),
    "manifest with a number of 5,000 digits": Case("export", text(M, "[" + "9" * 5000 + "]"), "damaged"),
    "contract of 100,000 brackets": Case(
        "resume", lambda p: (p / M).write_text('{"sha256": "", "contract": ' + "[" * DEEP + "]" * DEEP + "}"), "brackets"
    ),
    # entries
    "dtype that is none": Case("export", entries(dtype="floaty32"), "dtype floaty32"),
    "dtype of another size": Case("export", of_mean(dtype="int8"), "I64 of shape [2], by the manifest I8"),
    "dtype of the same size": Case("export", of_mean(dtype="float64"), "I64 of shape [2], by the manifest F64"),
    "dtype a list": Case("export", entries(dtype=["float32"]), "dtype"),
    "shape that is huge": Case("export", of_b(shape=[10**12], slice=[[0, 10**12]]), "the file has"),
    "shape that overflows": Case("export", of_b(shape=[2**62] * 4, slice=[[0, 2**62]] * 4), "more elements"),
    "shape of nothing that is huge": Case(
        "export", of_b(shape=[0, 2**62, 2**62], slice=[[0, 0], [0, 2**62], [0, 2**62]]), "more el"
    ),
    "shape that is negative": Case("export", of_b(shape=[-3]), "shape [-3]"),
    "shape of texts": Case("export", of_b(shape=["3"]), "shape ['3']"),
    "shape of true": Case("export", of_b(shape=[True]), "shape [True]"),
    "shape a number": Case("export", of_b(shape=3), "shape 3"),
    "shape of 1,000 dims": Case("export", of_b(shape=[1] * 1000, slice=[[0, 1]] * 1000), "at most 64"),
    "whole larger than its slices": Case(
        "export",
        manifest(lambda b: [e.update(shape=[10**11, 3]) for e in b["entries"] if e["name"] == "w" and "file" in e] and None),
        "12 of 300,000,000,000 elements",
    ),
    "slices that overlap": Case("export", manifest(lambda b: entry(b, number=1).update(slice=[[2, 3], [0, 3]])), "overlap"),
    "slices that leave a hole": Case(
        "export", manifest(lambda b: b["entries"].remove(entry(b, number=1))), "9 of 12 elements of w"
    ),
    "slice out of range": Case("export", manifest(lambda b: entry(b, number=1).update(slice=[[4, 5], [0, 3]])), "out of shape"),
    "slice reversed": Case("export", entries(slice=[[3, 0], [0, 3]]), "reversed"),
    "slice negative": Case("export", entries(slice=[[-1, 2], [0, 3]]), "not a pair of whole numbers"),
    "slice of other dims": Case("export", entries(slice=[[0, 3]]), "for each dim"),
    "slice a text": Case("export", entries(slice="0:3"), "not a pair"),
    "slice smaller than its tensor": Case(
        "export",
        manifest(lambda b: (entry(b).update(slice=[[0, 2], [0, 3]]), entry(b, number=1).update(slice=[[2, 4], [0, 3]]))),
        "of shape",
    ),
    "slices of two dtypes": Case(
        "export", manifest(lambda b: entry(b, number=1).update(dtype="int32")), "several shapes or dtypes"
    ),
    "two entries of one tensor": Case("export", of_b(key="w"), "two entries"),
    "entry twice": Case("export", manifest(lambda b: b["entries"].append(dict(entry(b, "b")))), "two entries"),
    "key that the file lacks": Case("export", of_mean(key="c"), "only the manifest has the tensor 'c'"),
    "name that is empty": Case("export", of_b(name=""), "not a printable text"),
    "name a number": Case("export", of_b(name=7), "not a printable text"),
    "name with a new line": Case("export", of_b(name="b\nTraceback"), "not a printable text"),
    "parameter that is a number": Case(
        "export", manifest(lambda b: b["entries"].append({"name": "c", "kind": PARAMETER.kind, "value": 1})), "not a tensor"
    ),
    "number that is a text": Case(
        "export", manifest(lambda b: entry(b, "w", optimizer_key("step")).update(value="4")), "value is 4"
    ),
    "number that is a list": Case(
        "export", manifest(lambda b: entry(b, "w", optimizer_key("step")).update(value=[4])), "value is [4]"
    ),
    "number that is NaN": Case(
        "export", manifest(lambda b: entry(b, "w", optimizer_key("step")).update(value=float("nan"))), "value is nan"
    ),
    "number with 400 digits": Case(
        "export", manifest(lambda b: entry(b, "w", optimizer_key("step")).update(value=10**400)), "value is"
    ),
    "number and file": Case("export", of_b(value=1), "unknown key 'value'"),
    "tie to nothing": Case("export", manifest(lambda b: entry(b, "also_b", TIE).update(key="w#exp_avg")), "is tied to"),
    "tie to itself": Case("export", manifest(lambda b: b["entries"].remove(entry(b, "b"))), "is tied to"),
    # headers of safetensors
    "header longer than the file": Case(
        "export", lambda p: rewrite(p, (10**6).to_bytes(8, "little") + bytes(500)), "its header is said"
    ),
    "header of 2^64 bytes": Case("export", lambda p: rewrite(p, b"\xff" * 8 + bytes(500)), "its header is said"),
    "header that ends at once": Case("export", lambda p: rewrite(p, b"\x01"), "the file has 1"),
    "header of 100,000 brackets": Case("export", header(lambda h: b"[" * DEEP + b"]" * DEEP), "brackets within each other"),
    "header a list": Case("export", header(lambda h: b"[]"), "not a JSON object"),
    "header with a tensor twice": Case(
        "export", header(lambda h: json.dumps(h)[:-1].encode() + b', "b": ' + json.dumps(h["b"]).encode() + b"}"), "given twice"
    ),
    "tensor with a huge shape": Case("export", header(lambda h: h["b"].update(shape=[2**40])), "needs"),
    "tensor with a shape that overflows": Case("export", header(lambda h: h["b"].update(shape=[2**40] * 3)), "more elements"),
    "tensor with a negative shape": Case("export", header(lambda h: h["b"].update(shape=[-3])), "shape [-3]"),
    "tensor with a dtype that is none": Case("export", header(lambda h: h["b"].update(dtype="F33")), "dtype F33"),
    "tensor with offsets out of the file": Case(
        "export", header(lambda h: h["b"].update(data_offsets=[10**9, 10**9 + 12])), "data_offsets"
    ),
    "tensor with reversed offsets": Case(
        "export", header(lambda h: h["b"].update(data_offsets=h["b"]["data_offsets"][::-1])), "data_offsets"
    ),
    "tensor with offsets of texts": Case("export", header(lambda h: h["b"].update(data_offsets=["0", "12"])), "data_offsets"),
    "tensors that overlap": Case("export", header(lambda h: h["b"].update(data_offsets=[0, 12])), "overlaps"),
    "tensors with a hole between": Case(
        "export",
        header(lambda h: h["b"].update(data_offsets=[x + 8 for x in h["b"]["data_offsets"]]), data=lambda d: d + bytes(8)),
        "hole",
    ),
    "bytes after the tensors": Case("export", header(lambda h: None, data=lambda d: d + bytes(64)), "its tensors end at"),
    "tensor that the manifest does not name": Case("export", header(lambda h: h.update(c=h.pop("b"))), "only the manifest has"),
    "metadata that is no text": Case("export", header(lambda h: h.update(__metadata__={"a": [1]})), "__metadata__"),
    "export of a run: hostile header": Case(
        "export of a run", header(lambda h: h["b"].update(shape=[2**40])), "no usable checkpoint"
    ),
    # job files
    "job of 100,000 brackets": Case("train", text("tiny.yaml", "a: " + "[" * DEEP), "levels within each other"),
    "job of 500 levels": Case("plan", text("tiny.yaml", "a: " + "[" * 500 + "]" * 500), "levels within each other"),
    "job of a billion laughs": Case("train", text("tiny.yaml", laughs()), "aliases written out"),
    "job of a billion merges": Case("plan", text("tiny.yaml", merges()), "aliases written out"),
    "job with an alias of itself": Case(
        "plan", job("model: &m {function: helpers.tiny_job:model, args: {x: *m}}"), "an alias within"
    ),
    "job of many values": Case("plan", job(f"callbacks: [{'a, ' * 100_000}]"), "20,000 keys and values"),
    "job that is a FIFO": Case("train", instead("tiny.yaml", os.mkfifo), "a FIFO"),
    "job that is a folder": Case("train", instead("tiny.yaml", os.mkdir), "a folder"),
    "job of a terabyte": Case("plan", instead("tiny.yaml", sparse), "more than"),
    "job that is no text": Case("plan", text("tiny.yaml", b"\xff\xfe\x80"), "not UTF-8"),
    "job with nulls": Case("plan", text("tiny.yaml", "a: \0"), "not valid YAML"),
    "job with half a character": Case("plan", job('name: "\\ud800"'), "name"),
    "job with a date that is none": Case("plan", job("name: 2020-99-99"), "cannot be converted"),
    "job with a truth that is none": Case("plan", job("name: !!bool maybe"), "cannot be converted"),
    "job with a number of 5,000 digits": Case("plan", job("seed: " + "9" * 5000), "cannot be converted"),
    "job with a Python object": Case("plan", job("name: !!python/object/apply:os.getcwd []"), "not valid YAML"),
    "job with a list as a key": Case("plan", job("? [a, b]\n: 1"), "unhashable key"),
    "job of two documents": Case("plan", lambda p: (p / "tiny.yaml").write_text("name: a\n---\nname: b\n"), "not valid YAML"),
    "job with a key of two lines": Case("plan", job('"a\\nTraceback": 1'), "unknown key"),
    "job with endless stages": Case("plan", job("plan: {stages: 1000000000000}"), "plan.stages"),
    "job with endless replicas": Case("plan", job("plan: {stages: 1, replicas: 1000000000000}"), "plan.replicas"),
    "job with endless microbatches": Case(
        "train", job("batch_size: 1000000000000", "microbatches: 1000000000000"), "microbatches"
    ),
    "job with endless blocks": Case("plan", job("virtual_replicas: 1000000000000"), "virtual_replicas"),
    "job with endless steps": Case("train", job("steps: 1000000000000000", "trace_every: 1"), "steps"),
    "job with endless chunks": Case("plan", job("plan: {stages: 2, schedule: interleaved, chunks: 1000000000000}"), "chunks"),
    "job with endless standbys": Case("train", job("elastic: {standbys: 1000000000000}"), "standbys"),
    "job with microbatches NaN": Case("plan", job("microbatches: .nan"), "microbatches"),
    "job with callbacks of numbers": Case(
        "plan", job("callbacks: [7]"), "callbacks.0: expected module:name, or keys and values (function, args)"
    ),
    "job with optimizer groups of numbers": Case("plan", job("optimizer: {function: torch.optim:SGD, groups: [7]}"), "groups"),
    "job with clip_norm NaN": Case("plan", job("clip_norm: .nan"), "clip_norm"),
    # schedules
    "schedule with an endless microbatch": Case(
        "simulate", text("schedule.csv", "0F0,0F999999999,0B0,0B999999999\n"), "cannot be"
    ),
    "schedule with an endless stage": Case("simulate", text("schedule.csv", "999999999F0,999999999B0\n"), "cannot be"),
    "schedule with a number of 5,000 digits": Case("simulate", text("schedule.csv", "0F" + "9" * 5000), "not an instruction"),
    "schedule of 100,000 brackets": Case(
        "simulate", text("schedule.csv", "(" * DEEP + "0F0" + ")OVERLAP_F_B" * DEEP), "not an instruction"
    ),
    "schedule that is a FIFO": Case("simulate", instead("schedule.csv", os.mkfifo), "a FIFO"),
    "schedule of a terabyte": Case("simulate", instead("schedule.csv", sparse), "more than"),
    "schedule that is no text": Case("plan by a schedule", text("schedule.csv", b"\xff\xfe\x80"), "not UTF-8"),
    "train: schedule that is no text": Case("train by a schedule", text("schedule.csv", b"\xff\xfe\x80"), "not UTF-8"),
    "train: schedule that is a FIFO": Case("train by a schedule", instead("schedule.csv", os.mkfifo), "no regular file"),
    # token files
    "token file that is a FIFO": Case("train on tokens", instead("text.bin", os.mkfifo), "a FIFO"),
    "token file that is a folder": Case("train on tokens", instead("text.bin", os.mkdir), "a folder"),
    "token file with bytes too many": Case("train on tokens", text("text.bin", bytes(999)), "not 100 tokens"),
    "tokens' dtype a list": Case("train on tokens", text("text.bin.json", '{"dtype": ["uint16"]}'), "dtype"),
    "tokens' dtype that is none": Case("train on tokens", text("text.bin.json", '{"dtype": "float99"}'), "dtype"),
    "tokens' number negative": Case("train on tokens", text("text.bin.json", '{"tokens": -100}'), "-100 tokens"),
    "tokens' number as a float": Case("train on tokens", text("text.bin.json", '{"tokens": 100.0}'), "100.0 tokens"),
    "tokens' notes a list": Case("train on tokens", text("text.bin.json", "[]"), "not keys and values"),
    "tokens' notes of 100,000 brackets": Case(
        "train on tokens", text("text.bin.json", "[" * DEEP), "brackets within each other"
    ),
    "tokens' notes that are a FIFO": Case("train on tokens", instead("text.bin.json", os.mkfifo), "a FIFO"),
    "tokens' notes of a terabyte": Case("train on tokens", instead("text.bin.json", sparse), "more than"),
    # run folders
    "run's job that is a link out": Case("resume", link("runs/tiny/job.yaml", "outside/job.yaml"), "a symbolic link"),
    "run's job that is a FIFO": Case("status", instead("runs/tiny/job.yaml", os.mkfifo), "a FIFO"),
    "run's job of a billion laughs": Case("status", text("runs/tiny/job.yaml", laughs()), "aliases written out"),
    "run's job of 100,000 brackets": Case("resume", text("runs/tiny/job.yaml", "[" * DEEP), "levels within each other"),
    "events that are a link out": Case("status", link(EVENTS, "outside/events.jsonl"), "a symbolic link"),
    "resume: events that are a link out": Case("resume", link(EVENTS, "outside/events.jsonl"), "a symbolic link"),
    "train --resume: events that are a link out": Case(
        "train --resume", link(EVENTS, "outside/events.jsonl"), "a symbolic link"
    ),
    "events that are a FIFO": Case("resume", instead(EVENTS, os.mkfifo), "a FIFO"),
    "event line of a terabyte": Case("status", instead(EVENTS, sparse), "more than"),
    "metrics that are a link out": Case("resume", link(METRICS, "outside/events.jsonl"), "a symbolic link"),
    "cluster of 100,000 brackets": Case(
        "status of the last run", text("runs/tiny/cluster.json", "[" * DEEP + "]" * DEEP), "brackets within"
    ),
    "cluster that is a link": Case(
        "status of the last run", link("runs/tiny/cluster.json", "outside/job.yaml"), "a symbolic link"
    ),
    "plan that is a FIFO": Case("status", instead("runs/tiny/plan.json", os.mkfifo), "a FIFO"),
    "members of a terabyte": Case("status", instead("runs/tiny/members.json", sparse), "more than"),
}

DAMAGED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    # lines, and documents of which only `raypar status` makes something
    "run's job that is a list": ("status", text("runs/tiny/job.yaml", "[1]")),
    "run's steps a list": ("status", text("runs/tiny/job.yaml", "steps: [1]")),
    "event of 100,000 brackets": ("status", text(EVENTS, "[" * DEEP + "]" * DEEP + "\n")),
    "resume: event of 100,000 brackets": ("resume", text(EVENTS, "[" * DEEP + "]" * DEEP + "\n")),
    "train --resume: event that is a list": ("train --resume", text(EVENTS, "[1]\n")),
    "event that is a number": ("status", text(EVENTS, "7\n")),
    "event without a kind": ("status", line("events.jsonl", text="x")),
    "event of a kind that is a list": ("status", line("events.jsonl", kind=["lost"])),
    "event lost without a worker": ("status", line("events.jsonl", kind="lost")),
    "event at a time that is a text": ("status", line("events.jsonl", kind="note", time="now")),
    "event at a time of 400 digits": ("status", line("events.jsonl", kind="note", text="x", time=10**400)),
    "event at no time": ("status", line("events.jsonl", kind="generation", generation=3, workers=[], time=None)),
    "event at a time without end": ("status", line("events.jsonl", kind="note", text="x", time=1e300)),
    "event of an endless generation": ("status", line("events.jsonl", kind="generation", generation=10**15, workers=[])),
    "event of workers that is a number": ("status", line("events.jsonl", kind="generation", generation=3, workers=7)),
    "event of a pause that is a text": (
        "status",
        line("events.jsonl", kind="generation", generation=3, workers=[], pause_s="x"),
    ),
    "shards null in a plan": (
        "status",
        both(document("members.json", plan=None), document("plan.json", stages=[{"replicas": 1, "shards": None}])),
    ),
    "event of the end without a word": ("status", line("events.jsonl", kind="end", step=4)),
    "metrics of a list": ("resume", text(METRICS, "[1]\n")),
    "metrics without a step": ("status", line("metrics.jsonl", loss=1.0)),
    "metrics without seconds": ("status", line("metrics.jsonl", step=5, loss=1.0)),
    "metrics with seconds that are a text": ("status", line("metrics.jsonl", step=5, loss=1.0, seconds="1", samples_per_s=1)),
    "metrics with a step that is a text": (
        "status --svg",
        line("metrics.jsonl", step="5", loss=1.0, seconds=1, samples_per_s=1),
    ),
    "cluster's pid that leads out": (
        "status",
        document("cluster.json", nodes=[{"node": "n", "pid": "../{place}/outside", "head": True}]),
    ),
    "cluster's nodes a number": ("status", document("cluster.json", nodes=7)),
    "plan without stages": ("status", both(document("members.json", plan=None), document("plan.json", stages=[]))),
    "plan with stages of texts": ("status", document("plan.json", stages=["x"])),
    "plan with replicas that are a text": ("status", document("plan.json", stages=[{"replicas": "2"}])),
    "members that are a list": ("status", text("runs/tiny/members.json", "[]")),
    "members without a phase": ("status", text("runs/tiny/members.json", "{}")),
    "members of numbers": ("status", document("members.json", members=[1])),
    "members with a step that is a text": ("status", document("members.json", step="x")),
    "members that replay nothing": ("status", document("members.json", replaying={"step": 1})),
    "resume: event of an endless generation": (
        "resume",
        line("events.jsonl", kind="generation", generation=10**15, workers=[]),
    ),
    "event of 2 MiB": ("status", line("events.jsonl", kind="note", text="x" * (2 << 20))),
    "event of 100,000 brackets that are not closed": ("status", text(EVENTS, "[" * DEEP)),
    "event of a number of 5,000 digits": ("status", text(EVENTS, '{"kind": "note", "time": ' + "9" * 5000 + "}")),
    "metrics with a loss of 400 digits": ("status", line("metrics.jsonl", step=5, loss=10**400, seconds=1, samples_per_s=1)),
    "metrics with seconds of 400 digits": ("status", line("metrics.jsonl", step=5, loss=1.0, seconds=10**400, samples_per_s=1)),
    "metrics with memory that is null": (
        "status --svg",
        line("metrics.jsonl", step=5, loss=1, seconds=1, samples_per_s=1, time=1006, peak_rss_bytes=None),
    ),
    "metrics of 64 MiB without a line break": ("resume", lambda place: os.truncate(place / METRICS, 64 << 20)),
    "metrics of a gigabyte without a line break": ("resume", lambda place: os.truncate(place / METRICS, 1 << 30)),
    "members that are null": ("status", document("members.json", members=None)),
    "cluster's nodes null": ("status", document("cluster.json", nodes=None)),
    "plan with stages null": ("status", both(document("members.json", plan=None), document("plan.json", stages=None))),
    "run's job that is no text": ("status", text("runs/tiny/job.yaml", b"\xff\xfe\x00")),
    "run's job that is no YAML": ("status", text("runs/tiny/job.yaml", "steps: [")),
}


def run(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str, list[str]]:
    """(exit code, stdout, stderr, files opened)."""
    arguments = [word.format(place=place) for word in COMMANDS[command]]
    capsys.readouterr()
    with watched() as opened:
        code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err, opened


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_refused_in_two_lines_and_nothing_else_is_opened(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
):
    case = CASES[name]
    case.spoil(place)
    if case.command == "status":
        assert run("report", place, capsys)[0] == 2 and not (place / "run.html").exists()
    code, out, err, opened = run(case.command, place, capsys)
    lines = [line for line in err.splitlines() if not line.startswith("warning: skipped")]
    assert code == 2, out + err
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("  cure: "), err
    assert case.said in out + err
    assert "Traceback" not in re.sub(r"[/\\]nTraceback|\\\\nTraceback", "", out + err)
    assert max(map(len, [*lines, *out.splitlines()])) < 2000, "a message is not as long as the file"
    assert [path for path in opened if path.startswith(str(place / "outside"))] == []
    assert not list(place.glob("model.*")) and not (place / "run.svg").exists()


@pytest.mark.parametrize("locked", ["runs/tiny", "runs/tiny/checkpoints", "runs"])
@pytest.mark.parametrize("command", ["resume", "export of a run", "status", "status of the last run"])
def test_a_folder_that_may_not_be_read_is_said_to_be_one(
    command: str, locked: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As for a user without the permission; root has it always."""
    inside = f"{place / locked}{os.sep}"

    def checked(call: Callable[..., Any], *, listing: bool) -> Callable[..., Any]:
        def checks(path: Any = ".", *more: Any, **options: Any) -> Any:
            wanted = "" if isinstance(path, int) else os.fspath(path)
            if isinstance(wanted, str) and f"{wanted}{os.sep}".startswith(inside) and (listing or wanted + os.sep != inside):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), wanted)
            return call(path, *more, **options)

        return checks

    for name in ("stat", "lstat", "open"):
        monkeypatch.setattr(os, name, checked(getattr(os, name), listing=False))
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, checked(getattr(os, name), listing=True))
    words = COMMANDS[command]
    code = main([word.format(place=place) for word in words])
    said = capsys.readouterr()
    if command.startswith("status") and locked == "runs/tiny/checkpoints":
        assert code == 0, said.err  # needs no checkpoint
        return
    lines = said.err.splitlines()
    assert code == 2 and len(lines) == 2 and "Permission denied" in lines[0] and "readable" in lines[1], said.out + said.err


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (command, file)
        for file, commands in {
            "job.yaml": ("status", "report", "top", "logs", "resume", "debug"),
            "events.jsonl": ("status", "report", "top", "logs", "resume", "debug"),
            "metrics.jsonl": ("status", "report", "top", "logs", "resume", "debug"),
            "members.json": ("status", "report", "top"),
            "checkpoints/step_00000004/manifest.json": ("resume", "export of a run"),
            "checkpoints/step_00000004/b.safetensors": ("resume", "export of a run"),
        }.items()
        for command in commands
    ],
)
def test_a_file_of_a_run_that_may_not_be_read_is_named_and_is_to_be_made_readable(
    command: str, file: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As for a user without the permission; root has it always."""
    locked, opened = str(place / "runs/tiny" / file), os.open

    def opens(path: Any, *more: Any, **options: Any) -> int:
        if not isinstance(path, int) and os.path.realpath(os.fsdecode(path)) == os.path.realpath(locked):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, *more, **options)

    monkeypatch.setattr(os, "open", opens)
    code = main([word.format(place=place) for word in COMMANDS[command]])
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if not line.startswith("warning: skipped")]
    assert code == 2 and len(lines) == 2, said.out + said.err
    assert locked in lines[0] and "Permission denied" in lines[0] and "readable" in lines[1]


SPOILT_JOBS = {
    "empty": ("", "holds a NoneType, not keys and values"),
    "no YAML": ("steps: [", "not valid YAML"),
    "no text": (b"\xff\xfe\x00", "is not UTF-8 text"),
    "a list": ("[]", "holds a list, not keys and values"),
    "another type": ("steps: x", "steps: expected a valid integer"),
    "no steps": (None, "steps is missing"),
}


@pytest.mark.parametrize("command", ["resume", "debug"])
@pytest.mark.parametrize("name", SPOILT_JOBS)
def test_what_is_wrong_with_a_run_s_own_job_file_names_the_file(
    name: str, command: str, place: Path, capsys: pytest.CaptureFixture[str]
):
    content, said = SPOILT_JOBS[name]
    file = place / "runs/tiny/job.yaml"
    if content is None:
        content = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("steps:"))
    text("runs/tiny/job.yaml", content)(place)
    code, out, err, _ = run(command, place, capsys)
    assert code == 2 and str(file) in err.splitlines()[0] and said in err, out + err
    assert "quickstart.yaml" not in err, "the user has given a run"


def test_an_override_that_does_not_fit_a_run_s_job_is_named_with_the_file(place: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["resume", str(place / "runs/tiny"), "--set", "steps=x"]) == 2
    assert f"{place}/runs/tiny/job.yaml with --set steps=x: steps: expected" in capsys.readouterr().err


def lines_of(place: Path) -> set[str]:
    """What readers take from metrics and events."""
    folder = RunFolder(place / "runs/tiny")
    return {json.dumps(each) for file in (folder.metrics, folder.events) for each in folder.read_lines(file)}


@pytest.mark.parametrize("name", [name for name in DAMAGED if name.startswith(("plan", "members", "cluster"))])
def test_a_document_of_other_types_is_refused_to_who_acts_by_it(name: str, place: Path):
    """`raypar drain` does; `raypar status` shows what is left."""
    DAMAGED[name][1](place)
    folder = RunFolder(place / "runs/tiny")
    path = getattr(folder, name.split()[0].removesuffix("'s"))
    assert folder.read_document(path, damaged=True) is None
    with pytest.raises(ConfigError, match="is not one of raypar's"):
        folder.read_document(path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if "gigabyte" in name else []) for name in DAMAGED])
def test_a_damaged_line_ends_nothing_and_status_shows_what_is_left(
    name: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A full disk leaves such lines and documents too: what is not raypar's is left out, and nothing is made of it."""

    def goes_on(*_: object) -> None:
        raise ConfigError("the run goes on", cure="let it")

    monkeypatch.setattr("raypar.launch.resume.prepare_resumed_run", goes_on)
    command, spoil = DAMAGED[name]
    before = lines_of(place)
    spoil(place)
    if command == "status":
        code, out, err, opened = run("report", place, capsys)
        assert (code, err) == (0, "") and "tiny" in (place / "run.html").read_text() and "outside" not in str(opened), out
    assert lines_of(place) <= before
    code, out, err, opened = run(command, place, capsys)
    if command.startswith("status"):
        assert (code, err) == (0, "") and out.startswith("run tiny: ")
        assert not command.endswith("--svg") or (place / "run.svg").exists()
    else:
        assert code == 2 and err.splitlines() == ["error: the run goes on", "  cure: let it"]
    assert "Traceback" not in out + err and max(map(len, out.splitlines())) < 2000
    assert [path for path in opened if path.startswith(str(place / "outside"))] == []


def aliases(place: Path) -> None:
    job("model: &m {function: helpers.tiny_job:model, args: &none {}}", "data: {function: helpers.tiny_job:data, args: *none}")(
        place
    )


def joined(place: Path) -> None:
    """A hard link is a file like any other."""
    (place / "linked").hardlink_to(place / A)
    (place / A).unlink()
    (place / A).hardlink_to(place / "linked")


def moved(place: Path) -> None:
    """The folder of the checkpoints lies on another disk."""
    (place / "runs/tiny/checkpoints").rename(place / "disk")
    (place / "runs/tiny/checkpoints").symlink_to(place / "disk")


FINE = {
    "nothing is spoilt: export": Case("export", lambda place: None, "3 tensors after 4 steps"),
    "nothing is spoilt: status": Case("status", lambda place: None, "killed"),
    "nothing is spoilt: picture": Case("status --svg", lambda place: None, "picture:"),
    "nothing is spoilt: simulate": Case("simulate", lambda place: None, "1 stage, 1 worker, 2 microbatches"),
    "nothing is spoilt: plan": Case("plan", lambda place: None, "4 workers"),
    "a hard link": Case("export", joined, "3 tensors"),
    "a file too many, which is not opened": Case("export", text(f"{STEP}/c.safetensors", b"\xff" * 100), "3 tensors"),
    "checkpoints on another disk": Case("export of a run", moved, "3 tensors"),
    "a job file that is a link": Case("plan", link("tiny.yaml", "outside/job.yaml"), "4 workers"),
    "aliases in a job file": Case("plan", aliases, "4 workers"),
    "a line cut off by a crash": Case("status", text(EVENTS, b'{"kind": "lo\n\0\0\0\xff'), "tiny"),
    "a document that is being written": Case("status", text("runs/tiny/members.json", ""), "tiny"),
    "no metrics yet": Case("status", text(METRICS, ""), "tiny"),
}


@pytest.mark.parametrize("name", FINE)
def test_what_is_allowed_still_works(name: str, place: Path, capsys: pytest.CaptureFixture[str]):
    case = FINE[name]
    case.spoil(place)
    code, out, err, opened = run(case.command, place, capsys)
    assert (code, err) == (0, "") and case.said in out
    assert str(place / STEP / "c.safetensors") not in opened
    if case.command == "export":
        found = load_file(place / "model.safetensors")
        assert torch.equal(found["w"], torch.arange(12.0).view(4, 3)) and set(found) == {"w", "b", "mean"}


def test_a_file_that_is_replaced_after_it_was_verified_is_read_only_if_it_looks_the_same(place: Path):
    """Whoever reads compares length and header again, in the file that it then reads; checksums are compared by `verify`."""
    folder = place / STEP
    found = checkpoint_files.verify_checkpoint(folder)
    assert found.steps_done == 4
    larger = torch.zeros(10_000)
    checkpoint_files.write_shard(folder, "a.safetensors", {("w", PARAMETER): larger, ("b", PARAMETER): larger})
    with pytest.raises(checkpoint_files.CheckpointError, match="bytes instead of"):
        checkpoint_files.read_checkpoint_state(folder)
    content = (place / "outside/a.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(content.replace(b'"dtype": "F32", "shape": [3]', b'"dtype": "I32", "shape": [3]'))
    with pytest.raises(checkpoint_files.CheckpointError, match=r"is not what manifest\.json says"):
        checkpoint_files.read_checkpoint_state(folder)


def test_there_are_enough_cases_and_their_number_is_printed(capsys: pytest.CaptureFixture[str]):
    with capsys.disabled():
        print(f"\n{len(CASES)} hostile files, {len(DAMAGED)} damaged ones, {len(FINE)} that are fine")
    assert len(CASES) >= 60
    assert yaml.safe_load(laughs(1))["a1"] == ["lol"] * 10, "the bomb is YAML"


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        (b"7", 0),
        (b"[]", 1),
        (b'{"a": [{"b": []}, 1]}', 4),
        (b'"[[[["', 0),
        (b'["\\"[[[", {}]', 2),
        (b'"' + b'\\"[' * DEEP, 0),
        (b"[" * 64 + b"]" * 64, 64),
        (b"[" * DEEP + b"]" * DEEP, 65),
        (b"]" * DEEP, 65),
    ],
)
def test_brackets_are_counted_before_a_text_is_parsed_but_not_those_in_strings(text: bytes, depth: int):
    from raypar.files.untrusted_files import json_nesting_depth

    assert json_nesting_depth(text) == depth


def test_a_header_says_where_a_tensors_bytes_are(place: Path):
    from raypar.storage.checkpoint_store import LocalFile
    from raypar.worker.checkpoint.safetensors_header import parse_safetensors_header

    file = place / A
    with file.open("rb") as opened:
        found = parse_safetensors_header(LocalFile(opened), file).tensors
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "w": ("F32", (3, 3)), "w#exp_avg": ("F32", (3, 3)), "b": ("F32", (3,)),
    }  # fmt: skip
    tensors, content = load_file(file), file.read_bytes()
    for name, info in found.items():
        assert content[info.start : info.stop] == tensors[name].numpy().tobytes()
