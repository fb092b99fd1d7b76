"""A checkpoint's manifest, checked in full before any of it is used. Pure: no file is opened here.

A checksum says that a manifest is as it was written, not who wrote it. So every type, range and total is checked: names of
files lead nowhere else, every slice of every tensor is there once, and shapes account for no more bytes than the files have.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.job.contract import FROZEN, SKIPPED_STEPS
from raypar.plan.wording import after_steps
from raypar.worker.checkpoint.frozen_table import FrozenTable, parse_frozen_table
from raypar.worker.checkpoint.safetensors_header import (
    ITEM_BYTES,
    MAX_ELEMENTS,
    SafetensorsHeader,
    element_count,
    is_int64_count,
    parse_shape,
)
from raypar.worker.checkpoint.state_key import (
    BUFFER,
    CACHE,
    NAMED_KINDS,
    PARAMETER,
    PLAIN_KEYS,
    SHARED_KINDS,
    TIE,
    StateKey,
    optimizer_key,
)

if TYPE_CHECKING:
    from raypar.storage.checkpoint_store import CheckpointRef

FORMAT = 4
"""Format of the manifests that are written: what replicas divide lies in runs of elements."""
FORMATS = (1, 2, 3, FORMAT)
"""Formats that are read. In the first the kind of optimizer state was its name, and there was none of groups or attributes.
From the third on they say which optimizer state there was, beside what was saved of it. Up to the third, parts are slices."""
MANIFEST = "manifest.json"

StateName = tuple[str, StateKey]
"""(qualified name of the parameter or buffer, what it is of it)."""
Slice = tuple[tuple[int, int], ...]
"""[start, stop) of every dim of the unsharded tensor."""
Run = tuple[int, int]
"""Elements [start, stop) of the flattened unsharded tensor."""
Scalar = float | int | bool | None


@dataclass(frozen=True)
class EncodedTensor:
    """A small tensor as text, in the manifest itself."""

    dtype: str
    """torch's name of the dtype."""
    shape: tuple[int, ...]
    data: str
    """Its bytes, little endian, in base64."""


KeptState = Mapping[str, Sequence[str]]
"""Parameter -> the names of all that the optimizer kept for it; of every parameter that it trains."""
SharedState = Mapping[tuple[str, str], Mapping[str, "Scalar | EncodedTensor"]]
"""(pattern of a group of parameters, `GROUP`), or (pattern of an optimizer's parameters, `ATTRIBUTE`) -> name -> optimizer
state that these parameters share. A group without such state has an empty mapping."""

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64", "uint64": "U64", "uint32": "U32", "uint16": "U16",
}  # fmt: skip
"""torch -> safetensors."""
NOT_FINITE = {repr(value): value for value in (math.inf, -math.inf, math.nan)}
"""JSON has no infinities; written as text they come back as they were."""


