"""Gathers what a report says of a run, from the files in its folder. Pure; time is an argument.

Times of the story and of the start are Unix seconds. Texts are without secrets, and not yet escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raypar.console.run_status import RunStatus, describe_arithmetic, format_loss
from raypar.draw.line_chart import ChartSeries, line_chart_svg
from raypar.draw.run_history_chart import throughput_svg
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.plan import ParallelPlan, StagePlan
from raypar.plan.loss_scale import format_loss_scale
from raypar.plan.wording import count_noun
from raypar.record.document_fields import LayerFacts, MembersDocument, PlanDocument
from raypar.record.events import EndOfRun, SavedCheckpoint
from raypar.record.field_types import WorkerFacts, is_finite_number
from raypar.record.fold import SHOWN_DATA_WAIT, RunView, StepStatistics, peak_sizes
from raypar.record.metric_names import is_of_validation, split_name
from raypar.record.stages_of_plan import plan_of_stages
from raypar.record.story import StoryLine
from raypar.record.totals import read_totals
from raypar.record.value_text import format_duration, format_metric, short_node_id

LOSS_COLOUR, VALIDATION_COLOUR, LARGEST_COLOUR, SMALLEST_COLOUR = "#2B7BBA", "#D9861A", "#7A4FA3", "#2FA584"
METRIC_COLOURS = ("#2FA584", "#7A4FA3", "#D9861A", "#2B7BBA", "#B3261E")
FEW_POINTS = 80
"""A metric with more values in training than this is drawn faintly, with its mean as the line."""
MOST_METRICS = 12
"""How many metrics have a chart and a number in the summary."""
FIRST_LINES, LAST_LINES = 60, 240
"""How many of the first and of the last lines of a story are told."""
MOST_WORKERS, MOST_STAGES = 128, 256
"""Rows of the tables of workers and stages; they say how many more there are."""
TEXT_CHARACTERS = 1200
"""A text of an event is cut after so many characters."""


@dataclass(frozen=True)
class RunFiles:
    """What is read from a run folder. What is missing or damaged is empty."""

    view: RunView
    """What its events say."""
    plan: PlanDocument | None
    """plan.json."""
    members: MembersDocument | None
    """members.json."""
    job: str | None
    """The text of job.yaml, without secrets."""
    swimlane: str | None
    """The drawing of a step; None: the folder has no data of one."""
    totals: Mapping[str, Json] | None = None
    """totals.json."""
    has_drawing_file: bool = False
    """Whether the folder has a drawing of a step."""


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
    held: Mapping[str, int] = field(default_factory=dict)
    """Kind of memory -> bytes that it has reported last (`WorkerCore.memory`); empty if it has not."""

    @property
    def above_empty_bytes(self) -> int | None:
        """The resident memory of its process above that before it held anything of the model; None if it is not known."""
        return max(0, self.held["rss"] - self.held["empty"]) if {"rss", "empty"} <= self.held.keys() else None


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
    metric_charts: tuple[str, ...]
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
    """(time, tone, line) of events; the tone is good, bad, warn or empty."""
    lines_left_out: int
    """Lines of the story that are left out after the first `FIRST_LINES`."""
    job: str
    """The job file."""
    environment: tuple[tuple[str, str], ...]
    """(name, value) of what a worker computed with, as the last start has recorded it."""


def build_run_report(status: RunStatus, files: RunFiles, now: float, clean: Callable[[str], str] = str) -> RunReport:
    """The report of a run. `clean` removes secrets from a text."""

    def text(value: str) -> str:
        return clean(value[:TEXT_CHARACTERS])

    view = files.view
    history = view.history.history(with_losses=False)  # the report has a chart of its own for them
    marks = tuple(replace(m, label=text(m.label)[:160], brief=m.brief[:60]) for m in history.marks)
    plan = read_plan(files.plan)
    result, tone = describe_result(status)
    told, left_out = view.story.lines(FIRST_LINES, LAST_LINES)
    computing = text(describe_arithmetic(status))
    fingerprint = (view.start.fingerprint if view.start is not None else None) or {}
    return RunReport(
        run=text(status.run),
        result=result,
        tone=tone,
        subtitle=", schedule ".join(text(part) for part in (status.plan, status.schedule) if part) + computing,
        why=text(status.why),
        made_at=now,
        started_at=view.started_s,
        facts=tuple(
            replace(fact, name=text(fact.name), value=text(fact.value), note=text(fact.note))
            for fact in (*summary_facts(status, files, history.between_starts_s), *metric_facts(view), *training_facts(view))
        ),
        survived=view.faults or "",
        loss_chart=draw_loss(view),
        metric_charts=tuple(clean(chart) for chart in draw_metrics(view)),
        throughput_chart=throughput_svg(replace(history, marks=marks), title="") if view.steps.count else "",
        memory_chart=draw_memory(view),
        swimlane=files.swimlane or "",
        swimlane_missing="" if files.swimlane else describe_missing_swimlane(status, files.has_drawing_file),
        step_prediction=describe_prediction(files.plan, view.steps),
        stages=tuple(stage_rows(plan, files.plan, text)),
        workers=tuple(worker_rows(plan, files, text)),
        all_workers=plan.world if plan is not None else 0,
        story=tuple(tell_line(one, text) for one in told),
        lines_left_out=left_out,
        job=files.job or "",
        environment=tuple((text(k), text(v)) for k, v in fingerprint.items()),
    )


def describe_missing_swimlane(status: RunStatus, has_file: bool) -> str:
    """Why a report has no drawing of a step, in a sentence or two. `has_file`: the folder has one."""
    if has_file:
        return "The drawing of a step is swimlane.svg in the run folder, which has no data to draw it here, or too many."
    if status.phase != "ended" and status.silent_s is None:
        return "The folder has no drawing of a step yet: it is written when the run ends."
    if status.phase != "ended":
        return "The folder has no drawing of a step: the run's driver did not come to its end."
    return (
        "The folder has no drawing of a step: none of those that are measured (the 1st, 5th, 21st, 101st and last of a start) "
        "was done by all workers of the plan that the run was started with. trace_every: 1 measures all steps."
    )


# -- the summary -----------------------------------------------------------------------------------------------------------


def describe_result(status: RunStatus) -> tuple[str, str]:
    """(the state of the run in a word or two, good, bad or warn)."""
    if status.silent_s is not None:
        return f"no news for {format_duration(status.silent_s)}", "bad"
    if status.phase != "ended":
        return status.phase[:40], "good" if status.phase == "running" else "warn"
    end = (status.end or "ended")[:40]
    return end, {"done": "good", "failed": "bad"}.get(end, "warn")


def summary_facts(status: RunStatus, files: RunFiles, between_starts_s: Sequence[float]) -> list[Fact]:
    """The numbers at the head of the report."""
    of = f"of {status.steps:,}" if status.steps is not None else ""
    steps_tone = "" if status.steps is None or status.step >= status.steps or status.phase != "ended" else "warn"
    facts = [Fact("steps", f"{status.step:,}", of, steps_tone)]
    view, done, time_s = files.view, files.view.steps, files.view.history.end_s
    if not done.count:
        return facts
    starts = describe_starts(between_starts_s)
    facts.append(Fact("time trained", format_duration(time_s), f"{starts}median step {format_seconds(done.median_step_s)}"))
    if time_s and done.seconds:
        pauses = "pauses included, the time between starts not" if starts else "all pauses included"
        tokens = f"{done.counted / time_s:,.0f} tokens/s" if done.counted > 1.5 * done.samples else pauses
        facts.append(Fact("samples per second", format_rate(done.samples / time_s), tokens))
        goodput = read_totals(files.totals).goodput
        if goodput is None:
            goodput = view.history.goodput or 0.0
        facts.append(Fact("goodput", f"{100 * goodput:.1f} %", "of the time in steps that count"))
    if done.bubble_seconds:
        predicted = files.plan.get("predicted_bubble") if files.plan is not None else None
        note = f"predicted {100 * predicted:.1f} %" if is_finite_number(predicted) else ""
        facts.append(Fact("bubble", f"{100 * done.bubble_s / done.bubble_seconds:.1f} %", note))
    if done.seconds and (waited := done.data_wait_s / done.seconds) >= SHOWN_DATA_WAIT:
        facts.append(Fact("waiting for samples", f"{100 * waited:.1f} %", "of the time in steps", "warn"))
    return [*facts, _recovery_fact(view), *_loss_facts(view)]


def describe_starts(between_s: Sequence[float]) -> str:
    """How many starts a run has had, and that the time between them is not counted; empty for one start."""
    if not between_s:
        return ""
    return f"in {len(between_s) + 1:,} starts, without the {format_duration(sum(between_s))} between them; "


def _recovery_fact(view: RunView) -> Fact:
    """How often the workers or the plan have changed, and what that has cost."""
    changes, again = view.totals.recoveries, view.totals.replayed_steps
    note = f"{view.totals.recovery_pause_s:.1f} s of pauses, {count_noun(again, 'step')} again"
    if not changes:
        note = "no worker lost or joined" + (f"; {count_noun(again, 'step')} again after a resumption" if again else "")
    return Fact("recoveries", f"{changes:,}", note)


def training_facts(view: RunView) -> list[Fact]:
    """The optimizer, the learning rate and the batch size of the last start; none of those that the folder does not say."""
    facts, started = [], view.start
    if started is not None and started.optimizer:
        facts.append(Fact("optimizer", re.split(r"[:.]", started.optimizer)[-1][:40], started.optimizer_args or ""))
    if view.steps.learning_rates is not None:
        first, least, largest, last = view.steps.learning_rates
        note = f"first {first:.4g}, largest {largest:.4g}" if least != largest else "in all steps"
        facts.append(Fact("learning rate", f"{last:.4g}", note))
    if view.last_step is not None and (scale := view.last_step.loss_scale) is not None:
        note = f"{count_noun(view.steps.overflows, 'step')} skipped by overflow"
        facts.append(Fact("loss scale", format_loss_scale(scale), note))
    if started is not None and started.batch_size:
        parts = started.microbatches
        note = f"in {count_noun(parts, 'microbatch', 'microbatches')}" if parts else ""
        facts.append(Fact("batch size", f"{started.batch_size:,}", note))
    return facts


def _loss_facts(view: RunView) -> list[Fact]:
    """The last loss, and the last and the best validation loss."""
    steps, facts = view.steps, []
    if steps.first_loss is not None and steps.last_loss is not None:
        odd = steps.non_finite
        note = f"{count_noun(odd, 'step')} not finite" if odd else f"first {format_loss(steps.first_loss)}"
        facts.append(Fact("loss", format_loss(steps.last_loss), note, "warn" if odd else ""))
    else:
        facts.append(Fact("loss", "not finite", count_noun(steps.count, "step"), "bad"))
    last, best = view.validation, view.best_validation
    if last is not None and best is not None and last.validation_loss is not None and best.validation_loss is not None:
        note = "the best so far" if best is last else f"best {format_loss(best.validation_loss)} at step {best.step:,}"
        facts.append(Fact("validation loss", format_loss(last.validation_loss), note))
    return facts


def metric_facts(view: RunView) -> list[Fact]:
    """The last value of each metric of validations, and its range."""
    facts = []
    for name, one in list(view.metrics.items())[:MOST_METRICS]:
        note = "no finite value" if one.least is None else f"at step {one.last_step:,}"
        if one.least is not None and one.largest is not None and one.least[0] != one.largest[0]:
            note = (
                f"least {format_metric(one.least[0])} at step {one.least[1]:,}, "
                f"largest {format_metric(one.largest[0])} at step {one.largest[1]:,}"
            )
        tone = "" if math.isfinite(one.last) else "warn"
        facts.append(Fact(metric_title(name), format_metric(one.last), note, tone))
    return facts


def metric_title(name: str) -> str:
    """A metric's name as people read it: `accuracy (validation)`, `accuracy (validation, short)`."""
    of_set, short = split_name(name)
    if of_set is None:
        return shorten(name, 60)
    return f"{shorten(short, 60)} (validation{f', {shorten(of_set, 40)}' if of_set else ''})"


