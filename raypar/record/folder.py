"""The files of a run folder, and the validation of its JSON documents. Pure.

`events.py` defines the lines of metrics.jsonl and events.jsonl. Documents may have unknown keys; a known key has a value of its
type, or is null or absent where that is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping

from raypar.files.json_values import Json
from raypar.files.untrusted_files import shorten
from raypar.record.events import (
    MAX_GENERATIONS,
    MAX_TIME_S,
    MAX_WORKER_NUMBER,
    STEP,
    TIME,
    WORKER,
    WORKER_FIELDS,
    Check,
    is_count,
    is_flag,
    is_list_of,
    is_mapping_of,
    is_number,
    is_real,
    is_text,
)

JOB = "job.yaml"
"""The job with its overrides and defaults written out; loads like any job file."""
PLAN = "plan.json"
"""The plan of the last start, or of the last generation with another plan."""
METRICS = "metrics.jsonl"
"""One line per committed step or validation."""
EVENTS = "events.jsonl"
"""One line per event of the run."""
MEMBERS = "members.json"
"""The present phase, plan and workers; replaced as a whole at every change."""
CLUSTER = "cluster.json"
"""Address of the last start's Ray cluster, and the raylets of a local one."""
TOTALS = "totals.json"
"""Totals since the run's first start (`totals.RunTotals`); replaced as a whole."""
SAMPLES = "samples.bin"
"""Digests of the samples of iterable data, and where its epochs begin; 8 bytes for each microbatch and stream of a step."""
CURSORS = "cursors.json"
"""From where streams of iterable data can be read on: states of data sets that keep their place; replaced as a whole."""
TRACE = "trace.json"
"""Chrome/Perfetto trace of a measured step, with the data of the drawing in its `otherData`."""
SWIMLANE = "swimlane.svg"
"""Drawing of the predicted and the measured step."""
ERROR = "error.txt"
"""The error of a failed run, with all frames."""
WHY_NO_JOB = "why_no_job.txt"
"""Functions and objects of a job given in Python that a job file cannot name. Written instead of job.yaml."""
CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints."""
OUTPUTS = "outputs"
"""The folder of the outputs of a run that predicts: a file for each microbatch, until they are taken."""
TRACKER_IDS = ("wandb.id", "mlflow.id")
"""The run's ids in trackers."""
LINE_FILES = (METRICS, EVENTS)
"""Files to which lines are added."""
DOCUMENTS = (JOB, PLAN, MEMBERS, CLUSTER, TOTALS, TRACE, SWIMLANE, *TRACKER_IDS, ERROR, WHY_NO_JOB)
"""Files that are replaced whole."""


def _records(fields: Mapping[str, Check], *required: str) -> Check:
    return is_list_of(lambda value: isinstance(value, dict) and _wrong(value, fields, required) is None)


_BYTES = is_count(2**63)
_STAGES = _records(dict.fromkeys(("first", "last", "position", "replicas", "shards"), is_count(MAX_WORKER_NUMBER)), "replicas")
_LAYERS = _records({"name": is_text, "parameters": _BYTES, "parameter_bytes": _BYTES}, "name")
_NODE: dict[str, Check] = {"node": is_text, "pid": is_count(2**31), "head": is_flag}
FIELDS: dict[str, dict[str, Check]] = {
    PLAN: {
        "schedule": is_text, "stages": lambda value: bool(value) and _STAGES(value), "layers": _LAYERS,
        "workers": is_list_of(is_text), "predicted_memory_bytes": is_list_of(is_mapping_of(_BYTES)),
        "predicted_ms": is_number(MAX_TIME_S), "predicted_bubble": is_real, "predicted_for": is_text,
    },
    MEMBERS: {
        "time": TIME, "phase": is_text, "generation": is_count(MAX_GENERATIONS), "step": STEP, "plan": is_text,
        "schedule": is_text, "steps": STEP, "members": _records(WORKER_FIELDS), "spares": _records(WORKER_FIELDS),
        "wanted": WORKER, "why": is_text,
        "driver_pid": is_count(2**31),
        "replaying": lambda value: isinstance(value, dict) and all(STEP(value.get(key)) for key in ("step", "until")),
    },
    CLUSTER: {"kind": is_text, "address": is_text, "nodes": _records(_NODE, *_NODE), "submitted": is_flag},
    TRACE: {},  # `schedule.swimlane_data` checks what is read of it
    TOTALS: {"time": TIME},  # the rest is checked by `totals.read_totals`
}  # fmt: skip
"""Document -> its fields and their checks."""
NEVER_NULL = ("time", "stages", "members", "spares", "nodes")
"""Fields that may be absent, but not null."""


def check_document(name: str, found: Json) -> None:
    """Raise `ValueError` unless `found` is valid as the content of the document `name`, one of `FIELDS`."""
    if not isinstance(found, dict):
        raise ValueError(f"{shorten(found)} is not a JSON object")
    key = _wrong(found, FIELDS[name], ("phase",) if name == MEMBERS else ())
    if key is not None:
        raise ValueError(f"{key} is {shorten(found[key])}" if key in found else f"it has no {key}")


def _wrong(found: Mapping[str, Json], fields: Mapping[str, Check], required: tuple[str, ...]) -> str | None:
    """The first key that is missing or of the wrong type; None if there is none."""
    for key in (*required, *(key for key in NEVER_NULL if key in found)):
        if found.get(key) is None:
            return key
    return next((key for key, check in fields.items() if found.get(key) is not None and not check(found[key])), None)
