"""Exchanges rows between the shards of a value that is cut along a spatial dim: each gets the rows that it needs.

Only shards that have rows for each other send: those next to each other, as an all-to-all without empty messages. Values and
gradients travel alike (`plan/spatial_shards.py` says which rows).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raypar.comm.buffer_pool import aligned_contiguous
from raypar.model.tensor_parallel.autograd_collectives import select_ranges
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan.shard_ranges import count_indices, intersect_ranges, shift_ranges
from raypar.plan.spatial_shards import RowExchange


def fetch_rows(
    x: Tensor, dim: int, exchange: RowExchange, group: ShardGroup, what: str, *, before: int = 0, after: int = 0
) -> Tensor:
    """The rows that this shard needs, ascending, in new contiguous memory; `before` and `after` them rows of zeros.

    `x`: the rows that this shard has. Where nobody needs rows of another, nothing is sent.
    """
    return post_rows(x, dim, exchange, group, what, before=before, after=after)()


def post_rows(
    x: Tensor, dim: int, exchange: RowExchange, group: ShardGroup, what: str, *, before: int = 0, after: int = 0
) -> Callable[[], Tensor]:
    """Start to fetch rows; what is returned waits for them and puts them together. See `fetch_rows`."""
    mine, shards = group.shard, range(group.size)
    start, _ = exchange.held[mine]

    def rows(count: int) -> Tensor:
        return x.new_zeros([*x.shape[:dim], count, *x.shape[dim + 1 :]])

    own = select_ranges(x, dim, shift_ranges(intersect_ranges((exchange.held[mine],), exchange.needed[mine]), -start))
    if not exchange.moves_rows:
        edges = [rows(before)] * bool(before), [rows(after)] * bool(after)
        return lambda: torch.cat([*edges[0], own, *edges[1]], dim) if before or after else aligned_contiguous(own)
    pieces = [
        select_ranges(x, dim, shift_ranges(exchange.sent(mine, dest), -start)).contiguous() if dest != mine else rows(0)
        for dest in shards
    ]
    outs = [x.new_empty([*x.shape[:dim], count_indices(exchange.sent(s, mine)), *x.shape[dim + 1 :]]) for s in shards]
    outs[mine] = pieces[mine]
    handle = group.transport.all_to_all(outs, pieces, group=group.ranks, channel=group.channel)

    def put_together() -> Tensor:
        group.wait(handle, x, what)
        found = [own if source == mine else outs[source] for source in shards]
        kept = [piece for piece in (rows(before), *found, rows(after)) if piece.shape[dim]]
        return torch.cat(kept, dim) if kept else rows(0)

    return put_together


def fit_rows(x: Tensor, dim: int, first: int, start: int, stop: int) -> Tensor:
    """The rows [start, stop) of a value whose first row here is number `first`, zeros where there are none, contiguous."""
    size = x.shape[dim]
    a, b = min(max(start - first, 0), size), min(max(stop - first, 0), size)
    inside = x.narrow(dim, a, max(0, b - a))
    missing = stop - start - inside.shape[dim]
    if not missing:
        return aligned_contiguous(inside)
    above = min(missing, max(0, first - start))
    shape = list(x.shape)
    zeros = []
    for count in (above, missing - above):
        shape[dim] = count
        zeros.append(x.new_zeros(shape))
    return torch.cat([zeros[0], inside, zeros[1]], dim)
