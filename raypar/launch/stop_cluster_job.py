"""Stops a job of a cluster's job server: asks it to save and end, and waits for its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from raypar.errors import ClusterError
from raypar.launch.cluster_jobs import ClusterJob, parse_ray_job_record, read_log_facts
from raypar.launch.job_server import JobServer

STOP_POLL_S, STOP_SAY_S = 0.3, 2.0
"""How often a job that was asked to stop is looked at, and how often a line says so."""


def stop_cluster_job(server: JobServer, job: ClusterJob, wait_s: float, say: Callable[[str], None]) -> dict[str, Any]:
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
        if time.monotonic() - told_s >= STOP_SAY_S:
            told_s = time.monotonic()
            say(f"waiting for job {submission_id} to finish its step and save, for {waited_s:.0f} s so far")
        time.sleep(STOP_POLL_S)
