"""Parts of messages: counts with their noun, worker numbers, forms of words that fit a number of things, and tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Sized


def count_noun(number: int | str, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 worker`, `3 workers`, `1,024 workers`; several numbers are given as text: `2/1 shards`.

    `plural`: where it is not the noun and an s.
    """
    shown = number if isinstance(number, str) else f"{number:,}"
    return f"{shown} {noun if shown == '1' else plural or noun + 's'}"


def after_steps(done: int) -> str:
    """`after 1 step`, `after 1,024 steps`: which state of a run something is."""
    return f"after {count_noun(done, 'step')}"


def format_worker_numbers(workers: Collection[int]) -> str:
    """`worker 5` or `workers 3, 5`, the lowest number first."""
    return f"{word_form(workers, 'worker', 'workers')} {', '.join(map(str, sorted(workers)))}"


def word_form(things: Sized, one: str, several: str) -> str:
    """The form of a verb or noun that fits the number of things: `has` or `have`."""
    return one if len(things) == 1 else several


def align_columns(rows: Sequence[Sequence[str]], right_from: float = math.inf) -> list[str]:
    """A line for each row, with its cells below each other; columns from number `right_from` on are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if column >= right_from else str.ljust for column in range(len(widths))]
    return ["  ".join(side(cell, w) for side, cell, w in zip(sides, row, widths, strict=True)).rstrip() for row in rows]
