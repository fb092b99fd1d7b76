"""A run's metrics: counted once, over drivers and starts; published; and all that the dashboard asks for."""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.recorded_runs import events_of

from raypar.actors import metrics_publisher
from raypar.actors.metrics_publisher import MetricsPublisher
from raypar.actors.run_recorder import RunRecorder
from raypar.elastic.run_policy import RunPolicy
from raypar.plan import ParallelPlan
from raypar.plan.microbatches import Microbatches
from raypar.record.events import RunWarning, StepRecord, ValidationRecord, WorkerLoss
from raypar.record.fold import RunView
from raypar.record.parse_events import parse_event, parse_metrics
from raypar.record.totals import RunTotals, read_totals
from raypar.storage.run_folder import RunFolder
from raypar.telemetry.metric_definitions import DEFINITION_BY_NAME, METRIC_DEFINITIONS, scraped_names
from raypar.telemetry.run_telemetry import RunTelemetry, WorkerCounts, count_workers, seat_labels

DASHBOARD = Path(__file__).parents[2] / "cluster/grafana/raypar.json"
FOUR = WorkerCounts(seated=4)


def line(step: int, seconds: float = 2.0, workers: int = 4, **more: Any) -> StepRecord:
    facts = {"step": step, "loss": 1 / step, "norm": 2.0, "lr": 0.1 / step, "seconds": seconds, "samples_per_s": 8 / seconds,
             "bubble": 0.25, "busy_shares": [0.5] * workers, "peak_rss_bytes": [100 + step] * workers, **more}  # fmt: skip
    found = parse_metrics(facts)
    assert isinstance(found, StepRecord)
    return found


def of_plan(plan: ParallelPlan) -> RunTelemetry:
    telemetry = RunTelemetry()
    telemetry.begin_generation(plan)
    return telemetry


def values(telemetry: RunTelemetry, price: float | None = None) -> dict[Any, float]:
    """Name, or name with the values of its labels -> value."""
    found = {}
    for name, labels, value in telemetry.values(100, price):
        found[(name, *(text for _, text in labels)) if labels else name] = value
    return found


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_goodput_is_worker_time_in_steps_that_count_over_all_worker_time_since_the_first_step():
    telemetry = RunTelemetry()
    telemetry.advance(0.0, FOUR)  # 10 s until the first step begins are not training's
    telemetry.add_step(line(1), 12.0)
    telemetry.add_step(line(2), 14.0)
    assert telemetry.totals.goodput == pytest.approx(1.0)
    telemetry.advance(20.0)  # 6 s of a recovery
    telemetry.add_step(line(3), 22.0)
    assert telemetry.totals.goodput == pytest.approx(3 * 2 / (22 - 10))
    telemetry.advance(22.0, WorkerCounts(seated=4, spare=1))
    telemetry.add_step(line(4), 24.0)
    assert telemetry.totals.goodput == pytest.approx(4 * 2 * 4 / ((22 - 10) * 4 + 2 * 5)), "a worker in reserve is paid for"


def test_a_step_that_comes_again_is_not_counted_again_and_its_time_is_not_useful():
    telemetry = RunTelemetry()
    telemetry.advance(0.0, FOUR)
    for step, at_s in ((1, 2.0), (2, 4.0), (1, 6.0), (2, 8.0), (3, 10.0)):
        telemetry.add_step(line(step), at_s)
    totals = telemetry.totals
    assert (totals.steps, totals.samples, totals.step_s, totals.last_step) == (3, 24, 6.0, 3)
    assert totals.goodput == pytest.approx(0.6) and len(telemetry.take_durations()) == 3 and telemetry.take_durations() == []


def test_events_count_recoveries_losses_and_drivers():
    totals = RunTotals()
    for event in (
        {"kind": "started"},
        {"kind": "lost", "worker": 1},
        {"kind": "recovering", "generation": 2},
        {"kind": "generation", "generation": 2, "workers": [0], "pause_s": 0.5, "again": 3},
        {"kind": "joined", "worker": 4},
        {"kind": "generation", "generation": 3, "workers": [0, 4]},
        {"kind": "driver"},
    ):
        totals.add_event(parse_event(event))
    assert (totals.recoveries, totals.recovery_pause_s, totals.replayed_steps) == (2, 0.5, 3)
    assert (totals.lost_workers, totals.joined_workers, totals.driver_failovers) == (1, 1, 1)


