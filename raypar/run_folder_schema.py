"""Checks the JSON lines and documents of a run folder before they are used. Pure.

Unknown keys are allowed, because callbacks add metrics of their own. A known key has its type, or is null or absent where
that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raypar.untrusted_files import shorten

Check = Callable[[Any], bool]
"""Whether a value is valid."""
MAX_GENERATIONS = 10**6
MAX_STEPS = 10**9
"""Limit of a job's `steps`, and so of steps in a run folder."""
MAX_WORKER_NUMBER = 2**31
"""Limit of worker numbers, which count all workers that a run has ever started."""
MAX_TIME_S = 1e11
"""Largest Unix time that can be shown as a date (the year 5138)."""


def _count(most: int) -> Check:
    return lambda value: type(value) is int and 0 <= value <= most


def _number(most: float) -> Check:
    return lambda value: (
        type(value) in (int, float) and 0 <= value <= most
    )  # NaN is not; an integer may be too large for a float


def _real(value: Any) -> bool:
    """Whether a value can be printed and compared as a float; NaN can."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _text(value: Any) -> bool:
    """Whether a value is text that can be printed; half a surrogate pair cannot."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in (() if value.isascii() else value))


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _mapping_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(_text(key) and check(each) for key, each in value.items())


def _records(fields: Mapping[str, Check], *required: str) -> Check:
    return _list_of(lambda value: isinstance(value, dict) and _wrong(value, fields, required) is None)


STEP, WORKER, TIME = _count(MAX_STEPS), _count(MAX_WORKER_NUMBER), _number(MAX_TIME_S)

WHO: dict[str, Check] = {
    "worker": WORKER, "coordinate": _text, "node": _text, "pid": _count(2**31), "host": _text,
}  # fmt: skip
"""Fields of one worker, in events and in members.json."""
_STAGES = _records(dict.fromkeys(("first", "last", "position", "replicas", "shards"), _count(MAX_WORKER_NUMBER)), "replicas")
_BYTES = _count(2**63)
_LAYERS = _records({"name": _text, "parameters": _BYTES, "parameter_bytes": _BYTES}, "name")

EVENT: dict[str, Check] = WHO | {
    "kind": _text, "time": TIME, "text": _text, "why": _text, "generation": _count(MAX_GENERATIONS), "step": STEP,
    "done": STEP,
    "plan": _text, "schedule": _text, "schedule_was": _text, "schedule_why": _text, "shards": _text, "shards_was": _text,
    "pause_s": _number(MAX_TIME_S), "again": STEP, "moved_elements": _count(2**63), "state": _text, "path": _text,
    "lost": lambda value: isinstance(value, bool), "former_end_s": TIME, "resumed_s": TIME,
    "end": _text, "precision": _text, "optimizer": _text, "optimizer_args": _text,
    "batch_size": STEP, "microbatches": STEP, "fingerprint": _mapping_of(_text),
}  # fmt: skip
NEEDED = {
    "lost": ("worker",), "joined": ("worker",), "draining": ("worker",), "generation": ("generation", "workers"),
    "checkpoint": ("step", "path"), "end": ("end",), "warning": ("text",), "resumed": ("text", "step"),
}  # fmt: skip
"""Kind of event -> fields that its line for users needs."""
METRICS: dict[str, Check] = {
    "time": TIME, "step": lambda value: STEP(value) and value > 0, "loss": _real, "norm": _real, "lr": _real,
    "validation_loss": _real,
    "count": _real, "count_per_s": _real, "bubble": _real, "seconds": _number(MAX_TIME_S),
    "samples_per_s": _number(1e18), "peak_rss_bytes": lambda value: isinstance(value, list),
}  # fmt: skip
PLAN: dict[str, Check] = {
    "schedule": _text, "stages": lambda value: bool(value) and _STAGES(value), "layers": _LAYERS, "workers": _list_of(_text),
    "predicted_memory_bytes": _list_of(_mapping_of(_BYTES)), "predicted_ms": _number(MAX_TIME_S),
    "predicted_bubble": _real, "predicted_for": _text,
}  # fmt: skip
MEMBERS: dict[str, Check] = {
    "time": TIME, "phase": _text, "generation": _count(MAX_GENERATIONS), "step": STEP, "plan": _text, "schedule": _text,
    "steps": STEP, "members": _records(WHO), "spares": _records(WHO), "wanted": WORKER, "why": _text,
    "driver_pid": _count(2**31),
    "replaying": lambda value: isinstance(value, dict) and all(STEP(value.get(key)) for key in ("step", "until")),
}  # fmt: skip
_NODE: dict[str, Check] = {"node": _text, "pid": _count(2**31), "head": lambda value: isinstance(value, bool)}
CLUSTER: dict[str, Check] = {
    "kind": _text, "address": _text, "nodes": _records(_NODE, *_NODE), "submitted": lambda value: isinstance(value, bool),
}  # fmt: skip
TOTALS: dict[str, Check] = {"time": TIME}
"""The rest is checked where it is read (`telemetry.run_totals.read_totals`)."""


NEVER_NULL = ("time", "peak_rss_bytes", "stages", "members", "spares", "nodes")
"""Fields that may be absent, but not null."""


def check_event_line(line: Any) -> None:
    """Raise `ValueError` unless `line` is a valid line of events.jsonl."""
    _object(line)
    _fields(line, EVENT, ("kind", *NEEDED.get(line["kind"], ())) if _text(line.get("kind")) else ("kind",))
    if line["kind"] in ("generation", "recovering") and line.get("workers") is not None:
        _fields(line, {"workers": _list_of(WORKER)}, ("generation",))
    elif line["kind"] == "recovering":
        _fields(line, {}, ("text",))
    elif line["kind"] == "started" and "workers" in line:
        _fields(line, {"workers": _records(WHO, "worker")}, ("workers",))
    for key, reason in (("schedule_was", "schedule_why"), ("shards_was", "shards")):
        if line.get(key):
            _fields(line, {}, (reason,))


def check_metrics_line(line: Any) -> None:
    """Raise `ValueError` unless `line` is a valid line of metrics.jsonl."""
    _object(line)
    _fields(line, METRICS, ("step",))
    if "kind" in line:
        raise ValueError("it has a kind, as events do")
    if "loss" in line or "samples_per_s" in line:
        _fields(line, METRICS, ("seconds", "samples_per_s"))
    if "loss" not in line and "validation_loss" not in line:
        raise ValueError("it has no loss")


def check_run_folder_json(name: str, found: Any) -> None:
    """Raise `ValueError` unless `found` is a valid plan.json, members.json, cluster.json or totals.json (`name`)."""
    _object(found)
    fields = {"plan.json": PLAN, "members.json": MEMBERS, "cluster.json": CLUSTER, "totals.json": TOTALS}[name]
    _fields(found, fields, ("phase",) if name == "members.json" else ())


def _object(found: Any) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{shorten(found)} is no object with keys and values")


def _fields(found: Mapping[str, Any], fields: Mapping[str, Check], required: tuple[str, ...]) -> None:
    key = _wrong(found, fields, required)
    if key is not None:
        raise ValueError(f"{key} is {shorten(found[key])}" if key in found else f"it has no {key}")


def _wrong(found: Mapping[str, Any], fields: Mapping[str, Check], required: tuple[str, ...]) -> str | None:
    """The first key that is missing or of the wrong type; None if there is none."""
    for key in (*required, *(key for key in NEVER_NULL if key in found)):
        if found.get(key) is None:
            return key
    return next((key for key, check in fields.items() if found.get(key) is not None and not check(found[key])), None)
