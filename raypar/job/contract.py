"""The contract of a job: what a checkpoint stores of it, to check that it is resumed by the same job.

It follows from the markers of keys (`key.py`). Contracts of all releases compare equal for the same job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from raypar.files.json_type import Json
from raypar.job.function_section import FunctionConfig, SingleOptimizerConfig
from raypar.job.job import Job
from raypar.job.key import marked_keys, marker_of
from raypar.job.section import Section
from raypar.job.stable_callable_text import stable_argument_text, without_addresses
from raypar.job.walk_sections import walk_sections
from raypar.record.metric_names import split_name

CONTRACT_EDITION = 4
"""Edition of the numerics contract (`raypar/NUMERICS.md`) of this release. Checkpoints of the first do not name theirs."""

CODE = "code"
"""Key under which checkpoints hold the hashes of the job's code beside the contract. It is no setting: a run that is resumed
with other code says so, and goes on."""

SAMPLES = "samples"
"""Key under which checkpoints hold the number of training samples beside the contract. It is no setting, but the order of them
depends on it."""

DATA_DIGEST = "data_digest"
"""Key under which checkpoints hold a digest of the training data beside the contract, where the data set has one
(`raypar_content_digest`). It is no setting: files are known by it that have changed under the same name."""

FINGERPRINT = "fingerprint"
"""Key under which checkpoints hold digests of a few microbatches and of the module's options beside the contract
(`worker/data/data_fingerprint.py`). It is no setting: a run that is resumed with others says so, and goes on."""

CHANGES = "changes"
"""Key under which checkpoints hold what resumes have changed, beside the contract (`worker/checkpoint/check_job_changes.py`).
Those of runs in which none has changed anything have none."""

FROZEN = "frozen"
"""Key under which checkpoints that hold only what was trained say, beside the contract, where the frozen values come from again
(`worker/checkpoint/frozen_table.py`)."""

VALIDATED = "validated"
"""Key under which checkpoints hold the values of validations that the learning rates follow, beside the contract, where they do
(`job/lr_schedule_metric.py`)."""

SKIPPED_STEPS = "skipped_steps"
"""Key under which checkpoints hold the steps that were skipped before them, beside the contract, where the loss is scaled by
what follows from them (`plan/loss_scale.py`)."""

OF_FOLLOWED_METRIC = ("validation", "metrics")
"""Keys of a contract that say how the metric is measured that the learning rates follow; it has them where these do. They may
be others when a run is resumed."""

ALWAYS = frozenset(
    [
        "seed",
        "virtual_replicas",
        "optimizer",
        "lr_schedule",
        "clip_norm",
        "reduction",
        "dtype",
        "device",
        "threads",
        "non_finite",
        "data.input",
        "data.target",
        "data.names",
    ]
)
"""Keys that contracts have also with their defaults: those from the beginning, and how samples are used, of which older
contracts say nothing. All others are left out where they have their default, so that jobs that say nothing of them
have the contract that they had before there were any."""

FORMS: dict[str, Callable[[Job], Json]] = {
    "virtual_replicas": lambda job: job.batching.blocks,
    "optimizer": lambda job: _form(job.optimizer_as_scheduled, "optimizer"),
    "lr_schedule": lambda job: _form(job.scheduled, "lr_schedule"),
    "plan.styles": lambda job: [list(pair) for pair in job.styles],
    "plan.layout": lambda job: dict(sorted(job.layout)),
}
"""Keys whose value in a contract is not the job's own."""

NAMES = {
    "model.units": "units",
    "model.buffers": "buffers",
    "plan.styles": "styles",
    "plan.layout": "layout",
    "plan.sequence_parallel": "sequence_parallel",
}
"""Keys of sections that have another name in contracts, as in the first release that had them."""


def contract_of_job(job: Job) -> dict[str, Json]:
    """The settings of a job on which its bits depend, as JSON values. Keys inside sections that are marked themselves stand
    beside the sections."""
    made: dict[str, Json] = {"edition": CONTRACT_EDITION}
    for name, value, default in _deciding(job):
        empty = isinstance(value, Section) and default is None and value == type(value).model_construct()
        if name in ALWAYS or not (value == default or empty):
            made[NAMES.get(name, name)] = FORMS[name](job) if name in FORMS else _form(value, name)
    if job.followed_metric is not None:
        made |= _measuring(job, job.followed_metric)
    plain: dict[str, Json] = json.loads(json.dumps(_with_json_keys(made), default=_as_text))
    return plain


