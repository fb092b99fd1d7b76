"""Reads events: lines of a run's files, and data of other processes, which may be of another release or damaged."""

from __future__ import annotations

import math
from collections.abc import Mapping

from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.record.events import KINDS, Event, StepRecord, UnknownEvent, ValidationRecord, fields_of
from raypar.record.field_types import TIME, is_list, is_number, is_real, is_text


def parse_event(line: Json) -> Event:
    """The event of a line of events.jsonl or of another process's data. Raises `ValueError` that says what is wrong.

    Fields that the kind does not have are kept in `more`.
    """
    line = _object(line)
    name = line.get("kind")
    if not is_text(name):
        raise ValueError(f"its kind is {shorten(name)}" if "kind" in line else "it has no kind")
    return _parse(line, KINDS.get(name), name)


def text_event(kind: str, text: str) -> Event:
    """An event of a kind that has only a text: note, warning, waiting, stopping."""
    return parse_event({"kind": kind, "text": text})


def read_event(line: Json) -> Event:
    """The event of another process's data. An invalid one, say of another release, becomes an `UnknownEvent`."""
    try:
        return parse_event(line)
    except ValueError:
        facts = line if isinstance(line, dict) else {"line": line}
        return UnknownEvent(name=str(facts.get("kind", "")), more={k: v for k, v in facts.items() if k not in ("kind", "time")})


def parse_metrics(line: Json) -> StepRecord | ValidationRecord:
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


def _object(line: Json) -> Mapping[str, Json]:
    if not isinstance(line, dict):
        raise ValueError(f"{shorten(line)} is not a JSON object")
    return line


def _parse(line: Mapping[str, Json], kind: type[Event] | None, name: str) -> Event:
    at = line.get("time")
    if "time" in line and not TIME(at):
        raise ValueError(f"time is {shorten(at)}")
    time = at if is_number(at) else None
    known = {"kind", "time"}
    if kind is None:
        return UnknownEvent(name=name, time=time, more={key: value for key, value in line.items() if key not in known})
    given: dict[str, Json] = {}
    for key, check, required in fields_of(kind):
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
    return kind(**given, time=time, more={key: value for key, value in line.items() if key not in known})
