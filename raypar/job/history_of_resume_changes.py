"""What resumes have changed of a job: the history that checkpoints keep beside the contract, and a line for each change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from raypar.errors import CheckpointError
from raypar.files.json_type import Json
from raypar.files.printable_text import repr_text, shorten
from raypar.job.job import MAX_SAMPLES
from raypar.job.section import MAX_PARTS
from raypar.plan.microbatches import BatchesOfSteps
from raypar.plan.wording import after_steps

MOST_CHARACTERS = 80
"""The longest text of a value in a line."""


@dataclass(frozen=True)
class JobBefore:
    """What a resume has changed: the keys as they were until then."""

    steps_done: int
    """Number of steps that were done with them."""
    was: Mapping[str, Json]
    """Key of the contract -> its former value; None if the contract did not have it."""


class ValueChange(NamedTuple):
    """One value of a job that differs from a checkpoint's; as text `key old -> new`."""

    key: str
    """The job's key, dotted."""
    then: Json
    """The checkpoint's value; None if it has none."""
    now: Json
    """The job's, likewise."""

    def __str__(self) -> str:
        return f"{self.key} {_text(self.then)} -> {_text(self.now)}"


@dataclass(frozen=True)
class Changes:
    """What the resumes of a run have changed of its job."""

    history: tuple[JobBefore, ...] = ()
    """One entry for each resume that has changed something, in order of steps."""
    last: tuple[ValueChange, ...] = ()
    """What the present resume changes; it is the last entry of the history if that is anything."""

    @property
    def lines(self) -> tuple[str, ...]:
        """What the present resume changes, in words; empty if that is nothing."""
        if not self.last:
            return ()
        return (f"from step {self.history[-1].steps_done + 1} on: {'; '.join(map(str, self.last))}",)

    def as_json(self) -> list[Json]:
        """The history as checkpoints have it."""
        return [{"steps_done": one.steps_done, "was": dict(one.was)} for one in self.history]

    def former_batches(self, now: Mapping[str, Json]) -> tuple[BatchesOfSteps, ...]:
        """The batches of the steps before the last change of them; empty if all steps have those of the contract `now`.

        Raises `CheckpointError` for batches that no job has.
        """
        found: list[BatchesOfSteps] = []
        after = now
        for place in reversed(range(len(self.history))):
            one = self.history[place]
            after = {**after, **one.was}
            count, size = after.get("microbatches"), after.get("batch_size")
            if not _is_count(count, MAX_PARTS) or not _is_count(size, MAX_SAMPLES) or count > size:
                raise CheckpointError(
                    f"a history of changes with {shorten(repr(count))} microbatches of {shorten(repr(size))} samples",
                    cure="use another checkpoint",
                )
            begun = self.history[place - 1].steps_done if place else 0
            found.insert(0, BatchesOfSteps(one.steps_done - begun, count, size))
        while found and (found[-1].count, found[-1].batch_size) == (now["microbatches"], now["batch_size"]):
            found.pop()
        return tuple(found)


NO_CHANGES = Changes()


def _is_count(value: Json, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def parse_history(value: Json, steps_done: int) -> tuple[JobBefore, ...]:
    """The history of a checkpoint after so many steps, from JSON values. Raises `CheckpointError` for what no run writes."""
    found: list[JobBefore] = []
    for entry in value if isinstance(value, list) else [value]:
        done, was = (entry.get("steps_done"), entry.get("was")) if isinstance(entry, dict) else (None, None)
        least = found[-1].steps_done if found else 0
        if not isinstance(done, int) or not least <= done <= steps_done or not isinstance(was, dict):
            raise CheckpointError(
                f"a history of changes with {shorten(repr_text(entry))}, {after_steps(steps_done)}",
                cure="use another checkpoint",
            )
        found.append(JobBefore(done, was))
    return tuple(found)


def changed_values(then: Json, now: Json, key: str) -> Iterator[ValueChange]:
    """Each value that differs, inside of sections that of their own keys. `key`: the values' own, dotted."""
    then, now = (_with_options_of_groups(value) if is_optimizer_key(key) else value for value in (then, now))
    if isinstance(then, dict) and isinstance(now, dict):
        for name in {**then, **now}:
            if not _is_same_value(name, then.get(name), now.get(name)):
                yield from changed_values(then.get(name), now.get(name), f"{key}.{name}")
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for place, (one, other) in enumerate(zip(then, now, strict=True)):
            if one != other:
                yield from changed_values(one, other, f"{key}.{place}")
    else:
        yield ValueChange(key, then, now)


def is_optimizer_key(key: str) -> bool:
    """Whether a key is that of an optimizer, the only one or one of several."""
    return key == "optimizer" or re.fullmatch(r"optimizer\.entries\.\d+", key) is not None


def _with_options_of_groups(value: Json) -> Json:
    """An optimizer of a contract with its groups as a job has them: `{match: pattern, option: value, ...}`."""
    if not isinstance(value, dict) or not isinstance(groups := value.get("groups"), list):
        return value
    told: list[Json] = []
    for pair in groups:
        pattern, options = pair if isinstance(pair, list) and len(pair) == 2 else (pair, None)
        told.append({"match": pattern, **options} if isinstance(options, dict) else pair)
    return {**value, "groups": told}


def _is_same_value(key: str, then: Json, now: Json) -> bool:
    """A function that was given itself has its name without the module."""
    if key == "function" and isinstance(then, str) and isinstance(now, str) and (":" in then) != (":" in now):
        return then.rpartition(":")[2] == now.rpartition(":")[2]
    return then == now


def _text(value: Json) -> str:
    return "none" if value is None else shorten(repr_text(value), MOST_CHARACTERS)
