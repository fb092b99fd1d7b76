"""The events of a run: one frozen dataclass for each kind, with its fields, its line for people and its JSON. Pure.

An event says what happened to a run; people see it and its folder keeps it (`events.jsonl`, `metrics.jsonl`). The events of
`elastic/events.py` are others: they drive the run machine and are never written. Those are named by a participle
(`WorkerJoined`), these by a noun (`WorkerJoin`).

A new kind of event is a class here and the place that constructs it; if it changes what is known of a run, also a case of
`fold.RunView`. Fields are never renamed or removed: folders of older releases are read. `step` is a number of steps done.
Nodes are shown by the first 8 characters of their id.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

from raypar.elastic.user_messages import plain_failure_text
from raypar.files.untrusted_files import shorten
from raypar.plan.wording import count_noun

# -- the types of fields, with the bounds within which a value can be used -------------------------------------------------

Check = Callable[[Any], bool]
"""Whether a value is valid."""
MAX_GENERATIONS = 10**6
MAX_STEPS = 10**9
"""Limit of a job's `steps`, and so of steps in a run folder."""
MAX_WORKER_NUMBER = 2**31
"""Limit of worker numbers, which count all workers that a run has ever started."""
MAX_TIME_S = 1e11
"""Largest Unix time that can be shown as a date (the year 5138)."""


def is_count(most: int, least: int = 0) -> Check:
    """The check for whole numbers from `least` to `most`."""
    return lambda value: type(value) is int and least <= value <= most


def is_number(most: float) -> Check:
    """The check for numbers from 0 to `most`; NaN is none."""
    return lambda value: type(value) in (int, float) and 0 <= value <= most  # an integer may be too large for a float


def is_real(value: Any) -> bool:
    """Whether a value can be printed and compared as a float; NaN can."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def is_text(value: Any) -> bool:
    """Whether a value is text that can be printed; half a surrogate pair cannot."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in (() if value.isascii() else value))


def is_flag(value: Any) -> bool:
    """Whether a value is true or false."""
    return isinstance(value, bool)


def is_list(value: Any) -> bool:
    """Whether a value is a list, of whatever."""
    return isinstance(value, (list, tuple))


def is_list_of(check: Check) -> Check:
    """The check for lists whose elements pass `check`."""
    return lambda value: is_list(value) and all(map(check, value))


def is_mapping_of(check: Check) -> Check:
    """The check for JSON objects whose values pass `check`."""
    return lambda value: isinstance(value, dict) and all(is_text(key) and check(each) for key, each in value.items())


