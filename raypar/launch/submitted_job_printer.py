"""Prints what becomes of a submitted job: its id, its log, its end; or JSON lines."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, TextIO

from raypar.errors import Interrupted
from raypar.files.json_type import Json

if TYPE_CHECKING:
    from raypar.launch.cluster_jobs import ClusterJob
    from raypar.launch.job_server import JobServer

RESUBMIT_ADVICE = "submit the same job again"
"""How a stopped job is resumed. A job that has begun to train says so in its log (`Result.resume_advice`)."""


class JobPrinter:
    """Prints one submitted job."""

    def __init__(self, out: TextIO, *, as_json: bool) -> None:
        self.out = out
        """Where lines are printed."""
        self.as_json = as_json
        """Whether they are JSON lines."""
        self.partial = ""
        """The beginning of a line of the log whose end has not come; as JSON only whole lines are printed."""
        self.advised = False
        """Whether `RESUBMIT_ADVICE` was in the job's log, so that the end need not repeat it."""

    def submitted(self, submission_id: str, name: str, server: str, entrypoint: str) -> None:
        """The job has been taken."""
        if self.as_json:
            self._json("submitted", submission_id=submission_id, name=name, address=server, entrypoint=entrypoint)
            return
        self._line(f"submitted {name} to {server} as {submission_id}: {entrypoint}")
        self._line(f"next: raypar logs {submission_id} -f; raypar stop {submission_id} saves a checkpoint and ends it")

    def log(self, text: str) -> None:
        """A piece of the job's log."""
        self.advised = self.advised or RESUBMIT_ADVICE in self.partial + text
        if not self.as_json:
            self.out.write(text.encode(self.out.encoding or "ascii", "backslashreplace").decode(self.out.encoding or "ascii"))
            self.out.flush()
            self.partial = (self.partial + text).rpartition("\n")[2]
            return
        *whole, self.partial = (self.partial + text).split("\n")
        for line in whole:
            self._json("log", text=line)

    def follow_to_end(self, server: JobServer, submission_id: str) -> int:
        """Print a job's log until it has ended, then its end; returns the exit code.

        Raises `Interrupted` after Ctrl-C, with what goes on.
        """
        from raypar.launch.follow_job import JobFollower

        try:
            job = JobFollower(server, submission_id, self.log, print_to_stderr).follow()
        except KeyboardInterrupt:
            raise Interrupted(
                f"\njob {submission_id} goes on at {server.name}",
                cure=f"`raypar logs {submission_id} -f` follows it again, `raypar stop {submission_id}` stops it",
            ) from None
        return self.ended(job)

    def ended(self, job: ClusterJob) -> int:
        """The job has ended; returns the exit code."""
        self.finish_line()
        if self.as_json:
            self._json("end", submission_id=job.submission_id, state=job.state, exit_code=job.command_exit_code)
            return job.command_exit_code
        self._line(describe_job_end(job, advised=self.advised))
        return job.command_exit_code

    def finish_line(self) -> None:
        """End the log's last line, if the job has not."""
        if self.partial and self.as_json:
            self._json("log", text=self.partial)
        elif self.partial:
            self._line("")
        self.partial = ""

    def _json(self, kind: str, **facts: Json) -> None:
        """One line of JSON."""
        self._line(json.dumps({"kind": kind, **facts}))

    def _line(self, text: str) -> None:
        """One line, at once."""
        self.out.write(text + "\n")
        self.out.flush()


def print_to_stderr(text: str) -> None:
    """Print a line about a wait, beside what the job prints."""
    print(text, file=sys.stderr, flush=True)


def describe_job_end(job: ClusterJob, *, advised: bool = False) -> str:
    """How a job has ended, in a line: `job first is done`. `advised`: its log has told `RESUBMIT_ADVICE` already."""
    what = f"job {job.submission_id}"
    if job.state == "done":
        return f"{what} is done"
    if job.state == "stopped":
        return f"{what} was stopped" + f": {RESUBMIT_ADVICE}, and it goes on from its last checkpoint, if it has one" * (
            not advised
        )
    if job.exit_code is not None:
        return f"{what} has failed, with exit code {job.exit_code}"
    return f"{what} has failed: {job.message.strip().splitlines()[-1] if job.message.strip() else 'Ray does not say why'}"
