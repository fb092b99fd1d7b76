"""User hooks of a run: callbacks, early stopping, and the trackers TensorBoard, Weights & Biases and MLflow.

Callbacks are pickled, live in the driver and are called off its event loop. Each hook is called once for every committed step,
validation or checkpoint, in order, whatever faults happen. A resumed run makes its callbacks anew.
"""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from raypar.errors import ConfigError, InputError, RayparError, UserCodeError, exception_chain, with_article
from raypar.files.json_type import Json
from raypar.files.os_error_cure import cure_of_os_error
from raypar.files.printable_text import repr_text
from raypar.job.keys_of_other_frameworks import advice_for_callback
from raypar.job.metrics_section import check_metric_is_computed, mode_of
from raypar.plan.wording import count_noun
from raypar.record.best_checkpoint_rules import is_better, worst_metric_value
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text

if TYPE_CHECKING:
    from raypar.job import Job


@dataclass(frozen=True)
class Stop:
    """Returned by `on_step` or `on_validation`: end the run after the step under way, with a checkpoint."""

    reason: str
    """Why, in words, for the user."""


Metrics = Mapping[str, float | int | str | bool | None]
HookResult = Stop | Metrics | None
"""What `on_step` and `on_validation` may return. A mapping holds metrics of your own, which are written with the run's."""


@dataclass(frozen=True)
class RunStartInfo:
    """The facts for `on_start`."""

    run: str
    """The run's name."""
    folder: str
    """The run folder."""
    first: int
    """Number of the first step to come, from 1; larger in a resumed run."""


@dataclass(frozen=True)
class StepInfo:
    """The facts of a committed step, for `on_step`."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """The mean loss of the batch."""
    norm: float
    """Norm of the gradient before clipping."""
    count: float
    """How many units (tokens, samples) the loss is averaged over."""
    seconds: float
    """Wall time since the step before."""
    samples_per_s: float
    """Samples per second of wall time."""
    count_per_s: float
    """Units of `count` per second of wall time."""
    bubble: float
    """Fraction of the workers' time in which they did not compute."""
    lr: float | None = None
    """The learning rate, without those of groups of their own; None for a skipped step, and where the optimizer has none."""
    skipped: bool = False
    """Whether the parameters were left as they were, because loss or norm was not finite (`non_finite: skip`, or an overflow
    with `precision.compute: fp16`)."""
    loss_scale: float | None = None
    """What the loss was multiplied by before the backward pass; None: it is not scaled."""
    metrics: Mapping[str, Json] = field(default_factory=dict, repr=False)
    """All of the step's metrics: the values above and more, those too that callbacks before this one have added."""


@dataclass(frozen=True)
class ValidationInfo:
    """The facts of a validation pass, for `on_validation`."""

    step: int
    """Number of steps done."""
    validation_loss: float
    """The mean loss of the validation samples."""
    count: float
    """How many units (tokens, samples) the loss is averaged over."""
    seconds: float
    """Time of the pass."""
    metrics: Mapping[str, Json] = field(default_factory=dict, repr=False)
    """All of the pass's metrics: the values above, those that the job names, as `validation_NAME` or `validation/SET/NAME`, and
    those that callbacks before this one have added."""


@dataclass(frozen=True)
class CheckpointInfo:
    """The facts of a finished checkpoint, for `on_checkpoint`."""

    step: int
    """Number of steps done."""
    path: str
    """Its folder, whole and under its final name."""


@dataclass(frozen=True)
class RunEndInfo:
    """How the run ended, for `on_end`."""

    end: Literal["done", "stopped", "interrupted", "failed"]
    """The kind of end."""
    why: str
    """The reason, in words."""
    step: int
    """Number of steps done."""


@dataclass(frozen=True)
class RunFailureInfo:
    """The facts of a failed run, for `on_exception`."""

    error: Exception
    """The error that ended the run."""
    step: int
    """Number of steps done."""


