"""Compares the contract that a checkpoint keeps with that of the job which goes on from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raypar.errors import CheckpointError
from raypar.files.json_type import Json
from raypar.files.printable_text import repr_text
from raypar.job import Job
from raypar.job.contract import (
    ALWAYS,
    CHANGES,
    CODE,
    CONTRACT_EDITION,
    DATA_DIGEST,
    FINGERPRINT,
    FROZEN,
    SAMPLES,
    SKIPPED_STEPS,
    VALIDATED,
    contract_of_job,
    keys_that_may_change,
)
from raypar.job.stable_callable_text import shorten_contract_text
from raypar.worker.checkpoint.manifest import Manifest

_MOVED = {"raypar.worker.tokens": "raypar.data.token_files", "raypar.token_files": "raypar.data.token_files"}
"""Modules whose classes users name: former path -> present path. Checkpoints and job files of before have the former."""


def _as_written_now(value: Json) -> Any:
    """A contract as it would be written now: with the present paths of modules that have moved (`_MOVED`), and long texts
    shortened, which former contracts hold whole."""
    if isinstance(value, dict):
        return {key: _as_written_now(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_as_written_now(part) for part in value]
    if not isinstance(value, str):
        return value
    for former, present in _MOVED.items():
        value = value.replace(former, present)
    return shorten_contract_text(value)


def list_contract_differences(manifest: Manifest, spec: Job) -> list[str]:
    """A line for each setting of the contract that differs from the checkpoint's, except for those that may change
    at a resume (`job/key.py`). What only one of the two has is a default of the other, and a difference too.

    An earlier edition of the contract is no difference (`describe_edition_change`), a later one is. What a checkpoint holds of
    the job's code is no setting: `launch.user_code_digests.describe_code_change` compares it.
    """
    return [f"{key} was {_setting(then, key)}, is {_setting(now, key)}" for key, then, now in compare_contracts(manifest, spec)]


def compare_contracts(manifest: Manifest, spec: Job) -> list[tuple[str, dict[str, Json], dict[str, Json]]]:
    """(key, the checkpoint's contract, the job's) for each difference of `list_contract_differences`."""
    now = _as_written_now(contract_of_job(spec))
    # Checkpoints from before there was a choice say nothing of the device, nor those from before it was kept of how samples
    # are used.
    then = _as_written_now({"device": "cpu", **manifest.contract})
    for beside in (CODE, SAMPLES, DATA_DIGEST, FINGERPRINT, CHANGES, FROZEN, VALIDATED, SKIPPED_STEPS):
        then.pop(beside, None)
    if isinstance(then.get("data"), dict):
        later = {key.removeprefix("data.") for key in ALWAYS if key.startswith("data.")} - then["data"].keys()
        then["data"] |= {name: value for name, value in now["data"].items() if name in later}
    streams = streams_of(manifest)
    for name, section in _sections_of_data(now):
        if name in streams:  # found out before the first start, if the job does not say it
            section.setdefault("streams", streams[name])
    may_change = keys_that_may_change()
    return [
        (key, then, now)
        for key in {**now, **then}
        if key not in may_change
        and key != CODE
        and not _is_same_setting(then.get(key), now.get(key))
        and not (key == "edition" and _edition_of(manifest) < CONTRACT_EDITION)
    ]


def _sections_of_data(contract: Mapping[str, Json]) -> Iterator[tuple[str, dict[str, Json]]]:
    """(name, section) of `data` and `validation` in a contract, and of each of several validation sets (`validation.SET`)."""
    for name in ("data", "validation"):
        section = contract.get(name)
        if isinstance(section, dict):
            yield name, section
            sets = section.get("sets")
            for of_set, one in sets.items() if isinstance(sets, dict) else ():
                if isinstance(one, dict):
                    yield f"{name}.{of_set}", one


def streams_of(manifest: Manifest) -> dict[str, int]:
    """The sections of data that are iterable -> the number of streams as which they are read; see `_sections_of_data`."""
    found = ((name, section.get("streams")) for name, section in _sections_of_data(manifest.contract))
    return {name: streams for name, streams in found if isinstance(streams, int)}


def with_streams_of(manifest: Manifest, spec: Job) -> Job:
    """The job, read as the numbers of streams that the checkpoint was, where it does not say how many."""
    found = streams_of(manifest)
    if spec.data.streams is None and "data" in found:
        spec = spec.replace(data=spec.data.replace(streams=found["data"]))
    if spec.validation is not None and spec.validation.streams is None and "validation" in found:
        spec = spec.replace(validation=spec.validation.replace(streams=found["validation"]))
    if spec.validation is not None and spec.validation.sets:
        sets = {
            name: one if one.streams is not None else one.replace(streams=found.get(f"validation.{name}"))
            for name, one in spec.validation.sets.items()
        }
        spec = spec.replace(validation=spec.validation.replace(sets=sets))
    return spec


def _setting(contract: Mapping[str, Json], key: str) -> str:
    """The value of a setting in a contract, which does not name those that have their default."""
    return repr_text(contract[key]) if key in contract else "not set"


def _edition_of(manifest: Manifest) -> int:
    """Edition of the numerics contract by which a checkpoint was computed; anything that is none counts as a later one."""
    edition = manifest.contract.get("edition", 1)
    return edition if type(edition) is int and edition >= 1 else CONTRACT_EDITION + 1


_CHANGES_OF_EDITION = {
    2: "for models with a value that several layers read and one of them uses several times, a value or gradient between "
    "layers that is not contiguous (or begins at no multiple of 64 bytes), or a parameter that three layers use",
    3: "in the last digit of the gradient's norm, and so of the weights where clip_norm clips, in that of losses, and so of "
    "what follows validations, for stages of four shards and more (of three, where they compute in bf16), and on GPUs for "
    "views that are sent between stages",
    4: "where a model that raypar captures draws random numbers (dropout) inside of blocks with parallel branches (Inception, "
    "mixtures by sum), whose modules are layers of their own now",
}
"""Edition of the contract -> where bits differ from the edition before."""


def describe_edition_change(manifest: Manifest) -> str | None:
    """What changes for a run that goes on from a checkpoint of an earlier edition of the contract; None for one of this."""
    edition = _edition_of(manifest)
    if edition >= CONTRACT_EDITION:
        return None
    changes = "; ".join(_CHANGES_OF_EDITION[later] for later in range(edition + 1, CONTRACT_EDITION + 1))
    return (
        f"checkpoint {manifest.checkpoint.name} was computed by edition {edition} of the numerics contract, and the run goes "
        f"on by edition {CONTRACT_EDITION}: the bits are others than those of an undisturbed run only {changes}"
    )


def _is_same_setting(then: Json, now: Json) -> bool:
    """Whether two values of a contract are the same. A function that was given itself has its name without the module."""
    if isinstance(then, dict) and isinstance(now, dict) and isinstance(then.get("function"), str):
        functions = [str(value["function"]) for value in (then, now)]
        if sum(":" in name for name in functions) == 1:  # `module:name` beside `name`
            return functions[0].rpartition(":")[2] == functions[1].rpartition(":")[2] and all(
                then.get(key) == now.get(key) for key in {*then, *now} - {"function"}
            )
    return bool(then == now)


def list_changed_shard_settings(manifest: Manifest, spec: Job) -> list[str]:
    """The job file's keys of settings that decide bits only with shards, and differ from the checkpoint's."""
    now = contract_of_job(spec)
    return [name for key, name in keys_that_may_change().items() if manifest.contract.get(key) != now.get(key)]


def check_number_of_samples(manifest: Manifest, samples: int) -> None:
    """Raises `CheckpointError` if the data set has another number of samples than when the checkpoint was written. Those of
    before that was kept say nothing of it."""
    then = manifest.contract.get(SAMPLES)
    if isinstance(then, int) and then != samples:
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint} was trained on {then:,} samples, and data gives {samples:,}: the order in which "
            "samples are read depends on their number",
            cure="give the data set as it was (data.args); or begin a new run with its weights: without resuming, and with "
            f"init_from={manifest.checkpoint}",
        )


def check_data_digest(manifest: Manifest, digest: str | None) -> None:
    """Raises `CheckpointError` if the data set holds something else than when the checkpoint was written. `digest`: what the
    data set says of itself; None if it says nothing, as checkpoints may."""
    then = manifest.contract.get(DATA_DIGEST)
    if not isinstance(then, str) or digest is None:
        return
    if any(part != now for part, now in zip(then.split("+"), digest.split("+"), strict=False)):
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint} was trained on data with the digest {then}, and data has {digest}: its files "
            "were changed under the same names",
            cure="give the files as they were; or others on purpose, by another name (--set data...), from this step on; or "
            f"begin a new run with its weights: without resuming, and with init_from={manifest.checkpoint}",
        )
