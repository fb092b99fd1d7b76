"""What the events of a run say of it, whatever they are and however many."""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from helpers.recorded_runs import events_of, history_of, view_of

from raypar.record.events import KINDS, Event, StepRecord, UnknownEvent, fields_of
from raypar.record.field_types import Elements
from raypar.record.fold import RECENT_STEPS, RunView
from raypar.record.history import MOST_MARKS
from raypar.record.parse_events import parse_event, read_event
from raypar.record.series import MOST_POINTS, IntervalSeries, PointSeries, ValueSample
from raypar.record.story import LAST_LINES

LOST = [{"kind": "lost", "worker": worker} for worker in (2, 3)]
DRIVER = {"kind": "driver", "text": "the driver was lost"}
DRAINED = [{"kind": "draining", "worker": worker, "node": "b09a"} for worker in (4, 5)]
JOINED = [{"kind": "joined", "worker": worker} for worker in (6, 7, 8)]
CHANGES = [{"kind": "generation", "generation": n, "workers": [0], "pause_s": 5.5, "again": 0} for n in (2, 3)]
PAUSES = "11.0 s of pauses in all, 0 steps executed again"


@pytest.mark.parametrize(
    "events, words",
    [
        (
            [*LOST, DRIVER, *DRAINED, *JOINED, *CHANGES],
            f"2 workers and the driver lost, 1 node drained, 3 workers joined; {PAUSES}",
        ),
        ([LOST[0], {**CHANGES[0], "again": 1}], "1 worker lost; 5.5 s of pauses in all, 1 step executed again"),
        ([DRIVER, *CHANGES], f"the driver lost; {PAUSES}"),
        ([LOST[0], DRIVER, DRIVER, *CHANGES], f"1 worker lost, the driver lost 2 times; {PAUSES}"),
        ([*LOST, {"kind": "node", "node": "b09a"}, *CHANGES], f"2 workers (1 whole node) lost; {PAUSES}"),
        (CHANGES, PAUSES),
        ([{"kind": "generation", "generation": 1, "workers": [0]}, {"kind": "checkpoint", "step": 3, "path": "x"}], None),
    ],
)
def test_losses_drains_joins_and_pauses_are_counted(events, words):
    assert view_of(events=events).faults == words


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"time": 1000.0 + number, "step": number, "loss": 4.0 / number, "seconds": 1.0, "samples_per_s": 8.0, **more}


def test_a_long_run_takes_as_little_memory_as_a_short_one_and_no_longer_for_each_step():
    """The values that charts and medians need stay near those of all steps."""
    view, chance, seconds = RunView(), random.Random(5), []
    lost = {"kind": "lost", "worker": 1, "why": "it died"}
    began_s = time.monotonic()
    for number in range(1, 40_001):
        seconds.append(chance.uniform(0.5, 1.5))
        lines = [step(number, seconds=seconds[-1], loss=9.0 if number == 777 else 1.0)]
        lines += [{**lost, "time": 1000.5 + number}] * (number % 8 == 0)
        lines += [{"kind": "draining", "worker": number, "node": f"{number:08x}", "time": 1000.6 + number}] * (number % 8 == 0)
        for event in events_of(lines):
            view.apply(event)
    assert time.monotonic() - began_s < 30.0
    history = view.history.history()
    sizes = (len(history.steps), len(history.losses), len(view.steps.step_seconds.values))
    assert max(sizes) <= MOST_POINTS and len(view.story.last) == LAST_LINES and len(view.recent) == RECENT_STEPS
    assert len(view.drained_nodes) <= MOST_MARKS and len(history.marks) <= MOST_MARKS
    assert view.steps.count == 40_000 and view.totals.lost_workers == 5000 and view.story.count == 10_000
    assert max(loss for _, loss in history.losses) == 9.0, "peaks stay where they are"
    assert abs(view.steps.median_step_s - sorted(seconds)[20_000]) < 0.02
    assert sum(samples for _, _, samples in history.steps) == pytest.approx(sum(8.0 * s for s in seconds))
    assert view.story.lines(60, 240)[1] == 10_000 - 300 and view.story.summary()[1] == 10_000 - LAST_LINES


def test_thinned_series_keep_order_extremes_and_sums():
    intervals, points, sample = IntervalSeries(8), PointSeries(64), ValueSample(8)
    for number in range(1000):
        intervals.add(float(number), number + 0.5, 1.0)
        points.add((float(number), -5.0 if number == 123 else float(number % 7)))
        sample.add(float(number))
    assert len(intervals.intervals) <= 8 and sum(amount for _, _, amount in intervals.intervals) == 1000.0
    assert intervals.intervals[0][0] == 0.0 and intervals.intervals[-1][1] == 999.5
    assert len(points.points) <= 64 and (123.0, -5.0) in points.points and points.points == sorted(points.points)
    assert len(sample.values) <= 8 and sample.values == sorted(sample.values)


