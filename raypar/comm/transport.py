"""The protocols of transports, which move tensors between the ranks of one generation, and of the endpoints that connect them.

Written for asynchronous devices: operations return a `Handle` at once. Their buffers must stay alive until the operation is
done, and until then nobody may write to what is sent or read what is received. Nothing but a wait makes the host wait for a
device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from raypar.comm.operation_phase import Phases
from raypar.errors import CommError, CommTimeout, GroupAborted

COLLECTIVES = ("all_reduce", "halving_all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
"""Operations of the transport protocol that move memory and have a group."""

FAST_REDUCTION_CHANNELS, SHARD_CHANNELS, GATHER_CHANNELS = 1 << 32, 1 << 34, 1 << 36
"""First channel of the fast gradient reductions, of the collectives between shards, and of the parameters that replicas give
each other on request; stage s uses this channel + s.

The canonical reduction of stage s uses channel s."""


@dataclass(frozen=True, order=True, slots=True)
class CommunicatorKey:
    """Names one communicator: messages from one rank to another, or one kind of collective of a group on one channel."""

    members: tuple[int, ...]
    """The ranks: (source, destination) of messages, ascending of a collective."""
    operation: str
    """"message", or one of `COLLECTIVES`."""
    channel: int = 0

    def __str__(self) -> str:
        if self.operation == "message":
            return f"messages {self.members[0]} -> {self.members[1]}"
        return f"{self.operation} of {','.join(map(str, self.members))} channel {self.channel}"


class Handle(Protocol):
    """One pending operation, or a batch of them."""

    def done(self) -> bool:
        """Whether the operation has completed; never blocks; raises the operation's error if it has failed."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until done. Raises `GroupAborted`, or `CommTimeout` (naming operation, peer and tag) after `timeout_s`."""

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        """Order work that the caller gives to its current stream from here on behind the operation; in host memory, `wait`.

        The host goes on before the operation is done. What the work computes is invalid if the operation fails, which a later
        `wait` or `done` raises: so ask before the results leave this worker (`comm.routine.StreamWaits`), and before an error
        of the work is taken for its own.
        """

    def tensor(self) -> Tensor:
        """The received tensor (of a completed receive; shape and dtype as sent)."""

    def tensors(self) -> list[Tensor]:
        """The received tensors of a completed batch, in the order of its receives."""


