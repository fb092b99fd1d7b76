"""The answers of several workers to one call, awaited together in a thread.

With a task for each answer the driver's event loop is woken for every worker, which costs a third more processor time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

BATCH_WAIT_S = 0.2
"""How long the answers of all workers to one call are awaited together. Later ones are awaited one by one."""

UNANSWERED = object()
"""Stands for an answer that has not come in time."""


@dataclass(frozen=True)
class Raised:
    """The exception that a call has raised, as an answer."""

    error: Exception


def wait_for_answers(refs: Sequence[Any], timeout_s: float) -> list[Any]:
    """The answers to calls, in the order of `refs`: the value, `Raised`, or `UNANSWERED` after `timeout_s`. Blocks."""
    there, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    if len(there) == len(refs):
        with contextlib.suppress(Exception):  # one of them has failed: they are read one by one below
            return ray.get(list(refs))
    known = set(there)
    return [_value_or_raised(ref) if ref in known else UNANSWERED for ref in refs]


def _value_or_raised(ref: Any) -> Any:
    """The value of an answer that is there, or the exception in its place as `Raised`."""
    try:
        return ray.get(ref)
    except Exception as error:
        return Raised(error)
