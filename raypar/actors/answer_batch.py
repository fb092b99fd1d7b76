"""Waits for the answers of several workers to one call together, in a thread.

With one asyncio task for each answer, every answer would wake the driver's event loop: a third more processor time.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import ray

from raypar.actors.actor_handle_types import PendingAnswer

T = TypeVar("T")

BATCH_WAIT_S = 0.2
"""How long the answers of all workers to one call are awaited together. Callers await later answers one by one."""


class Unanswered(enum.Enum):
    """Takes the place of an answer that has not come in time."""

    UNANSWERED = "no answer yet"


UNANSWERED: Final = Unanswered.UNANSWERED


@dataclass(frozen=True)
class Raised:
    """Takes the place of the answer of a call that has raised an exception."""

    error: Exception
    """The exception."""


def wait_for_answers(refs: Sequence[PendingAnswer[T]], timeout_s: float) -> list[T | Raised | Unanswered]:
    """The answer to each call in `refs`, in their order: its value, `Raised`, or `UNANSWERED`. Blocks for up to `timeout_s`.

    `refs` may not be empty.
    """
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    if len(ready) == len(refs):
        with contextlib.suppress(Exception):  # a call has raised: the answers are read one by one below
            return ray.get(list(refs))
    answered = set(ready)
    return [_value_or_raised(ref) if ref in answered else UNANSWERED for ref in refs]


def _value_or_raised(ref: PendingAnswer[T]) -> T | Raised:
    """The value of an answer that has come; `Raised` if the call has raised."""
    try:
        return ray.get(ref)
    except Exception as error:
        return Raised(error)
