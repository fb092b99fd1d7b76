"""The open sums of gradients at the owner of runs of parameters, which adds gradients as they arrive from all replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.comm.bucket_layout import BucketLayout, Runs
from raypar.comm.buffer_pool import CPU
from raypar.plan.gradient_scatter import StackStep
from raypar.torch_compat.multi_tensor import add_all, copy_all

Run = tuple[int, int]
"""(parameter, number of the run among those that this replica owns of it)."""


class OwnPart(NamedTuple):
    """A part of a bucket that this replica owns."""

    run: Run
    start: int
    stop: int
    """Its elements of the run."""
    offset: int
    """The first one's place in this replica's segment of the bucket."""


class RunSums:
    """Memory of the sums of all runs that this replica owns: one tensor for each run and depth of the stack of open sums.

    Several buckets may have parts of one run, and be at other depths of their stacks: a tensor lives while any part uses it.
    """

    def __init__(self, runs: Mapping[Run, tuple[int, torch.dtype]], device: torch.device = CPU) -> None:
        """`runs`: run -> (its elements, dtype of its sums)."""
        self._runs, self._device = runs, device
        self._tensors: dict[tuple[int, Run], Tensor] = {}
        self._users: Counter[tuple[int, Run]] = Counter()
        """(depth, run) -> elements of it that are in use."""

    def allocate_totals(self) -> None:
        """Allocate what will have the totals now, in the stream of the caller, who reads them later."""
        self._tensors |= {(0, run): self._empty(run) for run in self._runs}

    def _empty(self, run: Run) -> Tensor:
        elements, dtype = self._runs[run]
        return torch.empty(elements, dtype=dtype, device=self._device)

    def take(self, depth: int, parts: Sequence[OwnPart]) -> list[Tensor]:
        """Memory at a depth that parts begin to use, without values."""
        for part in parts:
            key = depth, part.run
            if key not in self._tensors:
                self._tensors[key] = self._empty(part.run)
            self._users[key] += part.stop - part.start
        return self.views(depth, parts)

    def views(self, depth: int, parts: Sequence[OwnPart]) -> list[Tensor]:
        """The sums of parts at a depth, flat."""
        return [self._tensors[depth, part.run][part.start : part.stop] for part in parts]

    def release(self, depth: int, parts: Sequence[OwnPart]) -> None:
        """Parts use the memory at a depth no more."""
        for part in parts:
            key = depth, part.run
            self._users[key] -= part.stop - part.start
            if not self._users[key]:
                del self._tensors[key], self._users[key]

    def total(self, run: Run) -> Tensor:
        """The total of a run, flat: what is left at the bottom of the stacks."""
        return self._tensors[0, run]


class BucketFold:
    """Adds up the gradients of one bucket's segment, round by round, over the tree of blocks.

    The open sums are a stack. What a round brings lies in slots of a pool and is added there; what is on top of the stack when
    the round is over gets memory of its own, so that the slots are free.
    """

    def __init__(self, sums: RunSums, parts: Sequence[OwnPart], steps: Sequence[StackStep], rounds: Sequence[range]) -> None:
        self._sums, self._parts, self._steps = sums, parts, steps
        self._left: Iterator[range] = iter(rounds)
        self._round = next(self._left, None)
        """The round that is not complete; None: all are."""
        self._arrived: dict[int, Tensor] = {}
        """Microbatch -> its gradients of this bucket's segment, in a slot."""
        self._stack: list[Tensor | None] = []
        """The open sums: a segment in a slot, or None for one with memory of its own."""

    @property
    def is_over(self) -> bool:
        """Whether the gradients of all microbatches are added up."""
        return self._round is None

    def arrive(self, microbatch: int, segment: Tensor) -> list[int]:
        """Take the gradients of a microbatch. Returns the microbatches whose slots are free now: those of complete rounds."""
        self._arrived[microbatch] = segment
        freed: list[int] = []
        while self._round is not None and all(m in self._arrived for m in self._round):
            for m in self._round:
                self._add(self._steps[m], self._arrived.pop(m))
            self._leave_slots()
            freed += self._round
            self._round = next(self._left, None)
        return freed

    def _add(self, step: StackStep, segment: Tensor) -> None:
        stack = self._stack
        if step.opens:
            stack.append(segment)
        else:
            self._add_into(len(stack) - 1, segment)
        for _ in range(step.merges):
            right = stack.pop()
            if right is not None:
                self._add_into(len(stack) - 1, right)
            else:
                depth = len(stack)
                add_all(self._sums.views(depth - 1, self._parts), self._sums.views(depth, self._parts))
                self._sums.release(depth, self._parts)

    def _add_into(self, depth: int, segment: Tensor) -> None:
        """Add gradients that lie in a slot to the sum at a depth: left + right."""
        left = self._stack[depth]
        if left is None:
            add_all(self._sums.views(depth, self._parts), self._own_parts(segment))
        else:
            left.add_(segment)

    def _leave_slots(self) -> None:
        for depth, total in enumerate(self._stack):
            if total is not None:
                copy_all(self._sums.take(depth, self._parts), self._own_parts(total))
                self._stack[depth] = None

    def _own_parts(self, segment: Tensor) -> list[Tensor]:
        return [segment[part.offset : part.offset + part.stop - part.start] for part in self._parts]


def own_parts(layout: BucketLayout, replica: int, owned: Sequence[Runs]) -> list[OwnPart]:
    """The parts of a bucket that a replica owns. `owned`: by parameter, the runs of it that the replica owns."""
    assert layout.segments is not None
    first, found = layout.segments[replica][0], []
    for part in layout.parts:
        if part.owner == replica and part.stop > part.start:
            runs = owned[part.parameter]
            number, start = next((n, a) for n, (a, b) in enumerate(runs) if a <= part.start and part.stop <= b)
            found.append(OwnPart((part.parameter, number), part.start - start, part.stop - start, part.offset - first))
    return found
