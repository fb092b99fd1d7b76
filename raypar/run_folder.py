"""The folder of one run: where everything lies, how it is made and found again. `run_dir/NAME/`."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.errors import ConfigError
from raypar.input_files import kind_of, open_regular, parse_json, read_bytes, shown
from raypar.run_records import check_document, check_event, check_metrics

FILES = (
    "job.yaml", "plan.json", "plan.new", "metrics.jsonl", "events.jsonl", "members.json", "members.new", "cluster.json",
    "trace.json", "swimlane.svg", "wandb.id", "mlflow.id",
)  # fmt: skip
"""What a run reads and writes directly in its folder."""
LINE_BYTES = 1 << 20
"""Of a line of metrics or events."""
DOCUMENT_BYTES = 16 << 20
"""Of plan, members or cluster: tens of thousands of workers."""

URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""`s3://...`, also with one slash: that is what `pathlib.Path` makes of it."""


def local_path(given: str | os.PathLike[str], what: str) -> Path:
    """The path. Raises `ConfigError` for a URI: raypar would make a folder of that name on this machine's disk.

    `what`: which argument or key gave it.
    """
    if found := URI.match(os.fspath(given)):
        scheme = found[0].rstrip(":/")
        raise ConfigError(
            f"{what} is {os.fspath(given)!r}: raypar does not read or write {scheme} storage, only folders",
            cure="give the path of a folder (on a cluster, of storage that all nodes have mounted), and copy to or from there",
        )
    return Path(given)


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
        root = local_path(run_dir, "run_dir")
        try:
            root.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                path = root / (name if number == 1 else f"{name}-{number}")
                try:
                    # mkdir decides between two runs that start at once.
                    path.mkdir()
                    (path / "checkpoints").mkdir()
                    return RunFolder(path)
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise ConfigError(
                f"cannot make a run folder {root / name}: {error.strerror or error}",
                cure="set run_dir to a folder you may write",
            ) from error

    @staticmethod
    def find(run: str | Path, run_dir: str | Path = "runs/", *, with_job: bool = True) -> RunFolder:
        """A run by its path or by its name under `run_dir`. Raises `ConfigError` naming the runs there are."""
        for path in (local_path(run, "the run"), local_path(run_dir, "--run-dir") / run):
            has_job = (path / "job.yaml").is_file()
            if has_job or (path / "checkpoints").is_dir():
                RunFolder(path).check_files()
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
        started = sorted(local_path(run_dir, "--run-dir").glob("*/cluster.json"), key=lambda path: path.lstat().st_mtime)
        if not started:
            raise ConfigError(
                f"no run lies under {run_dir}",
                cure="give the path of the run's folder, or --run-dir with the folder of your runs",
            )
        found = RunFolder(started[-1].parent)
        found.check_files()
        return found

    def check_files(self) -> None:
        """Raises `ConfigError` where one of the run's files is a link, a FIFO or the like: what a run reads and writes
        would lie somewhere else, or be waited for without end."""
        for name in FILES:
            try:
                kind = kind_of((self.path / name).lstat().st_mode)
            except (OSError, ValueError):  # there is none
                continue
            if kind is not None:
                raise ConfigError(
                    f"{shown(self.path / name)} is {kind}, not a regular file of the run", cure="remove it, or put a copy there"
                )

    def under_way(self) -> bool:
        """Whether a process of this machine trains in this folder."""
        try:
            with open_regular(self.job, follow=False) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (OSError, ConfigError):
            return False
        return False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else trains in this folder meanwhile, on whichever Ray: two runs would write into each other's files. The
        system lets go of it however this process ends; a file system without locks knows no holders. Raises `ConfigError`."""
        with open(self.job, "a") as file:
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

    @staticmethod
    def mend(path: Path) -> None:
        """Cut off a last line that a crash has left incomplete, before anything is written behind it."""
        if path.is_file():
            whole = path.read_bytes().rpartition(b"\n")
            if whole[2]:
                path.write_bytes(whole[0] + whole[1])

    def read(self, path: Path) -> Iterator[dict[str, Any]]:
        """The lines of `metrics` or `events`; one cut off by a crash is left out. Raises `ConfigError` for a line that is whole
        and cannot be one of raypar's."""
        if not os.path.lexists(path):
            return
        check = check_event if path == self.events else check_metrics
        with open_regular(path, follow=False, cure="remove it") as file:
            for number in itertools.count(1):
                line = file.readline(LINE_BYTES + 1)
                if not line:
                    return
                try:
                    if len(line) > LINE_BYTES:
                        raise ValueError(f"it has more than {LINE_BYTES:,} bytes")
                    if not line.strip():
                        continue
                    found = parse_json(line)
                    check(found)
                except (json.JSONDecodeError, UnicodeDecodeError):
                    continue
                except ValueError as error:
                    raise ConfigError(
                        f"{shown(path)}, line {number}: not a line of raypar's: {shown(str(error), 400)}",
                        cure="remove the line; checkpoints do not depend on it",
                    ) from error
                yield found

    def document(self, path: Path) -> dict[str, Any] | None:
        """What stands in `plan`, `members` or `cluster`; None where that file is missing or cut off (it is being written).
        Raises `ConfigError` where it cannot be one of raypar's."""
        if not os.path.lexists(path):
            return None
        cure = "remove it; checkpoints do not depend on it"
        try:
            found = parse_json(read_bytes(path, follow=False, limit=DOCUMENT_BYTES, cure=cure))
            check_document(path.name, found)
        except (json.JSONDecodeError, UnicodeDecodeError):
            return None
        except ValueError as error:
            raise ConfigError(f"{shown(path)} is not one of raypar's: {shown(str(error), 400)}", cure=cure) from error
        return dict(found)
