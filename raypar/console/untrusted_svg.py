"""Copies a drawing (SVG) from a run folder into a page, element by element: what raypar does not draw is left out. Pure.

A run folder is not trusted. Its drawing may hold scripts, links, styles and texts of anybody, and may be built to take memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from xml.parsers import expat

MOST_BYTES = 8 << 20
"""Larger drawings are left out."""
MOST_ELEMENTS, MOST_DEPTH = 60_000, 12
"""Drawings with more elements, or deeper ones, are left out."""
ELEMENTS = {"svg", "title", "defs", "pattern", "marker", "rect", "path", "circle", "g", "text", "tspan"}
"""Elements that are copied; others are left out with all that they hold."""
ATTRIBUTES = {
    "x", "y", "rx", "cx", "cy", "r", "width", "height", "d", "fill", "fill-opacity", "opacity", "stroke", "stroke-width",
    "stroke-dasharray", "stroke-linejoin", "transform", "text-anchor", "font-size", "font-weight", "viewBox", "marker-end",
    "refX", "refY", "markerWidth", "markerHeight", "orient", "patternUnits", "patternTransform", "pointer-events",
}  # fmt: skip
"""Attributes that are copied, with values of `VALUE`."""
VALUE = re.compile(r"[-+0-9A-Za-z., %#()]*")
"""Numbers, paths, colours, transforms: no colon, slash, quote or semicolon, so no address and no style."""
IDS = ("idle", "tip")
"""Names within a drawing that may be given and referred to."""


class _Refused(Exception):
    """The drawing is none of raypar's."""


def copy_untrusted_svg(content: str | bytes, change_text: Callable[[str], str] = str) -> str | None:
    """The drawing as an element for an HTML page, without a size of its own; None if it is none that raypar may have drawn.

    `change_text` is applied to each text before it is escaped.
    """
    data = content.encode() if isinstance(content, str) else content
    if len(data) > MOST_BYTES or b"<!" in data or b"<?" in data:  # no types, entities or comments: expat expands entities
        return None
    copy = _Copy(change_text)
    parser = expat.ParserCreate("UTF-8")
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = copy.start, copy.end
    parser.CharacterDataHandler = copy.text
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, _Refused, ValueError):
        return None
    return "".join(copy.parts) or None


class _Copy:
    """Handlers of the parser, which collect the copy."""

    def __init__(self, change_text: Callable[[str], str]) -> None:
        self.change_text = change_text
        """What becomes of each text."""
        self.parts: list[str] = []
        """The copy so far."""
        self.count = 0
        """Number of elements read."""
        self.depth = 0
        """Number of open elements."""
        self.left_out = 0
        """Depth of the element that is being left out; 0: none is."""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """An element begins."""
        self.count, self.depth = self.count + 1, self.depth + 1
        if self.count > MOST_ELEMENTS or self.depth > MOST_DEPTH or (self.depth == 1) != (name == "svg"):
            raise _Refused
        if self.left_out or name not in ELEMENTS:
            self.left_out = self.left_out or self.depth
            return
        root = self.depth == 1
        kept = [
            f' {key}="{value}"'
            for key, value in attributes.items()
            if _is_harmless(key, value) and not (root and key in ("width", "height"))
        ]
        self.parts.append(f"<{name}{''.join(kept)}" + (' role="img">' if root else ">"))

    def end(self, name: str) -> None:
        """An element ends."""
        if not self.left_out:
            self.parts.append(f"</{name}>")
        elif self.left_out == self.depth:
            self.left_out = 0
        self.depth -= 1

    def text(self, text: str) -> None:
        """A text, which is escaped again."""
        if not self.left_out:
            self.parts.append(escape(self.change_text(text)))


def _is_harmless(key: str, value: str) -> bool:
    """Whether an attribute is one that raypar's drawings have, with a value that refers to nothing outside."""
    if key == "id":
        return value in IDS
    if key in ("fill", "marker-end") and value in {f"url(#{name})" for name in IDS}:
        return True
    return key in ATTRIBUTES and VALUE.fullmatch(value) is not None and "url" not in value.lower()
