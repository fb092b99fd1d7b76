"""Values and texts that are not trusted, shortened and made printable for messages."""

from __future__ import annotations

import itertools
import os
import reprlib
from typing import Any


def shorten(value: object, most: int = 200) -> str:
    """A path, or a value from a file, as text for a message: one line of at most `most` characters."""
    if not isinstance(value, (str, os.PathLike)):
        return repr_text(value, most)
    text = str(value)[: 2 * most]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogateescape").decode() for c in text)
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 4 :]}"


def printable_text(value: object) -> str:
    """The value as text in which `?` stands for every character that a terminal would obey, or an SVG file may not have.

    Line breaks and tabs stay.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in str(value))


def repr_text(value: object, most: int = 200) -> str:
    """`repr(value)` for a message: one line of at most `most` characters, `<Type>` for what has no such text.

    That is a collection other than Python's own (the `repr` of a `ray.data.Dataset` computes it), what has several lines, such
    as a table, and what raises, as a number with thousands of digits does.
    """
    try:
        text = _BRIEF.repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return shorten(text, most)


class _BriefRepr(reprlib.Repr):
    """`repr` with limits on levels, items and characters."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 8, 400, 400
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 20

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """The items in their order, which `reprlib` would sort."""
        if level <= 0 < len(x):
            return "{...}"
        items = [
            f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in itertools.islice(x.items(), self.maxdict)
        ]
        return f"{{{', '.join([*items, *['...'] * (len(x) > self.maxdict)])}}}"

    def repr_instance(self, x: object, level: int) -> str:
        kinds = {dict: self.repr_dict, list: self.repr_list, tuple: self.repr_tuple}
        for kind, of_kind in kinds.items():
            if isinstance(x, kind) and type(x).__repr__ is kind.__repr__:
                return of_kind(x, level)
        collection = hasattr(type(x), "__len__") and not isinstance(x, (str, bytes)) and not hasattr(x, "tolist")
        text = "" if collection else repr(x)
        return f"<{type(x).__name__}>" if collection or "\n" in text else text


_BRIEF = _BriefRepr()
