"""Finds the cluster's job that a user names: by a submission id, a run's name as `raypar runs` shows it, or a job's name.

Only a job's log says how its run is called. Logs are read one by one, and only those of jobs that the name may mean.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raypar.errors import ClusterError, ConfigError, RayparError
from raypar.launch.cluster_jobs import ClusterJob, LogFacts, describe_failure, parse_ray_job_record, read_log_facts
from raypar.launch.job_server import JobServer, connect_job_server, find_server_address
from raypar.storage.checkpoint_store import storage_scheme
from raypar.storage.run_folder import NoSuchRun, RunFolder

READ_LOGS_S = 60.0
"""How long reading the logs of all jobs that are listed, or that a name may mean, may take."""
ACTIVE_STATES = ("running", "starting", "waiting", "pending")
"""States of jobs that have not ended. Of several jobs with the same name, the one whose state comes first here is meant."""


class NoSuchClusterJob(ConfigError):
    """The job server knows no job or run of this name."""


class OtherJobIsActive(RayparError):
    """The run that a user names has ended, and another job of this name has not."""


@dataclass(frozen=True)
class JobWithLog:
    """A job, and what its log says of its run."""

    job: ClusterJob
    """The job."""
    log: LogFacts
    """What its log says; empty if it has no log, or if its node is gone."""

    @property
    def name(self) -> str | None:
        """The name in the table of `raypar runs`: the run's, or the job's until there is a run."""
        return self.log.run or self.job.name

    @property
    def state(self) -> str:
        """The state in the table of `raypar runs`: the job's, but `starting` or `waiting` if a running job's log says so."""
        if self.job.state != "running":
            return self.job.state
        return "waiting" if self.log.waiting is not None else "starting" if self.log.step is None else "running"

    def facts(self) -> dict[str, Any]:
        """The job as fields of a row of `raypar runs`."""
        said = self.log
        if self.state == "waiting":
            why = said.waiting or ""
        else:
            why = describe_failure(self.job, said) if self.state == "failed" else said.end or self.job.message
        return {
            "name": self.name,
            "state": self.state,
            "step": said.step,
            "steps": said.steps,
            "loss": said.loss,
            "started_s": self.job.started_s,
            "updated_s": self.job.ended_s,
            "why": why,
            "submission_id": self.job.submission_id,
        }

    def describe(self) -> str:
        """The job in messages: `job raysubmit_1 (run text-2, running)`."""
        run = f"run {self.log.run}" if self.log.run else "no run yet"
        return f"job {self.job.submission_id} ({run}, {self.state})"


@dataclass(frozen=True)
class MatchedJob:
    """The job that a name means, and the others that it may mean."""

    found: JobWithLog
    """The job."""
    others: tuple[JobWithLog, ...] = ()
    """Other jobs that have not ended and have this name, or whose run has it."""


def read_job_with_log(server: JobServer, job: ClusterJob) -> JobWithLog:
    """The job, with what its log says. A log that cannot be read counts as empty."""
    log = LogFacts()
    if job.state != "pending":
        with contextlib.suppress(ClusterError):  # its node is gone
            log = read_log_facts(server.log(job.submission_id))
    return JobWithLog(job, log)


def list_cluster_jobs(server: JobServer, last: int) -> list[JobWithLog]:
    """The `last` jobs that were submitted last (0: all), in that order.

    Logs are read for `READ_LOGS_S` at most, the newest first; those that are not read count as empty.
    """
    jobs = sorted(map(parse_ray_job_record, server.jobs()), key=lambda job: job.started_s or 0.0)[-last or None :]
    until_s = time.monotonic() + READ_LOGS_S
    newest_first = [
        read_job_with_log(server, job) if time.monotonic() < until_s else JobWithLog(job, LogFacts()) for job in reversed(jobs)
    ]
    return newest_first[::-1]


def find_server_of_run(run: str, run_dir: str | None, address: str | None) -> str | None:
    """The address of the job server that knows RUN of logs and stop; None if RUN names a run folder or a place on storage.

    It does if --run-dir is given, if RUN has a slash and is a folder of this machine, or if RUN is a URI and no --address is
    given; a cluster in the environment is then ignored.
    """
    is_folder = run_dir is not None or (os.sep in run and os.path.isdir(os.path.expanduser(run)))
    return None if is_folder or (address is None and storage_scheme(run)) else find_server_address(address)


def find_cluster_job(server: JobServer, given: str) -> MatchedJob:
    """The cluster's job that the name `given` means. Raises `ConfigError` with the nearest names if there is none."""
    until_s = time.monotonic() + READ_LOGS_S

    def read(job: ClusterJob) -> JobWithLog:
        if time.monotonic() > until_s:
            raise ClusterError(
                f"the logs of the jobs at {server.name} that {given!r} may mean could not be read within {READ_LOGS_S:.0f} s",
                cure="give the job's submission id, which `raypar runs` shows in its first column",
            )
        return read_job_with_log(server, job)

    try:
        return match_job(given, [*map(parse_ray_job_record, server.jobs())], server.name, read)
    except NoSuchClusterJob as error:
        here = os.path.join("runs", given)
        advice = (
            f"{here} is a run of this machine: give that path"
            if given and any(os.path.exists(os.path.join(here, mark)) for mark in ("job.yaml", "checkpoints"))
            else "for a run of this machine give its path"
        )
        raise NoSuchClusterJob(error.what, cure=f"{error.cure}; {advice}, or --run-dir with the folder of its runs") from None


