"""The scale of a loss whose gradients are float16: a function of its settings and of which steps were skipped (rule 13)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST, MOST = -24, 127
"""Exponents of the smallest and the largest scale: 2^-24 is the smallest float16, 2^127 a float32. Where gradients are not
finite with the smallest one, it is not their scale."""


@dataclass(frozen=True, slots=True)
class LossScaling:
    """How the scale changes, as in `torch.amp.GradScaler`. All scales are powers of two, of which these are the exponents."""

    first: int
    """Of the scale of step 0."""
    growth: int
    """What is added after each `interval` steps in a row that were not skipped; at least 1."""
    backoff: int
    """What is taken away after a step that was skipped; at least 1."""
    interval: int
    """Number of steps; at least 1."""

    def exponent(self, step: int, skipped: Sequence[int]) -> int:
        """The exponent k of a step's scale 2^k. `skipped`: the skipped steps, ascending; those from `step` on do not count."""
        exponent, begun = self.first, 0
        for each in skipped:
            if each >= step:
                break
            exponent = max(LEAST, self._grown(exponent, each - begun) - self.backoff)
            begun = each + 1
        return self._grown(exponent, step - begun)

    def _grown(self, exponent: int, steps: int) -> int:
        """The exponent after so many steps in a row."""
        return exponent + self.growth * min(steps // self.interval, (MOST - exponent) // self.growth)


def format_loss_scale(scale: float) -> str:
    """A scale, which is a power of two, as text: `2^16`."""
    return f"2^{math.frexp(scale)[1] - 1}"