def format_seconds(seconds: float) -> str:
    """A short time as text: `103 ms`, `2.1 s`."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def format_rate(rate: float) -> str:
    """Samples a second as text, three digits at least."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def describe_prediction(plan: PlanDocument | None, done: StepStatistics) -> str:
    """The predicted step beside the measured ones, as a sentence; empty if nothing was predicted."""
    predicted = plan.get("predicted_ms") if plan is not None else None
    if plan is None or not is_finite_number(predicted):
        return ""
    text = f"A step was predicted to take {format_seconds(predicted / 1000)}"
    if predicted_for := plan.get("predicted_for"):
        text += f" with {predicted_for[:80]}"
    return text + (f"; the median of all steps is {format_seconds(done.median_step_s)}." if done.count else ".")


# -- the charts ------------------------------------------------------------------------------------------------------------


def draw_loss(view: RunView) -> str:
    """The chart of the loss; empty without a finite loss."""
    losses = [(step, loss) for step, loss, _ in view.history.losses.points]
    values = [(step, loss) for step, loss, _ in view.history.validations.points]
    if not losses and not values:
        return ""
    of_sets = [name for name in view.metrics if _is_loss_of_set(name) and view.metrics[name].finite.points]
    series = [
        ChartSeries("training loss" + " (faint: every step)" * (len(losses) > 80), LOSS_COLOUR, losses, noisy=True),
        *(
            ChartSeries(
                metric_title(name),
                (VALIDATION_COLOUR, *METRIC_COLOURS)[place % (1 + len(METRIC_COLOURS))],
                [(step, value) for step, value in view.metrics[name].finite.points],
                dots=True,
            )
            for place, name in enumerate(of_sets)
        ),
    ]
    if not of_sets:
        series.append(ChartSeries("validation loss", VALIDATION_COLOUR, values, dots=True))
    return line_chart_svg([one for one in series if one.points], title="loss", x_name="step", y_name="loss")


