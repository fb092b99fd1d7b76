"""The folder of one run: where everything lies, how it is made and found again. `run_dir/NAME/`."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.errors import ConfigError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk, a quota or a limit that has no room left."""
ROOM = "free disk space, or choose a folder on a disk that has some"
WRITABLE = "choose a folder you may write to"

Line = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """One run's folder. Nothing but `create` makes one."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def job(self) -> Path:
        """The job with its overrides and defaults written out; loads like any job file."""
        return self.path / "job.yaml"

    @property
    def plan(self) -> Path:
        """The plan of the last start, as JSON."""
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per committed step or validation."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One JSON line per event of the cluster or the run."""
        return self.path / "events.jsonl"

    @property
    def members(self) -> Path:
        """Who does what right now, as JSON; replaced as a whole at every change."""
        return self.path / "members.json"

    @property
    def cluster(self) -> Path:
        """Where the Ray of the last start answers, and its raylets if it is our own, as JSON."""
        return self.path / "cluster.json"

    @property
    def trace(self) -> Path:
        """Chrome/Perfetto trace of a measured step."""
        return self.path / "trace.json"

    @property
    def swimlane(self) -> Path:
        """Predicted and measured step on one sheet."""
        return self.path / "swimlane.svg"

    @property
    def checkpoints(self) -> Path:
        """Holds `step_00000050/`, ..."""
        return self.path / "checkpoints"

    @staticmethod
    def create(run_dir: str | Path, name: str) -> RunFolder:
        """A new folder `name`, or `name-2`, `name-3`, ... beside runs that have it already. Raises `ConfigError`."""
        root = Path(run_dir)
        try:
            root.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                path = root / (name if number == 1 else f"{name}-{number}")
                try:
                    # mkdir decides between two runs that start at once.
                    path.mkdir()
                except FileExistsError:
                    number += 1
                    continue
                try:
                    (path / "checkpoints").mkdir()
                except OSError:
                    path.rmdir()
                    raise
                return RunFolder(path)
        except OSError as error:
            cure = "free disk space, or set run_dir to" if error.errno in FULL else "set run_dir to"
            raise ConfigError(
                f"cannot make a run folder {root / name}: {error.strerror or error}", cure=f"{cure} a folder you may write"
            ) from error

    @contextlib.contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """Remove this new folder again if the body, which fills it, fails. Raises `ConfigError` for what cannot be written."""
        try:
            with writing(self.path):
                yield
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    @staticmethod
    def find(run: str | Path, run_dir: str | Path = "runs/", *, with_job: bool = True) -> RunFolder:
        """A run by its path or by its name under `run_dir`. Raises `ConfigError` naming the runs there are."""
        for path in (Path(run), Path(run_dir) / run):
            has_job = (path / "job.yaml").is_file()
            if has_job or (path / "checkpoints").is_dir():
                if with_job and not has_job:
                    raise ConfigError(
                        f"run {path} has no job.yaml: raypar.Trainer made it, from functions without names, or it was removed",
                        cure=f"go on from Python: Trainer(..., resume_from_checkpoint={str(path)!r}).fit()",
                    )
                return RunFolder(path)
        root = Path(run_dir)
        there = sorted({p.parent.name for mark in ("job.yaml", "checkpoints") for p in root.glob(f"*/{mark}")})
        near = difflib.get_close_matches(str(run), there, n=1, cutoff=0.5)
        raise ConfigError(
            f"no run {str(run)!r}, neither as a path nor under {root}",
            cure=(f"did you mean {near[0]}? " if near else "")
            + (
                f"runs under {root}: {', '.join(there[-10:])}"
                if there
                else f"no run lies under {root}: give the path of the run's folder, or --run-dir with the folder of your runs"
            ),
        )

    @staticmethod
    def latest(run_dir: str | Path = "runs/") -> RunFolder:
        """The run under `run_dir` that was started or resumed last. Raises `ConfigError` when there is none."""
        started = sorted(Path(run_dir).glob("*/cluster.json"), key=lambda path: path.stat().st_mtime)
        if not started:
            raise ConfigError(
                f"no run lies under {run_dir}",
                cure="give the path of the run's folder, or --run-dir with the folder of your runs",
            )
        return RunFolder(started[-1].parent)

    def under_way(self) -> bool:
        """Whether a process of this machine trains in this folder."""
        try:
            with open(self.job, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else trains in this folder meanwhile, on whichever Ray: two runs would write into each other's files. The
        system lets go of it however this process ends; a file system without locks knows no holders. Raises `ConfigError`."""
        with contextlib.ExitStack() as stack:
            with writing(self.job, cure="make the run folder writable, or resume a copy of it"):
                file = stack.enter_context(open(self.job, "a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"run {self.name} is under way: another process trains in {self.path}",
                    cure=f"`raypar status {self.path}` says how it gets on: wait for its end, or press Ctrl-C where it runs",
                ) from error
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
            yield

    def append(self, path: Path, facts: Mapping[str, Any]) -> None:
        """One JSON line at the end of `metrics` or `events`, handed to the system before this returns."""
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dict(facts)) + "\n")

    def read(self, path: Path) -> Iterator[Line]:
        """The lines of `metrics` or `events` (`lines_in`); of a file that is missing, or no file, none. Raises `ConfigError`
        when it cannot be read."""
        try:
            text = path.read_bytes() if path.is_file() else b""
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror or error}", cure="make it readable, or move it away"
            ) from error
        yield from lines_in(path.name, text)

    def rewrite_job(self, text: str) -> None:
        """job.yaml in place, where the lock of `held` is; as it was when there is no room. Raises `ConfigError`."""
        before = self.job.read_text(encoding="utf-8")
        if before == text:
            return
        with writing(self.job):
            try:
                self.job.write_text(text, encoding="utf-8")
            except OSError:
                with contextlib.suppress(OSError):  # there was room for it
                    self.job.write_text(before, encoding="utf-8")
                raise

    def document(self, path: Path) -> dict[str, Any] | None:
        """What stands in `plan`, `members` or `cluster`; None where that file is missing or broken."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


# -- writing -----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writing(path: Path, cure: str = "") -> Iterator[None]:
    """Turns errors of the file system into a `ConfigError` that names `path`; `cure`: unless the disk is full."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}", cure=ROOM if error.errno in FULL else cure or WRITABLE
        ) from error


def write_whole(path: Path, text: str, cure: str = "") -> None:
    """Write a text file, whole or not at all: what was there stays until then. Raises `ConfigError`; `cure`: see `writing`."""
    with writing(path, cure):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # /dev/stdout, a pipe; for a folder the error is raised here
            target.write_text(text, encoding="utf-8")
        else:
            replace_whole(target, text.encode())


def replace_whole(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """Put a file with this content in the place of `path`, or leave everything as it was. Raises `OSError`. `lasting`: it
    outlives a crash of the machine too, for which the disk is waited for."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


# -- lines -------------------------------------------------------------------------------------------------------------------


def lines_in(name: str, content: bytes) -> list[Line]:
    """The lines of a metrics.jsonl or events.jsonl, whatever has befallen the file: what is no such line is left out. Metrics
    come in the order of steps, each once (`joined`)."""
    found: list[Line] = []
    for text in content.split(b"\n"):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # cut off by a crash, or bytes of something else
            continue
        if isinstance(line, dict) and (is_event(line) if name == "events.jsonl" else is_metrics(line)):
            found.append(line)
    return joined(found)


def joined(lines: Iterable[Line], more: Iterable[Line] = ()) -> list[Line]:
    """Metrics in the order of steps, each once: of two of one step the last is taken. Events as they come; if some of `more`
    are not among them, all in the order of time."""
    lines, more = list(lines), list(more)
    if any("kind" in line for line in (*lines, *more)):
        there = {json.dumps(line) for line in lines}
        lacking = [line for line in more if json.dumps(line) not in there]
        return sorted([*lines, *lacking], key=place_of) if lacking else lines
    found = {place_of(line): line for line in (*lines, *more)}
    return [found[place] for place in sorted(found)]


def place_of(line: Line) -> tuple[float, bool]:
    """Where a line belongs: events by their time, steps by their number, a validation behind its step."""
    return (line.get("time", 0.0), False) if "kind" in line else (line["step"], "loss" not in line)


def is_metrics(line: Line) -> bool:
    """Whether it is the line of a step or of a validation, with the numbers that readers take from it."""
    step = line.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 1 or "kind" in line:
        return False
    if "time" in line and not _numbers(line, "time"):
        return False
    if "loss" in line:
        return _numbers(line, "seconds", "samples_per_s") and _numbers(line, "loss", or_null=True)
    return "validation_loss" in line and _numbers(line, "validation_loss", or_null=True)


EVENT_NUMBERS = {"lost": ("worker",), "joined": ("worker",), "draining": ("worker",), "generation": ("generation",)}
EVENT_LISTS = {"generation": ("workers",)}
EVENT_TEXTS = {"warning": ("text",), "recovering": ("text",), "checkpoint": ("path",)}
"""What readers take from events of a kind without asking whether it is there."""


def is_event(line: Line) -> bool:
    """Whether it is the line of an event, with what readers take from it."""
    kind = line.get("kind")
    return (
        isinstance(kind, str)
        and ("time" not in line or _numbers(line, "time"))
        and _numbers(line, *EVENT_NUMBERS.get(kind, ()))
        and all(isinstance(line.get(key), list) for key in EVENT_LISTS.get(kind, ()))
        and all(isinstance(line.get(key), str) for key in EVENT_TEXTS.get(kind, ()))
    )


def _numbers(line: Line, *keys: str, or_null: bool = False) -> bool:
    return all(
        key in line
        and ((or_null and line[key] is None) or (isinstance(line[key], (int, float)) and not isinstance(line[key], bool)))
        for key in keys
    )
