"""Builds the status of a run, of what its events and the documents of its folder say, and its text. Pure; time is given."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from raypar.elastic.user_messages import plain_failure_text
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.plan.loss_scale import format_loss_scale
from raypar.plan.parallel_plan import describe_mesh
from raypar.plan.wording import align_columns, count_noun
from raypar.record.document_fields import ClusterDocument, MembersDocument, NodeFacts, PlanDocument
from raypar.record.events import ReplayProgress
from raypar.record.field_types import SeatedWorker, WorkerFacts, is_finite_number
from raypar.record.fold import ACTIVE_PHASES, RunView
from raypar.record.metric_names import short_name
from raypar.record.value_text import format_duration, format_metric, seat_without_rank, short_node_id
from raypar.storage.run_folder import resume_argument

SILENT_S, SILENT_STEPS = 10.0, 5.0
"""A run under way is silent if it has written nothing for longer than both of these: seconds, and median steps."""
QUIET_S = {"starting": 60.0, "waiting": 45.0}
"""Phase -> a longer limit than `SILENT_S`: torch is loading, or the run waits and says so only twice a minute."""
STORY_LINES = 12
"""How many of the last events are printed."""
MOST_METRICS = 12
"""How many metrics are printed."""
STATES = {"there": "", "leaving": ", drained: it leaves", "gone": ", gone"}
"""State of a node -> how it is printed."""


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. Times are Unix seconds; a value that the folder does not show is None or empty."""

    run: str
    """The run's name."""
    path: str
    """Its folder."""
    phase: str
    """starting, running, recovering, waiting, ..., or ended."""
    generation: int | None
    """The present generation of workers."""
    step: int
    """Number of steps done."""
    steps: int | None
    """Number of steps of the job."""
    samples_per_s: float | None
    """The speed of the last steps."""
    step_s: float | None
    """The median time of the last steps."""
    mean_step_s: float | None
    """The mean time of the same steps, to which `samples_per_s` belongs."""
    data_wait: float | None
    """The share of their time in which workers waited for samples to be read, if it is worth a word."""
    speed_steps: int
    """Number of steps over which `samples_per_s`, `step_s` and `mean_step_s` are measured."""
    loss: float | None
    """The loss of the last step; None if that is not a finite number."""
    first_loss: float | None
    """The first finite loss of the run."""
    non_finite_losses: int
    """Number of steps whose loss is NaN or infinite."""
    skipped_steps: int
    """Number of steps that changed nothing, because loss or gradient norm was not finite."""
    validation_loss: float | None
    """The last validation loss."""
    validation_step: int | None
    """Number of steps done at that validation."""
    plan: str | None
    """The plan in words."""
    schedule: str | None
    """The schedule's name."""
    precision: str | None
    """In what layers and the loss compute, such as bf16; None: in the job's `dtype`."""
    reduction: str | None
    """`fast` if the job gives up equal bits for it; None: it does not."""
    members: tuple[SeatedWorker, ...]
    """Worker, coordinate, node, pid and host of each worker with a seat; of an ended run the last ones."""
    spares: tuple[WorkerFacts, ...]
    """The same of workers without a seat."""
    wanted: int | None
    """How many workers the run would like to have."""
    end: str | None
    """done, stopped, interrupted or failed; None while the run lasts."""
    why: str
    """Why the run has ended, recovers or waits."""
    replaying: Mapping[str, int] | None
    """`step`: the step that is replayed; `until`: the last one to replay."""
    silent_s: float | None
    """Seconds without a new line, if that is unusually long for a run that has not ended."""
    resume: str | None
    """The argument for `raypar resume`; None without a checkpoint."""
    driver_pid: int | None
    """The driver's process."""
    nodes: tuple[NodeFacts, ...]
    """The raylets of a local Ray cluster: node, pid, cpus, head, and `state`: there, leaving (it is drained) or gone."""
    address: str | None
    """The address of the Ray cluster."""
    submitted: bool
    """Whether a submitted job trains the run, or did."""
    survived: str | None
    """The faults of the run, counted, in one line."""
    story: tuple[tuple[float | None, str], ...]
    """(time, line) of the last events, oldest first."""
    earlier_lines: int = 0
    """Number of lines before those of `story`."""
    ended_non_finite: bool = False
    """Whether a loss or gradient norm that is not finite has ended the run."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Name -> last value of what steps and validations have measured beside the loss; None for one that is not finite."""
    loss_scale: float | None = None
    """What the loss of the last step was multiplied by before the backward pass; None: it is not scaled."""

    def facts(self) -> dict[str, Json]:
        """The status as data, for `--json`."""
        rare = ("data_wait", "earlier_lines", "ended_non_finite", "metrics", "loss_scale")
        return {key: value for key, value in asdict(self).items() if value or key not in rare}


