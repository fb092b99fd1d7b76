"""Checkpoints: state by (qualified parameter name, what it is of it, slice), readable under any plan and by one process.

    checkpoints/step_00000050/manifest.json  worker_0000.safetensors  worker_0001.safetensors ...

Workers write shards into a checkpoint that is not there yet for readers; the driver adds the manifest and commits it.
How that is done, and where checkpoints lie, is the storage's (`checkpoint_store.py`).
Torch is imported where tensors are touched only: the driver and the command line handle manifests without it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import CheckpointError, UnreadableStateError
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.files.untrusted_files import parse_untrusted_json
from raypar.job.contract import SKIPPED_STEPS
from raypar.plan.shard_ranges import IndexRanges
from raypar.plan.wording import after_steps
from raypar.storage.checkpoint_store import (
    CheckpointRef,
    CheckpointStore,
    Location,
    OpenedFile,
    open_checkpoint,
    open_checkpoint_store,
    write_and_fsync,
)
from raypar.worker.checkpoint.manifest import (
    DTYPES,
    FORMAT,
    FORMATS,
    MANIFEST,
    EncodedTensor,
    KeptState,
    Manifest,
    ManifestEntry,
    Run,
    Scalar,
    SharedState,
    Slice,
    StateName,
    check_header_matches_manifest,
    manifest_checksum,
    manifest_to_json,
    parse_manifest,
)
from raypar.worker.checkpoint.safetensors_header import SafetensorsHeader, parse_safetensors_header
from raypar.worker.checkpoint.state_key import (
    ATTRIBUTE,
    AVERAGE,
    BUFFER,
    CACHE,
    GROUP,
    OPTIMIZER,
    PARAMETER,
    SHARED_KINDS,
    TIE,
    StateKey,
    optimizer_key,
)

__all__ = [  # of the manifest, for those who handle checkpoints
    "BUFFER",
    "CACHE",
    "FORMAT",
    "MANIFEST",
    "PARAMETER",
    "TIE",
    "EncodedTensor",
    "KeptState",
    "Manifest",
    "ManifestEntry",
    "Scalar",
    "SharedState",
    "Slice",
    "StateKey",
    "StateName",
    "optimizer_key",
]  # fmt: skip

if TYPE_CHECKING:
    from _typeshed import SupportsWrite
    from torch import Tensor

    from raypar.worker.step.optimizer_state import Value

MANIFEST_BYTES = 256 << 20
"""Size limit of a manifest: half a million entries."""


CheckpointAt = CheckpointRef | Location
"""A checkpoint, or the text or path of its location."""
StoreAt = CheckpointStore | Location
"""A store of checkpoints, or the text or path of its location."""


@dataclass(frozen=True)
class TensorSlices:
    """Which indices of one dim of an unsharded tensor of `shape` a tensor has; no `spans`: it is the whole."""

    shape: tuple[int, ...]
    dim: int
    spans: IndexRanges

    def of(self, tensor: Tensor) -> Iterator[tuple[Slice, Run | None, Tensor]]:
        """(slice of the unsharded tensor, no run, part of this tensor), one for each span."""
        whole = tuple((0, n) for n in self.shape)
        if not self.spans:
            yield whole, None, tensor
        at = 0
        for start, stop in self.spans:
            yield (*whole[: self.dim], (start, stop), *whole[self.dim + 1 :]), None, tensor.narrow(self.dim, at, stop - start)
            at += stop - start


@dataclass(frozen=True)
class TensorRuns:
    """Which elements of the flattened unsharded tensor of `shape` a tensor has, one after the other."""

    shape: tuple[int, ...]
    spans: IndexRanges

    def of(self, tensor: Tensor) -> Iterator[tuple[Slice, Run | None, Tensor]]:
        """(no slice, run of elements, part of this tensor), one for each span."""
        at = 0
        for start, stop in self.spans:
            yield (), (start, stop), tensor.narrow(0, at, stop - start)
            at += stop - start


@dataclass(frozen=True)
class ShardRecord:
    """The file that one worker has written into a checkpoint."""

    file: str
    """The file's name."""
    nbytes: int
    """Its size."""
    sha256: str
    """Its checksum."""
    entries: tuple[ManifestEntry, ...]
    """The tensors in it, and numbers, which lie in the manifest itself."""
    shared: tuple[tuple[int, SharedState], ...] = ()
    """(stage, optimizer state of the stage that many parameters share), of the worker's stages."""
    kept: KeptState | None = None
    """What the optimizers of the worker's stages held, written by whomever; None: not said."""
    skipped_steps: tuple[int, ...] | None = None
    """The steps that were skipped so far, where the loss is scaled by what follows from them; None: it is not."""


