"""The base class of all sections of a job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from raypar.plan.offloading import HOST
from raypar.user_code.traceback_filter import without_raypar_frames

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

MAX_WORKERS = 2**16
"""Limit on numbers of workers in a job file: lists of that length are made."""
MAX_PARTS = 2**16
"""Limit on numbers of microbatches, blocks or chunks of a step, likewise."""
Workers = Annotated[PositiveInt, Field(le=MAX_WORKERS)]
Parts = Annotated[PositiveInt, Field(le=MAX_PARTS)]
PathText = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
"""A path; from Python also a `pathlib.Path`."""


def _local_folder(value: str) -> str:
    """The absolute path of a folder. Raises `ValueError` for the URI of a place on object storage, and for no name at all."""
    if "://" in value or not value:
        raise ValueError("a folder on a local disk of each worker, not a URI")
    return os.path.abspath(os.path.expanduser(value))


LocalFolder = Annotated[PathText, AfterValidator(_local_folder)]
"""A folder on a local disk, made absolute where the job is read."""
LocalFolderOrHost = Annotated[PathText, AfterValidator(lambda value: value if value == HOST else _local_folder(value))]
"""The same, or the memory of the host."""


def as_file_list(value: object) -> object:
    """One path as a tuple of it, several as a tuple; anything else unchanged."""
    if isinstance(value, (str, os.PathLike)):
        return (os.fspath(value),)
    if isinstance(value, (list, tuple)):
        return tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in value)
    return value


FileList = Annotated[tuple[str, ...], BeforeValidator(as_file_list)]
"""Paths and URIs of files, with wildcards; also a single one."""


class Section(BaseModel):
    """Base of all sections of a job file. Strict: a string is not taken for a number, and an unknown key is an error.

    Validators are built when a job is read, so that workers and the driver, which get checked jobs, need none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    root: ClassVar[type[BaseModel]]
    """`Job`, in which all sections are; `job.py` sets it."""

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """What was given: without the keys that have their default (for `repr`, in messages and in `help`)."""
        return ((name, getattr(self, name)) for name in type(self).model_fields if name in self.model_fields_set)

    @model_validator(mode="before")
    @classmethod
    def _without_empty_collections(cls, tree: T) -> T | dict[str, Any]:
        """`tree` without keys whose default is an empty collection and whose value is null: so YAML reads `metrics:`."""
        if not isinstance(tree, Mapping) or None not in tree.values():
            return tree
        return {key: value for key, value in tree.items() if value is not None or not is_empty_by_default(cls, key)}

    @without_raypar_frames
    def __init__(self, **given: Any) -> None:
        """A section made from Python: `PlanConfig(stages=2)`. Raises `ConfigError`."""
        try:
            super().__init__(**given)
        except ValidationError as error:
            from raypar.job.validation_errors import config_error
            from raypar.job.walk_sections import walk_sections

            inside = next((path for path, section in walk_sections(Section.root) if section is type(self)), ())
            raise config_error(error.errors(), inside, Section.root, of_trainer=True) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # sections in a tree are validated without it

    def replace(self, **values: Any) -> Self:
        """The section with other values of some keys, which are not checked again."""
        unknown = sorted(set(values) - set(type(self).model_fields))
        if unknown:
            raise TypeError(f"{type(self).__name__} has no key {unknown[0]!r}")
        return self.model_copy(update=values)


def is_empty_by_default(section: type[BaseModel], key: object) -> bool:
    """Whether the default of a key is an empty list or an empty mapping."""
    info = section.model_fields.get(key) if isinstance(key, str) else None
    return info is not None and info.default in ((), {})
