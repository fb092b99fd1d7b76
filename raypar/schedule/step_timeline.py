"""The timeline of a step, with the start and end of each instruction, in one form for simulated and measured steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from raypar.errors import ScheduleError
from raypar.schedule.instructions import (
    ACTIVATIONS,
    FETCHED,
    INSTRUCTIONS,
    RESIDENT,
    UNOFFLOADED,
    WRITTEN,
    Instruction,
    compute_instructions,
)

KeptBytes = Mapping[str, Sequence[Sequence[int]]]
"""Kind of kept memory -> by stage and microbatch, its bytes. Where activations are offloaded, `WRITTEN` has what is written of
a microbatch, and `UNOFFLOADED` what all its activations take in memory."""

_LABEL = re.compile(r"(\d*)([A-Z])(\d*)")


class TimelineSpan(NamedTuple):
    """One executed instruction; times in ms since the start of the step. Reductions may overlap compute."""

    instruction: Instruction
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """The instructions that all workers executed in a step, with their times. Tuples are by rank."""

    spans: tuple[tuple[TimelineSpan, ...], ...]
    """A worker's spans, in order of start."""
    names: tuple[str, ...]
    """The worker's name as text."""
    makespan_ms: float
    """Time from the first start to the last end."""
    busy_ms: tuple[float, ...]
    """Time in compute instructions; communication, reduction, vote and optimizer count as idle."""
    peak_activations: tuple[float, ...]
    """Most activations alive at once, in microbatches through all of a worker's chunks (a chunk counts 1/v).

    A microbatch counts from its forward until its `Backward` or `BackwardWeight` is over.
    """
    peak_bytes: tuple[int, ...] | None = None
    """Most bytes kept for backward passes at once, of all kinds; None if sizes are unknown."""
    peak_kept: tuple[Mapping[str, int], ...] | None = None
    """Kind of kept memory -> its bytes at that moment; None if sizes are not known by kind."""

    @staticmethod
    def from_spans(
        spans_by_rank: Sequence[Iterable[tuple[str | Instruction, float, float]]], names: Sequence[str] = ()
    ) -> Timeline:
        """The timeline of a measured step. `spans_by_rank`: (instruction or label, as `1F0`, start, end), in ms on one clock.

        The earliest start becomes 0. Raises `ScheduleError` for a label that is no instruction.
        """
        rows = [
            sorted(
                (TimelineSpan(parse_instruction(i) if isinstance(i, str) else i, a, b) for i, a, b in row),
                key=lambda span: span.start_ms,
            )
            for row in spans_by_rank
        ]
        zero = min((row[0].start_ms for row in rows if row), default=0.0)
        rows = [[TimelineSpan(i, a - zero, b - zero) for i, a, b in row] for row in rows]
        return Timeline(
            spans=tuple(map(tuple, rows)),
            names=tuple(names) or tuple(f"worker {rank}" for rank in range(len(rows))),
            makespan_ms=max((span.end_ms for row in rows for span in row), default=0.0),
            busy_ms=tuple(sum(b - a for i, a, b in row if i.role == "compute") for row in rows),
            peak_activations=tuple(peak_activations([span.instruction for span in row]) for row in rows),
        )

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time over busy time, all workers together: (p-1)/m for a uniform 1F1B pipeline."""
        busy = sum(self.busy_ms)
        return (self._total_ms - busy) / busy if busy else 0.0

    @property
    def bubble_of_total(self) -> float:
        """Idle time over all time, all workers together: (p-1)/(m+p-1) for a uniform 1F1B pipeline."""
        return (self._total_ms - sum(self.busy_ms)) / self._total_ms if self._total_ms else 0.0

    @property
    def utilization(self) -> float:
        """Busy time over all time, all workers together."""
        return sum(self.busy_ms) / self._total_ms if self._total_ms else 0.0

    @property
    def bubbles(self) -> tuple[float, ...]:
        """By rank: idle time over all time."""
        return tuple((self.makespan_ms - busy) / self.makespan_ms if self.makespan_ms else 0.0 for busy in self.busy_ms)

    @property
    def _total_ms(self) -> float:
        return self.makespan_ms * len(self.spans)

    @cached_property
    def stage_noun(self) -> str:
        """What the stages of a worker are called: `chunk` where all have equally many, else `role`, as placements give them."""
        counts = {len({i.stage for i in compute_instructions(span.instruction for span in row)}) for row in self.spans}
        has_roles = len(counts - {0}) > 1 or any("; " in name for name in self.names)
        return "role" if has_roles else "chunk"

    @cached_property
    def chunk_of(self) -> dict[int, int]:
        """Stage -> the index of the chunk that it is on its worker; the largest of several."""
        found: dict[int, int] = {}
        for row in self.spans:
            stages = sorted({i.stage for i in compute_instructions(span.instruction for span in row)})
            found.update((stage, max(index, found.get(stage, 0))) for index, stage in enumerate(stages))
        return found


def peak_activations(
    order: Sequence[Instruction], chunks: int = 0, shares: Mapping[str, Sequence[float]] = MappingProxyType({})
) -> float:
    """The most microbatches alive at once in one worker's order; a chunk counts 1/chunks (0: as many as the order names).

    `shares`: kind of memory that is kept in the place of activations -> by stage, its share of the activations of a microbatch;
    kinds that are left out count as the instructions say.
    """
    stages = {i.stage for i in compute_instructions(order)}
    return _peak(order, [1] * (max(stages, default=0) + 1), shares) / (chunks or len(stages) or 1)


def peak_activation_memory(order: Sequence[Instruction], activation_bytes: Sequence[int]) -> int:
    """The most bytes of activations alive at once in one worker's order; `activation_bytes` [stages], of one microbatch."""
    return int(_peak(order, activation_bytes))


