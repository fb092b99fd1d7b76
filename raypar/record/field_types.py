"""Types of the fields of events, each with the check of its values: what a run folder may say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, TypedDict, TypeGuard

from raypar.files.json_type import Json
from raypar.plan.microbatches import MAX_STEPS

Check = Callable[[Json], bool]
"""Whether a value is valid."""
MAX_GENERATIONS = 10**6
MAX_WORKER_NUMBER = 2**31
"""Limit of worker numbers. They are never reused within one start of a run."""
MAX_TIME_S = 1e11
"""Largest Unix time that can be shown as a date (the year 5138)."""


def count_up_to(most: int, least: int = 0) -> Check:
    """The check for whole numbers from `least` to `most`."""
    return lambda value: is_number(value) and type(value) is int and least <= value <= most


def is_number(value: Json) -> TypeGuard[int | float]:
    """Whether a value is a number, NaN too; true and false are none."""
    return type(value) in (int, float)


def number_up_to(most: float) -> Check:
    """The check for numbers from 0 to `most`; NaN fails."""
    return lambda value: is_number(value) and 0 <= value <= most  # an integer may be too large for a float


def is_real(value: Json) -> bool:
    """Whether a value can be printed and compared as a float; NaN passes."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def is_text(value: Json) -> TypeGuard[str]:
    """Whether a value is text that can be encoded; a lone surrogate cannot."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in (() if value.isascii() else value))


def is_flag(value: Json) -> bool:
    """Whether a value is true or false."""
    return isinstance(value, bool)


def is_list(value: Json) -> TypeGuard[Sequence[Json]]:
    """Whether a value is a list or tuple."""
    return isinstance(value, (list, tuple))


def is_list_of(check: Check) -> Check:
    """The check for lists whose elements pass `check`."""
    return lambda value: is_list(value) and all(map(check, value))


def is_mapping_of(check: Check) -> Check:
    """The check for JSON objects whose values pass `check`."""
    return lambda value: isinstance(value, dict) and all(is_text(key) and check(each) for key, each in value.items())


def numbers_in(values: Mapping[str, Json]) -> dict[str, float]:
    """The values that are numbers; NaN for null."""
    numbers = {name: math.nan if value is None else value for name, value in values.items()}
    return {name: float(value) for name, value in numbers.items() if isinstance(value, (int, float)) and is_real(value)}


def is_finite_number(value: Json) -> TypeGuard[float]:
    """Whether a value is a finite number. Run folders have null or NaN for other numbers."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


class NumberedWorker(TypedDict):
    """A worker."""

    worker: int
    """Its number."""


class WorkerFacts(NumberedWorker, total=False):
    """What events say of a worker."""

    node: str
    """The beginning of its node's id."""
    pid: int
    """Its process."""
    host: str
    """The address of its machine."""


class SeatedWorker(WorkerFacts, total=False):
    """What members.json says of a worker with a seat."""

    coordinate: str
    """Its seat, in words."""


WORKER, STEP, TIME = count_up_to(MAX_WORKER_NUMBER), count_up_to(MAX_STEPS), number_up_to(MAX_TIME_S)
WORKER_FIELDS: dict[str, Check] = {
    "worker": WORKER, "coordinate": is_text, "node": is_text, "pid": count_up_to(2**31), "host": is_text,
}  # fmt: skip
"""Fields of one worker."""


def _is_worker(value: Json) -> bool:
    return (
        isinstance(value, dict)
        and value.get("worker") is not None
        and all(value.get(key) is None or check(value[key]) for key, check in WORKER_FIELDS.items())
    )


Text = Annotated[str, is_text]
BestRules = Annotated[Sequence[Mapping[str, Json]], is_list_of(lambda value: isinstance(value, dict))]
Flag = Annotated[bool, is_flag]
WorkerNumber = Annotated[int, WORKER]
WorkerNumbers = Annotated[Sequence[int], is_list_of(WORKER)]
WorkerList = Annotated[Sequence[WorkerFacts], is_list_of(_is_worker)]
StepNumber = Annotated[int, STEP]
FirstStepIsOne = Annotated[int, count_up_to(MAX_STEPS, 1)]
GenerationNumber = Annotated[int, count_up_to(MAX_GENERATIONS)]
ProcessId = Annotated[int, count_up_to(2**31)]
Elements = Annotated[int, count_up_to(2**63)]
UnixTime = Annotated[float, TIME]
Seconds = Annotated[float, TIME]
Rate = Annotated[float, number_up_to(1e18)]
Real = Annotated[float, is_real]
"""A number that may be NaN. Files have null for one that is not finite."""
Numbers = Annotated[Sequence[float], is_list]
"""Whoever reads them checks each (`is_finite_number`)."""
Texts = Annotated[Mapping[str, str], is_mapping_of(is_text)]
Anything = Annotated[Json, lambda value: True]
