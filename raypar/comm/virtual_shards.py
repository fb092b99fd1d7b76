"""Collectives between virtual shards, of which a worker holds several: a shard of a stage is a run of them.

The layers of a stage are cut into T virtual shards whatever the plan, and each worker of a replica computes a run of these, one
in turn with the other (`comm.routines_in_turn`). Here they find the sums, gathers, scatters and exchanges of a group of T
ranks: what those of one worker give is added or put together before anything is sent, so that a worker sends one message for
its run.

Sums are those of T ranks, bit for bit: they follow the tree of `plan/addition_tree.py` over the T virtual shards. A worker adds
the complete subtrees within its run. Where each run is one subtree, and the tree over the workers is what is left of the tree,
the workers sum these over a group of their own; else they gather the subtrees' sums, and each adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.comm.collectives import SHORT_DTYPES
from raypar.comm.transport import Handle, Transport
from raypar.errors import CommError
from raypar.plan.addition_tree import TreeNode, addition_tree_children, covering_nodes
from raypar.torch_compat.lazy_copies import lazy_copy

_Sums = dict[TreeNode, Tensor]


def workers_add_subtrees(runs: Sequence[range]) -> bool:
    """Whether the sum over all virtual shards is the sum over the workers of one subtree each, in the workers' own tree.

    `runs`: by worker, its virtual shards; together all of them, in order.
    """
    return _workers_add_subtrees(tuple((run.start, run.stop) for run in runs))


@lru_cache(maxsize=256)
def _workers_add_subtrees(runs: tuple[TreeNode, ...]) -> bool:
    place = {run: worker for worker, run in enumerate(runs)}

    def is_alike(node: TreeNode, workers: TreeNode) -> bool:
        """Whether the subtree `node` over virtual shards ends in the runs as the subtree `workers` does in the workers."""
        if workers[1] - workers[0] == 1:
            return place.get(node) == workers[0]
        if node[1] - node[0] == 1:
            return False
        return all(map(is_alike, addition_tree_children(node), addition_tree_children(workers)))

    return is_alike((0, runs[-1][1]), (0, len(runs)))


def _add(sums: _Sums, node: TreeNode) -> Tensor:
    """The sum of what is below a node, in the memory of the first summand: all are their callers' to be overwritten."""
    found = sums.get(node)
    if found is None:
        left, right = (_add(sums, child) for child in addition_tree_children(node))
        found = left.add_(right)
    return found


class _Call(NamedTuple):
    """One virtual shard's call of a collective."""

    given: Sequence[Tensor]
    """What it adds, or gives to all."""
    outs: Sequence[Tensor]
    """Where its results go."""


@dataclass(slots=True)
class _Operation:
    """One collective of all virtual shards, as this worker takes part in it."""

    name: str
    """What it is called in messages, with the next two."""
    channel: int
    number: int
    calls: dict[int, _Call] = field(default_factory=dict)
    """Virtual shard of this worker -> its call."""
    remote: Handle | None = None
    """The operation between the workers; None before it is posted, and where there is one worker."""
    finish: Callable[[], None] | None = None
    """Gives all virtual shards here their results, once `remote` is done; None before all have called, and after it has run."""
    is_posted: bool = False
    """Whether all virtual shards of this worker have called it."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Virtual shard of this worker -> the result of a sum that all share."""