def peak_kept_bytes(order: Sequence[Instruction], sizes: KeptBytes, most_unwritten: Sequence[int] = ()) -> dict[str, int]:
    """Kind of kept memory -> its bytes at the moment when one worker's order keeps the most, all kinds together; `WRITTEN`:
    offloaded activations that are still to be written then.

    `most_unwritten`: by stage, how many bytes of them may be.
    """
    kept = {kind: 0 for kind in sizes if kind != UNOFFLOADED}
    peak, most = dict(kept), 0
    away: dict[tuple[int, int], int] = {}
    """(stage, microbatch) -> what of its offloaded activations is not read yet: in a file, or on its way to it."""
    stages = {i.stage for i in compute_instructions(order)}
    limit = max((most_unwritten[stage] for stage in stages), default=0) if most_unwritten else 0

    def note() -> None:
        nonlocal peak, most
        if away or WRITTEN in kept:
            kept[WRITTEN] = min(limit, sum(away.values()))
        total = sum(kept.values())
        if total > most:
            peak, most = dict(kept), total

    for instruction in compute_instructions(order):
        if not instruction.allocates and not instruction.frees:
            continue
        key = stage, microbatch = instruction.stage, instruction.microbatch
        if key in away and ACTIVATIONS in instruction.frees:  # inside the backward, which reads the rest
            kept[FETCHED] = sizes[FETCHED][stage][microbatch]
            away[key] -= min(away[key], kept[FETCHED])
            note()
            kept[FETCHED] = 0
            del away[key]
        before = sum(kept.values())
        for kind in instruction.frees:
            kept[kind] -= sizes[kind][stage][microbatch]
        for kind in instruction.allocates:
            kept[kind] += sizes[kind][stage][microbatch]
        if RESIDENT in instruction.allocates:
            away[key] = sizes[WRITTEN][stage][microbatch]
        elif RESIDENT in instruction.frees:
            away[key] -= min(away[key], sum(kept.values()) - before)
        note()
    return peak


def _peak(
    order: Sequence[Instruction], size: Sequence[int], shares: Mapping[str, Sequence[float]] = MappingProxyType({})
) -> float:
    alive: float = 0
    peak: float = 0
    offloaded: set[tuple[int, int]] = set()
    for instruction in compute_instructions(order):
        change: float = instruction.held_change
        for kind, by_stage in shares.items():
            change += by_stage[instruction.stage] * ((kind in instruction.allocates) - (kind in instruction.frees))
        if RESIDENT in instruction.allocates:
            offloaded.add((instruction.stage, instruction.microbatch))
        elif FETCHED in shares and (instruction.stage, instruction.microbatch) in offloaded:
            less = 1 - shares[FETCHED][instruction.stage]  # a backward has no more than two layers' at a time
            change -= less * ((ACTIVATIONS in instruction.allocates) - (ACTIVATIONS in instruction.frees))
        if change:
            alive += change * size[instruction.stage]
            if alive > peak:
                peak = alive
    return peak


def parse_instruction(label: str) -> Instruction:
    """The instruction whose text is `label`. Raises `ScheduleError` if there is none, or it takes no time (messages, frees)."""
    match = _LABEL.fullmatch(label)
    kind = INSTRUCTIONS.get(match[2]) if match is not None else None
    if match is not None and kind is not None and kind.drawing is not None:
        places = [int(number) for number in (match[1], match[3]) if number]
        found = kind(*places) if is_dataclass(kind) and len(places) == len(fields(kind)) else None
        if found is not None and str(found) == label:
            return found
    raise ScheduleError(f"{label!r} is no instruction", cure="write stage, letter, microbatch: 1F0, 1B0, 1I0 or 1W0")
