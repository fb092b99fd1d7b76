"""The folder of one run, `run_dir/NAME/`: where its files lie, and how it is made, found and locked.

A run on shared storage (`run_dir: s3://...`) has a working folder on this machine while it trains. Commands that read it copy
its small files, not its checkpoints, into a temporary folder.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from raypar.errors import ConfigError
from raypar.files.atomic_write import DISK_FULL_ERRNOS, explain_write_errors, regular_file_opener, replace_file_atomically
from raypar.files.find_writing_process import describe_process, find_writing_process
from raypar.files.json_type import Json
from raypar.files.os_error_cure import cure_of_os_error
from raypar.files.printable_text import printable_text, shorten
from raypar.files.untrusted_files import (
    JsonTooDeep,
    describe_special_file,
    explain_read_errors,
    open_regular_file,
    parse_untrusted_json,
    read_limited_bytes,
    read_limited_text,
)
from raypar.record.document_fields import check_document
from raypar.record.events import Event
from raypar.record.fold import timeline
from raypar.record.folder import (
    CHECKPOINTS,
    CLUSTER,
    CURSORS,
    DOCUMENTS,
    EVENTS,
    JOB,
    LINE_FILES,
    MEMBERS,
    METRICS,
    PLAN,
    RECORD_FILES,
    SAMPLES,
    SWIMLANE,
    TOTALS,
    TRACE,
    WHY_NO_JOB,
)
from raypar.storage.checkpoint_store import STORES, open_checkpoint_store, storage_scheme, unknown_storage_error
from raypar.storage.read_run_lines import FILE_BYTES, Line, merge_jsonl_lines, merge_metrics, read_events, read_valid_lines
from raypar.storage.storage_uri import SCHEMES, StorageUri, local_path_of_file_uri, parse_storage_uri
from raypar.storage.stored_file_layout import TEMPORARY_FOLDER_PREFIX

WHY_BYTES = 64 << 10
"""Size limit of why_no_job.txt."""
FILES = (*DOCUMENTS, *LINE_FILES, *RECORD_FILES, "plan.new", "members.new")
"""Names of the files that a run reads and writes directly in its folder."""
DOCUMENT_BYTES = 16 << 20
"""Size limit of plan.json, members.json, cluster.json and totals.json: enough for tens of thousands of workers."""


_Read = TypeVar("_Read")


class NoSuchRun(ConfigError):
    """No run has the name or the path, or there is none at all."""


def check_local_path(given: str | os.PathLike[str], what: str) -> Path:
    """`given` as a path, with `~` as the home folder. Raises `ConfigError` for a URI: as a path it would name a folder on this
    machine's disk.

    `what`: the argument or key that gave it.
    """
    if (local := local_path_of_file_uri(os.fspath(given), what)) is not None:
        return local
    if scheme := storage_scheme(given):
        if scheme not in STORES:
            raise unknown_storage_error(given, what)
        raise ConfigError(
            f"{what} is {shorten(parse_storage_uri(os.fspath(given), what))}: here only a folder of this machine will do",
            cure="give the path of a folder",
        )
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{what} is {shorten(given)}: {error}", cure="give the whole path of the folder") from None


def unwritable_run_dir_error(folder: Path, error: OSError) -> ConfigError:
    """The error for a run folder that cannot be made."""
    cure = "free disk space, or set run_dir to" if error.errno in DISK_FULL_ERRNOS else "set run_dir to"
    return ConfigError(
        f"cannot make a run folder {folder}: {error.strerror or error}",
        cure=cure_of_os_error(error, f"{cure} a folder you may write"),
    )


def check_run_dir_is_writable(run_dir: str | os.PathLike[str], name: str) -> None:
    """Make and remove an empty folder where the folder of a run `name` would be made. Raises `ConfigError` if that fails.

    Before a run, because its folder is made only once its model is checked and a cluster is there.
    """
    root = check_local_path(run_dir, "run_dir").absolute()
    nearest = next(folder for folder in (root, *root.parents) if os.path.lexists(folder))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=TEMPORARY_FOLDER_PREFIX, dir=nearest))
    except OSError as error:
        raise unwritable_run_dir_error(root / name, error) from error


def parse_storage_location(given: str | os.PathLike[str], what: str) -> StorageUri | None:
    """The place on shared storage that `given` names. None for a path, a `file://` URI, and storage for checkpoints only.

    Raises `ConfigError` for a URI of an unknown storage, and for a URI that contains credentials.
    """
    scheme = storage_scheme(given)
    if not scheme or scheme.lower() == "file":
        return None
    if scheme not in STORES:
        raise unknown_storage_error(given, what)
    return parse_storage_uri(os.fspath(given), what) if scheme in SCHEMES else None


def resume_argument(path: str | os.PathLike[str]) -> str:
    """The argument that names a run in commands: its name if it is under runs/, else its path, or its URI (quoted)."""
    if parse_storage_location(path, "the run") is not None:
        return shlex.quote(os.fspath(path))
    found = Path(path)
    return found.name if found.parent == Path("runs") else os.fspath(path)


def run_without_job_error(
    folder: RunFolder, *, cure: str = "", missing: str = "", later: str = "for a run that commands can resume"
) -> ConfigError:
    """The error for a run without job.yaml; it names the objects that are to blame.

    `cure`: what to do with this run, by default to go on from Python; `missing`: what job.yaml would have said; `later`: for
    which other runs the objects have to be put elsewhere.
    """
    why, named = _why_run_has_no_job(folder)
    now = cure or f"go on from Python, with the same arguments: Trainer(..., resume_from_checkpoint={folder.place!r}).fit()"
    return ConfigError(
        f"run {folder.place} has no job.yaml{missing and f', {missing}'}: {why}",
        cure=f"{now}; {later}, {named}" if named else now,
    )


def _why_run_has_no_job(folder: RunFolder) -> tuple[str, str]:
    """Why a run has no job.yaml, and what gives the next run one; the latter is empty if the run does not say why."""
    with contextlib.suppress(ConfigError):  # there is no such file
        if why := printable_text(read_limited_text(folder.why_no_job, follow=False, limit=WHY_BYTES)).strip():
            return why, "put what is named here into a module of its own, which the script imports"
    return "raypar.Trainer made it, from functions without names, or it was removed", ""


@dataclass(frozen=True)
class SharedStoragePlace:
    """A run's place on shared storage, and the lease under which this process writes there."""

    uri: StorageUri
    """The run's place."""
    owner: str = ""
    """Id of the lease's owner; empty for a process that only reads."""
    lease_in_ray: bool = False
    """Whether the lease is in the cluster's key-value store: the storage has no conditional writes that raypar knows."""


