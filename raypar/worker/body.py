"""A worker's body as the elastic protocol sees it (`elastic.member.Body`), made of a `WorkerCore`.

State travels by name: a parameter and all that the optimizer keeps for it. A piece is a whole parameter, because nothing of
this worker is sliced. What a new plan takes over from this worker's own old stages is not copied.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raypar.comm.transport import Routine, Transport, Wait
from raypar.elastic.holdings import Digest, Piece, WholeParameters
from raypar.elastic.outcome import Outcome
from raypar.elastic.part import Part
from raypar.errors import RayparError
from raypar.model.build import elements_by_layer
from raypar.worker.checkpoint import PARAMETER
from raypar.worker.core import StepReport, ValidationReport, WorkerCore
from raypar.worker.mirror import Kept, Mirror
from raypar.worker.optimizer import load_state, state_of
from raypar.worker.tags import state_tag
from raypar.worker.wires import direct_moves


class WorkerBody:
    """See `elastic.member.Body`. `trace`: keep the next step's spans. `described`: what was built last, for the driver."""

    def __init__(self, core: WorkerCore, worker: int) -> None:
        self.core, self.worker = core, worker
        self.layout = WholeParameters(elements_by_layer(core.graph))
        self.mirror = Mirror()
        self._done = 0
        self._cut_due = False
        self._old: dict[str, Kept] = {}
        """What a former plan left here, still of the same version; dropped with the first step of the new one."""
        self.trace = False
        self.described: dict[str, Any] | None = None

    # -- Body ------------------------------------------------------------------------------------------------------------

    def step(self, step: int, cut: bool = False) -> Routine[StepReport]:
        """Run, vote, apply, take a cut."""
        self._cut_due = cut
        self.core.end.before_vote = self.mirror.finish if cut else None
        report = yield from self.mirror.beside(self.core.routine(step, trace=self.trace))
        if cut:
            self._take_cut(self.core.transport)
        return replace(report, mirror_seconds=self.mirror.spent(), digest=self.mirror.digests.get(step + 1) if cut else None)

    def validate(self) -> Routine[ValidationReport]:
        """One pass."""
        report = yield from self.core.validation_routine(self.applied())
        return report

    def applied(self) -> int:
        """Steps applied to the state held."""
        end = getattr(self.core, "end", None)
        if end is not None and end.finished >= self._done:
            self._done = end.finished + 1
            self._old = {}
        return self._done

    def outcome(self) -> Outcome | None:
        """Of the step that was applied last."""
        return self.core.end.outcome

    def votable(self) -> bool:
        """Whether the reduced gradients of the open step are kept."""
        return bool(self.core.stages) and self.core.end.votable

    def apply_late(self, step: int, outcome: Outcome) -> None:
        """Apply them."""
        assert self.core.end.step == step
        self.core.end.apply_late(outcome)
        if self._cut_due:
            self._take_cut(None)  # the transport is gone; those who applied in time keep the other copies

    def pieces(self) -> tuple[Piece, ...]:
        """All that is held of the state after `applied()` steps."""
        self.applied()
        return tuple(sorted(Piece(name, 0, kept[PARAMETER].numel()) for name, kept in (self._old | self._held()).items()))

    def cuts(self) -> Mapping[int, tuple[Piece, ...]]:
        """What is held of the mirror's cuts."""
        return self.mirror.pieces()

    def digests(self) -> Mapping[int, Digest]:
        """Of the own copies."""
        return self.mirror.digests

    def abort(self, reason: str) -> None:
        """From any thread: every pending wait raises."""
        self.core.abort(reason)

    def adopt(self, order: tuple[Part, Callable[[], Transport]]) -> Routine[None]:
        """Connect, hand over and take over state, then build. Until all has arrived the old part stands as it was."""
        part, connect = order
        base: dict[str, Kept] = {}
        if part.cut:
            base = self.mirror.at(part.done)
        elif not (part.fresh or part.load):
            base = self._old | self._held() if self.applied() == part.done else {}
        self.mirror.leave()
        former, self.core.transport = self.core.transport, None
        if former is not None:
            former.close()
        self.core.transport = transport = connect()  # an abort now means the new one
        received = yield from self._exchange(part, transport, base)
        if part.assignment is None:
            return
        base |= received
        need = self.layout.of(part.assignment.plan, transport.rank)
        values = None
        if not (part.fresh or part.load):
            lacking = [name for name in need if name not in base]
            if lacking:
                raise RayparError(f"worker {self.worker} lacks {lacking[:3]} of the state after {part.done} steps")
            values = {name: base[name][PARAMETER].clone() if part.cut else base[name][PARAMETER] for name in need}
        self.described = self.core.adopt(part.assignment, transport, values=values)
        if part.load:
            self.core.load(Path(part.load))
        elif not part.fresh:
            for index, optimizer in self.core.end.optimizers.items():
                state = {name: _without_parameter(base[name]) for name in self.core.stages[index].parameters}
                load_state(optimizer, {name: kinds for name, kinds in state.items() if kinds})
        self._done, self.core.end.finished = part.done, part.done - 1
        self._old = base
        self.mirror.rank, self.mirror.buddies = transport.rank, part.buddies
        plan = part.assignment.plan
        self.mirror.compared = any(plan.stages[index].replicas > 1 for index in self.core.stages)

    # -- parts -----------------------------------------------------------------------------------------------------------

    def _take_cut(self, transport: Transport | None) -> None:
        done = self.applied()
        self.mirror.take(done, self._held(), transport)

    def _held(self) -> dict[str, Kept]:
        """The state of this worker's stages; not copies."""
        found: dict[str, Kept] = {}
        for index, stage in self.core.stages.items():
            optimizer = self.core.end.optimizers.get(index)
            state = state_of(optimizer) if optimizer is not None else {}
            for name, parameter in stage.parameters.items():
                found.setdefault(name, {PARAMETER: parameter.detach(), **state.get(name, {})})
        return found

    def _exchange(self, part: Part, transport: Transport, base: Mapping[str, Kept]) -> Routine[dict[str, Kept]]:
        """All moves at once. One header a pair of workers says what follows."""
        outgoing: dict[int, list[str]] = {}
        incoming: dict[int, list[str]] = {}
        for move in part.moves:
            if move.source == self.worker:
                outgoing.setdefault(move.dest, []).append(move.piece.name)
            if move.dest == self.worker:
                incoming.setdefault(move.source, []).append(move.piece.name)
        headers = {w: transport.recv(None, source=part.ranks[w], tag=state_tag(0)) for w in incoming}
        sent, direct = [], direct_moves(part)
        for dest, names in outgoing.items():
            tensors: list[Tensor] = []
            lines: list[tuple[str, str, Any]] = []
            for name in names:
                for key, value in base[name].items():
                    if isinstance(value, Tensor):
                        value = value.detach().contiguous()
                        tensors.append(value if (transport.rank, part.ranks[dest]) in direct else value.cpu())
                        lines.append((name, key, None))
                    else:
                        lines.append((name, key, (value,)))
            header = torch.frombuffer(bytearray(pickle.dumps(lines)), dtype=torch.uint8)
            for index, tensor in enumerate([header, *tensors]):
                sent.append(transport.send(tensor, to=part.ranks[dest], tag=state_tag(index)))
        found: dict[str, Kept] = {}
        for source, handle in headers.items():
            yield Wait(handle, f"the list of state from worker {source}")
            lines = pickle.loads(handle.tensor().numpy().tobytes())
            count = sum(value is None for _, _, value in lines)
            handles = iter([transport.recv(None, source=part.ranks[source], tag=state_tag(i + 1)) for i in range(count)])
            for name, key, value in lines:
                if value is not None:
                    found.setdefault(name, {})[key] = value[0]
                    continue
                got = next(handles)
                yield Wait(got, f"{key} of {name} from worker {source}")
                found.setdefault(name, {})[key] = got.tensor()
        for handle in sent:
            yield Wait(handle, "state to be taken")
        return found


def _without_parameter(kept: Kept) -> Kept:
    return {key: value for key, value in kept.items() if key != PARAMETER}