@dataclass(frozen=True)
class ManifestEntry:
    """One tensor in a file, or one number."""

    name: str
    """Qualified name of the parameter or buffer; of optimizer state that many parameters share, the pattern of their names."""
    kind: StateKey
    """What it is of the parameter or buffer."""
    shape: tuple[int, ...] = ()
    """Shape of the unsharded tensor."""
    dtype: str = ""
    """torch's name of the dtype, such as `float32`; empty for a number."""
    slice: Slice = ()
    """The part of the unsharded tensor that the file has; empty if that is a `run`."""
    file: str = ""
    """Name of the file that has the tensor; empty for a number."""
    key: str = ""
    """The tensor's name in the file."""
    value: Scalar | EncodedTensor = None
    """The number; of optimizer state that many parameters share also a small tensor."""
    run: Run | None = None
    """The elements that the file has, as one row, where replicas divide the tensor; None: a slice."""

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of the part that the file has."""
        if self.run is not None:
            return (self.run[1] - self.run[0],)
        return tuple(stop - start for start, stop in self.slice)

    @property
    def as_run(self) -> Run:
        """The elements that the file has, of a run or of a slice along the first dim. Raises `ValueError` for other slices."""
        if self.run is not None:
            return self.run
        if any(span != (0, size) for span, size in zip(self.slice[1:], self.shape[1:], strict=True)):
            raise ValueError(f"slice {shorten(list(self.slice))} is no run of elements")
        start, stop = self.slice[0] if self.slice else (0, 1)
        width = math.prod(self.shape[1:])
        return start * width, stop * width


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    checkpoint: CheckpointRef
    """The checkpoint."""
    steps_done: int
    """Number of steps after which the state was saved."""
    contract: Mapping[str, Json]
    """The settings of the job on which the bits depend (`contract_of_job`)."""
    entries: tuple[ManifestEntry, ...]
    """Tensors and numbers, ascending by name, kind and slice."""
    files: Mapping[str, tuple[int, str]]
    """Name of a file -> (bytes, sha256)."""
    metrics: Mapping[str, Json]
    """Metrics of the last step, as the run recorded them."""
    format: int = FORMAT
    """One of `FORMATS`."""
    kept: KeptState | None = None
    """What the workers said that their optimizers held when the entries were saved; None: not said."""

    @property
    def ties(self) -> dict[str, str]:
        """Other name of a tied parameter, or of a buffer with several names -> its first name."""
        first = {(e.file, e.key): e.name for e in self.entries if e.kind in (PARAMETER, BUFFER)}
        found = {e.name: first[e.file, e.key] for e in self.entries if e.kind == TIE}
        return {**found, **(self.frozen.ties if self.frozen is not None else {})}

    @cached_property
    def frozen(self) -> FrozenTable | None:
        """The parameters that the checkpoint leaves out; None if it has all."""
        return parse_frozen_table(self.contract.get(FROZEN), DTYPES)

    @cached_property
    def skipped_steps(self) -> tuple[int, ...]:
        """The steps before the checkpoint that were skipped, where the loss is scaled by what follows from them; else none."""
        found = self.contract.get(SKIPPED_STEPS, [])
        steps = [step for step in found if type(step) is int] if isinstance(found, list) else []
        if steps != found or steps != sorted({*steps}) or not all(0 <= step < self.steps_done for step in steps):
            raise ValueError(f"{SKIPPED_STEPS} has {shorten(found)}, {after_steps(self.steps_done)}")
        return tuple(steps)

    @cached_property
    def tensors(self) -> Mapping[str, Mapping[str, ManifestEntry]]:
        """File -> key -> entry of the tensor there; ties are left out."""
        found: dict[str, dict[str, ManifestEntry]] = {file: {} for file in self.files}
        for entry in self.entries:
            if entry.file and entry.kind != TIE:
                found[entry.file][entry.key] = entry
        return found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape of the unsharded tensor, of those that are left out too."""
        frozen = self.frozen.tensors if self.frozen is not None else {}
        return {e.name: e.shape for e in self.entries if e.kind == PARAMETER} | {n: one.shape for n, one in frozen.items()}


def manifest_to_json(
    entries: Collection[ManifestEntry],
    files: Mapping[str, tuple[int, str]],
    *,
    steps_done: int,
    contract: Mapping[str, Json],
    metrics: Mapping[str, Json],
    kept: KeptState | None = None,
) -> dict[str, Json]:
    """The manifest as JSON values, checksum included; `parse_manifest` reads them back."""
    body: dict[str, Json] = {
        "format": FORMAT,
        "steps_done": steps_done,
        "contract": dict(contract),
        "metrics": dict(metrics),
        "files": {name: {"bytes": nbytes, "sha256": sha256} for name, (nbytes, sha256) in files.items()},
        "entries": [_entry_to_json(e) for e in sorted(entries, key=_place)],
        "kept": None if kept is None else {name: list(keys) for name, keys in sorted(kept.items())},
    }
    return {**body, "sha256": manifest_checksum(body)}