@dataclass(frozen=True)
class RunFolder:
    """One run's folder: paths of its files. Only `create` makes a folder on disk."""

    path: Path
    """The folder; of a run on shared storage its working folder, or a copy of its small files."""
    shared: SharedStoragePlace | None = None
    """The run's place on shared storage; None for a run in a folder."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def place(self) -> str:
        """The folder's path, or the URI of a run on shared storage: for messages, and as an argument of commands."""
        return str(self.path) if self.shared is None else str(self.shared.uri)

    def place_of(self, path: Path) -> str:
        """The path of one of the run's files, or its URI on shared storage, for messages."""
        return str(path) if self.shared is None else str(self.shared.uri.child(path.name))

    @property
    def job(self) -> Path:
        """The job with its overrides and defaults written out; loads like any job file."""
        return self.path / JOB

    @property
    def why_no_job(self) -> Path:
        """Why the run has no job file, in words (`record.folder.WHY_NO_JOB`)."""
        return self.path / WHY_NO_JOB

    @property
    def plan(self) -> Path:
        """The plan of the last start, as JSON."""
        return self.path / PLAN

    @property
    def metrics(self) -> Path:
        """One JSON line per committed step or validation."""
        return self.path / METRICS

    @property
    def events(self) -> Path:
        """One JSON line per event of the cluster or the run."""
        return self.path / EVENTS

    @property
    def members(self) -> Path:
        """Phase, plan and workers right now, as JSON; replaced as a whole at every change."""
        return self.path / MEMBERS

    @property
    def cluster(self) -> Path:
        """Address of the last start's Ray cluster, and the raylets of a local one, as JSON."""
        return self.path / CLUSTER

    @property
    def totals(self) -> Path:
        """What the run has done since its first start (`record.totals`), as JSON; replaced as a whole."""
        return self.path / TOTALS

    @property
    def samples(self) -> Path:
        """Digests of the samples of iterable data by step, in bytes (`actors.stream_digest_journal`)."""
        return self.path / SAMPLES

    @property
    def cursors(self) -> Path:
        """From where streams of iterable data can be read on, as JSON; replaced as a whole."""
        return self.path / CURSORS

    @property
    def trace(self) -> Path:
        """Chrome/Perfetto trace of a measured step."""
        return self.path / TRACE

    @property
    def swimlane(self) -> Path:
        """Drawing of the predicted and the measured step."""
        return self.path / SWIMLANE

    @property
    def checkpoints(self) -> Path:
        """Holds `step_00000050/`, ..."""
        return self.path / CHECKPOINTS

    @property
    def checkpoint_store_location(self) -> str:
        """The location of the run's checkpoints, for `open_checkpoint_store`; a relative path may look like a URL (`ab:/r`)."""
        if self.shared is not None:
            return str(self.shared.uri.child(CHECKPOINTS))
        text = str(self.checkpoints)
        return os.path.abspath(text) if storage_scheme(text) else text

    def list_checkpoints(self) -> list[str]:
        """The names of the run's checkpoints, whole or not, by step. Raises `CheckpointError` if they cannot be listed."""
        return sorted(
            name for name in open_checkpoint_store(self.checkpoint_store_location).names() if name.startswith("step_")
        )

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
                    (path / CHECKPOINTS).mkdir()
                except OSError:
                    path.rmdir()
                    raise
                return RunFolder(path)
        except OSError as error:
            raise unwritable_run_dir_error(root / name, error) from error

    @contextlib.contextmanager
    def removed_if_filling_fails(self) -> Iterator[None]:
        """Run the body, which fills this new folder; remove the folder if that fails. Raises `ConfigError` for an `OSError`."""
        try:
            with explain_write_errors(self.path):
                yield
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    @staticmethod
    def find(run: str | Path, run_dir: str | Path = "runs/", *, with_job: bool = True) -> RunFolder:
        """The folder of a run, by its path or by its name under `run_dir`. Raises `ConfigError`, which names the existing runs.

        `with_job`: whether the run must have a job.yaml.
        """
        for path in (check_local_path(run, "the run"), check_local_path(run_dir, "--run-dir") / run):
            with explain_read_errors(path):
                has_job = (path / JOB).is_file()
                is_run = has_job or (path / CHECKPOINTS).is_dir()
            if is_run:
                RunFolder(path).refuse_special_files()
                if with_job and not has_job:
                    raise run_without_job_error(RunFolder(path))
                return RunFolder(path)
        root = Path(run_dir)
        there = sorted({p.parent.name for mark in ("job.yaml", "checkpoints") for p in root.glob(f"*/{mark}")})
        near = difflib.get_close_matches(str(run), there, n=1, cutoff=0.5)
        raise NoSuchRun(
            f"no run {str(run)!r}, neither as a path nor under {root}",
            cure=(f"did you mean {near[0]}? " if near else "")
            + (
                f"runs under {root}: {', '.join(there[-10:])}"
                if there
                else f"no run lies under {root}: give the path of the run's folder, or --run-dir with the folder of your runs"
            ),
        )

    @staticmethod
    @contextlib.contextmanager
    def open_for_reading(
        run: str | Path | None, run_dir: str | Path = "runs/", *, with_job: bool = True, last_bytes: int | None = None
    ) -> Iterator[RunFolder]:
        """Gives the block the folder of a run for reading: as `find`, or `latest` if `run` is None. Both may be URIs.

        For a run on shared storage the folder is a copy of its small files, which is removed at the end of the block.
        `last_bytes`: copy only the last lines of metrics and events, of at least so many bytes. Raises `ConfigError`.
        """
        uri = None if run is None else parse_storage_location(run, "the run")
        below = parse_storage_location(run_dir, "--run-dir") if uri is None else None
        if uri is None and below is None:
            yield RunFolder.latest(run_dir) if run is None else RunFolder.find(run, run_dir, with_job=with_job)
            return
        from raypar.storage.folder_download import RUNS_CURE, download_run
        from raypar.storage.list_and_remove_runs import has_run, list_runs_below

        if uri is None and run is None and below is not None:
            there = list_runs_below(below)
            if not there:
                raise ConfigError(f"no run lies under {below}", cure=RUNS_CURE)
            uri = there[-1][0]
        elif uri is None and below is not None:
            uri = parse_storage_uri(str(below.child(str(run))), "the run")
        assert uri is not None
        if not has_run(uri):
            raise ConfigError(f"no run lies at {uri}", cure=RUNS_CURE)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_FOLDER_PREFIX, ignore_cleanup_errors=True) as room:
            folder = RunFolder(Path(room) / uri.name, SharedStoragePlace(uri))
            folder.path.mkdir()
            download_run(uri, folder.path, last_bytes=last_bytes)
            if with_job and not folder.job.is_file():
                raise run_without_job_error(folder)
            yield folder

    @staticmethod
    def latest(run_dir: str | Path = "runs/") -> RunFolder:
        """The run under `run_dir` that was started or resumed last. Raises `ConfigError` when there is none."""
        root = check_local_path(run_dir, "--run-dir")
        with explain_read_errors(root):
            runs = list(root.iterdir()) if root.is_dir() else []
            records = [run / CLUSTER for run in runs if run.is_dir()]
            started = sorted((path for path in records if path.exists()), key=lambda path: path.lstat().st_mtime)
        if not started:
            raise NoSuchRun(
                f"no run lies under {run_dir}",
                cure="give the path of the run's folder, or --run-dir with the folder of your runs",
            )
        found = RunFolder(started[-1].parent)
        found.refuse_special_files()
        return found

    def refuse_special_files(self) -> None:
        """Raise `ConfigError` if one of the run's files is not a regular file: a link leads elsewhere, and a FIFO blocks."""
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

    def is_locked(self) -> bool:
        """Whether another process holds this folder's lock: it trains here."""
        try:
            with open_regular_file(self.job, follow=False) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (OSError, ConfigError):
            return False
        return False

    @contextlib.contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold this folder's lock during the body, so that no other process of this machine trains in the folder.

        Two runs would write into each other's files. The system releases the lock however this process ends. On a file system
        without locks there is none. Raises `ConfigError` if another process has the lock, and says which one.
        """
        with contextlib.ExitStack() as stack:
            with explain_write_errors(self.job, cure="make the run folder writable, or resume a copy of it"):
                file = stack.enter_context(open(self.job, "a", opener=regular_file_opener))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                pid = find_writing_process(self.job)
                who = describe_process(pid) if pid is not None else "another process"
                raise ConfigError(
                    f"run {self.name} is under way: {who} trains in {self.path}",
                    cure=f"wait for its end, or `raypar stop {self.path}` lets it save and end, after which the same command "
                    f"goes on from there; `raypar status {self.path}` says how it gets on",
                ) from error
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
            yield

    def read_documents_of_start(self) -> dict[Path, bytes]:
        """Path -> content, of the files that the process which starts a run writes once: the job, its plan, its cluster."""
        found = {}
        for path in (self.job, self.why_no_job, self.plan, self.cluster):
            with contextlib.suppress(OSError):
                found[path] = path.read_bytes()
        return found

    def put_back(self, documents: Mapping[Path, bytes]) -> bool:
        """Write those of `documents` that are gone: the folder's disk was replaced, or somebody has removed them. Returns
        whether any was. Raises `OSError`."""
        gone = {path: content for path, content in documents.items() if not os.path.lexists(path)}
        for path, content in gone.items():
            replace_file_atomically(path, content)
        return bool(gone)

    def append_line(self, path: Path, facts: Mapping[str, Json]) -> None:
        """Append one JSON line to `metrics` or `events`."""
        with open(path, "a", encoding="utf-8", opener=regular_file_opener) as file:
            file.write(json.dumps(dict(facts)) + "\n")

    def read_lines(self, path: Path) -> Iterator[Line]:
        """The valid lines of `metrics` or `events`, each once; none if the file is missing or not a regular file.

        Raises `ConfigError` if the file cannot be read, or has more than `FILE_BYTES`.
        """
        yield from self._read(path, lambda file: merge_jsonl_lines(read_valid_lines(path.name, file)))

    def read_timeline(self) -> Iterator[Event]:
        """The events of `metrics` and `events` in the order of time. Raises `ConfigError` as `read_lines`."""
        metrics = self._read(self.metrics, lambda file: merge_metrics(read_events(self.metrics.name, file)))
        return timeline(metrics, self._read(self.events, lambda file: list(read_events(self.events.name, file))))

    def _read(self, path: Path, read: Callable[[BinaryIO], list[_Read]]) -> list[_Read]:
        """What `read` makes of a file; empty if it is missing or not a regular file. Raises `ConfigError` as `read_lines`."""
        try:
            if describe_special_file(path.lstat().st_mode) is not None:
                return []
        except OSError:
            return []
        cure = "make it readable, or move it away; checkpoints do not depend on it"
        with open_regular_file(path, follow=False, cure=cure) as file:
            size = os.fstat(file.fileno()).st_size
            if size > FILE_BYTES:
                raise ConfigError(f"{shorten(path)} has {size:,} bytes, more than the {FILE_BYTES:,} that are read", cure=cure)
            try:
                return read(file)
            except OSError as error:
                raise ConfigError(f"cannot read {shorten(path)}: {error.strerror or error}", cure=cure) from error

    def rewrite_job(self, text: str) -> None:
        """Write job.yaml in place, because `hold_lock` locks this very file; restore the old text if that fails.

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
        """Write job.yaml. Raises `OSError`."""
        with open(self.job, "w", encoding="utf-8", opener=regular_file_opener) as file:
            file.write(text)

    def read_document(self, path: Path, *, damaged: bool = False) -> Any:
        """The content of `plan`, `members`, `cluster` (their types are in `record/document_fields.py`) or `totals`; None if the
        file is missing, or cut off.

        Raises `ConfigError` for a link or FIFO, for a file that is too long or too deep, and for content that raypar does not
        write. `damaged`: return None for such content instead.
        """
        if not os.path.lexists(path):
            return None
        cure = "remove it; checkpoints do not depend on it"
        try:
            found = parse_untrusted_json(read_limited_bytes(path, follow=False, limit=DOCUMENT_BYTES, cure=cure))
            check_document(path.name, found)
        except (json.JSONDecodeError, UnicodeDecodeError):
            return None
        except ValueError as error:
            if damaged and not isinstance(error, JsonTooDeep):
                return None
            raise ConfigError(f"{shorten(path)} is not one of raypar's: {shorten(str(error), 400)}", cure=cure) from error
        return dict(found)
