"""Several optimizers in the place of one: each trains the parameters that its pattern matches (`optimizer.entries`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from raypar.worker.step.weight_averages import WeightAverages


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers that step one after the other, or one beside averages of the weights. State is theirs; the groups are those of
    all, the very dicts."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], averages: WeightAverages | None = None) -> None:
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([parameter for group in groups for parameter in group["params"]], optimizers[0].defaults)
        self.param_groups, self.optimizers, self.averages = groups, tuple(optimizers), averages

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of each, in the order of the job."""
        for each in self.optimizers:
            each.step()

    @contextlib.contextmanager
    def taking_state(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Entered while one of them gets its state from elsewhere."""
        yield


def averages_of(optimizer: torch.optim.Optimizer) -> WeightAverages | None:
    """The averages of an optimizer's parameters, if the job has any."""
    return optimizer.averages if isinstance(optimizer, SeveralOptimizers) else None


def optimizers_in(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that have state: those of several, or the one itself."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)
