"""Callbacks are called as one: every one of them, once, and what they answer comes back whole."""

import importlib.machinery
import json
import math
import os
import struct
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from helpers.full_disk import room
from ray import cloudpickle
from tensorboardX.proto.event_pb2 import Event

from raypar.callbacks import (
    Callback,
    Callbacks,
    EarlyStopping,
    MLflow,
    Stop,
    TensorBoard,
    Tracker,
    WandB,
    callbacks_from_job,
    check_callback,
)
from raypar.errors import ConfigError, InputError, UserCodeError
from raypar.job.read_job import parse_job

START = {"run": "r", "first": 1}
END = {"end": "done", "why": "", "step": 3}
JOB = "name: j, steps: 1, batch_size: 1, microbatches: 1, model: 'm:f', loss: 'm:f', data: 'm:f', optimizer: 'm:f'"


def step(number: int, loss: float = 1.0, **more: Any) -> dict[str, Any]:
    speed = {"seconds": 0.5, "samples_per_s": 8.0, "count_per_s": 8.0, "bubble": 0.1, "peak_rss_bytes": [1, 2]}
    return {"step": number, "loss": loss, "norm": 2.0, "count": 4.0, **speed, **more}


def validation(number: int, loss: float) -> dict[str, Any]:
    return {"step": number, "validation_loss": loss, "count": 4.0, "seconds": 0.1}


class Said(Callback):
    """Writes down what it was called with, and answers what it was told to."""

    def __init__(self, answer: Any = None) -> None:
        self.heard: list[Any] = []
        self.answer = answer

    def on_step(self, info):
        self.heard.append(info)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_the_first_stop_and_all_added_metrics_come_back():
    all_of_them = Callbacks([Said({"perplexity": 2.7}), Said(Stop("enough")), Said(Stop("too")), Said({"more": 1})])
    assert all_of_them.call("on_step", step(7)) == ("Said: enough", {"perplexity": 2.7, "more": 1})


def test_infos_are_frozen_and_hold_what_the_step_was():
    said = Said()
    Callbacks([said]).call("on_step", step(7, skipped=True))
    info = said.heard[0]
    assert (info.step, info.loss, info.skipped, info.metrics["peak_rss_bytes"]) == (7, 1.0, True, [1, 2])
    with pytest.raises(AttributeError):
        info.loss = 0.0


def test_a_callback_that_raises_keeps_no_other_from_its_call():
    before, after = Said(ValueError("mistake of the user")), Said()
    with pytest.raises(
        UserCodeError, match=r"(?s)Said\.on_step, after 7 steps, raised ValueError: mistake of the user.*Traceback"
    ) as error:
        Callbacks([before, after]).call("on_step", step(7))
    assert len(after.heard) == 1 and "resume" in error.value.cure


@pytest.mark.parametrize("answer, what", [
    ({"loss": 0.0}, "metric 'loss' is one of the run's own"),
    ({"fine": 1, "mine": object()}, "metric 'mine' is an object, which metrics.jsonl cannot hold: give a number"),
    ("stop", "returned a str, neither Stop nor a dict"),
])  # fmt: skip
def test_answers_that_cannot_be_written_down_are_refused(answer: Any, what: str):
    with pytest.raises(UserCodeError, match=rf"Said\.on_step, after 7 steps, raised \w+: {what}"):
        Callbacks([Said(answer)]).call("on_step", step(7))


def test_early_stopping_waits_for_patience_validations_without_progress():
    early = Callbacks([EarlyStopping(patience=2, min_delta=0.1)])
    stops = [early.call("on_validation", validation(i, loss))[0] for i, loss in enumerate([3.0, 2.0, 1.95, 1.8, 1.75, 1.79])]
    assert [stop is not None for stop in stops] == [False, False, False, False, False, True]
    assert "best 1.8000" in stops[-1]


def test_early_stopping_takes_a_nan_for_no_progress():
    early = Callbacks([EarlyStopping(patience=1, metric="loss")])
    assert early.call("on_step", step(1, math.nan))[0] is not None


