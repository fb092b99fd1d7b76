"""Totals of a run since its first start. They only grow, outlive drivers, and are saved in totals.json. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from raypar.files.json_type import Json
from raypar.record.events import (
    DriverLoss,
    Event,
    GenerationStart,
    Resumption,
    StepRecord,
    WorkerJoin,
    WorkerLoss,
)


@dataclass(slots=True)
class RunTotals:
    """Totals of a run over all of its starts and drivers. Times are in seconds."""

    time: float = 0.0
    """When these totals were saved (Unix time); 0: never."""
    last_step: int = 0
    """The last step that is counted (from 1). Steps up to it are not counted again."""
    steps: int = 0
    """Committed steps."""
    skipped_steps: int = 0
    """Committed steps that changed nothing, because loss or norm were not finite."""
    samples: int = 0
    """Samples of committed steps."""
    step_s: float = 0.0
    """Time in committed steps, without pauses."""
    useful_worker_s: float = 0.0
    """Time in committed steps times the workers that computed them."""
    worker_s: float = 0.0
    """Time for which workers were held: with a seat, in reserve or starting."""
    startup_worker_s: float = 0.0
    """The part of `worker_s` before the first step began."""
    workers: int = 0
    """Workers held when the totals were saved."""
    recoveries: int = 0
    """Changes of workers or plan."""
    recovery_pause_s: float = 0.0
    """Time without a step because of such changes."""
    replayed_steps: int = 0
    """Steps executed again because of such changes, or because the run was resumed from a checkpoint before them."""
    lost_workers: int = 0
    """Workers that were lost."""
    joined_workers: int = 0
    """Workers that have joined during the run."""
    driver_failovers: int = 0
    """Drivers that were lost and replaced."""
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Operation -> payload that workers have sent each other. Workers report it every few seconds (`worker_core.SAMPLE_S`), so
    bytes sent between a generation's last report and its end are missing."""

    @property
    def goodput(self) -> float | None:
        """The share of worker time that went into committed steps, from 0 to 1; None before the first step.

        useful_worker_s / (worker_s - startup_worker_s): seconds of each committed step, counted once, times the workers that
        computed it, over the time for which workers were held since the first step began. Recoveries, replayed steps, waits,
        checkpoints that hold steps up, workers in reserve and starts after the first one lower it. With an unchanging number of
        workers it is the share of time in `raypar report`. `jobs/bench/chaos.py` measures committed samples against those of
        undisturbed workers, whose speed a run itself does not know. "Goodput" here has no statistical part (unlike Qiao et al.
        2021, "Pollux", section 3).
        """
        held_s = self.worker_s - self.startup_worker_s
        return min(1.0, self.useful_worker_s / held_s) if self.steps and held_s > 0 else None

    def cost(self, price: float) -> float:
        """The cost of all worker time. `price`: of one worker for an hour."""
        return self.worker_s / 3600 * price

    def add_step(self, step: StepRecord, workers: int) -> bool:
        """Count a committed step that so many workers computed; False if it is counted already."""
        if step.step <= self.last_step:
            return False
        useful_s = step.seconds * workers
        if not self.steps:
            self.startup_worker_s = max(0.0, self.worker_s - useful_s)
        self.last_step = step.step
        self.steps += 1
        self.skipped_steps += bool(step.skipped)
        self.samples += round(step.samples)
        self.step_s += step.seconds
        self.useful_worker_s += useful_s
        return True

    def add_event(self, event: Event) -> None:
        """Count an event of the run, if it is of a kind that is counted."""
        match event:
            case GenerationStart():
                self.recoveries += 1
                self.recovery_pause_s += event.pause_s or 0.0
                self.replayed_steps += event.again or 0
            case Resumption():
                self.replayed_steps += event.again or 0
            case WorkerLoss():
                self.lost_workers += 1
            case WorkerJoin():
                self.joined_workers += 1
            case DriverLoss():
                self.driver_failovers += 1

    def as_document(self) -> dict[str, Json]:
        """The totals as JSON data."""
        return asdict(self)


def read_totals(document: Mapping[str, Json] | None) -> RunTotals:
    """The totals of a document made by `RunTotals.as_document`; zeros for None, and if one of its values is not a number.

    Others may have changed the run folder, and wrong totals are no reason to refuse a run.
    """
    found = RunTotals()
    if document is None:
        return found
    for one in fields(RunTotals):
        if one.name not in document:  # of a release that did not count it
            continue
        value, kind = document[one.name], type(getattr(found, one.name))
        if kind is dict:
            whole = isinstance(value, dict) and all(isinstance(key, str) and _is_count(n) for key, n in value.items())
        else:
            whole = _is_count(value) if kind is int else _is_duration(value)
        if not whole:
            return RunTotals()
        setattr(found, one.name, kind(value))
    return found


def _is_duration(value: Json) -> bool:
    """Whether a value is a number of seconds."""
    return _is_count(value) or (isinstance(value, float) and math.isfinite(value) and value >= 0)


def _is_count(value: Json) -> bool:
    """Whether a value is a number of things."""
    return type(value) is int and 0 <= value < 2**63
