"""Gathers what a report says of a run, from the files in its folder. Pure; time is an argument.

Times of the story and of the start are Unix seconds. Texts are without secrets, and not yet escaped.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypar.console.event_lines import EventNarrator, count_noun, short_node_id
from raypar.console.event_printer import format_duration
from raypar.console.fault_summary import summarize_faults
from raypar.console.run_status import RunStatus, format_loss
from raypar.console.throughput_chart_data import Line, build_run_history, goodput_of_history
from raypar.errors import PlanError
from raypar.plan import ParallelPlan, StagePlan
from raypar.schedule.line_chart import ChartSeries, line_chart_svg
from raypar.schedule.throughput_chart import RunHistory, throughput_svg
from raypar.telemetry.run_totals import read_totals

LOSS_COLOUR, VALIDATION_COLOUR, LARGEST_COLOUR, SMALLEST_COLOUR = "#2B7BBA", "#D9861A", "#7A4FA3", "#2FA584"
FIRST_LINES, LAST_LINES = 60, 240
"""How many of the first and of the last lines of a story are told."""
MOST_WORKERS, MOST_STAGES = 128, 256
"""Rows of the tables of workers and stages; they say how many more there are."""
MOST_WORLD = 1 << 16
"""Workers of a plan that is looked at; plan.json is not trusted."""
TEXT_CHARACTERS = 1200
"""A text of an event is cut after so many characters."""


@dataclass(frozen=True)
class RunFiles:
    """What is read from a run folder. What is missing or damaged is empty."""

    metrics: Sequence[Line]
    """The lines of metrics.jsonl."""
    events: Sequence[Line]
    """The lines of events.jsonl."""
    plan: Line | None
    """plan.json."""
    members: Line | None
    """members.json."""
    job: str | None
    """The text of job.yaml, without secrets."""
    swimlane: str | None
    """The drawing of a step as an element for a page; None: there is none, or none of raypar's."""
    totals: Line | None = None
    """totals.json."""


@dataclass(frozen=True)
class Fact:
    """A number of the summary: its name, its value, and a line below it."""

    name: str
    value: str
    note: str = ""
    tone: str = ""
    """good, bad or warn: how the value is coloured; empty: it is not."""


@dataclass(frozen=True)
class WorkerRow:
    """One worker of the plan, in its seat."""

    seat: str
    """`stage 1, replica 0`."""
    process: str
    """`worker 3 on node b09ad58f, pid 5003`; empty if the folder does not say."""
    layers: str
    """The names of its layers, first and last."""
    predicted: Mapping[str, int]
    """Kind of memory -> bytes that it is predicted to hold; empty if nobody has predicted."""
    peak_bytes: int | None
    """The largest resident memory of its process that the last steps report."""


@dataclass(frozen=True)
class StageRow:
    """One stage of the plan."""

    stage: int
    layers: str
    count: int
    """Number of its layers."""
    parameters: int | None
    """Elements of its parameters; None if the folder does not say."""
    replicas: int
    shards: int
    position: int


@dataclass(frozen=True)
class RunReport:
    """All that a report says. Empty texts and drawings: there is nothing to say."""

    run: str
    """The run's name."""
    result: str
    """`done`, `running`, ...: one word or two."""
    tone: str
    """good, bad or warn."""
    subtitle: str
    """The plan in one line."""
    why: str
    """Why it has ended, waits or recovers."""
    made_at: float
    """When the report is made."""
    started_at: float | None
    """When the run was started first."""
    facts: tuple[Fact, ...]
    """The summary."""
    survived: str
    """The faults, counted."""
    loss_chart: str
    throughput_chart: str
    memory_chart: str
    swimlane: str
    swimlane_missing: str
    """Why there is no drawing of a step; empty if there is one."""
    step_prediction: str
    """What was predicted of a step, in a sentence."""
    stages: tuple[StageRow, ...]
    workers: tuple[WorkerRow, ...]
    all_workers: int
    """Number of workers of the plan, of which `workers` are the first."""
    story: tuple[tuple[float | None, str, str], ...]
    """(time, kind of event, line); the end of a run that failed is of the kind `failed`."""
    lines_left_out: int
    """Lines of the story that are left out after the first `FIRST_LINES`."""
    job: str
    """The job file."""
    environment: tuple[tuple[str, str], ...]
    """(name, value) of what a worker computed with, as the last start has recorded it."""


