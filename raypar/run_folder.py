"""The folder of one run, `run_dir/NAME/`: its files, how it is made, found, locked, read and written."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from raypar.errors import ConfigError
from raypar.run_folder_checks import check_event_line, check_metrics_line, check_run_folder_json
from raypar.untrusted_files import (
    JsonTooDeep,
    cure_of_read_error,
    describe_special_file,
    open_regular_file,
    parse_untrusted_json,
    read_limited_bytes,
    read_limited_text,
    shorten,
)

FILES = (
    "job.yaml", "plan.json", "plan.new", "metrics.jsonl", "events.jsonl", "members.json", "members.new", "cluster.json",
    "trace.json", "swimlane.svg", "wandb.id", "mlflow.id",
)  # fmt: skip
"""What a run reads and writes directly in its folder."""
LINE_BYTES = 1 << 20
"""Size limit of a line of metrics or events."""
FILE_BYTES = 4 << 30
"""Size limit of metrics or events: ten million steps of ten workers, 350,000 of a thousand."""
DOCUMENT_BYTES = 16 << 20
"""Size limit of plan, members or cluster: tens of thousands of workers."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers for no room left: disk, quota, file size limit."""
ROOM = "free disk space, or choose a folder on a disk that has some"
WRITABLE = "choose a folder you may write to"

URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""`s3://...`, also with one slash: that is what `pathlib.Path` makes of it."""

Line = dict[str, Any]
"""One line of metrics or events."""


def check_local_path(given: str | os.PathLike[str], what: str) -> Path:
    """`given` as a path. Raises `ConfigError` for a URI, which would become a folder of that name on this machine's disk.

    `what`: the argument or key that gave it.
    """
    if found := URI.match(os.fspath(given)):
        scheme = found[0].rstrip(":/")
        raise ConfigError(
            f"{what} is {os.fspath(given)!r}: raypar does not read or write {scheme} storage, only folders",
            cure="give the path of a folder (on a cluster, of storage that all nodes have mounted), and copy to or from there",
        )
    return Path(given)


def resume_argument(path: str | os.PathLike[str]) -> str:
    """What `raypar resume` and `raypar export` find a run by from here: its name under runs/, else its path."""
    found = Path(path)
    return found.name if found.parent == Path("runs") else os.fspath(path)


@dataclass(frozen=True)
class RunFolder:
    """One run's folder. Only `create` makes a new one."""

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
        """Phase, plan and workers right now, as JSON; replaced as a whole at every change."""
        return self.path / "members.json"

    @property
    def cluster(self) -> Path:
        """Address of the last start's Ray cluster, and the raylets of a local one, as JSON."""
        return self.path / "cluster.json"

    @property
    def trace(self) -> Path:
        """Chrome/Perfetto trace of a measured step."""
        return self.path / "trace.json"

    @property
    def swimlane(self) -> Path:
        """Drawing of the predicted and the measured step."""
        return self.path / "swimlane.svg"

    @property
    def checkpoints(self) -> Path:
        """Holds `step_00000050/`, ..."""
        return self.path / "checkpoints"

    @staticmethod
    def create(run_dir: str | Path, name: str) -> RunFolder:
        """A new folder `name`, or `name-2`, `name-3`, ... beside runs that have it already. Raises `ConfigError`."""
        root = check_local_path(run_dir, "run_dir")
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
            with explain_write_errors(self.path):
                yield
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    @staticmethod
    def find(run: str | Path, run_dir: str | Path = "runs/", *, with_job: bool = True) -> RunFolder:
        """A run by its path or by its name under `run_dir`. Raises `ConfigError` naming the runs there are."""
        for path in (check_local_path(run, "the run"), check_local_path(run_dir, "--run-dir") / run):
            with explain_read_errors(path):
                has_job = (path / "job.yaml").is_file()
                is_run = has_job or (path / "checkpoints").is_dir()
            if is_run:
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
        root = check_local_path(run_dir, "--run-dir")
        with explain_read_errors(root):
            runs = list(root.iterdir()) if root.is_dir() else []
            records = [run / "cluster.json" for run in runs if run.is_dir()]
            started = sorted((path for path in records if path.exists()), key=lambda path: path.lstat().st_mtime)
        if not started:
            raise ConfigError(
                f"no run lies under {run_dir}",
                cure="give the path of the run's folder, or --run-dir with the folder of your runs",
            )
        found = RunFolder(started[-1].parent)
        found.check_files()
        return found

    def check_files(self) -> None:
        """Raise `ConfigError` if one of the run's files is a link, a FIFO or the like: it would lead elsewhere, or block."""
        for name in FILES:
            try:
                kind = describe_special_file((self.path / name).lstat().st_mode)
            except (OSError, ValueError):  # there is none
                continue
            if kind is not None:
                raise ConfigError(
                    f"{shorten(self.path / name)} is {kind}, not a regular file of the run",
                    cure="remove it, or put a copy there",
                )

    def under_way(self) -> bool:
        """Whether a process of this machine trains in this folder."""
        try:
            with open_regular_file(self.job, follow=False) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (OSError, ConfigError):
            return False
        return False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold this folder's lock: no other process of this machine trains in it meanwhile, on whichever Ray.

        Two runs would write into each other's files. The system releases the lock however this process ends; a file system
        without locks is used unlocked. Raises `ConfigError` if another process has the lock.
        """
        with contextlib.ExitStack() as stack:
            with explain_write_errors(self.job, cure="make the run folder writable, or resume a copy of it"):
                file = stack.enter_context(open(self.job, "a", opener=regular_file_opener))
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
        with open(path, "a", encoding="utf-8", opener=regular_file_opener) as file:
            file.write(json.dumps(dict(facts)) + "\n")

    def read(self, path: Path) -> Iterator[Line]:
        """The lines of `metrics` or `events` (`parse_jsonl_lines`); none if there is no regular file (`check_files` refuses
        others).

        Raises `ConfigError` if it cannot be read, or has more than `FILE_BYTES`.
        """
        try:
            if describe_special_file(path.lstat().st_mode) is not None:
                return
        except OSError:
            return
        cure = "make it readable, or move it away; checkpoints do not depend on it"
        with open_regular_file(path, follow=False, cure=cure) as file:
            size = os.fstat(file.fileno()).st_size
            if size > FILE_BYTES:
                raise ConfigError(f"{shorten(path)} has {size:,} bytes, more than the {FILE_BYTES:,} that are read", cure=cure)
            try:
                lines = merge_jsonl_lines(_whole(path.name, file))
            except OSError as error:
                raise ConfigError(f"cannot read {shorten(path)}: {error.strerror or error}", cure=cure) from error
        yield from lines

    def rewrite_job(self, text: str) -> None:
        """Write job.yaml in place, since the lock of `held` is on this very file; restores the old text if that fails.

        Raises `ConfigError`.
        """
        before = read_limited_text(self.job, follow=False)
        if before == text:
            return
        with explain_write_errors(self.job):
            try:
                self._put_job(text)
            except OSError:
                with contextlib.suppress(OSError):  # there was room for it
                    self._put_job(before)
                raise

    def _put_job(self, text: str) -> None:
        with open(self.job, "w", encoding="utf-8", opener=regular_file_opener) as file:
            file.write(text)

    def document(self, path: Path, *, damaged: bool = False) -> dict[str, Any] | None:
        """The content of `plan`, `members` or `cluster`; None if the file is missing, or cut off because it is being written.

        Raises `ConfigError` for a link, a FIFO, a file that is too long or too deep, and for one that is not raypar's: with
        `damaged` the result is None for the last.
        """
        if not os.path.lexists(path):
            return None
        cure = "remove it; checkpoints do not depend on it"
        try:
            found = parse_untrusted_json(read_limited_bytes(path, follow=False, limit=DOCUMENT_BYTES, cure=cure))
            check_run_folder_json(path.name, found)
        except (json.JSONDecodeError, UnicodeDecodeError):
            return None
        except ValueError as error:
            if damaged and not isinstance(error, JsonTooDeep):
                return None
            raise ConfigError(f"{shorten(path)} is not one of raypar's: {shorten(str(error), 400)}", cure=cure) from error
        return dict(found)


# -- writing -----------------------------------------------------------------------------------------------------------------


def regular_file_opener(path: str | os.PathLike[str], flags: int) -> int:
    """An `opener` for `open` that raises `OSError` for what is no regular file: no link is followed, no FIFO waited for."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return descriptor


