"""What a checkpoint says of the frozen values that it leaves out (`checkpoint.only: trained`): where they are. Pure.

The table stands beside the contract, in the manifest, and is checked as the manifest is: it says what was written, not by whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.worker.checkpoint.safetensors_header import parse_shape


@dataclass(frozen=True)
class FrozenTensor:
    """A parameter that is not trained."""

    stored: str
    """Its name in the weights file."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the dtype in which the model has it; the file may have another one."""


@dataclass(frozen=True)
class FrozenTable:
    """The parameters that a checkpoint leaves out."""

    path: str
    """The weights file or folder that has them."""
    fingerprint: str
    """`WeightsFile.fingerprint` of it."""
    tensors: Mapping[str, FrozenTensor]
    """Parameter -> where it is."""
    ties: Mapping[str, str]
    """Other name of a tied one of them -> its first name."""
    pieces: str | None = None
    """`WeightsFile.digest_of_pieces` of these tensors; None in checkpoints of before that was kept."""

    def as_json(self) -> dict[str, Json]:
        """JSON values, for `parse_frozen_table`."""
        return {
            "path": self.path,
            "fingerprint": self.fingerprint,
            "tensors": {name: [one.stored, list(one.shape), one.dtype] for name, one in sorted(self.tensors.items())},
            "ties": dict(sorted(self.ties.items())),
            **({"pieces": self.pieces} if self.pieces is not None else {}),
        }


def parse_frozen_table(found: Json, dtypes: Mapping[str, str]) -> FrozenTable | None:
    """The table of JSON values; None for None. `dtypes`: those that there are. Raises `ValueError`."""
    if found is None:
        return None
    if not isinstance(found, dict) or set(found) - {"pieces"} != {"path", "fingerprint", "tensors", "ties"}:
        raise ValueError(f"frozen is {shorten(found)}, not a path, its fingerprint, tensors and ties")
    path, fingerprint, tensors, ties = (found[key] for key in ("path", "fingerprint", "tensors", "ties"))
    if not isinstance(path, str) or not isinstance(fingerprint, str) or not isinstance(tensors, dict):
        raise ValueError(f"frozen: path, fingerprint and tensors are {shorten([path, fingerprint, tensors])}")
    if not isinstance(pieces := found.get("pieces"), str | None):
        raise ValueError(f"frozen: pieces is {shorten(pieces)}")
    made = {}
    for name, one in tensors.items():
        stored, shape, dtype = one if isinstance(one, list) and len(one) == 3 else (None, None, None)
        if not isinstance(stored, str) or not isinstance(dtype, str) or dtype not in dtypes:
            raise ValueError(f"frozen: {shorten(name)} is {shorten(one)}, not a name, a shape and a dtype")
        made[name] = FrozenTensor(stored, parse_shape(shape), dtype)
    if not isinstance(ties, dict) or not all(first in made and name not in made for name, first in ties.items()):
        raise ValueError(f"frozen: ties are {shorten(ties)}")
    return FrozenTable(path, fingerprint, made, ties, pieces)