class Callback:
    """Base of users' callbacks: override the hooks you need.

    Hooks must be quick: training does not wait for them, but the next step's metrics do.
    """

    def on_start(self, info: RunStartInfo) -> None:
        """Called before the first step."""

    def on_step(self, info: StepInfo) -> HookResult:
        """Called after every committed step."""

    def on_validation(self, info: ValidationInfo) -> HookResult:
        """Called after every validation pass."""

    def on_checkpoint(self, info: CheckpointInfo) -> None:
        """Called after every checkpoint."""

    def on_exception(self, info: RunFailureInfo) -> None:
        """Called before `on_end`, if the run has failed."""

    def on_end(self, info: RunEndInfo) -> None:
        """Called last, however the run ended."""


_INFOS: dict[str, type[Any]] = {
    "on_start": RunStartInfo,
    "on_step": StepInfo,
    "on_validation": ValidationInfo,
    "on_checkpoint": CheckpointInfo,
    "on_exception": RunFailureInfo,
    "on_end": RunEndInfo,
}
CallbackInfo = TypeVar("CallbackInfo")


def _info(kind: type[CallbackInfo], facts: Mapping[str, Json], added: Mapping[str, Json]) -> CallbackInfo:
    """An info object with the facts that it has fields for; its `metrics` gets all facts, and the metrics that were added."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{k: v for k, v in {**facts, "metrics": {**facts, **added}}.items() if k in names})


RETRY_TIMES = 10.0
"""A tracker whose call failed after t seconds (a server that does not answer) is not called for 10 t more."""


@dataclass
class _Outage:
    """The state of a tracker that cannot write."""

    retry_s: float = 0.0
    """When to call the tracker again (monotonic clock)."""
    missed: int = 0
    """Calls that the tracker has missed."""


class Callbacks:
    """All callbacks of a run. Each is called even if one before it raises.

    A tracker that cannot write (a full disk, a server that is down) does not end the run: `lines` then has a warning.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        """The callbacks, in the order of their calls."""
        self._outages: dict[int, _Outage] = {}
        """Index of a tracker that cannot write -> its outage."""
        self._lines: list[tuple[str, str]] = []
        """Lines for the user since the last `lines`."""
        self._names: set[str] = set()
        """The names of all numbers that steps and the first validation have had."""
        self._names_told = False
        """Whether these are complete, and early stopping without a value was told of."""

    def lines(self) -> list[tuple[str, str]]:
        """(kind, text) of each line for the user since the last call: `warning` when a tracker fails, `note` when it works."""
        lines, self._lines = self._lines, []
        return lines

    def call(
        self, hook: str, facts: Mapping[str, Any], around: Callable[[str], AbstractContextManager[Any]] = nullcontext
    ) -> tuple[str | None, dict[str, Json]]:
        """Call one hook of every callback; returns the first reason to stop, and the metrics that the callbacks add. Each
        callback gets those too that callbacks before it have added.

        `around`: makes the context of a call, from the callback's name. If a callback raises, the others are called all the
        same; then `UserCodeError` is raised with the first traceback. A tracker that cannot write does not count.
        """
        stop: str | None = None
        metrics: dict[str, Json] = {}
        failed: RayparError | None = None
        for index, callback in enumerate(self._callbacks):
            name = f"{type(callback).__name__}.{hook}"
            outage, began_s = self._outages.get(index), time.monotonic()
            if outage is not None and hook != "on_end" and began_s < outage.retry_s:
                outage.missed += hook in WRITING_HOOKS
                continue
            try:
                with around(f"callback {name}"):
                    answer = getattr(callback, hook)(_info(_INFOS[hook], facts, metrics))
                if outage is not None and hook in WRITING_HOOKS:
                    self._works_again(index)
                if isinstance(answer, Stop):
                    stop = stop or f"{type(callback).__name__}: {answer.reason}"
                elif isinstance(answer, Mapping):
                    metrics.update(_own_metrics(answer, facts))
                elif answer is not None:
                    raise TypeError(
                        f"returned {with_article(type(answer).__name__)}, neither Stop nor a dict of metrics nor None"
                    )
            except RayparError as error:
                failed = failed or error
            except USER_CODE_ERRORS as error:
                reraise_ctrl_c(error)
                if isinstance(callback, Tracker) and callback.may_fail(hook, error):
                    self._cannot_write(index, callback, hook, error, began_s)
                    continue
                at = f", after {count_noun(facts['step'], 'step')}," if "step" in facts else ""
                text = f"callback {name}{at} raised {error_text(error)}\n{traceback.format_exc()}"
                failed = failed or UserCodeError(
                    text, cure="mend the callback; `raypar resume` goes on from the last checkpoint"
                )
        if not self._names_told and hook in (*WRITING_HOOKS, "on_end"):
            self._note_names(hook, {**facts, **metrics})
        if failed is not None:
            raise failed
        return stop, metrics

    @property
    def watched_metrics(self) -> list[tuple[str, str]]:
        """(the metric, the callback's name) of each early stopping."""
        return [(one.metric, type(one).__name__) for one in self._callbacks if isinstance(one, EarlyStopping)]

    def _note_names(self, hook: str, given: Mapping[str, Json]) -> None:
        """Note the names of numbers; after the first validation, or at the end, warn of early stopping on none of them."""
        self._names |= _numbers(given).keys() if hook in WRITING_HOOKS else set()
        self._names_told = hook != "on_step"
        for one in self._callbacks if self._names_told and self._names else ():
            if isinstance(one, EarlyStopping) and not one.has_values:
                self._lines.append(
                    (
                        "warning",
                        f"{type(one).__name__} has had no value of {one.metric!r}, without which it never stops the run\n"
                        f"  cure: name one of {', '.join(sorted(self._names))}; a callback that adds a metric stands before it",
                    )
                )

    def _cannot_write(self, index: int, tracker: Tracker, hook: str, error: BaseException, began_s: float) -> None:
        """Warn once that a tracker cannot write; call it again later, or never if it could not begin."""
        now_s, name = time.monotonic(), type(tracker).__name__
        known = index in self._outages
        outage = self._outages.setdefault(index, _Outage())
        if not tracker.begun:
            outage.retry_s = math.inf
        elif hook in WRITING_HOOKS:
            outage.retry_s = now_s + RETRY_TIMES * (now_s - began_s)
            outage.missed += 1
        if known:
            return
        what = "cannot write" if tracker.begun else "could not begin"
        next_ = "it is tried again" if tracker.begun else "this run goes on without it"
        text = f"tracker {name} {what} ({error_text(error)}); training goes on, {next_}, and metrics.jsonl has the numbers"
        cure = cure_of_os_error(error, "free disk space, or see to the tracker's server")
        self._lines.append(("warning", f"{text}\n  cure: {cure}"))

    def _works_again(self, index: int) -> None:
        """End the outage of a tracker, and tell how many calls it has missed."""
        missed, name = self._outages.pop(index).missed, type(self._callbacks[index]).__name__
        if missed:  # else only its start was disturbed
            lacks = f"{count_noun(missed, 'step')} or validations, which metrics.jsonl has"
            self._lines.append(("note", f"tracker {name} can write again; it lacks {lacks}"))


