"""Submits a job file to a cluster's job server: the command that runs there, the files that go along, and the submission."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import ClusterError, ConfigError, error_first_line
from raypar.files.json_type import Json
from raypar.files.printable_text import printable_text, shorten
from raypar.launch.cluster_jobs import NAME_KEY, ClusterJob
from raypar.launch.job_server import ADDRESS_VARIABLE, JobServer, NoSuchJob

if TYPE_CHECKING:
    from raypar.job import Job

EXCLUDES = ("runs/", ".git/", ".venv/")
"""What of the working directory is not sent, beside what its .gitignore and .rayignore name."""
IGNORE_GITIGNORE_VARIABLE = "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"
"""Environment variable that makes Ray ignore all .gitignore files, if it is 1."""
SUBMIT_S = 300.0
"""How long packing and sending the working directory may take."""
STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Environment variable that says how long Ray waits for a job that it has asked to stop, before it kills it."""
STOP_WAIT_S = 120
"""Its value for submitted jobs, unless the user sets another: Ray's own 3 s are too short to save a checkpoint."""


def make_entrypoint(job: str, working_dir: Path, overrides: Sequence[str], resume: bool | None) -> str:
    """The shell command that trains the job file `job` in a copy of `working_dir`. Raises `ConfigError`."""
    root = Path(os.path.abspath(working_dir))
    if not root.is_dir():
        raise ConfigError(f"--working-dir {working_dir} is no folder", cure="give the folder with the job's functions")
    path = Path(os.path.abspath(job))
    if not path.is_relative_to(root):
        raise ConfigError(
            f"the job file {job} is not in the working directory {root}, so the cluster would not get it",
            cure="run `raypar submit` in the folder with the job's functions, or give that folder as --working-dir",
        )
    words = ["python", "-m", "raypar", "train", str(path.relative_to(root))]
    words += [word for override in overrides for word in ("--set", override)]
    words += [] if resume is None else ["--resume" if resume else "--no-resume"]
    return shlex.join(words)


def make_runtime_env(working_dir: Path, environ: Mapping[str, str] = os.environ) -> dict[str, Json]:
    """The job's runtime environment: its files, and time to save when it is stopped. Raises `ConfigError`."""
    wait = environ.get(STOP_WAIT_VARIABLE, str(STOP_WAIT_S))
    if not wait.isdecimal():
        raise ConfigError(f"{STOP_WAIT_VARIABLE}={wait!r}", cure="give whole seconds, such as 120")
    return {"working_dir": os.path.abspath(working_dir), "excludes": list(EXCLUDES), "env_vars": {STOP_WAIT_VARIABLE: wait}}


def check_files_are_sent(job: Job, job_file: str, working_dir: Path) -> None:
    """Raise `ConfigError` for a file that the job names by a relative path, if it would not be sent to the cluster.

    These are the job file, `init_from` and `plan.schedule_file`. Absolute paths and URIs are read where the job runs.
    """
    root = Path(os.path.abspath(working_dir))
    named = {"the job file": os.path.relpath(job_file, root)}
    if job.init_from is not None:
        named["init_from"] = job.init_from.path
    if job.plan != "auto" and job.plan.schedule_file is not None:
        named["plan.schedule_file"] = job.plan.schedule_file
    for key, given in named.items():
        if os.path.isabs(given) or given.startswith("~") or "://" in given:
            continue
        path = Path(os.path.normpath(root / given))
        if not path.is_relative_to(root):
            raise ConfigError(
                f"{key} {shorten(given)} is not in the working directory {root}, so the cluster would not get it",
                cure="put it there, or give an absolute path or a URI that all nodes of the cluster reach",
            )
        for file in _files_at(path):
            if (why := find_excluding_rule(root, file)) is not None:
                raise _unsent_file_error(key, str(file.relative_to(root)), why)


def find_excluding_rule(root: Path, file: Path) -> str | None:
    """What keeps Ray from sending `file`: the path of an ignore file below `root`, or one of `EXCLUDES`; None if it is sent.

    As in Ray, the .gitignore and .rayignore of a folder count for everything below it. What one of these files excludes, no
    other one can include again.
    """
    inside = file.relative_to(root)
    for part in inside.parts:
        if f"{part}/" in EXCLUDES and root.joinpath(*inside.parts[: inside.parts.index(part) + 1]).is_dir():
            return f"{part}/"
    from raypar.ray_compat.job_submission import ignore_rules

    with_git = os.environ.get(IGNORE_GITIGNORE_VARIABLE, "0") != "1"
    rules: list[tuple[Path, Callable[[Path], bool]]] = []
    for place in (*reversed(file.parents), file):
        if not place.is_relative_to(root):
            continue
        try:
            with _quiet_ray_log():
                here = ignore_rules(place, with_git=with_git)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the .gitignore or .rayignore in {place} cannot be read: {error_first_line(error)}",
                cure="mend it, or remove it",
            ) from error
        if here is None:
            return None
        rules += [(place / name, matches) for name, matches in here]
        for source, matches in rules:
            if matches(place):
                return str(source.relative_to(root))
    return None


def _files_at(path: Path) -> Iterator[Path]:
    """The file at the path, or those that `init_from` reads of a folder: checkpoints of a run, a checkpoint, weights."""
    from raypar.worker.checkpoint.manifest import MANIFEST

    if path.is_file():
        yield path
    elif (path / MANIFEST).exists() or (path / "checkpoints").is_dir():
        below = path if (path / MANIFEST).exists() else path / "checkpoints"
        yield from sorted(file for file in below.rglob("*") if file.is_file())
    elif path.is_dir():
        yield from sorted(file for file in path.iterdir() if file.name.endswith((".safetensors", ".safetensors.index.json")))


