"""Reduction of gradients that are never whole, on a device: a round's messages of a bucket are one all-to-all of all replicas.

All replicas post these in one order, round by round, in each of them bucket by bucket; a replica without a microbatch in a
round receives only, and posts that before its next own one. What fills a message, the exchange, and what adds up follow each
other in the stream of the group's all-to-alls, beside what is computed. The host never waits. A replica that is ahead of the
others has its own stream wait, inside the backward pass, until an earlier message is filled: so gradients that are on their way
take no more than the pool.

An exchange begins when all replicas of its round have come to that, so the waits are those that the deadlock check knows
(`schedule/validate.py`); and a communicator has one operation at a time on the device, as all others have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from raypar.comm.blocking_code_as_routine import wait_for_handle
from raypar.comm.bucket_layout import BucketLayout, BucketRoom, Runs, bucket_layouts
from raypar.comm.buffer_pool import alignment_on
from raypar.comm.gradient_reduction import SLOTS
from raypar.comm.gradient_scatter import ScatterReduction, ScatterStep, segment_bytes, segment_of
from raypar.comm.routine import Routine, RoutineWait
from raypar.comm.transport import Handle

SLOTS_OF_POOL = 4
"""The slots of messages are this part of the pool; gradients that wait to be sent have the rest."""


class DeviceScatterReduction(ScatterReduction):
    """See `ScatterReduction`; `device`: of the gradients."""

    def _cut_into_buckets(
        self, owners: Sequence[Sequence[Runs]], bucket_bytes: int, pool_bytes: int
    ) -> tuple[int, list[BucketLayout]]:
        """(how many messages of a replica may be on their way, the buckets)."""
        room = BucketRoom(pool_bytes // (SLOTS * SLOTS_OF_POOL), (1,) * len(self.group), 1, alignment_on(self.device))
        layouts = bucket_layouts(self.parameters, bucket_bytes, self.device, owners, room=room)
        left = pool_bytes - pool_bytes // SLOTS_OF_POOL
        whole = sum(shape.numel() * dtype.itemsize for shape, dtype in self.parameters)
        microbatches = left // whole if whole else sys.maxsize
        largest = max((layout.nbytes for layout in layouts), default=1)
        return max(SLOTS, microbatches * len(layouts) or left // largest), layouts

    def _make_slots(self, others: Sequence[int]) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
        """See `ScatterReduction._make_slots`."""
        sent = max((layout.nbytes for layout in self.layouts), default=0)
        received = max((segment_bytes(layout, self.own_index) for layout in self.layouts), default=0)
        return self._zeros(sent), {r: self._zeros(received) for r in others}

    def _zeros(self, nbytes: int) -> list[Tensor]:
        return [torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]

    def _new_step(self) -> ScatterStep:
        return _DeviceScatterStep(self)


class _Posted:
    """An all-to-all that is posted."""

    __slots__ = ("added", "exchanged", "filled", "gradients")

    def __init__(self, filled: Handle | None, exchanged: Handle, added: Handle | None, gradients: list[Tensor]) -> None:
        self.filled = filled
        """That this replica's message is filled; None: the host did it."""
        self.exchanged = exchanged
        """The all-to-all itself."""
        self.added = added
        """That all is added up; None: the host has to."""
        self.gradients = gradients
        """What it is filled from, until the stream in which that is computed has waited for it."""


