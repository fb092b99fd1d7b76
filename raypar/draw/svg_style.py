"""Colours and measures that all SVG drawings share."""

from __future__ import annotations

INK, QUIET, LINE = "#1F2933", "#66727F", "#DDE2E7"
"""Colours of text, of quieter text, and of lines."""
CHARACTER_WIDTH = 0.56
"""Mean width of a character over the font size."""


def estimate_text_width(text: str, size: float) -> float:
    """Estimated width of a text in pixels, at a font size."""
    return CHARACTER_WIDTH * size * len(text)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def mix_with_white(colour: str, white: float) -> str:
    """The colour, mixed with this share of white."""
    return "#" + "".join(f"{round(c + (255 - c) * white):02X}" for c in _channels(colour))


def readable_text_colour(colour: str) -> str:
    """The text colour, white or dark, with more contrast to a background (relative luminance, WCAG 2.2)."""
    red, green, blue = (((c / 255) + 0.055) ** 2.4 / 1.055**2.4 for c in _channels(colour))
    return "#FFFFFF" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.27 else INK
