"""Opens weights in every format that `init_from` takes.

    FILE.safetensors | FILE.pt (a state_dict) | FOLDER with an index, as Hugging Face writes it | a checkpoint or run of raypar

Opening reads headers only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from raypar.errors import CheckpointError
from raypar.files.printable_text import shorten
from raypar.files.untrusted_files import parse_untrusted_json, read_limited_bytes
from raypar.job.init_from_section import format_name_list
from raypar.storage.checkpoint_store import (
    STORES,
    CheckpointRef,
    LocalCheckpointStore,
    open_checkpoint,
    storage_scheme,
)
from raypar.worker.checkpoint.checkpoint_files import (
    check_header,
    latest_usable_checkpoint,
    load_manifest,
    verify_checkpoint,
)
from raypar.worker.checkpoint.manifest import DTYPES, MANIFEST, ManifestEntry
from raypar.worker.checkpoint.safetensors_header import SafetensorsHeader
from raypar.worker.checkpoint.state_key import BUFFER, PARAMETER
from raypar.worker.pretrained.safetensors_weights import RUNS, Block, Blocks, SafetensorsWeights, files_closed_on_error
from raypar.worker.pretrained.state_dict_weights import STATE_DICT_SUFFIXES, open_state_dict
from raypar.worker.pretrained.weights_file import (
    StoredTensor,
    WeightsFile,
    as_checkpoint_errors,
    format_tensor_count,
)

_INDEX_BYTES = 64 << 20
"""Size limit of an index file. One for 10,000 tensors has 1 MB."""
_INDEX = ".safetensors.index.json"
_TORCH_NAMES = {theirs: ours for ours, theirs in DTYPES.items()} | {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""safetensors' name of a dtype -> torch's."""
PART = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")
"""The name of one file of several, as Hugging Face writes them."""


def open_weights(path: str | Path | CheckpointRef) -> WeightsFile:
    """Open the weights at a path; for a run of raypar, its last whole checkpoint (see `resolve_weights_source`).

    Raises `CheckpointError` if there are no weights, or if it is not clear which file is meant.
    """
    if isinstance(path, CheckpointRef) or _is_in_storage(path):
        checkpoint = path if isinstance(path, CheckpointRef) else open_checkpoint(path)
        if not checkpoint.has_file(MANIFEST):
            checkpoint, _ = _checkpoint_in_storage(str(path))
        return _open_checkpoint(checkpoint)
    found = _existing(path)
    if _is_run(found):
        last, notes = resolve_weights_source(found)
        weights = open_weights(last)
        weights.notes = notes
        return weights
    with as_checkpoint_errors(found):
        is_folder, is_checkpoint = found.is_dir(), (found / MANIFEST).exists()
    if not is_folder:
        return _open_file(found)
    return _open_checkpoint(open_checkpoint(found)) if is_checkpoint else _open_folder(found)


def resolve_weights_source(path: str | Path) -> tuple[Path | CheckpointRef, tuple[str, ...]]:
    """(what workers open: a run's last whole checkpoint, else the path itself; why newer checkpoints were skipped).

    Called once, before workers start: a run that is still going may have a newer checkpoint a moment later. Reads checkpoints
    whole and compares their checksums, which `open_weights` does not. Raises `CheckpointError`.
    """
    if _is_in_storage(path):
        return _checkpoint_in_storage(str(path))
    found = _existing(path)
    with as_checkpoint_errors(found):
        is_checkpoint = found.is_dir() and (found / MANIFEST).exists()
    if is_checkpoint:
        return verify_checkpoint(found).checkpoint, ()
    if not _is_run(found):
        return found, ()
    with as_checkpoint_errors(found):
        besides = sorted(p.name for p in found.iterdir() if p.name.endswith((".safetensors", _INDEX)))
        if besides:
            raise CheckpointError(
                f"{found} holds checkpoints and {_listed(besides)}: either may be meant",
                cure=f"give {found / besides[0]}, or one of the checkpoints",
            )
        last, skipped = latest_usable_checkpoint(LocalCheckpointStore(found / "checkpoints"))
    if last is None:
        raise CheckpointError(
            f"run {found} has no checkpoint that is whole" + "".join(f"; {line}" for line in skipped),
            cure="give another run, or the path of a checkpoint",
        )
    return last, tuple(skipped)


def _checkpoint_in_storage(location: str) -> tuple[CheckpointRef, tuple[str, ...]]:
    """What `resolve_weights_source` returns for a URL: a checkpoint, or a run's last whole one. Raises `CheckpointError`."""
    checkpoint = open_checkpoint(location)
    if checkpoint.has_file(MANIFEST):
        return verify_checkpoint(checkpoint).checkpoint, ()
    place, mark, settings = location.partition("?")
    last, skipped = latest_usable_checkpoint(f"{place.rstrip('/')}/checkpoints{mark}{settings}")
    if last is None:
        raise CheckpointError(
            f"{shorten(location)} is neither a checkpoint nor a run of raypar with one that is whole"
            + "".join(f"; {line}" for line in skipped)
            + "; of other weights raypar reads local files only",
            cure="download it first, and give the file or folder",
        )
    return last, tuple(skipped)