def build_run_status(
    run: str,
    path: str,
    view: RunView,
    *,
    steps: int | None,
    plan: PlanDocument | None,
    members: MembersDocument | None,
    cluster: ClusterDocument | None,
    gone: Collection[str] = (),
    resumable: bool = False,
    now: float,
) -> RunStatus:
    """The status that a view and the documents of a run folder show. `plan` is plan.json, `members` members.json; `gone`:
    nodes of the local Ray cluster whose raylet does not run any more; `resumable`: there is a checkpoint."""
    last, validation, told = view.last_step, view.validation, members or MembersDocument()
    speed, ended, (story, earlier) = view.recent_speed(now), view.ended(members), view.story.summary()
    phase = "ended" if ended else str(members["phase"]) if members else "running" if last else "starting"
    heard_s = max((at for at in (view.last_s, told.get("time")) if at), default=None)
    return RunStatus(
        run=run,
        path=path,
        phase=phase,
        generation=told.get("generation"),
        step=max(last.step if last else 0, told.get("step") or 0),
        steps=steps,
        samples_per_s=speed.samples_per_s,
        step_s=speed.median_s,
        mean_step_s=speed.mean_s,
        data_wait=speed.data_wait if speed.waits_for_data else None,
        speed_steps=speed.steps,
        loss=finite_or_none(last.loss if last is not None else None),
        first_loss=view.steps.first_loss,
        non_finite_losses=view.steps.non_finite,
        skipped_steps=view.steps.skipped,
        validation_loss=validation.validation_loss if validation is not None else None,
        validation_step=validation.step if validation is not None else None,
        plan=told.get("plan") or describe_plan_file(plan),
        schedule=told.get("schedule") or (plan["schedule"] if plan and "schedule" in plan else None),
        precision=view.start.precision if view.start is not None else None,
        reduction=view.start.reduction if view.start is not None else None,
        members=tuple(told.get("members", ())),
        spares=tuple(told.get("spares", ())),
        wanted=told.get("wanted"),
        why=plain_failure_text(str(ended.why or ended.end) if ended else str(told.get("why") or "")),
        end=ended.end if ended else None,
        replaying=told.get("replaying") if phase in ACTIVE_PHASES else None,
        silent_s=overdue_silence_s(phase, heard_s, speed.median_s, now),
        resume=resume_argument(path) if resumable else None,
        driver_pid=told.get("driver_pid") if phase != "ended" else None,
        nodes=tuple(local_node_states(cluster or {}, gone, view)) if phase != "ended" else (),
        address=(cluster or {}).get("address") if not ended else None,
        submitted=bool((cluster or {}).get("submitted")),
        survived=view.faults,
        story=tuple((one.time, one.summary) for one in story),
        earlier_lines=earlier,
        ended_non_finite=bool(ended and ended.non_finite),
        metrics={name: finite_or_none(one.last) for name, one in view.metrics.items()},
        loss_scale=last.loss_scale if last is not None else None,
    )


def finite_or_none(value: float | None) -> float | None:
    """The value; None for one that is not finite."""
    return value if value is not None and is_finite_number(value) else None


