"""The events of a run: one frozen dataclass for each kind, with its fields, the line that users see, and its JSON. Pure.

An event says what happened to a run. Users see it, and most are kept in the run folder (`events.jsonl`, `metrics.jsonl`). The
events of `elastic/events.py` are different: they drive the run machine and are never written. Those are named by a participle
(`WorkerJoined`), these by a noun (`WorkerJoin`).

To add a kind of event, add a class here and construct it where it happens; if it changes what is known of a run, add a case to
`fold.py` or `totals.py`. Never rename or remove a field: run folders of older releases must stay readable. `step` is the number
of steps done. Nodes are shown by the first 8 characters of their id.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import ClassVar, get_args, get_type_hints

from raypar.elastic.user_messages import plain_failure_text
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.plan.wording import after_steps, count_noun
from raypar.record.field_types import (
    Anything,
    BestRules,
    Check,
    Elements,
    FirstStepIsOne,
    Flag,
    GenerationNumber,
    Numbers,
    ProcessId,
    Rate,
    Real,
    Seconds,
    StepNumber,
    Text,
    Texts,
    UnixTime,
    WorkerList,
    WorkerNumber,
    WorkerNumbers,
    numbers_in,
)
from raypar.record.metric_names import split_name
from raypar.record.value_text import format_metric, seat_without_rank, short_node_id

KINDS: dict[str, type[Event]] = {}
"""Kind, as the files name it -> its class."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events."""

    kind: ClassVar[str] = ""
    """The kind, as the files name it."""
    tone: ClassVar[str] = ""
    """Colour of its line: good, bad or warn; empty: none."""
    time: UnixTime | None = None
    """When it was written (Unix time, s)."""
    more: Mapping[str, Json] = field(default_factory=dict)
    """Fields that this release does not know; for steps and validations, also the metrics of callbacks."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls

    def line(self) -> str | None:
        """The line that users see; None if there is none."""
        return None

    def facts(self) -> dict[str, Json]:
        """The event as JSON data. Fields without a value are left out."""
        found: dict[str, Json] = {"kind": self.kind}
        if self.time is not None:
            found["time"] = self.time
        for name, _, required in fields_of(type(self)):
            value = getattr(self, name)
            if value is not None or required:
                found[name] = value
        return {**found, **self.more}


_FIELDS: dict[type[Event], tuple[tuple[str, Check, bool], ...]] = {}


def fields_of(kind: type[Event]) -> tuple[tuple[str, Check, bool], ...]:
    """(name, check, whether it is required) of each field of a kind: `text`, then its own, then inherited ones."""
    if kind in _FIELDS:
        return _FIELDS[kind]
    hints = get_type_hints(kind, include_extras=True)
    given = {one.name: one for one in fields(kind)}
    own = [name for cls in kind.__mro__ if cls not in (Event, object) for name in vars(cls).get("__annotations__", {})]
    found = []
    for name in sorted(dict.fromkeys(name for name in own if name in given), key=lambda name: name != "text"):
        checks = [extra for hint in (hints[name], *get_args(hints[name])) for extra in getattr(hint, "__metadata__", ())]
        assert checks, f"{kind.__name__}.{name} has no check: annotate it with one of the types of field_types.py"
        one = given[name]
        found.append((name, checks[0], one.default is MISSING and one.default_factory is MISSING))
    return _FIELDS.setdefault(kind, tuple(found))


@dataclass(frozen=True, kw_only=True)
class _TextEvent(Event):
    """An event with a text. The text is its line, unless the class makes a line of the other fields."""

    text: Text | None = None
    """What happened, in words."""

    def line(self) -> str | None:
        return self.text or None


@dataclass(frozen=True, kw_only=True)
class _WorkerEvent(Event):
    """An event about one worker."""

    worker: WorkerNumber
    """The worker's number."""
    node: Text | None = None
    """Its node: the beginning of the node's id."""
    pid: ProcessId | None = None
    """Its process."""
    host: Text | None = None
    """The address of its machine."""

    def label(self, coordinate: str = "") -> str:
        """The worker as text: `worker 3 (stage 1, replica 1; pid 5901, node b09ad58f)`; unknown parts are left out."""
        parts = [f"pid {self.pid}"] if self.pid is not None else []
        parts += [f"node {short_node_id(self.node)}"] if self.node is not None else []
        known = "; ".join(part for part in (seat_without_rank(coordinate), ", ".join(parts)) if part)
        return f"worker {self.worker}" + (f" ({known})" if known else "")