def build_run_report(status: RunStatus, files: RunFiles, now: float, clean: Callable[[str], str] = str) -> RunReport:
    """The report of a run. `clean` removes secrets from a text."""

    def text(value: object) -> str:
        return clean(str(value)[:TEXT_CHARACTERS])

    done = [line for line in files.metrics if "samples_per_s" in line and "seconds" in line]
    validated = [line for line in files.metrics if _number(line.get("validation_loss")) is not None]
    history = build_run_history(files.metrics, files.events)
    marks = tuple(replace(m, label=text(m.label)[:160], brief=m.brief[:60]) for m in history.marks)
    history = replace(history, marks=marks, losses=(), validation_losses=())  # the report has a chart of its own for them
    plan = read_plan(files.plan)
    result, tone = describe_result(status)
    told, left_out = shorten_story(tell_story(files.events, text))
    started = [event for event in files.events if event["kind"] == "started"]
    computing = f", computing in {text(status.precision)}" if status.precision else ""
    return RunReport(
        run=text(status.run),
        result=result,
        tone=tone,
        subtitle=", schedule ".join(text(part) for part in (status.plan, status.schedule) if part) + computing,
        why=text(status.why),
        made_at=now,
        started_at=next((event["time"] for event in started if event.get("time")), None),
        facts=tuple(
            replace(fact, value=text(fact.value), note=text(fact.note))
            for fact in (*summary_facts(status, done, validated, history, files), *training_facts(files.events, done))
        ),
        survived=summarize_faults(files.events) or "",
        loss_chart=draw_loss(done, validated),
        throughput_chart=throughput_svg(history, title="") if done else "",
        memory_chart=draw_memory(done),
        swimlane=files.swimlane or "",
        swimlane_missing="" if files.swimlane else describe_missing_swimlane(status),
        step_prediction=describe_prediction(files.plan, done),
        stages=tuple(stage_rows(plan, files.plan or {}, text)),
        workers=tuple(worker_rows(plan, files, done, text)),
        all_workers=plan.world if plan is not None else 0,
        story=tuple(told),
        lines_left_out=left_out,
        job=files.job or "",
        environment=tuple((text(k), text(v)) for k, v in (started[-1].get("fingerprint") or {}).items()) if started else (),
    )


def describe_missing_swimlane(status: RunStatus) -> str:
    """Why the folder of a run has no drawing of a step, in a sentence or two."""
    if status.phase != "ended" and status.silent_s is None:
        return "The folder has no drawing of a step yet: it is written when the run ends."
    if status.phase != "ended":
        return "The folder has no drawing of a step: the run's driver did not come to its end."
    return (
        "The folder has no drawing of a step: none of those that are measured (the 1st, 5th, 21st, 101st and last of a start) "
        "was done by all workers of the plan that the run was started with. trace_every: 1 measures all steps."
    )


def _number(value: Any) -> float | None:
    """A finite number; None for anything else, also for an integer that no float holds."""
    try:
        return float(value) if type(value) in (int, float) and math.isfinite(value) else None
    except OverflowError:
        return None


# -- the summary -----------------------------------------------------------------------------------------------------------


def describe_result(status: RunStatus) -> tuple[str, str]:
    """(the state of the run in a word or two, good, bad or warn)."""
    if status.silent_s is not None:
        return f"no news for {format_duration(status.silent_s)}", "bad"
    if status.phase != "ended":
        return status.phase[:40], "good" if status.phase == "running" else "warn"
    end = (status.end or "ended")[:40]
    return end, {"done": "good", "failed": "bad"}.get(end, "warn")


