"""The precisions in which layers can compute, with everything that differs between them: under `torch.autocast`, or with
parameters in it.

To add a precision, add a record here and its name to `PrecisionName` (`job/precision_and_plan_names.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raypar.job import Job
from raypar.job.precision_and_plan_names import PrecisionName
from raypar.job.precision_section import PrecisionConfig

if TYPE_CHECKING:
    import torch


def dtype_of_job(spec: Job) -> torch.dtype:
    """The dtype of parameters, their gradients and the optimizer's state (`Job.dtype`)."""
    import torch

    found: torch.dtype = getattr(torch, spec.dtype)
    return found


@dataclass(frozen=True)
class AutocastPrecision:
    """One dtype to which `torch.autocast` casts."""

    dtype_name: str
    """PyTorch's name of the dtype."""
    kernel_error_words: tuple[str, ...]
    """Parts of PyTorch's error messages if an operation has no kernel for the dtype, or if its operands must have one dtype."""
    comparison_tolerance: float
    """Largest difference between a captured model and the user's module, as a share of the largest number in a tensor."""
    gpu_supports: Callable[[], bool]
    """Whether PyTorch's current GPU computes in the dtype itself, rather than emulating it more slowly than float32."""
    gpu_needed: str
    """The GPUs that support the dtype, for a cure: `use GPUs of ...`."""
    cpu_supports: Callable[[], bool] = lambda: True
    """Whether PyTorch computes in the dtype on this processor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype itself."""
        import torch

        found = getattr(torch, self.dtype_name)
        assert isinstance(found, torch.dtype)
        return found

    def says_kernel_is_missing(self, message: str) -> bool:
        """Whether an error of PyTorch with this message is about an operation that cannot compute in the dtype."""
        return any(words in message for words in self.kernel_error_words)


def _gpu_has_bfloat16() -> bool:
    import torch

    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _gpu_has_float16() -> bool:
    import torch

    return torch.cuda.get_device_capability() >= (5, 3)


def _cpu_has_float16() -> bool:
    import torch

    x = torch.ones(2, 2, dtype=torch.float16)
    try:
        return bool((x @ x).sum() == 8)
    except RuntimeError:  # "addmm_impl_cpu_" not implemented for 'Half'
        return False


AUTOCAST_PRECISIONS: Mapping[PrecisionName, AutocastPrecision] = {
    "bf16": AutocastPrecision(
        dtype_name="bfloat16",
        kernel_error_words=("BFloat16", "bfloat16", "equal to src.dtype"),
        comparison_tolerance=5e-2,
        gpu_supports=_gpu_has_bfloat16,
        gpu_needed="compute capability 8.0 (Ampere) or newer",
    ),
    "fp16": AutocastPrecision(
        dtype_name="float16",
        kernel_error_words=("for 'Half'", "equal to src.dtype"),  # Half without quotes may be samples, too
        comparison_tolerance=1e-2,
        gpu_supports=_gpu_has_float16,
        gpu_needed="compute capability 5.3 (Maxwell) or newer",
        cpu_supports=_cpu_has_float16,
    ),
}
"""Value of `precision.compute` and of `precision.parameters` -> the precision."""


def autocast_of(precision: PrecisionConfig | None) -> AutocastPrecision | None:
    """The precision to which autocast casts in a job with this section; None: there is no autocast."""
    return None if precision is None or precision.compute is None else AUTOCAST_PRECISIONS[precision.compute]


def parameter_dtype_of(precision: PrecisionConfig | None) -> torch.dtype | None:
    """The dtype of the copies of parameters that layers compute with; None: they compute with the parameters themselves."""
    return None if precision is None or precision.parameters is None else AUTOCAST_PRECISIONS[precision.parameters].dtype


def gradient_dtype_of(precision: PrecisionConfig | None) -> torch.dtype | None:
    """The dtype in which gradients of the copies of parameters are added up; None: in that of the parameters."""
    if precision is None or precision.gradients == "float32":
        return None
    return AUTOCAST_PRECISIONS[precision.gradients].dtype


def layer_precision_of(precision: PrecisionConfig | None) -> AutocastPrecision | None:
    """The precision in which layers compute, in either way; None: they compute in the job's `dtype`."""
    name = None if precision is None else precision.compute or precision.parameters
    return None if name is None else AUTOCAST_PRECISIONS[name]
