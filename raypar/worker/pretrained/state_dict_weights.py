"""Reads the tensors of a state_dict that torch.save wrote."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import CheckpointError, error_first_line, error_message, with_article
from raypar.files.printable_text import repr_text, shorten
from raypar.files.untrusted_files import open_regular_file
from raypar.plan.shard_ranges import IndexRanges
from raypar.worker.pretrained.weights_file import FIRST_BYTES, StoredTensor, WeightsFile

if TYPE_CHECKING:
    from torch import Tensor

STATE_DICT_SUFFIXES = (".pt", ".pth", ".bin")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""Colours for a terminal, which PyTorch's messages have."""


class _StateDictWeights(WeightsFile):
    """Tensors of a memory-mapped state_dict. Pages that were read count as the process's memory until they are reclaimed."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        first: dict[Hashable, str] = {}
        aliases = {}
        for name, tensor in tensors.items():
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if tensor.numel() and first.setdefault(place, name) != name:
                aliases[name] = first[place]
        names = {
            name: StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
            if name not in aliases
        }
        super().__init__(path, names, aliases)
        self._tensors = dict(tensors)

    def close(self) -> None:
        self._tensors.clear()

    def _first_bytes(self, name: str) -> bytes:
        import torch

        tensor = self._tensors[name]
        few = tensor.reshape(-1)[: max(1, FIRST_BYTES // tensor.element_size())].contiguous()
        return bytes(few.view(torch.uint8).numpy().data)

    def _nbytes(self, name: str) -> int:
        return int(self._tensors[name].nbytes)

    def _bytes_at(self, name: str, start: int, stop: int) -> bytes:
        import torch

        tensor = self._tensors[name].detach()
        size = tensor.element_size()
        first = start // size
        few = tensor.reshape(-1)[first : -(-stop // size)].contiguous()
        return bytes(few.view(torch.uint8).numpy().data)[start - first * size : stop - first * size]

    def _fill(self, name: str, out: Tensor, slices: tuple[int, IndexRanges]) -> None:
        tensor = self._tensors[name].detach()
        tensor = tensor if tensor.dim() else tensor.view(1)
        dim, spans = slices
        at = 0
        for start, stop in spans:
            out.narrow(dim, at, stop - start).copy_(tensor.narrow(dim, start, stop - start))
            at += stop - start


def open_state_dict(path: Path) -> WeightsFile:
    """The tensors of a file that torch.save wrote. Raises `CheckpointError` if it holds anything else."""
    import torch

    cure = "save it as safetensors, or with torch.save(model.state_dict(), FILE)"
    with open_regular_file(path, follow=True, error=CheckpointError, cure=cure):
        pass  # refuses a FIFO or device, on which torch.load would hang
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many classes, as many as there are kinds of damage
        if "Unsupported global" in error_message(error):  # PyTorch advises to trust the file
            raise CheckpointError(
                f"{path} cannot be read as a state_dict: it holds other objects than tensors, such as a whole module, which "
                "only code that trusts the file can load",
                cure=cure,
            ) from error
        raise CheckpointError(
            f"{path} cannot be read as a state_dict: {shorten(_ESCAPES.sub('', error_first_line(error)), 300)}", cure=cure
        ) from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state_dict", cure=cure)
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            what = f"{path}: {repr_text(name)} is {with_article(type(tensor).__name__)}, not a tensor"
            if isinstance(tensor, Mapping):
                cure = f"give the state_dict in it alone, which torch.save(found[{repr_text(name)}], FILE) writes"
            raise CheckpointError(what, cure=cure)
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(f"{path}: {shorten(name)} is no dense tensor", cure=cure)
    return _StateDictWeights(path, found)