def _is_loss_of_set(name: str) -> bool:
    """Whether a number is the loss of one of several validation sets."""
    of_set, short = split_name(name)
    return bool(of_set) and short == "loss"


def draw_metrics(view: RunView) -> tuple[str, ...]:
    """A chart for each metric that has a finite value, with its values in training and in each set of the validation."""
    by_name: dict[str, list[str]] = {}
    for full in view.metrics:
        if not _is_loss_of_set(full):
            by_name.setdefault(split_name(full)[1], []).append(full)
    charts = []
    for number, (name, together) in enumerate([*by_name.items()][:MOST_METRICS]):
        together.sort(key=is_of_validation)
        points = {full: view.metrics[full].finite.points for full in together}
        series = [
            ChartSeries(
                metric_title(full),
                METRIC_COLOURS[(number + place) % len(METRIC_COLOURS)],
                [(step, value) for step, value in points[full]],
                noisy=full == name and len(points[full]) > FEW_POINTS,
                dots=True,
            )
            for place, full in enumerate(together)
            if points[full]
        ]
        if series:
            charts.append(line_chart_svg(series, title=shorten(name, 60), x_name="step", y_name=shorten(name, 40)))
    return tuple(charts)


def draw_memory(view: RunView) -> str:
    """The chart of the workers' peak resident memory; empty if no step reports it."""
    largest, smallest = ([(step, size / 2**20) for step, size in series.points] for series in view.peaks)
    if not largest:
        return ""
    many = view.several_workers
    series = [ChartSeries("largest worker" if many else "the worker", LARGEST_COLOUR, largest)]
    series += [ChartSeries("smallest worker", SMALLEST_COLOUR, smallest)] * many
    return line_chart_svg(series, title="memory", x_name="step", y_name="peak resident memory, MiB", zero=True)