def format_losses(status: RunStatus) -> str | None:
    """The losses as text: `1.8312 (4.1744 at first); in validation 1.9021 after step 50`; None before the first step."""
    if status.loss is None and not status.non_finite_losses:
        return None
    text = "not finite" if status.loss is None else format_loss(status.loss)
    if status.first_loss is not None and status.step > 1:
        text += f" ({format_loss(status.first_loss)} at first)"
    if status.non_finite_losses > (status.loss is None):
        text += f", not finite in {count_noun(status.non_finite_losses, 'step')}"
    if status.skipped_steps:
        text += f", {count_noun(status.skipped_steps, 'step')} skipped"
    if status.validation_loss is not None:
        text += f"; in validation {format_loss(status.validation_loss)} after step {status.validation_step}"
    return text


def format_metrics(status: RunStatus) -> str | None:
    """The last values of metrics as text: `accuracy 0.8125, f1 0.7741`; None without metrics."""
    shown = list(status.metrics.items())[:MOST_METRICS]
    named = (
        f"{shorten(short if (short := short_name(name)) not in status.metrics else name, 40)} "
        f"{format_metric(math.nan if value is None else value)}"
        for name, value in shown
    )
    more = len(status.metrics) - len(shown)
    return ", ".join(named) + f" and {more} more" * (more > 0) or None


def format_loss(value: float) -> str:
    """A loss as text: `1.8312`, `2.31e-06`."""
    return f"{value:,.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"


def overdue_silence_s(phase: str, last: float | None, step_s: float | None, now: float) -> float | None:
    """Seconds since the `last` line if a run under way has been silent for too long; else None."""
    if phase not in ACTIVE_PHASES or last is None:
        return None
    allowed = max(QUIET_S.get(phase, SILENT_S), SILENT_STEPS * (step_s or 0.0))
    return now - last if now - last > allowed else None


def local_node_states(cluster: ClusterDocument, gone: Collection[str], view: RunView) -> Iterator[NodeFacts]:
    """The raylets of the run's local Ray cluster, with the state of each."""
    for node in cluster.get("nodes", ()):
        state = "gone" if node["node"] in gone else "leaving" if view.is_leaving(node["node"]) else "there"
        yield {**node, "state": state}


def describe_plan_file(plan: PlanDocument | None) -> str | None:
    """The plan of a plan.json in words: `2 stages x 2 replicas`; None if it does not say."""
    if not plan or "stages" not in plan:
        return None
    return describe_mesh(
        [stage["replicas"] for stage in plan["stages"]], [stage.get("shards") or 1 for stage in plan["stages"]]
    )