# -- writing -----------------------------------------------------------------------------------------------------------------


def checkpoint_name(steps_done: int) -> str:
    """The name of a checkpoint in its store."""
    return f"step_{steps_done:08d}"


def weights_name(steps_done: int) -> str:
    """The name of weights without state of the optimizer, beside checkpoints: no run is resumed from them."""
    return f"{WEIGHTS}{steps_done:08d}"


def create_checkpoint(store: StoreAt, steps_done: int, *, only_weights: bool = False) -> CheckpointRef:
    """Begin a new checkpoint, or weights, into which workers write. Raises `CheckpointError` if the storage refuses."""
    store = _store(store)
    return CheckpointRef(store, store.begin(weights_name(steps_done) if only_weights else checkpoint_name(steps_done)))


def write_shard(
    checkpoint: CheckpointAt,
    file_name: str,
    tensors: Mapping[StateName, Tensor],
    scalars: Mapping[StateName, Scalar] | None = None,
    slices: Mapping[StateName, TensorSlices | TensorRuns] | None = None,
    ties: Mapping[str, Sequence[str]] | None = None,
    shared: Sequence[tuple[int, SharedState]] = (),
    kept: KeptState | None = None,
) -> ShardRecord:
    """Write a worker's CPU tensors as one safetensors file, whose name is in the record: storage may add to `file_name`.

    `slices`: which part of the unsharded tensor a tensor is, if not all. `shared`, `kept`: see `ShardRecord`.

    `ties`: first name of a tied parameter, or of a buffer with several names -> its other names. Streams: no second copy in
    memory, and the checksum is taken in the same pass. Raises `CheckpointError` (disk full, ...).
    """
    begun = _checkpoint(checkpoint)
    file_name = begun.store.file_name(begun.name, file_name)
    entries = [ManifestEntry(name, kind, value=value) for (name, kind), value in (scalars or {}).items()]
    specs: dict[str, tuple[str, str, Sequence[int]]] = {}
    written: list[Tensor] = []
    for (name, kind), tensor in tensors.items():
        held = (slices or {}).get((name, kind)) or TensorSlices(tuple(tensor.shape), 0, ())
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} ({kind}) has dtype {dtype}, which checkpoints do not hold", cure="use a real dtype")
        for number, (part, run, piece) in enumerate(held.of(tensor)):
            key = (name if kind == PARAMETER else f"{name}#{kind}") + (f"@{number}" if number else "")
            while key in specs:  # a parameter may be called as another one's optimizer state
                key += "'"
            specs[key] = key, dtype, piece.shape
            written.append(piece)
            entries.append(ManifestEntry(name, kind, held.shape, dtype, part, file_name, key, run=run))
            if kind in (PARAMETER, BUFFER):
                entries += [replace(entries[-1], name=other, kind=TIE) for other in (ties or {}).get(name, ())]
    with begun.store.write(begun.name, file_name) as file:
        nbytes, digest = write_tensors_as_safetensors(file, list(specs.values()), written)
    return ShardRecord(file_name, nbytes, digest, tuple(entries), tuple(shared), kept)


