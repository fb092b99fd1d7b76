"""Follows a submitted job: shows its log as it grows, until it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from raypar.errors import ClusterAddressError, ClusterError
from raypar.launch.cluster_jobs import ClusterJob, parse_ray_job_record
from raypar.launch.job_server import JobServer

POLL_S = 1.0
"""Shortest time between two looks at the log."""
DUTY = 10.0
"""A look may take a tenth of the time: the server sends the whole log, and a long one takes a while."""
AWAY_S = 60.0
"""How long the job server may be away while a job is followed."""
AWAY_SAY_S = 10.0
"""Time between two lines about a job server that does not answer."""
PENDING_SAY_S = 5.0
"""Time between two lines about a job that has not started."""


class JobFollower:
    """Follows one job until it has ended, through gaps of the job server."""

    def __init__(
        self,
        server: JobServer,
        submission_id: str,
        show: Callable[[str], None],
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.server = server
        """Where the job runs."""
        self.submission_id = submission_id
        """The job."""
        self.show = show
        """Gets what the job has printed, piece by piece."""
        self.say = say
        """Gets lines about what is waited for."""
        self.clock = clock
        """The clock."""
        self.sleep = sleep
        """Sleeps."""
        self.shown = 0
        """Number of characters of the log that have been shown."""
        self.away_since_s: float | None = None
        """Since when the job server has not answered; None while it does."""
        self.away_told_s = 0.0
        """When the last line told that the job server does not answer."""

    def follow(self, until_s: float | None = None) -> ClusterJob:
        """Show the log until the job has ended; returns the job. Raises `ClusterError` after `AWAY_S` without an answer.

        `until_s`: time of the clock at which to give up: then the job is returned as it is.
        """
        began_s = told_s = self.clock()
        while True:
            asked_s = self.clock()
            job = self._look()
            now = self.clock()
            if job is not None and (job.over or (until_s is not None and now >= until_s)):
                return job
            if job is not None and job.state == "pending" and now - told_s >= PENDING_SAY_S:
                told_s = now
                why = f" ({job.message})" if job.message else ""
                self.say(f"waiting for the cluster to start job {self.submission_id}{why}, for {now - began_s:.0f} s so far")
            self.sleep(max(POLL_S, DUTY * (now - asked_s)))

    def _look(self) -> ClusterJob | None:
        """Show what is new in the log. Returns the job; None while the server is away."""
        try:
            job = parse_ray_job_record(
                self.server.job(self.submission_id)
            )  # before the log: of a job that is over it is the whole one
            log = self.server.log(self.submission_id)
        except ClusterAddressError:
            raise
        except ClusterError as error:
            self._note_absence(error)
            return None
        self.away_since_s = None
        if len(log) < self.shown:  # another log, after the head was replaced
            self.shown = 0
        new, self.shown = log[self.shown :], len(log)
        if new:
            self.show(new)
        return job

    def _note_absence(self, error: ClusterError) -> None:
        """Say that the job server does not answer. Raises `ClusterError` after `AWAY_S`."""
        now = self.clock()
        first = self.away_since_s is None
        if self.away_since_s is None:
            self.away_since_s = now
        away_s = now - self.away_since_s
        if away_s > AWAY_S:
            raise ClusterError(
                f"the job server {self.server.name} has not answered for {away_s:.0f} s ({error.what})",
                cure=f"the job may go on: once the server is back, `raypar logs {self.submission_id} -f` follows it again",
            ) from error
        if first or now - self.away_told_s >= AWAY_SAY_S:
            self.away_told_s = now
            self.say(f"waiting for the job server {self.server.name} ({error.what}), for {away_s:.0f} s of {AWAY_S:.0f}")
