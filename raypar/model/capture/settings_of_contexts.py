"""Settings of the process that contexts and functions change, and a replay would not: kept in events, or refused."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy
import torch

from raypar.model.capture.trace_data import CpuAutocastSetting
from raypar.torch_compat.process_state import mkldnn_flags, saved_tensors_hooks


def cpu_autocast_setting() -> CpuAutocastSetting:
    """The present autocast setting of this thread for CPUs."""
    return CpuAutocastSetting(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))


def settings_of_contexts() -> dict[str, Hashable]:
    """What contexts and functions other than `no_grad` and the CPU's autocast change -> its value."""
    hooks = saved_tensors_hooks(True)
    # Those of checkpoint() and save_on_cpu() change no number; a record leaves them out, and plan.recompute saves the memory.
    changes_no_number = hooks is None or getattr(hooks[0], "__module__", "").startswith(("torch.", "raypar."))
    return {
        "autocast of GPUs": torch.is_autocast_enabled("cuda"),
        "the attention kernels that may be used (sdpa_kernel)": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
        "hooks on what autograd saves (saved_tensors_hooks)": None if changes_no_number else tuple(map(id, hooks)),
        "inference mode": torch.is_inference_mode_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "which algorithms are allowed (use_deterministic_algorithms)": torch.are_deterministic_algorithms_enabled(),
        "the precision of float32 products (set_float32_matmul_precision)": torch.get_float32_matmul_precision(),
        "whether oneDNN is used (torch.backends.mkldnn.flags)": mkldnn_flags()[0],
        "the number of threads (set_num_threads)": torch.get_num_threads(),
    }


class SurroundingSettings(NamedTuple):
    """The settings around a model when its recording began."""

    autocast: CpuAutocastSetting
    """Autocast for CPUs."""
    others: dict[str, Hashable]
    """What `settings_of_contexts` returns."""

    @staticmethod
    def now() -> SurroundingSettings:
        """Those of now."""
        return SurroundingSettings(cpu_autocast_setting(), settings_of_contexts())


def python_random_state() -> tuple[Hashable, ...]:
    """The state of Python's and numpy's generators, to be compared."""
    state: Any = numpy.random.get_state()
    kind, keys, *rest = state
    return random.getstate(), kind, keys.tobytes(), tuple(rest)
