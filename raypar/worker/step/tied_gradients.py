"""Exchanges gradients of tied parameters: each worker that has one gets the gradients of its uses in other stages.

The gradients are reduced over replicas already, and cut as the receiving shard holds the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypar.comm.routine import Routine, RoutineWait, StreamWaits
from raypar.comm.transport import Handle, Transport
from raypar.model.graph import Graph
from raypar.model.tensor_parallel.autograd_collectives import select_ranges
from raypar.plan import MicrobatchRouting, ParallelPlan, TiedParameter
from raypar.plan.shard_ranges import IndexRanges, count_indices, intersect_ranges, positions_of_indices
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.worker.step.message_tags import tie_tag

Uses = Callable[[int, str], Sequence[Tensor | None]]
"""(stage, parameter) -> reduced gradients of the parameter's uses there, in layer order; empty if it is frozen."""
Source = tuple[int, IndexRanges | None]
"""(shard that sends, indices of the cut dim that it sends; None for all that it has)."""


def tied_gradient_senders(
    plan: ParallelPlan, name: str, src: int, dst: int, shard: int, layout: Callable[[int], TensorParallelLayout]
) -> list[Source]:
    """Which shards of stage `src` send which part of a parameter's gradient to one shard of stage `dst`.

    A single shard sends if one has all that is needed. `layout`: number of shards -> how the model is cut.
    """
    givers, takers = plan.stages[src].shards, plan.stages[dst].shards
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
    received_gradients: dict[tuple[str, int], list[Tensor | None]] = field(default_factory=dict)
    """(canonical name, stage of another worker) -> reduced gradients of the uses there, in layer order."""
    _sent: list[tuple[Handle, Tensor]] = field(default_factory=list)
    """The sends of this step, and their tensors."""

    def begin_step(self) -> None:
        """Forget the last step."""
        self.received_gradients.clear()
        self._sent.clear()

    def run(self, step: int, uses: Uses) -> Routine[None]:
        """Send the gradients of this worker's uses to the workers that need them, and fill `received_gradients`."""
        self.received_gradients.clear()
        awaited: list[tuple[str, int, int, list[tuple[Source, Handle]]]] = []
        for index, tie in enumerate(self.ties):
            if any(self._here(stage) for stage in tie.stages):
                self._sent += self._send(step, index, tie, uses)
                awaited += self._receive(step, index, tie, uses)
        for name, src, receiver, handles in awaited:
            for _, handle in handles:
                what = f"the gradient of tied parameter {name} from stage {src}"
                yield RoutineWait(handle, what, on_stream=True)
                self.stream_waits.add(handle, what)
            parts = [(source, handle.tensor()) for source, handle in handles]
            self.received_gradients.setdefault((name, src), []).append(self._joined(name, receiver, parts))

    def finish_sends(self) -> Routine[None]:
        """Wait until all that was sent is taken, before it may be written to: after the votes there is nothing to wait for."""
        while self._sent:
            handle, _ = self._sent[-1]
            if not handle.done():
                yield RoutineWait(handle, "the gradients of tied parameters to be taken")
            self._sent.pop()

    def _here(self, stage: int) -> bool:
        """Whether this worker has the stage."""
        plan = self.routing.plan
        return plan.stages[stage].position == plan.seats[self.rank].position

    def _receivers(self, tie: TiedParameter) -> Iterator[int]:
        """One stage of each pipeline position that has the parameter: its workers receive for all their stages."""
        plan = self.routing.plan
        for position in sorted({plan.stages[s].position for s in tie.stages}):
            yield next(s for s in tie.stages if plan.stages[s].position == position)

    def _send(self, step: int, index: int, tie: TiedParameter, uses: Uses) -> Iterator[tuple[Handle, Tensor]]:
        """Post the sends of one tie: (handle, tensor that must stay alive until then)."""
        plan = self.routing.plan
        seat = plan.seats[self.rank]
        for src in (stage for stage in tie.stages if self._here(stage)):
            for stage in (stage for stage in self._receivers(tie) if not self._here(stage)):
                replicas = range(seat.replica, plan.stages[stage].replicas, plan.stages[src].replicas)
                for shard in range(plan.stages[stage].shards):
                    givers = tied_gradient_senders(plan, tie.name, src, stage, shard, self.layout)
                    for spans in (spans for giver, spans in givers if giver == seat.shard):
                        for use, gradient in enumerate(uses(src, tie.name)):
                            part = torch.empty(0) if gradient is None else self._part(tie.name, src, gradient, spans)
                            tag = tie_tag(step, src, stage, index, use)
                            for replica in replicas:
                                yield self.transport.send(part, to=plan.rank(stage, replica, shard), tag=tag), part

    def _receive(
        self, step: int, index: int, tie: TiedParameter, uses: Uses
    ) -> Iterator[tuple[str, int, int, list[tuple[Source, Handle]]]]:
        """Post the receives of one tie: for each use elsewhere (name, its stage, receiving stage, its parts)."""
        plan = self.routing.plan
        seat = plan.seats[self.rank]
        names = next(names for names in self.graph.ties if names[0] == tie.name)
        number = {layer.name: i for i, layer in enumerate(self.graph.layers)}
        receiver = next(stage for stage in self._receivers(tie) if self._here(stage))
        if not uses(receiver, tie.name):
            return  # frozen: no worker has a gradient of it
        for src in (stage for stage in tie.stages if not self._here(stage)):
            there = plan.stages[src]
            for use in range(sum(there.first <= number[self.graph.layer_of(name)] < there.last for name in names)):
                handles: list[tuple[Source, Handle]] = []
                for source in tied_gradient_senders(plan, tie.name, src, receiver, seat.shard, self.layout):
                    peer = plan.rank(src, seat.replica % there.replicas, source[0])
                    tag = tie_tag(step, src, receiver, index, use)
                    handles.append((source, self.transport.recv(None, source=peer, tag=tag)))
                yield tie.name, src, receiver, handles

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _part(self, name: str, src: int, gradient: Tensor, spans: IndexRanges | None) -> Tensor:
        """The indices `spans` of a gradient that is cut as stage `src` cuts it; None: all of it."""
        if spans is None:
            return gradient
        cut = self.layout(self.routing.plan.stages[src].shards).cuts[name]
        held = cut.indices_by_shard[self.routing.plan.seats[self.rank].shard]
        return select_ranges(gradient, cut.dim, positions_of_indices(held, spans)).contiguous()

    def _joined(self, name: str, receiver: int, parts: list[tuple[Source, Tensor]]) -> Tensor | None:
        """A gradient put together from the parts of several shards; None if it is undefined."""
        first = parts[0][1]
        if first.dim() == 1 and first.numel() == 0:
            return None
        if len(parts) == 1:
            return first
        cut = self.layout(self.routing.plan.stages[receiver].shards).cuts[name]
        needed = cut.indices_by_shard[self.routing.plan.seats[self.rank].shard]
        shape = list(first.shape)
        shape[cut.dim] = count_indices(needed)
        whole = first.new_empty(shape)
        for (_, spans), part in parts:
            assert spans is not None
            at = 0
            for start, stop in positions_of_indices(needed, spans):
                whole.narrow(cut.dim, start, stop - start).copy_(part.narrow(cut.dim, at, stop - start))
                at += stop - start
        return whole