def test_the_cost_of_a_sample_is_that_of_all_worker_time():
    telemetry = RunTelemetry()
    telemetry.advance(0.0, FOUR)
    telemetry.add_step(line(1), 900.0)
    found = values(telemetry, price=2.0)
    assert found["raypar_cost_total"] == pytest.approx(2.0) and found["raypar_cost_per_sample"] == pytest.approx(0.25)
    assert not any("cost" in str(name) for name in values(telemetry))


def test_bytes_are_counted_from_ledgers_that_begin_anew_with_every_generation():
    telemetry, plan = RunTelemetry(), ParallelPlan.mesh(dp=2)
    telemetry.begin_generation(plan)

    def step(number: int, *sent: int) -> None:
        reports = {rank: {"ledger": {"send": {"sent": count, "received": 9, "messages": 1}} if count else {}}
                   for rank, count in enumerate(sent)}  # fmt: skip
        telemetry.add_step(line(number, workers=2), float(number), reports)

    step(1, 100, 50)
    step(2, 0, 0)  # no ledger in this report
    step(3, 130, 50)
    assert telemetry.totals.sent_bytes == {"send": 180}
    telemetry.begin_generation(plan)
    step(4, 10, 200)
    assert telemetry.totals.sent_bytes == {"send": 390}
    step(5, 5, 210)
    assert telemetry.totals.sent_bytes == {"send": 405}, "a generation whose beginning was not noted"


def test_workers_are_named_by_their_seats_and_only_while_the_plan_is_that_of_the_step():
    plan = ParallelPlan.mesh(pp=2, dp=2, tp=1, chunks=2)
    telemetry = of_plan(plan)
    telemetry.add_step(line(1), 1.0, {0: {"memory": {"rss": 7}}, 1: {}})
    found = values(telemetry)
    assert found["raypar_worker_busy_ratio", "0+2", "1", "0"] == 0.5
    assert found["raypar_worker_memory_bytes", "0+2", "0", "0", "rss"] == 7
    assert found["raypar_worker_memory_bytes", "1+3", "1", "0", "peak_rss"] == 101
    telemetry.begin_generation(ParallelPlan.mesh(dp=3))
    assert values(telemetry)["raypar_worker_busy_ratio", "0+2", "1", "0"] == 0.5, "until the new generation has made a step"
    telemetry.add_step(line(2, workers=3), 2.0)
    found = values(telemetry)
    assert found["raypar_worker_busy_ratio", "0", "2", "0"] == 0.5
    assert ("raypar_worker_busy_ratio", "0+2", "1", "0") not in found
    assert seat_labels(ParallelPlan.mesh(tp=2), 1) == (("stage", "0"), ("replica", "0"), ("shard", "1"))


def test_speed_bubble_and_computing_are_means_of_the_last_steps_of_a_generation():
    telemetry = of_plan(ParallelPlan.mesh(dp=4))
    for step in range(1, 101):
        telemetry.add_step(line(step, seconds=2.0), 2.0 * step)
    telemetry.add_step(line(101, seconds=12.0, bubble=0.75, busy_shares=[1.0] * 4, data_wait=0.5), 212.0)
    found = values(telemetry)
    assert found["raypar_samples_per_second"] == pytest.approx(8 / 3)
    assert found["raypar_bubble_ratio"] == pytest.approx(0.3)
    assert found["raypar_data_wait_ratio"] == pytest.approx(0.05)
    assert found["raypar_worker_busy_ratio", "0", "0", "0"] == pytest.approx(0.55)
    telemetry.begin_generation(ParallelPlan.mesh(dp=4))
    telemetry.add_step(line(102, seconds=4.0), 216.0)
    assert values(telemetry)["raypar_samples_per_second"] == pytest.approx(2.0)


def test_workers_are_counted_by_state_and_replicas_that_wait_by_their_placement_groups():
    given = {"members": (0, 1, 2, 3), "gone": {3}, "spares": {4}, "generation": 2}
    found = count_workers(**given, existing=(0, 1, 2, 4, 5), groups={0: "a", 1: "a", 6: "b", 7: "b", 8: "c"})
    assert found == WorkerCounts(seated=3, spare=1, starting=1, pending=3, pending_replicas=2, generation=2)
    assert found.held == 5
    first = count_workers(members=(0, 1), gone=(), spares=(), existing=(), groups={0: "a", 1: "b"}, generation=1)
    assert (first.seated, first.pending, first.pending_replicas) == (0, 2, 2)


