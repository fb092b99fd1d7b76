"""The fields of a sample, or of a collated batch: nested dicts, tuples and dataclasses have dotted names (rule 1)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from raypar.errors import DataError

FIELD_NAMES = ("x", "y", "z")
"""Names of a tuple's fields, unless `data.names` gives others."""


def flatten_fields(
    value: object, names: Sequence[str], what: str, is_one_value: Callable[[object], bool] = lambda value: False
) -> dict[str, object]:
    """Field -> its value, which is no container. `{"a": {"b": 1}}` has the field `a.b`, `{"a": (t, u)}` has `a.0` and `a.1`.

    `names`: of the fields of a tuple (`data.names`); without them a named tuple has its own, any other tuple `FIELD_NAMES`.
    `what`: the sample or batch, for messages; `is_one_value`: asked of values that would be taken apart. Raises `DataError` for
    a tuple with more values than names, and for two fields of one name.
    """
    found: dict[str, object] = {}
    own = own_names_of_tuple(value) if not names else ()
    for name, part in top_values(value, names, what).items():
        if own and name not in own:
            continue  # the same value under its usual name
        for full, leaf in _leaves(str(name), part, is_one_value):
            if full in found:
                raise DataError(
                    f"{what} has two fields {full!r}: one inside another, and one with a dot in its name",
                    cure="rename one of them in the data set or in data.collate",
                )
            found[full] = leaf
    return found


def top_values(value: object, names: Sequence[str], what: str) -> Mapping[str, object]:
    """The fields of a sample or batch that is a mapping, dataclass, tuple or list, or one value, without those inside them.

    A named tuple has its fields by their own names and, as every tuple, by `FIELD_NAMES`; with `names` by these only.
    """
    if type(value) is tuple and len(value) <= len(names or FIELD_NAMES):  # first, as most samples are such
        return dict(zip(names or FIELD_NAMES, value, strict=False))
    if isinstance(value, Mapping):
        return value
    if _is_dataclass_object(value):
        return dict(_parts(value))
    values = value if isinstance(value, (tuple, list)) else (value,)
    titles, own = names or FIELD_NAMES, own_names_of_tuple(value) if not names else ()
    if len(values) > len(titles) and not own:
        raise DataError(
            f"{what} has {len(values)} fields, but names for {len(titles)}: {', '.join(titles)}",
            cure=f"name all {len(values)} in data.names, or return a dict",
        )
    return dict(zip(titles, values, strict=False)) | dict(zip(own, values, strict=False))


def own_names_of_tuple(value: object) -> tuple[str, ...]:
    """The field names of a named tuple; empty for anything else."""
    names = getattr(value, "_fields", ()) if isinstance(value, tuple) else ()
    return names if isinstance(names, tuple) else ()


def value_at(found: Mapping[str, object], name: str) -> object:
    """The value of field `name`, also of one inside of others (`inputs.ids`). Raises `KeyError` if there is none."""
    if name in found:
        return found[name]
    for end in (place for place, character in enumerate(name) if character == "."):
        inside = found.get(name[:end])
        if is_container(inside):
            return value_at({str(key): part for key, part in _parts(inside)}, name[end + 1 :])
    raise KeyError(name)


def is_container(value: object) -> bool:
    """Whether a value inside a sample or batch is taken apart: a mapping, dataclass or named tuple, or a tuple or list in which
    there is one of these or a tensor with dimensions. A list of numbers is one value."""
    if isinstance(value, Mapping) or _is_dataclass_object(value) or own_names_of_tuple(value):
        return True
    return isinstance(value, (tuple, list)) and any((isinstance(e, Tensor) and e.dim() > 0) or is_container(e) for e in value)


def _leaves(name: str, value: object, is_one_value: Callable[[object], bool]) -> Iterator[tuple[str, object]]:
    if is_container(value) and not is_one_value(value):
        for key, part in _parts(value):
            yield from _leaves(f"{name}.{key}", part, is_one_value)
    else:
        yield name, value


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """(name, value) of what is in a container; numbers are the names in a tuple or list without names."""
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif dataclasses.is_dataclass(value):
        yield from ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
    elif isinstance(value, (tuple, list)):
        yield from zip(own_names_of_tuple(value) or map(str, range(len(value))), value, strict=True)


def _is_dataclass_object(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def digest_of_fields(fields: Mapping[str, Tensor]) -> int:
    """8 bytes of hash of a microbatch: names, dtypes, shapes and numbers of its fields."""
    found = hashlib.blake2b(digest_size=8)
    for name in sorted(fields):
        value = fields[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return int.from_bytes(found.digest(), "little")