class VirtualShardHandle:
    """The pending collective of one virtual shard."""

    __slots__ = ("_expected", "_operation", "_shard")

    def __init__(self, operation: _Operation, expected: int, shard: int) -> None:
        self._operation, self._expected, self._shard = operation, expected, shard

    @property
    def is_posted(self) -> bool:
        """Whether all virtual shards of this worker have called the collective; before that no wait would end."""
        return self._operation.is_posted

    def done(self) -> bool:
        """Whether the results are there."""
        operation = self._operation
        if not operation.is_posted or (operation.remote is not None and not operation.remote.done()):
            return False
        if operation.finish is not None:
            self._finish()
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """As `Handle.wait`. Raises `CommError` where other virtual shards of this worker have not called the collective."""
        self._check_posted()
        if self._operation.remote is not None:
            self._operation.remote.wait(timeout_s)
        self._finish()

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        """As `Handle.wait_on_stream`."""
        self._check_posted()
        if self._operation.remote is not None:
            self._operation.remote.wait_on_stream(timeout_s)
        self._finish()

    def tensor(self) -> Tensor:
        """What `VirtualShardMember.sum` gives, once it is done; not of other collectives."""
        found = self._operation.sums.get(self._shard)
        if found is None:
            raise TypeError("a collective has no received tensor")
        return found

    def tensors(self) -> list[Tensor]:
        """Not of a batch."""
        raise TypeError("a collective is no batch")

    def _check_posted(self) -> None:
        operation = self._operation
        if not operation.is_posted:
            raise CommError(
                f"{operation.name} number {operation.number + 1} of channel {operation.channel} is called by "
                f"{len(operation.calls)} of the {self._expected} virtual shards of this worker: "
                f"{', '.join(map(str, sorted(operation.calls)))}",
                cure="virtual shards of a worker run in turn, and all make the same calls in the same order",
            )

    def _finish(self) -> None:
        finish, self._operation.finish = self._operation.finish, None
        if finish is not None:
            finish()


class TurnHandle:
    """What another virtual shard of this worker does before this one can go on."""

    def __init__(self, what: str, is_over: Callable[[], bool]) -> None:
        """`what`: in messages; `is_over`: whether it is done."""
        self._what, self._is_over = what, is_over

    @property
    def is_posted(self) -> bool:
        """Whether it is done: it does not go on by itself, but while this virtual shard waits."""
        return self._is_over()

    def done(self) -> bool:
        """Whether it is done."""
        return self._is_over()

    def wait(self, timeout_s: float | None = None) -> None:
        """As `Handle.wait`. Raises `CommError` where it is not done: nobody is left who would do it."""
        if not self._is_over():
            raise CommError(
                f"{self._what}: no virtual shard of this worker is left that would do it",
                cure="virtual shards of a worker run in turn, and all make the same calls in the same order",
            )

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        """As `wait`."""
        self.wait(timeout_s)

    def tensor(self) -> Tensor:
        """Not of a turn."""
        raise TypeError("a turn has no received tensor")

    def tensors(self) -> list[Tensor]:
        """Not of a turn."""
        raise TypeError("a turn is no batch")