def test_early_stopping_of_a_resumed_run_goes_on_counting(tmp_path: Path):
    lines = [validation(10, 2.0), step(11), validation(20, 2.5), validation(30, 1.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    early = Callbacks([EarlyStopping(patience=2)])
    early.call("on_start", {"run": "r", "folder": str(tmp_path), "first": 21})
    assert early.call("on_validation", validation(30, 2.1))[0] is not None


def test_early_stopping_of_a_resumed_run_counts_what_was_not_finite(tmp_path: Path):
    """metrics.jsonl has null for it; the run could not be resumed (`TypeError`)."""
    lines = [validation(10, 2.0), {**validation(20, 2.0), "validation_loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    early = Callbacks([EarlyStopping(patience=2)])
    early.call("on_start", {"run": "r", "folder": str(tmp_path), "first": 21})
    assert early.call("on_validation", validation(30, 2.1))[0] is not None


class Adds(Callback):
    """Adds a metric of its own to every validation."""

    def __init__(self, name: str = "mine") -> None:
        self.name = name

    def on_validation(self, info: Any) -> dict[str, float]:
        return {self.name: 1.0}


def test_early_stopping_on_a_metric_that_a_callback_before_it_adds_stops_the_run():
    callbacks = Callbacks([Adds(), EarlyStopping(patience=1, metric="mine"), sent := SentNumbers()])
    first, second = (callbacks.call("on_validation", validation(number, 1.0)) for number in (1, 2))
    assert first == (None, {"mine": 1.0})
    assert second[0] == "EarlyStopping: mine 1.0000 is not below its best 1.0000 for 1 value"
    assert sent.sent[-1] == (2, {"validation_loss": 1.0, "mine": 1.0}), "trackers get it too"
    assert callbacks.lines() == []


class SentNumbers(Tracker):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []

    def log(self, step: int, metrics: Any) -> None:
        self.sent.append((step, dict(metrics)))


@pytest.mark.parametrize("hooks", [("on_step", "on_validation", "on_validation", "on_end"), ("on_step", "on_end")])
def test_early_stopping_that_has_had_no_value_by_the_first_validation_is_one_warning_with_the_names(hooks: Any):
    callbacks = Callbacks([EarlyStopping(metric="mine"), EarlyStopping(metric="loss"), Adds("other")])
    facts = {"on_step": step(1), "on_validation": validation(1, 1.0), "on_end": END}
    lines = [callbacks.call(hook, facts[hook]) and callbacks.lines() for hook in hooks]
    assert [len(each) for each in lines] == ([0, 1, 0, 0] if len(hooks) == 4 else [0, 1])
    of_validation = {"other", "validation_loss"} if len(hooks) == 4 else set()
    names = ", ".join(sorted({"bubble", "count", "count_per_s", "loss", "norm", "samples_per_s", "seconds"} | of_validation))
    text = (
        "EarlyStopping has had no value of 'mine', without which it never stops the run\n"
        f"  cure: name one of {names}; a callback that adds a metric stands before it"
    )
    assert lines[1] == [("warning", text)]


STOPS = "callbacks: [{callbacks}], validation: {{function: 'm:f', every: {every}}}"


@pytest.mark.parametrize(
    ("callbacks", "every", "said"),
    [
        ("{function: 'raypar:EarlyStopping', args: {metric: acuracy}}", 1, "EarlyStopping names the metric 'acuracy', which"),
        ("{function: 'raypar:EarlyStopping', args: {metric: loss}}", 1, None),
        ("{function: 'raypar:EarlyStopping', args: {metric: samples_per_s}}", 1, None),
        ("'raypar:EarlyStopping'", 0, "EarlyStopping needs validation losses"),
        (f"{{function: 'raypar:EarlyStopping', args: {{metric: mine}}}}, '{__name__}:Adds'", 1, "names the metric 'mine'"),
        (f"'{__name__}:Adds', {{function: 'raypar:EarlyStopping', args: {{metric: mine}}}}", 1, None),
    ],
)
def test_early_stopping_on_a_metric_that_nobody_computes_is_refused_before_the_run(
    callbacks: str, every: int, said: str | None
):
    asked = job(STOPS.format(callbacks=callbacks, every=every))
    with pytest.raises(ConfigError, match=said) if said is not None else nullcontext() as raised:
        callbacks_from_job(asked)
    if said is not None and "which" in said:
        assert raised.value.cure.startswith("it is one of loss, lr, norm, validation_loss;")


def test_checkpoints_by_a_metric_that_no_callback_adds_are_refused_before_the_run():
    best = "checkpoint: {best: [{metric: mine, mode: max}]}"
    stopping = "{function: 'raypar:EarlyStopping', args: {metric: loss}}"
    with pytest.raises(ConfigError, match=r"checkpoint\.best names the metric 'mine', which nobody computes"):
        callbacks_from_job(job(f"{best}, callbacks: [{stopping}]"))
    assert callbacks_from_job(job(f"{best}, callbacks: [{stopping}, '{__name__}:Adds']"))


def test_tensorboard_files_hold_the_numbers_and_the_tracker_travels(tmp_path: Path):
    tracker = Callbacks([cloudpickle.loads(cloudpickle.dumps(TensorBoard()))])
    tracker.call("on_start", {**START, "folder": str(tmp_path)})
    tracker.call("on_step", step(1, 2.5))
    tracker.call("on_validation", validation(1, 1.5))
    tracker.call("on_end", END)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert all(name in events.read_bytes() for name in (b"loss", b"validation_loss", b"samples_per_s"))


@pytest.mark.parametrize("tracker", [WandB, MLflow])
def test_a_tracker_that_is_not_installed_says_how_to_install_it(tracker: Any):
    with pytest.raises(ConfigError, match="which is not installed") as error:
        tracker()
    assert f"pip install {tracker.packages[0]}" in error.value.cure


class FakeWandB(types.ModuleType):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[int] = []

    def init(self, **options: Any) -> Any:
        self.inits.append(options)
        return types.SimpleNamespace(
            id="abc",
            log=lambda metrics, step: self.logged.append((step, metrics)),
            finish=lambda exit_code: self.ended.append(exit_code),
        )


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for first in (1, 2):
        tracker = Callbacks([WandB(project="p")])
        tracker.call("on_start", {"run": "r", "folder": str(tmp_path), "first": first})
        tracker.call("on_step", step(first))
        tracker.call("on_end", {**END, "end": "failed"})
    assert [options.get("id") for options in fake.inits] == [None, "abc"]
    assert fake.inits[0]["project"] == "p" and fake.inits[0]["name"] == "r"
    assert [number for number, _ in fake.logged] == [1, 2] and fake.ended == [1, 1]


def quiet(patience: int = 1) -> Callback:
    return EarlyStopping(patience)


class OwnTracker(Tracker):
    """A user's, without a package that it needs; its server is down, or its code wrong."""

    def __init__(self, raises: Callable[[], None]) -> None:
        super().__init__()
        self.raises = raises

    def log(self, step: int, metrics: Any) -> None:
        self.raises()


def circle(kind: type[Exception]) -> Callable[[], None]:
    """Raises the first error from the second, which came while the first was handled: each is the other's cause."""

    def raises() -> None:
        try:
            raise kind("first")
        except kind as first:
            try:
                raise ValueError("second")
            except ValueError as second:
                raise first from second

    return raises


def test_a_tracker_of_ones_own_needs_no_package_and_errors_in_a_circle_end():
    """It could not be made (`IndexError`); the circle hung the driver."""
    callbacks = Callbacks([OwnTracker(circle(ConnectionError))])
    callbacks.call("on_step", step(1, 2.5))
    ((kind, text),) = callbacks.lines()
    assert kind == "warning" and "OwnTracker cannot write" in text
    with pytest.raises(UserCodeError, match="KeyError: 'first'"):
        Callbacks([OwnTracker(circle(KeyError))]).call("on_step", step(1, 2.5))


def test_a_job_file_asks_for_callbacks_first_then_trackers():
    found = callbacks_from_job(
        job(
            f"callbacks: [{{function: '{__name__}:quiet', args: {{patience: 5}}}}], trackers: [tensorboard], "
            "validation: {function: 'm:f', every: 1}"
        )
    )
    assert [type(callback) for callback in found] == [EarlyStopping, TensorBoard]
    assert found[0].patience == 5


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("callbacks: ['os:getcwd']", "callback os:getcwd returned a str, and no raypar.Callback"),
        ("callbacks: ['os:getenv']", "callbacks.args lacks key, which os:getenv needs"),
        ("trackers: [{tracker: tensorboard, args: {colour: red}}]", "unexpected keyword argument 'colour'"),
    ],
)
def test_what_is_no_callback_is_refused(asked: str, said: str):
    with pytest.raises(InputError, match=said):
        callbacks_from_job(job(asked))


def job(more: str) -> Any:
    return parse_job(f"{{{JOB}, {more}}}")


def test_a_hook_that_does_not_exist_is_refused_with_the_name_that_was_meant():
    class Misnamed(Callback):
        def on_step_end(self, info):
            return None

    with pytest.raises(ConfigError, match=r"has on_step_end, which is never called\n.*did you mean on_step\?"):
        check_callback(Misnamed(), "Misnamed")


# -- trackers that cannot write ------------------------------------------------------------------------------------------------


def steps_in(folder: Path) -> list[int]:
    """Steps whose loss the event files hold, file after file; nothing after a torn record is read."""
    steps = []
    for path in sorted(folder.iterdir()):
        content, at = path.read_bytes(), 0
        while len(content) >= at + 12 and len(content) >= at + 16 + (size := struct.unpack_from("<Q", content, at)[0]):
            event = Event.FromString(content[at + 12 : at + 12 + size])
            steps += [event.step] * any(value.tag == "loss" for value in event.summary.value)
            at += 16 + size
    return steps


def told(callbacks: Callbacks) -> list[tuple[str, str]]:
    return [(kind, text.partition(";")[0]) for kind, text in callbacks.lines()]


def test_tensorboard_on_a_full_disk_warns_once_hangs_never_and_writes_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The thread of its package died, and the eleventh step after that waited for ever."""
    monkeypatch.setattr("raypar.callbacks.RETRY_TIMES", 0.0, raising=False)
    tracker = Callbacks([TensorBoard()])
    tracker.call("on_start", {**START, "folder": str(tmp_path)})
    tracker.call("on_step", step(1))
    lines: list[tuple[str, str]] = []
    with room(700):
        number = 1
        while not lines:
            number += 1
            tracker.call("on_step", step(number))
            lines += tracker.lines()
    first_missed = number
    with room(0):
        for number in range(first_missed + 1, 40):
            tracker.call("on_step", step(number))
    (warning,) = (*lines, *tracker.lines())
    assert warning[0] == "warning" and "tracker TensorBoard cannot write (OSError: [Errno 27]" in warning[1]
    assert "\n  cure: free disk space" in warning[1]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1, "no empty files are left"
    for number in range(40, 43):
        tracker.call("on_step", step(number))
    assert steps_in(tmp_path / "tensorboard") == [*range(1, first_missed), 40, 41, 42]
    ((kind, text),) = tracker.lines()
    assert kind == "note" and f"can write again; it lacks {40 - first_missed} steps" in text
    tracker.call("on_end", END)
    assert tracker.lines() == []


def test_a_tracker_that_cannot_keep_its_note_tracks_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run was ended by it; and the empty note that it left was no id for the resumed run."""
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = Callbacks([WandB()])
    with room(0):
        tracker.call("on_start", {**START, "folder": str(tmp_path)})
    ((kind, text),) = tracker.lines()
    assert (
        kind == "warning" and "tracker WandB cannot write (OSError: [Errno 27] File too large: " in text and "wandb.id" in text
    )
    tracker.call("on_step", step(1))
    assert [number for number, _ in fake.logged] == [1] and not list(tmp_path.iterdir()) and not tracker.lines()
    (tmp_path / "wandb.id").write_text("")  # of a former release
    Callbacks([WandB()]).call("on_start", {**START, "folder": str(tmp_path)})
    assert "id" not in fake.inits[-1] and (tmp_path / "wandb.id").read_text() == "abc"


def test_a_server_that_fails_is_told_once_and_tried_again_not_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake, clock, tried = FakeWandB(), [0.0], []

    def down(metrics, step):
        tried.append(step)
        clock[0] += 5.0
        raise RuntimeError("the server says 503")

    monkeypatch.setattr("raypar.callbacks.time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = Callbacks([WandB()])
    tracker.call("on_start", {**START, "folder": str(tmp_path)})
    wandb_log, tracker._callbacks[0]._run.log = tracker._callbacks[0]._run.log, down
    for number in range(1, 121):
        tracker.call("on_step", step(number))
        clock[0] += 1.0
    assert told(tracker) == [("warning", "tracker WandB cannot write (RuntimeError: the server says 503)")]
    assert tried == [1, 51, 101], "each attempt takes 5 s of the run's"
    tracker._callbacks[0]._run.log = wandb_log
    clock[0] += 50.0
    tracker.call("on_validation", validation(120, 1.0))
    assert told(tracker) == [("note", "tracker WandB can write again")] and len(fake.logged) == 1


def test_a_tracker_that_cannot_begin_is_left_out_if_it_is_the_disk_and_ends_the_run_if_it_is_misused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    error: Exception = ConnectionError("no route")

    def init(**options):
        try:
            raise error
        except ConnectionError as cause:
            raise RuntimeError("wandb cannot be reached") from cause

    fake.init = init
    tracker = Callbacks([WandB(), said := Said()])
    tracker.call("on_start", {**START, "folder": str(tmp_path)})
    for number in (1, 2):
        tracker.call("on_step", step(number))
    tracker.call("on_end", END)
    assert told(tracker) == [("warning", "tracker WandB could not begin (RuntimeError: wandb cannot be reached)")]
    assert len(said.heard) == 2
    error = TypeError("init() got an unexpected keyword argument 'colour'")
    with pytest.raises(UserCodeError, match="'colour'"):
        Callbacks([WandB(colour="red")]).call("on_start", {**START, "folder": str(tmp_path)})


def test_what_a_tracker_misses_are_steps_and_validations_not_all_calls():
    class Server(Tracker):
        up = False

        def log(self, step, metrics):
            if not self.up:
                raise ConnectionError("no route")

    callbacks = Callbacks([tracker := Server()])
    callbacks.call("on_step", step(1))
    outage = callbacks._outages[0]
    outage.retry_s = float("inf")
    callbacks.call("on_step", step(2))
    callbacks.call("on_checkpoint", {"step": 2, "path": "c"})
    outage.retry_s, tracker.up = 0.0, True
    callbacks.call("on_step", step(3))
    assert "it lacks 2 steps" in callbacks.lines()[-1][1]


def test_a_new_event_file_that_cannot_be_written_leaves_those_of_other_processes(tmp_path: Path):
    """In containers the driver of a resumed run may have the number of the former one's process."""
    former = tmp_path / "tensorboard" / f"events.out.tfevents.1700000000.host.{os.getpid()}.0"
    former.parent.mkdir()
    former.write_bytes(b"of the former driver")
    tracker = Callbacks([TensorBoard()])
    with room(0):
        tracker.call("on_start", {**START, "folder": str(tmp_path)})
    assert list(former.parent.iterdir()) == [former]


def test_a_callback_of_the_users_that_meets_the_full_disk_ends_the_run():
    with pytest.raises(UserCodeError, match="No space left"):
        Callbacks([Said(OSError(28, "No space left on device"))]).call("on_step", step(1))
