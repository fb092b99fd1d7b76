"""A run whose processes were all killed and that was resumed: what is counted, told and timed of the steps in between."""

import json
from types import SimpleNamespace

import pytest
from helpers.recorded_runs import history_of, view_of

from raypar.actors.run_recorder import RunRecorder
from raypar.console.run_report import RunFiles, build_run_report
from raypar.console.run_status import build_run_status
from raypar.elastic.run_policy import RunPolicy
from raypar.launch.resume import describe_resumption, rewind_metrics
from raypar.record.events import Resumption
from raypar.record.totals import RunTotals
from raypar.storage.run_folder import RunFolder
from raypar.telemetry.run_telemetry import RunTelemetry

BEFORE = "2 stages x 2 replicas"
NOW = "2 stages x 1 replica"
STARTED = {"kind": "started", "time": 999.0, "text": "4 workers", "workers": [{"worker": n} for n in range(4)]}
TEXT = (
    "resumed from the checkpoint after step 120; steps 121-152 had been reported and are executed again; "
    "the run had ended after step 152 without recording why (killed?); "
    "plan 2 stages x 2 replicas -> 2 stages x 1 replica"
)


def steps(first: int, last: int, at_s: float) -> list[dict]:
    """Lines of steps of a second, the first of which begins at `at_s`."""
    return [
        {"time": at_s + n + 1 - first, "step": n, "loss": 1 / n, "seconds": 1.0, "samples_per_s": 8.0, "count": 8.0}
        for n in range(first, last + 1)
    ]


def resumption(metrics=None, events=(STARTED,), done=120, plan=NOW) -> Resumption:
    metrics = steps(1, 152, 1000.0) if metrics is None else metrics
    return describe_resumption(done, view_of(metrics, events), {"plan": BEFORE, "time": 1100.0}, plan, 1200.0)


@pytest.fixture
def killed(tmp_path) -> RunFolder:
    """A run that was killed after step 152, with its last checkpoint after step 120."""
    folder = RunFolder.create(tmp_path, "tiny")
    for line in steps(1, 152, 1000.0):
        folder.append_line(folder.metrics, line)
    folder.append_line(folder.events, STARTED)
    folder.members.write_text(json.dumps({"phase": "running", "plan": BEFORE, "time": 1100.0}))
    folder.totals.write_text(json.dumps(RunTotals(time=1150.0, last_step=150, steps=150, workers=4).as_document()))
    return folder


def test_a_resumption_says_from_where_what_is_executed_again_how_the_former_start_ended_and_the_plan():
    found = resumption()
    assert found.text == TEXT == found.line()
    assert (found.step, found.again, found.lost, found.former_end_s) == (120, 32, True, 1152.0)


@pytest.mark.parametrize("metrics, events, plan, text", [
    (steps(1, 121, 0.0), (STARTED,), BEFORE, "; step 121 had been reported and is executed again; "
     "the run had ended after step 121 without recording why (killed?)"),
    (steps(1, 120, 0.0), (STARTED, {"kind": "end", "end": "stopped"}), BEFORE, ""),
    (steps(1, 122, 0.0), (STARTED, {"kind": "end", "end": "failed"}), BEFORE,
     "; steps 121-122 had been reported and are executed again"),
    ([], (), NOW, "; plan 2 stages x 2 replicas -> 2 stages x 1 replica"),
    (steps(1, 90, 0.0), (STARTED, {"kind": "end", "end": "stopped"}, {"kind": "resumed", "text": "x", "step": 1}), BEFORE,
     "; the run had ended after step 120 without recording why (killed?)"),
])  # fmt: skip
def test_what_did_not_happen_is_not_told(metrics, events, plan, text):
    assert resumption(metrics, events, plan=plan).text == "resumed from the checkpoint after step 120" + text


def test_lines_of_steps_after_the_checkpoint_are_removed_and_counted(killed):
    found = rewind_metrics(killed, 120, NOW, validates_first=False)
    assert found.text == TEXT and found.again == 32
    assert [line["step"] for line in killed.read_lines(killed.metrics)] == list(range(1, 121))
    assert rewind_metrics(killed, 120, NOW, validates_first=False).again == 0, "nothing has been reported since"


