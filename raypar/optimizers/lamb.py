"""LAMB: Adam whose step of each layer is as long as the layer's weights allow, for large batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class LAMB(torch.optim.Optimizer):
    r"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962,
    algorithm 2).

    For a parameter x with gradient g, in step t:

        m = beta1 m + (1 - beta1) g             v = beta2 v + (1 - beta2) g^2
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
        u = r + weight_decay x
        x = x - lr phi(|x|) / |u| u

    phi is the identity, limited to `norm_limits` if these are given. Where |x| or |u| is 0, the factor phi(|x|) / |u| is 1, and
    for parameters of a group with `adapt: False` (biases and norms, in the paper's code) it always is. Each parameter is one
    "layer" of the paper.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        norm_limits: tuple[float, float] | None = None,
        adapt: bool = True,
    ) -> None:
        """`norm_limits`: least and largest phi(|x|); None: no limits. `adapt`: whether steps are scaled by phi(|x|) / |u|."""
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                f"LAMB needs lr, eps, weight_decay >= 0 and betas in [0, 1): {lr=}, {eps=}, {weight_decay=}, {betas=}"
            )
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "norm_limits": norm_limits, "adapt": adapt}
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all parameters that have a gradient. Returns what `closure`, which is called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                if gradient.is_sparse:
                    raise RuntimeError("LAMB takes no sparse gradients")
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["step"] += 1
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                update = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                update = torch.div(mean, update, out=update).div_(1 - beta1 ** state["step"])
                if decay:
                    update.add_(parameter, alpha=decay)
                if group["adapt"]:
                    update.mul_(trust_ratio(parameter, update, group["norm_limits"]))
                parameter.sub_(update, alpha=float(group["lr"]))
        return loss


def trust_ratio(parameter: Tensor, update: Tensor, norm_limits: tuple[float, float] | None = None) -> Tensor:
    """phi(|x|) / |u|, a tensor without dims; 1 where either norm is 0."""
    size, length = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
    limited = size.clamp(*norm_limits) if norm_limits is not None else size
    return torch.where((size > 0) & (length > 0), limited / length, torch.ones_like(size))