# -- starts and ends -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StartupStage(_TextEvent):
    """A stage of the start-up is done. Printed by the command; in no file."""

    kind = "stage"
    stage: Text
    """read, checked, planned, connected, started or built."""
    run: Text | None = None
    """The run's name, once it has its folder."""
    seconds: Seconds | None = None
    """Time since the command was started."""


@dataclass(frozen=True, kw_only=True)
class RunStart(_TextEvent):
    """All workers of a start have started. Worker numbers start from 0 again. Older releases wrote neither text nor workers."""

    kind = "started"
    tone = "good"
    workers: WorkerList | None = None
    """worker, node, pid and host of each, by rank."""
    precision: Text | None = None
    """The autocast precision of layers and loss, such as bf16; None: the job's `dtype`."""
    reduction: Text | None = None
    """`fast` if the job gives up equal bits for it; None: it does not."""
    optimizer: Text | None = None
    """The optimizer's class or function, as text."""
    optimizer_args: Text | None = None
    """The optimizer's arguments, as text."""
    batch_size: StepNumber | None = None
    """Samples of a step."""
    microbatches: StepNumber | None = None
    """Microbatches of a step."""
    best: BestRules | None = None
    """By which metrics the best checkpoints are kept: metric, mode (min or max) and keep of each."""
    fingerprint: Texts | None = None
    """What results may depend on in one worker: versions, processor, settings."""


@dataclass(frozen=True, kw_only=True)
class StagesBuilt(_TextEvent):
    """All workers have built their stages. In no file."""

    kind = "built"


@dataclass(frozen=True, kw_only=True)
class ResumeNotice(_TextEvent):
    """The command resumes a run from a checkpoint. In no file."""

    kind = "resuming"
    step: StepNumber | None = None
    """Steps done in the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Resumption(_TextEvent):
    """The run continues from a checkpoint, in a new start."""

    kind = "resumed"
    tone = "warn"
    text: Text
    """From which step it continues, and how it had ended before."""
    step: StepNumber
    """Steps done in the checkpoint."""
    again: StepNumber | None = None
    """Number of steps that had been reported and are executed again."""
    lost: Flag | None = None
    """Whether the run had ended without recording why: all of it was killed."""
    plan: Text | None = None
    """The plan from here on."""
    former_end_s: UnixTime | None = None
    """When the run last wrote something before (Unix time, s)."""
    resumed_s: UnixTime | None = None
    """When the command resumed the run (Unix time, s); identifies the resumption."""


@dataclass(frozen=True, kw_only=True)
class JobChange(_TextEvent):
    """A resume has changed keys of the job on which results depend."""

    kind = "job_changed"
    tone = "warn"
    text: Text
    """From which step on which keys have other values, and both values of each."""
    step: StepNumber
    """The first step with the new values."""


@dataclass(frozen=True, kw_only=True)
class LearningRateChange(_TextEvent):
    """The learning rate has changed because of a validation."""

    kind = "learning_rate"
    text: Text
    """The rates before and from now on, and what the validation has found."""
    step: StepNumber
    """The first step with the new learning rate."""
    lr: Real
    """The new learning rate."""
    before: Real
    """The one before."""


@dataclass(frozen=True, kw_only=True)
class StopRequest(_TextEvent):
    """Someone has asked the run to end. In no file."""

    kind = "stopping"


@dataclass(frozen=True, kw_only=True)
class EndOfRun(Event):
    """The run has ended. In events.jsonl it has `why` and `step`; the driver sends `done`; `--json` has `text` and `done`."""

    kind = "end"
    tone = "good"
    end: Text
    """done, stopped, interrupted, failed, or deposed (another driver has taken the run over)."""
    text: Text | None = None
    """Why, in words, as the command prints it with `--json`."""
    why: Text | None = None
    """Why, in words, as events.jsonl has it."""
    step: StepNumber | None = None
    """Steps done."""
    driver_calls_per_step: Real | None = None
    """Number of the driver's calls to workers per step, over this start."""
    done: StepNumber | None = None
    """Steps done."""
    error: Anything = None
    """The pickled error of a failed run, for the command that started it."""
    non_finite: Flag | None = None
    """Whether a loss or gradient norm that is not finite has ended the run; only in events.jsonl."""

    def line(self) -> str:
        why = self.why or self.text
        return f"{self.end or 'ended'} after {count_noun(self.step or self.done or 0, 'step')}" + (
            f": {plain_failure_text(why)}" if why else ""
        )