class _DeviceScatterStep(ScatterStep):
    """A step of a `DeviceScatterReduction`."""

    def __init__(self, reduction: ScatterReduction) -> None:
        super().__init__(reduction)
        self._posted: list[_Posted] = []
        """By (round, bucket), in order."""
        self._own_messages: list[_Posted] = []
        """Those of them with a message of this replica."""
        self._folding: list[Callable[[], None]] = []
        """What adds up each."""
        self._added = 0
        """How many the host has added up, where it has to."""
        self._round_of = {m: number for number, of_round in enumerate(reduction.rounds) for m in of_round}
        self._own_rounds = {self._round_of[m] for m in self._own}

    def begin(self) -> None:
        """See `ScatterStep.begin`."""
        self.sums.allocate_totals()
        self._receive_rounds_of_others()

    def send(self, microbatch: int, bucket: int) -> None:
        """See `ScatterStep.send`."""
        ahead = self.messages - self.reduction.ahead
        if ahead >= 0 and (filled := self._own_messages[ahead].filled) is not None:
            filled.wait_on_stream(self.reduction.timeout_s)
            self._own_messages[ahead].gradients = []
        with torch.no_grad():
            self._post(self._round_of[microbatch], bucket, microbatch)
        self._own_messages.append(self._posted[-1])
        if bucket == len(self.reduction.layouts) - 1:
            self._receive_rounds_of_others()

    def _receive_rounds_of_others(self) -> None:
        """Take part in the rounds before the next one in which this replica has a microbatch."""
        buckets = len(self.reduction.layouts)
        while buckets and len(self._posted) < len(self.reduction.rounds) * buckets:
            number, bucket = divmod(len(self._posted), buckets)
            if number in self._own_rounds:
                return
            with torch.no_grad():
                self._post(number, bucket, None)

    def _post(self, number: int, bucket: int, microbatch: int | None) -> None:
        """Post the exchange of a round's messages of a bucket. `microbatch`: this replica's in the round."""
        r, turn = self.reduction, len(self._posted) % SLOTS
        layout, me = r.layouts[bucket], r.own_index
        flat = r.sending[turn][: layout.nbytes].view(layout.dtype)
        nothing = flat[:0]
        of_round = {r.replica_of[m]: m for m in r.rounds[number]}
        size = segment_bytes(layout, me)
        outs = [
            r.receiving[other][turn][:size].view(layout.dtype) if other in of_round and other != me else nothing
            for other in range(len(r.group))
        ]
        bounds = [segment_of(layout, other) for other in range(len(r.group))]
        pieces = [
            flat[start : start + length] if microbatch is not None and other != me else nothing
            for other, (start, length) in enumerate(bounds)
        ]
        gradients = self.gradients_in(layout, microbatch) if microbatch is not None else []
        fill = partial(self.fill, layout, flat, microbatch) if microbatch is not None else _nothing
        group, channel = r.group, r.channel
        filled = r.transport.run_before("all_to_all", fill, group=group, channel=channel, keep=[flat])
        if filled is None:
            self._add_up_to(len(self._posted) - SLOTS)
            fill()
        exchanged = r.transport.all_to_all(outs, pieces, group=group, channel=channel)
        own_start, own_length = bounds[me]
        own = flat[own_start : own_start + own_length]
        arrived = {m: own if replica == me else outs[replica] for replica, m in of_round.items()}
        self._folding.append(partial(self._fold, bucket, arrived))
        added = r.transport.run_after(exchanged, self._folding[-1], group=group, channel=channel, operation="all_to_all")
        self._posted.append(_Posted(filled, exchanged, added, gradients))

    def _fold(self, bucket: int, arrived: dict[int, Tensor]) -> None:
        """Add up a round's messages of a bucket. `arrived`: microbatch -> what this replica owns of its gradients."""
        if bucket in self.reduction.kept:
            with torch.no_grad():
                for microbatch, segment in arrived.items():
                    self.folds[bucket].arrive(microbatch, segment)

    def _add_up_to(self, number: int) -> None:
        """Where the host has to: wait for the exchanges up to one, and add them up."""
        while self._added <= number:
            wait_for_handle(self._posted[self._added].exchanged, self._what(self._added), self.reduction.timeout_s)
            self._add_next()

    def _add_next(self) -> None:
        self._folding[self._added]()
        self._added += 1

    def _what(self, number: int) -> str:
        return f"gradients of other replicas, exchange {number}, channel {self.reduction.channel}"

    def end(self) -> Routine[None]:
        """See `ScatterStep.end`."""
        while self._added < len(self._posted) and (posted := self._posted[self._added]).added is None:
            if not posted.exchanged.done():
                yield RoutineWait(posted.exchanged, self._what(self._added))
            self._add_next()
        last = self._posted[-1].added if self._posted else None
        if last is not None and not last.done():
            what = self._what(len(self._posted) - 1)
            yield RoutineWait(last, what, on_stream=True)
            self.reduction.stream_waits.add(last, what)

    def raise_failure(self) -> None:
        """See `ScatterStep.raise_failure`."""
        for posted in self._posted[-SLOTS:]:
            (posted.added or posted.exchanged).done()


def _nothing() -> None:
    """What fills the message of a replica that sends none."""