def _unsent_file_error(key: str, file: str, why: str) -> ConfigError:
    """The error for a file that the job needs and that is not sent. `why`: see `find_excluding_rule`."""
    elsewhere = "give an absolute path or a URI that all nodes of the cluster reach"
    if why in EXCLUDES:
        return ConfigError(
            f"{key} needs {shorten(file)}, and `raypar submit` never sends {why}, so the cluster would not get it",
            cure=f"copy it to another folder of the working directory, or {elsewhere}",
        )
    instead = f", or set {IGNORE_GITIGNORE_VARIABLE}=1 (then only .rayignore counts)" * why.endswith(".gitignore")
    if key == "the job file":
        return ConfigError(
            f"the job file {shorten(file)} is not sent along, because {why} names it, so the cluster would not get it",
            cure=f"take it out of {why}{instead}",
        )
    return ConfigError(
        f"{key} needs {shorten(file)}, which is not sent along, because {why} names it, so the cluster would not get it",
        cure=f"take it out of {why}{instead}, or {elsewhere}",
    )


def same_name_warning(name: str, jobs: Sequence[ClusterJob]) -> str | None:
    """A warning, with its cure, about the last job of this name that has not ended; None if all have."""
    other = next((job for job in reversed(jobs) if job.name == name and not job.over), None)
    if other is None:
        return None
    return (
        f"warning: job {other.submission_id} of the same name ({name}) is {other.state}, and two jobs cannot train one run\n"
        f"  cure: `raypar stop {other.submission_id}` first, or give this one a name of its own (--set name=...)"
    )


def submit_job(
    server: JobServer, name: str, entrypoint: str, runtime_env: Mapping[str, Json], submission_id: str | None
) -> str:
    """Submit; returns the submission id.

    Raises `ClusterError` if Ray refuses, or after `SUBMIT_S`; `ConfigError` for an id that is taken, or without `ray[default]`.
    """
    found: list[str | Exception] = []

    def send() -> None:
        try:
            with _only_address(server.url), _quiet_ray_log():
                from ray.job_submission import JobSubmissionClient

                client = JobSubmissionClient(server.url, headers=dict(server.headers))
                found.append(
                    client.submit_job(
                        entrypoint=entrypoint,
                        submission_id=submission_id,
                        runtime_env=dict(runtime_env),
                        metadata={NAME_KEY: name},
                    )
                )
        except Exception as error:  # told by the waiting thread
            found.append(error)

    thread = threading.Thread(target=send, name="raypar-submit", daemon=True)  # Ray's client has no deadlines
    thread.start()
    thread.join(SUBMIT_S)
    if not found:
        raise ClusterError(
            f"{server.name} has not taken the job and its working directory within {SUBMIT_S:.0f} s",
            cure="look at the network and at the folder's size: .rayignore names what need not be sent",
        )
    if isinstance(found[0], Exception):
        raise submission_error(found[0], server, submission_id, Path(str(runtime_env["working_dir"]))) from found[0]
    return str(found[0])


def submission_error(error: Exception, server: JobServer, submission_id: str | None, working_dir: Path) -> Exception:
    """The error for what Ray's client has raised."""
    from raypar.ray_compat.job_submission import has_job_client, is_package_too_large, refused_status

    text = error_first_line(error)
    if isinstance(error, ImportError) or not has_job_client():
        return ConfigError(
            f"submitting needs Ray's job client, which is not installed here ({text})", cure="pip install 'raypar[jobs]'"
        )
    if submission_id is not None and refused_status(error) is not None and _has_job(server, submission_id):
        return ConfigError(
            f"a job {submission_id!r} has been submitted to {server.name} before",
            cure="choose another --submission-id, or leave it out",
        )
    if is_package_too_large(error):
        return ConfigError(
            f"the working directory is too large to be sent: {text.rstrip('.')}{describe_largest_files(working_dir)}",
            cure="name what the job does not need in a file .rayignore there (patterns as in .gitignore), or keep it elsewhere",
        )
    return ClusterError(f"{server.name} did not take the job: {text}", cure="the head's dashboard.log says more")


def _has_job(server: JobServer, submission_id: str) -> bool:
    """Whether the job server knows a job of this id; False where it does not answer."""
    try:
        return bool(server.job(submission_id))
    except (NoSuchJob, ClusterError):
        return False


def describe_largest_files(folder: Path) -> str:
    """`; its largest files are ...`: up to three files of a MiB or more in a folder; empty if there are none.

    Folders that are never sent (`EXCLUDES`) are left out; files that .gitignore or .rayignore name are not.
    """
    sizes: list[tuple[int, str]] = []
    for place, inside, files in os.walk(folder):
        inside[:] = [name for name in inside if f"{name}/" not in EXCLUDES]
        for name in files:
            with contextlib.suppress(OSError):
                path = Path(place, name)
                sizes.append((path.lstat().st_size, str(path.relative_to(folder))))
    large = [(size, name) for size, name in sorted(sizes, reverse=True)[:3] if size >= 2**20]
    named = ", ".join(f"{printable_text(name)} ({size / 2**20:,.0f} MiB)" for size, name in large)
    return f"; its largest files are {named}" if named else ""


@contextlib.contextmanager
def _quiet_ray_log() -> Iterator[None]:
    """Keep Ray from telling every file that it leaves out of the package; what goes wrong is raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # several of Ray's loggers have levels of their own
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _only_address(url: str) -> Iterator[None]:
    """Let Ray's client use `url`, though it would prefer the address in the environment."""
    before = os.environ.get(ADDRESS_VARIABLE)
    os.environ[ADDRESS_VARIABLE] = url
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(ADDRESS_VARIABLE, None)
        else:
            os.environ[ADDRESS_VARIABLE] = before