def is_finite_number(value: Any) -> bool:
    """Whether a value can be drawn: JSON has null for NaN and infinities, and Python reads `NaN` too."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


WORKER, STEP, TIME = is_count(MAX_WORKER_NUMBER), is_count(MAX_STEPS), is_number(MAX_TIME_S)
WHO: dict[str, Check] = {
    "worker": WORKER, "coordinate": is_text, "node": is_text, "pid": is_count(2**31), "host": is_text,
}  # fmt: skip
"""Fields of one worker."""


def _is_worker(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("worker") is not None
        and all(value.get(key) is None or check(value[key]) for key, check in WHO.items())
    )


Text = Annotated[str, is_text]
Flag = Annotated[bool, is_flag]
WorkerNumber = Annotated[int, WORKER]
WorkerNumbers = Annotated[Sequence[int], is_list_of(WORKER)]
WorkerList = Annotated[Sequence[Mapping[str, Any]], is_list_of(_is_worker)]
StepNumber = Annotated[int, STEP]
FirstStepIsOne = Annotated[int, is_count(MAX_STEPS, 1)]
GenerationNumber = Annotated[int, is_count(MAX_GENERATIONS)]
ProcessId = Annotated[int, is_count(2**31)]
Elements = Annotated[int, is_count(2**63)]
UnixTime = Annotated[float, TIME]
Seconds = Annotated[float, TIME]
Rate = Annotated[float, is_number(1e18)]
Real = Annotated[float, is_real]
"""A number that may be NaN. Files have null for one that is not finite."""
Numbers = Annotated[Sequence[Any], is_list]
Texts = Annotated[Mapping[str, str], is_mapping_of(is_text)]
Anything = Annotated[Any, lambda value: True]


# -- events ----------------------------------------------------------------------------------------------------------------

KINDS: dict[str, type[Event]] = {}
"""Kind, as the files name it -> its class."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event has."""

    kind: ClassVar[str] = ""
    """The kind, as the files name it."""
    tone: ClassVar[str] = ""
    """good, bad or warn: the colour of its line; empty: none."""
    time: UnixTime | None = None
    """When it was written."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Fields that this release does not know, and of steps and validations the metrics of callbacks."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls

    def line(self) -> str | None:
        """The line for people; None if it tells them nothing new."""
        return None

    def facts(self) -> dict[str, Any]:
        """The event as JSON data. Fields without a value are left out."""
        found: dict[str, Any] = {"kind": self.kind}
        if self.time is not None:
            found["time"] = self.time
        for name, _, required in _fields_of(type(self)):
            value = getattr(self, name)
            if value is not None or required:
                found[name] = value
        return {**found, **self.more}


_FIELDS: dict[type[Event], tuple[tuple[str, Check, bool], ...]] = {}


def _fields_of(kind: type[Event]) -> tuple[tuple[str, Check, bool], ...]:
    """(name, check, whether it is required) of each field of a kind: `text`, then its own, then inherited ones."""
    if kind in _FIELDS:
        return _FIELDS[kind]
    hints = get_type_hints(kind, include_extras=True)
    given = {one.name: one for one in fields(kind)}
    own = [name for cls in kind.__mro__ if cls not in (Event, object) for name in vars(cls).get("__annotations__", {})]
    found = []
    for name in sorted(dict.fromkeys(name for name in own if name in given), key=lambda name: name != "text"):
        check = next(extra for hint in (hints[name], *get_args(hints[name])) for extra in getattr(hint, "__metadata__", ()))
        one = given[name]
        found.append((name, check, one.default is MISSING and one.default_factory is MISSING))
    return _FIELDS.setdefault(kind, tuple(found))


@dataclass(frozen=True, kw_only=True)
class _TextEvent(Event):
    """An event with a text, which is its line unless the class makes one of its facts."""

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
    """A stage of the start-up is over. Told by the command; in no file."""

    kind = "stage"
    stage: Text
    """read, checked, planned, connected, started or built."""
    run: Text | None = None
    """The run's name, once it has its folder."""
    seconds: Seconds | None = None
    """Time since the command was started."""


@dataclass(frozen=True, kw_only=True)
class RunStart(_TextEvent):
    """The workers of a start have started; worker numbers begin anew. Older releases have written neither text nor workers."""

    kind = "started"
    tone = "good"
    workers: WorkerList | None = None
    """worker, node, pid and host of each, by rank."""
    precision: Text | None = None
    """In what layers and the loss compute, such as bf16; None: in the job's `dtype`."""
    optimizer: Text | None = None
    """The optimizer's function."""
    optimizer_args: Text | None = None
    """Its arguments."""
    batch_size: StepNumber | None = None
    """Samples of a step."""
    microbatches: StepNumber | None = None
    """Microbatches of a step."""
    fingerprint: Texts | None = None
    """What one worker computes with: versions, processor, settings."""


@dataclass(frozen=True, kw_only=True)
class StagesBuilt(_TextEvent):
    """All workers have built their stages. In no file."""

    kind = "built"


@dataclass(frozen=True, kw_only=True)
class ResumeNotice(_TextEvent):
    """The command resumes a run from a checkpoint. In no file."""

    kind = "resuming"
    step: StepNumber | None = None
    """Steps that are done in it."""


@dataclass(frozen=True, kw_only=True)
class Resumption(_TextEvent):
    """The run goes on from a checkpoint, in a new start."""

    kind = "resumed"
    tone = "warn"
    text: Text
    """Where it goes on, and how it had ended before."""
    step: StepNumber
    """Steps that are done in the checkpoint."""
    again: StepNumber | None = None
    """Steps that had been reported and are executed again."""
    lost: Flag | None = None
    """Whether the run had broken off without recording an end."""
    plan: Text | None = None
    """The plan from here on."""
    former_end_s: UnixTime | None = None
    """The last sign of life before."""
    resumed_s: UnixTime | None = None
    """When the command went on with it; identifies the resumption."""


