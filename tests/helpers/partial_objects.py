"""Objects of the driver for tests, made of the few parts that a test is about."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

Made = TypeVar("Made")


def make_with(kind: type[Made], **parts: Any) -> Made:
    """A dataclass with these fields; the others that have no default are None."""
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    return kind(**(dict.fromkeys(needed) | parts))
