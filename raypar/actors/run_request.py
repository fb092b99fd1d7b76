"""What the client hands to the driver actor: everything about one run, and nothing that makes the driver import user code."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from raypar.elastic.run_policy import RunPolicy
from raypar.plan import Crossing, Microbatches, Outline, ParallelPlan
from raypar.planner.model_profile import ModelProfile
from raypar.schedule.timeline import Timeline


@dataclass(frozen=True)
class RunRequest:
    """One run. `gpus`: of each worker; `environment`: of its process, where the job's own runtime environment does not say
    otherwise. `spec` and `assignments` are pickled for the workers; the driver passes them on unopened.

    `folder`: absolute path of the run folder; `resume`: checkpoint that workers load, None for a new run; `host`: what workers
    listen on, None for their node's address; `trace`: steps whose spans are kept for the picture; `callbacks`: pickled, they
    are called in the driver. `outline`, `validation_cut` and `profile` are what another plan is made from, when workers are
    lost.
    """

    run: str
    folder: str
    policy: RunPolicy
    plan: ParallelPlan
    schedule_name: str
    crossing: Crossing
    cut: Microbatches
    spec: bytes
    assignments: tuple[bytes, ...]
    callbacks: bytes
    contract: Mapping[str, Any]
    predicted: Timeline
    outline: Outline
    profile: ModelProfile
    validation_cut: Microbatches | None = None
    resume: str | None = None
    keep: int = 2
    host: str | None = None
    trace: Collection[int] = frozenset()
    max_time_s: float | None = None
    wait_for_workers_s: float = 300.0
    start_deadline_s: float = 300.0
    orphan_timeout_s: float = 60.0
    silent_s: float = 10.0
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