def format_status(status: RunStatus) -> str:
    """The status as text for the terminal."""
    title = f"run {status.run}: {status.end if status.phase == 'ended' and status.end else status.phase}"
    if status.silent_s is not None:
        title = f"run {status.run}: no news for {format_duration(status.silent_s)}: stuck or killed; it was {status.phase}"
    if status.generation is not None:
        title += f", generation {status.generation}"
    title += f", step {status.step}" + (f" of {status.steps}" if status.steps is not None else "")
    rows: list[tuple[str, str]] = []
    was = ", when it was last heard of" if status.silent_s is not None else ""
    if status.silent_s is not None or status.end in ("stopped", "interrupted", "failed"):
        advice = resume_advice(status.resume, submitted=status.submitted)
        if status.ended_non_finite:  # the same step has the same numbers again
            debug = "JOB" if status.submitted else resume_argument(status.path)
            advice = f"`raypar debug {debug}` names the first layer with a NaN or an infinite number; then {advice}"
        rows.append(("next", advice))
    if status.samples_per_s is not None:
        time_of_step, median = format_step_times(status)
        of = "mean of the last " + count_noun(status.speed_steps, "step") if status.speed_steps > 1 else "the last step"
        rows.append(
            ("speed", f"{status.samples_per_s:,.0f} samples/s, {time_of_step} ({'; '.join(filter(None, [of, median]))})")
        )
    if status.data_wait is not None:
        rows.append(("samples", f"workers wait for them {100 * status.data_wait:.0f} % of a step"))
    if (losses := format_losses(status)) is not None:
        rows.append(("loss", losses))
    if (metrics := format_metrics(status)) is not None:
        rows.append(("metrics", metrics))
    if status.plan:
        schedule = f", schedule {status.schedule}" if status.schedule else ""
        rows.append(("plan", status.plan + schedule + describe_arithmetic(status)))
    if status.wanted is not None and status.wanted != len(status.members) and status.phase != "ended":
        rows.append(("workers", f"{len(status.members)} of {status.wanted} wanted"))
    if status.why:
        rows.append(("end" if status.phase == "ended" else "waits" if status.phase == "waiting" else "why", status.why))
    if status.replaying:
        rows.append(("", ReplayProgress(step=status.replaying["step"], until=status.replaying["until"]).progress_line()))
    if status.survived is not None and status.phase == "ended":
        rows.append(("before" if status.end == "failed" else "survived", status.survived))
    if status.driver_pid is not None:
        rows.append(("driver", f"pid {status.driver_pid}{was}"))
    if status.nodes:
        names = (
            f"{n['pid']} ({short_node_id(n['node'])}{', the head' * bool(n.get('head'))}{STATES[n['state']]})"
            for n in status.nodes
        )
        rows.append(("raylets", ", ".join(names) + was))
    parts = [title, *(f"  {name:<8} {value}".rstrip() for name, value in rows)]
    over = status.phase == "ended" or status.silent_s is not None
    if status.members or status.spares:
        parts += ["", *["  the last workers were"] * over, *("  " + line for line in format_worker_table(status))]
    if status.story:
        parts += ["", "  what happened"]
        earlier = status.earlier_lines + len(status.story) - STORY_LINES
        if earlier > 0:
            parts.append(f"  ({count_noun(earlier, 'earlier line')}: events.jsonl)")
        parts += [*(f"  {local_time(at)}  {indent_further_lines(line)}" for at, line in status.story[-STORY_LINES:])]
    return "\n".join(parts)


def describe_arithmetic(status: RunStatus) -> str:
    """What follows the plan where a job does not compute as it would by default: its precision, and a reduction that gives up
    equal bits."""
    precision = f", computing in {status.precision}" if status.precision else ""
    if status.loss_scale is not None:
        precision += f" (loss scale {format_loss_scale(status.loss_scale)})"
    return precision + (f", {status.reduction} reduction: not bit-identical" if status.reduction else "")


def resume_advice(resume: str | None, *, submitted: bool = False) -> str:
    """The advice about a run that was killed or has ended early. A run that is only stuck refuses to be resumed."""
    if resume is None:
        return f"`raypar {'submit' if submitted else 'train'}` anew: there is no checkpoint to go on from"
    return f"`raypar resume {resume}` goes on from the last checkpoint"


def format_worker_table(status: RunStatus) -> list[str]:
    """The table of workers: worker, place, node, pid, host."""
    rows = [("worker", "place", "node", "pid", "host")]
    rows += [_worker_row(one, seat_without_rank(one.get("coordinate") or "") or "?") for one in status.members]
    rows += [_worker_row(one, "spare") for one in status.spares]
    return align_columns(rows)


def _worker_row(one: WorkerFacts, place: str) -> tuple[str, str, str, str, str]:
    node = short_node_id(one.get("node") or "?")
    return str(one.get("worker", "?")), place, node, str(one.get("pid", "?")), str(one.get("host") or "?")


def local_time(at: float | None) -> str:
    """Local time of the day, `14:03:59`; blanks for None."""
    return time.strftime("%H:%M:%S", time.localtime(at)) if at is not None else " " * 8


def indent_further_lines(line: str) -> str:
    """The text with its further lines indented below the first."""
    return line.replace("\n", "\n" + " " * 12)


def format_step_times(status: RunStatus) -> tuple[str, str | None]:
    """(mean time of the last steps, their median): (`244 ms a step`, `median 126 ms`). None for a median that reads the same.

    `samples_per_s` belongs to the mean.
    """
    mean, median = (
        f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
        for seconds in (status.mean_step_s or 0.0, status.step_s or 0.0)
    )
    return f"{mean} a step", f"median {median}" if median != mean else None
