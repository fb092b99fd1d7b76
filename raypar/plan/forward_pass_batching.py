"""The passes of a run that makes forward passes only: the samples of a whole data set in microbatches, so many in each pass.

The samples are divided into microbatches once, for the whole data set. So what is computed of them depends neither on the plan
nor on how many microbatches a pass has.
"""

from __future__ import annotations

from dataclasses import dataclass

from raypar.plan.microbatches import Microbatches

PASSES_CURE = "run the command again: nothing of its passes is kept"
"""The cure for a run of forward passes that is lost, where one that trains is resumed."""
MICROBATCHES_OF_PASS = 32
"""The most microbatches of one pass."""


@dataclass(frozen=True, slots=True)
class ForwardPasses:
    """The passes over a data set."""

    samples: int
    """Number of samples of the whole data set that go through the model."""
    microbatches: int
    """Number of microbatches of a pass. The last pass may lack some: it has the last microbatch of all in their place."""
    first: int = 0
    """Number of passes that other runs have made already."""


def whole_batching(samples: int, batch_size: int, microbatches: int) -> Microbatches:
    """The samples of a whole data set in microbatches of at most the training size."""
    count = -(-samples // -(-batch_size // microbatches))
    return Microbatches(count, count, samples)
