"""Reads the lines of metrics.jsonl and events.jsonl. Damaged lines are left out."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from raypar.errors import ConfigError
from raypar.run_folder_schema import check_event_line, check_metrics_line
from raypar.untrusted_files import parse_untrusted_json, read_limited_bytes

LINE_BYTES = 1 << 20
"""Size limit of a line of metrics or events."""
FILE_BYTES = 4 << 30
"""Size limit of metrics or events: ten million steps of ten workers, 350,000 of a thousand."""

Line = dict[str, Any]
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
    """The valid lines of a stream, in order. `name`: metrics.jsonl or events.jsonl.

    Damaged lines (cut off, too long, too deep, of wrong types) are left out: a full disk leaves such lines too, and training
    must continue.
    """
    check = check_event_line if name == "events.jsonl" else check_metrics_line
    within = False
    while text := stream.readline(LINE_BYTES + 1):
        rest, within = within, not text.endswith(b"\n")
        if rest or (within and len(text) > LINE_BYTES):
            continue
        try:
            line = parse_untrusted_json(text)
            check(line)
        except ValueError:
            continue
        yield line


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
    return (line.get("time", 0.0), False) if "kind" in line else (line["step"], "loss" not in line)
