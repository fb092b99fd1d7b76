"""Embedding and cross-entropy cut by vocabulary, without gathering the logits (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.autograd_context_type import AutogradContext
from raypar.model.split_linear_backward import is_autocast_enabled
from raypar.model.tensor_parallel import autograd_collectives
from raypar.model.tensor_parallel.autograd_collectives import first_derivative_only
from raypar.model.tensor_parallel.local_part_layout import sequence_part_layout
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, implements_on_parts, unsupported_on_part_error
from raypar.plan.shard_ranges import IndexRanges
from raypar.torch_compat.device_assertion import assert_on_device


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
        """The embedded ids. Raises `IndexError` for an id outside the vocabulary, as `nn.Embedding` does."""
        inside = ((ids >= 0) & (ids < self.num_embeddings)).all()
        if ids.device.type != "cpu":  # nothing waits for the device
            assert_on_device(inside, f"index out of range in {self.name}")
        elif not inside:
            raise IndexError(
                f"index out of range in {self.name}: ids {int(ids.min())} to {int(ids.max())}, not all "
                f"in [0, {self.num_embeddings})"
            )
        absent = (ids < self.start) | (ids >= self.stop)
        rows = F.embedding((ids - self.start).masked_fill(absent, 0), self.weight, self.padding_idx)
        part = rows.masked_fill(absent.unsqueeze(-1), 0.0)
        if not self.group.sequence_parallel:
            return autograd_collectives.reduce_from_shards(part, self.group)
        if ids.dim() != 2:
            raise ModelError(
                f"{self.name} sees ids of shape {list(ids.shape)}, sequence parallelism needs [batch, sequence]",
                cure="give the embedding the style whole, or set plan.sequence_parallel: false",
            )
        made = autograd_collectives.reduce_scatter_to_shards(part, 1, self.group)
        return ShardedValue(made, sequence_part_layout(ids.shape[1], self.group.shard, self.group.size), self.group)


class _CrossEntropyContext(AutogradContext):
    smoothing: float
    total: int


class _CrossEntropy(torch.autograd.Function):
    """For every row shard t sends three numbers: its maximum m_t, s_t = sum exp(l - m_t) over its logits l, and the target's
    logit if it has that (else 0); with label smoothing also the sum of its logits. Every shard then computes, in shard order,
    M = max m_t and log Z = M + log sum_t s_t exp(m_t - M).
    """

    @staticmethod
    def forward(
        ctx: _CrossEntropyContext,
        logits: Tensor,
        targets: Tensor,
        start: int,
        total: int,
        smoothing: float,
        ignored: int,
        group: ShardGroup,
    ) -> Tensor:
        """logits [n, here], targets [n] -> losses [n], 0 where ignored."""
        here = logits.shape[1]
        rows = torch.arange(len(targets), device=targets.device)
        mine = (targets >= start) & (targets < start + here) & (targets != ignored)
        place = (targets - start).masked_fill(~mine, 0)
        top = logits.max(1).values
        # The maximum over all is not known yet: e^(l - m) is brought to it afterwards. All may be -inf here (padding, masked).
        powers = (logits - top.masked_fill(top == -torch.inf, 0.0).unsqueeze(1)).exp_()
        packed = [top, powers.sum(1), logits[rows, place].masked_fill(~mine, 0.0)]
        if smoothing:
            packed.append(logits.sum(1))
        everybody = group.all_gather(torch.stack(packed), "the parts of a cross-entropy")
        highest = torch.stack([part[0] for part in everybody]).max(0).values
        normaliser = torch.zeros_like(highest)
        chosen = torch.zeros_like(highest)
        for part in everybody:
            normaliser += part[1] * (part[0] - highest).exp()
            chosen += part[2]
        log_sum = normaliser.log() + highest
        losses = log_sum - chosen
        if smoothing:
            mean = sum(part[3] for part in everybody) / total
            losses = (1.0 - smoothing) * losses + smoothing * (log_sum - mean)
        counted = targets != ignored
        probabilities = powers.mul_(((top - highest).exp() / normaliser).unsqueeze(1))
        ctx.save_for_backward(probabilities, rows, place, mine, counted)
        ctx.smoothing, ctx.total = smoothing, total
        return losses.masked_fill(~counted, 0.0)

    @staticmethod
    @first_derivative_only
    def backward(ctx: _CrossEntropyContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        probabilities, rows, place, mine, counted = ctx.saved_tensors
        out = probabilities.clone()
        out[rows, place] -= mine.to(out.dtype) * (1.0 - ctx.smoothing)
        if ctx.smoothing:
            out -= ctx.smoothing / ctx.total
        return out.mul_(gradient.masked_fill(~counted, 0.0).unsqueeze(1)), None, None, None, None, None, None


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
    total = logits.part_layout.size
    wrong = (target != ignore_index) & ((target < 0) | (target >= total))
    if wrong.device.type != "cpu":  # nothing waits for the device
        assert_on_device(~wrong.any(), "a target is out of bounds")
    elif wrong.any():
        raise IndexError(f"Target {int(target[wrong].flatten()[0])} is out of bounds: there are {total} classes.")
    rows = logits.local.movedim(classes, -1).reshape(-1, logits.local.shape[classes])
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    returned = rows.dtype if is_autocast_enabled(rows.device) else logits.local.dtype  # as `F.cross_entropy` does
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, target.reshape(-1), logits.part_layout.ranges[0][0], total, label_smoothing, ignore_index, logits.group
    )
    if reduction == "none":
        return losses.view(target.shape).to(returned)
    found = losses.sum()
    if reduction == "mean":
        found = found / (target != ignore_index).sum()
    return found.to(returned)
