"""Several optimizers in the place of one: each trains the parameters that its pattern matches (`optimizer.entries`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers that step one after the other. State is theirs; the groups are those of all, the very dicts."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([parameter for group in groups for parameter in group["params"]], {})
        self.param_groups, self.optimizers = groups, tuple(optimizers)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of each, in the order of the job."""
        for each in self.optimizers:
            each.step()


def optimizers_in(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that have state: those of several, or the one itself."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)
