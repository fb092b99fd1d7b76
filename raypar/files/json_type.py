"""The type of JSON data: what run folders, checkpoints and the messages between the processes of a run hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A JSON value. What raypar makes may hold tuples, which are written as lists."""