def summary_facts(
    status: RunStatus, done: Sequence[Line], validated: Sequence[Line], history: RunHistory, files: RunFiles
) -> list[Fact]:
    """The numbers at the head of the report."""
    of = f"of {status.steps:,}" if status.steps is not None else ""
    steps_tone = "" if status.steps is None or status.step >= status.steps or status.phase != "ended" else "warn"
    facts = [Fact("steps", f"{status.step:,}", of, steps_tone)]
    if not done:
        return facts
    seconds = sum(line["seconds"] for line in done)
    samples = sum(line["samples_per_s"] * line["seconds"] for line in done)
    counted = sum(_number(line.get("count")) or 0.0 for line in done)
    step_s = statistics.median(line["seconds"] for line in done)
    starts = describe_starts(history.between_starts_s)
    facts.append(Fact("time trained", format_duration(history.end_s), f"{starts}median step {format_seconds(step_s)}"))
    if history.end_s and seconds:
        pauses = "pauses included, the time between starts not" if starts else "all pauses included"
        tokens = f"{counted / history.end_s:,.0f} tokens/s" if counted > 1.5 * samples else pauses
        facts.append(Fact("samples per second", format_rate(samples / history.end_s), tokens))
        goodput = read_totals(files.totals).goodput
        if goodput is None:
            goodput = goodput_of_history(history) or 0.0
        facts.append(Fact("goodput", f"{100 * goodput:.1f} %", "of the time in steps that count"))
    bubbles = [(bubble, line["seconds"]) for line in done if (bubble := _number(line.get("bubble"))) is not None]
    if bubbles and sum(s for _, s in bubbles):
        mean = sum(bubble * s for bubble, s in bubbles) / sum(s for _, s in bubbles)
        predicted = _number((files.plan or {}).get("predicted_bubble"))
        facts.append(
            Fact("bubble", f"{100 * mean:.1f} %", f"predicted {100 * predicted:.1f} %" if predicted is not None else "")
        )
    facts.append(_recovery_fact(files.events))
    facts += _loss_facts(done, validated)
    return facts


def describe_starts(between_s: Sequence[float]) -> str:
    """How many starts a run has had, and that the time between them is not counted; empty for one start."""
    if not between_s:
        return ""
    return f"in {len(between_s) + 1:,} starts, without the {format_duration(sum(between_s))} between them; "


def _recovery_fact(events: Sequence[Line]) -> Fact:
    """How often the workers or the plan have changed, and what that has cost."""
    changes = [event for event in events if event["kind"] == "generation"]
    pause_s = sum(event.get("pause_s") or 0.0 for event in changes)
    again = sum(event.get("again") or 0 for event in events if event["kind"] in ("generation", "resumed"))
    note = "no worker lost or joined" if not changes else f"{pause_s:.1f} s of pauses, {count_noun(again, 'step')} again"
    if again and not changes:
        note = f"no worker lost or joined; {count_noun(again, 'step')} again after a resumption"
    return Fact("recoveries", f"{len(changes):,}", note)


def training_facts(events: Sequence[Line], done: Sequence[Line]) -> list[Fact]:
    """The optimizer, the learning rate and the batch size of the last start; none of those that the folder does not say."""
    started = next((event for event in reversed(events) if event["kind"] == "started"), {})
    facts = []
    if started.get("optimizer"):
        name = re.split(r"[:.]", started["optimizer"])[-1]
        facts.append(Fact("optimizer", name[:40], str(started.get("optimizer_args", ""))))
    if rates := [rate for line in done if (rate := _number(line.get("lr"))) is not None]:
        note = f"first {rates[0]:.4g}, largest {max(rates):.4g}" if min(rates) != max(rates) else "in all steps"
        facts.append(Fact("learning rate", f"{rates[-1]:.4g}", note))
    if started.get("batch_size"):
        parts = started.get("microbatches")
        facts.append(
            Fact("batch size", f"{started['batch_size']:,}", f"in {parts:,} microbatch{'es' * (parts > 1)}" if parts else "")
        )
    return facts