@runtime_checkable
class Transport(Protocol):
    """One rank's connection with all ranks of a generation. Ranks are indices of the plan's seats. Unusable after `abort`.

    A collective is called by all ranks of its `group` (ascending). Calls with the same (operation, group, channel) match in
    the order in which each rank makes them. Calls that differ in one of the three are independent and may overtake: code that
    posts collectives in an order of its own (as gradient buckets become ready) uses a `channel` of its own.
    A posted operation goes on by itself; it needs no other call on this rank to complete.
    """

    rank: int
    size: int
    """Number of ranks in the generation."""
    generation: int
    ledger: CommunicationLedger
    """Counts what this rank sends and receives."""

    def can_share_memory(self, rank: int) -> bool:
        """Whether `rank` is on this machine and its memory can be read in place (`comm.shared_memory`)."""

    def run_before(
        self,
        operation: str,
        work: Callable[[], None],
        *,
        group: Sequence[int],
        channel: int = 0,
        after: Handle | None = None,
        keep: Sequence[Tensor] = (),
    ) -> Handle | None:
        """Enqueue work on a device's memory that begins when the current stream has done what it was given so far, and `after`
        is over, beside what is computed from here on.

        Collectives of this kind (one of `COLLECTIVES`), group and channel that are posted later follow it. `keep`: what the
        work uses, held until it is done. None, and nothing is enqueued, where the host does such work itself.
        """

    def run_after(
        self,
        after: Handle,
        work: Callable[[], None],
        *,
        group: Sequence[int],
        channel: int = 0,
        operation: str = "all_gather",
    ) -> Handle | None:
        """Enqueue work on a device's memory that begins when a collective of this group is over, beside what is computed.

        Collectives of the kind `operation` of the group and channel that are posted later follow it. None, and nothing is
        enqueued, where the host has to wait for the collective; then the caller does the work after that.
        """

    def send(self, tensor: Tensor, *, to: int, tag: int, keep_layout: bool = False) -> Handle:
        """Post a send of a contiguous tensor; messages of one (source, destination) pair match by tag, tags may overtake.

        A message says whether its tensor requires a gradient. `keep_layout`: the tensor may have any strides, and a receive
        without `out` gives a tensor with its strides and its place modulo 64 bytes (`comm.sent_tensor_layout`).
        """

    def recv(self, out: Tensor | None, *, source: int, tag: int) -> Handle:
        """Post the matching receive, into `out`, or into a fresh tensor when `out` is None: 64-byte aligned and contiguous, or
        as the sender's lies.

        The fresh tensor requires a gradient if the one that was sent does.
        """

    def batch(self, sends: Sequence[tuple[Tensor, int, int]], recvs: Sequence[tuple[Tensor | None, int, int]]) -> Handle:
        """Post sends (tensor, to, tag) and receives (out, source, tag) as one group that cannot deadlock with itself."""

    def all_reduce(self, flat: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """Sum `flat` [n] in place over `group`, added over the tree of ranks (`plan/addition_tree.py`)."""

    def halving_all_reduce(self, flat: Tensor, scratch: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """Sum `flat` [n] in place over a group of 2^k ranks, by recursive halving and doubling (`comm.recursive_halving`).

        The i-th rank exchanges messages with the ranks i ^ 1, i ^ 2, i ^ 4, ... of the group only. Adds over the tree of ranks,
        and rounds each sum to the dtype of `flat`, also a short one. `scratch` has room for what one step receives
        (`halving_scratch`).
        """

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """`out` = sum over the group, over the tree of ranks, of everybody's `pieces[my index in group]` (may be ragged)."""

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """`pieces[i]` = `mine` of the group's i-th rank; ragged sizes allowed; `pieces[own]` may be `mine` itself."""

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """`outs[i]` = `pieces[own index]` of the group's i-th rank; `outs[own]` may be `pieces[own]` itself."""

    def broadcast(self, tensor: Tensor, *, root: int, group: Sequence[int], channel: int = 0) -> Handle:
        """`tensor` of rank `root` (a rank, not an index) reaches every rank of the group in place."""

    def run_phases(self, phases: Phases, *, group: Sequence[int], channel: int = 0) -> Handle:
        """Post an operation of the caller's own: messages in host memory, phase after phase.

        Messages match by peer and tag, among those of all such operations of the group and channel. What the generator does
        between phases runs in the thread that completes the last message of one. The caller counts the bytes.
        """

    def barrier(self, *, group: Sequence[int], channel: int = 0) -> Handle:
        """Done once every rank of the group has posted it."""

    def check_alive(self) -> None:
        """Raise `GroupAborted(reason)` after an `abort`, or what else has ended this rank's transport.

        For code that computes for long between two operations, and whose results nobody would take any more.
        """

    def forget_freed_memory(self) -> None:
        """Give the memory of received tensors that are gone back to the system, and that of others once they are."""

    def abort(self, reason: str) -> None:
        """From any thread, at once: every pending and later call on this rank raises `GroupAborted(reason)`."""

    def close(self) -> None:
        """Release sockets, threads and memory; idempotent; pending calls are aborted."""


def generation_over_error(reason: str) -> GroupAborted:
    """The error of every call on a transport that was aborted or closed for this reason."""
    return GroupAborted(reason, cure="this generation is over; connect the next one")


def describe_operation(name: str, rank: int, peers: Sequence[int], generation: int) -> str:
    """An operation, its rank and the peers that it needs, for messages."""
    return f"{name} of rank {rank} with {', '.join(map(str, peers)) or 'nobody'} (generation {generation})"


def check_peer_rank(peer: int, size: int) -> None:
    """Raise `CommError` for a rank that a generation of `size` ranks does not have."""
    if not 0 <= peer < size:
        raise CommError(f"rank {peer} is not in a group of {size} ranks", cure=f"use a rank from 0 to {size - 1}")


def check_collective_group(operation: str, group: Sequence[int], rank: int, size: int) -> None:
    """Raise `CommError` unless `group` is an ascending list of ranks that contains the caller's."""
    members = tuple(group)
    if list(members) != sorted(set(members) & set(range(size))) or rank not in members:
        raise CommError(
            f"{operation} of rank {rank} (of {size}) over group {members}",
            cure="a group is an ascending list of ranks that contains the caller",
        )


def check_power_of_two(operation: str, group: Sequence[int]) -> None:
    """Raise `CommError` unless the group has 2^k ranks."""
    if len(group).bit_count() != 1:
        raise CommError(f"{operation} over {len(group)} ranks", cure="give it a group of 2, 4, 8, ... ranks")


def check_one_tensor_per_rank(operation: str, tensors: Sequence[Tensor], group: Sequence[int]) -> None:
    """Raise `CommError` unless there is one tensor for each rank of the group."""
    if len(tensors) != len(group):
        raise CommError(f"{operation} got {len(tensors)} tensors for a group of {len(group)}", cure="give one for each rank")


def wait_named(handle: Handle, what: str, timeout_s: float | None, *, on_stream: bool = False) -> None:
    """Call `handle.wait`, or `wait_on_stream`; a time-out names `what` was waited for."""
    try:
        (handle.wait_on_stream if on_stream else handle.wait)(timeout_s)
    except CommTimeout as error:
        raise CommTimeout(f"{what}: {error.what}", error.cure) from None


class WorkerEndpoint(Protocol):
    """One worker's listening address, and its way to connect with the other workers of a generation.

    Listens from its creation (`listen` of each class) until `close`. At most one `connect` runs at a time.
    """

    @property
    def address(self) -> str:
        """`host:port`, which the driver sends to all other workers."""

    @property
    def unended_communicators(self) -> tuple[str, ...]:
        """Names of communicators that an abort could not end. If there are any, the process must be replaced."""

    def connect(
        self,
        *,
        rank: int,
        size: int,
        addresses: Sequence[str],
        generation: int,
        deadline_s: float,
        communicators: Collection[CommunicatorKey] = (),
        peers: Collection[int] | None = None,
    ) -> Transport:
        """Meet other ranks of `generation` and return this rank's transport.

        `communicators`: what `worker.backend.DeviceBackend.communicators` says this rank needs; `peers`: the ranks that it
        exchanges messages with, each of which names this one; None: all. Raises `CommTimeout` naming the
        ranks that did not come, `CommError` naming one that cannot be reached, `GroupAborted` when a peer is in a newer
        generation already, or after `abort_connect`.
        """

    def abort_connect(self, reason: str) -> None:
        """From any thread: a `connect` that is under way raises `GroupAborted(reason)`."""

    def close(self) -> None:
        """Stop listening; transports that are connected go on. Idempotent."""


@dataclass
class CommunicationLedger:
    """Counts payload bytes (no headers) to and from other ranks, and calls, by operation: `send`, `all_reduce`, ..."""

    sent: Counter[str] = field(default_factory=Counter)
    """Operation -> bytes."""
    received: Counter[str] = field(default_factory=Counter)
    """Operation -> bytes."""
    messages: Counter[str] = field(default_factory=Counter)
    """Operation -> calls."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def count(self, operation: str, *, sent: int = 0, received: int = 0) -> None:
        """Add one call and its payload."""
        with self._lock:
            self.sent[operation] += sent
            self.received[operation] += received
            self.messages[operation] += 1

    def add_payload(self, operation: str, *, sent: int = 0, received: int = 0) -> None:
        """Add payload to a call that is counted already: of a later phase, or of a size that was not known before."""
        with self._lock:
            self.sent[operation] += sent
            self.received[operation] += received

    def as_dict(self) -> dict[str, dict[str, int]]:
        """The counts by operation, for reports and `--json`."""
        return {
            key: {"sent": self.sent[key], "received": self.received[key], "messages": self.messages[key]}
            for key in sorted(self.messages)
        }
