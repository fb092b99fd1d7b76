"""The state of a run that `raypar top` shows, made of what its events say."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raypar.console.read_run_folder import read_job_numbers, read_job_step_count, read_status
from raypar.console.run_status import RunStatus
from raypar.files.json_type import Json
from raypar.record.events import StepRecord
from raypar.record.field_types import SeatedWorker, is_finite_number
from raypar.record.fold import ACTIVE_PHASES, RunView
from raypar.record.totals import read_totals
from raypar.storage.follow_run_files import RunFollower
from raypar.storage.run_folder import RunFolder

FIRST_BYTES = 8 << 20
"""How much of the end of a file the first read takes, some ten thousand steps. Later reads take only new lines."""
SEAT_PATTERN = re.compile(r"stages? ([\d,]+), replica (\d+)(?:, shard (\d+))?")
"""Finds stages, replica and shard of each role in a worker's coordinate."""


@dataclass(frozen=True)
class LiveWorker:
    """One worker, for the table. Unknown values are None or empty."""

    stage: str
    replica: str
    shard: str
    """The seat. If the coordinate cannot be parsed, `stage` is its whole text."""
    worker: str
    node: str
    pid: str
    busy: float | None
    """Share of the last steps' time in which it computed."""
    peak_bytes: int | None
    """The largest resident memory that its process has had."""


@dataclass(frozen=True)
class LiveView:
    """A run at one moment, for the screen of `raypar top`."""

    status: RunStatus
    """What `raypar status` says."""
    now: float
    """Unix time."""
    first_step: int | None
    """The step at which the curve of the loss begins."""
    losses: tuple[float, ...]
    """The curve of the loss; of a long run fewer steps than it has."""
    bubble: float | None
    """Mean share of the last steps in which workers did not compute."""
    goodput: float | None
    """See `RunTotals.goodput`. Without totals.json: the share of time in steps, from the lines that were read."""
    eta_s: float | None
    """Predicted seconds to the end."""
    cost: float | None
    """What the workers have cost so far."""
    workers: tuple[LiveWorker, ...]
    """The workers with a seat."""
    spares: int
    """Workers without a seat."""


def follow_run_folder(folder: RunFolder) -> Callable[[], LiveView]:
    """A function that returns the run at this moment. Each call reads the lines that are new since the last call."""
    job, follower = read_job_numbers(folder), RunFollower(folder, FIRST_BYTES)

    def look() -> LiveView:
        nonlocal follower
        follower.read()
        if follower.restarted:
            follower = RunFollower(folder, FIRST_BYTES)
            follower.read()
        now = time.time()
        steps = read_job_step_count(folder) if "epochs" in job else job.get("steps")  # epochs: known once it runs
        status = read_status(folder, follower.view, steps, now, with_places=False)
        totals = folder.read_document(folder.totals, damaged=True)
        return build_live_view(follower.view, status, totals, now, job.get("price_per_worker_hour"))

    return look


def build_live_view(
    view: RunView, status: RunStatus, totals: Mapping[str, Json] | None, now: float, price: float | None = None
) -> LiveView:
    """The run at this moment. `status`: of the same view; `totals`: totals.json; `price`: of one worker for an hour."""
    found = read_totals(totals)
    bubbles = [step.bubble for step in view.recent if step.bubble is not None and is_finite_number(step.bubble)]
    left = None if status.steps is None else max(0, status.steps - status.step)
    under_way = status.phase in ACTIVE_PHASES and status.step_s is not None and left is not None
    losses = view.history.losses.points
    return LiveView(
        status=status,
        now=now,
        first_step=int(losses[0][0]) if losses else None,
        losses=tuple(loss for _, loss, _ in losses),
        bubble=statistics.fmean(bubbles) if bubbles else None,
        goodput=view.history.goodput if found.goodput is None else found.goodput,
        eta_s=left * status.step_s if under_way and left is not None and status.step_s is not None else None,
        cost=found.cost(price) if price and found.steps else None,
        workers=tuple(live_workers(status.members, list(view.recent))),
        spares=len(status.spares),
    )


def live_workers(members: Sequence[SeatedWorker], done: Sequence[StepRecord]) -> list[LiveWorker]:
    """The workers with a seat, by rank. `done`: the last steps; those with another number of workers are ignored."""
    shares = [numbers_if_one_per_worker(step.busy_shares, len(members)) for step in done]
    busy = mean_by_rank([numbers for numbers in shares if numbers])
    sizes = (numbers_if_one_per_worker(step.peak_rss_bytes, len(members)) for step in reversed(done))
    peaks = next((found for found in sizes if found), None)
    rows = []
    for rank, member in enumerate(members):
        place = str(member.get("coordinate") or "")
        roles = SEAT_PATTERN.findall(place)  # a worker may have several
        rows.append(
            LiveWorker(
                stage="+".join(stages for stages, _, _ in roles) or place,
                replica="+".join(replica for _, replica, _ in roles),
                shard="+".join(shard for _, _, shard in roles if shard),
                worker=str(member.get("worker", "?")),
                node=str(member.get("node") or "?")[:8],
                pid=str(member.get("pid", "?")),
                busy=busy[rank] if busy else None,
                peak_bytes=int(peaks[rank]) if peaks and peaks[rank] > 0 else None,
            )
        )
    return rows


def numbers_if_one_per_worker(found: Sequence[float] | None, workers: int) -> list[float]:
    """The numbers, by rank; empty unless there is a finite number for each worker."""
    whole = found is not None and len(found) == workers and all(map(is_finite_number, found))
    return list(found) if whole and found is not None else []


def mean_by_rank(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each rank's numbers; empty if there are none."""
    return [statistics.fmean(numbers) for numbers in zip(*rows, strict=True)]
