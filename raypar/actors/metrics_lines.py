"""The lines of metrics.jsonl: a step's record from its reports; lines that a new driver finds, completed from the journal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from raypar.actors.messages import RunRequest
from raypar.actors.run_state_in_ray_kv import Journal
from raypar.elastic.step_flow_rules import MAX_OPEN_STEPS
from raypar.files.json_type import Json
from raypar.plan.wording import word_form
from raypar.record.events import Event, StepRecord
from raypar.storage.read_run_lines import Line, jsonl_line_sort_key, step_of

if TYPE_CHECKING:
    from raypar.worker.worker_reports import Report

COMPARED = 3
"""How many of the last steps in metrics.jsonl are compared with the journal, to see whether the file is this run's."""


def step_record(step: int, brief: Report, wall: float, batch_size: int) -> StepRecord:
    """The record of a step (from 0) that took `wall` seconds. `brief`: its merged report (`merge_reports`)."""
    longest, peaks = brief["seconds"], brief["peak_rss_bytes"]
    return StepRecord(
        step=step + 1,
        loss=brief["loss"],
        norm=brief["norm"],
        lr=brief.get("lr"),
        count=brief["count"],
        seconds=wall,
        samples_per_s=batch_size / wall if wall else 0.0,
        count_per_s=brief["count"] / wall if wall else 0.0,
        bubble=max(0.0, 1 - brief["busy_seconds"] / (longest * brief["workers"])) if longest else 0.0,
        data_wait=brief.get("data_wait"),
        busy_shares=brief.get("busy_shares", []) if longest else [],
        peak_rss_bytes=peaks if longest and isinstance(peaks, Sequence) else [],
        skipped=True if brief["skipped"] else None,
        loss_scale=brief.get("loss_scale"),
        more=brief.get("metrics", {}),
    )


def complete_metrics_lines(
    found: Sequence[Line], journal: Journal, known: Sequence[int], request: RunRequest
) -> tuple[list[Line], list[int]]:
    """(the lines of metrics as the user has seen them: `found`, without the lines of another run, and with missing lines; the
    steps, from 1, whose lines were rebuilt).

    `known`: steps (from 0) in the journal, from which missing lines are rebuilt.
    """
    first, rebuilt = request.policy.steps_before_run, list[int]()
    last = known[-1] + 1 if known else first
    by_place = {jsonl_line_sort_key(line): line for line in found if step_of(line) <= last}
    there = {step_of(line): line for line in by_place.values() if "loss" in line}
    newest = [step for step in known if step + 1 in there][-COMPARED:]
    wrong = [step for step in newest if not metrics_line_matches_journal(there[step + 1], journal.step_report(step))]
    if newest and wrong == newest:  # another run's: nothing in it can be trusted
        by_place = {place: line for place, line in by_place.items() if step_of(line) <= first}
        there = {}
    for done in journal.validations():
        if done <= last and (done, True) not in by_place and (line := journal.load_validation(done)) is not None:
            by_place[done, True] = line
    seen = count_seen_steps(first, (int(step) for step, _ in by_place), known)
    for step in known:
        line = there.get(step + 1)
        if (line is None and step < seen) or (line is not None and wrong):
            facts = journal.step_report(step)
            if facts is not None and (line is None or not metrics_line_matches_journal(line, facts)):
                rebuilt.append(step + 1)
                again = step_record(step, facts, facts["seconds"], request.batching.batch_size)
                by_place[step + 1, False] = finite({"time": facts["time"], **without_kind(again)})
    return [by_place[place] for place in sorted(by_place)], rebuilt


def count_seen_steps(first: int, there: Iterable[int], known: Sequence[int]) -> int:
    """How many steps the user has certainly seen, of a run that `first` steps precede.

    The user has seen every step with a line (`there`, from 1), and every step in the journal (`known`, from 0) except the
    last `MAX_OPEN_STEPS`: a step is issued only when all but so many steps before it were shown.
    """
    return max([first, *there, *(step + 1 - MAX_OPEN_STEPS for step in known[-1:])])


def metrics_line_matches_journal(line: Mapping[str, Json], facts: Report | None) -> bool:
    """Whether a line of metrics agrees with the journal's report of its step (`facts`); True if there is no report."""
    found = finite({"loss": facts["loss"], "norm": facts["norm"]}) if facts is not None else {}
    return all(line.get(key) == value for key, value in found.items())


def format_step_ranges(steps: Sequence[int]) -> str:
    """Ascending numbers as text: `step 4`, `steps 1-3, 7`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return word_form(steps, "step ", "steps ") + ", ".join("-".join(map(str, run)) for run in runs)


def without_kind(event: Event) -> dict[str, Json]:
    """The facts of a step, validation or checkpoint, for its line or for callbacks."""
    return {key: value for key, value in event.facts().items() if key != "kind"}


def finite(facts: Mapping[str, Json]) -> dict[str, Json]:
    """The facts with None in place of NaN and infinities, which JSON does not have."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
