"""Converts a job to plain values for YAML: sections to dicts, callables to `module:name`."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from raypar.files.printable_text import repr_text, shorten
from raypar.files.untrusted_files import MAX_DEPTH
from raypar.job.importable_name import is_importable_name

PLAIN = (type(None), bool, int, float, str, bytes, datetime.date, datetime.datetime)
"""Types of single values that YAML has, and that are read as the same values again."""


def to_plain_values(section: BaseModel) -> tuple[Any, list[str]]:
    """(the section as plain values, a line for each part of it that has no plain form)."""
    unwritable: list[str] = []
    return _plain_value(section, "", unwritable), unwritable


def _plain_value(value: Any, key: str, unwritable: list[str], depth: int = 0) -> Any:
    """`value` in plain values of YAML, where a tuple is a list; a section without its keys that are None. What has no such form
    is added, in words, to `unwritable`: also a callable among the arguments of a function, which would be read as a text."""
    if depth > MAX_DEPTH:
        unwritable.append(f"{shorten(key)} has more than {MAX_DEPTH} levels within each other")
        return None
    if isinstance(value, BaseModel):
        unwritable += getattr(value, "unwritable_parts", [])
        value = {name: part for name, part in value if part is not None}
        if callable(value.get("function")):
            value["function"] = _function_name(value["function"], f"{key}.function", unwritable)
    if isinstance(value, Mapping):
        odd = [name for name in value if type(name) not in PLAIN]
        unwritable += [f"{key} has the key {repr_text(name)} ({type(name).__name__})" for name in odd]
        return {
            name: _plain_value(part, f"{key}.{name}" if key else str(name), unwritable, depth + 1)
            for name, part in value.items()
            if type(name) in PLAIN
        }
    if isinstance(value, (list, tuple)):
        return [_plain_value(part, f"{key}.{index}", unwritable, depth + 1) for index, part in enumerate(value)]
    if type(value) in PLAIN:
        return value
    unwritable.append(f"{key} is {repr_text(value)} ({type(value).__name__})")
    return None


def _function_name(function: Callable[..., Any], key: str, unwritable: list[str]) -> str | None:
    """`module:name`; None, with a line in `unwritable`, if the function cannot be imported by name."""
    name = importable_name(function)
    if name is None:
        unwritable.append(f"{key} is {_describe_callable(function)}")
    return name


def importable_name(function: Callable[..., Any]) -> str | None:
    """`module:name` by which workers can import a function or class; None if they cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    if not is_importable_name(f"{module}:{name}"):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else None


def _describe_callable(value: Callable[..., Any]) -> str:
    """Words for a callable that cannot be imported by name."""
    name = getattr(value, "__qualname__", None)
    if name is None:
        held = getattr(value, "value", value)  # what a `Given` holds
        return f"an object ({type(held).__name__})"
    if getattr(value, "__module__", None) == "__main__" and "<" not in name:
        return f"{name} of the script itself (__main__), which no other process can import"
    return f"{name}, a function without a name that can be imported"