def test_lines_that_are_read_again_are_counted_once_and_a_step_of_a_resumed_run_replaces_those_after_it():
    view = view_of([step(1), step(2), {"step": 2, "validation_loss": 1.0, "time": 1002.5}, step(3)])
    for event in events_of([step(1), step(2), {"step": 2, "validation_loss": 1.0, "time": 1002.5}, step(3), step(4)]):
        view.apply(event)
    assert [one.step for one in view.recent] == [1, 2, 3, 4] and view.steps.count == 4
    view.apply(*events_of([step(3, time=2000.0)]))
    assert [one.step for one in view.recent] == [1, 2, 3] and view.steps.count == 4
    assert view.last_step is not None and view.last_step.time == 2000.0


def test_what_has_no_kind_here_is_shown_as_it_is_and_unknown_fields_are_told_once():
    """A folder of a newer release."""
    lines = [
        {"kind": "moved", "time": 5.0, "from": "a", "to": "b"},
        {"kind": "lost", "worker": 1, "blame": "disk", "time": 6.0},
        {"kind": "lost", "worker": 2, "blame": "disk", "time": 7.0},
    ]
    view = view_of(events=lines)
    told = [one.line for one in view.story.last]
    assert told[0] == 'moved: {"from": "a", "to": "b"}'
    assert told.count("events have fields that this release of raypar does not know: lost.blame") == 1 and len(told) == 4
    assert [event.facts() for event in events_of(lines)] == [
        {"kind": "moved", "time": 5.0, "from": "a", "to": "b"},
        {"kind": "lost", "time": 6.0, "worker": 1, "blame": "disk"},
        {"kind": "lost", "time": 7.0, "worker": 2, "blame": "disk"},
    ]
    assert isinstance(read_event({"kind": "lost", "worker": "two"}), UnknownEvent) and read_event(7).line()


def test_a_new_kind_of_event_is_one_class_beside_the_place_that_makes_it():
    """It cost a case in up to 18 files."""

    @dataclass(frozen=True, kw_only=True)
    class DiskShortage(Event):
        kind = "disk"
        tone = "warn"
        free_bytes: Elements

        def line(self) -> str:
            return f"the disk has {self.free_bytes} bytes left"

    try:
        (told,) = view_of(events=[DiskShortage(free_bytes=7, time=3.0).facts()]).story.last
        assert (told.line, told.event.tone, told.time) == ("the disk has 7 bytes left", "warn", 3.0)
        with pytest.raises(ValueError, match="free_bytes is -1"):
            parse_event({"kind": "disk", "free_bytes": -1})
    finally:
        del KINDS["disk"]


OF_EACH_TYPE = (1, 0.5, "text", True, [], {}, ["text"], {"text": "text"})


def accepts(kind: str, name: str, value: Any) -> bool:
    """Whether a field of a kind of event may have a value."""
    check = next(check for field, check, _ in fields_of(KINDS[kind]) if field == name)
    return check(value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_event_is_written_and_read_and_says_a_line_whatever_it_lacks(kind: str):
    """Older releases wrote fewer fields. Each wrong one is named."""
    values: Mapping[str, Any] = {
        "stage": "read", "text": "said", "step": 3, "end": "done", "worker": 2, "generation": 2, "workers": [0, 1], "path": "p",
        "until": 5, "seconds": 1.0, "samples_per_s": 8.0, "validation_loss": 0.5,
    }  # fmt: skip
    least: dict[str, Any] = {"kind": kind}
    while True:
        try:
            event = parse_event(least)
            break
        except ValueError as error:
            name = str(error).removeprefix("it has no ")
            usual = [values[name]] if name in values else []
            least[name] = next(one for one in (*usual, *OF_EACH_TYPE) if accepts(kind, name, one))
    event.line()
    assert parse_event(event.facts()) == event and type(event) is KINDS[kind]
    view_of(events=[least] if not isinstance(event, StepRecord) else [])
    for name in set(least) - {"kind"}:
        with pytest.raises(ValueError, match=name):
            parse_event({**least, name: {"odd": []}})


def test_the_history_has_no_times_in_which_nothing_ran_and_marks_of_one_moment_are_one():
    events = [
        {"kind": "started", "time": 999.0, "workers": [{"worker": 0}, {"worker": 1}]},
        *({"kind": "lost", "worker": n, "time": 1002.1} for n in (0, 1)),
        {"kind": "resumed", "text": "again", "step": 2, "time": 2000.0, "former_end_s": 1003.0},
        {"kind": "started", "time": 2010.0, "workers": [{"worker": 0}]},
    ]
    found = history_of([step(1), step(2), step(3, time=2012.0)], events)
    assert [mark.label for mark in found.marks] == ["workers 0, 1 lost", "run resumed, 16 min 47 s later"]
    assert found.end_s == pytest.approx(5.0) and found.between_starts_s == (1007.0,)
    assert [count for _, count in found.workers] == [2, 1, 0, 1]
