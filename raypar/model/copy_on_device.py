"""Copies of host tensors on a device that know what they were copied from: the host reads that, and waits for nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_SOURCE = "_raypar_source"
"""Attribute of a copy."""


@dataclass(frozen=True)
class _Source:
    """What a tensor on a device was copied from."""

    tensor: Tensor
    """In host memory."""
    versions: tuple[int, int]
    """Of that tensor and of the copy, when it was made."""


def remember_source(copied: Tensor, source: Tensor) -> None:
    """Note on a copy on a device what it was copied from."""
    setattr(copied, _SOURCE, _Source(source, (source._version, copied._version)))


def pass_on_source(rounded: Tensor, copied: Tensor) -> None:
    """Note on a copy in another dtype of a copy on a device what that was copied from, if it is known."""
    source = _source_of(copied)
    if source is not None:
        remember_source(rounded, source)


def on_host(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in host memory: what it was copied from, where neither was written since; else read from the
    device."""
    source = _source_of(tensor)
    return tensor.cpu() if source is None else source.to(tensor.dtype)


def _source_of(tensor: Tensor) -> Tensor | None:
    source: _Source | None = vars(tensor).get(_SOURCE)
    if source is None or source.versions != (source.tensor._version, tensor._version):
        return None
    return source.tensor
