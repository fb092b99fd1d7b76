"""The base class of all sections of a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from raypar.job.validation_errors import config_error, walk_sections
from raypar.user_code.traceback_filter import without_raypar_frames

MAX_WORKERS = 2**16
"""Limit on numbers of workers in a job file: lists of that length are made."""


class Section(BaseModel):
    """Base of all sections of a job file. Strict: a string is not taken for a number, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    root: ClassVar[type[BaseModel]]
    """`Job`, in which all sections are; `job.py` sets it."""

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """What was given: without the keys that have their default (for `repr`, in messages and in `help`)."""
        return ((name, getattr(self, name)) for name in type(self).model_fields if name in self.model_fields_set)

    @without_raypar_frames
    def __init__(self, **given: Any) -> None:
        """A section made from Python: `PlanConfig(stages=2)`. Raises `ConfigError`."""
        try:
            super().__init__(**given)
        except ValidationError as error:
            inside = next((path for path, section in walk_sections(Section.root) if section is type(self)), ())
            raise config_error(error.errors(), inside, Section.root, of_trainer=True) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # sections in a tree are validated without it