def keys_that_may_change() -> dict[str, str]:
    """Key of a contract -> key of the job, of those that decide bits and may be others when a run is resumed."""
    return {
        NAMES.get(name, name): name
        for name, marker in marked_keys(Job)
        if marker is not None and marker.decides_bits and marker.may_change_at_resume
    }


def keys_that_may_change_when_said() -> list[str]:
    """Keys of a contract that decide bits, and of which a resume may ask for others."""
    markers = {name: marker_of(Job, name) for name in Job.model_fields}
    return [name for name, marker in markers.items() if marker is not None and marker.may_change_when_said]


def unmarked_keys(job: type[Job]) -> list[str]:
    """Dotted names of keys that say nothing of what they are for: keys of the job, and keys in sections that do not go whole
    to workers, without a marker of their own. A function's keys are always as the section in which the function is."""
    found = [name for name in job.model_fields if marker_of(job, name) is None]
    whole = {name for name, marker in marked_keys(job) if marker is not None and marker.for_workers}
    for path, section in walk_sections(job):
        if ".".join(path) not in whole:
            inherited = FunctionConfig.model_fields if issubclass(section, FunctionConfig) else {}
            unsaid = (name for name in section.model_fields if marker_of(section, name) is None and name not in inherited)
            found += [".".join((*path, name)) for name in unsaid]
    return found


def _deciding(section: Section, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value, default) of the keys that decide bits: of the section, and those inside it that are marked
    themselves."""
    for name, info in type(section).model_fields.items():
        value, marker = getattr(section, name), marker_of(type(section), name)
        if marker is not None and marker.decides_bits:
            yield prefix + name, value, info.default
        if isinstance(value, Section):
            yield from _deciding(value, f"{prefix}{name}.")


def contract_of_validation_set(job: Job, name: str) -> Json:
    """How a validation set is read and cut into microbatches, as contracts have it."""
    own, data = job.validation_sets[name], contract_of_job(job)
    form = {key: value for key, value in _form(own, "validation").items() if key not in ("metrics", "every", "sets")}
    of_training = {key: data[key] for key in ("seed", "data", "batch_size", "microbatches")}
    plain: Json = json.loads(json.dumps(_with_json_keys({"set": form, **of_training}), default=_as_text))
    return plain


def _measuring(job: Job, metric: str) -> dict[str, Json]:
    """How a metric of validations is measured: the keys `OF_FOLLOWED_METRIC`, as far as it depends on them."""
    of_set, name = split_name(metric)
    sets: dict[str, dict[str, Json]] = {}
    for each, one in job.validation_sets.items():
        if not of_set or each == of_set:
            beside = ("metrics", "every", "sets")
            sets[each] = {key: value for key, value in _form(one, "validation").items() if key not in beside}
    section = {"every": job.validation.every if job.validation is not None else 0}
    made: dict[str, Json] = {"validation": {**sets[""], **section} if "" in sets else {**section, "sets": sets}}
    if (measured := job.metrics.get(name.partition("/")[0])) is not None:
        made["metrics"] = {name.partition("/")[0]: _form(measured, "metrics")}
    return made


def _form(value: Any, key: str) -> Any:
    """A value as a contract holds it: of a section the keys without markers of their own. A function has its name and arguments
    always, an optimizer its groups; other keys are left out where they have their default, unless `ALWAYS` has them."""
    if isinstance(value, tuple) and any(isinstance(one, Section) for one in value):
        return [_form(one, key) for one in value]
    if not isinstance(value, Section):
        return value
    made: dict[str, Json] = {}
    if isinstance(value, FunctionConfig):
        made = {"function": value.contract_text, "args": dict(value.args)}
    if isinstance(value, SingleOptimizerConfig):
        made["groups"] = [list(pair) for pair in value.options_by_pattern]
    for name, info in type(value).model_fields.items():
        own, path = getattr(value, name), f"{key}.{name}"
        if name not in made and marker_of(type(value), name) is None and (own != info.default or path in ALWAYS):
            made[name] = _form(own, path)
    return made


def _with_json_keys(value: Any) -> Any:
    """A value whose dicts have no other keys than JSON can hold: a tuple, say, is its text."""
    if isinstance(value, dict):
        kept = (str, int, float, type(None))
        return {k if isinstance(k, kept) else stable_argument_text(k): _with_json_keys(part) for k, part in value.items()}
    return [_with_json_keys(part) for part in value] if isinstance(value, (list, tuple)) else value


def _as_text(value: Any) -> str:
    """An argument that is no JSON value; a tensor with all of its values, which its `repr` has not."""
    return (
        stable_argument_text(value)
        if hasattr(value, "tolist") or isinstance(value, (set, frozenset))
        else without_addresses(repr(value))
    )