def test_a_loss_that_is_no_number_is_not_the_last_one_that_was():
    telemetry = RunTelemetry()
    telemetry.add_step(line(1), 1.0)
    telemetry.add_step(line(2, loss=math.nan, skipped=True), 1.0)
    found = values(telemetry)
    assert math.isnan(found["raypar_loss"]) and found["raypar_skipped_steps_total"] == 1


def test_the_scale_of_the_loss_is_that_of_the_last_step_and_none_without_float16():
    telemetry = RunTelemetry()
    telemetry.add_step(line(1), 1.0)
    assert "raypar_loss_scale" not in values(telemetry)
    for step, scale in ((2, 2.0**16), (3, 2.0**15)):
        telemetry.add_step(line(step, loss_scale=scale), 1.0)
    assert values(telemetry)["raypar_loss_scale"] == 2.0**15


# -- drivers that take over, and runs that are resumed --------------------------------------------------------------------


def test_totals_come_back_from_the_run_folder_whole_or_not_at_all():
    totals = RunTotals(time=5.0, last_step=3, steps=3, samples=24, step_s=1.5, sent_bytes={"send": 3})
    assert read_totals(json.loads(json.dumps(totals.as_document()))) == totals
    whole = totals.as_document()
    for damage in ({"steps": -1}, {"steps": 2.5}, {"steps": True}, {"step_s": "x"}, {"worker_s": math.inf}, {"time": None},
                   {"sent_bytes": {"send": "x"}}, {"sent_bytes": []}, {"samples": 10**400}):  # fmt: skip
        assert read_totals(whole | damage) == RunTotals(), damage
    assert read_totals(None) == read_totals({}) == RunTotals()


def test_totals_of_a_release_that_counted_less_keep_what_it_counted():
    totals = RunTotals(time=5.0, last_step=3, steps=3)
    for one in dataclasses.fields(RunTotals):
        less = {name: value for name, value in totals.as_document().items() if name != one.name}
        assert read_totals(less) == dataclasses.replace(totals, **{one.name: getattr(RunTotals(), one.name)}), one.name


def test_a_new_driver_counts_what_the_former_one_has_written_since_it_saved_and_nothing_twice():
    former = RunTotals(time=100.0, last_step=2, steps=2, samples=16, step_s=4.0, useful_worker_s=16.0, worker_s=20.0, workers=4,
                       lost_workers=1)  # fmt: skip
    telemetry = RunTelemetry(RunView(former))
    lines = [line(1), line(2), line(3), line(4)]
    events = [{"kind": "lost", "worker": 0, "time": 99.0}, {"kind": "lost", "worker": 1, "time": 101.0}]
    telemetry.catch_up(lines, events_of(events), now=110.0)
    totals = telemetry.totals
    assert (totals.steps, totals.samples, totals.lost_workers) == (4, 32, 2)
    assert totals.worker_s == pytest.approx(20.0 + 10.0 * 4), "its workers were held while there was no driver"


@pytest.fixture
def make_recorder(tmp_path):
    folder = RunFolder.create(tmp_path, "tiny")

    def make() -> RunRecorder:
        policy = RunPolicy(workers=2, job_steps=100)
        request = SimpleNamespace(
            run="tiny", folder=str(folder.path), policy=policy, batching=Microbatches(4, 4, 8), traced_steps=(), plan=None
        )
        recorder = RunRecorder(request)
        recorder.restart_step_timer()
        return recorder

    return make


def reports(seconds: float) -> dict[int, dict[str, Any]]:
    one = {"loss": 1.0, "norm": 2.0, "count": 8.0, "skipped": False, "seconds": seconds, "busy_seconds": seconds / 2}
    one |= {"spans": [], "ledger": {}, "memory": {}, "peak_rss_bytes": 9}
    return {0: one, 1: one | {"busy_seconds": seconds}}