def absolute_weights_path(path: Path | CheckpointRef) -> str:
    """The text of a path that `resolve_weights_source` has returned, for other processes."""
    return str(path.resolve()) if isinstance(path, Path) else path.absolute_location()


def _is_in_storage(path: str | Path) -> bool:
    """Whether a path is the URL of a storage that raypar has."""
    return bool(scheme := storage_scheme(path)) and scheme in STORES


def _existing(path: str | Path) -> Path:
    """The path, which exists. Raises `CheckpointError` otherwise."""
    text = str(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text):
        raise CheckpointError(
            f"{shorten(text)} is no local file, and raypar reads local files only",
            cure="download it first, and give the file or folder",
        )
    found = Path(text).expanduser()
    with as_checkpoint_errors(found):
        if not found.exists():
            hub = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", text) and found.suffix not in (".safetensors", *STATE_DICT_SUFFIXES)
            download = f"; a model of the Hugging Face Hub is downloaded first (`hf download {text} --local-dir DIR`)"
            raise CheckpointError(f"there is no file or folder {shorten(text)!r}", cure="check the path" + download * bool(hub))
    return found


def _is_run(path: Path) -> bool:
    """Whether a path is the folder of a raypar run."""
    with as_checkpoint_errors(path):
        return path.is_dir() and not (path / MANIFEST).exists() and (path / "checkpoints").is_dir()


def _open_file(path: Path) -> WeightsFile:
    if path.name.endswith(_INDEX):
        return _open_index(path)
    if path.suffix in STATE_DICT_SUFFIXES:
        return open_state_dict(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is no weights file: those end in .safetensors, {', '.join(STATE_DICT_SUFFIXES)} or {_INDEX}",
            cure="give one of these, or a folder with an index, a checkpoint or a run of raypar",
        )
    return _open_safetensors(path, path)


def _open_safetensors(path: Path, file: Path) -> WeightsFile:
    """One safetensors file. `path`: what the user gave; `file`: the file itself."""
    with files_closed_on_error() as files:
        header = files.add("", file, follow=True)
        # `safetensors.torch.save_model` and `raypar export` store shared tensors once, and say so here.
        aliases = {k: v for k, v in header.metadata.items() if k not in header.tensors and v in header.tensors}
        return SafetensorsWeights(path, _single_blocks(header, ""), aliases, files)


def _single_blocks(header: SafetensorsHeader, file: str) -> dict[str, Blocks]:
    """The tensors of a file that holds whole tensors."""
    return {
        name: Blocks(
            StoredTensor(info.shape, _TORCH_NAMES[info.dtype]),
            0,
            (Block(0, (info.shape or (1,))[0], file, info.start, info.stop - info.start),),
        )
        for name, info in header.tensors.items()
    }


def _open_folder(path: Path) -> WeightsFile:
    with as_checkpoint_errors(path):
        there = sorted(p.name for p in path.iterdir())
    indices = [name for name in there if name.endswith(_INDEX)]
    single = [name for name in there if name.endswith(".safetensors")]
    if len(indices) > 1:
        raise CheckpointError(f"{path} has {len(indices)} indices: {_listed(indices)}", cure=f"give {path / indices[0]}, say")
    if indices:
        weights = _open_index(path / indices[0], path)
        besides = [name for name in single if name not in weights.files]
        if besides:
            weights.close()
            raise CheckpointError(
                f"{path} has {' and '.join(besides[:5])} besides those of its index: either may be meant",
                cure=f"give {path / indices[0]}, or {path / besides[0]}",
            )
        return weights
    parts = [part for name in single if (part := PART.fullmatch(name))]
    if parts:
        raise CheckpointError(
            f"{path} has files that are parts of one model, and not the index that leads to its tensors: {_listed(single)}",
            cure=f"put the model's {parts[0][1]}{_INDEX} beside them",
        )
    if len(single) > 1:
        raise CheckpointError(
            f"{path} has {len(single)} safetensors files and no index: {_listed(single)}",
            cure=f"give {path / single[0]}, say",
        )
    if not single:
        other = [name for name in there if name.endswith(STATE_DICT_SUFFIXES)]
        raise CheckpointError(
            f"{path} holds no weights: no .safetensors file, no index, no checkpoint of raypar",
            cure=f"give the file: {path / other[0]}" if other else "give the folder of a model, a checkpoint or a run",
        )
    return _open_safetensors(path, _file_in(path, single[0], "the folder"))


