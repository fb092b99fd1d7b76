"""Parts of messages: counts, worker numbers, and verb forms that fit them."""

from __future__ import annotations

from collections.abc import Collection


def count_of(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_worker_numbers(workers: Collection[int]) -> str:
    """`worker 5` or `workers 3, 5`, the lowest number first."""
    return f"worker{'s' * (len(workers) != 1)} {', '.join(map(str, sorted(workers)))}"


def verb_form(workers: Collection[int], one: str, several: str) -> str:
    """The form of a verb or noun that fits the number of workers: `has` or `have`."""
    return one if len(workers) == 1 else several
