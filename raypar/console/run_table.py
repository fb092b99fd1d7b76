"""The table of runs and of submitted jobs: name, state, step, loss, when. Pure; time is an argument."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raypar.console.run_status import overdue_silence_s
from raypar.elastic.user_messages import plain_failure_text
from raypar.files.untrusted_files import shorten
from raypar.plan.wording import align_columns
from raypar.record.events import format_duration, is_finite_number
from raypar.record.fold import RunView

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

    def facts(self) -> dict[str, Any]:
        """The row as data, for `--json`."""
        return asdict(self)


def build_run_row(
    name: str,
    path: str,
    view: RunView,
    *,
    steps: int | None,
    members: Mapping[str, Any] | None,
    locked: bool,
    started_s: float | None,
    now: float,
) -> RunRow:
    """The row of the run in a folder, from the last events of its files. `locked`: a process of this machine trains it."""
    told, last, end = members or {}, view.last_step, view.ended(members)
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
