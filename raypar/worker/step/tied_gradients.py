"""Exchanges gradients of tied parameters: each worker that has one gets the gradients of its uses in other stages.

The gradients are reduced over replicas already, and cut as the receiving shard holds the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.comm.routine import Routine, RoutineWait, StreamWaits
from raypar.comm.transport import Handle, Transport
from raypar.model.graph import Graph
from raypar.model.tensor_parallel.autograd_collectives import select_ranges
from raypar.plan import MicrobatchRouting, ParallelPlan, TiedParameter
from raypar.plan.shard_ranges import IndexRanges, count_indices, intersect_ranges, positions_of_indices
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage
from raypar.worker.step.message_tags import tie_tag

Uses = Callable[[ShardOfStage, str], Sequence[Tensor | None]]
"""(stage, parameter) -> reduced gradients of the parameter's uses there, in layer order; empty if it is frozen."""
Source = tuple[int, IndexRanges | None]
"""(shard that sends, indices of the cut dim that it sends; None for all that it has)."""


_Awaited = tuple[str, int, int, int, list[tuple[IndexRanges | None, Handle]]]
"""A use of a tied parameter elsewhere: (name, its stage, receiving stage and virtual shard, its parts)."""


class TiedGradientTransfer(NamedTuple):
    """What one worker sends another of the gradient of a tied parameter."""

    source: int
    """The stage whose uses the gradient is of."""
    stage: int
    """The stage for which it is received: the receiver's first one with the parameter, whose others take it from there."""
    giver: int
    """The virtual shard of `source` that has it."""
    taker: int
    """The virtual shard of `stage` that needs it."""
    sender: int
    """Rank that sends."""
    receiver: int
    """Rank that receives: it does not have the stage `source`."""
    spans: IndexRanges | None
    """Indices of the cut dim that are sent; None for all that the sender has."""


def tied_gradient_transfers(
    plan: ParallelPlan, tie: TiedParameter, layout: Callable[[int], TensorParallelLayout]
) -> Iterator[TiedGradientTransfer]:
    """All that is sent of one tied parameter's gradients, in an order that all workers share."""
    for source in tie.stages:
        asked = set[int]()
        holder = [shard for shard, run in enumerate(plan.stages[source].runs) for _ in run]
        for stage in tie.stages:
            for replica, row in enumerate(plan.stages[stage].workers):
                senders = plan.stages[source].workers[replica % plan.stages[source].replicas]
                for run, receiver in zip(plan.stages[stage].runs, row, strict=True):
                    if receiver in asked or source in plan.stages_of(receiver):
                        continue
                    asked.add(receiver)
                    for taker in run:
                        for giver, spans in tied_gradient_senders(plan, tie.name, source, stage, taker, layout):
                            yield TiedGradientTransfer(source, stage, giver, taker, senders[holder[giver]], receiver, spans)


def tied_gradient_senders(
    plan: ParallelPlan, name: str, src: int, dst: int, shard: int, layout: Callable[[int], TensorParallelLayout]
) -> list[Source]:
    """Which virtual shards of stage `src` send which part of a parameter's gradient to one of stage `dst`.

    A single shard sends if one has all that is needed. `layout`: number of shards -> how the model is cut.
    """
    givers, takers = plan.stages[src].virtual_shards, plan.stages[dst].virtual_shards
    near = shard % givers
    if givers == takers:
        return [(near, None)]
    there, here = layout(givers).cuts.get(name), layout(takers).cuts.get(name)
    if there is None or here is None:
        return [(near, None)]
    needed = here.indices_by_shard[shard]
    if intersect_ranges(there.indices_by_shard[near], needed) == needed:
        return [(near, needed)]
    shared = [(giver, intersect_ranges(there.owned(giver), needed)) for giver in range(givers)]
    return [(giver, spans) for giver, spans in shared if spans]


