"""Cross-entropy of logits that are cut by vocabulary, without gathering them (Shoeybi et al. 2019, section 3).

For every row shard t sends three numbers: its maximum m_t, s_t = sum exp(l - m_t) over its logits l, and the target's logit if
it has that (else 0); with label smoothing also the sum of its logits. Every shard then computes, in shard order,
M = max m_t and log Z = M + log sum_t s_t exp(m_t - M).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.model.split_linear_backward import is_autocast_enabled
from raypar.model.tensor_parallel.autograd_collectives import first_derivative_only
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, implements, unsupported_on_part_error
from raypar.torch_compat.multi_tensor import assert_on_device


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, start: int, total: int, smoothing: float, ignored: int, group: ShardGroup
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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        probabilities, rows, place, mine, counted = ctx.saved_tensors
        out = probabilities.clone()
        out[rows, place] -= mine.to(out.dtype) * (1.0 - ctx.smoothing)
        if ctx.smoothing:
            out -= ctx.smoothing / ctx.total
        return out.mul_(gradient.masked_fill(~counted, 0.0).unsqueeze(1)), None, None, None, None, None, None


@implements("cross_entropy")
def _cross_entropy(
    func: Callable[..., Any],
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
