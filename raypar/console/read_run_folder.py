"""Reads what status, top and report show of a run from its folder. What is missing or damaged is left out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raypar.console.run_status import RunStatus, build_run_status
from raypar.errors import CheckpointError, ConfigError
from raypar.files.json_type import Json
from raypar.files.printable_text import printable_text
from raypar.files.redact_secrets import redact_text, redact_value
from raypar.files.safe_yaml import YamlTooLargeError, dump_yaml, parse_yaml
from raypar.files.untrusted_files import read_limited_bytes, read_limited_text
from raypar.record.document_fields import ClusterDocument
from raypar.record.events import StepRecord
from raypar.record.fold import RunView
from raypar.record.history import HistoryFold
from raypar.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from raypar.console.run_report import RunFiles

LARGEST_NUMBER = 2**63
"""A number of job.yaml that is as large as this, or NaN, is ignored: others may have written it."""
JOB_CHARACTERS = 60_000
"""A longer job file is cut."""


def read_status(folder: RunFolder, view: RunView, steps: int | None, now: float, *, with_places: bool = True) -> RunStatus:
    """The status of the run in a folder. `view`: what its events say; `steps`: of its job.

    `with_places`: whether to look for its cluster and its checkpoints.
    """
    cluster: ClusterDocument | None = folder.read_document(folder.cluster, damaged=True) if with_places else None
    return build_run_status(
        folder.name,
        folder.place,
        view,
        steps=steps,
        plan=folder.read_document(folder.plan, damaged=True),
        members=folder.read_document(folder.members, damaged=True),
        cluster=cluster,
        gone=find_dead_local_nodes(cluster or {}),
        resumable=with_places and has_checkpoints(folder),
        now=now,
    )


def has_checkpoints(folder: RunFolder) -> bool:
    """Whether the run has checkpoints, whole or not."""
    with contextlib.suppress(CheckpointError):  # a storage that cannot be read has nothing to resume from
        return bool(folder.list_checkpoints())
    return False


def read_job_values(folder: RunFolder) -> Mapping[str, Json] | None:
    """The keys of job.yaml, none if it cannot be parsed; None if there is no such file.

    Raises `ConfigError` for a job file that is a link, a FIFO or large.
    """
    if not os.path.lexists(folder.job):
        return None
    content = read_limited_bytes(folder.job, follow=False, cure="put the run's job file back")
    try:
        job = parse_yaml(content.decode(), str(folder.job))
    except YamlTooLargeError:
        raise
    except (ConfigError, UnicodeDecodeError):
        return {}
    return job if isinstance(job, dict) else {}


def read_job_step_count(folder: RunFolder) -> int | None:
    """The run's number of steps, from job.yaml; without one, as of a job with functions that have no names, or whose file gives
    epochs, from members.json.

    None if neither says. Raises `ConfigError` as `read_job_values`.
    """
    job = read_job_values(folder)
    if job is None or "epochs" in job:
        return (folder.read_document(folder.members, damaged=True) or {}).get("steps")
    steps = job.get("steps")
    return steps if type(steps) is int else None


def read_job_numbers(folder: RunFolder) -> dict[str, Any]:
    """`steps`, `epochs` and `price_per_worker_hour` of job.yaml, if it has them. Raises `ConfigError` as `read_job_values`."""
    job = read_job_values(folder) or {}
    kinds = {"steps": (int,), "epochs": (int, float), "price_per_worker_hour": (int, float)}
    given: dict[str, Any] = {key: job[key] for key, kind in kinds.items() if type(job.get(key)) in kind}
    return {key: value for key, value in given.items() if abs(value) < LARGEST_NUMBER}


def find_dead_local_nodes(cluster: ClusterDocument) -> list[str]:
    """Nodes of the run's local Ray cluster that have died; empty without its head: the run is elsewhere, or over."""
    from raypar.ray_compat.settings import parse_raylet_command

    there = {
        node["node"]: (parse_raylet_command(node["pid"]) or ("", ""))[0] == node["node"] for node in cluster.get("nodes", ())
    }
    head_there = any(there[node["node"]] for node in cluster.get("nodes", ()) if node["head"])
    return [node for node, alive in there.items() if not alive] if head_there else []


def draw_throughput_chart(folder: RunFolder, view: RunView, steps: int | None) -> str:
    """The picture (SVG) of the run's throughput. `steps`: of its job."""
    from raypar.draw.run_history_chart import throughput_svg

    of = f" of {steps}" if steps is not None else ""
    done = view.last_step.step if view.last_step is not None else 0
    return printable_text(throughput_svg(view.history.history(), title=f"{folder.name}: {done}{of} steps"))


def make_run_trace(folder: RunFolder) -> dict[str, Json]:
    """The run as a Chrome trace, with every step."""
    from raypar.draw.chrome_trace import chrome_trace_of_run

    fold, first = HistoryFold(most_points=None), None
    for event in folder.read_timeline():
        fold.apply(event)
        if first is None and isinstance(event, StepRecord):
            first = event.step
    return chrome_trace_of_run(fold.history(with_losses=False), first=first or 1, name=folder.name)


def read_report_files(folder: RunFolder, clean: Callable[[str], str], known: list[str]) -> RunFiles:
    """What a report needs. `clean` removes secrets; `known`: texts that are secrets anywhere."""
    from raypar.console.run_report import RunFiles

    return RunFiles(
        view=RunView.of(folder.read_timeline()),
        plan=folder.read_document(folder.plan, damaged=True),
        members=folder.read_document(folder.members, damaged=True),
        job=read_job_without_secrets(folder, known),
        swimlane=read_swimlane(folder, clean),
        totals=folder.read_document(folder.totals, damaged=True),
        has_drawing_file=folder.swimlane.is_file(),
    )


def read_job_without_secrets(folder: RunFolder, known: list[str]) -> str | None:
    """The job file, written anew without secrets; of one that is no YAML the reason; None if there is none."""
    if not os.path.lexists(folder.job):
        return None
    try:
        job = parse_yaml(read_limited_text(folder.job, follow=False), folder.job.name)
    except ConfigError as error:
        return f"(the job file cannot be read: {redact_text(error.what, known)})"
    text = dump_yaml(redact_value(job, known))
    more = len(text) - JOB_CHARACTERS
    return f"{text[:JOB_CHARACTERS]}\n... and {more:,} characters more" if more > 0 else text


def read_swimlane(folder: RunFolder, clean: Callable[[str], str]) -> str | None:
    """The drawing of a step, drawn from the data that the run has left in its trace; None if there are none."""
    from raypar.draw.swimlane_as_json import draw_step_of_trace

    try:
        trace = folder.read_document(folder.trace, damaged=True)
    except ConfigError:
        return None
    return draw_step_of_trace(trace, clean) if trace is not None else None
