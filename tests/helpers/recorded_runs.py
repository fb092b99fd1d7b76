"""Runs as their folders have them, given as lines of metrics.jsonl and events.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raypar.draw.run_history_chart import RunHistory
from raypar.record.events import Event
from raypar.record.fold import RunView, timeline
from raypar.record.parse_events import parse_event, parse_metrics
from raypar.storage.read_run_lines import merge_metrics

Line = dict[str, Any]


def events_of(lines: Iterable[Line]) -> list[Event]:
    """The events of lines of either file."""
    return [parse_event(line) if "kind" in line else parse_metrics(line) for line in lines]


def view_of(metrics: Iterable[Line] = (), events: Iterable[Line] = ()) -> RunView:
    """What these lines say of a run."""
    return RunView.of(timeline(merge_metrics(events_of(metrics)), events_of(events)))


def history_of(metrics: Iterable[Line] = (), events: Iterable[Line] = ()) -> RunHistory:
    """The history that these lines tell, as charts draw it."""
    return view_of(metrics, events).history.history()