def test_counters_go_on_with_a_new_driver_and_with_a_resumed_run(make_recorder):
    first = make_recorder()
    for step in range(3):
        first.record_step(step, reports(0.5))
    first.note(WorkerLoss(worker=1))
    first._save_totals(0.0)
    first.record_step(3, reports(0.5))  # and then it was killed
    second = make_recorder()
    second.take_over()
    assert (second.telemetry.totals.steps, second.telemetry.totals.lost_workers) == (4, 1)
    second.record_step(4, reports(0.5))
    second._save_totals(0.0)
    assert make_recorder().telemetry.totals.steps == 5, "a resumed run goes on with the totals of its former starts"


def test_each_line_of_metrics_says_how_much_each_worker_computed(make_recorder):
    recorder = make_recorder()
    recorder.record_step(0, reports(0.5))
    (found,) = [json.loads(text) for text in recorder.metrics.path.read_text().splitlines()]
    assert found["busy_shares"] == [0.5, 1.0]


# -- what is published ---------------------------------------------------------------------------------------------------


class Shown:
    """In place of a metric of Ray: what it was given, by the values of its tags; strict as Ray's are."""

    def __init__(self, tag_keys: tuple[str, ...]) -> None:
        self.tag_keys, self.given = tag_keys, {}

    def _record(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys) and all(isinstance(text, str) for text in tags.values())
        self.given.setdefault(tuple(tags.values()), []).append(value)

    set = observe = _record

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self._record(value, tags)


@pytest.fixture
def published(monkeypatch):
    made = {metric.name: Shown(("run", *metric.labels)) for metric in METRIC_DEFINITIONS}
    monkeypatch.setattr(metrics_publisher, "make_ray_metrics", lambda: made)
    return made


def test_counters_are_given_differences_gauges_their_values_and_the_histogram_every_step_once(published):
    telemetry, publisher = of_plan(ParallelPlan.mesh(dp=4)), MetricsPublisher("tiny", 100, 3.6)
    for now_s, step in ((0.0, 0), (2.0, 1), (4.0, 2)):
        telemetry.advance(now_s, FOUR)
        if step:
            telemetry.add_step(line(step), now_s)
        assert publisher.publish(telemetry) is None
    assert published["raypar_steps_total"].given == {("tiny",): [0.0, 1, 1]}
    assert published["raypar_lost_workers_total"].given == {("tiny",): [0.0]}, "Prometheus has to see a 0 before the first loss"
    assert published["raypar_committed_steps"].given == {("tiny",): [0, 1, 2]}
    assert published["raypar_step_duration_seconds"].given == {("tiny",): [2.0, 2.0]}
    assert published["raypar_workers"].given["tiny", "seated"] == [4, 4, 4]
    assert sum(published["raypar_cost_total"].given["tiny",]) == pytest.approx(4 * 4 / 3600 * 3.6)


def test_the_first_publication_of_a_driver_that_takes_over_gives_the_totals(published):
    MetricsPublisher("tiny", 100, None).publish(RunTelemetry(RunView(RunTotals(steps=7))))
    assert sum(published["raypar_steps_total"].given["tiny",]) == 7


def test_a_seat_that_is_no_more_is_not_shown_as_busy_for_ever(published):
    telemetry, publisher = of_plan(ParallelPlan.mesh(dp=4)), MetricsPublisher("tiny", 100, None)
    telemetry.add_step(line(1), 1.0)
    publisher.publish(telemetry)
    telemetry.begin_generation(ParallelPlan.mesh(dp=3))
    telemetry.add_step(line(2, workers=3), 2.0)
    publisher.publish(telemetry)
    busy = published["raypar_worker_busy_ratio"].given
    assert busy["tiny", "0", "3", "0"] == [0.5, 0.0] and busy["tiny", "0", "2", "0"] == [0.5, 0.5]


def test_when_ray_takes_no_metrics_the_run_is_told_once_and_goes_on(make_recorder, monkeypatch):
    calls = []

    def broken() -> dict[str, Any]:
        calls.append(1)
        raise RuntimeError("no agent")

    monkeypatch.setattr(metrics_publisher, "make_ray_metrics", broken)
    recorder = make_recorder()
    recorder.publisher = MetricsPublisher("tiny", 100, None)
    for step in range(3):
        recorder.record_step(step, reports(0.5))
        recorder.publish_metrics(FOUR)
    warnings = [event.text for event in recorder.new_events() if isinstance(event, RunWarning)]
    assert len(warnings) == 1 and len(calls) == 1
    assert (
        "Ray takes no metrics (RuntimeError: no agent)" in warnings[0] and "cure: the run itself is not touched" in warnings[0]
    )