@dataclass
class TiedGradientExchange:
    """One worker's part of the exchange of tied parameters' gradients."""

    rank: int
    """This worker's rank."""
    graph: Graph
    """The whole model."""
    routing: MicrobatchRouting
    """The plan, and which replica runs which microbatch."""
    ties: tuple[TiedParameter, ...]
    """Tied parameters of several stages, in an order that all workers share."""
    transport: Transport
    """Connects the workers."""
    layout: Callable[[int], TensorParallelLayout]
    """Number of shards -> how the model is cut over them; asked only where the stages of a tie differ in their number."""
    stream_waits: StreamWaits
    """What only the stream waits for."""
    received_gradients: dict[tuple[str, int, int], list[Tensor | None]] = field(default_factory=dict)
    """(canonical name, stage of another worker, virtual shard here) -> reduced gradients of the uses there, in layer order."""
    _sent: list[tuple[Handle, Tensor]] = field(default_factory=list)
    """The sends of this step, and their tensors."""
    _transfers_of: dict[str, list[TiedGradientTransfer]] = field(default_factory=dict)
    """Tie -> what this worker sends and receives of its gradients."""

    def begin_step(self) -> None:
        """Forget the last step."""
        self.received_gradients.clear()
        self._sent.clear()

    def run(self, step: int, uses: Uses) -> Routine[None]:
        """Send the gradients of this worker's uses to the workers that need them, and fill `received_gradients`."""
        self.received_gradients.clear()
        awaited: list[_Awaited] = []
        for index, tie in enumerate(self.ties):
            if any(self._here(stage) for stage in tie.stages):
                self._sent += self._send(step, index, tie, uses)
                awaited += self._receive(step, index, tie, uses)
        for name, src, receiver, taker, handles in awaited:
            for _, handle in handles:
                what = f"the gradient of tied parameter {name} from stage {src}"
                yield RoutineWait(handle, what, on_stream=True)
                self.stream_waits.add(handle, what)
            parts = [(spans, handle.tensor()) for spans, handle in handles]
            self.received_gradients.setdefault((name, src, taker), []).append(self._joined(name, receiver, taker, parts))

    def finish_sends(self) -> Routine[None]:
        """Wait until all that was sent is taken, before it may be written to: after the votes there is nothing to wait for."""
        while self._sent:
            handle, _ = self._sent[-1]
            if not handle.done():
                yield RoutineWait(handle, "the gradients of tied parameters to be taken")
            self._sent.pop()

    def _here(self, stage: int) -> bool:
        """Whether this worker has the stage."""
        return stage in self.routing.plan.stages_of(self.rank)

    def _send(self, step: int, index: int, tie: TiedParameter, uses: Uses) -> Iterator[tuple[Handle, Tensor]]:
        """Post the sends of one tie: (handle, tensor that must stay alive until then)."""
        parts: dict[tuple[int, int, int, IndexRanges | None], Tensor] = {}
        for source, stage, giver, _, sender, receiver, spans in self._transfers(tie):
            if sender != self.rank:
                continue
            for use, gradient in enumerate(uses((source, giver), tie.name)):
                part = parts.get((source, giver, use, spans))
                if part is None:
                    part = torch.empty(0) if gradient is None else self._part(tie.name, source, giver, gradient, spans)
                    parts[source, giver, use, spans] = part
                # What goes to several virtual shards of one worker has one tag: equal tags match in order.
                yield self.transport.send(part, to=receiver, tag=tie_tag(step, source, stage, index, use)), part

    def _receive(self, step: int, index: int, tie: TiedParameter, uses: Uses) -> Iterator[_Awaited]:
        """Post the receives of one tie, for each use elsewhere."""
        names = next(names for names in self.graph.ties if names[0] == tie.name)
        number = {layer.name: i for i, layer in enumerate(self.graph.layers)}
        plan, first = self.routing.plan, next(stage for stage in tie.stages if self._here(stage))
        if not uses((first, plan.stages[first].run_of(plan.role_in(self.rank, first).shard).start), tie.name):
            return  # frozen: no worker has a gradient of it
        mine = [transfer for transfer in self._transfers(tie) if transfer.receiver == self.rank]
        for (source, stage, taker), transfers in groupby(mine, key=lambda each: (each.source, each.stage, each.taker)):
            there, parts = plan.stages[source], list(transfers)
            for use in range(sum(there.first <= number[self.graph.layer_of(name)] < there.last for name in names)):
                tag = tie_tag(step, source, stage, index, use)
                yield (
                    tie.name,
                    source,
                    stage,
                    taker,
                    [(each.spans, self.transport.recv(None, source=each.sender, tag=tag)) for each in parts],
                )

    def _transfers(self, tie: TiedParameter) -> list[TiedGradientTransfer]:
        """What this worker sends and receives of one tie's gradients. Worked out once for each plan."""
        found = self._transfers_of.get(tie.name)
        if found is None:
            of_all = tied_gradient_transfers(self.routing.plan, tie, self.layout)
            found = self._transfers_of[tie.name] = [each for each in of_all if self.rank in (each.sender, each.receiver)]
        return found

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _part(self, name: str, src: int, giver: int, gradient: Tensor, spans: IndexRanges | None) -> Tensor:
        """The indices `spans` of the gradient of one virtual shard of stage `src`; None: all of it."""
        if spans is None:
            return gradient
        cut = self.layout(self.routing.plan.stages[src].virtual_shards).cuts[name]
        held = cut.indices_by_shard[giver]
        return select_ranges(gradient, cut.dim, positions_of_indices(held, spans)).contiguous()

    def _joined(self, name: str, receiver: int, taker: int, parts: list[tuple[IndexRanges | None, Tensor]]) -> Tensor | None:
        """A gradient put together from the parts of several shards; None if it is undefined."""
        first = parts[0][1]
        if first.dim() == 1 and first.numel() == 0:
            return None
        if len(parts) == 1:
            return first
        cut = self.layout(self.routing.plan.stages[receiver].virtual_shards).cuts[name]
        needed = cut.indices_by_shard[taker]
        shape = list(first.shape)
        shape[cut.dim] = count_indices(needed)
        whole = first.new_empty(shape)
        for spans, part in parts:
            assert spans is not None
            at = 0
            for start, stop in positions_of_indices(needed, spans):
                whole.narrow(cut.dim, start, stop - start).copy_(part.narrow(cut.dim, at, stop - start))
                at += stop - start
        return whole