class _IndexedWeights(SafetensorsWeights):
    """Weights in several safetensors files with an index."""

    files: Collection[str] = ()
    """Names of the files."""


def _open_index(index: Path, path: Path | None = None) -> _IndexedWeights:
    """Weights with an index as Hugging Face writes it: {"weight_map": {tensor: file}}. `path`: what the user gave."""
    text = read_limited_bytes(index, follow=True, limit=_INDEX_BYTES, error=CheckpointError, cure="give another index")
    try:
        found = parse_untrusted_json(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index: {shorten(str(error), 400)}", cure="download it again") from error
    where = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{index} has no weight_map that leads from tensors to files", cure="download it again")
    folder, tensors = index.parent, dict[str, Blocks]()
    with files_closed_on_error() as files:
        names = sorted(set(where.values()))
        paths = [_file_in(folder, name, str(index)) for name in names]
        headers = [files.add(name, path, follow=False) for name, path in zip(names, paths, strict=True)]
        for name, header in zip(names, headers, strict=True):
            tensors |= _single_blocks(header, name)
        extra = [t for name, header in zip(names, headers, strict=True) for t in header.tensors if where.get(t) != name]
        if extra:
            raise CheckpointError(
                f"{index} does not name {format_tensor_count(extra)} of its files: {_listed(extra)}",
                cure="download the folder again",
            )
        lacking = [f"{tensor} in {shorten(name)}" for tensor, name in where.items() if tensor not in tensors]
        if lacking:
            raise CheckpointError(
                f"{index} promises {format_tensor_count(lacking)} that its files do not have: {_listed(lacking)}",
                cure="download the folder again",
            )
        weights = _IndexedWeights(path or index, tensors, {}, files)
    weights.files = names
    return weights


def _open_checkpoint(checkpoint: CheckpointRef) -> WeightsFile:
    """The parameters and buffers of a checkpoint. `load_manifest` checks that every slice of each is there once."""
    manifest = load_manifest(checkpoint)
    if manifest.frozen is not None:
        raise CheckpointError(
            f"{checkpoint} holds only what was trained, and frozen values are those of {manifest.frozen.path}",
            cure=f"make one file of both, and begin with that: raypar export {checkpoint} --out FILE.safetensors",
        )
    entries = [entry for entry in manifest.entries if entry.kind in (PARAMETER, BUFFER)]
    with files_closed_on_error() as files:
        headers = {name: files.add_of_checkpoint(manifest, name) for name in sorted({entry.file for entry in entries})}
        for name, header in headers.items():
            check_header(manifest, name, header)
        tensors = {name: _joined(list(parts), headers) for name, parts in itertools.groupby(entries, lambda entry: entry.name)}
        return SafetensorsWeights(checkpoint, tensors, manifest.ties, files)


def _joined(entries: Sequence[ManifestEntry], headers: Mapping[str, SafetensorsHeader]) -> Blocks:
    """One tensor of a checkpoint, from its manifest entries."""
    shape = entries[0].shape
    if any(entry.run is not None for entry in entries):
        runs = sorted((entry.as_run, headers[entry.file].tensors[entry.key], entry.file) for entry in entries)
        found = tuple(Block(*run, file, info.start, info.stop - info.start) for run, info, file in runs)
        return Blocks(StoredTensor(shape, entries[0].dtype), RUNS, found)
    cut = next((dim for entry in entries for dim, span in enumerate(entry.slice) if span != (0, shape[dim])), 0)
    blocks = []
    for entry in entries:
        info = headers[entry.file].tensors[entry.key]
        start, stop = entry.slice[cut] if shape else (0, 1)
        blocks.append(Block(start, stop, entry.file, info.start, info.stop - info.start))
    return Blocks(StoredTensor(shape, entries[0].dtype), cut, tuple(blocks))


def _file_in(folder: Path, name: str, by: str) -> Path:
    """The file `name` of a folder, links followed. Raises `CheckpointError` if it lies elsewhere, or is missing.

    Links from a snapshot of a Hugging Face cache into the folder `blobs` of the same model are allowed. `by`: what contains
    the name, for messages.
    """
    with as_checkpoint_errors(folder / shorten(name)):
        root = folder.resolve()
        roots = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
        found = root / name if "\0" in name else (root / name).resolve()
        if not name or "\0" in name or not any(place in found.parents for place in roots):
            raise CheckpointError(
                f"{by} leads to {shorten(name)!r}, outside of the folder",
                cure="put the files in one folder, not links to them",
            )
        if not found.exists():
            raise CheckpointError(
                f"{shorten(folder / name)} is missing: {by} leads to it", cure="download it, or copy it there"
            )
    return found


def _listed(names: Sequence[str]) -> str:
    """The first names, each shortened, and how many more there are."""
    return format_name_list([shorten(name) for name in names])
