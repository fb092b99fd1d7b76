"""Gathers parameters from the replicas that own them, where replicas divide state: after each step, before the next use.

Whole parameters are a cache. A step changes an owner's runs; what the others have is stale from then on, until the gather that
follows is finished. Only `WorkerCore.routine` and `WorkerCore.validation_routine` read caches, and both finish it first;
checkpoints, mirrors and moves of state read owners' runs. So a worker that is lost in between leaves nothing that anybody
would compute with: the next generation takes the state from its owners, and gathers anew.

Where replicas divide parameters (ZeRO stage 3) the cache is freed after its last use in a step, and the next gather brings it
back, also after a step that was skipped. Where they gather for each use (`plan.gather: microbatch`, `layer`) there is no cache
between uses: `layer_gather.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypar.comm.routine import Routine, RoutineWait, StreamWaits
from raypar.comm.transport import Handle, Transport
from raypar.plan.ownership import OwnedRun
from raypar.plan.stage_plan import StagePlan
from raypar.schedule.instructions import INPUT_GRADIENTS, VALUES, Compute, Program, compute_instructions
from raypar.torch_compat.multi_tensor import copy_all
from raypar.worker.stage.layer_tensors import LayerPass
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage
from raypar.worker.stage.tensors_without_memory import view_of_run
from raypar.worker.step.gathered_memory import GatheredMemory
from raypar.worker.step.layer_gather import LayerGather
from raypar.worker.step.parameter_requests import IN_PLACE_BYTES
from raypar.worker.step.transient_parameters import GatheredBytes

PACKED_BYTES = 2 << 20
"""About the size of a message in which small runs travel together."""
WINDOW_BYTES = 8 << 20
"""About how much of a stage is on its way at once: packed messages take so much memory, and so do those in memory of the
transport that come to a replica which has not begun to gather."""


@dataclass(frozen=True)
class GatherRound:
    """One message of each owner to the other replicas of a stage that do not hold what it owns."""

    views: tuple[tuple[Tensor, ...], ...]
    """By replica: the runs that it sends, flat, where they lie here."""
    packed: bool
    """Whether they travel together, in a buffer; else each replica has one run at most, which travels in place."""

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return sum(view.nbytes for views in self.views for view in views)


def gather_rounds(tensors: Mapping[str, Tensor], runs: Sequence[Sequence[OwnedRun]]) -> list[GatherRound]:
    """The rounds that bring all `runs` (by replica) of these tensors to everybody: large runs first, in place, tensor by
    tensor; then small ones, packed, of one dtype each. The same on all replicas."""
    flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
    large: dict[str, list[list[Tensor]]] = {}
    small: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for replica, own in enumerate(runs):
        for name, start, stop in own:
            view = view_of_run(flat[name], start, stop)
            of_tensor = large.setdefault(name, [[] for _ in runs])
            if view.nbytes >= IN_PLACE_BYTES and not of_tensor[replica]:
                of_tensor[replica].append(view)
            else:
                small.setdefault(view.dtype, []).append((replica, view))
    found = [GatherRound(tuple(map(tuple, views)), packed=False) for views in large.values() if any(views)]
    for same in small.values():
        found += _packed_rounds(same, len(runs))
    return found


def _packed_rounds(runs: Sequence[tuple[int, Tensor]], replicas: int) -> list[GatherRound]:
    found: list[GatherRound] = []
    views: list[list[Tensor]] = [[] for _ in range(replicas)]
    nbytes = 0
    for number, (replica, view) in enumerate(runs, 1):
        views[replica].append(view)
        nbytes += view.nbytes
        if nbytes >= PACKED_BYTES or number == len(runs):
            found.append(GatherRound(tuple(map(tuple, views)), packed=True))
            views, nbytes = [[] for _ in range(replicas)], 0
    return found


def gather_operation(place: StagePlan) -> str:
    """The collective with which the replicas of a stage gather: who holds what another one owns, gets nothing."""
    return "all_gather" if place.zero_holders == 1 else "all_to_all"


@dataclass
class StageGather:
    """The gather of one stage, or of one virtual shard of it."""

    transport: Transport
    """Connects the replicas."""
    group: tuple[int, ...]
    """Their ranks, ascending."""
    channel: int
    """That of the reduction of their gradients, whose all-gathers are over when these begin."""
    rounds: Sequence[GatherRound]
    """The rounds, in the order in which all replicas post them."""
    holders: int = 1
    """How many replicas hold each run: its owner, who sends it, and those that follow, who do not need it."""
    memory: GatheredMemory | None = None
    """The memory of the whole parameters, if it is freed after their last use."""
    is_stale: bool = False
    """Whether the whole parameters are older than their owners' runs, or not there. Replicas of the stage agree on it, whatever
    other stages they have: all of them gather."""
    _begun: bool = False
    """Whether the gather that makes them whole again is on its way."""
    _next: int = 0
    """The first round that is not posted."""
    _posted: deque[tuple[GatherRound, list[Tensor], Handle]] = field(default_factory=deque)
    """Rounds on their way, oldest first, and by replica what is sent or received."""

    def mark_stale(self) -> None:
        """Note that owners have changed their runs, or that only these were filled: the next use gathers."""
        self.is_stale, self._begun = True, False

    def free(self) -> None:
        """Free the whole parameters after their last use in a step, if their memory comes and goes."""
        if self.memory is not None:
            self.memory.free()
            self.mark_stale()

    def begin(self) -> None:
        """Post as many rounds as may be on their way, unless the parameters are whole, or will be."""
        if not self.is_stale or self._begun:
            return
        self._begun = True
        if self.memory is not None:
            self.memory.fill()
        self._next = 0
        self._posted.clear()
        self._post()

    def _post(self) -> None:
        while self._next < len(self.rounds):
            each = self.rounds[self._next]
            if self._posted and sum(posted.nbytes for posted, _, _ in self._posted) + each.nbytes > WINDOW_BYTES:
                return
            own = self.group.index(self.transport.rank)
            pieces = self._pieces(each, own)
            handle = self._exchange(pieces, own)
            self._posted.append((each, pieces, handle))
            self._next += 1

    def _exchange(self, pieces: list[Tensor], own: int) -> Handle:
        if self.holders == 1:
            return self.transport.all_gather(pieces, pieces[own], group=self.group, channel=self.channel)
        nothing = pieces[own].new_empty(0)
        sent = [nothing if self._holds(replica, own) else pieces[own] for replica in range(len(self.group))]
        sent[own] = pieces[own]
        return self.transport.all_to_all(pieces, sent, group=self.group, channel=self.channel)

    def _holds(self, replica: int, owner: int) -> bool:
        return (replica - owner) % len(self.group) < self.holders

    def _pieces(self, each: GatherRound, own: int) -> list[Tensor]:
        some = next(view for views in each.views for view in views)
        needed = [owner == own or not self._holds(own, owner) for owner in range(len(self.group))]
        if not each.packed:
            return [views[0] if views and need else some.new_empty(0) for views, need in zip(each.views, needed, strict=True)]
        sizes = [sum(view.numel() for view in views) * need for views, need in zip(each.views, needed, strict=True)]
        pieces = [some.new_empty(size) for size in sizes]
        _copy(_split(pieces[own], each.views[own]), each.views[own])
        return pieces

    def finish(self, stream_waits: StreamWaits, what: str) -> Routine[None]:
        """Wait until everything has arrived, and put it in its place."""
        while self._posted:
            each, pieces, handle = self._posted[0]
            if not handle.done():
                yield RoutineWait(handle, what, on_stream=True)
            stream_waits.add(handle, what)
            self._posted.popleft()
            if each.packed:
                for rank, views, piece in zip(self.group, each.views, pieces, strict=True):
                    if rank != self.transport.rank and piece.numel():
                        _copy(views, _split(piece, views))
            self._post()
        self.is_stale = self._begun = False


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    if to:
        copy_all(to, source)


def _split(piece: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    return list(piece.split([view.numel() for view in views])) if views else []


@dataclass
class ParameterGather:
    """One worker's part of all gathers, while a plan lasts."""

    stages: Mapping[ShardOfStage, StageGather]
    """By stage, of those whose replicas divide state and gather once a step."""
    layers: Mapping[ShardOfStage, LayerGather] = field(default_factory=dict)
    """By stage, of those whose parameters come for each use and go after it."""
    gathered_bytes: GatheredBytes = field(default_factory=GatheredBytes)
    """Of what these have in memory."""
    stream_waits: StreamWaits = field(default_factory=StreamWaits)
    """What only the stream waits for."""
    _uses: deque[Compute] = field(default_factory=deque)
    """What is still to be computed in this pass with parameters that come layer by layer, in order."""

    def mark_stale(self) -> None:
        """See `StageGather.mark_stale`."""
        for stage in self.stages.values():
            stage.mark_stale()

    def free(self, index: int) -> None:
        """See `StageGather.free`; of parameters that come for a use: end the uses of this pass. `index`: of the stage."""
        for gather in self._of_stage(index):
            gather.end_pass()
        for (of_stage, _), stage in self.stages.items():
            if of_stage == index:
                stage.free()

    def comes_and_goes(self, index: ShardOfStage) -> bool:
        """Whether a stage's whole parameters have memory only from a gather until their last use."""
        return index in self.layers or (index in self.stages and self.stages[index].memory is not None)

    def begin(self) -> None:
        """Begin to gather what owners have changed. Ends without waiting."""
        for stage in self.stages.values():
            stage.begin()

    def finish(self) -> Routine[None]:
        """Wait until the parameters are whole: before each use of them."""
        self.begin()
        for index, stage in self.stages.items():
            yield from stage.finish(self.stream_waits, f"the parameters of stage {index[0]} from their owners")

    # -- parameters that come for a use ------------------------------------------------------------------------------------

    def begin_pass(self, program: Program) -> None:
        """Begin a step, or a pass over validation data: ask for what it begins with. Ends without waiting."""
        if not self.layers:
            return
        uses = [i for i in compute_instructions(program) if i.needs_weights]
        stages = {i.stage for i in uses}
        self._uses = deque(i for i in uses if self._first_layers(i))
        for (index, _), gather in self.layers.items():
            gather.begin_pass(asks=index in stages)
        self.gathered_bytes.most = self.gathered_bytes.now
        for gather, layer in self._next_layers():
            gather.ask_for_layer(layer)

    def serve(self, index: int, reader: int) -> None:
        """Give another replica of a stage what this worker owns of its parameters, whenever that asks in this pass."""
        for gather in self._of_stage(index):
            gather.requests.serve(reader)

    def ask(self, index: int) -> None:
        """Ask for the whole parameters of a stage, for what this worker computes with them next. Ends without waiting."""
        for gather in self._of_stage(index):
            gather.ask_for_all()

    def use(self, instruction: Compute) -> Routine[None]:
        """Wait for the parameters that a computation needs before it begins; inside of it layers wait for theirs."""
        gathers = self._of_stage(instruction.stage)
        if not any(gather.by_layer for gather in gathers):
            for gather in gathers:
                yield from gather.wait_for_all()
            return
        if self._uses and self._uses[0] == instruction:
            self._uses.popleft()
        following = self._next_layers()
        for gather in gathers:
            own = [(other, layer) for other, layer in following if other is gather]
            elsewhere = [] if gather is not gathers[0] else [each for each in following if each[0] not in gathers]
            gather.goes_on_with(own + elsewhere)

    def release(self, index: int) -> None:
        """Free the whole parameters of a stage until they are gathered again."""
        for gather in self._of_stage(index):
            gather.free_all()

    def close(self) -> None:
        """Let go of what a pass that was not ended has under way."""
        self._uses.clear()
        for gather in self.layers.values():
            gather.close()

    def end_pass(self) -> None:
        """End the uses of all stages in a pass."""
        for gather in self.layers.values():
            gather.end_pass()

    def finish_serving(self) -> Routine[None]:
        """Wait until the others have ended theirs: this worker may change what it owns."""
        for (index, _), gather in self.layers.items():
            for handle in gather.requests.serving:
                if not handle.done():
                    yield RoutineWait(handle, f"the other replicas of stage {index} to end their uses of its parameters")

    def gather_everything(self) -> Routine[None]:
        """Have whole parameters of all stages until the next pass: all workers at once, outside of passes."""
        yield from self.finish()
        for gather in self.layers.values():
            gather.begin_pass(asks=True)
            for reader in gather.requests.served:
                gather.requests.serve(reader)
            gather.ask_for_all()
            gather.requests.end()
        for gather in self.layers.values():
            yield from gather.wait_for_all()
        yield from self.finish_serving()

    def _of_stage(self, index: int) -> list[LayerGather]:
        return [gather for (of_stage, _), gather in self.layers.items() if of_stage == index]

    def _next_layers(self) -> list[tuple[LayerGather, int]]:
        """The first layers of what is computed next, where parameters come layer by layer."""
        return self._first_layers(self._uses[0]) if self._uses else []

    def _first_layers(self, instruction: Compute) -> list[tuple[LayerGather, int]]:
        """The first layers of an instruction, where parameters come layer by layer."""
        kind = _layer_pass(instruction)
        gathers = [gather for gather in self._of_stage(instruction.stage) if gather.by_layer]
        found = [(gather, gather.first_layer(kind)) for gather in gathers]
        return [(gather, layer) for gather, layer in found if layer is not None]


def _layer_pass(instruction: Compute) -> LayerPass:
    """In which way an instruction goes through the layers."""
    return "forward" if VALUES in instruction.makes else "backward" if INPUT_GRADIENTS in instruction.makes else "recompute"