WRITING_HOOKS = ("on_step", "on_validation")
"""Hooks in which every tracker writes, and which may add metrics."""
STEP_NUMBERS = frozenset(one.name for one in fields(StepInfo)) - {"metrics"}
"""The names of the numbers that every step has."""


def _own_metrics(answer: Mapping[Any, Any], facts: Mapping[str, Json]) -> dict[str, Json]:
    """The metrics that a callback has returned. Raises `ValueError` or `TypeError` for metrics that cannot be added."""
    taken = sorted(set(answer) & set(facts))
    if taken:
        raise ValueError(f"metric {taken[0]!r} is one of the run's own: choose another name")
    for name, value in answer.items():
        try:
            json.dumps({name: value})
        except TypeError:
            what = f"metric {name!r} is {with_article(type(value).__name__)}, which metrics.jsonl cannot hold"
            raise TypeError(f"{what}: give a number or a text, as from .item()") from None
    return dict(answer)


@dataclass
class EarlyStopping(Callback):
    """Stops the run when `metric` has not become better than its best by more than `min_delta` for `patience` values in a row.

    `metric` may belong to a validation (`validation_loss`) or to a step (`loss`), or be added by a callback before this one.
    A resumed run continues the count: earlier values are read from its metrics.jsonl.
    """

    patience: int = 3
    """Values in a row without a new best after which the run stops."""
    min_delta: float = 0.0
    """By how much a value must be better than the best to count as a new best."""
    metric: str = "validation_loss"
    """Name of the metric."""
    best: float | None = None
    """The best value so far; None before the first."""
    waited: int = 0
    """Values since the best."""
    mode: Literal["min", "max"] = "min"
    """Whether small or large values are good."""

    def on_start(self, info: RunStartInfo) -> None:
        """Catch up with the earlier metrics of a resumed run."""
        if info.first > 1:
            from raypar.storage.read_run_lines import step_of
            from raypar.storage.run_folder import RunFolder

            folder = RunFolder(Path(info.folder))
            for line in folder.read_lines(folder.metrics):
                if step_of(line) < info.first:
                    self._look(line)

    def on_step(self, info: StepInfo) -> HookResult:
        """Look at the metrics of a step."""
        return self._look(info.metrics)

    def on_validation(self, info: ValidationInfo) -> HookResult:
        """Look at the metrics of a validation."""
        return self._look(info.metrics)

    @property
    def has_values(self) -> bool:
        """Whether there was a value of the metric."""
        return self.best is not None or self.waited > 0

    def _look(self, metrics: Mapping[str, Any]) -> Stop | None:
        if self.metric not in metrics:
            return None
        given = metrics[self.metric]
        value = math.nan if given is None else float(given)  # metrics.jsonl has null for what is not finite
        best = worst_metric_value(self.mode) if self.best is None else self.best
        if is_better(self.mode, value, best, self.min_delta):
            self.best, self.waited = value, 0
            return None
        self.waited += 1
        if self.waited < self.patience:
            return None
        beyond, times = "below" if self.mode == "min" else "above", count_noun(self.waited, "value")
        times += " in a row" * (self.waited > 1)
        return Stop(f"{self.metric} {value:.4f} is not {beyond} its best {best:.4f} for {times}")


