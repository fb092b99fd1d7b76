"""Checkpoints on disk: state by (qualified parameter name, kind, slice), readable under any plan and by one process.

    checkpoints/step_00000050/manifest.json  worker_0000.safetensors  worker_0001.safetensors ...

Workers write shards into `.tmp-step_...`; the driver adds the manifest and renames, so a folder with the final name is whole.
Torch is imported where tensors are touched only: the driver and the command line handle manifests without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import CheckpointError
from raypar.plan.spans import Spans
from raypar.worker.spec import JobSpec, Ref

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
MANIFEST = "manifest.json"
PARAMETER = "parameter"
"""The kind of a parameter's own values; other kinds are the optimizer's keys (`exp_avg`, `step`, ...)."""
BUFFER = "buffer"
"""The kind of a persistent buffer: kept for exports only, since every module's constructor makes it again."""
TIE = "tie"
"""The kind of a tied parameter's other names: the entry leads to the tensor of its first name. For exports only."""

Name = tuple[str, str]
"""(qualified parameter name, kind)."""
Slice = tuple[tuple[int, int], ...]
"""[start, stop) of every dim of the unsharded tensor."""
Scalar = float | int | bool | None

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""torch -> safetensors."""


@dataclass(frozen=True)
class Slices:
    """Which indices of one dim of an unsharded tensor of `shape` a tensor has; no `spans`: it is the whole."""

    shape: tuple[int, ...]
    dim: int
    spans: Spans

    def of(self, tensor: Tensor) -> Iterator[tuple[Slice, Tensor]]:
        """The tensor in blocks, each with its place in the whole."""
        whole = tuple((0, n) for n in self.shape)
        if not self.spans:
            yield whole, tensor
        at = 0
        for start, stop in self.spans:
            yield (*whole[: self.dim], (start, stop), *whole[self.dim + 1 :]), tensor.narrow(self.dim, at, stop - start)
            at += stop - start


@dataclass(frozen=True)
class Entry:
    """One tensor in a file, or one number. `shape`: of the unsharded tensor; `slice`: the part that the file has."""

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    slice: Slice = ()
    file: str = ""
    key: str = ""
    value: Scalar = None


@dataclass(frozen=True)
class ShardRecord:
    """What one worker has written."""

    file: str
    nbytes: int
    sha256: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `files`: name -> (bytes, sha256); `contract`: what its bits depend on (`contract_of`)."""

    path: Path
    steps_done: int
    contract: Mapping[str, Any]
    entries: tuple[Entry, ...]
    files: Mapping[str, tuple[int, str]]
    metrics: Mapping[str, Any]

    @property
    def ties(self) -> dict[str, str]:
        """Other name of a tied parameter -> its first name."""
        first = {(e.file, e.key): e.name for e in self.entries if e.kind == PARAMETER}
        return {e.name: first[e.file, e.key] for e in self.entries if e.kind == TIE}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape of the unsharded tensor."""
        return {e.name: e.shape for e in self.entries if e.kind == PARAMETER}


# -- writing -----------------------------------------------------------------------------------------------------------------


def begin(root: Path, steps_done: int) -> Path:
    """A new, empty folder aside, in which workers write. Raises `CheckpointError` when the disk does not let us."""
    folder = root / f".tmp-step_{steps_done:08d}"
    with _disk(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    return folder


def write_shard(
    folder: Path,
    file_name: str,
    tensors: Mapping[Name, Tensor],
    scalars: Mapping[Name, Scalar] | None = None,
    slices: Mapping[Name, Slices] | None = None,
    ties: Mapping[str, Sequence[str]] | None = None,
) -> ShardRecord:
    """Write CPU tensors as one safetensors file. `slices`: which parts of an unsharded tensor it is, where not the whole.

    `ties`: first name of a tied parameter -> its other names. Streams: no second copy in memory, and the checksum is taken
    in the same pass. Raises `CheckpointError` (disk full, ...).
    """
    entries = [Entry(name, kind, value=value) for (name, kind), value in (scalars or {}).items()]
    specs: list[tuple[str, str, Sequence[int]]] = []
    written: list[Tensor] = []
    for (name, kind), tensor in tensors.items():
        held = (slices or {}).get((name, kind)) or Slices(tuple(tensor.shape), 0, ())
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise CheckpointError(f"{name} ({kind}) has dtype {dtype}, which checkpoints do not hold", cure="use a real dtype")
        for number, (part, piece) in enumerate(held.of(tensor)):
            key = (name if kind == PARAMETER else f"{name}#{kind}") + (f"@{number}" if number else "")
            specs.append((key, dtype, piece.shape))
            written.append(piece)
            entries.append(Entry(name, kind, held.shape, dtype, part, file_name, key))
            if kind == PARAMETER:
                entries += [replace(entries[-1], name=other, kind=TIE) for other in (ties or {}).get(name, ())]
    nbytes, digest = write_safetensors(folder / file_name, specs, written)
    return ShardRecord(file_name, nbytes, digest, tuple(entries))


def write_safetensors(
    path: Path,
    specs: Sequence[tuple[str, str, Sequence[int]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Write `tensors` one after the other under the (key, dtype, shape) of `specs`; returns bytes and sha256 of the file.

    Raises `CheckpointError` (disk full, ...).
    """
    import torch

    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, dtype, shape in specs:
        end = offset + math.prod(shape) * getattr(torch, dtype).itemsize
        header[key] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    # The format: length of the header (8 bytes, little endian), header, tensors; padded so that tensors lie at multiples of 8.
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with _disk(path), open(path, "wb") as file:
        for piece in itertools.chain((len(text).to_bytes(8, "little"), text), map(_raw, tensors)):
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + offset, digest.hexdigest()


