"""Exchanges gradients of tied parameters: each worker that has one gets the gradients of its uses in other stages.

The gradients are reduced over replicas already. A worker gets of them what it has of the parameter: all of its virtual shard's
slice, or the runs that it holds where replicas divide gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from raypar.comm.routine import Routine, RoutineWait, StreamWaits
from raypar.comm.transport import Handle, Transport
from raypar.model.graph import Graph
from raypar.plan import MicrobatchRouting, TiedParameter
from raypar.plan.ownership import GradientRun, Ownership
from raypar.plan.shard_ranges import IndexRanges, intersect_ranges, matched_ranges, positions_of_indices
from raypar.plan.tied_gradient_transfers import TiedGradientTransfer, has_same_runs, tied_gradient_transfers
from raypar.worker.stage.stage import Stage
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage
from raypar.worker.step.message_tags import tie_tag

Runs = Sequence[Tensor]
"""A gradient: the runs of it that this worker has (`Ownership.gradient_runs`), flat or, where all is one run, in its shape."""
Uses = Callable[[ShardOfStage, str], Sequence[Runs | None]]
"""(stage, parameter) -> reduced gradients of the parameter's uses there, in layer order; empty if it is frozen."""


_Part = tuple[IndexRanges, Handle | Tensor]
"""(elements, what brings them, or has them [n])."""


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A use of a tied parameter elsewhere, whose gradient is on its way."""

    name: str
    """The parameter."""
    source: int
    """The stage of the use."""
    stage: int
    """The stage here for which it comes."""
    taker: int
    """The virtual shard of that."""
    parts: list[_Part]
    """What it is put together from."""


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
    ownership: Ownership
    """Which rank keeps which piece of state."""
    stages: Mapping[ShardOfStage, Stage]
    """This worker's stages, each virtual shard of one by itself."""
    stream_waits: StreamWaits
    """What only the stream waits for."""
    _received: dict[tuple[str, int, int, tuple[GradientRun, ...]], list[Runs | None]] = field(default_factory=dict)
    """(parameter, stage elsewhere, virtual shard here, its runs) -> reduced gradients of the uses there, in layer order."""
    _sent: list[tuple[Handle, Tensor]] = field(default_factory=list)
    """The sends of this step, and their tensors."""
    _transfers_of: dict[str, list[TiedGradientTransfer]] = field(default_factory=dict)
    """Tie -> what this worker sends and receives of its gradients."""
    _held_by: dict[tuple[str, int, int, int], tuple[GradientRun, ...]] = field(default_factory=dict)
    """(parameter, stage, replica, virtual shard) -> see `_held`."""

    def begin_step(self) -> None:
        """Forget the last step."""
        self._received.clear()
        self._sent.clear()

    def run(self, step: int, uses: Uses) -> Routine[None]:
        """Send the gradients of this worker's uses to the workers that need them, and get theirs."""
        self._received.clear()
        awaited: list[_Awaited] = []
        for index, tie in enumerate(self.ties):
            if any(self._here(stage) for stage in tie.stages):
                self._sent += self._send(step, index, tie, uses)
                awaited += self._receive(step, index, tie, uses)
        for each in awaited:
            parts = []
            for elements, handle in each.parts:
                if isinstance(handle, Tensor):
                    parts.append((elements, handle))
                    continue
                what = f"the gradient of tied parameter {each.name} from stage {each.source}"
                yield RoutineWait(handle, what, on_stream=True)
                self.stream_waits.add(handle, what)
                parts.append((elements, handle.tensor()))
            key = each.name, each.source, each.taker, self._runs(each.name, each.stage, each.taker)
            self._received.setdefault(key, []).append(self._joined(each, parts))

    def of_all_stages(self, name: str, stage: ShardOfStage, uses: Uses) -> list[Runs | None]:
        """The gradients of all uses of a tied parameter, in layer order, as the stage has it, after `run`. `uses`: those
        of this worker."""
        (tie,), found = (tie for tie in self.ties if tie.name == name), list[Runs | None]()
        runs = self._runs(name, *stage)
        for source in tie.stages:
            if has_same_runs(self.routing.plan, self._held(name), source, self.rank, stage[1], runs):
                found += uses((source, stage[1]), name)
            else:
                found += self._received.get((name, source, stage[1], runs), ())
        return found

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
        parts: dict[tuple[int, int, int, IndexRanges], Tensor] = {}
        for source, stage, giver, _, sender, receiver, elements in self._transfers(tie):
            if sender != self.rank or receiver == self.rank:
                continue
            for use, runs in enumerate(uses((source, giver), tie.name)):
                part = parts.get((source, giver, use, elements))
                if part is None:
                    part = torch.empty(0) if runs is None else self._part(tie.name, (source, giver), runs, elements)
                    parts[source, giver, use, elements] = part
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
            there, of_taker = plan.stages[source], list(transfers)
            for use in range(sum(there.first <= number[self.graph.layer_of(name)] < there.last for name in names)):
                tag, parts = tie_tag(step, source, stage, index, use), list[_Part]()
                for each in of_taker:
                    if each.sender == self.rank:
                        runs = uses((source, each.giver), tie.name)[use]
                        part = (
                            torch.empty(0) if runs is None else self._part(tie.name, (source, each.giver), runs, each.elements)
                        )
                        parts.append((each.elements, part.clone()))  # the gradients of two stages are scaled apart
                    else:
                        parts.append((each.elements, self.transport.recv(None, source=each.sender, tag=tag)))
                yield _Awaited(tie.name, source, stage, taker, parts)

    def _transfers(self, tie: TiedParameter) -> list[TiedGradientTransfer]:
        """What this worker sends and receives of one tie's gradients. Worked out once for each plan."""
        found = self._transfers_of.get(tie.name)
        if found is None:
            of_all = tied_gradient_transfers(self.routing.plan, tie, self._held(tie.name))
            found = self._transfers_of[tie.name] = [each for each in of_all if self.rank in (each.sender, each.receiver)]
        return found

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _held(self, name: str) -> Callable[[int, int, int], tuple[GradientRun, ...]]:
        """(stage, replica, virtual shard) -> the runs of the parameter of whose gradient there the replica gets totals."""

        def held(stage: int, replica: int, number: int) -> tuple[GradientRun, ...]:
            key = name, stage, replica, number
            if key not in self._held_by:
                runs = self.ownership.gradient_runs(stage, number, replica, name)
                self._held_by[key] = runs
            return self._held_by[key]

        return held

    def _runs(self, name: str, stage: int, number: int) -> tuple[GradientRun, ...]:
        """The runs of a parameter of whose gradient this worker gets totals in one of its stages."""
        return self._held(name)(stage, self.routing.plan.role_in(self.rank, stage).replica, number)

    def _part(self, name: str, stage: ShardOfStage, runs: Runs, elements: IndexRanges) -> Tensor:
        """Some elements of a gradient of a stage here, in their order, [1, n]: a part that is undefined has one dim."""
        dim, found = self.ownership.slowest_dim(name), []
        for (_, _, spans), run in zip(self._runs(name, *stage), runs, strict=True):
            flat = run.view(self.stages[stage].parameters[name].shape).movedim(dim, 0).reshape(-1) if dim else run.view(-1)
            found += [flat[start:stop] for start, stop in positions_of_indices(spans, intersect_ranges(spans, elements))]
        part = found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)
        return part.view(1, -1)

    def _joined(self, use: _Awaited, parts: list[tuple[IndexRanges, Tensor]]) -> Runs | None:
        """A gradient put together from the parts of several workers, run by run; None if it is undefined."""
        if parts[0][1].dim() == 1:
            return None
        found, dim = list[Tensor](), self.ownership.slowest_dim(use.name)
        for start, stop, spans in self._runs(use.name, use.stage, use.taker):
            run = next((part.view(-1) for elements, part in parts if elements == spans), None)
            if run is None:
                run = parts[0][1].new_empty(stop - start)
                for elements, part in parts:
                    both = intersect_ranges(spans, elements)
                    pairs = matched_ranges(positions_of_indices(spans, both), positions_of_indices(elements, both))
                    for (a, b), (c, d) in pairs:
                        run[a:b].copy_(part.view(-1)[c:d])
            if dim:
                shape = list(self.stages[use.stage, use.taker].parameters[use.name].shape)
                shape.insert(0, shape.pop(dim))
                run = run.view(shape).movedim(0, dim).reshape(-1)
            found.append(run)
        return found