@contextlib.contextmanager
def open_run_folder(run: str | None, run_dir: str) -> Iterator[RunFolder]:
    """Gives the block the folder of a run for reading (`RunFolder.open_for_reading`), for commands that ask no cluster.

    Raises `NoSuchRun`. If `RAY_API_SERVER_ADDRESS` is set and the cluster has a job of that name, the error says where the run
    folder of that job is.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(RunFolder.open_for_reading(run, run_dir, with_job=False))
        except NoSuchRun as error:
            address = find_server_address(None)
            if address is None:
                raise
            raise _no_such_run_here(error, run, address) from None
        yield folder


def _no_such_run_here(error: NoSuchRun, run: str | None, address: str) -> NoSuchRun:
    """The error for a name that no run folder of this machine has, with what the job server at `address` knows of it."""
    from_here = f"`raypar runs` and `raypar logs {run or 'NAME'}` show a cluster's job from here"
    try:
        if run is None:
            raise error
        found = find_cluster_job(connect_job_server(address), run).found
    except RayparError:  # the job server does not answer, or knows no such job
        folder = "status, top and report read run folders; the log of a cluster's job says where its run folder is"
        return NoSuchRun(error.what, cure=f"{error.cure}; {folder}; {from_here}")
    job = f"job {found.job.submission_id} of the cluster"
    if found.log.folder is None:
        return NoSuchRun(f"{error.what}; {job} has no run folder yet", cure=from_here)
    place = shlex.quote(found.log.folder)
    here = "://" in place or os.path.isdir(found.log.folder)
    where = "" if here else " on the cluster's head (or wherever that folder is mounted)"
    return NoSuchRun(
        f"{error.what}; status, top and report read run folders, and that of {job} is {found.log.folder}{where}",
        cure=f"use the path there: `raypar status {place}`; {from_here}" if where else f"`raypar status {place}`; {from_here}",
    )


def match_job(given: str, jobs: Sequence[ClusterJob], server: str, read: Callable[[ClusterJob], JobWithLog]) -> MatchedJob:
    """The job that `given` means: by its submission id, else by its name in the table of `raypar runs`, else by the job's name.

    Of several jobs with the same name, those that have not ended come first, in the order of `ACTIVE_STATES`; among equal
    ones, the one that was submitted last. `read` returns a job with its log. Raises `ConfigError` with the nearest names.
    """
    by_id = next((job for job in jobs if job.submission_id == given), None)
    if by_id is not None:
        return MatchedJob(read(by_id))
    newest_first = sorted((job for job in jobs if may_have_name(job, given)), key=lambda job: -(job.started_s or 0.0))
    active = [read(job) for job in newest_first if not job.over]
    active.sort(key=lambda one: (one.log.run != given, ACTIVE_STATES.index(one.state)))
    by_shown_name = [one for one in active if one.name == given]
    by_job_name = [one for one in active if one.job.name == given and one.name != given]
    if by_shown_name:
        return MatchedJob(by_shown_name[0], tuple(by_shown_name[1:]))
    ended = [job for job in newest_first if job.over]
    for job in ended:
        if (one := read(job)).name == given:
            return MatchedJob(one, tuple(by_job_name))
    if by_job_name:
        return MatchedJob(by_job_name[0], tuple(by_job_name[1:]))
    for job in ended:
        if job.name == given:
            return MatchedJob(read(job))
    raise _no_such_job(given, jobs, server, [one for one in active if one.log.run])


def may_have_name(job: ClusterJob, given: str) -> bool:
    """Whether `given` may name the job or its run: the runs of a job NAME are called NAME, NAME-2, NAME-3, ..."""
    return job.name is None or re.fullmatch(rf"{re.escape(job.name)}(-\d+)?", given) is not None


def choose_job_to_stop(matched: MatchedJob, given: str) -> ClusterJob:
    """The job that `raypar stop` stops for the name `given`. Raises an error if the name may mean another active job."""
    found, others = matched.found, matched.others
    if not others:
        return found.job
    if not found.job.over:
        raise ConfigError(
            f"{len(others) + 1} jobs that have not ended are called {given!r}: "
            + ", ".join(one.describe() for one in (found, *others)),
            cure=f"nothing was stopped; say which one by its id: raypar stop {found.job.submission_id}",
        )
    raise OtherJobIsActive(
        f"run {given} had ended already ({found.describe()}), but another job of this name has not: "
        + ", ".join(one.describe() for one in others),
        cure=f"nothing was stopped; `raypar stop {others[0].job.submission_id}` stops that one",
    )


def _no_such_job(given: str, jobs: Sequence[ClusterJob], server: str, read: Sequence[JobWithLog]) -> NoSuchClusterJob:
    """The error for a name that no job has, with the nearest ones."""
    latest = sorted(jobs, key=lambda job: job.started_s or 0.0)[-10:]
    runs = [one.log.run for one in read]
    there = [*dict.fromkeys(name for job in latest for name in (job.name, job.submission_id) if name), *filter(None, runs)]
    there = [*dict.fromkeys(there)]
    near = difflib.get_close_matches(given, there, n=1, cutoff=0.5)
    return NoSuchClusterJob(
        f"no job {given!r} at {server}, neither as a submission id nor as the name of a run or a job",
        cure=(f"did you mean {near[0]}? " if near else "")
        + (f"the last jobs there: {', '.join(there)}" if there else "no job has been submitted there"),
    )