def manifest_checksum(body: Mapping[str, Json]) -> str:
    """The checksum of a manifest without its checksum."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def parse_manifest(body: Mapping[str, Json], checkpoint: CheckpointRef) -> Manifest:
    """The manifest of a checkpoint from JSON values. Raises `ValueError` for what no checkpoint can have."""
    manifest_format = body.get("format")
    since_third = {"kept"} if manifest_format in FORMATS[2:] else set()
    _keys(body, "the manifest", {"format", "steps_done", "contract", "metrics", "files", "entries", *since_third})
    if type(manifest_format) is not int or manifest_format not in FORMATS:
        raise ValueError(f"format is {shorten(manifest_format)}, none of {', '.join(map(str, FORMATS))}")
    steps_done = body["steps_done"]
    if not is_int64_count(steps_done):
        raise ValueError(f"steps_done is {shorten(steps_done)}, not a whole number >= 0")
    named = re.fullmatch(r"step_([0-9]+)", checkpoint.name)
    if named is not None and int(named[1]) != steps_done:
        raise ValueError(f"steps_done is {steps_done}, but its folder is {checkpoint.name}")
    contract, metrics, given_files = (_object(body[what], what) for what in ("contract", "metrics", "files"))
    given_entries = body["entries"]
    if not isinstance(given_entries, list):
        raise ValueError(f"entries is {shorten(given_entries)}, not a list")
    files = {_file_name(name): _file(name, found) for name, found in given_files.items()}
    entries = tuple(sorted((_entry(number, found, manifest_format) for number, found in enumerate(given_entries)), key=_place))
    _check_files(entries, files)
    for (name, kind), group in itertools.groupby(entries, lambda entry: (entry.name, entry.kind)):
        _check_whole(f"{shorten(name)} ({shorten(str(kind))})", list(group))
    _check_kinds(entries)
    _check_ties(entries)
    made = Manifest(checkpoint, steps_done, contract, entries, files, metrics, manifest_format, _kept(body.get("kept")))
    _ = made.skipped_steps  # raises for what no run writes
    both = {entry.name for entry in entries} & (made.frozen.tensors.keys() if made.frozen is not None else set())
    if both:
        raise ValueError(f"{shorten(min(both))} is there, and is said to be left out")
    return made


def check_header_matches_manifest(manifest: Manifest, file: str, header: SafetensorsHeader) -> None:
    """Raises `ValueError` if the header of a file and the manifest disagree on the file's tensors."""
    named = manifest.tensors[file]
    absent, unknown = sorted(named.keys() - header.tensors.keys()), sorted(header.tensors.keys() - named.keys())
    if absent or unknown:
        which, key = ("only the manifest", absent[0]) if absent else ("only the file", unknown[0])
        raise ValueError(f"{which} has the tensor {shorten(key)!r}")
    for key, entry in named.items():
        there = header.tensors[key]
        if (there.dtype, there.shape) != (DTYPES[entry.dtype], entry.part):
            raise ValueError(
                f"tensor {shorten(key)!r} is {there.dtype} of shape {shorten(list(there.shape))}, by the manifest "
                f"{DTYPES[entry.dtype]} of shape {shorten(list(entry.part))}"
            )


# -- parts -------------------------------------------------------------------------------------------------------------------


def _place(entry: ManifestEntry) -> tuple[str, StateKey, Slice, Slice]:
    return entry.name, entry.kind, entry.slice, () if entry.run is None else (entry.run,)


def _entry_to_json(entry: ManifestEntry) -> dict[str, Json]:
    named = {"name": entry.name, "kind": entry.kind.kind}
    if entry.kind.kind in NAMED_KINDS:
        named["state"] = entry.kind.name
    if not entry.file:
        value = entry.value
        if isinstance(value, EncodedTensor):
            return {**named, "value": {"dtype": value.dtype, "shape": list(value.shape), "data": value.data}}
        return {**named, "value": repr(value) if isinstance(value, float) and not math.isfinite(value) else value}
    part: dict[str, Json] = {"slice": [list(pair) for pair in entry.slice]}
    if entry.run is not None:
        part = {"run": list(entry.run)}
    return {**named, "shape": list(entry.shape), "dtype": entry.dtype, **part, "file": entry.file, "key": entry.key}


def _object(found: Json, what: str) -> dict[str, Json]:
    """`found`, if it is a JSON object. Raises `ValueError`."""
    if not isinstance(found, dict):
        raise ValueError(f"{what} is {shorten(found)}, not keys and values")
    return found


