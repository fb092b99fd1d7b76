"""The table of runs and of submitted jobs: name, state, step, loss, when. Rows of runs are read from their folders."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from raypar.console.read_run_folder import read_job_step_count
from raypar.console.run_status import overdue_silence_s
from raypar.elastic.user_messages import plain_failure_text
from raypar.errors import ConfigError
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.files.untrusted_files import explain_read_errors
from raypar.plan.wording import after_steps, align_columns
from raypar.record.document_fields import MembersDocument
from raypar.record.field_types import is_finite_number
from raypar.record.fold import RunView
from raypar.record.value_text import format_duration
from raypar.storage.follow_run_files import RunFollower
from raypar.storage.run_folder import RunFolder, check_local_path, parse_storage_location, resume_argument

if TYPE_CHECKING:
    from raypar.storage.storage_uri import StorageUri

TAIL_BYTES = 256 << 10
"""How much of a run's metrics and events is read: the last steps, and the end."""
DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class RunRow:
    """One run or submitted job. Times are Unix seconds; what is not known is None."""

    name: str | None
    """Name of the run; of a job that has made no run yet the name in its job file."""
    state: str
    """starting, running, recovering, waiting, done, stopped, interrupted, failed, lost; of jobs also pending."""
    step: int | None = None
    """Steps done."""
    steps: int | None = None
    """Steps of the job."""
    loss: float | None = None
    """The last loss."""
    started_s: float | None = None
    """When it was started or resumed; of a job: submitted."""
    updated_s: float | None = None
    """When it was last heard of, or ended; of a job that has not ended None."""
    why: str = ""
    """What it waits for, or why it ended."""
    path: str | None = None
    """Its folder, for a run on this machine."""
    submission_id: str | None = None
    """Ray's id, for a job."""

    def facts(self) -> dict[str, Json]:
        """The row as data, for `--json`."""
        return asdict(self)


def list_runs_in_folder(run_dir: str, last: int, now: float) -> list[RunRow]:
    """The rows of the runs below `run_dir` that were started or resumed last, in that order."""
    if (shared := parse_storage_location(run_dir, "--run-dir")) is not None:
        return list_runs_on_storage(shared, last, now)
    root = check_local_path(run_dir, "--run-dir")
    with explain_read_errors(root):
        folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
        runs = [RunFolder(path) for path in folders if (path / "job.yaml").exists() or (path / "checkpoints").is_dir()]
    runs.sort(key=lambda run: read_start_time(run) or 0.0)
    return [read_run_row(run, now) for run in runs[-last or None :]]


def list_runs_on_storage(run_dir: StorageUri, last: int, now: float) -> list[RunRow]:
    """The same of runs below a place on shared storage."""
    from raypar.storage.list_and_remove_runs import list_runs_below

    rows = []
    for uri, _ in list_runs_below(run_dir)[-last or None :]:
        with RunFolder.open_for_reading(str(uri), with_job=False, last_bytes=TAIL_BYTES) as run:
            rows.append(read_run_row(run, now))
    return rows


def read_start_time(run: RunFolder) -> float | None:
    """When the run was started or resumed."""
    for path in (run.cluster, run.job, run.path):
        with contextlib.suppress(OSError):
            return path.lstat().st_mtime
    return None


def read_run_row(run: RunFolder, now: float) -> RunRow:
    """The row of the run in a folder. A file that cannot be read is left out."""
    try:
        follower = RunFollower(run, TAIL_BYTES)
        follower.read()
        return build_run_row(
            run.name,
            run.place,
            follower.view,
            steps=read_job_step_count(run),
            members=run.read_document(run.members, damaged=True),
            locked=run.is_locked(),
            started_s=read_start_time(run),
            now=now,
        )
    except ConfigError as error:
        return RunRow(name=run.name, path=run.place, state="unreadable", why=error.what)


def stopped_run_facts(folder: RunFolder, stopped: bool) -> dict[str, Json]:
    """Facts of a run that does not train any more, with a `text` for people. `stopped`: whether it did before."""
    row = read_run_row(folder, time.time())
    at = f"after {row.step} of {row.steps} steps" if row.steps is not None else after_steps(row.step or 0)
    text = f"run {folder.name} has ended {at}" if stopped else f"nothing trains run {folder.name}: it is {row.state} {at}"
    saved = folder.list_checkpoints()
    if saved and row.state != "done":
        text += f"\nnext: raypar resume {resume_argument(folder.place)} goes on from {saved[-1]}"
    return {**row.facts(), "stopped": stopped, "checkpoint": saved[-1] if saved else None, "text": text}


def build_run_row(
    name: str,
    path: str,
    view: RunView,
    *,
    steps: int | None,
    members: MembersDocument | None,
    locked: bool,
    started_s: float | None,
    now: float,
) -> RunRow:
    """The row of the run in a folder, from the last events of its files. `locked`: a process of this machine trains it."""
    told: MembersDocument = members or {}
    last, end = view.last_step, view.ended(members)
    updated_s = max((at for at in (view.last_s, told.get("time")) if at), default=started_s)
    phase = str(told.get("phase") or ("running" if last else "starting"))
    silent = overdue_silence_s(phase, updated_s, last.seconds if last else None, now) is not None
    if end is not None:
        state = end.end
    elif phase != "ended" and not locked and silent:
        state = "lost"
    else:
        state = phase
    return RunRow(
        name=name,
        path=path,
        state=state,
        step=max(last.step if last else 0, told.get("step") or 0),
        steps=steps,
        loss=last.loss if last is not None and is_finite_number(last.loss) else None,
        started_s=started_s,
        updated_s=updated_s,
        why=plain_failure_text((end.why if end is not None else told.get("why")) or ""),
    )


def format_run_table(rows: Sequence[RunRow], now: float) -> str:
    """The rows as text, in the order given; with a column `job` if one of them is a submitted job."""
    head = ("name", "state", "step", "loss", "when")
    cells: list[tuple[str, ...]] = [
        head,
        *((row.name or "-", row.state, _step(row), _loss(row), _when(row, now)) for row in rows),
    ]
    if any(row.submission_id for row in rows):
        cells = [(one, *cell) for one, cell in zip(("job", *(row.submission_id or "-" for row in rows)), cells, strict=True)]
    lines = align_columns(cells)
    for number, row in reversed([*enumerate(rows, start=1)]):
        if row.why.strip() and row.state in ("waiting", "pending", "failed", "unreadable"):
            lines.insert(number + 1, f"  {_reason(row)}")
    return "\n".join(lines)


def _reason(row: RunRow) -> str:
    """What a run waits for, or why it has failed, as one line: `error: no module m`."""
    first = row.why.strip().splitlines()[0]
    if row.state in ("waiting", "pending"):
        return first
    return "error: " + shorten(first)


def _step(row: RunRow) -> str:
    if row.step is None:
        return "-"
    return f"{row.step}/{row.steps}" if row.steps is not None else str(row.step)


def _loss(row: RunRow) -> str:
    return "-" if row.loss is None else f"{row.loss:.4f}"


def _when(row: RunRow, now: float) -> str:
    """When it was last heard of, or a job was submitted: `14:03:59 (5 s ago)`, with the date if that is more than a day ago."""
    at = row.updated_s if row.updated_s is not None else row.started_s
    if at is None:
        return "-"
    ago_s = max(0.0, now - at)
    clock = time.strftime("%H:%M:%S" if ago_s < DAY_S else "%Y-%m-%d %H:%M", time.localtime(at))
    return clock if ago_s >= DAY_S else f"{clock} ({format_duration(ago_s)} ago)"
