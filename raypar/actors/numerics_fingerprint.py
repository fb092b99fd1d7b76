"""What a worker computes with: versions, processor or GPU, threads, and a digest of the results of a few kernels.

Workers whose fingerprints differ may not give bit-identical results (the numerics contract, raypar/NUMERICS.md)."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import raypar
from raypar.doctor.check_environment_variables import FINGERPRINT_SETTINGS

if TYPE_CHECKING:
    import torch

    from raypar.job import PrecisionConfig

Fingerprint = Mapping[str, str]


def fingerprint_worker_numerics(threads: int, device: torch.device, precision: PrecisionConfig | None = None) -> dict[str, str]:
    """The fingerprint of this process with `threads` threads, for a job that computes in `precision` (None: in its `dtype`).

    Takes some milliseconds; on a GPU it loads kernels too.
    """
    import numpy
    import torch

    from raypar.worker.layer_precisions import layer_precision_of

    lower = layer_precision_of(precision)
    on_gpu: dict[str, str] = {}
    if device.type == "cuda":
        on_gpu = {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
        on_gpu["cudnn"] = str(torch.backends.cudnn.version())
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # its own class: who unpickles one loads torch (1.6 s in a new driver)
        "numpy": numpy.__version__,
        "raypar": raypar.__version__,
        "machine": platform.machine(),
        "processor": processor_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(threads),
        "settings": " ".join(f"{name}={os.environ[name]}" for name in FINGERPRINT_SETTINGS if name in os.environ) or "none",
        "kernels": digest_kernel_results(device),
        **({f"{lower.dtype_name}_kernels": digest_autocast_kernel_results(device, lower.dtype)} if lower else {}),
        **on_gpu,
    }


def processor_model() -> str:
    """Vendor, family and model of the processor, by which libraries choose their kernels; "unknown" if Linux does not say."""
    wanted = {"vendor_id": "", "cpu family": "", "model": "", "CPU implementer": "", "CPU part": ""}
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in wanted:
                    wanted[key.strip()] = value.strip()
                elif not line.strip():
                    break  # the first processor stands for all
    except OSError:
        return "unknown"
    return " ".join(value for value in wanted.values() if value) or "unknown"


def digest_kernel_results(device: torch.device) -> str:
    """Digest of the results of matrix product, exponential, normalisation and sum for fixed numbers."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(33, 65, generator=generator).to(device)
    b = torch.randn(65, 47, generator=generator).to(device)
    x = a @ b
    y = torch.nn.functional.layer_norm(torch.softmax(x, -1) + torch.nn.functional.gelu(x), (47,))
    # Products of one row or one column have kernels of their own, and so do those of transposed matrices.
    results = [
        y,
        y.sum(),
        a.t() @ x,
        x @ b.t(),
        a[:1] @ b,
        a @ b[:, :1],
        torch.dot(a.view(-1), a.view(-1)),
        (a.double() @ b.double()),
    ]
    return _digest(results)


def digest_autocast_kernel_results(device: torch.device, dtype: torch.dtype) -> str:
    """As `digest_kernel_results`, in `dtype`: processors have other kernels for bfloat16 (AVX-512 BF16, AMX, none)."""
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(0)
    a, b, bias = (torch.randn(shape, generator=generator).to(device).to(dtype) for shape in ((33, 65), (47, 65), (47,)))
    x = functional.linear(a, b, bias)
    heads = x.view(1, 3, 11, 47)
    results = [
        x,
        a.t() @ x,
        a[:1] @ b.t(),
        functional.layer_norm(torch.softmax(x, -1) + functional.gelu(x), (47,)),
        functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        x.sum(0),
    ]
    return _digest([result.float() for result in results])


def _digest(results: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def describe_fingerprint_differences(prints: Sequence[Fingerprint]) -> list[str]:
    """A line for every property in which the workers differ, with each worker's value."""
    lines = []
    for key in prints[0]:
        values = [p[key] for p in prints]
        if len(set(values)) > 1:
            lines.append(f"{key}: " + ", ".join(f"worker {rank} {value}" for rank, value in enumerate(values)))
    return lines