@dataclass(frozen=True, kw_only=True)
class StopRequest(_TextEvent):
    """Someone has asked the run to end. In no file."""

    kind = "stopping"


@dataclass(frozen=True, kw_only=True)
class EndOfRun(Event):
    """The run has ended. In events.jsonl it has `why` and `step`; the command is told `done`, and tells `text` and `done`."""

    kind = "end"
    tone = "good"
    end: Text
    """done, stopped, interrupted, failed, or deposed (another driver has taken the run over)."""
    text: Text | None = None
    """Why, in words (of the command)."""
    why: Text | None = None
    """Why, in words."""
    step: StepNumber | None = None
    """Steps done."""
    driver_calls_per_step: Real | None = None
    """Calls to workers for each step of this start."""
    done: StepNumber | None = None
    """Steps done."""
    error: Anything = None
    """The pickled error of a failed run, for the command that started it."""

    def line(self) -> str:
        why = self.why or self.text
        return f"{self.end or 'ended'} after {count_noun(self.step or self.done or 0, 'step')}" + (
            f": {plain_failure_text(why)}" if why else ""
        )


# -- steps -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepRecord(Event):
    """A committed step: a line of metrics.jsonl, where it has no kind. `more`: the metrics of callbacks."""

    kind = "step"
    step: FirstStepIsOne
    """The step, from 1."""
    loss: Real = math.nan
    """Its loss."""
    norm: Real | None = None
    """The gradient's norm before clipping."""
    lr: Real | None = None
    """The learning rate, without those of groups of their own."""
    count: Real | None = None
    """What the loss is averaged over: samples, or tokens."""
    seconds: Seconds
    """Its time, without pauses."""
    samples_per_s: Rate
    """Samples of the step over `seconds`."""
    count_per_s: Real | None = None
    """`count` over `seconds`."""
    bubble: Real | None = None
    """Share of the workers' time in which they computed nothing."""
    busy_shares: Numbers | None = None
    """By rank: share of the time in which the worker computed."""
    peak_rss_bytes: Numbers | None = None
    """By rank: largest resident memory of the worker's process."""
    skipped: Flag | None = None
    """Whether it changed nothing, because loss or norm was not finite."""
    eta_s: Real | None = None
    """Predicted seconds to the end of the run; in no file."""
    validation_loss: Real | None = None
    """A validation loss that a callback has added."""

    @property
    def samples(self) -> float:
        """Samples of the step."""
        return self.samples_per_s * self.seconds


@dataclass(frozen=True, kw_only=True)
class ValidationRecord(Event):
    """A validation: a line of metrics.jsonl, where it has no kind. `more`: the metrics of callbacks."""

    kind = "validation"
    step: FirstStepIsOne
    """Steps done."""
    validation_loss: Real
    """Its loss."""
    count: Real | None = None
    """What the loss is averaged over."""
    seconds: Seconds | None = None
    """Its time."""


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint(Event):
    """A checkpoint is complete. In no file since it is seen in the folder; older releases wrote it."""

    kind = "checkpoint"
    step: StepNumber
    """Steps that are done in it."""
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
    """Steps that people have seen."""


@dataclass(frozen=True, kw_only=True)
class WorkerJoin(_TextEvent, _WorkerEvent):
    """A worker has started during the run."""

    kind = "joined"
    tone = "good"

    def line(self) -> str:
        return f"joined: {self.label()}"


@dataclass(frozen=True, kw_only=True)
class WorkerDrain(_TextEvent, _WorkerEvent):
    """A worker has to leave."""

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
    """Further workers are asked for."""

    kind = "hiring"
    worker: WorkerNumber | None = None
    """The first of them."""
    workers: WorkerNumbers | None = None
    """Their numbers."""