def write_safetensors(
    path: Path,
    specs: Sequence[tuple[str, str, Sequence[int]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Write `tensors` one after the other under the (key, dtype, shape) of `specs`; returns bytes and sha256 of the file.

    Raises `CheckpointError` (disk full, ...).
    """
    with write_and_fsync(path) as file:
        return write_tensors_as_safetensors(file, specs, tensors, metadata)


def write_tensors_as_safetensors(
    file: SupportsWrite[bytes | memoryview],
    specs: Sequence[tuple[str, str, Sequence[int]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Write a safetensors file into `file`; see `write_safetensors`."""
    import torch

    header: dict[str, Json] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, dtype, shape in specs:
        end = offset + math.prod(shape) * getattr(torch, dtype).itemsize
        header[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    # The format: length of the header (8 bytes, little endian), header, tensors; padded so that tensors lie at multiples of 8.
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    pieces: Iterable[bytes | memoryview] = itertools.chain((len(text).to_bytes(8, "little"), text), map(_raw, tensors))
    for piece in pieces:
        file.write(piece)
        digest.update(piece)
    return 8 + len(text) + offset, digest.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    import torch

    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data


def commit_checkpoint(
    checkpoint: CheckpointAt,
    records: Sequence[ShardRecord],
    *,
    steps_done: int,
    contract: Mapping[str, Json],
    metrics: Mapping[str, Json] | None = None,
    only_weights: bool = False,
) -> CheckpointRef:
    """Add the manifest and give the checkpoint its final name. One that is there already is replaced. Returns the new one.

    `only_weights`: it was begun so. Raises `UnreadableStateError` for state that no reader would accept, or on whose shared
    part stages disagree.
    """
    begun = _checkpoint(checkpoint)
    final = CheckpointRef(begun.store, weights_name(steps_done) if only_weights else checkpoint_name(steps_done))
    skipped = next((record.skipped_steps for record in records if record.skipped_steps is not None), None)
    body = manifest_to_json(
        [*(entry for record in records for entry in record.entries), *merge_shared_state(records)],
        {record.file: (record.nbytes, record.sha256) for record in records},
        steps_done=steps_done,
        contract=contract if skipped is None else {**contract, SKIPPED_STEPS: list(skipped)},
        metrics=metrics or {},
        kept=_merge_kept_state(records),
    )
    text = json.dumps(body, indent=1)
    try:
        parse_manifest({key: value for key, value in json.loads(text).items() if key != "sha256"}, final)
    except ValueError as error:
        raise UnreadableStateError(
            f"the state {after_steps(steps_done)} makes no checkpoint that could be read: {shorten(str(error), 600)}",
            cure="report this",
        ) from error
    begun.store.commit(begun.name, final.name, MANIFEST, text.encode())
    return final


def merge_shared_state(records: Sequence[ShardRecord]) -> list[ManifestEntry]:
    """The entries of optimizer state that many parameters share, once each. Raises `UnreadableStateError` where stages
    disagree."""
    first: dict[tuple[str, str], tuple[int, Mapping[str, Scalar | EncodedTensor]]] = {}
    for record in records:
        for stage, shared in record.shared:
            for (pattern, kind), state in shared.items():
                of_stage, wanted = first.setdefault((pattern, kind), (stage, state))
                for name in sorted({*wanted, *state}):
                    if _shown(wanted, name) != _shown(state, name):
                        what = f"of the optimizer group {pattern!r}" if kind == GROUP else "an attribute of the optimizer,"
                        raise UnreadableStateError(
                            f"stages disagree on {name!r} {what} which all of them should have alike: "
                            f"{_shown(wanted, name)} in stage {of_stage}, {_shown(state, name)} in stage {stage}",
                            cure="set plan.stages: 1, or use an optimizer that takes each parameter by itself",
                        )
    return [
        ManifestEntry(pattern, StateKey(kind, name), value=value)
        for (pattern, kind), (_, state) in first.items()
        for name, value in state.items()
    ]


def _merge_kept_state(records: Sequence[ShardRecord]) -> KeptState | None:
    """What all optimizers held; None if a worker does not say."""
    found: dict[str, set[str]] = {}
    for record in records:
        if record.kept is None:
            return None
        for name, keys in record.kept.items():
            found.setdefault(name, set()).update(keys)
    return {name: sorted(keys) for name, keys in found.items()}


def _shown(state: Mapping[str, Scalar | EncodedTensor], name: str) -> str:
    """A number or encoded tensor as text that tells it from all others; of what is not there that its value is the job's."""
    return repr(state[name]) if name in state else "as the job gives it"


def discard_checkpoint(checkpoint: CheckpointAt) -> None:
    """Remove a checkpoint that could not be finished; the last good checkpoint stays."""
    begun = _checkpoint(checkpoint)
    begun.store.remove(begun.name)


def remove_other_weights(weights: CheckpointRef) -> None:
    """Remove the weights without state of the optimizer that lie beside the newest ones."""
    for name in weights.store.names():
        if name.startswith(WEIGHTS) and name != weights.name:
            weights.store.remove(name)


def remove_old_checkpoints(
    store: StoreAt, count: int, kept: Callable[[Collection[int]], Collection[int]] = lambda steps: ()
) -> None:
    """Remove all but the newest `count` checkpoints and those that are `kept` (of the numbers of steps of all), and what
    unfinished ones before them have left."""
    store = _store(store)
    steps = _steps(store)
    others = kept([done for done, _ in steps])
    for done, checkpoint in steps[:-count]:
        if done not in others:
            store.remove(checkpoint.name)
    for leftover, name in store.leftovers():
        left = _STEP.fullmatch(name)
        if left is not None and steps and int(left[1]) < steps[-1][0]:
            store.remove(leftover)


# -- reading -----------------------------------------------------------------------------------------------------------------


def load_manifest(checkpoint: CheckpointAt) -> Manifest:
    """Read a checkpoint's manifest. Raises `CheckpointError` when it is missing, altered, of another format, or says what no
    checkpoint can have (`worker/checkpoint/manifest.py`); no other file is opened."""
    checkpoint = _checkpoint(checkpoint)
    file = checkpoint.file_location(MANIFEST)
    text = checkpoint.store.read(checkpoint.name, MANIFEST, limit=MANIFEST_BYTES, cure="give the folder of a checkpoint")
    try:
        body = parse_untrusted_json(text)
        if not isinstance(body, dict):
            raise ValueError("it holds no keys and values")
        if "sha256" not in body:
            raise ValueError("it has no checksum")
        if body.pop("sha256") != manifest_checksum(body):
            raise CheckpointError(f"{shorten(file)} was altered: its checksum is another", cure="use another checkpoint")
        if type(body.get("format")) is not int or body["format"] not in FORMATS:
            raise CheckpointError(
                f"{shorten(str(checkpoint))} has checkpoint format {shorten(body.get('format'))}, this raypar reads "
                f"{' and '.join(map(str, FORMATS))}",
                cure="use the raypar that wrote it",
            )
        return parse_manifest(body, checkpoint)
    except ValueError as error:
        raise CheckpointError(
            f"{shorten(file)} is damaged: {shorten(str(error), 600)}", cure="use another checkpoint"
        ) from error


def verify_checkpoint(checkpoint: CheckpointAt) -> Manifest:
    """The manifest, after every file's length, checksum and header were compared with it. Raises `CheckpointError`."""
    manifest = load_manifest(checkpoint)
    for name, (_, sha256) in manifest.files.items():
        with _open(manifest, name) as file:
            found = hashlib.sha256()
            location = manifest.checkpoint.file_location(name)
            with _reading(location):
                while piece := file.stream.read(1 << 22):
                    found.update(piece)
            if found.hexdigest() != sha256:
                raise CheckpointError(
                    f"{shorten(location)} was altered: its checksum is another", cure="use another checkpoint"
                )
            _read_header(manifest, name, file)
    return manifest


@contextlib.contextmanager
def _open(manifest: Manifest, name: str) -> Iterator[OpenedFile]:
    """Open one of the checkpoint's files. Raises `CheckpointError` for a link, and for another length than the manifest's."""
    checkpoint, nbytes = manifest.checkpoint, manifest.files[name][0]
    location = checkpoint.file_location(name)
    if not checkpoint.has_file(name):
        raise CheckpointError(f"{shorten(location)} is missing", cure="use another checkpoint")
    with checkpoint.store.open(checkpoint.name, name, cure="use another checkpoint") as file:
        there = file.nbytes
        if there != nbytes:
            raise CheckpointError(
                f"{shorten(location)} has {there:,} bytes instead of {nbytes:,}: it was "
                + ("truncated" if there < nbytes else "added to"),
                cure="use another checkpoint",
            )
        yield file


def _read_header(manifest: Manifest, name: str, file: OpenedFile) -> SafetensorsHeader:
    """The header of an open file. Raises `CheckpointError` if it and the manifest disagree on the file's tensors."""
    header = parse_safetensors_header(file, manifest.checkpoint.file_location(name))
    check_header(manifest, name, header)
    return header


def check_header(manifest: Manifest, name: str, header: SafetensorsHeader) -> None:
    """Raises `CheckpointError` if the header of a file and the manifest disagree on the file's tensors."""
    try:
        check_header_matches_manifest(manifest, name, header)
    except ValueError as error:
        raise CheckpointError(
            f"{shorten(manifest.checkpoint.file_location(name))} is not what {MANIFEST} says: {shorten(str(error), 400)}",
            cure="use another checkpoint",
        ) from error


@contextlib.contextmanager
def _reading(location: str) -> Iterator[None]:
    """Turn an `OSError` of reading inside into a `CheckpointError` that names `location`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot read {shorten(location)}: {error.strerror or error}",
            cure="look after the disk, or use another checkpoint",
        ) from error


def latest_usable_checkpoint(store: StoreAt, *, below: int | None = None) -> tuple[CheckpointRef | None, list[str]]:
    """(the newest checkpoint that is whole, or None; lines that say why newer ones were skipped).

    `below`: of those with fewer steps done than that.
    """
    skipped = []
    for steps_done, checkpoint in reversed(_steps(_store(store))):
        if below is not None and steps_done >= below:
            continue
        try:
            verify_checkpoint(checkpoint)
        except CheckpointError as error:
            skipped.append(f"skipped {checkpoint.name}: {error.what}")
        else:
            return checkpoint, skipped
    return None, skipped


def no_usable_checkpoint_error(run: str, location: str, skipped: Sequence[str], cure: str) -> CheckpointError:
    """The error for a run without a whole checkpoint. `skipped`: as of `latest_usable_checkpoint`; `cure`: without any."""
    if skipped:
        cure = "make the file that is named here readable or whole again, if you can; else train it again"
    why = f": {skipped[0]}" if skipped else ""
    return CheckpointError(f"run {run} has no usable checkpoint under {location}{why}", cure=cure)


def read_checkpoint_state(
    checkpoint: CheckpointAt,
    names: Collection[str] | None = None,
    take: Callable[[str, Tensor], Tensor] | None = None,
    *,
    only_weights: bool = False,
) -> dict[str, dict[StateKey, Value]]:
    """Read unsharded state of parameters: name -> {PARAMETER: tensor, optimizer_key("exp_avg"): tensor, ...}.

    `names`: of the parameters to read; None: all. `take(name, tensor)`: the part to keep of each tensor; one tensor is held
    whole at a time. `only_weights`: without the optimizer's state. Raises `CheckpointError` for names that are not there,
    missing slices and damaged files.
    """
    found: dict[str, dict[StateKey, Value]] = {}
    for name, key, value in stream_checkpoint_state(checkpoint, names, only_weights=only_weights):
        if take is not None and value is not None and not isinstance(value, (bool, int, float)):
            value = take(name, value)
        found.setdefault(name, {})[key] = value
    return found


def stream_checkpoint_state(
    checkpoint: CheckpointAt, names: Collection[str] | None = None, *, only_weights: bool = False
) -> Iterator[tuple[str, StateKey, Value]]:
    """As `read_checkpoint_state`: (name, key, whole tensor or number), one after the other, as the manifest has them."""
    manifest = load_manifest(checkpoint)
    there = {entry.name for entry in manifest.entries if entry.kind == PARAMETER}
    wanted = set(there if names is None else names)
    missing = sorted(wanted - there)
    if missing:
        raise CheckpointError(
            f"checkpoint {checkpoint} has no parameter {missing[0]!r}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            cure="use a checkpoint of this model",
        )
    kinds = (PARAMETER.kind,) if only_weights else (PARAMETER.kind, AVERAGE.kind, OPTIMIZER)
    yield from _stream(manifest, [e for e in _entries_to_read(manifest) if e.name in wanted and e.kind.kind in kinds])


def _entries_to_read(manifest: Manifest) -> Sequence[ManifestEntry]:
    """The entries of a checkpoint; where averages are asked for, these in the place of the weights. Raises `CheckpointError` if
    there are none."""
    if not manifest.checkpoint.averages:
        return manifest.entries
    averaged = {entry.name for entry in manifest.entries if entry.kind == AVERAGE}
    if not averaged:
        is_early = manifest.contract.get("average") is not None
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint.location} has no averages of the weights: "
            + ("average.from_step is not reached" if is_early else "its run trained without the key `average`"),
            cure="give a later checkpoint of the run, or take its weights, without the average"
            if is_early
            else "train with `average`, such as `average: {decay: 0.999}`; or take the weights, without the average",
        )
    return [
        replace(entry, kind=PARAMETER) if entry.kind == AVERAGE else entry
        for entry in manifest.entries
        if entry.kind != PARAMETER or entry.name not in averaged
    ]


def read_shared_state(checkpoint: CheckpointAt) -> tuple[dict[str, dict[str, Value]], dict[str, dict[str, Value]]]:
    """(pattern of an optimizer group -> name -> tensor or number; the same of an optimizer's parameters and its attributes)."""
    groups: dict[str, dict[str, Value]] = {}
    attributes: dict[str, dict[str, Value]] = {}
    for entry in load_manifest(checkpoint).entries:
        if entry.kind.kind in SHARED_KINDS:
            into = (attributes if entry.kind.kind == ATTRIBUTE else groups).setdefault(entry.name, {})
            into[entry.kind.name] = _decoded(entry.value) if isinstance(entry.value, EncodedTensor) else entry.value
    return groups, attributes


def encode_tensor(tensor: Tensor) -> EncodedTensor:
    """A small tensor as text."""
    data = base64.b64encode(_raw(tensor.cpu())).decode()
    return EncodedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def _decoded(encoded: EncodedTensor) -> Tensor:
    import torch

    tensor = torch.empty(encoded.shape, dtype=getattr(torch, encoded.dtype))
    if tensor.numel():
        _raw(tensor)[:] = base64.b64decode(encoded.data)
    return tensor


def read_checkpoint_buffers(checkpoint: CheckpointAt, names: Collection[str]) -> dict[str, Tensor]:
    """Read buffers: name -> buffer, of those of `names` that the checkpoint has. Raises `CheckpointError` for damaged files."""
    import torch

    if not names:
        return {}
    manifest = load_manifest(checkpoint)
    entries = [e for e in manifest.entries if e.name in names and e.kind in (BUFFER, CACHE)]
    return {
        name: value
        for name, kinds in _read(manifest, entries).items()
        for value in kinds.values()
        if isinstance(value, torch.Tensor)
    }


def _read(
    manifest: Manifest,
    entries: Sequence[ManifestEntry],
    headers: dict[str, tuple[Hashable, SafetensorsHeader]] | None = None,
) -> dict[str, dict[StateKey, Value]]:
    """Name -> kind -> tensor or number, of `entries`. See `_stream`."""
    found: dict[str, dict[StateKey, Value]] = {}
    for name, kind, value in _stream(manifest, entries, headers):
        found.setdefault(name, {})[kind] = value
    return found


def _stream(
    manifest: Manifest,
    entries: Sequence[ManifestEntry],
    headers: dict[str, tuple[Hashable, SafetensorsHeader]] | None = None,
) -> Iterator[tuple[str, StateKey, Value]]:
    """(name, kind, tensor or number) of `entries` (as in the manifest: those of one name and kind together).

    Checksums are not compared: `verify_checkpoint` did that, perhaps in another process and some time ago. Length and header
    are compared with the manifest again, in the file that is then read and stays open: a file that was replaced meanwhile by
    one of another size or shape is refused. Other bytes in the same places are not noticed before the next `verify_checkpoint`.
    `headers`: cache of parsed headers: file -> (its version, header).
    """
    import torch

    with contextlib.ExitStack() as stack:
        files: dict[str, tuple[OpenedFile, SafetensorsHeader]] = {}

        def header_in(opened: OpenedFile, name: str) -> SafetensorsHeader:
            same = opened.version()
            if headers is None or name not in headers or headers[name][0] != same:
                header = _read_header(manifest, name, opened)
                if headers is not None:
                    headers[name] = same, header
                return header
            return headers[name][1]

        def tensor_of(entry: ManifestEntry) -> Tensor:
            if entry.file not in files:
                opened = stack.enter_context(_open(manifest, entry.file))
                files[entry.file] = opened, header_in(opened, entry.file)
            file, header = files[entry.file]
            tensor = torch.empty(entry.part, dtype=getattr(torch, entry.dtype))
            location = manifest.checkpoint.file_location(entry.file)
            with _reading(location):
                read = file.read_at(_raw(tensor), header.tensors[entry.key].start) if tensor.numel() else 0
            if read != tensor.nbytes:
                raise CheckpointError(
                    f"{shorten(location)} ends within {shorten(entry.key)}: it was truncated just now",
                    cure="use another checkpoint",
                )
            return tensor

        for (name, kind), group in itertools.groupby(entries, lambda entry: (entry.name, entry.kind)):
            parts = list(group)
            if not parts[0].file:
                assert not isinstance(parts[0].value, EncodedTensor), "those are read by `read_shared_state`"
                yield name, kind, parts[0].value
                continue
            whole = tensor_of(parts[0]) if parts[0].run is None else tensor_of(parts[0]).view(_shape_of_run(parts[0]))
            if len(parts) > 1:
                first, whole = whole, torch.empty(parts[0].shape, dtype=whole.dtype)
                for entry in parts:
                    _place_in(whole, entry).copy_(first if entry is parts[0] else tensor_of(entry))
                del first
            yield name, kind, whole
            del whole


def _place_in(whole: Tensor, entry: ManifestEntry) -> Tensor:
    """The part of a whole tensor that an entry has."""
    if entry.run is not None:
        return whole.view(-1)[slice(*entry.run)]
    return whole[tuple(slice(a, b) for a, b in entry.slice)]


def _shape_of_run(entry: ManifestEntry) -> tuple[int, ...]:
    """The shape in which a run is read: that of the tensor, if it is all of it."""
    return entry.shape if entry.part == (math.prod(entry.shape),) else entry.part


class CheckpointTensors(Mapping[str, "Tensor"]):
    """The parameters of a checkpoint (or, with `kinds`, buffers too), each read when it is asked for.

    `dtype`: torch's name of the dtype to which floating-point tensors are cast; None: they stay as they are.
    """

    def __init__(self, checkpoint: CheckpointAt, kinds: Collection[StateKey] = (PARAMETER,), dtype: str | None = None) -> None:
        self._manifest, self._dtype = load_manifest(checkpoint), dtype
        self._headers: dict[str, tuple[Hashable, SafetensorsHeader]] = {}
        self._entries: dict[str, list[ManifestEntry]] = {}
        for entry in _entries_to_read(self._manifest):
            if entry.kind in kinds:
                self._entries.setdefault(entry.name, []).append(entry)

    def __getitem__(self, name: str) -> Tensor:
        import torch

        entry = self._entries[name][0]
        tensor = _read(self._manifest, self._entries[name], headers=self._headers)[name][entry.kind]
        assert isinstance(tensor, torch.Tensor)
        return tensor.to(getattr(torch, self._dtype_of(entry)))

    def _dtype_of(self, entry: ManifestEntry) -> str:
        """torch's name of the dtype in which a tensor is given."""
        return self._dtype if self._dtype is not None and "float" in entry.dtype else entry.dtype

    def specs(self) -> list[tuple[str, str, Sequence[int]]]:
        """(name, dtype, shape) of each, for `write_safetensors`; nothing is read for it."""
        return [(name, self._dtype_of(entries[0]), entries[0].shape) for name, entries in self._entries.items()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def checkpoint_weights_hash(checkpoint: CheckpointAt) -> str:
    """The weights hash (raypar/NUMERICS.md, rule 10) of a checkpoint; neither the model nor its code is needed."""
    from raypar.worker.norm_and_weights_hash import weights_hash

    return weights_hash(CheckpointTensors(checkpoint))


# -- whether it fits a model and a job ----------------------------------------------------------------------------------------


def check_checkpoint_fits_model(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that a checkpoint has a model's parameters; raises `CheckpointError` that names the first that differ.

    `shapes`: of the model's parameters, tied ones once.
    """
    there, wanted = manifest.shapes, {name: tuple(shape) for name, shape in shapes.items()}
    only_model, only_there = [n for n in wanted if n not in there], [n for n in there if n not in wanted]
    differ = [n for n in wanted if n in there and there[n] != wanted[n]]
    texts = [f"only the model has {_first(only_model)}"] * bool(only_model)
    texts += [f"only the checkpoint has {_first(only_there)}"] * bool(only_there)
    texts += [f"{n} is {list(wanted[n])} in the model and {list(there[n])} in the checkpoint" for n in differ[:3]]
    if texts:
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint} belongs to another model: {'; '.join(texts)}",
            cure="set model and model.args as they were when it was written",
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# -- parts -------------------------------------------------------------------------------------------------------------------


WEIGHTS = "weights_"
"""How the names of weights without state of the optimizer begin."""
_STEP = re.compile(r"step_([0-9]+)")
"""The name of a checkpoint; other names in a store are none."""


def _steps(store: CheckpointStore) -> list[tuple[int, CheckpointRef]]:
    """(steps done, checkpoint), ascending; none where there is no store. Raises `CheckpointError` if it cannot be read."""
    found = [(_STEP.fullmatch(name), name) for name in store.names()]
    return [
        (step, CheckpointRef(store, name)) for step, name in sorted((int(match[1]), name) for match, name in found if match)
    ]


def _store(given: StoreAt) -> CheckpointStore:
    return open_checkpoint_store(given) if isinstance(given, (str, os.PathLike)) else given


def _checkpoint(given: CheckpointAt) -> CheckpointRef:
    return given if isinstance(given, CheckpointRef) else open_checkpoint(given)