# -- steps -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepRecord(Event):
    """A committed step: a line of metrics.jsonl, where it has no kind. `more`: the job's metrics, and those of callbacks."""

    kind = "step"
    step: FirstStepIsOne
    """The step, from 1."""
    loss: Real = math.nan
    """The loss."""
    norm: Real | None = None
    """The norm of the gradient before clipping."""
    lr: Real | None = None
    """The learning rate; parameter groups may have others."""
    count: Real | None = None
    """Number of samples or tokens over which the loss is averaged."""
    seconds: Seconds
    """Duration of the step, without pauses."""
    samples_per_s: Rate
    """Samples of the step over `seconds`."""
    count_per_s: Real | None = None
    """`count` over `seconds`."""
    bubble: Real | None = None
    """Bubble: share of all workers' time in which they did not compute, from 0 to 1."""
    data_wait: Real | None = None
    """Share of the step in which a worker read samples or waited for them, of the worker that did so longest, from 0 to 1;
    None below 0.01."""
    busy_shares: Numbers | None = None
    """By rank: share of the time in which the worker computed, from 0 to 1."""
    peak_rss_bytes: Numbers | None = None
    """By rank: peak resident memory of the worker's process."""
    skipped: Flag | None = None
    """Whether the update was skipped because loss or norm was not finite."""
    loss_scale: Real | None = None
    """What the loss was multiplied by before the backward pass; loss and norm are without it. None: it is not scaled."""
    eta_s: Real | None = None
    """Predicted seconds to the end of the run; in no file."""
    validation_loss: Real | None = None
    """A validation loss that a callback has added."""

    @property
    def overflows(self) -> bool:
        """Whether it was skipped because its gradients were not finite with the scale that the loss had."""
        return bool(self.skipped) and self.loss_scale is not None and math.isfinite(self.loss)

    @property
    def samples(self) -> float:
        """Samples of the step."""
        return self.samples_per_s * self.seconds

    @property
    def metrics(self) -> dict[str, float]:
        """Name -> number of what was measured beside the loss; NaN for what the file has as null."""
        return numbers_in(self.more)


@dataclass(frozen=True, kw_only=True)
class ValidationRecord(Event):
    """A validation: a line of metrics.jsonl, where it has no kind. `more`: the job's metrics, and those of callbacks."""

    kind = "validation"
    step: FirstStepIsOne
    """Steps done."""
    validation_loss: Real
    """The validation loss."""
    count: Real | None = None
    """Number of samples or tokens over which the loss is averaged."""
    seconds: Seconds | None = None
    """Duration of the validation."""

    @property
    def metrics(self) -> dict[str, float]:
        """Name -> number of what was measured beside the loss; NaN for what the file has as null."""
        return numbers_in(self.more)

    def progress_line(self) -> str:
        """The line for people: `step 50: validation loss 1.9021, accuracy 0.8125`; of several sets `validation loss short 1.9,
        long 2.1, accuracy short 0.8, long 0.7`."""
        by_name: dict[tuple[bool, str], list[str]] = {}
        for full, value in self.metrics.items():
            of_set, name = split_name(full)  # numbers of callbacks are of no set, and may have any name
            text = f"{value:.4f}" if of_set and name == "loss" else format_metric(value)
            by_name.setdefault((of_set is None, name), []).append(f"{of_set} {text}" if of_set else text)
        losses = by_name.pop((False, "loss"), [f"{self.validation_loss:.4f}"])
        numbers = [f"{name} {', '.join(values)}" for (_, name), values in by_name.items()]
        return ", ".join([f"step {self.step}: validation loss {', '.join(losses)}", *numbers])


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint(Event):
    """A checkpoint is complete. Not written, as readers list the checkpoint folder; older releases wrote it."""

    kind = "checkpoint"
    step: StepNumber
    """Steps done in the checkpoint."""
    path: Text
    """Where it is: a path or a URI."""

    def line(self) -> str:
        return f"step {self.step}: checkpoint {self.path}"


@dataclass(frozen=True, kw_only=True)
class StepPicture(Event):
    """The drawing of a step is written. In no file."""

    kind = "picture"
    path: Text
    """Where it is."""


@dataclass(frozen=True, kw_only=True)
class ReplayProgress(Event):
    """A step was executed again after a recovery. In no file."""

    kind = "replay"
    step: StepNumber
    """The step."""
    until: StepNumber
    """The last one to replay."""

    def progress_line(self) -> str:
        """The progress line, which replaces the one before."""
        return f"executing steps again: {self.step} of {self.until}"


