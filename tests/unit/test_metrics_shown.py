"""Where the values of metrics are seen: lines, status, report with its charts, trackers, and files of older releases."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.recorded_runs import view_of
from test_run_report import BEGAN, EVENTS, step_line

from raypar.actors.run_recorder import RunRecorder
from raypar.actors.step_reports import reconstruct_lost_report
from raypar.callbacks import Callback, Callbacks, EarlyStopping, Tracker
from raypar.console.event_printer import EventPrinter
from raypar.console.run_log import RunLogFormatter
from raypar.console.run_report import RunFiles, build_run_report
from raypar.console.run_report_html import run_report_html
from raypar.console.run_status import build_run_status, format_status
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import ConfigError, UserCodeError
from raypar.job import Job
from raypar.launch.result import Result
from raypar.plan.microbatches import Microbatches, MicrobatchesOfSets
from raypar.plan.vote_result import VoteResult
from raypar.record.best_checkpoint_rules import BestRule, BestValues
from raypar.record.events import RunWarning, ValidationRecord
from raypar.record.fold import MOST_METRICS
from raypar.record.parse_events import parse_metrics
from raypar.record.value_text import format_metric


def validated(step: int, **metrics: Any) -> dict[str, Any]:
    at = {"time": BEGAN + 0.5 * step + 0.1, "step": step, "validation_loss": 2.0 / step, "count": 10.0, "seconds": 0.1}
    return at | {f"validation_{name}": value for name, value in metrics.items()}


LINES = [
    *(step_line(step) for step in range(1, 5)),
    validated(4, accuracy=0.25, f1=None),
    *(step_line(step) for step in range(5, 9)),
    validated(8, accuracy=0.5, f1=0.125, note="a text of a callback"),
]


def status_of(lines: list[dict[str, Any]]) -> Any:
    return build_run_status(
        "r", "runs/r", view_of(lines, EVENTS), steps=8, plan=None, members=None, cluster=None, now=BEGAN + 30
    )


def test_the_view_has_the_values_of_each_metric_and_what_is_not_finite():
    view = view_of(LINES, EVENTS)
    assert list(view.metrics) == ["validation_accuracy", "validation_f1"]
    accuracy, f1 = view.metrics.values()
    assert accuracy.finite.points == [(4.0, 0.25), (8.0, 0.5)] and f1.finite.points == [(8.0, 0.125)]
    assert (accuracy.least, accuracy.largest, accuracy.last, accuracy.last_step) == ((0.25, 4), (0.5, 8), 0.5, 8)
    assert math.isnan(view_of(LINES[:5]).metrics["validation_f1"].last)


def test_of_very_many_metrics_the_first_are_kept():
    view = view_of([step_line(1), validated(1, **{f"m{number}": 1.0 for number in range(1000)})])
    assert len(view.metrics) == MOST_METRICS


def test_the_status_names_them():
    status = status_of(LINES)
    assert "  metrics  accuracy 0.5000, f1 0.1250\n" in format_status(status)
    assert status.facts()["metrics"] == {"validation_accuracy": 0.5, "validation_f1": 0.125}
    assert status_of(LINES[:5]).metrics["validation_f1"] is None
    without = status_of([step_line(1), validated(1)])
    assert "metrics" not in without.facts() and "metrics" not in format_status(without)


def test_the_report_has_a_chart_of_each_and_a_number():
    def page(lines: list[dict[str, Any]]) -> str:
        files = RunFiles(view_of(lines, EVENTS), None, None, None, None)
        return run_report_html(build_run_report(status_of(lines), files, BEGAN + 30))

    shown = page(LINES)
    assert '<section id="metrics"><h2>Metrics</h2>' in shown and shown.count("<title>accuracy</title>") == 1
    assert "least 0.2500 at step 4, largest 0.5000 at step 8" in shown
    assert 'id="metrics"' not in page([step_line(1), validated(1)])
    hostile = page([step_line(1), validated(1, **{"<script>": 0.5})])
    assert "<script>" not in hostile and "&lt;script&gt;" in hostile


def test_a_validation_is_one_line_with_its_metrics():
    record = parse_metrics(LINES[-1])
    assert isinstance(record, ValidationRecord)
    assert record.progress_line() == "step 8: validation loss 0.2500, accuracy 0.5000, f1 0.1250"
    of_callback = replace(record, more={"validation_accuracy": 0.5, "accuracy": 0.25, "loss": 3.0})
    assert of_callback.progress_line() == "step 8: validation loss 0.2500, accuracy 0.5000, accuracy 0.2500, loss 3"
    out = io.StringIO()
    printer = EventPrinter(steps=8, out=out)
    printer(record)
    printer.finish(Result({}, "runs/r", "done", 8, "all 8 steps are done"))
    first, *rest = out.getvalue().splitlines()
    assert first == record.progress_line() and "validation loss 0.2500, accuracy 0.5000, f1 0.1250" in rest
    assert RunLogFormatter(8).lines([record])[0].endswith(record.progress_line())
    assert parse_metrics(LINES[4]).progress_line().endswith("accuracy 0.2500, f1 nan")


@pytest.mark.parametrize(
    "value, text",
    [(0.8125, "0.8125"), (312.0, "312"), (1234567.0, "1,234,567"), (1.2e-5, "1.2e-05"), (1e20, "1e+20"), (math.inf, "inf")],
)
def test_numbers_are_short(value: float, text: str):
    assert format_metric(value) == text


class Heard(Callback):
    """Keeps what it is told, and adds a metric of its own."""

    def __init__(self, own: str) -> None:
        self.own, self.told = own, []

    def on_validation(self, info: Any) -> Any:
        self.told.append(dict(info.metrics))
        return {self.own: 1}


class Log(Tracker):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []

    def log(self, step: int, metrics: Any) -> None:
        self.sent.append((step, dict(metrics)))


def record_validation(folder: Path, callbacks: list[Callback], **metrics: float) -> RunRecorder:
    recorder = RunRecorder(SimpleNamespace(folder=folder, validation_batching=None))  # type: ignore[arg-type]
    recorder.callbacks = Callbacks(callbacks)
    merging = {"losses": {1: (1.0, 2.0)}, "seconds": 0.1, "metrics": metrics}
    recorder.record_validation(4, [{"losses": {0: (3.0, 2.0)}, "seconds": 0.2, "metrics": {}}, merging])
    return recorder


def test_names_reach_callbacks_trackers_the_file_and_the_client(tmp_path: Path):
    heard, log = Heard("of_callback"), Log()
    recorder = record_validation(tmp_path, [heard, log], accuracy=0.75, f1=math.nan)
    (event,) = recorder.new_events()
    assert heard.told[0]["validation_accuracy"] == 0.75 and math.isnan(heard.told[0]["validation_f1"])
    (step, sent), *_ = log.sent
    assert step == 4 and set(sent) == {"validation_loss", "validation_accuracy", "validation_f1", "of_callback"}
    assert isinstance(event, ValidationRecord) and dict(event.more)["of_callback"] == 1
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (line["validation_loss"], line["validation_accuracy"], line["validation_f1"]) == (1.0, 0.75, None)
    assert recorder.telemetry.view.metrics["validation_accuracy"].last == 0.75


def test_a_callback_cannot_take_the_name_of_a_metric(tmp_path: Path):
    with pytest.raises(UserCodeError, match="metric 'validation_accuracy' is one of the run's own"):
        record_validation(tmp_path, [Heard("validation_accuracy")], accuracy=0.75)


def test_a_run_may_stop_early_on_a_metric(tmp_path: Path):
    stopping = EarlyStopping(patience=1, metric="validation_error")
    record_validation(tmp_path, [stopping], error=0.5)
    assert stopping.best == 0.5


SMALL = {"steps": 1, "batch_size": 2, "microbatches": 1, "model": "m:model", "loss": "m:loss", "data": "m:data"}


@pytest.mark.parametrize(
    "metrics, says",
    [
        ({"loss": "m:f"}, r"metrics: 'loss' takes the name of loss, which every run has\n  cure: give it another name"),
        ({"lr": "m:f"}, "metrics: 'lr' takes the name of lr"),
        ({"validation_loss": "m:f"}, "metrics: 'validation_loss' takes the name of validation_loss"),
        ({"a": "m:f", "validation_a": "m:f"}, "metrics: 'validation_a' takes the name of 'a' in validation"),
        ({"a/b": "m:f"}, r"metrics: 'a/b' is no name of a metric\n  cure: at most 60 letters"),
        ({"": "m:f"}, "metrics: '' is no name of a metric"),
    ],
)
def test_names_that_cannot_be_are_refused(metrics: dict[str, str], says: str):
    with pytest.raises(ConfigError, match=says):
        Job(**SMALL, validation="m:data", metrics=metrics)


def test_metrics_that_nobody_would_compute_are_refused():
    with pytest.raises(ConfigError, match=r"metrics \(a\) are computed in validations, which the job does not have"):
        Job(**SMALL, metrics={"a": "m:f"})

    given = {**SMALL, "metrics": {"a": "m:f", "b": "m:f", "all": {"function": "m:f", "of": "all"}}}
    sets = {"one": {"function": "m:data", "metrics": ["b"]}, "two": {"function": "m:data", "metrics": []}}
    with pytest.raises(ConfigError, match=r"metrics \(a, all\) are among those of no validation set\n  cure: name them in"):
        Job(**given, validation=sets)
    with pytest.raises(ConfigError, match=r"metrics \(all\) are computed in validations, which the job does not have"):
        Job(**given, metrics_every=1)
    with pytest.raises(ConfigError, match=r"metrics \(all\) are among those of no validation set"):
        Job(**given, validation=sets, metrics_every=1)


def test_metrics_every_without_metrics_is_refused():
    with pytest.raises(ConfigError, match="metrics_every is 2, and the job has no metrics"):
        Job(**SMALL, metrics_every=2)
    assert Job(**SMALL, metrics={"a": "m:f"}, metrics_every=2).metrics_every == 2


def report_of(loss: float, **more: Any) -> dict[str, Any]:
    times = {"seconds": 0.5, "busy_seconds": 0.2, "peak_rss_bytes": 1, "spans": [], "ledger": {}}
    return {"loss": loss, "norm": 1.0, "count": 4.0, "skipped": False, **times, **more}


def validate_each(recorder: RunRecorder, *measured: dict[str, float]) -> list[str]:
    """Record a validation after each 2 steps; the warnings."""
    for number, metrics in enumerate(measured):
        recorder.record_validation(2 * number + 2, [{"losses": {0: (3.0, 2.0)}, "seconds": 0.2, "metrics": metrics}])
    return [event.text for event in recorder.new_events() if isinstance(event, RunWarning)]


def test_a_name_that_a_metric_gives_no_more_is_said_once(tmp_path: Path):
    recorder = RunRecorder(SimpleNamespace(folder=tmp_path, validation_batching=None))  # type: ignore[arg-type]
    recorder.callbacks = Callbacks([EarlyStopping(metric="validation_loss")])
    a, b = {"f1/a": 0.5, "f1/b": 0.25}, {"f1/b": 0.5, "f1/c": 0.75}
    assert validate_each(recorder, a, b, b, a, {}) == [
        "the validation after 4 steps has no value of validation_f1/a, which the validation after 2 steps had: it has "
        "validation_f1/b, validation_f1/c, validation_loss\n"
        "  cure: let the metric's compute return the same names each time, NaN for one that has no value",
        "the validation after 8 steps has no value of validation_f1/c, which the validation after 6 steps had: it has "
        "validation_f1/a, validation_f1/b, validation_loss\n"
        "  cure: let the metric's compute return the same names each time, NaN for one that has no value",
        "the validation after 10 steps has no value of validation_f1/b, which the validation after 8 steps had: it has "
        "validation_loss\n"
        "  cure: let the metric's compute return the same names each time, NaN for one that has no value",
    ]


@pytest.mark.parametrize("by", ["EarlyStopping", "checkpoint.best"])
@pytest.mark.parametrize(
    "measured, says",
    [
        ([{"f1/a": 0.5}, {"f1/b": 0.5}], ", which the validation after 2 steps had, and the validation after 4 steps"),
        ([{"f1/a": 0.5}, {}], ", which the validation after 2 steps had, and the validation after 4 steps"),
        ([{"f1/b": 0.5}], ", and the validation after 2 steps"),
    ],
)
def test_a_choice_by_a_name_that_has_no_value_is_an_error(tmp_path: Path, by: str, measured: Any, says: str):
    recorder = RunRecorder(SimpleNamespace(folder=tmp_path, validation_batching=None))  # type: ignore[arg-type]
    recorder.callbacks = Callbacks([EarlyStopping(metric="validation_f1/a", mode="max")] if by == "EarlyStopping" else [])
    if by == "checkpoint.best":
        recorder.checkpoints.best = BestValues([BestRule("validation_f1/a", "max")])
        recorder.checkpoints.remove_old = lambda: None  # type: ignore[method-assign]
    what = f"^{by} depends on validation_f1/a{says} has no value of it: it has (validation_f1/b, )?validation_loss"
    with pytest.raises(UserCodeError, match=what):
        validate_each(recorder, *measured)


def test_a_choice_by_a_number_that_a_callback_adds_sometimes_is_none_of_a_metric(tmp_path: Path):
    recorder = RunRecorder(SimpleNamespace(folder=tmp_path, validation_batching=None))  # type: ignore[arg-type]
    recorder.callbacks, recorder.checkpoints.best = Callbacks([]), BestValues([BestRule("validation_of_mine", "max")])
    assert validate_each(recorder, {"f1/a": 0.5}, {"f1/a": 0.5}) == []


def test_a_name_that_a_metric_gives_no_more_in_training_is_said(tmp_path: Path):
    recorder = step_recorder(tmp_path, 1)
    for step, metrics in enumerate(({"f1/a": 0.5}, {"f1/b": 0.5})):
        recorder.record_step(step, {0: report_of(2.0, metrics=metrics)})
    (line,) = [event.text for event in recorder.new_events() if isinstance(event, RunWarning)]
    assert line.startswith("step 2 has no value of f1/a, which step 1 had: it has f1/b")


def step_recorder(folder: Path, every: int) -> RunRecorder:
    policy = RunPolicy(workers=2, job_steps=9)
    request = SimpleNamespace(
        folder=folder, policy=policy, batching=SimpleNamespace(batch_size=4), traced_steps=(), plan=SimpleNamespace(world=2)
    )
    request.job = SimpleNamespace(metrics_every=every)
    recorder = RunRecorder(request)  # type: ignore[arg-type]
    recorder.restart_step_timer()
    return recorder


def test_metrics_of_a_step_are_in_its_line_and_in_the_progress_line(tmp_path: Path):
    recorder = step_recorder(tmp_path, 1)
    recorder.record_step(0, {0: report_of(2.0), 1: report_of(2.0, metrics={"accuracy": 0.25, "f1": math.nan})})
    (event,) = recorder.new_events()
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (line["accuracy"], line["f1"]) == (0.25, None) and event.metrics["accuracy"] == 0.25
    assert recorder.telemetry.view.metrics["accuracy"].last == 0.25
    out = io.StringIO()
    EventPrinter(steps=9, out=out, metrics=["accuracy", "other"])(event)
    assert "step 1/9  loss 2.0000  accuracy 0.2500  8 samples/s" in out.getvalue()


@pytest.mark.parametrize("every, told", [(0, 0), (2, 1), (3, 0)])
def test_metrics_that_are_lost_with_a_worker_are_said(tmp_path: Path, every: int, told: int):
    """The report of the second step is what another worker knows of its vote."""
    recorder = step_recorder(tmp_path, every)
    recorder.record_step(1, {0: reconstruct_lost_report(VoteResult(2.0, 4.0, 1.0, 0.25, skipped=False))})
    lines = [event.text for event in recorder.new_events() if isinstance(event, RunWarning)]
    assert len(lines) == told and all(line.startswith("the metrics of step 2 are lost with a worker") for line in lines)


def test_the_chart_of_a_metric_has_training_and_validation():
    lines = [{**step_line(step), "accuracy": step / 10} for step in range(1, 9)]
    view = view_of([*lines, validated(8, accuracy=0.5)], EVENTS)
    files = RunFiles(view, None, None, None, None)
    page = run_report_html(build_run_report(status_of([*lines, validated(8, accuracy=0.5)]), files, BEGAN + 30))
    assert page.count("<title>accuracy</title>") == 1 and "accuracy (validation)" in page
    assert "metrics  accuracy 0.8000, validation_accuracy 0.5000" in format_status(
        status_of([*lines, validated(8, accuracy=0.5)])
    )


# -- several validation sets -------------------------------------------------------------------------------------------------


def of_sets(step: int, **values: float) -> dict[str, Any]:
    """The line of a validation of the sets a and b; `a_accuracy` is `validation/a/accuracy`."""
    return validated(step) | {f"validation/{name.replace('_', '/', 1)}": value for name, value in values.items()}


LINES_OF_SETS = [
    *({**step_line(step), "accuracy": step / 20} for step in range(1, 5)),
    of_sets(4, a_loss=0.5, b_loss=1.5, a_accuracy=0.25, b_accuracy=0.5),
    *({**step_line(step), "accuracy": step / 20} for step in range(5, 9)),
    of_sets(8, a_loss=0.25, b_loss=1.25, a_accuracy=0.5, b_accuracy=0.75, **{"b_by/1": 3.0}),
]


def test_names_of_several_sets_reach_callbacks_trackers_the_file_and_the_client(tmp_path: Path):
    heard, log = Heard("of_callback"), Log()
    batching = MicrobatchesOfSets.of({"a": Microbatches(2, 2, 4), "b": Microbatches(1, 1, 1)})
    recorder = RunRecorder(SimpleNamespace(folder=tmp_path, validation_batching=batching))  # type: ignore[arg-type]
    recorder.callbacks = Callbacks([heard, log])
    merging = {"losses": {1: (1.0, 2.0), 2: (0.5, 1.0)}, "seconds": 0.1, "metrics": {"a/accuracy": 0.75, "b/accuracy": 1.0}}
    recorder.record_validation(4, [{"losses": {0: (3.0, 2.0)}, "seconds": 0.2, "metrics": {}}, merging])
    (event,) = recorder.new_events()
    names = {"validation/a/loss": 1.0, "validation/b/loss": 0.5, "validation/a/accuracy": 0.75, "validation/b/accuracy": 1.0}
    assert heard.told[0].items() >= {**names, "validation_loss": 0.9}.items()
    assert log.sent[0] == (4, {**names, "validation_loss": 0.9, "of_callback": 1.0})
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line.items() >= names.items() and dict(event.more).items() >= names.items()
    shown = {name: one.last for name, one in recorder.telemetry.view.metrics.items()}
    assert shown.items() >= names.items(), "as Prometheus and the status have them"


def test_a_validation_of_several_sets_is_one_line_by_metric():
    record = parse_metrics(LINES_OF_SETS[-1])
    assert isinstance(record, ValidationRecord)
    assert record.progress_line() == ("step 8: validation loss a 0.2500, b 1.2500, accuracy a 0.5000, b 0.7500, by/1 b 3")


def test_the_status_names_the_sets():
    text = format_status(status_of(LINES_OF_SETS))
    assert "a/loss 0.2500, b/loss 1.2500, a/accuracy 0.5000, b/accuracy 0.7500" in text


def test_a_chart_has_the_values_of_all_sets():
    page = run_report_html(
        build_run_report(status_of(LINES_OF_SETS), RunFiles(view_of(LINES_OF_SETS, EVENTS), None, None, None, None), BEGAN + 30)
    )
    assert page.count("<title>accuracy</title>") == 1 and page.count("<title>loss</title>") == 1
    for text in ("accuracy (validation, a)", "accuracy (validation, b)", "loss (validation, a)", "loss (validation, b)"):
        assert text in page, text
    assert ">validation loss<" not in page.split("<title>loss</title>")[1].split("</svg>")[0]


OF_SETS: dict[str, Any] = {"every": 2, "a": "m:a", "b": {"function": "m:b", "metrics": ["f1"]}}


def test_early_stopping_and_best_may_name_any_set_and_what_nobody_computes_is_refused_with_the_names():
    given = {**SMALL, "metrics": {"accuracy": "m:f", "f1": "m:f"}, "validation": OF_SETS}
    best = [{"metric": "validation/a/accuracy", "mode": "max"}, "validation/b/loss", "validation_loss"]
    job = Job(**given, checkpoint={"best": best}, early_stopping={"metric": "validation/b/f1/macro", "mode": "max"})
    assert [rule.metric for rule in job.best_rules] == ["validation/a/accuracy", "validation/b/loss", "validation_loss"]
    names = (
        "loss, lr, norm, validation/a/accuracy, validation/a/f1, validation/a/loss, validation/b/f1, validation/b/loss, "
        "validation_loss"
    )
    for metric in ("validation/b/accuracy", "validation/c/loss", "validation_accuracy", "validation/b/f", "validation/a"):
        for key in ("checkpoint", "early_stopping"):
            section = {"metric": metric, "mode": "max"}
            with pytest.raises(ConfigError, match=f"names the metric '{metric}', which nobody computes") as raised:
                Job(**given, **{key: {"best": [section]} if key == "checkpoint" else section})
            assert raised.value.cure.startswith(f"it is one of {names};")
    with pytest.raises(ConfigError, match="early_stopping needs validation losses"):
        Job(**{**given, "validation": {**OF_SETS, "every": 0}}, early_stopping={"metric": "validation/a/loss"})
