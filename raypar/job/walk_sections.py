"""The sections and keys of a job, as its classes have them."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel


def section_types(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from section_types(inner)


def short_key(section: type[BaseModel]) -> str | None:
    """The key that a value in the section's place stands for: its first one, if no other is required, or a function."""
    first = next(iter(section.model_fields), None)
    required = [name for name, info in section.model_fields.items() if info.is_required()]
    return first if required == [first] or first == "function" else None


def keys_of(model: type[BaseModel]) -> list[str]:
    """The keys of a section, without those of sections inside it."""
    return list(model.model_fields)


def walk_sections(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """(path, class) of every section inside a section, at any depth."""
    for name, info in model.model_fields.items():
        for inner in section_types(info.annotation):
            yield (*above, name), inner
            yield from walk_sections(inner, (*above, name))


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The keys of a section and of all sections inside it, such as `plan.stages`."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in section_types(info.annotation):
            yield from dotted_keys(inner, f"{prefix}{name}.")