@dataclass(frozen=True, kw_only=True)
class WorkerRelease(_TextEvent):
    """Workers, or the demand for them, are given back."""

    kind = "released"
    workers: WorkerNumbers | None = None
    """Their numbers."""


@dataclass(frozen=True, kw_only=True)
class Straggler(_TextEvent, _WorkerEvent):
    """A worker has become slow, or is not slow any more."""

    kind = "straggler"
    tone = "warn"
    coordinate: Text | None = None
    """Its seat."""
    times: Real | None = None
    """How many times as long it takes as its like."""
    steps: StepNumber | None = None
    """For how many steps."""
    over: Flag | None = None
    """Whether it is not slow any more."""
    leaves: Flag | None = None
    """Whether it is asked to leave."""


# -- generations -----------------------------------------------------------------------------------------------------------

STATE_SOURCES = {
    "cut": "the last copy of something was lost: all go back to the mirror's cut after {step} steps",
    "checkpoint": "no memory has all of the state any more: all begin again from the checkpoint after {step} steps",
    "beginning": "no memory has all of the state any more: all begin again from the initial weights",
}
"""Source of a new generation's state, if not live workers -> its part of the line."""


@dataclass(frozen=True, kw_only=True)
class _Generation(Event):
    """What a new generation of workers is."""

    plan: Text | None = None
    """Its plan in words."""
    shards: Text | None = None
    """The number of shards of its layers: `2`, or `2/1` where stages differ."""
    schedule: Text | None = None
    """Its schedule's name."""
    step: StepNumber | None = None
    """Steps done when it begins."""
    moved_elements: Elements | None = None
    """Elements of parameters that move between workers."""
    state: Text | None = None
    """Where its state comes from: live, cut (the mirror's), checkpoint or beginning."""


@dataclass(frozen=True, kw_only=True)
class Recovery(_TextEvent, _Generation):
    """The run recovers: training stands still, or a next generation is tried (then `workers` is given)."""

    kind = "recovering"
    tone = "warn"
    generation: GenerationNumber | None = None
    """The number of the next generation."""
    workers: WorkerNumbers | None = None
    """Its workers, by rank, once it is tried."""

    def line(self) -> str | None:
        if self.workers is None:
            return f"training stands still: {plain_failure_text(self.text)}" if self.text is not None else None
        plan = f" = {self.plan}" if self.plan else ""
        text = f"trying generation {self.generation}: {count_noun(len(self.workers), 'worker')}{plan}"
        if self.state in STATE_SOURCES:
            text += f"; {STATE_SOURCES[self.state].format(step=self.step or 0)}"
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
    """Time without a step."""
    again: StepNumber | None = None
    """Steps that are executed again."""
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
        """`missed`: generations before it that came to nothing, and of which no line says so."""
        told = [count_noun(len(self.workers), "worker")]
        if self.plan:
            told[0] += f" = {self.plan}"
        if self.schedule:
            was = f" ({self.schedule_was} before; {self.schedule_why})" if self.schedule_was else ""
            told.append(f"schedule {self.schedule}{was}")
        if self.shards_was:
            now = f"{self.shards} shard{'s' * (self.shards != '1')} instead of {self.shards_was}"
            told.append(f"layers cut over {now}, which changes the bits from here on")
        nothing = f" ({', '.join(map(str, missed))} came to nothing)" if missed else ""
        text = f"generation {self.generation}{nothing}: {', '.join(told)}"
        if self.step is not None:
            text += f"; training goes on after step {self.step}"
        if self.pause_s is not None:
            text += f", after a pause of {self.pause_s:.2f} s"
        if self.again:
            text += f"; {count_noun(self.again, 'step')} executed again"
        return text


# -- what else people are told ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wait(_TextEvent):
    """The run waits for something: workers, storage, its turn."""

    kind = "waiting"
    tone = "warn"


@dataclass(frozen=True, kw_only=True)
class ActivityNotice(_TextEvent):
    """What is waited for while there is nothing else to tell. In no file."""

    kind = "waiting_for"


@dataclass(frozen=True, kw_only=True)
class Note(_TextEvent):
    """A remark."""

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