def test_every_value_has_a_definition_with_its_labels():
    telemetry = of_plan(ParallelPlan.mesh(dp=4))
    telemetry.advance(0.0, FOUR)
    telemetry.add_step(line(1, loss_scale=2.0**9), 4.0, {0: {"ledger": {"send": {"sent": 3}}, "memory": {"rss": 3}}})
    telemetry.view.apply(ValidationRecord(step=1, validation_loss=1.0, more={"validation_f1": 0.5, "told_by": "a callback"}))
    found = telemetry.values(100, 1.0)
    assert ("raypar_metric", (("metric", "validation_f1"),), 0.5) in found
    assert {name for name, _, _ in found} == {one.name for one in METRIC_DEFINITIONS if one.kind != "histogram"}
    for name, labels, _ in found:
        assert tuple(key for key, _ in labels) == DEFINITION_BY_NAME[name].labels
        assert (DEFINITION_BY_NAME[name].kind == "counter") == name.endswith("_total")


# -- the dashboard ---------------------------------------------------------------------------------------------------------


def dashboard_queries() -> list[str]:
    """All PromQL expressions of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\bray_\w+", query))


def test_the_dashboard_asks_for_metrics_that_there_are_by_labels_that_they_have():
    queries = dashboard_queries()
    assert len(queries) > 20
    for query in queries:
        assert metrics_in(query) and metrics_in(query) <= scraped_names(), query
        for name in metrics_in(query):
            metric = next(one for one in METRIC_DEFINITIONS if name in one.scraped_names)
            asked = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
            assert asked <= {"run", "le", *metric.labels}, query
            assert f'{name}{{run=~"$run"' in query, "of one run only"
            once = "sum by" if metric.kind == "histogram" else "max by"  # of the series of two drivers the larger one
            assert re.search(rf"{once} \([^)]*\) \((rate\()?{name}\{{", query), query


def test_the_dashboard_shows_every_metric():
    shown = {name for query in dashboard_queries() for name in metrics_in(query)}
    assert {one.name for one in METRIC_DEFINITIONS if not shown & set(one.scraped_names)} == set()


def test_the_guide_says_what_every_metric_means():
    guide = (DASHBOARD.parents[2] / "examples/guides/watch_a_run.md").read_text()
    assert {one.name for one in METRIC_DEFINITIONS if f"`{one.name}`" not in guide} == set()


def test_the_dashboards_panels_have_numbers_of_their_own_and_do_not_overlap():
    document = json.loads(DASHBOARD.read_text())
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [(x, y) for p in panels for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
             for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])]  # fmt: skip
    assert len(set(taken)) == len(taken) and max(x for x, _ in taken) == 23
    names = {one["name"] for one in document["templating"]["list"]}
    assert {*re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())} <= names | {"__rate_interval", "__range"}


# -- what workers report ---------------------------------------------------------------------------------------------------


def test_a_workers_report_has_memory_and_bytes_sent_every_few_seconds_only(tmp_path, monkeypatch):
    from helpers.tiny_job import write_job

    from raypar.job.read_job import load_job
    from raypar.worker import worker_core
    from raypar.worker.run_in_one_process import OneProcessRun

    clock_ns = [10**12]
    monkeypatch.setattr(worker_core.time, "perf_counter_ns", lambda: clock_ns[0])
    spec, plan = load_job(write_job(tmp_path)), ParallelPlan.mesh(pp=2, layers=4)
    with OneProcessRun(spec, plan, "1f1b") as local:
        found = []
        for step, passed_s in enumerate((0.0, 1.0, 1.5, 0.1)):
            clock_ns[0] += int(passed_s * 1e9)
            found.append(local.step(step))
    assert [[bool(one.memory) for one in reports] for reports in found] == [[True] * 2, [False] * 2, [True] * 2, [False] * 2]
    assert [[bool(one.ledger) for one in reports] for reports in found] == [[True] * 2, [False] * 2, [True] * 2, [False] * 2]
    first, third = found[0][0], found[2][0]
    assert 10 << 20 < first.memory["rss"] < 2 * first.peak_rss_bytes and first.memory["empty"] > 0
    assert set(first.memory) == {"rss", "empty", "parameter", "optimizer"}
    assert third.ledger["send"]["sent"] == 3 * first.ledger["send"]["sent"] > 0, "since the beginning of the generation"
