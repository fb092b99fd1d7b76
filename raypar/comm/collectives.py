"""Collectives made of messages: the base of the local and the TCP transport.

Sums follow the tree of `plan/addition_tree.py` by position in the group, whatever arrives first, so that their bits depend on
the group's size alone.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raypar.comm.buffer_pool import CPU, BufferPool
from raypar.comm.operation_phase import OperationPhase, Phases
from raypar.comm.phased_operation import OperationMessage, PhasedOperation
from raypar.comm.recursive_halving import halving_partners, halving_steps
from raypar.comm.sent_tensor_layout import layout_of, message_of
from raypar.comm.transport import (
    CommunicationLedger,
    Handle,
    check_collective_group,
    check_one_tensor_per_rank,
    check_peer_rank,
    check_power_of_two,
    generation_over_error,
)
from raypar.errors import CommError
from raypar.plan.addition_tree import TreeNode, addition_tree_children

ALIGN = 16
"""Slices of a flat tensor start at multiples of this many elements (64 bytes of fp32)."""

ONE_PHASE_BYTES = 4096
"""Up to this size an all-reduce sends whole tensors at once: latency counts, not bytes."""


def even_slices(total: int, parts: int, align: int = ALIGN) -> list[tuple[int, int]]:
    """Cut `total` elements into `parts` contiguous, nearly equal (start, stop) slices with aligned starts, maybe empty."""
    units = -(-total // align)
    bounds = [min(total, i * units // parts * align) for i in range(parts + 1)]
    return [(bounds[i], bounds[i + 1]) for i in range(parts)]


SHORT_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that are added in float32, and rounded once."""


def add_over_tree(parts: Sequence[Tensor], own: int, out: Tensor) -> None:
    """`out` = the sum of the parts over the addition tree, for four ((p0 + p1) + (p2 + p3)).

    All parts but `parts[own]` may be overwritten; `out` may be `parts[own]`.
    """
    total = _add_below((0, len(parts)), parts, own, None if out.dtype in SHORT_DTYPES else out)
    if total.data_ptr() != out.data_ptr():
        out.copy_(total)


def _add_below(node: TreeNode, parts: Sequence[Tensor], own: int, out: Tensor | None) -> Tensor:
    """The sum of a node's parts, in `out` if that is given; see `add_over_tree`."""
    lo, hi = node
    if hi - lo == 1:
        return parts[lo].float() if parts[lo].dtype in SHORT_DTYPES else parts[lo]
    left, right = (_add_below(child, parts, own, None) for child in addition_tree_children(node))
    if out is None:
        out = right if left.data_ptr() == parts[own].data_ptr() else left
    return torch.add(left, right, out=out)


def _channel(operation: str, group: tuple[int, ...], channel: int) -> int:
    """The 63-bit channel of a collective's messages, the same on every rank; never 0, which is point to point."""
    text = f"{operation}/{channel}/{','.join(map(str, group))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 | 1