def _raw(tensor: Tensor) -> Any:
    import torch

    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data


def commit(
    folder: Path,
    records: Sequence[ShardRecord],
    *,
    steps_done: int,
    contract: Mapping[str, Any],
    metrics: Mapping[str, Any] | None = None,
) -> Path:
    """Add the manifest and give the folder its final name. One that is there already is replaced. Returns the new path."""
    entries = [entry for record in records for entry in record.entries]
    assert len({(e.name, e.kind, e.slice) for e in entries}) == len(entries), "two workers wrote the same slice"
    body = {
        "format": FORMAT,
        "steps_done": steps_done,
        "contract": dict(contract),
        "metrics": dict(metrics or {}),
        "files": {r.file: {"bytes": r.nbytes, "sha256": r.sha256} for r in records},
        "entries": [_entry_to_json(e) for e in sorted(entries, key=lambda e: (e.name, e.kind, e.slice))],
    }
    final = folder.with_name(f"step_{steps_done:08d}")
    old = folder.with_name(f".old-step_{steps_done:08d}")
    with _disk(final):
        with open(folder / MANIFEST, "w", encoding="utf-8") as file:
            json.dump({**body, "sha256": _digest(body)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(folder)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        folder.rename(final)
        _sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    return final


def drop(folder: Path) -> None:
    """Forget a checkpoint that could not be finished; the last good one stays."""
    shutil.rmtree(folder, ignore_errors=True)


def keep_last(root: Path, count: int) -> None:
    """Remove all but the newest `count` checkpoints, and what unfinished ones before them have left."""
    steps = _steps(root)
    for _, path in steps[:-count]:
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".*-step_*"):
        if steps and int(path.name[-8:]) < steps[-1][0]:
            shutil.rmtree(path, ignore_errors=True)


# -- reading -----------------------------------------------------------------------------------------------------------------


def load_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises `CheckpointError` when it is missing, altered or of another format."""
    file = path / MANIFEST
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        digest = body.pop("sha256")
        if digest != _digest(body):
            raise CheckpointError(f"{file} was altered: its checksum is another", cure="use another checkpoint")
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {body['format']}, this raypar reads {FORMAT}",
                cure="use the raypar that wrote it",
            )
        return Manifest(
            path=path,
            steps_done=body["steps_done"],
            contract=body["contract"],
            entries=tuple(_entry_from_json(e) for e in body["entries"]),
            files={name: (f["bytes"], f["sha256"]) for name, f in body["files"].items()},
            metrics=body["metrics"],
        )
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}", cure="give the folder of a checkpoint") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}", cure="use another checkpoint") from error


def verify(path: Path) -> Manifest:
    """The manifest, after every file's length and checksum were compared with it. Raises `CheckpointError`."""
    manifest = load_manifest(path)
    for name, (nbytes, sha256) in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing", cure="use another checkpoint")
        if file.stat().st_size != nbytes:
            raise CheckpointError(
                f"{file} has {file.stat().st_size:,} bytes instead of {nbytes:,}: it was truncated",
                cure="use another checkpoint",
            )
        digest = hashlib.sha256()
        try:
            with open(file, "rb") as opened:
                while piece := opened.read(1 << 22):
                    digest.update(piece)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {file}: {error.strerror or error}", cure="make it readable, or use another checkpoint"
            ) from error
        if digest.hexdigest() != sha256:
            raise CheckpointError(f"{file} was altered: its checksum is another", cure="use another checkpoint")
    return manifest


