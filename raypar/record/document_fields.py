"""Which fields the JSON documents of a run folder have, and their check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.plan.stage_plan import GatherSpan
from raypar.record.field_types import (
    MAX_GENERATIONS,
    MAX_TIME_S,
    MAX_WORKER_NUMBER,
    STEP,
    TIME,
    WORKER,
    WORKER_FIELDS,
    Check,
    SeatedWorker,
    WorkerFacts,
    count_up_to,
    is_flag,
    is_list_of,
    is_mapping_of,
    is_real,
    is_text,
    number_up_to,
)
from raypar.record.folder import CLUSTER, MEMBERS, PLAN, TOTALS, TRACE


class StageFacts(TypedDict, total=False):
    """A stage in plan.json and members.json."""

    first: int
    last: int
    position: int
    """Number of its grid of workers."""
    replicas: int
    shards: int
    workers: list[list[int]]
    """Its grid of workers: by replica and shard, their ranks. Absent in files of older releases."""
    share: list[int]
    """Blocks of each replica; empty: even runs. Absent in files of older releases."""
    division: list[int]
    """Virtual shards of each shard; empty: each is one. Absent in files of older releases."""
    zero: int
    """ZeRO stage. Absent in files of older releases."""
    zero_holders: int
    """How many replicas hold each part of divided state. Absent in files of older releases."""
    gather: GatherSpan
    """How long parameters that replicas divide are whole. Absent in files of older releases."""


class LayerFacts(TypedDict, total=False):
    """A layer in plan.json."""

    name: str
    parameters: int
    parameter_bytes: int


class PlanDocument(TypedDict, total=False):
    """plan.json: the plan of the present generation. What raypar did not know, or older releases did not write, is absent."""

    schedule: str
    stages: list[StageFacts]
    workers: list[str]
    layers: list[LayerFacts]
    predicted_memory_bytes: list[dict[str, int]]
    predicted_ms: float
    predicted_bubble: float
    predicted_for: str


class MembersDocument(TypedDict, total=False):
    """members.json: who trains the run, and how far it is."""

    time: float
    phase: str
    generation: int
    step: int
    steps: int
    plan: str
    schedule: str
    members: Sequence[SeatedWorker]
    spares: Sequence[WorkerFacts]
    """Workers without a seat."""
    wanted: int
    why: str
    driver_pid: int
    replaying: Mapping[str, int] | None


class NodeFacts(TypedDict, total=False):
    """A raylet of a local Ray cluster, in cluster.json."""

    node: str
    pid: int
    head: bool
    cpus: int
    state: str
    """There, leaving or gone: not in the file, but found of it."""


class ClusterDocument(TypedDict, total=False):
    """cluster.json: where the run's Ray cluster is."""

    kind: str
    address: str
    nodes: list[NodeFacts]
    submitted: bool


def _records(fields: Mapping[str, Check], *required: str) -> Check:
    return is_list_of(lambda value: isinstance(value, dict) and _wrong(value, fields, required) is None)


_BYTES = count_up_to(2**63)

_STAGES = _records(
    {
        **dict.fromkeys(("first", "last", "position", "replicas", "shards"), count_up_to(MAX_WORKER_NUMBER)),
        "workers": is_list_of(is_list_of(count_up_to(MAX_WORKER_NUMBER))),
        "share": is_list_of(count_up_to(MAX_WORKER_NUMBER)),
        "division": is_list_of(count_up_to(MAX_WORKER_NUMBER)),
    },
    "replicas",
)

_LAYERS = _records({"name": is_text, "parameters": _BYTES, "parameter_bytes": _BYTES}, "name")

_NODE: dict[str, Check] = {"node": is_text, "pid": count_up_to(2**31), "head": is_flag}

FIELDS: dict[str, dict[str, Check]] = {
    PLAN: {
        "schedule": is_text, "stages": lambda value: bool(value) and _STAGES(value), "layers": _LAYERS,
        "workers": is_list_of(is_text), "predicted_memory_bytes": is_list_of(is_mapping_of(_BYTES)),
        "predicted_ms": number_up_to(MAX_TIME_S), "predicted_bubble": is_real, "predicted_for": is_text,
    },
    MEMBERS: {
        "time": TIME, "phase": is_text, "generation": count_up_to(MAX_GENERATIONS), "step": STEP, "plan": is_text,
        "schedule": is_text, "steps": STEP, "members": _records(WORKER_FIELDS), "spares": _records(WORKER_FIELDS),
        "wanted": WORKER, "why": is_text,
        "driver_pid": count_up_to(2**31),
        "replaying": lambda value: isinstance(value, dict) and all(STEP(value.get(key)) for key in ("step", "until")),
    },
    CLUSTER: {"kind": is_text, "address": is_text, "nodes": _records(_NODE, *_NODE), "submitted": is_flag},
    TRACE: {},  # `draw.swimlane_as_json` checks what is read of it
    TOTALS: {"time": TIME, "worker_memory_bytes": is_list_of(is_mapping_of(_BYTES))},  # the rest: `totals.read_totals`
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
