"""Mistakes in files: every key misspelt, removed, or with a value of another type; and single passages of a text replaced."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all keys and list items, outer ones first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def misspelt(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, copy of the value) for each key of a mapping, its last two letters exchanged or its only one doubled."""
    for path in places(value):
        key = path[-1]
        if isinstance(key, str):
            wrong = key[:-2] + key[-1] + key[-2] if key[-2:] != key[-2:][::-1] and len(key) > 1 else key + key[-1]
            mutant, mapping = _copy_with(value, path)
            mutant_items = [(wrong if k == key else k, v) for k, v in mapping.items()]
            mapping.clear()
            mapping.update(mutant_items)
            yield f"{_name(path)} -> {wrong}", mutant


def removed(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, copy of the value) without each key of a mapping in turn."""
    for path in places(value):
        if isinstance(path[-1], str):
            mutant, mapping = _copy_with(value, path)
            del mapping[path[-1]]
            yield f"without {_name(path)}", mutant


def of_another_type(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, copy of the value) with each key's and item's value replaced by one of another type."""
    for path in places(value):
        mutant, container = _copy_with(value, path)
        container[path[-1]] = _another_type(container[path[-1]])
        yield f"{_name(path)} = {container[path[-1]]!r}", mutant


def _another_type(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes"
    if isinstance(value, (int, float)):
        return f"{value} of them"
    return 7 if isinstance(value, str) else "text"


def _copy_with(value: Any, path: Path) -> tuple[Any, Any]:
    """A copy, and in it what holds the last key of the path."""
    mutant = copy.deepcopy(value)
    container = mutant
    for key in path[:-1]:
        container = container[key]
    return mutant, container


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def replaced(text: str, old: str, new: str) -> str:
    """The text with the first `old` replaced. The mistake must be one: `old` stands in the text, and `new` is not `old`."""
    assert old in text, f"{old!r} is not in the file: the mutation says nothing"
    assert old != new
    return text.replace(old, new, 1)