def test_the_driver_records_the_resumption_once_and_counts_its_steps(killed):
    found = rewind_metrics(killed, 120, NOW, validates_first=False)
    policy = RunPolicy(workers=2, steps_before_run=120, job_steps=200)
    request = SimpleNamespace(run="tiny", folder=str(killed.path), policy=policy, resumption=[found])
    for _ in range(2):  # the first driver dies before its workers have started, and Ray starts another
        recorder = RunRecorder(request)
        recorder.record_resumption()
        events = list(killed.read_lines(killed.events))
        assert [event["kind"] for event in events] == ["started", "resumed"] and events[1]["text"] == TEXT
        totals = json.loads(killed.totals.read_text())
        assert totals["replayed_steps"] == 32 and totals["steps"] == 150 and totals["workers"] == 0
        values = {name: value for name, _, value in recorder.telemetry.values(200, None)}
        assert values["raypar_replayed_steps_total"] == 32
    assert recorder.new_events() == [], "the client has been told"
    request.resumption = None
    RunRecorder(request).record_resumption()
    assert len(list(killed.read_lines(killed.events))) == 2, "a new run is not resumed"


def test_what_the_killed_driver_had_not_saved_in_its_totals_is_counted(killed):
    """Totals are saved every few seconds; a run killed sooner had lost its first steps from all sums for ever."""
    killed.append_line(killed.events, {"kind": "lost", "worker": 3, "time": 1110.0})
    saved = RunTotals(time=1100.0, last_step=100, steps=100, samples=800, worker_s=400.0, workers=4, lost_workers=1)
    killed.totals.write_text(json.dumps(saved.as_document()))
    found = rewind_metrics(killed, 120, NOW, validates_first=False)
    policy = RunPolicy(workers=2, steps_before_run=120, job_steps=200)
    recorder = RunRecorder(SimpleNamespace(run="tiny", folder=str(killed.path), policy=policy, resumption=[found]))
    recorder.record_resumption()
    totals = recorder.telemetry.totals
    assert (totals.steps, totals.last_step, totals.samples, totals.lost_workers) == (120, 120, 960, 2)
    assert totals.worker_s == pytest.approx(400 + 4 * 52), "four workers until the kill at 1152, and nobody until now"
    assert totals.replayed_steps == 32


def test_steps_executed_again_by_a_resumption_are_in_all_sums():
    telemetry = RunTelemetry()
    telemetry.totals.add_event(resumption())
    assert telemetry.totals.replayed_steps == 32
    generation = {"kind": "generation", "generation": 2, "workers": [0], "pause_s": 0.5, "again": 2}
    resumed = resumption().facts()
    assert view_of(events=[resumed, generation]).faults == (
        "the whole run lost and resumed (the time in which nothing ran is not counted); "
        "0.5 s of pauses in all, 34 steps executed again"
    )
    assert view_of(events=[{**resumed, "again": 0, "lost": False}]).faults is None, "stopped and resumed is no fault"
    assert view_of(events=[{**resumed, "lost": False}]).faults == "0.0 s of pauses in all, 32 steps executed again"


def whole_run() -> tuple[list[dict], list[dict]]:
    """Metrics and events of a run that was killed at 1152, resumed at 1200, and whose workers had started at 1227."""
    events = [
        STARTED,
        {"kind": "checkpoint", "time": 1120.5, "step": 120, "path": "x"},
        {**resumption().facts(), "time": 1201.0},
    ]
    events += [{"kind": "note", "text": "the run begins with 2 workers", "time": 1210.0}, {**STARTED, "time": 1227.0}]
    return [*steps(1, 120, 1000.0), *steps(121, 160, 1230.0)], events


def test_status_and_report_tell_the_resumption_and_the_steps():
    metrics, events = whole_run()
    events.append({"kind": "end", "time": 1271.0, "end": "done", "step": 160})
    view, empty = view_of(metrics, events), {"plan": None, "members": None, "cluster": None}
    status = build_run_status("tiny", "runs/tiny", view, steps=160, now=1300.0, **empty)
    assert TEXT in [line for _, line in status.story] and "32 steps executed again" in (status.survived or "")
    report = build_run_report(status, RunFiles(view, None, None, None, None), 1300.0)
    facts = {fact.name: (fact.value, fact.note) for fact in report.facts}
    assert TEXT in [line for _, _, line in report.story]
    assert facts["recoveries"] == ("0", "no worker lost or joined; 32 steps again after a resumption")
    assert facts["time trained"] == ("3 min 15 s", "in 2 starts, without the 1 min 15 s between them; median step 1 s")
    assert facts["samples per second"] == (f"{160 * 8 / 195:.3g}", "pauses included, the time between starts not")


def test_the_time_axis_has_the_steps_that_came_to_nothing_and_not_the_time_in_which_nothing_ran():
    """The time since the last checkpoint was left out with that after the kill."""
    found = history_of(*whole_run())
    assert found.end_s == pytest.approx(152 + 3 + 40)
    assert found.between_starts_s == (pytest.approx(75.0),)
    one = history_of(steps(1, 9, 1000.0), [STARTED])
    assert one.between_starts_s == () and one.end_s == pytest.approx(9.0)
