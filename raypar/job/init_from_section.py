"""The section `init_from` of a job: the file of weights that it begins with, and how its names become the model's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from raypar.errors import ConfigError
from raypar.job.section import PathText, Section

T = TypeVar("T")
MAX_SHOWN_NAMES = 5
"""How many names of tensors a message lists."""


def _prefixes(value: T) -> T | tuple[str, ...]:
    """`value`, if it is a text or a list of texts. Raises `ValueError`, and `ConfigError` for a text that is there twice."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(prefix, str) for prefix in value):
        raise ValueError("a text, or a list of texts")
    if twice := [prefix for place, prefix in enumerate(value) if prefix in value[:place]]:
        raise ConfigError(
            f"init_from.add_prefix has {twice[0]!r} twice",
            cure="name each part of the model once; parts that begin with the same weights have prefixes of their own",
        )
    return tuple(value)


class InitFromConfig(Section):
    """Weights to begin with: `{path: FILE, strip_prefix: "model.", ...}`, or just the path."""

    path: PathText
    """A .safetensors file, a folder with an index, a state_dict, an export, a checkpoint or a run of raypar."""
    strip_prefix: str = ""
    """Removed from the beginning of the file's names."""
    add_prefix: Annotated[Any, BeforeValidator(_prefixes)] = ""
    """Added before the file's names. With several prefixes each tensor is read for several parts of the model, such as a
    policy and its reference."""
    rename: dict[str, str] = {}
    """Regular expression -> replacement, for the file's names."""
    allow_missing: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Patterns of the model's names that may be missing in the file; they keep their own initial values."""
    allow_unexpected: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Patterns of the file's names that are not used."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and any(hasattr(part, "untyped_storage") for part in value.values()):
            raise ConfigError(
                f"init_from is a state_dict with {len(value)} entries: it must be a file or folder that workers can read",
                cure="save it (safetensors.torch.save_file(state, FILE)) and give the path, or load it in the model function",
            )
        return {"path": os.fspath(value)} if isinstance(value, (str, os.PathLike)) else value

    _fingerprint: str = PrivateAttr(default="")

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the file, as the process that started the run saw it; empty before that."""
        return self._fingerprint

    @property
    def says_how_names_differ(self) -> bool:
        """Whether anything but the path is given."""
        return bool(self.strip_prefix or self.add_prefix or self.rename or self.allow_missing or self.allow_unexpected)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of `add_prefix`, of which there may be one, which may be empty."""
        return (self.add_prefix,) if isinstance(self.add_prefix, str) else self.add_prefix

    def of_file(self, path: str, fingerprint: str) -> InitFromConfig:
        """The section for the file that was found, for workers."""
        made = self.replace(path=path)
        made._fingerprint = fingerprint
        return made

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """The model's name -> the file's. Raises `ConfigError` if a setting matches no name, or two names become equal."""
        names = list(names)
        if self.strip_prefix and not any(name.startswith(self.strip_prefix) for name in names):
            raise ConfigError(
                f"init_from.strip_prefix {self.strip_prefix!r} is at the beginning of none of the {len(names)} names in "
                f"{self.path} ({format_name_list(names)})",
                cure="leave it out, or set the prefix that they have",
            )
        new = {name: name.removeprefix(self.strip_prefix) for name in names}
        for pattern, replacement in self.rename.items():
            try:
                after = {name: re.sub(pattern, replacement, now) for name, now in new.items()}
            except (re.error, IndexError) as error:
                raise ConfigError(
                    f"init_from.rename {pattern!r} -> {replacement!r} is no replacement: {error}",
                    cure="see Python's re.sub: a regular expression, and \\1 for its first group",
                ) from error
            if after == new and not any(re.search(pattern, now) for now in new.values()):
                raise ConfigError(
                    f"init_from.rename {pattern!r} matches none of the file's names ({format_name_list(list(new.values()))})",
                    cure="leave it out, or correct it",
                )
            new = after
        found: dict[str, str] = {}
        for name, now in ((name, prefix + now) for prefix in self.prefixes for name, now in new.items()):
            if now in found:
                raise ConfigError(
                    f"init_from: {found[now]} and {name} would both be {now}", cure="correct rename, or strip_prefix"
                )
            found[now] = name
        return found


def format_name_list(names: Sequence[str]) -> str:
    """The first names, and how many more there are: `a, b, c, d, e and 7 more`."""
    more = len(names) - MAX_SHOWN_NAMES
    return ", ".join(names[:MAX_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