# -- the plan --------------------------------------------------------------------------------------------------------------


def read_plan(plan: PlanDocument | None) -> ParallelPlan | None:
    """The plan of plan.json; None if the file does not give a whole one, or one of an absurd size."""
    return plan_of_stages((plan.get("stages") if plan is not None else None) or ())


def stage_rows(plan: ParallelPlan | None, facts: PlanDocument | None, text: Callable[[str], str]) -> list[StageRow]:
    """A row for each stage, at most `MOST_STAGES`."""
    if plan is None:
        return []
    layers = (facts.get("layers") if facts is not None else None) or ()
    rows = []
    for number, (stage, grid) in enumerate(zip(plan.stages[:MOST_STAGES], plan.grid_of_stage, strict=False)):
        here = layers[stage.first : stage.last]
        whole = len(here) == stage.last - stage.first and all(isinstance(x.get("parameters"), int) for x in here)
        parameters = sum(layer["parameters"] for layer in here) if whole else None
        names = layer_names(layers, stage, text)
        count = stage.last - stage.first
        rows.append(StageRow(number, names, count, parameters, stage.replicas, stage.shards, grid))
    return rows


def layer_names(layers: Sequence[LayerFacts], stage: StagePlan, text: Callable[[str], str]) -> str:
    """The first and the last layer of a stage by name: `embed .. block1`; by number if names are not known."""
    here = [text(layer["name"])[:80] for layer in layers[stage.first : stage.last]]
    if len(here) != stage.last - stage.first:
        return f"{stage.first} .. {stage.last - 1}" if stage.last - stage.first > 1 else f"{stage.first}"
    return here[0] if len(here) == 1 else f"{here[0]} .. {here[-1]}"