class VirtualShards:
    """The virtual shards of one worker, among those of its group: brings their collectives together.

    `ranks`: of the workers that compute a replica of a stage, ascending; `runs`: by worker, its virtual shards. `transport`
    connects the workers.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], runs: Sequence[range]) -> None:
        self.transport, self.ranks, self.runs = transport, tuple(ranks), tuple(runs)
        self.own = self.runs[self.ranks.index(transport.rank)]
        """The virtual shards of this worker."""
        self.count = self.runs[-1].stop
        """Number of virtual shards of the whole group."""
        self._operations: dict[tuple[str, int, int], _Operation] = {}
        """(name, channel, number of the call) -> collective that some virtual shard here has not called yet."""
        self._called: dict[tuple[str, int, int], int] = {}
        """(name, channel, virtual shard) -> number of its next call."""

    def member(self, shard: int) -> VirtualShardMember:
        """What one virtual shard of this worker calls."""
        return VirtualShardMember(self, shard)

    def call(self, name: str, shard: int, channel: int, call: _Call, post: Callable[[_Operation], None]) -> VirtualShardHandle:
        """One virtual shard's call of a collective. `post` starts it once the last one here has called it."""
        counted = name, channel, shard
        number = self._called[counted] = self._called.get(counted, -1) + 1
        key = name, channel, number
        operation = self._operations.get(key)
        if operation is None:
            operation = self._operations[key] = _Operation(name, channel, number)
        operation.calls[shard] = call
        if len(operation.calls) == len(self.own):
            del self._operations[key]
            post(operation)
            operation.is_posted = True
        return VirtualShardHandle(operation, len(self.own), shard)

    # -- sums ----------------------------------------------------------------------------------------------------------

    def post_all_reduce(self, operation: _Operation, channel: int) -> None:
        """Sum `given[0]` into `outs[0]`."""
        sums = self._sums({shard: call.given[0] for shard, call in operation.calls.items()})
        outs = [call.outs[0] for call in operation.calls.values()]
        total = self._post_sum(operation, sums, channel)
        operation.finish = lambda: _copy_to(outs, total())

    def post_sum(self, operation: _Operation, channel: int, added: Tensor | None) -> None:
        """Sum `given[0]`, and add `added` to the sum, into results that all virtual shards here share (`lazy_copy`)."""
        given = {shard: call.given[0] for shard, call in operation.calls.items()}
        operation.calls.clear()  # their memory is needed no longer than the sum's
        first, *others = self.own
        out, total = given[first], self._post_sum(operation, self._sums(given), channel)

        def share() -> None:
            with torch.no_grad():
                _copy_to([out], total())
                if added is not None:
                    out.add_(added)
                operation.sums[first] = out
                operation.sums.update((shard, lazy_copy(out)) for shard in others)

        operation.finish = share

    def post_reduce_scatter(self, operation: _Operation, channel: int) -> None:
        """Sum `given`, of which virtual shard t gets part t into `outs[0]`."""
        sizes = [part.numel() for part in next(iter(operation.calls.values())).given]
        flat = {shard: torch.cat([part.reshape(-1) for part in call.given]) for shard, call in operation.calls.items()}
        sums, calls = self._sums(flat), operation.calls
        lengths = [sum(sizes[run.start : run.stop]) for run in self.runs]
        if len(self.ranks) > 1 and workers_add_subtrees(self.runs):
            (mine,) = sums.values()
            parts = list(mine.split(lengths))
            out = torch.empty_like(parts[self.ranks.index(self.transport.rank)])
            operation.remote = self.transport.reduce_scatter(out, parts, group=self.ranks, channel=channel)

            def give_parts() -> None:
                for part, shard in zip(out.split(sizes[self.own.start : self.own.stop]), self.own, strict=True):
                    _copy_to(calls[shard].outs, part)

            operation.finish = give_parts
            return
        total = self._post_sum(operation, sums, channel)

        def give_all() -> None:
            parts = total().split(sizes)
            for shard, call in calls.items():
                _copy_to(call.outs, parts[shard])

        operation.finish = give_all

    def _sums(self, given: dict[int, Tensor]) -> _Sums:
        """The complete subtrees' sums of this worker's run, in the memory of what was given unless they are wider."""
        leaves: _Sums = {(t, t + 1): x.float() if x.dtype in SHORT_DTYPES else x for t, x in given.items()}
        return {node: _add(leaves, node) for node in covering_nodes(self.own, self.count)}

    def _post_sum(self, operation: _Operation, sums: _Sums, channel: int) -> Callable[[], Tensor]:
        """Post what the workers exchange for a sum; returns what gives the sum once `operation.remote` is done."""
        whole = (0, self.count)
        if len(self.ranks) == 1:
            total = sums[whole]
            return lambda: total
        if workers_add_subtrees(self.runs):
            (mine,) = sums.values()
            operation.remote = self.transport.all_reduce(mine.view(-1), group=self.ranks, channel=channel)
            return lambda: mine
        nodes = [covering_nodes(run, self.count) for run in self.runs]
        shape = next(iter(sums.values())).shape
        flat = torch.stack(list(sums.values()))
        pieces = [flat.new_empty((len(of_worker), *shape)) for of_worker in nodes]
        operation.remote = self.transport.all_gather(pieces, flat, group=self.ranks, channel=channel)

        def add() -> Tensor:
            found = {
                n: each for of, piece in zip(nodes, pieces, strict=True) for n, each in zip(of, piece.unbind(), strict=True)
            }
            return _add(found, whole)

        return add

    # -- gathers -------------------------------------------------------------------------------------------------------

    def post_all_gather(self, operation: _Operation, channel: int) -> None:
        """Give all virtual shards the `given[0]` of each."""
        calls = operation.calls
        mine = {shard: call.given[0] for shard, call in calls.items()}
        if len(self.ranks) == 1:
            operation.finish = lambda: _give_all(calls, mine)
            return
        sizes = [part.numel() for part in next(iter(calls.values())).outs]
        flat = torch.cat([mine[shard].reshape(-1) for shard in self.own])
        pieces = [flat.new_empty(sum(sizes[run.start : run.stop])) for run in self.runs]
        operation.remote = self.transport.all_gather(pieces, flat, group=self.ranks, channel=channel)

        def give() -> None:
            found = dict(mine)
            for run, piece in zip(self.runs, pieces, strict=True):
                if run != self.own:
                    found |= zip(run, piece.split(sizes[run.start : run.stop]), strict=True)
            _give_all(calls, found)

        operation.finish = give

    # -- all to all ----------------------------------------------------------------------------------------------------

    def post_all_to_all(self, operation: _Operation, channel: int) -> None:
        """Give virtual shard t `given[t]` of each into `outs`: between the workers what their runs have for each other."""
        calls = operation.calls

        def give_own() -> None:
            for shard, call in calls.items():
                for dest in self.own:
                    _copy_to([calls[dest].outs[shard]], call.given[dest])

        if len(self.ranks) == 1:
            operation.finish = give_own
            return
        like = next(iter(calls.values())).given[0]
        pieces, outs, lengths = [], [], []
        for run in self.runs:
            if run == self.own:
                pieces.append(like.new_empty(0))
                outs.append(pieces[-1])
                lengths.append([0] * len(self.own) ** 2)
                continue
            pieces.append(torch.cat([calls[shard].given[dest].reshape(-1) for shard in self.own for dest in run]))
            lengths.append([calls[dest].outs[source].numel() for source in run for dest in self.own])
            outs.append(like.new_empty(sum(lengths[-1])))
        operation.remote = self.transport.all_to_all(outs, pieces, group=self.ranks, channel=channel)

        def give() -> None:
            give_own()
            for run, out, sizes in zip(self.runs, outs, lengths, strict=True):
                ends = [(source, dest) for source in run for dest in self.own]
                for (source, dest), part in zip(ends, out.split(sizes) if run != self.own else [], strict=run != self.own):
                    _copy_to([calls[dest].outs[source]], part)

        operation.finish = give