def usable(root: Path) -> tuple[Path | None, list[str]]:
    """(the newest checkpoint that is whole, why newer ones were skipped)."""
    skipped = []
    for _, path in reversed(_steps(root)):
        try:
            verify(path)
        except CheckpointError as error:
            skipped.append(f"skipped {path.name}: {error.what}")
        else:
            return path, skipped
    return None, skipped


def read_tensors(
    path: Path, names: Collection[str] | None = None, take: Callable[[str, Tensor], Tensor] | None = None
) -> dict[str, dict[str, Any]]:
    """name -> {"parameter": tensor, "exp_avg": tensor, "step": tensor or number, ...}, unsharded, for these names or all.

    `take(name, tensor)`: what is kept of each, one tensor being held whole at a time. Reads only what is asked for. Raises
    `CheckpointError` for names that are not there, missing slices and damaged files.
    """
    manifest = load_manifest(path)
    wanted = set(manifest.shapes if names is None else names)
    missing = sorted(wanted - set(manifest.shapes))
    if missing:
        raise CheckpointError(
            f"checkpoint {path} has no parameter {missing[0]!r}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            cure="use a checkpoint of this model",
        )
    return _read(manifest, [e for e in manifest.entries if e.name in wanted], take)


def _read(
    manifest: Manifest, entries: Sequence[Entry], take: Callable[[str, Tensor], Tensor] | None = None
) -> dict[str, dict[str, Any]]:
    """`entries`: as in the manifest, those of one name and kind together."""
    import torch
    from safetensors import SafetensorError, safe_open

    found: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}

        def tensor_of(entry: Entry) -> Tensor:
            try:
                if entry.file not in files:
                    files[entry.file] = stack.enter_context(safe_open(manifest.path / entry.file, framework="pt"))
                tensor: Tensor = files[entry.file].get_tensor(entry.key)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{manifest.path / entry.file}: cannot read {entry.key}: {error}", cure="use another checkpoint"
                ) from error
            return tensor

        for (name, kind), group in itertools.groupby(entries, lambda entry: (entry.name, entry.kind)):
            parts = list(group)
            kinds = found.setdefault(name, {})
            if not parts[0].file:
                kinds[kind] = parts[0].value
                continue
            first = tensor_of(parts[0])
            if tuple(first.shape) == parts[0].shape:
                # safetensors maps the file: what is handed out must not change or vanish with it.
                whole = first.clone()
            else:
                whole, have = torch.empty(parts[0].shape, dtype=first.dtype), 0
                for entry in parts:
                    whole[tuple(slice(a, b) for a, b in entry.slice)] = tensor_of(entry)
                    have += math.prod(b - a for a, b in entry.slice)
                if have != whole.numel():
                    raise CheckpointError(
                        f"checkpoint {manifest.path} has {have:,} of {whole.numel():,} elements of {name} ({kind})",
                        cure="use another checkpoint",
                    )
            kinds[kind] = whole if take is None else take(name, whole)
    return found