@contextlib.contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system into a `ConfigError` that names what could not be read, `path` if they do not say."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename or path}: {error.strerror or error}", cure=cure_of_read_error(error)
        ) from error


@contextlib.contextmanager
def explain_write_errors(path: Path, cure: str = "") -> Iterator[None]:
    """Turn errors of the file system into a `ConfigError` that names `path`. `cure`: of errors other than a full disk."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}", cure=ROOM if error.errno in FULL else cure or WRITABLE
        ) from error


def write_text_atomically(path: Path, text: str, cure: str = "") -> None:
    """Write a text file whole, or leave what was there. Raises `ConfigError`; `cure`: of errors other than a full disk."""
    with explain_write_errors(path, cure):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # /dev/stdout, a pipe; for a folder the error is raised here
            target.write_text(text, encoding="utf-8")
        else:
            replace_file_atomically(target, text.encode())


def replace_file_atomically(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """Put a file with this content in the place of `path`, or leave everything as it was; a link there is replaced, not
    followed. Raises `OSError`. `lasting`: wait for the disk, so that the file outlives a crash of the machine too."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb", opener=regular_file_opener) as file:
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def file_has_content(path: Path, content: bytes) -> bool:
    """Whether `path` is a regular file with this content."""
    try:
        return read_limited_bytes(path, follow=False, limit=len(content)) == content
    except ConfigError:
        return False


# -- lines -------------------------------------------------------------------------------------------------------------------


def read_lines_file(path: Path) -> bytes | None:
    """The bytes of a file of lines; empty if it does not exist. None if it cannot be read, has more than `FILE_BYTES`, or is
    not a regular file (a link is not followed)."""
    if not os.path.lexists(path):
        return b""
    try:
        return read_limited_bytes(path, follow=False, limit=FILE_BYTES)
    except ConfigError:
        return None


def parse_jsonl_lines(name: str, content: bytes) -> list[Line]:
    """The valid lines of a metrics.jsonl or events.jsonl (`name`), in order, each once (`merge_jsonl_lines`)."""
    return merge_jsonl_lines(_whole(name, io.BytesIO(content)))


def _whole(name: str, stream: BinaryIO) -> Iterator[Line]:
    """The valid lines of a file, in order. Damaged ones (cut off, too long, too deep, of wrong types) are left out: a full disk
    leaves such lines too, and training must continue."""
    check = check_event_line if name == "events.jsonl" else check_metrics_line
    within = False
    while text := stream.readline(LINE_BYTES + 1):
        rest, within = within, not text.endswith(b"\n")
        if rest or (within and len(text) > LINE_BYTES):
            continue
        try:
            line = parse_untrusted_json(text)
            check(line)
        except ValueError:
            continue
        yield line


def merge_jsonl_lines(lines: Iterable[Line], more: Iterable[Line] = ()) -> list[Line]:
    """`lines` and `more` without repetitions. Metrics: in the order of steps, and of two lines of one step the last. Events: as
    they come, or in the order of time if `more` has some that `lines` has not."""
    lines, more = list(lines), list(more)
    if any("kind" in line for line in (*lines, *more)):
        there = {json.dumps(line) for line in lines}
        lacking = [line for line in more if json.dumps(line) not in there]
        return sorted([*lines, *lacking], key=jsonl_line_sort_key) if lacking else lines
    found = {jsonl_line_sort_key(line): line for line in (*lines, *more)}
    return [found[place] for place in sorted(found)]


def jsonl_line_sort_key(line: Line) -> tuple[float, bool]:
    """The sort key of a line: events by time, metrics by step, a validation after its step."""
    return (line.get("time", 0.0), False) if "kind" in line else (line["step"], "loss" not in line)
