"""Which rows each shard holds, needs and sends, where layers are cut along a spatial dim: the height of images, or the width.

*Rows* are the indices of that dim. Whatever made a value, its rows are shared out evenly, so values of one size are cut alike.
A shard makes its rows of an output from the rows of the input that these read. Those that it has not got (the *halo*) come from
the shards before and behind it. In a backward pass rows of the output's gradient travel likewise: those that the shard's rows
of the input are read by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from raypar.errors import ModelError
from raypar.plan.shard_ranges import (
    IndexRange,
    IndexRanges,
    count_indices,
    even_ranges_by_shard,
    intersect_ranges,
    merge_ranges,
)


@dataclass(frozen=True, slots=True)
class Window:
    """The reads of a convolution or pooling: output row o reads `kernel` rows, `dilation` apart, from o * stride - before on.

    Runs are not limited to the rows that there are.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    """Rows of padding above the first one."""
    after: int = 0
    """Rows of padding below the last one."""

    @property
    def extent(self) -> int:
        """Rows from the first to the last one that an output row reads."""
        return (self.kernel - 1) * self.dilation + 1

    def outputs(self, rows: int, *, ceil_mode: bool = False) -> int:
        """Number of output rows. `ceil_mode`: a last window may begin inside of the rows and end outside, as PyTorch has it."""
        room = rows + self.before + self.after - self.extent
        if not ceil_mode:
            return room // self.stride + 1
        found = -(-room // self.stride) + 1
        return found - ((found - 1) * self.stride >= rows + self.before)

    def reads(self, start: int, stop: int) -> IndexRange:
        """The run of input rows that the output rows [start, stop), at least one, read."""
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.extent

    def readers(self, start: int, stop: int) -> IndexRange:
        """The run of output rows that may read one of the input rows [start, stop); empty, or more than do, where rows are
        left out between those that are read."""
        first = -(-(start + self.before - self.extent + 1) // self.stride)
        return first, max(first, (stop - 1 + self.before) // self.stride + 1)


@dataclass(frozen=True, slots=True)
class Enlargement:
    """The reads of an interpolation: `factor` output rows for each row, which read it and `margin` rows on both sides."""

    factor: int
    margin: int

    def reads(self, start: int, stop: int) -> IndexRange:
        """See `Window.reads`."""
        return start // self.factor - self.margin, (stop - 1) // self.factor + 1 + self.margin

    def readers(self, start: int, stop: int) -> IndexRange:
        """See `Window.readers`."""
        return (start - self.margin) * self.factor, (stop + self.margin) * self.factor


RowReads = Window | Enlargement
"""Which rows of its input a layer's output rows read."""


@dataclass(frozen=True)
class RowExchange:
    """Rows of one value that shards get from each other."""

    rows: int
    """Rows of the whole value."""
    needed: tuple[IndexRanges, ...]
    """By shard: the rows that it needs."""

    @cached_property
    def held(self) -> tuple[IndexRange, ...]:
        """By shard: its run of rows."""
        return even_rows(self.rows, len(self.needed))

    def sent(self, source: int, dest: int) -> IndexRanges:
        """The rows that one shard sends to another."""
        return () if source == dest else intersect_ranges((self.held[source],), self.needed[dest])

    @cached_property
    def moves_rows(self) -> bool:
        """Whether any shard sends rows to another."""
        shards = range(len(self.needed))
        return any(self.sent(source, dest) for source in shards for dest in shards)

    def rows_sent_by(self, shard: int) -> int:
        """How many rows one shard sends, to all others together."""
        return sum(count_indices(self.sent(shard, dest)) for dest in range(len(self.needed)))

    def why_not_from_neighbours(self) -> str | None:
        """What a shard needs that the shards before and behind it have not got; None if nothing."""
        shards = len(self.needed)
        for shard, needed in enumerate(self.needed):
            for source in range(shards):
                around = len(needed) > 1 and (source - shard) % shards in (1, shards - 1)  # circular padding
                if abs(source - shard) <= 1 or around or not self.sent(source, shard):
                    continue
                (start, stop), (first, last) = self.held[shard], (needed[0][0], needed[-1][1])
                above, below = max(0, start - first), max(0, last - stop)
                side, halo, other = ("above", above, shard - 1) if above >= below else ("below", below, shard + 1)
                a, b = self.held[other % shards]
                return (
                    f"shard {shard} of {shards} has the rows [{start}, {stop}) of {self.rows} and needs {halo} {side} them, of "
                    f"which the shard next to it has {b - a}: the halo is larger than a part"
                )
        return None


def even_rows(rows: int, shards: int) -> tuple[IndexRange, ...]:
    """By shard: its run of rows; (0, 0) where it has none."""
    return tuple(ranges[0] if ranges else (0, 0) for ranges in even_ranges_by_shard(rows, shards))


class RowPlan(NamedTuple):
    """What shards exchange for one layer on values of one size."""

    forward: RowExchange
    """Rows of the input, for output rows."""
    backward: RowExchange
    """Rows of the output's gradient, for rows of the input's."""
    outputs: tuple[IndexRange, ...]
    """By shard: the output rows that it computes, some of which may be others' rows, computed for the gradient's sake."""


def rows_within(run: IndexRange, rows: int) -> IndexRange:
    """What there is of a run; (0, 0) if nothing."""
    start, stop = max(0, run[0]), min(rows, run[1])
    return (start, stop) if start < stop else (0, 0)


@lru_cache(maxsize=1024)
def plan_linear(reads: RowReads, rows: int, outputs: int, shards: int) -> RowPlan:
    """The exchange of a layer whose input gradient follows from that of its output alone: a convolution, a mean."""
    forward = tuple(merge_ranges([rows_within(reads.reads(*own), rows)]) for own in even_rows(outputs, shards))
    backward = tuple(merge_ranges([rows_within(reads.readers(*own), outputs)]) for own in even_rows(rows, shards))
    return RowPlan(RowExchange(rows, forward), RowExchange(outputs, backward), even_rows(outputs, shards))


@lru_cache(maxsize=1024)
def plan_transposed(window: Window, rows: int, outputs: int, shards: int) -> RowPlan:
    """The exchange of a transposed convolution, `window` being that of the convolution of which it is the gradient."""
    mirrored = plan_linear(window, outputs, rows, shards)
    return RowPlan(mirrored.backward, mirrored.forward, even_rows(outputs, shards))


@lru_cache(maxsize=1024)
def plan_with_values(reads: RowReads, rows: int, outputs: int, shards: int) -> RowPlan:
    """The exchange of a layer whose backward pass runs on its own input, as of a maximum: each shard computes all output rows
    that read one of its rows, beside its own."""
    computed = []
    for own, held in zip(even_rows(outputs, shards), even_rows(rows, shards), strict=True):
        first, last = rows_within(reads.readers(*held), outputs)
        computed.append((min(own[0], first), max(own[1], last)) if first < last else own)
    forward = tuple(merge_ranges([rows_within(reads.reads(*run), rows)]) for run in computed)
    backward = tuple(merge_ranges([run]) for run in computed)
    return RowPlan(RowExchange(rows, forward), RowExchange(outputs, backward), tuple(computed))


@lru_cache(maxsize=1024)
def plan_copies(source: tuple[int, ...], rows: int, shards: int) -> RowPlan:
    """The exchange of a layer each of whose output rows is the input row `source[o]`, or new (-1): padding, slices."""
    outputs = even_rows(len(source), shards)
    forward = tuple(merge_ranges((row, row + 1) for row in source[a:b] if row >= 0) for a, b in outputs)
    backward = tuple(
        merge_ranges((place, place + 1) for place, row in enumerate(source) if a <= row < b) for a, b in even_rows(rows, shards)
    )
    return RowPlan(RowExchange(rows, forward), RowExchange(len(source), backward), outputs)


def check_row_plan(what: str, plan: Callable[[int], RowPlan], rows: int, outputs: int, shards: int) -> RowPlan:
    """`plan(shards)`. Raises `ModelError` where a shard would have no rows, or needs rows that no neighbour of it has.

    `what`: the operation, for messages.
    """
    for size, which in ((rows, "reads"), (outputs, "makes")):
        if shards > size:
            raise ModelError(
                f"{what} {which} {size} rows for {shards} shards: some would have none",
                cure=f"set plan.shards <= {max(size, 1)} (or virtual_shards, if it is given), or give the layers before it the "
                "style spatial-gathered, and this one whole (plan.styles)",
            )
    found = plan(shards)
    why = _why_impossible(found)
    if why is not None:
        fitting = [fewer for fewer in range(2, shards) if _why_impossible(plan(fewer)) is None]
        fewer = f"set plan.shards: {fitting[-1]} (or virtual_shards, if it is given), " if fitting else ""
        raise ModelError(
            f"{what} cannot be cut into {shards} parts: {why}",
            cure=f"{fewer}{'or ' * bool(fewer)}give it the style whole, and the last layer before it spatial-gathered "
            "(plan.styles)",
        )
    return found


def _why_impossible(plan: RowPlan) -> str | None:
    return plan.forward.why_not_from_neighbours() or plan.backward.why_not_from_neighbours()


def padded_rows(rows: int, before: int, after: int, mode: str) -> tuple[int, ...]:
    """By row of a padded value: which row it is, -1 for a constant. Modes as of `F.pad`; negative padding leaves rows out."""

    def source(place: int) -> int:
        if 0 <= place < rows:
            return place
        if mode == "replicate":
            return min(max(place, 0), rows - 1)
        if mode == "circular":
            return place % rows
        if mode == "reflect":
            return -place if place < 0 else 2 * (rows - 1) - place
        return -1

    return tuple(source(place) for place in range(-before, rows + after))


def copied_runs(source: Sequence[int], needed: IndexRanges) -> list[int]:
    """The positions of rows among the `needed` ones, ascending and without gaps between runs; -1 stays."""
    place, count = dict[int, int](), 0
    for start, stop in needed:
        place.update(zip(range(start, stop), range(count, count + stop - start), strict=True))
        count += stop - start
    return [-1 if row < 0 else place[row] for row in source]