def _keys(found: Json, what: str, wanted: set[str]) -> dict[str, Json]:
    """`found`, if it is a JSON object with exactly these keys. Raises `ValueError`."""
    found = _object(found, what)
    if found.keys() != wanted:
        missing, unknown = sorted(wanted - found.keys()), sorted(found.keys() - wanted)
        raise ValueError(f"{what} has no {missing[0]!r}" if missing else f"{what} has an unknown key {shorten(unknown[0])!r}")
    return found


def _kept(found: Json) -> KeptState | None:
    """What optimizers held, from its JSON value. Raises `ValueError`."""
    if found is None:
        return None
    if not isinstance(found, dict) or not all(isinstance(keys, list) for keys in found.values()):
        raise ValueError(f"kept is {shorten(found)}, not parameters and lists of names")
    return {_text(name, "kept: name"): tuple(_text(key, "kept: state") for key in keys) for name, keys in found.items()}


def _text(value: Json, what: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{what} is {shorten(value) or 'empty'!r}, not a printable text")
    return value


def _file_name(name: str) -> str:
    """`name`, which can only be that of a file in the checkpoint's own folder. Raises `ValueError`."""
    if not name or not name.isprintable() or "/" in name or "\\" in name or name in (".", "..", MANIFEST) or len(name) > 255:
        raise ValueError(f"{shorten(name)!r} is no name of a file in the checkpoint's folder")
    return name


def _file(name: str, found: Json) -> tuple[int, str]:
    """(bytes, sha256) of a file, as its manifest gives them. Raises `ValueError`."""
    what = f"file {shorten(name)!r}"
    given = _keys(found, what, {"bytes", "sha256"})
    nbytes, sha256 = given["bytes"], given["sha256"]
    if not is_int64_count(nbytes):
        raise ValueError(f"{what} has {shorten(nbytes)} bytes, not a whole number >= 0")
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(f"{what} has the sha256 {shorten(sha256)}, not 64 hexadecimal digits")
    return nbytes, sha256


def _entry(number: int, found: Json, manifest_format: int) -> ManifestEntry:
    """The `number`th entry, from its JSON value. Raises `ValueError`."""
    what = f"entry {number}"
    named = {"name", "kind"}
    if manifest_format > 1 and isinstance(found, dict) and found.get("kind") in NAMED_KINDS:
        named.add("state")
    if isinstance(found, dict) and "file" not in found:
        _keys(found, what, {*named, "value"})
        name, kind = _text(found["name"], f"{what}: name"), _kind(found, what, manifest_format)
        return ManifestEntry(name, kind, value=_value(found["value"], what, may_be_tensor=kind.kind in SHARED_KINDS))
    is_run = manifest_format >= FORMAT and isinstance(found, dict) and "run" in found
    found = _keys(found, what, {*named, "shape", "dtype", "run" if is_run else "slice", "file", "key"})
    name, key = (_text(found[each], f"{what}: {each}") for each in ("name", "key"))
    kind, dtype, file = _kind(found, what, manifest_format), found["dtype"], found["file"]
    if kind.kind in SHARED_KINDS:
        raise ValueError(f"{what} ({shorten(name)}): {shorten(str(kind))} lies in a file, not in the manifest")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{what} ({shorten(name)}): dtype {shorten(dtype)} is none of {', '.join(DTYPES)}")
    shape = parse_shape(found["shape"])
    if not isinstance(file, str):
        raise ValueError(f"{what} ({shorten(name)}): file is {shorten(file)}, not a text")
    where = f"{what} ({shorten(name)})"
    if is_run:
        return ManifestEntry(name, kind, shape, dtype, (), file, key, run=_run(found["run"], shape, where))
    return ManifestEntry(name, kind, shape, dtype, _slice(found["slice"], shape, where), file, key)


def _kind(found: Mapping[str, Json], what: str, manifest_format: int) -> StateKey:
    """What an entry is of its parameter or buffer, from its JSON value. Raises `ValueError`."""
    kind = _text(found["kind"], f"{what}: kind")
    if kind in PLAIN_KEYS:
        return PLAIN_KEYS[kind]
    if manifest_format == 1:
        return optimizer_key(kind)
    if kind not in NAMED_KINDS:
        raise ValueError(f"{what}: kind is {shorten(kind)!r}, none of {', '.join((*PLAIN_KEYS, *NAMED_KINDS))}")
    return StateKey(kind, _text(found["state"], f"{what}: state"))


def _value(value: Json, what: str, *, may_be_tensor: bool) -> Scalar | EncodedTensor:
    """A number of an optimizer's state, or a small tensor, from its JSON value. Raises `ValueError`."""
    if may_be_tensor and isinstance(value, dict):
        return _encoded_tensor(value, what)
    if isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    if value is None or isinstance(value, bool):
        return value
    if (isinstance(value, float) and math.isfinite(value)) or (isinstance(value, int) and abs(value) <= MAX_ELEMENTS):
        return value
    raise ValueError(f"{what}: value is {shorten(value)}, not a number of 64 bits, true, false, null, 'inf', '-inf' or 'nan'")


def _encoded_tensor(found: Mapping[str, Json], what: str) -> EncodedTensor:
    """A small tensor, from its JSON value. Raises `ValueError`."""
    _keys(found, what, {"dtype", "shape", "data"})
    dtype, shape, data = found["dtype"], parse_shape(found["shape"]), found["data"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{what}: dtype {shorten(dtype)} is none of {', '.join(DTYPES)}")
    if not isinstance(data, str) or not re.fullmatch("[A-Za-z0-9+/]*={0,2}", data) or len(data) % 4:
        raise ValueError(f"{what}: data is {shorten(data)}, not a text in base64")
    nbytes, wanted = len(base64.b64decode(data)), element_count(shape) * ITEM_BYTES[DTYPES[dtype]]
    if nbytes != wanted:
        raise ValueError(f"{what}: data has {nbytes:,} bytes, {dtype} of shape {shorten(list(shape))} has {wanted:,}")
    return EncodedTensor(dtype, shape, data)


def _slice(found: Json, shape: tuple[int, ...], what: str) -> Slice:
    """The part of a tensor of `shape`, from its JSON value; `what`: the tensor in messages. Raises `ValueError`."""
    pairs = [p for p in found if isinstance(p, list) and len(p) == 2] if isinstance(found, list) else []
    part = tuple((a, b) for a, b in pairs if is_int64_count(a) and is_int64_count(b))
    if not isinstance(found, list) or not len(part) == len(found) == len(shape):
        raise ValueError(
            f"{what}: slice {shorten(found)} is not a pair of whole numbers for each dim of {shorten(list(shape))}"
        )
    for (start, stop), size in zip(part, shape, strict=True):
        if not start <= stop <= size or (start == stop and size > 0):
            raise ValueError(f"{what}: slice {shorten(found)} is reversed, empty or out of shape {shorten(list(shape))}")
    return part


def _run(found: Json, shape: tuple[int, ...], what: str) -> Run:
    """The elements of a tensor of `shape`, from their JSON value; `what`: the tensor in messages. Raises `ValueError`."""
    pair = found if isinstance(found, list) and len(found) == 2 else [None, None]
    start, stop = pair
    if not is_int64_count(start) or not is_int64_count(stop):
        raise ValueError(f"{what}: run {shorten(found)} is not a pair of whole numbers")
    if not start < stop <= element_count(shape):
        raise ValueError(f"{what}: run {shorten(found)} is reversed, empty or out of the {element_count(shape):,} elements")
    return start, stop


def _check_files(entries: Sequence[ManifestEntry], files: Mapping[str, tuple[int, str]]) -> None:
    """Raises `ValueError` unless every tensor lies under a key of its own in a listed file that has bytes for it."""
    taken: dict[str, int] = dict.fromkeys(files, 0)
    keys: set[tuple[str, str]] = set()
    for entry in entries:
        if not entry.file and entry.dtype:
            raise ValueError(f"{shorten(entry.name)} ({shorten(str(entry.kind))}) lies in a file without a name")
        if entry.file and entry.file not in files:
            raise ValueError(
                f"{shorten(entry.name)} lies in {shorten(entry.file)!r}, which is not among the checkpoint's files"
            )
        if entry.file and entry.kind != TIE:
            if (entry.file, entry.key) in keys:
                raise ValueError(f"two entries lead to the tensor {shorten(entry.key)!r} of {shorten(entry.file)!r}")
            keys.add((entry.file, entry.key))
            taken[entry.file] += element_count(entry.part) * ITEM_BYTES[DTYPES[entry.dtype]]
            if taken[entry.file] > files[entry.file][0]:
                raise ValueError(
                    f"the tensors of {shorten(entry.file)!r} up to {shorten(entry.name)} have {taken[entry.file]:,} bytes "
                    f"or more, the file has {files[entry.file][0]:,}"
                )


def _check_whole(what: str, parts: Sequence[ManifestEntry]) -> None:
    """Raises `ValueError` unless the ascending slices of a tensor make it whole without overlap, or a number is there once."""
    first = parts[0]
    if any((bool(e.file), e.shape, e.dtype) != (bool(first.file), first.shape, first.dtype) for e in parts):
        raise ValueError(f"{what} has several shapes or dtypes")
    if not first.file:
        if len(parts) > 1:
            raise ValueError(f"{what} is there {len(parts)} times")
        return
    if any(e.run is not None for e in parts):
        _check_runs(what, parts)
        return
    whole = tuple((0, size) for size in first.shape)
    cut = sorted({dim for e in parts for dim, span in enumerate(e.slice) if span != whole[dim]})
    if len(cut) > 1:
        raise ValueError(f"{what} is cut along dims {shorten(cut)}, not along one")
    have, total = sum(element_count(e.part) for e in parts), element_count(first.shape)
    overlap = len(parts) > 1 and not cut
    for one, other in itertools.pairwise(parts if cut else ()):
        overlap |= other.slice[cut[0]][0] < one.slice[cut[0]][1]
    if overlap:
        raise ValueError(f"slices of {what} overlap")
    if have != total:
        raise ValueError(f"it has {have:,} of {total:,} elements of {what}")


def _check_runs(what: str, parts: Sequence[ManifestEntry]) -> None:
    """Raises `ValueError` unless runs of elements, and slices along the first dim, make a tensor whole without overlap."""
    try:
        runs = sorted(entry.as_run for entry in parts)
    except ValueError as error:
        raise ValueError(f"{what} is cut into runs, and along another dim than the first: {error}") from None
    if any(one[1] > other[0] for one, other in itertools.pairwise(runs)):
        raise ValueError(f"runs of {what} overlap")
    have, total = sum(stop - start for start, stop in runs), element_count(parts[0].shape)
    if have != total:
        raise ValueError(f"it has {have:,} of {total:,} elements of {what}")


def _check_kinds(entries: Sequence[ManifestEntry]) -> None:
    """Raises `ValueError` for a name of several kinds (parameter, buffer, tie), and for one of these that is a number."""
    known: dict[str, StateKey] = {}
    for entry in entries:
        if entry.kind in (PARAMETER, BUFFER, CACHE, TIE):
            if not entry.file:
                raise ValueError(f"{shorten(entry.name)} ({entry.kind}) is a number, not a tensor")
            if known.setdefault(entry.name, entry.kind) != entry.kind:
                raise ValueError(f"{shorten(entry.name)} is both {known[entry.name]} and {entry.kind}")


def _check_ties(entries: Sequence[ManifestEntry]) -> None:
    """Raises `ValueError` for a tie that does not lead to the slices of one parameter, or to a buffer."""
    parameters = {(e.file, e.key): e for e in entries if e.kind in (PARAMETER, BUFFER)}
    first: dict[str, str] = {}
    for entry in entries:
        if entry.kind == TIE:
            there = parameters.get((entry.file, entry.key))
            if there is None or (there.shape, there.dtype, there.part) != (entry.shape, entry.dtype, entry.part):
                raise ValueError(f"{shorten(entry.name)} is tied to {shorten(entry.key)!r}, which is no such parameter")
            if first.setdefault(entry.name, there.name) != there.name:
                raise ValueError(
                    f"{shorten(entry.name)} is tied to both {shorten(first[entry.name])} and {shorten(there.name)}"
                )
