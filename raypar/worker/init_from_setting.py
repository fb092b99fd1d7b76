"""Where the weights that a job begins with come from (`init_from`), and how their names become the model's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raypar.errors import ConfigError

MAX_SHOWN_NAMES = 5
"""How many names of tensors a message lists."""


@dataclass(frozen=True)
class InitialWeightsFile:
    """The setting `init_from` of a job: a file of weights, and how its names become the model's.

    The model's name of a tensor is the file's name without `strip_prefix`, then `rename`d, then with `add_prefix`. A name that
    does not begin with `strip_prefix` keeps its beginning.
    """

    path: str
    strip_prefix: str = ""
    add_prefix: str = ""
    rename: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement), as in `re.sub`, applied one after the other."""
    allow_missing: tuple[str, ...] = ()
    """Patterns (`head.*`) of the model's names that the file may lack: these get the model's own initial values."""
    allow_unexpected: tuple[str, ...] = ()
    """Patterns of the file's names, before or after renaming, that the model may lack.

    A tensor whose shape differs is left out if both `allow_missing` and `allow_unexpected` match it.
    """

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
        for pattern, replacement in self.rename:
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
        for name, now in new.items():
            now = self.add_prefix + now
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