class MessageBasedTransport(ABC):
    """Base of transports that move messages: implements collectives; subclasses send, receive and wait."""

    host_only = True
    """Tensors must be in host memory."""

    def __init__(self, rank: int, size: int, generation: int) -> None:
        self.peers = frozenset(range(size)) - {rank}
        """The other ranks with which this one is connected."""
        self.rank = rank
        self.size = size
        self.generation = generation
        self.ledger = CommunicationLedger()
        self.pool = BufferPool()
        """Memory of received tensors and of sums."""
        self._aborted: str | None = None
        """The reason, once the transport is aborted or closed."""
        self._channels: dict[tuple[str, tuple[int, ...], int], int] = {}
        """(operation, group, channel) -> channel of its messages."""
        self._calls: Counter[int] = Counter()
        """Channel of messages -> collectives posted so far."""

    # -- what a transport provides

    @abstractmethod
    def post_send(self, message: OperationMessage) -> None:
        """Start sending; `message.complete()` once the tensor may be changed. Never blocks."""

    @abstractmethod
    def post_recv(self, message: OperationMessage) -> None:
        """Start receiving into `message.tensor`, or into a fresh tensor put there. Never blocks."""

    @abstractmethod
    def wait_for(self, operation: PhasedOperation, timeout_s: float | None) -> bool:
        """Block until `operation.settled`; False after `timeout_s`."""

    @abstractmethod
    def notify_settled(self, operation: PhasedOperation) -> None:
        """Wake the threads that wait for `operation`, which has just finished or failed in any thread."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""

    @abstractmethod
    def close(self) -> None:
        """See `Transport.close`."""

    def forget_freed_memory(self) -> None:
        """See `Transport.forget_freed_memory`."""
        self.pool.clear()

    def run_before(
        self,
        operation: str,
        work: Callable[[], None],
        *,
        group: Sequence[int],
        channel: int = 0,
        after: Handle | None = None,
        keep: Sequence[Tensor] = (),
    ) -> None:
        """See `Transport.run_before`: the host works."""
        return None

    def run_after(
        self,
        after: Handle,
        work: Callable[[], None],
        *,
        group: Sequence[int],
        channel: int = 0,
        operation: str = "all_gather",
    ) -> None:
        """See `Transport.run_after`: the host waits."""
        return None

    # -- point to point

    def send(self, tensor: Tensor, *, to: int, tag: int, keep_layout: bool = False) -> PhasedOperation:
        """See `Transport.send`."""
        self.check_alive()
        layout = layout_of(tensor) if keep_layout else None
        tensor = message_of(tensor, layout)
        self._check(tensor, to)
        operation = PhasedOperation(self, f"send tag {tag}", (to,), layout=layout)
        self.ledger.count("send", sent=tensor.nbytes)
        operation.post(OperationPhase(((tensor, to, tag),), ()))
        operation.end_posting()
        return operation

    def recv(self, out: Tensor | None, *, source: int, tag: int) -> PhasedOperation:
        """See `Transport.recv`. Bytes are counted when they arrive."""
        self.check_alive()
        self._check(out, source)
        operation = PhasedOperation(self, f"recv tag {tag}", (source,))
        operation.post(OperationPhase((), ((out, source, tag),)))
        operation.end_posting()
        return operation

    def batch(
        self, sends: Sequence[tuple[Tensor, int, int]], recvs: Sequence[tuple[Tensor | None, int, int]]
    ) -> PhasedOperation:
        """See `Transport.batch`."""
        self.check_alive()
        for tensor, peer, _ in (*sends, *recvs):
            self._check(tensor, peer)
        tags = sorted({tag for _, _, tag in (*sends, *recvs)})
        operation = PhasedOperation(self, f"batch tags {tags}", sorted({peer for _, peer, _ in (*sends, *recvs)}))
        for tensor, _, _ in sends:
            self.ledger.count("send", sent=tensor.nbytes)
        operation.post(OperationPhase(sends, recvs))
        operation.end_posting()
        return operation

    # -- collectives

    def all_reduce(self, flat: Tensor, *, group: Sequence[int], channel: int = 0) -> PhasedOperation:
        """See `Transport.all_reduce`. Small tensors travel whole. Of large ones each rank adds one slice, and sends the sum."""
        me, key, tag = self._enter("all_reduce", group, channel, flat)
        if flat.nbytes <= ONE_PHASE_BYTES:
            return self._run("all_reduce", group, key, self._all_reduce_whole(flat, group, me, tag))
        return self._run("all_reduce", group, key, self._all_reduce_slices(flat, group, me, tag))

    def halving_all_reduce(self, flat: Tensor, scratch: Tensor, *, group: Sequence[int], channel: int = 0) -> PhasedOperation:
        """See `Transport.halving_all_reduce`."""
        name = "halving_all_reduce"
        check_power_of_two(name, group)
        partners = [group[i] for i in halving_partners(group.index(self.rank), len(group))] if self.rank in group else ()
        me, key, tag = self._enter(name, group, channel, flat, scratch, partners=partners)
        phases = self._halve_and_double(flat.view(-1), scratch, group, me, tag)
        return PhasedOperation(self, name, partners, key, phases).start()

    def reduce_scatter(
        self, out: Tensor, pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0
    ) -> PhasedOperation:
        """See `Transport.reduce_scatter`."""
        me, key, tag = self._enter("reduce_scatter", group, channel, out, *pieces)
        check_one_tensor_per_rank("reduce_scatter", pieces, group)

        def phases() -> Phases:
            parts = [out if i == me else self._scratch(out) for i in range(len(group))]
            parts[me] = pieces[me]
            yield self._exchange("reduce_scatter", group, me, tag, pieces, parts)
            add_over_tree(parts, me, out)

        return self._run("reduce_scatter", group, key, phases())

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor, *, group: Sequence[int], channel: int = 0) -> PhasedOperation:
        """See `Transport.all_gather`."""
        me, key, tag = self._enter("all_gather", group, channel, mine, *pieces)
        check_one_tensor_per_rank("all_gather", pieces, group)

        def phases() -> Phases:
            if pieces[me].data_ptr() != mine.data_ptr():
                pieces[me].copy_(mine)
            yield self._exchange("all_gather", group, me, tag, [mine] * len(group), pieces)

        return self._run("all_gather", group, key, phases())

    def all_to_all(
        self, outs: Sequence[Tensor], pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0
    ) -> PhasedOperation:
        """See `Transport.all_to_all`."""
        me, key, tag = self._enter("all_to_all", group, channel, *outs, *pieces)
        check_one_tensor_per_rank("all_to_all", pieces, group)
        check_one_tensor_per_rank("all_to_all", outs, group)

        def phases() -> Phases:
            if outs[me].data_ptr() != pieces[me].data_ptr():
                outs[me].copy_(pieces[me])
            yield self._exchange("all_to_all", group, me, tag, pieces, outs)

        return self._run("all_to_all", group, key, phases())

    def broadcast(self, tensor: Tensor, *, root: int, group: Sequence[int], channel: int = 0) -> PhasedOperation:
        """See `Transport.broadcast`: the root sends to each rank."""
        _, key, tag = self._enter("broadcast", group, channel, tensor)
        if root not in group:
            raise CommError(f"broadcast root {root} is not in group {tuple(group)}", cure="give a rank of the group")

        def phases() -> Phases:
            if self.rank == root:
                others = [r for r in group if r != root]
                self.ledger.count("broadcast", sent=tensor.nbytes * len(others))
                yield OperationPhase([(tensor, r, tag) for r in others], ())
            else:
                self.ledger.count("broadcast", received=tensor.nbytes)
                yield OperationPhase((), [(tensor, root, tag)])

        return self._run("broadcast", group, key, phases())

    def run_phases(self, phases: Phases, *, group: Sequence[int], channel: int = 0) -> PhasedOperation:
        """See `Transport.run_phases`."""
        _, key, _ = self._enter("phases", group, channel)
        return self._run("phases", group, key, phases)

    def barrier(self, *, group: Sequence[int], channel: int = 0) -> PhasedOperation:
        """See `Transport.barrier`: an empty message from every rank to every other."""
        me, key, tag = self._enter("barrier", group, channel)
        empty = torch.empty(0, dtype=torch.uint8)

        def phases() -> Phases:
            yield self._exchange("barrier", group, me, tag, [empty] * len(group), [empty] * len(group))

        return self._run("barrier", group, key, phases())

    def check_connected(self, *ranks: int) -> None:
        """Raise `CommError` if one of these ranks is neither connected with this one nor this one: a wait would have no end."""
        lacking = set(ranks) - self.peers - {self.rank}
        if lacking:
            raise CommError(
                f"rank {self.rank} has a message for, or from, ranks {sorted(lacking)}, with which it has no connection",
                cure="report this: the connections of the plan (worker/connected_ranks.py) leave them out",
            )

    # -- parts of the above

    def _all_reduce_whole(self, flat: Tensor, group: Sequence[int], me: int, tag: int) -> Phases:
        parts = [flat if i == me else self._scratch(flat) for i in range(len(group))]
        yield self._exchange("all_reduce", group, me, tag, [flat] * len(group), parts)
        add_over_tree(parts, me, flat)

    def _all_reduce_slices(self, flat: Tensor, group: Sequence[int], me: int, tag: int) -> Phases:
        whole = flat.view(-1)
        cut = [whole[a:b] for a, b in even_slices(whole.numel(), len(group))]
        parts = [cut[me] if i == me else self._scratch(cut[me]) for i in range(len(group))]
        first = self._exchange("all_reduce", group, me, tag, cut, parts)
        # A peer finishes its slice only after it has received this rank's part, whose memory is free to receive into by then.
        finished = [(cut[i], r, tag + 1) for i, r in enumerate(group) if i != me and cut[i].numel()]
        yield OperationPhase(first.sends, first.recvs, finished)
        add_over_tree(parts, me, cut[me])
        yield OperationPhase([(cut[me], r, tag + 1) for i, r in enumerate(group) if i != me and cut[me].numel()], ())
        others = len(group) - 1
        self.ledger.add_payload("all_reduce", sent=cut[me].nbytes * others, received=sum(t.nbytes for t, _, _ in finished))

    def _halve_and_double(self, flat: Tensor, scratch: Tensor, group: Sequence[int], me: int, tag: int) -> Phases:
        steps = halving_steps(even_slices(flat.numel(), len(group)), me)
        self.ledger.count("halving_all_reduce")

        def exchange(to: int, tag: int, piece: Tensor, out: Tensor) -> OperationPhase:
            self.ledger.add_payload("halving_all_reduce", sent=piece.nbytes, received=out.nbytes)
            return OperationPhase([(piece, to, tag)] * bool(piece.numel()), [(out, to, tag)] * bool(out.numel()))

        for step in steps:
            received = scratch[: step.kept.stop - step.kept.start]
            yield exchange(group[step.partner], tag, flat[step.given], received)
            step.add(flat, received, me)
        for step in reversed(steps):
            yield exchange(group[step.partner], tag + 1, flat[step.kept], flat[step.given])

    def _exchange(
        self, name: str, group: Sequence[int], me: int, tag: int, pieces: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> OperationPhase:
        """The phase in which `pieces[i]` goes to the i-th rank and `outs[i]` comes from it; counted under `name`.

        Both ends know the sizes, so that empty messages are sent only by a barrier.
        """
        others = [(i, r) for i, r in enumerate(group) if i != me]
        self.ledger.count(name, sent=sum(pieces[i].nbytes for i, _ in others), received=sum(outs[i].nbytes for i, _ in others))
        keep = name == "barrier"
        return OperationPhase(
            [(pieces[i], r, tag) for i, r in others if keep or pieces[i].numel()],
            [(outs[i], r, tag) for i, r in others if keep or outs[i].numel()],
        )

    def _enter(
        self, name: str, group: Sequence[int], channel: int, *tensors: Tensor, partners: Sequence[int] | None = None
    ) -> tuple[int, int, int]:
        """Check a collective call. Returns this rank's index in the group, the channel and the first tag of its messages.

        `partners`: the ranks of the group with which it exchanges messages; None: all.
        """
        self.check_alive()
        members = tuple(group)
        key = self._channels.get((name, members, channel))
        if key is None:
            check_collective_group(name, members, self.rank, self.size)
            self.check_connected(*(members if partners is None else partners))
            key = self._channels[(name, members, channel)] = _channel(name, members, channel)
        for tensor in tensors:
            self._check(tensor, self.rank)
        self._calls[key] += 1
        return members.index(self.rank), key, self._calls[key] * 2

    def _run(self, name: str, group: Sequence[int], key: int, phases: Phases) -> PhasedOperation:
        return PhasedOperation(self, name, [r for r in group if r != self.rank], key, phases).start()

    def _check(self, tensor: Tensor | None, peer: int) -> None:
        check_peer_rank(peer, self.size)
        self.check_connected(peer)
        if tensor is not None and (not tensor.is_contiguous() or (self.host_only and tensor.device != CPU)):
            strides, device = tuple(tensor.stride()), tensor.device
            raise CommError(
                f"a tensor of shape {tuple(tensor.shape)} with strides {strides} on {device} cannot be moved",
                cure="pass a contiguous CPU tensor (tensor.contiguous())",
            )

    def _scratch(self, like: Tensor) -> Tensor:
        return self.pool.empty(like.shape, like.dtype) if like.device == CPU else torch.empty_like(like)

    def check_alive(self) -> None:
        """See `Transport.check_alive`."""
        if self._aborted is not None:
            raise generation_over_error(self._aborted)
