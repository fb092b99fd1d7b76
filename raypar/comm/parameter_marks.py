"""Tells the replicas of a stage which parameters any of them has marked in a step: one small all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from raypar.comm.routine import Routine, RoutineWait
from raypar.comm.transport import Handle, Transport


class ParameterMarks:
    """The marks of all replicas of a group. `parameters`: how many there are; `channel`: of the all-reduce."""

    def __init__(self, transport: Transport, group: Sequence[int], channel: int, parameters: int) -> None:
        self._transport, self._group, self._channel = transport, group, channel
        self._counts = torch.zeros(parameters, dtype=torch.int32)
        """By parameter: how many replicas mark it."""
        self._mine: Callable[[], Collection[int]] | None = None
        """Returns what this replica marks; None, for all replicas: nothing is marked, and no message is needed."""
        self._posted: Handle | None = None
        """The all-reduce, once it is posted in this step."""

    def begin(self, mine: Callable[[], Collection[int]] | None) -> None:
        """Begin a step. `mine`: returns the indices that this replica marks; None, for all replicas: nothing is marked."""
        self._mine, self._posted = mine, None

    def post(self) -> None:
        """Tell the others, long before anybody asks. Later calls in a step do nothing."""
        if self._mine is not None and self._posted is None:
            self._counts.zero_()
            self._counts[list(self._mine())] = 1
            self._posted = self._transport.all_reduce(self._counts, group=self._group, channel=self._channel)

    def of_all(self) -> Routine[frozenset[int]]:
        """The indices that any replica has marked in this step."""
        if self._posted is None:
            return frozenset()
        if not self._posted.done():
            yield RoutineWait(self._posted, f"which gradients are parts of sums over shards, channel {self._channel}")
        return frozenset(self._counts.nonzero().view(-1).tolist())
