"""Reads the lines of metrics.jsonl and events.jsonl. Damaged lines are left out."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from raypar.errors import ConfigError
from raypar.files.json_type import Json
from raypar.files.untrusted_files import parse_untrusted_json, read_limited_bytes
from raypar.record.events import Event, StepRecord, UnreadableLines, ValidationRecord
from raypar.record.field_types import is_number
from raypar.record.folder import EVENTS
from raypar.record.parse_events import parse_event, parse_metrics

LINE_BYTES = 1 << 20
"""Size limit of a line of metrics or events."""
FILE_BYTES = 4 << 30
"""Size limit of metrics or events: ten million steps of ten workers, 350,000 of a thousand."""

Line = dict[str, Json]
"""One line of metrics or events."""


def read_lines_file(path: Path) -> bytes | None:
    """The bytes of a file of lines, empty if the file does not exist.

    None if it cannot be read, has more than `FILE_BYTES`, or is not a regular file (a link is not followed).
    """
    if not os.path.lexists(path):
        return b""
    try:
        return read_limited_bytes(path, follow=False, limit=FILE_BYTES)
    except ConfigError:
        return None


def parse_jsonl_lines(name: str, content: bytes) -> list[Line]:
    """The valid lines in the content of metrics.jsonl or events.jsonl (`name`), in order, each once."""
    return merge_jsonl_lines(read_valid_lines(name, io.BytesIO(content)))


def read_valid_lines(name: str, stream: BinaryIO) -> Iterator[Line]:
    """The valid lines of a stream, in order, for those who write the file. `name`: metrics.jsonl or events.jsonl.

    Damaged lines (cut off, too long, too deep, of wrong types) are left out: a full disk leaves such lines too, and training
    must continue.
    """
    return (line for line, _ in _parsed_lines(name, stream) if line is not None)


def read_events(name: str, stream: BinaryIO) -> Iterator[Event]:
    """The events of a stream, in order, for those who tell people; at its end one that says how many lines are damaged."""
    damaged, why = 0, ""
    for line, found in _parsed_lines(name, stream):
        if isinstance(found, Event) and line is not None:
            yield found
        else:
            damaged, why = damaged + 1, why or str(found)
    if damaged:
        yield UnreadableLines(file=name, count=damaged, why=why)


def _parsed_lines(name: str, stream: BinaryIO) -> Iterator[tuple[Line, Event] | tuple[None, str]]:
    """(line, event) of each valid line of a stream, (None, what is wrong) of the others; none of one whose end is missing."""
    parse = parse_event if name == EVENTS else parse_metrics
    within = False
    while text := stream.readline(LINE_BYTES + 1):
        rest, within = within, not text.endswith(b"\n")
        if rest:
            continue
        if within and len(text) > LINE_BYTES:
            yield None, f"it has more than {LINE_BYTES:,} bytes"
            continue
        try:
            line = parse_untrusted_json(text)
            yield line, parse(line)
        except ValueError as error:
            if not within:
                yield None, "it is no JSON" if isinstance(error, json.JSONDecodeError) else str(error)


def merge_metrics(events: Iterable[Event]) -> list[Event]:
    """The events of metrics.jsonl in the order of steps, a validation after its step; of two of a step the last one counts."""
    found: dict[tuple[float, bool], Event] = {}
    for event in events:
        step = event.step if isinstance(event, (StepRecord, ValidationRecord)) else math.inf
        found[step, not isinstance(event, StepRecord)] = event
    return [found[place] for place in sorted(found)]


def merge_jsonl_lines(lines: Iterable[Line], more: Iterable[Line] = ()) -> list[Line]:
    """`lines` and `more` without repetitions.

    Metrics are put in the order of steps; of two lines of one step the last one counts. Events keep their order, unless `more`
    has some that `lines` lacks: then all are put in the order of time.
    """
    lines, more = list(lines), list(more)
    if any("kind" in line for line in (*lines, *more)):
        there = {json.dumps(line) for line in lines}
        lacking = [line for line in more if json.dumps(line) not in there]
        return sorted([*lines, *lacking], key=jsonl_line_sort_key) if lacking else lines
    found = {jsonl_line_sort_key(line): line for line in (*lines, *more)}
    return [found[place] for place in sorted(found)]


def jsonl_line_sort_key(line: Line) -> tuple[float, bool]:
    """The sort key of a line: events by time, metrics by step, a validation after its step."""
    if "kind" not in line:
        return step_of(line), "loss" not in line
    time_s = line.get("time", 0.0)
    assert is_number(time_s), "the line is valid"
    return time_s, False


def step_of(line: Line) -> int:
    """The step of a line of metrics."""
    step = line["step"]
    assert isinstance(step, int), "the line is valid"
    return step
