"""LARS: SGD with momentum whose step of each layer is as long as the layer's weights allow, for large batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT


class LARS(torch.optim.Optimizer):
    r"""LARS (You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks", arXiv:1708.03888, section 4,
    algorithm 1).

    For a parameter x with gradient g:

        rate = trust_coefficient |x| / (|g| + weight_decay |x| + eps)
        v = momentum v + lr rate (g + weight_decay x)
        x = x - v

    Where |x| or |g| is 0, the rate is 1, and for parameters of a group with `adapt: False` (biases and norms, in practice) it
    always is. Each parameter is one "layer" of the paper.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 0.0,
        adapt: bool = True,
    ) -> None:
        """`trust_coefficient`: the paper's eta. `adapt`: whether steps are scaled by the rate."""
        if not min(lr, momentum, weight_decay, trust_coefficient, eps) >= 0:
            raise ValueError(f"LARS needs numbers >= 0: {lr=}, {momentum=}, {weight_decay=}, {trust_coefficient=}, {eps=}")
        given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eps": eps, "adapt": adapt}
        super().__init__(params, {**given, "trust_coefficient": trust_coefficient})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all parameters that have a gradient. Returns what `closure`, which is called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            momentum, decay, lr = group["momentum"], group["weight_decay"], float(group["lr"])
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                if gradient.is_sparse:
                    raise RuntimeError("LARS takes no sparse gradients")
                update = gradient.add(parameter, alpha=decay)
                if group["adapt"]:
                    size, slope = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(gradient)
                    rate = group["trust_coefficient"] * size / (slope + decay * size + group["eps"])
                    update.mul_(torch.where((size > 0) & (slope > 0), rate, torch.ones_like(rate)))
                if momentum:
                    state = self.state[parameter]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    update = state["momentum_buffer"].mul_(momentum).add_(update, alpha=lr)
                else:
                    update.mul_(lr)
                parameter.sub_(update)
        return loss