# -- workers, nodes, drivers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerLoss(_TextEvent, _WorkerEvent):
    """A worker was lost."""

    kind = "lost"
    tone = "bad"
    coordinate: Text | None = None
    """Its seat: `worker 3 (stage 1, replica 1)`."""
    why: Text | None = None
    """Why."""

    def line(self) -> str:
        why = plain_failure_text((self.why or "it died").rpartition(" was lost: ")[2])
        return f"lost {self.label(self.coordinate or '')}: {why}"


@dataclass(frozen=True, kw_only=True)
class NodeLoss(_TextEvent):
    """A node was lost with all of its workers."""

    kind = "node"
    tone = "bad"
    node: Text | None = None
    """The beginning of its id."""
    workers: WorkerNumbers | None = None
    """The workers that were lost with it."""


@dataclass(frozen=True, kw_only=True)
class DriverLoss(_TextEvent):
    """The driver was lost, and a new one goes on with the run."""

    kind = "driver"
    tone = "bad"
    generation: GenerationNumber | None = None
    """The newest generation that a driver has claimed."""
    step: StepNumber | None = None
    """Last step that was reported to users."""


@dataclass(frozen=True, kw_only=True)
class WorkerJoin(_TextEvent, _WorkerEvent):
    """A worker has started during the run."""

    kind = "joined"
    tone = "good"

    def line(self) -> str:
        return f"joined: {self.label()}"


@dataclass(frozen=True, kw_only=True)
class WorkerDrain(_TextEvent, _WorkerEvent):
    """A worker is asked to leave because its node is drained."""

    kind = "draining"
    tone = "warn"
    why: Text | None = None
    """Why."""
    works: Flag | None = None
    """Whether it has a seat; older releases asked only such workers to leave."""

    def line(self) -> str:
        return f"{self.label()} is going to leave: {self.why or 'its node is drained'}; " + (
            "its work moves off" if self.works in (True, None) else "it has no work"
        )


@dataclass(frozen=True, kw_only=True)
class WorkerLeave(_TextEvent, _WorkerEvent):
    """A drained worker has left."""

    kind = "left"


@dataclass(frozen=True, kw_only=True)
class WorkerRequest(_TextEvent):
    """The run requests more workers from the cluster."""

    kind = "hiring"
    worker: WorkerNumber | None = None
    """The first of them."""
    workers: WorkerNumbers | None = None
    """Their numbers."""


@dataclass(frozen=True, kw_only=True)
class WorkerRelease(_TextEvent):
    """Workers are released, or requests for workers are cancelled."""

    kind = "released"
    workers: WorkerNumbers | None = None
    """Their numbers."""


@dataclass(frozen=True, kw_only=True)
class Straggler(_TextEvent, _WorkerEvent):
    """A worker has become slow, or is no longer slow."""

    kind = "straggler"
    tone = "warn"
    coordinate: Text | None = None
    """Its seat."""
    times: Real | None = None
    """Ratio of its step time to that of comparable workers."""
    steps: StepNumber | None = None
    """Number of steps for which it has been slow."""
    over: Flag | None = None
    """Whether it is no longer slow."""
    leaves: Flag | None = None
    """Whether it is asked to leave."""


@dataclass(frozen=True, kw_only=True)
class ShareChange(_TextEvent):
    """The replicas of a stage have other shares of the blocks, because a worker is slow, or fast again."""

    kind = "shares"
    plan: Text | None = None
    """The plan with these shares, in words."""
    pause_s: Seconds | None = None
    """Time without a step, in seconds."""
    step: StepNumber | None = None
    """Steps done before it."""


# -- generations -----------------------------------------------------------------------------------------------------------

STATE_SOURCES = {
    "cut": "the last copy of something was lost: all go back to the mirror's cut {after_steps}",
    "checkpoint": "no memory has all of the state any more: all begin again from the checkpoint {after_steps}",
    "beginning": "no memory has all of the state any more: all begin again from the initial weights",
}
"""`state` of a new generation, unless it is live -> the text about it in the line."""


@dataclass(frozen=True, kw_only=True)
class _Generation(Event):
    """Fields that describe a new generation of workers."""

    plan: Text | None = None
    """Its plan in words."""
    shards: Text | None = None
    """The number of shards of its layers: `2`, or `2/1` where stages differ."""
    schedule: Text | None = None
    """Its schedule's name."""
    step: StepNumber | None = None
    """Steps done when it begins."""
    moved_elements: Elements | None = None
    """Number of parameter elements that move between workers."""
    state: Text | None = None
    """Where its state comes from: live, cut (the mirror's), checkpoint or beginning."""


