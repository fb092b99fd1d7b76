"""Embedding and cross-entropy cut by vocabulary, without gathering the logits (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.autocast_casts import is_autocast_enabled
from raypar.model.autograd_function_types import AutogradContext, AutogradFunction
from raypar.model.tensor_parallel import autograd_collectives
from raypar.model.tensor_parallel.autograd_collectives import first_derivative_only
from raypar.model.tensor_parallel.local_part_layout import sequence_part_layout
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, implements_on_parts, unsupported_on_part_error
from raypar.plan.shard_ranges import IndexRanges


@lru_cache(maxsize=16)
def _rows_of_all_ids(start: int, stop: int, total: int, device: torch.device) -> Tensor:
    """For all ids [total] what `_local_rows` says of them."""
    rows = torch.full((total,), -1)
    rows[start:stop] = torch.arange(stop - start)
    return rows.to(device)


def _local_rows(ids: Tensor, start: int, stop: int, total: int) -> Tensor:
    """The rows that ids of [0, total) have on the shard with the ids [start, stop); -1 where another shard has them.

    They are looked up, so that one operation also finds ids that are none. Raises `IndexError` for these; nothing waits for a
    GPU, where an assertion of the operation fails, as in `nn.Embedding`.
    """
    rows = _rows_of_all_ids(start, stop, total, ids.device)
    return rows.index_select(0, ids.reshape(-1)).view(ids.shape)


class VocabularyEmbedding(ShardedModule):
    """ids [...] int64 -> [..., width]; `weight` [rows here, width].

    For each id one shard contributes its row, all others zeros, so the sum over shards is exact.
    Under sequence parallelism the result [mb, seq, width] is this shard's part of dim 1.
    """

    def __init__(self, embedding: nn.Embedding, name: str, group: ShardGroup, held: IndexRanges) -> None:
        super().__init__(name, group)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.weight = embedding.weight
        (self.start, self.stop) = held[0]
        """The ids whose rows are here: [start, stop)."""
        self.padding_idx: int | None = None
        """Row of the padding id, if that is here."""
        if embedding.padding_idx is not None and self.start <= embedding.padding_idx < self.stop:
            self.padding_idx = embedding.padding_idx - self.start

    def forward(self, ids: Tensor) -> Tensor | ShardedValue:
        """The embedded ids. Raises `IndexError` for an id outside the vocabulary, as `nn.Embedding` does: on a GPU at a later
        synchronisation."""
        try:
            local = _local_rows(ids, self.start, self.stop, self.num_embeddings)
        except IndexError:
            raise IndexError(
                f"index out of range in {self.name}: ids {int(ids.min())} to {int(ids.max())}, not all "
                f"in [0, {self.num_embeddings})"
            ) from None
        rows = F.embedding(local.clamp_min(0), self.weight, self.padding_idx)
        absent = (local < 0).unsqueeze(-1)
        if not self.group.sequence_parallel:
            return autograd_collectives.reduce_from_shards(rows, self.group, absent)
        if ids.dim() != 2:
            raise ModelError(
                f"{self.name} sees ids of shape {list(ids.shape)}, sequence parallelism needs [batch, sequence]",
                cure="give the embedding the style whole, or set plan.sequence_parallel: false",
            )
        made = autograd_collectives.reduce_scatter_to_shards(rows.masked_fill(absent, 0.0), 1, self.group)
        return ShardedValue(made, sequence_part_layout(ids.shape[1], self.group.shard, self.group.size), self.group)


class _CrossEntropyContext(AutogradContext):
    smoothing: float
    total: int


class _CrossEntropy(AutogradFunction):
    """For every row shard t sends three numbers: its maximum m_t, s_t = sum exp(l - m_t) over its logits l, and the target's
    logit if it has that (else 0); with label smoothing also the sum of its logits. Every shard then computes, in shard order,
    M = max m_t and log Z = M + log sum_t s_t exp(m_t - M).
    """

    @staticmethod
    def forward(
        ctx: _CrossEntropyContext,
        logits: Tensor,
        local: Tensor,
        ignored: Tensor,
        total: int,
        smoothing: float,
        group: ShardGroup,
    ) -> Tensor:
        """logits [n, here], the targets' columns here [n] (-1: none), which rows are ignored [n] -> losses [n], 0 for these."""
        absent, place = local < 0, local.clamp_min(0).unsqueeze(1)
        everybody = logits.new_empty(group.size, 4 if smoothing else 3, len(local))
        top, powers_sum, chosen, *logits_sum = everybody[group.shard]
        torch.amax(logits, 1, out=top)
        # The maximum over all is not known yet: e^(l - m) is brought to it afterwards. All may be -inf here (padding, masked).
        powers = (logits - top.clamp_min(torch.finfo(top.dtype).min).unsqueeze(1)).exp_()
        torch.sum(powers, 1, out=powers_sum)
        torch.gather(logits, 1, place, out=chosen.unsqueeze(1))
        chosen.masked_fill_(absent, 0.0)
        for of_smoothing in logits_sum:
            torch.sum(logits, 1, out=of_smoothing)
        group.all_gather_in_place(everybody, "the parts of a cross-entropy")
        highest = everybody[:, 0].max(0).values
        scales = (everybody[:, 0] - highest).exp_()
        everybody[:, 1].mul_(scales)
        sums = everybody[0, 1:]
        for part in everybody[1:]:
            sums = sums + part[1:]
        log_sum = sums[0].log() + highest
        losses = log_sum - sums[1]
        if smoothing:
            losses = (1.0 - smoothing) * losses + smoothing * (log_sum - sums[2] / total)
        probabilities = powers.mul_((scales[group.shard] / sums[0]).unsqueeze(1))
        ctx.save_for_backward(probabilities, place, absent, ignored)
        ctx.smoothing, ctx.total = smoothing, total
        return losses.masked_fill_(ignored, 0.0)

    @staticmethod
    @first_derivative_only
    def backward(ctx: _CrossEntropyContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        probabilities, place, absent, ignored = ctx.saved_tensors
        added = absent.to(probabilities.dtype).sub_(1.0)  # -1 where the target is here
        if ctx.smoothing:
            added *= 1.0 - ctx.smoothing
        out = probabilities.scatter_add(1, place, added.unsqueeze(1))
        if ctx.smoothing:
            out -= ctx.smoothing / ctx.total
        return out.mul_(gradient.masked_fill(ignored, 0.0).unsqueeze(1)), None, None, None, None, None


def _columns_of_targets(targets: Tensor, ignored: Tensor, logits: ShardedValue) -> Tensor:
    """The columns here of targets [n]; -1 for those that another shard has, or that are `ignored`. Raises `IndexError` for a
    class that is none, on a GPU at a later synchronisation."""
    start, stop = logits.part_layout.ranges[0]
    total = logits.part_layout.size
    elsewhere = stop % total  # a class that another shard has
    try:
        return _local_rows(targets.masked_fill(ignored, elsewhere), start, stop, total)
    except IndexError:
        wrong = targets[~ignored & ((targets < 0) | (targets >= total))]
        raise IndexError(f"Target {int(wrong[0])} is out of bounds: there are {total} classes.") from None


@implements_on_parts("cross_entropy")
def _cross_entropy(
    func: Callable[..., Tensor],
    logits: ShardedValue,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As `F.cross_entropy` with class ids as targets. Raises `ModelError` for class weights and probabilities."""
    classes = 1 if logits.dim() > 1 else 0
    if logits.part_layout.dim != classes:
        raise unsupported_on_part_error("cross_entropy", logits, "needs logits that are cut by classes")
    if weight is not None or target.is_floating_point() or size_average is not None or reduce is not None:
        raise ModelError(
            "cross_entropy of logits that are cut by vocabulary knows no class weights, probabilities, size_average or reduce",
            cure="give the output layer the style gathered or whole (plan.styles), or use class ids and reduction alone",
        )
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    rows = logits.local.movedim(classes, -1).reshape(-1, logits.local.shape[classes])
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    returned = rows.dtype if is_autocast_enabled(rows.device) else logits.local.dtype  # as `F.cross_entropy` does
    targets = target.reshape(-1)
    ignored = targets == ignore_index
    local = _columns_of_targets(targets, ignored, logits)
    losses: Tensor = _CrossEntropy.apply(rows, local, ignored, logits.part_layout.size, label_smoothing, logits.group)
    if reduction == "none":
        return losses.view(target.shape).to(returned)
    found = losses.sum()
    if reduction == "mean":
        found = found / (targets != ignore_index).sum()
    return found.to(returned)
