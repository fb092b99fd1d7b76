"""Parameters of a stage on request: readers ask the replicas that own them, which answer without computing.

Replicas may use a stage different numbers of times, so these are no collectives. At the begin of a pass an owner posts one
operation for each reader: it receives a request, sends what it owns of the parameters that the request names, and receives the
next one, until the reader has no more. The transport's own thread carries it on. Requests bound what is in memory: a reader
asks for no more than it has room for. What owners have does not change before all have voted, thus after the last request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.comm.operation_phase import OperationPhase, Phases, Tagged
from raypar.comm.transport import GATHER_CHANNELS, Handle, Transport
from raypar.plan.ownership import OwnedRun
from raypar.torch_compat.multi_tensor import copy_all

IN_PLACE_BYTES = 128 << 10
"""Runs of this size and more travel from and to where they lie, each as a message of its own."""
_REQUEST, _PARAMETERS = 0, 1
"""Tags of messages; equal ones match in order."""
_NO_MORE = -1
"""The last request of a pass."""


class RunsOfMessage(NamedTuple):
    """What one message has: a run, where it lies, or several of one dtype, one after the other."""

    runs: tuple[OwnedRun, ...]
    dtype: torch.dtype
    """In which layers compute with them."""

    @property
    def elements(self) -> int:
        """Number of elements of all runs."""
        return sum(run.stop - run.start for run in self.runs)


def cut_into_messages(runs: Sequence[OwnedRun], dtypes: Mapping[str, torch.dtype]) -> list[RunsOfMessage]:
    """The messages of these runs, the same on both ends: large runs alone, small ones together. `dtypes`: by parameter, in
    which layers compute with it."""
    found: list[RunsOfMessage] = []
    small: dict[torch.dtype, list[OwnedRun]] = {}
    for run in runs:
        dtype = dtypes[run.name]
        if (run.stop - run.start) * dtype.itemsize >= IN_PLACE_BYTES:
            found.append(RunsOfMessage((run,), dtype))
        else:
            small.setdefault(dtype, []).append(run)
    return found + [RunsOfMessage(tuple(of), dtype) for dtype, of in small.items()]


@dataclass
class ArrivingParameters:
    """What was asked for and is on its way."""

    handle: Handle
    """Done when all of it has arrived."""
    packed: list[tuple[Tensor, list[Tensor]]]
    """What arrives together, and the places of its runs."""

    def put_in_place(self) -> None:
        """Put what has arrived together in its places."""
        for together, places in self.packed:
            copy_all(places, list(together.split([place.numel() for place in places])))
        self.packed = []


Messages = Sequence[Mapping[int, Sequence[RunsOfMessage]]]
"""By number of a request: rank of an owner -> what it sends."""


@dataclass
class ParameterRequests:
    """One replica's requests of the parameters of a stage (or of one virtual shard of it), and its answers to others'."""

    transport: Transport
    """Connects the replicas."""
    group: tuple[int, ...]
    """Their ranks, ascending."""
    channel: int
    """That of the reduction of their gradients."""
    asked: Messages
    """What this replica gets from each owner."""
    served: Mapping[int, Sequence[Sequence[RunsOfMessage]]]
    """Rank of a reader -> by number of a request: what it gets from this one."""
    owned: Callable[[OwnedRun], Tensor]
    """A run that this replica owns, flat, as it lies here."""
    place: Callable[[OwnedRun], Tensor]
    """Where a run of another one goes."""
    serving: list[Handle] = field(default_factory=list)
    """The operations by which this replica answers in the pass under way."""
    _asks: bool = False
    """Whether this replica may still ask for something in the pass under way."""

    @property
    def owners(self) -> list[int]:
        """The ranks from which this replica gets anything."""
        return sorted({owner for of in self.asked for owner, messages in of.items() if messages})

    def serve(self, reader: int) -> None:
        """Answer what another replica asks for in a pass, until that has no more to ask for. Ends without waiting."""
        if any(self.served.get(reader, ())):
            self.serving.append(self._run(self._answers(reader)))

    def _answers(self, reader: int) -> Phases:
        number: int | None = None
        while number != _NO_MORE:
            request = torch.empty(1, dtype=torch.int64)
            yield OperationPhase(self._sends(reader, number), [(request, reader, _REQUEST)])
            number = int(request)

    def _sends(self, reader: int, number: int | None) -> list[Tagged]:
        """What answers a request; nothing before the first one."""
        messages = () if number is None else self.served[reader][number]
        sends = [(self._sent(message), reader, _PARAMETERS) for message in messages]
        if sends:
            self.transport.ledger.count("gather", sent=sum(tensor.nbytes for tensor, _, _ in sends))
        return sends

    def _sent(self, message: RunsOfMessage) -> Tensor:
        parts = [self.owned(run) for run in message.runs]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(message.dtype)

    def begin(self, *, asks: bool) -> None:
        """Begin a pass. `asks`: whether this replica computes anything in it with the parameters; then owners serve it."""
        self._asks = asks
        self.serving.clear()

    def ask(self, number: int) -> ArrivingParameters | None:
        """Ask the owners for parameters; None if they have none of them. Ends without waiting; memory for all is there."""
        sends: list[Tagged] = []
        recvs: list[tuple[Tensor | None, int, int]] = []
        packed: list[tuple[Tensor, list[Tensor]]] = []
        nbytes = 0
        for owner, messages in self.asked[number].items():
            if not messages:
                continue
            sends.append((torch.tensor([number]), owner, _REQUEST))
            for message in messages:
                places = [self.place(run) for run in message.runs]
                out = places[0]
                if len(places) > 1:
                    out = out.new_empty(message.elements)
                    packed.append((out, places))
                recvs.append((out, owner, _PARAMETERS))
                nbytes += out.nbytes
        if not sends:
            return None
        self.transport.ledger.count("gather", received=nbytes)
        return ArrivingParameters(self._run(_one_phase(OperationPhase(sends, recvs))), packed)

    def end(self) -> None:
        """Tell the owners that this replica asks for nothing more in the pass."""
        if self._asks:
            self._asks = False
            sends = [(torch.tensor([_NO_MORE]), owner, _REQUEST) for owner in self.owners]
            if sends:
                self._run(_one_phase(OperationPhase(sends, ())))

    def _run(self, phases: Phases) -> Handle:
        return self.transport.run_phases(phases, group=self.group, channel=GATHER_CHANNELS + self.channel)


def _one_phase(phase: OperationPhase) -> Phases:
    yield phase