@dataclass(frozen=True, kw_only=True)
class Recovery(_TextEvent, _Generation):
    """The run recovers: training is paused (`workers` is None), or the next generation is being started with `workers`."""

    kind = "recovering"
    tone = "warn"
    generation: GenerationNumber | None = None
    """The number of the next generation."""
    workers: WorkerNumbers | None = None
    """Its workers, by rank, once it is being started."""

    def line(self) -> str | None:
        if self.workers is None:
            return f"training is paused: {plain_failure_text(self.text)}" if self.text is not None else None
        plan = f" = {self.plan}" if self.plan else ""
        text = f"trying generation {self.generation}: {count_noun(len(self.workers), 'worker')}{plan}"
        if self.state in STATE_SOURCES:
            text += f"; {STATE_SOURCES[self.state].format(after_steps=after_steps(self.step or 0))}"
        elif self.moved_elements:
            text += f"; {count_noun(self.moved_elements, 'parameter')} and their optimizer state move"
        return text

    def given_up_line(self, generation: int) -> str:
        """The line if this recovery ends the attempt at `generation`."""
        return f"generation {generation} is given up: {plain_failure_text(self.text or '')}"


@dataclass(frozen=True, kw_only=True)
class GenerationStart(_TextEvent, _Generation):
    """A new generation has committed its first step: the recovery is over."""

    kind = "generation"
    tone = "good"
    pause_s: Seconds | None = None
    """Time without a step, in seconds."""
    again: StepNumber | None = None
    """Number of steps that are executed again."""
    schedule_was: Text | None = None
    """The schedule before, if it was another."""
    schedule_why: Text | None = None
    """Why it is another."""
    shards_was: Text | None = None
    """`shards` before, if it was another."""
    generation: GenerationNumber
    """Its number."""
    workers: WorkerNumbers
    """Its workers, by rank."""

    def line(self, missed: Sequence[int] = ()) -> str:
        """The line. `missed`: earlier generations that failed to start and that no line has reported."""
        told = [count_noun(len(self.workers), "worker")]
        if self.plan:
            told[0] += f" = {self.plan}"
        if self.schedule:
            was = f" ({self.schedule_was} before; {self.schedule_why})" if self.schedule_was else ""
            told.append(f"schedule {self.schedule}{was}")
        if self.shards_was:
            now = count_noun(str(self.shards), "shard")
            told.append(f"layers cut over {now} instead of {self.shards_was}, which changes the bits from here on")
        nothing = f" ({', '.join(map(str, missed))} failed to start)" if missed else ""
        text = f"generation {self.generation}{nothing}: {', '.join(told)}"
        if self.step is not None:
            text += f"; training goes on after step {self.step}"
        if self.pause_s is not None:
            text += f", after a pause of {self.pause_s:.2f} s"
        if self.again:
            text += f"; {count_noun(self.again, 'step')} executed again"
        return text


# -- other messages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wait(_TextEvent):
    """The run waits for something: workers, storage, its turn."""

    kind = "waiting"
    tone = "warn"


@dataclass(frozen=True, kw_only=True)
class ActivityNotice(_TextEvent):
    """What the run is waiting for, while nothing else is printed. In no file."""

    kind = "waiting_for"


@dataclass(frozen=True, kw_only=True)
class Note(_TextEvent):
    """A remark for the user."""

    kind = "note"


@dataclass(frozen=True, kw_only=True)
class RunWarning(Event):
    """A warning, mostly with its cure in a second line."""

    kind = "warning"
    tone = "warn"
    text: Text
    """What is wrong."""

    def line(self) -> str:
        return f"warning: {self.text}"


# -- unknown and unreadable ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event of a kind that this release does not know; kept and shown unchanged."""

    name: str
    """Its kind."""

    def facts(self) -> dict[str, Json]:
        return {"kind": self.name, **({"time": self.time} if self.time is not None else {}), **self.more}

    def line(self) -> str:
        return f"{shorten(self.name, 40)}: {shorten(json.dumps(dict(self.more)), 300)}"


@dataclass(frozen=True, kw_only=True)
class UnreadableLines(Event):
    """Lines of a run's files that are not valid events: truncated, or with a missing or invalid field."""

    tone = "warn"
    file: str
    """Name of the file."""
    count: int
    """Number of such lines."""
    why: str
    """What is wrong with the first of them."""

    def line(self) -> str:
        return f"{count_noun(self.count, 'line')} of {self.file} cannot be read ({shorten(self.why)})"