def _loss_facts(done: Sequence[Line], validated: Sequence[Line]) -> list[Fact]:
    """The last loss, and the last and the best validation loss."""
    losses = [(line["step"], loss) for line in done if (loss := _number(line.get("loss"))) is not None]
    facts = []
    if losses:
        odd = len(done) - len(losses)
        note = f"{count_noun(odd, 'step')} not finite" if odd else f"first {format_loss(losses[0][1])}"
        facts.append(Fact("loss", format_loss(losses[-1][1]), note, "warn" if odd else ""))
    else:
        facts.append(Fact("loss", "not finite", count_noun(len(done), "step"), "bad"))
    if validated:
        best = min(validated, key=lambda line: line["validation_loss"])
        note = (
            "the best so far"
            if best is validated[-1]
            else f"best {format_loss(best['validation_loss'])} at step {best['step']:,}"
        )
        facts.append(Fact("validation loss", format_loss(validated[-1]["validation_loss"]), note))
    return facts


def format_seconds(seconds: float) -> str:
    """A short time as text: `103 ms`, `2.1 s`."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def format_rate(rate: float) -> str:
    """Samples a second as text, three digits at least."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def describe_prediction(plan: Line | None, done: Sequence[Line]) -> str:
    """The predicted step beside the measured ones, as a sentence; empty if nothing was predicted."""
    predicted = _number((plan or {}).get("predicted_ms"))
    if predicted is None:
        return ""
    text = f"A step was predicted to take {format_seconds(predicted / 1000)}"
    if (plan or {}).get("predicted_for"):
        text += f" with {str((plan or {})['predicted_for'])[:80]}"
    return text + (
        f"; the median of all steps is {format_seconds(statistics.median(x['seconds'] for x in done))}." if done else "."
    )


# -- the charts ------------------------------------------------------------------------------------------------------------


def draw_loss(done: Sequence[Line], validated: Sequence[Line]) -> str:
    """The chart of the loss; empty without a finite loss."""
    losses = [(float(line["step"]), loss) for line in done if (loss := _number(line.get("loss"))) is not None]
    values = [(float(line["step"]), float(line["validation_loss"])) for line in validated]
    if not losses and not values:
        return ""
    series = [
        ChartSeries("training loss" + " (faint: every step)" * (len(losses) > 80), LOSS_COLOUR, losses, noisy=True),
        ChartSeries("validation loss", VALIDATION_COLOUR, values, dots=True),
    ]
    return line_chart_svg([one for one in series if one.points], title="loss", x_name="step", y_name="loss")


def draw_memory(done: Sequence[Line]) -> str:
    """The chart of the workers' peak resident memory; empty if no step reports it."""
    peaks = [(float(line["step"]), sizes) for line in done if (sizes := _sizes(line))]
    if not peaks:
        return ""
    many = any(len(sizes) > 1 for _, sizes in peaks)
    largest = [(step, max(sizes) / 2**20) for step, sizes in peaks]
    smallest = [(step, min(sizes) / 2**20) for step, sizes in peaks]
    series = [ChartSeries("largest worker" if many else "the worker", LARGEST_COLOUR, largest)]
    series += [ChartSeries("smallest worker", SMALLEST_COLOUR, smallest)] * many
    return line_chart_svg(series, title="memory", x_name="step", y_name="peak resident memory, MiB", zero=True)


def _sizes(line: Line) -> list[float]:
    """Peak resident memory by rank, in bytes; empty if one is unknown."""
    found = line.get("peak_rss_bytes") or ()
    sizes = [size for each in found if (size := _number(each)) is not None and size > 0]
    return sizes if len(sizes) == len(found) else []


# -- the plan --------------------------------------------------------------------------------------------------------------


def read_plan(plan: Line | None) -> ParallelPlan | None:
    """The plan of plan.json; None if the file does not give a whole one, or one of an absurd size."""
    stages = (plan or {}).get("stages") or ()
    if not stages or not all(isinstance(stage.get(key), int) for stage in stages for key in ("first", "last", "position")):
        return None
    made = [StagePlan(s["first"], s["last"], s["position"], s["replicas"], s.get("shards") or 1) for s in stages]
    if len(made) > MOST_WORLD or sum(stage.replicas * stage.shards for stage in made) > MOST_WORLD:
        return None
    try:
        return ParallelPlan(tuple(made))
    except PlanError:
        return None


