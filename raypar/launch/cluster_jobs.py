"""Jobs of a cluster's job server as data: their state, and what their logs say. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raypar.files.json_type import Json
from raypar.files.printable_text import printable_text, shorten

NAME_KEY = "raypar_job"
"""Key of a submitted job's metadata that holds the name of the job file's job."""
STATES = {"PENDING": "pending", "RUNNING": "running", "STOPPED": "stopped", "SUCCEEDED": "done", "FAILED": "failed"}
"""Ray's status of a job -> the state that users see."""
OVER = ("stopped", "done", "failed")
"""States of a job that has ended."""
STOPPED_CODE = 130
"""Exit code of a run that was stopped at a user's request, as after Ctrl-C."""

_STEP = re.compile(r"^step (?P<step>\d+)/(?P<steps>\d+)  loss (?P<loss>\S+)")
_RUN = re.compile(
    r"the run is called (?P<run>\S+); its folder is (?P<path>.+)$"
    r"|^\[1/\d+\] run (?P<again>\S+) found in (?P<found>.+): \d+ steps( |$)"
)
_END = re.compile(
    r"^stopped (?:after (?P<step>[\d,]+) steps?|before training began) .*|^.*: (?P<done>[\d,]+) steps?, .*samples/s.*$"
)
_ERROR = re.compile(r"^error: (.*\S)")
_WAITING = re.compile(r"^ *(waiting for (?:\d+ more workers?|\d+ CPUs?|run )\b.*)$")
"""Lines about the cluster's room; those about what started workers do are a part of the start."""


@dataclass(frozen=True)
class ClusterJob:
    """A submitted job. Times are Unix seconds."""

    submission_id: str
    """Ray's id of the job."""
    name: str | None
    """Name of the job file's job; None if it was not submitted by `raypar submit`."""
    state: str
    """pending, running, stopped, done or failed."""
    exit_code: int | None
    """Exit code of its command; None while it runs, and if Ray stopped it."""
    message: str
    """What Ray says about the state."""
    entrypoint: str
    """Its command."""
    started_s: float | None
    """When it was submitted."""
    ended_s: float | None
    """When it ended."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in OVER

    @property
    def command_exit_code(self) -> int:
        """The exit code by which `raypar submit` tells how the job ended: 0 done, 130 stopped, else the job's own, or 1."""
        if self.state == "failed":
            return self.exit_code if self.exit_code is not None and 0 < self.exit_code < 256 else 1
        return STOPPED_CODE if self.state == "stopped" else 0


def parse_ray_job_record(record: Mapping[str, Json]) -> ClusterJob:
    """The job in Ray's record. A job whose command has saved and ended by a signal (exit code 130) is a stopped one."""
    metadata = record.get("metadata") or {}
    state, code = STATES.get(str(record.get("status")), "running"), record.get("driver_exit_code")
    code = code if isinstance(code, int) else None
    return ClusterJob(
        submission_id=printable_text(record["submission_id"]),
        name=printable_text(metadata[NAME_KEY]) if isinstance(metadata, dict) and NAME_KEY in metadata else None,
        state="stopped" if state == "failed" and code == STOPPED_CODE else state,
        exit_code=code,
        message=printable_text(record.get("message") or ""),
        entrypoint=printable_text(record.get("entrypoint") or ""),
        started_s=_seconds(record.get("start_time")),
        ended_s=_seconds(record.get("end_time")),
    )


def _seconds(milliseconds: Json) -> float | None:
    return milliseconds / 1000 if isinstance(milliseconds, (int, float)) and milliseconds > 0 else None


@dataclass(frozen=True)
class LogFacts:
    """What a job's log says of its run; None where it says nothing."""

    run: str | None = None
    """The run's name."""
    step: int | None = None
    """Steps done when it was last said."""
    steps: int | None = None
    """Steps of the job."""
    loss: float | None = None
    """The last loss."""
    waiting: str | None = None
    """What the run waits for, if that is the last that was said."""
    end: str | None = None
    """The line about the end: steps done, and where the checkpoint is."""
    folder: str | None = None
    """Where the run's folder is: a path on the machine where the job ran, or a URI."""
    error: str | None = None
    """The first line of the last error, without its `error:`."""


def read_log_facts(log: str) -> LogFacts:
    """The facts in a job's log."""
    facts: dict[str, Any] = {}
    for line in re.split(r"[\r\n]+", log):
        if found := _STEP.match(line):
            facts |= {"step": int(found["step"]), "steps": int(found["steps"]), "waiting": None}
            try:
                facts["loss"] = float(found["loss"])
            except ValueError:
                facts["loss"] = None
        elif found := _RUN.search(line):
            facts |= {"run": printable_text(found["run"] or found["again"]), "waiting": None}
            facts["folder"] = printable_text(found["path"] or found["found"]).strip()
        elif found := _END.match(line):
            facts |= {"end": printable_text(line.strip()), "waiting": None}
            if number := found["step"] or found["done"]:
                facts["step"] = int(number.replace(",", ""))
        elif found := _WAITING.match(line):
            facts["waiting"] = printable_text(found[1])
        elif found := _ERROR.match(line):
            facts["error"] = shorten(found[1])
        elif line.startswith(("[", "the cluster has room for ")):  # a stage of the start-up; the end of a wait
            facts["waiting"] = None
    return LogFacts(**facts)


def describe_failure(job: ClusterJob, said: LogFacts) -> str:
    """Why a job has failed, in a line: the error in its log, else in what Ray says of it."""
    last = next((line.strip() for line in reversed(job.message.splitlines()) if line.strip()), "")
    why = said.error or read_log_facts(job.message).error or last
    return shorten(why) if why else "Ray does not say why"
