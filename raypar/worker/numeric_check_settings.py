"""What checks that compute microbatches before a run share: the job they compute, the largest model, and the tolerance."""

from __future__ import annotations

from dataclasses import replace

from raypar.worker.job_spec import JobSpec, OptimizerSpec, Ref

MOST_BYTES = 64 << 20
"""Models with more bytes of parameters and buffers are not computed: comparing one takes six times as much memory."""
TOLERANCES = {"float32": 1e-4, "float64": 1e-9}
"""Dtype -> largest difference, as a share of the largest number in a tensor. Additions in another order stay far below it; a
wrong layer's smallest effect is far above. Mixed precisions have their own (`AutocastPrecision.comparison_tolerance`)."""


def comparison_tolerance(spec: JobSpec) -> float:
    """The largest relative difference between numbers that count as equal under the job's dtype or precision."""
    autocast = spec.precision.autocast
    return TOLERANCES[spec.dtype] if autocast is None else autocast.comparison_tolerance


def with_few_microbatches(spec: JobSpec, few: int) -> JobSpec:
    """The job on the CPU, with steps of `few` of its microbatches, which change no parameter."""
    return replace(
        spec,
        batch_size=few * spec.batch_size // spec.microbatches,
        microbatches=few,
        virtual_replicas=0,
        clip_norm=None,
        lr_schedule=None,
        validation=None,
        non_finite="skip",
        device="cpu",
        optimizer=OptimizerSpec(Ref("torch.optim:SGD", {"lr": 0.0}), ()),
    )
