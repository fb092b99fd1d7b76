"""Parts of messages: counts with their noun, worker numbers, and forms of words that fit a number of things."""

from __future__ import annotations

from collections.abc import Collection, Sized


def count_noun(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 worker`, `3 workers`, `1,024 workers`. `plural`: where it is not the noun and an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_worker_numbers(workers: Collection[int]) -> str:
    """`worker 5` or `workers 3, 5`, the lowest number first."""
    return f"{word_form(workers, 'worker', 'workers')} {', '.join(map(str, sorted(workers)))}"


def word_form(things: Sized, one: str, several: str) -> str:
    """The form of a verb or noun that fits the number of things: `has` or `have`."""
    return one if len(things) == 1 else several