def worker_rows(plan: ParallelPlan | None, files: RunFiles, text: Callable[[str], str]) -> list[WorkerRow]:
    """A row for each seat, at most `MOST_WORKERS`."""
    if plan is None:
        return []
    facts: PlanDocument = files.plan or {}
    members = (files.members.get("members") if files.members is not None else None) or ()
    layers, predicted = facts.get("layers") or (), facts.get("predicted_memory_bytes") or ()
    peaks = peak_sizes(files.view.last_step)
    held = (files.totals or {}).get("worker_memory_bytes")
    measured = held if isinstance(held, list) and len(held) == plan.world else [{}] * plan.world
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
                _sizes(measured[rank]),
            )
        )
    return rows


def _sizes(found: Json) -> dict[str, int]:
    """The whole numbers of a JSON object."""
    return {kind: n for kind, n in found.items() if type(n) is int} if isinstance(found, dict) else {}


def _process(member: WorkerFacts, text: Callable[[str], str]) -> str:
    """A worker's process as text: `worker 3, node b09ad58f, pid 5003`."""
    parts = [f"worker {member['worker']}"] if "worker" in member else []
    parts += [f"node {text(short_node_id(member['node']))}"] if member.get("node") else []
    parts += [f"pid {member['pid']}"] if member.get("pid") else []
    return ", ".join(parts)


# -- the story -------------------------------------------------------------------------------------------------------------


def tell_line(one: StoryLine, text: Callable[[str], str]) -> tuple[float | None, str, str]:
    """(time, tone, text) of a line of the story."""
    line, event = one.line, one.event
    if isinstance(event, SavedCheckpoint):
        line = f"step {event.step}: checkpoint saved"
    tone = "bad" if isinstance(event, EndOfRun) and event.end == "failed" else event.tone
    return one.time, tone, text(line)