class Parameters(Mapping[str, "Tensor"]):
    """The parameters of a checkpoint (or, with `kinds`, buffers too), each read when it is asked for."""

    def __init__(self, path: Path, kinds: Collection[str] = (PARAMETER,)) -> None:
        self._manifest = load_manifest(path)
        self._entries: dict[str, list[Entry]] = {}
        for entry in self._manifest.entries:
            if entry.kind in kinds:
                self._entries.setdefault(entry.name, []).append(entry)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = _read(self._manifest, self._entries[name])[name][self._entries[name][0].kind]
        return tensor

    def specs(self) -> list[tuple[str, str, Sequence[int]]]:
        """(name, dtype, shape) of each, for `write_safetensors`; nothing is read for it."""
        return [(name, entries[0].dtype, entries[0].shape) for name, entries in self._entries.items()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def hash_of(path: Path) -> str:
    """The weights hash (raypar/README.md, rule 10) of a checkpoint; neither the model nor its code is needed."""
    from raypar.worker.numerics import weights_hash

    return weights_hash(Parameters(path))


# -- belonging together --------------------------------------------------------------------------------------------------------


def check_model(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> None:
    """`shapes`: of the model's parameters (ties once). Raises `CheckpointError` naming the first that differ."""
    there, wanted = manifest.shapes, {name: tuple(shape) for name, shape in shapes.items()}
    only_model, only_there = [n for n in wanted if n not in there], [n for n in there if n not in wanted]
    differ = [n for n in wanted if n in there and there[n] != wanted[n]]
    texts = [f"only the model has {_first(only_model)}"] * bool(only_model)
    texts += [f"only the checkpoint has {_first(only_there)}"] * bool(only_there)
    texts += [f"{n} is {list(wanted[n])} in the model and {list(there[n])} in the checkpoint" for n in differ[:3]]
    if texts:
        raise CheckpointError(
            f"checkpoint {manifest.path} belongs to another model: {'; '.join(texts)}",
            cure="set model and model.args as they were when it was written",
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_OF_SHARDS = {"styles": "plan.styles", "sequence_parallel": "plan.sequence_parallel"}
"""What bits depend on where a plan has shards, as their number: a run may go on with others."""


def contract_of(spec: JobSpec) -> dict[str, Any]:
    """Everything of a job that its bits depend on, as JSON values; `steps` and validation are not among it."""
    made = {
        "seed": spec.seed,
        "batch_size": spec.batch_size,
        "microbatches": spec.microbatches,
        "virtual_replicas": spec.cut.blocks,
        "dtype": spec.dtype,
        "device": spec.device,
        "threads": spec.threads,
        "reduction": spec.reduction,
        "non_finite": spec.non_finite,
        "clip_norm": spec.clip_norm,
        "model": _ref(spec.model),
        "loss": _ref(spec.loss),
        "data": _ref(spec.data.dataset),
        "optimizer": {**_ref(spec.optimizer.optimizer), "groups": [[p, dict(o)] for p, o in spec.optimizer.groups]},
        "lr_schedule": _ref(spec.lr_schedule) if spec.lr_schedule is not None else None,
    }
    # Without shards neither matters: jobs that say nothing of them have the contract they had before there were any.
    made |= {"styles": [list(pair) for pair in spec.styles]} if spec.styles else {}
    made |= {"sequence_parallel": True} if spec.sequence_parallel else {}
    # The address in an object's repr is no part of what it is.
    plain: dict[str, Any] = json.loads(json.dumps(made, default=lambda value: re.sub(r" at 0x[0-9a-f]+", "", repr(value))))
    return plain


def _ref(ref: Ref) -> dict[str, Any]:
    return {"function": ref.label, "args": dict(ref.args)}


def contract_differences(manifest: Manifest, spec: JobSpec) -> list[str]:
    """One line per thing the bits depend on, and that is no part of the plan, that is not as it was when the checkpoint was
    written."""
    then, now = {"device": "cpu", **manifest.contract}, contract_of(spec)  # there was nothing else once
    return [f"{k} was {then.get(k)!r}, is {v!r}" for k, v in now.items() if k not in _OF_SHARDS and then.get(k) != v]


def changes_of_shards(manifest: Manifest, spec: JobSpec) -> list[str]:
    """What says how layers are cut over shards and is not as it was when the checkpoint was written."""
    now = contract_of(spec)
    return [name for key, name in _OF_SHARDS.items() if manifest.contract.get(key) != now.get(key)]


def check_contract(manifest: Manifest, spec: JobSpec) -> None:
    """Raises `CheckpointError` when going on would not give the bits of one undisturbed run."""
    differences = contract_differences(manifest, spec)
    if differences:
        raise CheckpointError(
            f"checkpoint {manifest.path} belongs to another job: {'; '.join(differences)}",
            cure="resume with these as they were (plan, steps and validation may change), or train a new run",
        )


# -- parts -------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}", cure="free disk space or set run_dir to a disk that has some"
        ) from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _steps(root: Path) -> list[tuple[int, Path]]:
    """(steps done, folder), ascending."""
    found = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in root.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    named = {"name": entry.name, "kind": entry.kind}
    if not entry.file:
        value = entry.value
        # JSON has no infinities; written as text they come back as they were.
        return {**named, "value": repr(value) if isinstance(value, float) and not math.isfinite(value) else value}
    shape, part = list(entry.shape), [list(pair) for pair in entry.slice]
    return {**named, "shape": shape, "dtype": entry.dtype, "slice": part, "file": entry.file, "key": entry.key}


def _entry_from_json(found: Mapping[str, Any]) -> Entry:
    if "file" not in found:
        value = found["value"]
        return Entry(found["name"], found["kind"], value=float(value) if isinstance(value, str) else value)
    part = tuple((a, b) for a, b in found["slice"])
    return Entry(found["name"], found["kind"], tuple(found["shape"]), found["dtype"], part, found["file"], found["key"])
