"""What checks that compute microbatches before a run share: the job they compute, the largest model, and the tolerance."""

from __future__ import annotations

from raypar.job import Job, OptimizerConfig
from raypar.worker.autocast_precisions import autocast_of

MOST_BYTES = 64 << 20
"""Models with more bytes of parameters and buffers are not computed: comparing one takes six times as much memory."""
TOLERANCES = {"float32": 1e-4, "float64": 1e-9}
"""Dtype -> largest difference, as a share of the largest number in a tensor. Additions in another order stay far below it; a
wrong layer's smallest effect is far above. Mixed precisions have their own (`AutocastPrecision.comparison_tolerance`)."""


def comparison_tolerance(spec: Job) -> float:
    """The largest relative difference between numbers that count as equal under the job's dtype or precision."""
    autocast = autocast_of(spec.precision)
    return TOLERANCES[spec.dtype] if autocast is None else autocast.comparison_tolerance


def with_few_microbatches(spec: Job, few: int) -> Job:
    """The job on the CPU, with steps of `few` of its microbatches, which change no parameter."""
    return spec.replace(
        batch_size=few * spec.batch_size // spec.microbatches,
        microbatches=few,
        virtual_replicas=0,
        clip_norm=None,
        lr_schedule=None,
        validation=None,
        non_finite="skip",
        device="cpu",
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.0}),
    )