class VirtualShardMember:
    """The collectives of one virtual shard: those of `Transport` that layers on shards use, of a group of virtual shards."""

    def __init__(self, shards: VirtualShards, shard: int) -> None:
        self._shards = shards
        self.rank = shard
        """Which virtual shard this is."""

    def all_reduce(self, flat: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """As `Transport.all_reduce`, over the tree of virtual shards."""
        shards = self._shards
        return shards.call(
            "all_reduce", self.rank, channel, _Call([flat], [flat]), lambda each: shards.post_all_reduce(each, channel)
        )

    def sum(self, flat: Tensor, *, channel: int = 0, added: Tensor | None = None) -> VirtualShardHandle:
        """Sum as `all_reduce`, and add `added`, which is the same on all; the handle's `tensor()` is the result. `flat` is the
        operation's. Results share memory until somebody writes into one."""
        shards = self._shards
        return shards.call("sum", self.rank, channel, _Call([flat], []), lambda each: shards.post_sum(each, channel, added))

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """As `Transport.reduce_scatter`, over the tree of virtual shards."""
        shards = self._shards
        return shards.call(
            "reduce_scatter", self.rank, channel, _Call(pieces, [out]), lambda each: shards.post_reduce_scatter(each, channel)
        )

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """As `Transport.all_gather`, of all virtual shards."""
        shards = self._shards
        return shards.call(
            "all_gather", self.rank, channel, _Call([mine], pieces), lambda each: shards.post_all_gather(each, channel)
        )

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """As `Transport.all_to_all`, of all virtual shards."""
        shards = self._shards
        return shards.call(
            "all_to_all", self.rank, channel, _Call(pieces, outs), lambda each: shards.post_all_to_all(each, channel)
        )


def _copy_to(outs: Sequence[Tensor], value: Tensor) -> None:
    """Write a value, rounded to the dtype of each."""
    for out in outs:
        if out.data_ptr() != value.data_ptr() or out.dtype != value.dtype:
            out.view(-1).copy_(value.view(-1))


def _give_all(calls: dict[int, _Call], found: dict[int, Tensor]) -> None:
    for call in calls.values():
        for shard, out in enumerate(call.outs):
            _copy_to([out], found[shard].reshape(-1))
