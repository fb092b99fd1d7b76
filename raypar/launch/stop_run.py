"""Stops a run: here by a signal to the process that trains in its folder, on S3 by its lease, on clusters by the job server."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from raypar.errors import ClusterError, ConfigError
from raypar.files.find_writing_process import find_writing_process
from raypar.files.json_values import Json
from raypar.files.untrusted_files import shorten
from raypar.launch.cluster_jobs import ClusterJob, parse_ray_job_record, read_log_facts
from raypar.launch.job_server import JobServer
from raypar.storage.held_lease import WRITE_ATTEMPTS
from raypar.storage.run_folder import RunFolder
from raypar.storage.run_lease import RENEW_S, FoundLease, is_held
from raypar.storage.s3_lease_store import s3_lease_store
from raypar.storage.storage_uri import StorageUri

if TYPE_CHECKING:
    from raypar.storage.run_lease import LeaseStore

POLL_LOCAL_S = 0.2
"""How often the run's lock is looked at."""
SAY_LOCAL_S = 2.0
"""Time between two lines about the wait for a run of this machine."""
POLL_STORAGE_S = 1.0
"""Time between two reads of the lease."""
SAY_STORAGE_S = 5.0
"""Time between two lines about the wait for a run on storage."""
POLL_JOB_S, SAY_JOB_S = 0.3, 2.0
"""How often a submitted job that was asked to stop is looked at, and how often a line says so."""


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
    began_s = told_s = time.monotonic()
    while folder.is_locked():
        now = time.monotonic()
        if now - began_s > wait_s:
            raise ClusterError(
                f"run {folder.name} (process {pid}) was asked to save and end, and has not within {wait_s:.0f} s",
                cure=f"`raypar status {folder.path}` says what it does; the same command again ends it at once, without saving",
            )
        if now - told_s >= SAY_LOCAL_S:
            told_s = now
            say(f"waiting for run {folder.name} (process {pid}) to finish its step and save, for {now - began_s:.0f} s so far")
        time.sleep(POLL_LOCAL_S)
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
    began_s = told_s = time.monotonic()
    while (found := store.read()) is not None and is_held(found) and found.lease.owner == held.lease.owner:
        now_s = time.monotonic()
        if now_s - began_s > wait_s:
            raise ClusterError(
                f"run {uri.name} ({shorten(found.lease.holder)}) was asked to save and end, and has not ended within "
                f"{wait_s:.0f} s",
                cure=f"`raypar status {shlex.quote(str(uri))}` says what it does; a second Ctrl-C where it was started ends it "
                "at once, without saving",
            )
        if now_s - told_s >= SAY_STORAGE_S:
            told_s = now_s
            say(f"waiting for run {uri.name} to finish its step and save, for {now_s - began_s:.0f} s so far")
        time.sleep(POLL_STORAGE_S)
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
    began_s = told_s = time.monotonic()
    while True:
        job = parse_ray_job_record(server.job(submission_id))
        waited_s = time.monotonic() - began_s
        if job.over:
            return job
        if waited_s > wait_s:
            raise ClusterError(
                f"job {submission_id} was asked to save and end, and is still {job.state} after {wait_s:.0f} s",
                cure=f"`raypar logs {submission_id}` says what it does; Ray kills it after RAY_JOB_STOP_WAIT_TIME_S, which "
                "`raypar submit` sets to 120 unless you have set another",
            )
        if time.monotonic() - told_s >= SAY_JOB_S:
            told_s = time.monotonic()
            say(f"waiting for job {submission_id} to finish its step and save, for {waited_s:.0f} s so far")
        time.sleep(POLL_JOB_S)