# -- what is not known -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event of a kind that this release does not know; it is kept and shown as it is."""

    name: str
    """Its kind."""

    def facts(self) -> dict[str, Any]:
        return {"kind": self.name, **({"time": self.time} if self.time is not None else {}), **self.more}

    def line(self) -> str:
        return f"{shorten(self.name, 40)}: {shorten(json.dumps(dict(self.more)), 300)}"


@dataclass(frozen=True, kw_only=True)
class UnreadableLines(Event):
    """Lines of a run's files that are no events: cut off, or with a missing or a wrong field."""

    tone = "warn"
    file: str
    """Name of the file."""
    count: int
    """How many they are."""
    why: str
    """What is wrong with the first."""

    def line(self) -> str:
        return f"{count_noun(self.count, 'line')} of {self.file} cannot be read ({shorten(self.why)})"


def parse_event(line: Any) -> Event:
    """The event of a line of events.jsonl, or of data that a process was sent. Raises `ValueError` that says what is wrong.

    Fields that the kind does not have are kept in `more`.
    """
    line = _object(line)
    name = line.get("kind")
    if not is_text(name):
        raise ValueError(f"its kind is {shorten(name)}" if "kind" in line else "it has no kind")
    return _parse(line, KINDS.get(name), name)


def text_event(kind: str, text: str) -> Event:
    """An event of a kind that has a text alone: note, warning, waiting, stopping."""
    return parse_event({"kind": kind, "text": text})


def read_event(line: Any) -> Event:
    """The event of data that another process has sent; one that is not as expected, of another release, is kept as it is."""
    try:
        return parse_event(line)
    except ValueError:
        facts = line if isinstance(line, dict) else {"line": line}
        return UnknownEvent(name=str(facts.get("kind", "")), more={k: v for k, v in facts.items() if k not in ("kind", "time")})


def parse_metrics(line: Any) -> StepRecord | ValidationRecord:
    """The event of a line of metrics.jsonl. Raises `ValueError` that says what is wrong."""
    line = _object(line)
    if "kind" in line:
        raise ValueError("it has a kind, as events do")
    kind: type[StepRecord] | type[ValidationRecord] = (
        StepRecord if "loss" in line or "samples_per_s" in line else ValidationRecord
    )
    if kind is ValidationRecord and "validation_loss" not in line:
        raise ValueError("it has no loss")
    found = _parse(line, kind, "")
    assert isinstance(found, (StepRecord, ValidationRecord))
    return found


def _object(line: Any) -> Mapping[str, Any]:
    if not isinstance(line, dict):
        raise ValueError(f"{shorten(line)} is no object with keys and values")
    return line


def _parse(line: Mapping[str, Any], kind: type[Event] | None, name: str) -> Event:
    at = line.get("time")
    if "time" in line and not TIME(at):
        raise ValueError(f"time is {shorten(at)}")
    known = {"kind", "time"}
    if kind is None:
        return UnknownEvent(name=name, time=at, more={key: value for key, value in line.items() if key not in known})
    given: dict[str, Any] = {}
    for key, check, required in _fields_of(kind):
        known.add(key)
        value = line.get(key)
        if value is None and key in line and check is is_real:
            value = math.nan
        if value is None:
            if required or (key in line and check is is_list):
                raise ValueError(f"{key} is null" if key in line else f"it has no {key}")
        elif check(value):
            given[key] = value
        else:
            raise ValueError(f"{key} is {shorten(value)}")
    return kind(**given, time=at, more={key: value for key, value in line.items() if key not in known})


# -- words -----------------------------------------------------------------------------------------------------------------


def seat_without_rank(coordinate: str) -> str:
    """A seat without its rank, which changes with every plan: `stage 1, replica 1` of `worker 3 (stage 1, replica 1)`."""
    return coordinate.partition("(")[2].rpartition(")")[0]


def short_node_id(node: Any) -> str:
    """The first 8 characters of a node's id: enough for `raypar drain`."""
    return str(node)[:8]


def format_duration(seconds: float) -> str:
    """A duration as text: `45 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
