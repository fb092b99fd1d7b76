"""Moving averages of the weights, updated when a step is applied by whoever applies it (`average` of a job)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from raypar.job import AverageConfig


class WeightAverages:
    """The averages of some parameters, or of runs of them: exponential moving averages of their values after steps.

    An average begins as a copy of the weights, in the first step that is applied once `from_step` steps are done. So it is a
    function of the weights after each step, and of which steps were skipped.
    """

    def __init__(
        self,
        spec: AverageConfig,
        parameters: Mapping[str, nn.Parameter],
        copy: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:
        """`copy`: makes the copies that averages begin as."""
        self._spec, self._copy = spec, copy
        self.parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        """Name -> parameter, of those that are trained."""
        self.values: dict[str, Tensor] = {}
        """Name -> average; empty before it has begun."""

    def update(self, done: int) -> None:
        """Take in the weights after a step that was applied. `done`: number of steps done with it."""
        since = done - self._spec.from_step
        if since < 0:
            return
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if name not in self.values:
                    self.values[name] = self._copy(parameter.detach())
                elif since % self._spec.every == 0:
                    self.values[name].lerp_(parameter.detach(), 1 - self._spec.decay)

    def load(self, values: Mapping[str, Tensor], *, takes_over: bool = False) -> None:
        """Go on from these averages, of which copies are made, unless it `takes_over` those in memory; parameters without one
        begin theirs anew."""
        there = {name: values[name].to(each.device) for name, each in self.parameters.items() if name in values}
        keeps = takes_over and self._copy is torch.clone
        self.values = there if keeps else {name: self._copy(value) for name, value in there.items()}