# -- trackers ----------------------------------------------------------------------------------------------------------------


class Tracker(Callback):
    """Sends the metrics of every step and validation to another program, whose package must be installed where it is made.

    If it cannot write, the run continues (`may_fail`).
    """

    packages: ClassVar[Sequence[str]] = ()
    """Packages of which any one is enough."""
    begun: bool = True
    """Whether `log` may be called; False while `on_start` has to succeed first."""

    def may_fail(self, hook: str, error: BaseException) -> bool:
        """Whether the run continues in spite of `error`: an `OSError` or its consequence; once the run has begun, whatever a
        tracker of raypar's raises, for their packages have errors of their own for a server or a disk that fails."""
        if hook != "on_start" and isinstance(error, Exception) and type(self) in TRACKERS.values():
            return True
        return any(isinstance(each, OSError) for each in exception_chain(error, contexts=True))

    def __init__(self) -> None:
        import importlib.util

        if self.packages and not any(importlib.util.find_spec(package) for package in self.packages):
            raise ConfigError(
                f"{type(self).__name__} needs the package {' or '.join(self.packages)}, which is not installed",
                cure=f"pip install {self.packages[0]} (where the driver runs), or leave the tracker out",
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send numbers of one step."""
        raise NotImplementedError

    def on_step(self, info: StepInfo) -> None:
        """Training metrics."""
        self.log(info.step, _numbers(info.metrics))

    def on_validation(self, info: ValidationInfo) -> None:
        """Send the validation loss and the job's metrics: seconds and count of a validation would mix with those of steps."""
        own = {name: value for name, value in _numbers(info.metrics).items() if name not in ("count", "seconds")}
        self.log(info.step, {**own, "validation_loss": info.validation_loss})


def _numbers(metrics: Mapping[str, Json]) -> dict[str, float]:
    return {k: float(v) for k, v in metrics.items() if k != "step" and isinstance(v, (int, float))}


REMOTE_FLUSH_S = 120.0
"""Time from one upload of a remote event file to the next."""


class TensorBoard(Tracker):
    """Event files in the run folder, under `tensorboard/` unless `log_dir` says otherwise."""

    packages = ("tensorboardX",)

    def __init__(self, log_dir: str | None = None) -> None:
        super().__init__()
        self.log_dir = log_dir
        self._directory = ""
        self._events: Any = None
        """Writes the present event file; None before the first, and after one that could not be written."""
        self._files = 0
        self._flushed_s = 0.0

    def on_start(self, info: RunStartInfo) -> None:
        """Open the event file; the steps of a resumed run replace the old ones."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._directory = self.log_dir or str(Path(info.folder) / "tensorboard")
        self._write(Event(step=info.first, session_log=SessionLog(status=SessionLog.START), wall_time=time.time()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar for each metric."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import scalar

        values = [scalar(name, value).value[0] for name, value in metrics.items()]
        self._write(Event(step=step, summary=Summary(value=values), wall_time=time.time()))

    def _write(self, event: Any) -> None:
        """Write an event in this thread. A full disk ends the thread of tensorboardX's `SummaryWriter`; its queue then
        fills, and every later call waits for ever."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.record_writer import directory_check

        fresh = self._events is None
        suffix = f".{os.getpid()}.{self._files}"
        there = set(Path(self._directory).glob(f"*{suffix}")) if fresh else set()
        try:
            if fresh:
                directory_check(self._directory)
                self._events = EventsWriter(f"{self._directory.rstrip('/')}/events", suffix)
            self._events.write_event(event)
            remote = "://" in self._directory  # there every flush uploads the whole file
            if not remote or time.monotonic() - self._flushed_s > REMOTE_FLUSH_S:
                self._events.flush()
                self._flushed_s = time.monotonic()
        except OSError:
            # The next call begins another file, for the last record of this one may be torn; an empty one is removed.
            failed, self._events = self._events, None
            with suppress(Exception):
                failed.close()
            if fresh:
                for left in set(Path(self._directory).glob(f"*{suffix}")) - there:
                    left.unlink(missing_ok=True)
            else:
                self._files += 1
            raise

    def on_end(self, info: RunEndInfo) -> None:
        """Write out what is buffered."""
        if self._events is not None:
            self._events.close()


class WandB(Tracker):
    """Logs to a Weights & Biases run of the same name; `options` go to `wandb.init`. A resumed run continues it."""

    packages = ("wandb",)

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.begun = False
        self._run: Any = None

    def on_start(self, info: RunStartInfo) -> None:
        """Start the tracker's run, or continue it after a resume."""
        import wandb

        note = Path(info.folder) / "wandb.id"
        options = {"name": info.run, "dir": info.folder, "resume": "allow", **self.options}
        if (former := _noted(note)) is not None:
            options["id"] = former
        self._run = wandb.init(**options)
        self.begun = True
        _keep_note(note, self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One call a step."""
        self._run.log(dict(metrics), step=step)

    def on_end(self, info: RunEndInfo) -> None:
        """Close the run; a failed one is marked as failed."""
        if self._run is not None:
            self._run.finish(exit_code=int(info.end == "failed"))


class MLflow(Tracker):
    """Logs to an MLflow run of the same name. A resumed run continues it."""

    packages = ("mlflow",)

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        super().__init__()
        self.tracking_uri, self.experiment = tracking_uri, experiment
        self.begun = False

    def on_start(self, info: RunStartInfo) -> None:
        """Start the tracker's run, or continue it after a resume."""
        import mlflow

        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
        if self.experiment is not None:
            mlflow.set_experiment(self.experiment)
        note = Path(info.folder) / "mlflow.id"
        former = _noted(note)
        run = mlflow.start_run(run_name=info.run) if former is None else mlflow.start_run(run_id=former)
        self.begun = True
        _keep_note(note, run.info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One call a step."""
        import mlflow

        mlflow.log_metrics(dict(metrics), step=step)

    def on_end(self, info: RunEndInfo) -> None:
        """Close the run; a failed one is marked as failed."""
        if self.begun:
            import mlflow

            status = {"failed": "FAILED", "interrupted": "KILLED"}.get(info.end, "FINISHED")
            mlflow.end_run(status=status)


def _noted(note: Path) -> str | None:
    """The tracker's run id that an earlier start of this run has stored; None if there is none."""
    return (note.read_text().strip() or None) if note.is_file() else None


def _keep_note(note: Path, text: str) -> None:
    """Store the tracker's run id for a resumed run. Raises `OSError`, which names the file."""
    from raypar.files.atomic_write import replace_file_atomically

    try:
        replace_file_atomically(note, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(note)) from error


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


# -- from a job file ---------------------------------------------------------------------------------------------------------


def callbacks_from_job(job: Job) -> tuple[Callback, ...]:
    """The callbacks of a job file: its own first (they may add metrics), then early stopping, then trackers.

    Raises `ConfigError` for functions that return no callback, trackers whose package is missing, and metrics that nobody
    computes.
    """
    found: list[Callback] = []
    for config in job.callbacks:
        name = config.label
        try:
            made = config.call("callbacks.args")
        except RayparError:
            raise
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise InputError(
                f"callback {name} raised {error_text(error)}\n{traceback.format_exc()}",
                cure="call it by itself with its args",
            ) from error
        found.append(check_callback(made, name))
    if job.early_stopping is not None:
        given = job.early_stopping
        mode = mode_of(given.metric, given.mode, "early_stopping")
        found.append(EarlyStopping(given.patience, given.min_delta, given.metric, mode=mode))
    for tracker in job.trackers:
        try:
            found.append(TRACKERS[tracker.tracker](**tracker.args))
        except TypeError as error:
            raise ConfigError(f"tracker {tracker.tracker}: {error}", cure="correct its args") from error
    _check_watched_metrics(found, job)
    return tuple(found)


def _check_watched_metrics(callbacks: Iterable[Callback], job: Job) -> None:
    """Raise `ConfigError` for early stopping and `checkpoint.best` on a metric that nobody computes.

    Where a callback of the user's may have added it, only the run shows that (`Callbacks.lines`).
    """
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and callback.metric not in STEP_NUMBERS:
            job.check_metric_has_values(callback.metric, type(callback).__name__)
        if any(getattr(callback, hook).__module__ != __name__ for hook in WRITING_HOOKS):
            return
    for best in job.checkpoint.best:
        check_metric_is_computed(best.metric, job.series, "checkpoint.best")


def check_callbacks(given: Any) -> tuple[Callback, ...]:
    """The callbacks given to `Trainer`. Raises `ConfigError` unless `given` is a list of valid callbacks."""
    if not isinstance(given, Iterable) or isinstance(given, (str, Mapping)):
        raise ConfigError(f"callbacks is {repr_text(given)}, not a list", cure=f"give a list: callbacks=[{_shown(given)}]")
    return tuple(check_callback(one, one.__name__ if isinstance(one, type) else type(one).__name__) for one in given)


def _shown(given: Any) -> str:
    """A callback as text for a message: `MyCallback()`."""
    kind = given if isinstance(given, type) else type(given)
    return f"{kind.__name__}()" if issubclass(kind, Callback) else "MyCallback()"


def check_callback(made: Any, name: str) -> Callback:
    """The callback itself. Raises `ConfigError` unless it is a `Callback` all of whose `on_...` methods are hooks."""
    if isinstance(made, type) and issubclass(made, Callback):
        raise ConfigError(f"callback {name} is a class, not an object of it", cure=f"give an object: {made.__name__}(...)")
    if not isinstance(made, Callback):
        kind = made if isinstance(made, type) else type(made)
        package = kind.__module__.partition(".")[0]
        origin = f" of {package}" if package not in ("builtins", "__main__") else ""
        found = f"the class {kind.__name__}" if isinstance(made, type) else with_article(kind.__name__)
        raise ConfigError(
            f"callback {name} returned {found}{origin}, and no raypar.Callback"
            if name != kind.__name__
            else f"callbacks has {found}{origin}, which is no raypar.Callback",
            cure=advice_for_callback(kind.__name__)
            or f"derive your class from raypar.Callback, and give an object of it; its hooks are {', '.join(_INFOS)}",
        )
    for hook in dir(type(made)):
        if hook.startswith("on_") and hook not in _INFOS:
            near = get_close_matches(hook, _INFOS, n=1, cutoff=0.6)
            raise ConfigError(
                f"callback {name} has {hook}, which is never called",
                cure=f"did you mean {near[0]}?" if near else f"hooks are {', '.join(_INFOS)}; call others something else",
            )
    return made
