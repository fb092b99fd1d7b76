"""Converts a job to plain values for YAML: sections to dicts, callables to `module:name`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from raypar.untrusted_files import shorten


def to_plain_values(section: BaseModel) -> tuple[Any, list[str]]:
    """(the section as plain values, a line for each part of it that has no plain form)."""
    unwritable: list[str] = []
    return _plain_value(section, "", unwritable), unwritable


def _plain_value(value: Any, key: str, unwritable: list[str]) -> Any:
    """`value` as plain values; a section without those of its keys that are None.

    A line is added to `unwritable` for each part without a plain form. A callable among the arguments of a function is one: it
    would be read back as text.
    """
    if isinstance(value, BaseModel):
        unwritable += getattr(value, "unwritable_parts", [])
        value = {name: part for name, part in value if part is not None}
        if callable(value.get("function")):
            value["function"] = _function_name(value["function"], f"{key}.function", unwritable)
    if isinstance(value, Mapping):
        return {name: _plain_value(part, f"{key}.{name}" if key else str(name), unwritable) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(part, f"{key}.{index}", unwritable) for index, part in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    unwritable.append(f"{key} is {shorten(repr(value))} ({type(value).__name__})")
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