def stage_rows(plan: ParallelPlan | None, facts: Line, text: Callable[[object], str]) -> list[StageRow]:
    """A row for each stage, at most `MOST_STAGES`."""
    if plan is None:
        return []
    layers = facts.get("layers") or ()
    rows = []
    for number, stage in enumerate(plan.stages[:MOST_STAGES]):
        here = layers[stage.first : stage.last]
        whole = len(here) == stage.last - stage.first and all(isinstance(x.get("parameters"), int) for x in here)
        parameters = sum(layer["parameters"] for layer in here) if whole else None
        names = layer_names(layers, stage, text)
        count = stage.last - stage.first
        rows.append(StageRow(number, names, count, parameters, stage.replicas, stage.shards, stage.position))
    return rows


def layer_names(layers: Sequence[Line], stage: StagePlan, text: Callable[[object], str]) -> str:
    """The first and the last layer of a stage by name: `embed .. block1`; by number if names are not known."""
    here = [text(layer["name"])[:80] for layer in layers[stage.first : stage.last]]
    if len(here) != stage.last - stage.first:
        return f"{stage.first} .. {stage.last - 1}" if stage.last - stage.first > 1 else f"{stage.first}"
    return here[0] if len(here) == 1 else f"{here[0]} .. {here[-1]}"


def worker_rows(
    plan: ParallelPlan | None, files: RunFiles, done: Sequence[Line], text: Callable[[object], str]
) -> list[WorkerRow]:
    """A row for each seat, at most `MOST_WORKERS`."""
    if plan is None:
        return []
    facts, members = files.plan or {}, list((files.members or {}).get("members") or ())
    layers, predicted = facts.get("layers") or (), facts.get("predicted_memory_bytes") or ()
    peaks = _sizes(done[-1]) if done else []
    rows = []
    for rank in range(min(plan.world, MOST_WORKERS)):
        stages = plan.stages_of(rank)
        rows.append(
            WorkerRow(
                re.sub(r"^worker \d+ \((.*)\)$", r"\1", plan.coordinate(rank)),
                _process(members[rank], text) if len(members) == plan.world else "",
                " + ".join(layer_names(layers, plan.stages[stage], text) for stage in stages[:4])
                + " + ..." * (len(stages) > 4),
                dict(predicted[rank]) if len(predicted) == plan.world else {},
                int(peaks[rank]) if len(peaks) == plan.world else None,
            )
        )
    return rows


def _process(member: Line, text: Callable[[object], str]) -> str:
    """A worker's process as text: `worker 3, node b09ad58f, pid 5003`."""
    parts = [f"worker {member['worker']}"] if "worker" in member else []
    parts += [f"node {text(short_node_id(member['node']))}"] if member.get("node") else []
    parts += [f"pid {member['pid']}"] if member.get("pid") else []
    return ", ".join(parts)


# -- the story -------------------------------------------------------------------------------------------------------------


def tell_story(events: Sequence[Line], text: Callable[[object], str]) -> list[tuple[float | None, str, str]]:
    """(time, kind, line) of the events, oldest first; of a row of checkpoints only the last one."""
    tell = EventNarrator()
    told: list[tuple[float | None, str, str]] = []
    for number, event in enumerate(events):
        line = tell(event)
        following = events[number + 1]["kind"] if number + 1 < len(events) else ""
        if line is None or (event["kind"] == "checkpoint" == following):
            continue
        if event["kind"] == "checkpoint":
            line = f"step {event['step']}: checkpoint saved"
        kind = "failed" if event.get("end") == "failed" else str(event["kind"])[:40]
        told.append((event.get("time"), kind, text(line)))
    return told


def shorten_story(
    told: Sequence[tuple[float | None, str, str]],
) -> tuple[list[tuple[float | None, str, str]], int]:
    """(the first and the last lines of a story, how many between them are left out)."""
    left_out = max(0, len(told) - FIRST_LINES - LAST_LINES)
    return ([*told[:FIRST_LINES], *told[FIRST_LINES + left_out :]] if left_out else list(told)), left_out
