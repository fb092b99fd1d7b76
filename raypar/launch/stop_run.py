"""Stops a run: here by a signal to the process that trains in its folder, on S3 by its lease, on clusters by the job server."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from raypar.errors import ClusterError, ConfigError
from raypar.files.find_writing_process import find_writing_process
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.launch.cluster_jobs import ClusterJob, parse_ray_job_record, read_log_facts
from raypar.launch.job_server import JobServer
from raypar.storage.held_lease import WRITE_ATTEMPTS
from raypar.storage.run_folder import RunFolder
from raypar.storage.run_lease import RENEW_S, FoundLease, is_held
from raypar.storage.s3_lease_store import s3_lease_store
from raypar.storage.storage_uri import StorageUri

if TYPE_CHECKING:
    from raypar.storage.run_lease import LeaseStore

T = TypeVar("T")


class WaitTimes(NamedTuple):
    """How often a wait for the end of a run looks at it and speaks."""

    poll_s: float
    """Time from one look to the next."""
    say_s: float
    """Time from one line to the next."""


LOCAL, STORAGE, JOB = WaitTimes(0.2, 2.0), WaitTimes(1.0, 5.0), WaitTimes(0.3, 2.0)
"""For a run of this machine, whose lock is looked at; on storage, whose lease is read; for a submitted job."""


def stop_local_run(folder: RunFolder, wait_s: float, say: Callable[[str], None]) -> bool:
    """Stop the run as Ctrl-C does, and wait until its process has let the folder go. Returns False if none trains in it.

    Raises `ConfigError` if the process belongs to somebody else or to another machine, `ClusterError` after `wait_s`.
    """
    if not folder.is_locked():
        return False
    pid = find_writing_process(folder.job)
    if pid is None:
        raise ConfigError(
            f"a process trains in {folder.path}, but it is not one of yours on this machine",
            cure="stop it where it was started (Ctrl-C, or SIGTERM), a submitted job by `raypar stop JOB --address URL`",
        )
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return True
    except PermissionError:
        raise ConfigError(
            f"process {pid}, which trains in {folder.path}, belongs to somebody else", cure="ask who started it"
        ) from None

    def late(_: bool) -> ClusterError:
        return ClusterError(
            f"run {folder.name} (process {pid}) was asked to save and end, and has not within {wait_s:.0f} s",
            cure=f"`raypar status {folder.path}` says what it does; the same command again ends it at once, without saving",
        )

    _wait_for_end(f"run {folder.name} (process {pid})", folder.is_locked, lambda locked: not locked, late, wait_s, LOCAL, say)
    return True


def stop_run_on_storage(uri: StorageUri, wait_s: float, say: Callable[[str], None]) -> bool:
    """Stop the run as Ctrl-C does, and wait until its process has given the lease back. Returns False if no process trains it.

    Raises `ConfigError` for storage other than S3, `ClusterError` if the storage does not answer or the run goes on after
    `wait_s`.
    """
    store = s3_lease_store(uri)
    if store is None:
        raise ConfigError(
            f"raypar stop reaches a run on storage through its lease, which only S3 has: {uri}",
            cure="stop it where it was started (Ctrl-C, or SIGTERM), a submitted job by `raypar stop JOB --address URL`",
        )
    held = request_stop(store, uri)
    if held is None:
        return False
    say(f"asked {shorten(held.lease.holder)} to save and end; it reads the request within {RENEW_S:.0f} s")

    def is_over(found: FoundLease | None) -> bool:
        return found is None or not is_held(found) or found.lease.owner != held.lease.owner

    def late(_: FoundLease | None) -> ClusterError:
        return ClusterError(
            f"run {uri.name} ({shorten(held.lease.holder)}) was asked to save and end, and has not ended within {wait_s:.0f} s",
            cure=f"`raypar status {shlex.quote(str(uri))}` says what it does; a second Ctrl-C where it was started ends it at "
            "once, without saving",
        )

    _wait_for_end(f"run {uri.name}", store.read, is_over, late, wait_s, STORAGE, say)
    return True


def request_stop(store: LeaseStore, uri: StorageUri) -> FoundLease | None:
    """Mark the lease so that its owner stops. Returns the lease as it was found; None if no process holds it.

    Raises `ClusterError` if the storage does not answer.
    """
    for _ in range(WRITE_ATTEMPTS):
        found = store.read()
        if found is None or not is_held(found):
            return None
        if found.lease.stop_requested or store.put(replace(found.lease, stop_requested=True), found.version) is not None:
            return found
    raise ClusterError(
        f"the lease of {uri} changed at each of {WRITE_ATTEMPTS} attempts to ask the run to stop",
        cure="run the same command again",
    )


def stop_cluster_job(server: JobServer, job: ClusterJob, wait_s: float, say: Callable[[str], None]) -> dict[str, Json]:
    """Stop a submitted job; returns what it has come to, with a `text` for people. Raises `ClusterError` after `wait_s`.

    `say` gets lines about the wait.
    """
    stopped = not job.over
    if stopped:
        server.stop(job.submission_id)
        job = wait_for_job_end(server, job.submission_id, wait_s, say)
    said = read_log_facts(server.log(job.submission_id))
    name = f"job {job.submission_id}" + f" ({said.run or job.name})" * bool(said.run or job.name)
    if not stopped:
        text = f"{name} had ended already: {job.state}"
    elif job.state == "stopped":
        text = f"{name} has stopped\n{said.end}" if said.end else f"{name} was stopped before it had saved anything new"
        text += "\nnext: submit the same job again, and it goes on from its last checkpoint" * bool(said.end)
    else:
        text = f"{name} ended by itself meanwhile: {job.state}"
    return {
        "name": said.run or job.name,
        "submission_id": job.submission_id,
        "state": job.state,
        "stopped": stopped and job.state == "stopped",
        "step": said.step,
        "steps": said.steps,
        "saved": said.end,
        "text": text,
    }


def wait_for_job_end(server: JobServer, submission_id: str, wait_s: float, say: Callable[[str], None]) -> ClusterJob:
    """The job, once it has ended after it was asked to stop. Raises `ClusterError` after `wait_s`."""

    def late(job: ClusterJob) -> ClusterError:
        return ClusterError(
            f"job {submission_id} was asked to save and end, and is still {job.state} after {wait_s:.0f} s",
            cure=f"`raypar logs {submission_id}` says what it does; Ray kills it after RAY_JOB_STOP_WAIT_TIME_S, which "
            "`raypar submit` sets to 120 unless you have set another",
        )

    def look() -> ClusterJob:
        return parse_ray_job_record(server.job(submission_id))

    return _wait_for_end(f"job {submission_id}", look, lambda job: job.over, late, wait_s, JOB, say)


def _wait_for_end(
    what: str,
    look: Callable[[], T],
    is_over: Callable[[T], bool],
    late: Callable[[T], ClusterError],
    wait_s: float,
    times: WaitTimes,
    say: Callable[[str], None],
) -> T:
    """What `look` finds of a run that was asked to stop, once it has ended. Raises what `late` makes of it after `wait_s`."""
    began_s = told_s = time.monotonic()
    while not is_over(found := look()):
        now_s = time.monotonic()
        if now_s - began_s > wait_s:
            raise late(found)
        if now_s - told_s >= times.say_s:
            told_s = now_s
            say(f"waiting for {what} to finish its step and save, for {now_s - began_s:.0f} s so far")
        time.sleep(times.poll_s)
    return found
