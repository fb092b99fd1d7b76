"""Sums over ranks on a device: one launch for all additions of a tensor (rule 11 of `raypar/NUMERICS.md`).

On CUDA a kernel gets the addresses of the parts as arguments, and each of its threads adds single elements over the tree that
`comm.collectives.add_over_tree` follows, in the dtypes that it adds in; its bits are the same (not those of a NaN).
`add_over_tree` itself, N - 1 operations and more for short dtypes, does it where the kernel cannot be compiled, for other
dtypes, and on other devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from raypar.comm.collectives import add_over_tree
from raypar.plan.addition_tree import TreeNode, addition_tree_children

log = logging.getLogger("raypar")

THREADS = 256
"""Threads of a block."""
MOST_BLOCKS = 1024
"""Blocks of a launch: about as many as the largest GPUs run at once. Each thread goes on until all elements are added."""
MOST_PARTS = 64
"""Parts of one launch: CUDA passes 4 KiB of arguments to every kernel."""

HELPERS = r"""
__device__ float from_bfloat16(unsigned short bits) { return __int_as_float((int) ((unsigned) bits << 16)); }

__device__ unsigned short to_bfloat16(float number) {
    const unsigned bits = (unsigned) __float_as_int(number);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (unsigned short) ((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ float from_float16(unsigned short bits) {
    const unsigned sign = (unsigned) (bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return __int_as_float((int) (sign | 0x7f800000u | fraction << 13));
    if (exponent != 0) return __int_as_float((int) (sign | (exponent + 112) << 23 | fraction << 13));
    const float small = __fmul_rn((float) fraction, 5.9604644775390625e-08f);
    return sign ? -small : small;
}

__device__ unsigned short to_float16(float number) {
    const unsigned bits = (unsigned) __float_as_int(number), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7fff;
    if (size >= 0x477ff000u) return (unsigned short) (sign | 0x7c00u);
    if (size >= 0x38800000u) return (unsigned short) (sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13);
    const float shifted = __fadd_rn(__int_as_float((int) size), 0.5f);
    return (unsigned short) (sign | ((unsigned) __float_as_int(shifted) - 0x3f000000u));
}
"""
"""Short numbers as float32, exactly, and back, to the nearest, of two the even one. The smallest float16 is 2**-24, which is
the step of float32 between 0.5 and 1: there an addition rounds as it has to."""
KERNEL = r"""
extern "C" __global__ void NAME(PARAMETERS, ELEMENT* out, long long length) {
    const long long step = (long long) gridDim.x * THREADS;
    for (long long place = (long long) blockIdx.x * THREADS + threadIdx.x; place < length; place += step)
        out[place] = TOTAL;
}
"""
"""CUDA C++. `out` may be one of the parts."""
FORMATS = {
    torch.float32: ("float", "__fadd_rn", "{}", "{}"),
    torch.float64: ("double", "__dadd_rn", "{}", "{}"),
    torch.bfloat16: ("unsigned short", "__fadd_rn", "from_bfloat16({})", "to_bfloat16({})"),
    torch.float16: ("unsigned short", "__fadd_rn", "from_float16({})", "to_float16({})"),
}
"""dtype -> (element in memory, addition, what is added of an element, what is kept of a sum)."""


def add_over_tree_on_device(parts: Sequence[Tensor], own: int, out: Tensor) -> None:
    """As `add_over_tree`, in one operation of the current stream; all tensors are contiguous and on one device."""
    torch.ops.raypar.add_over_tree(list(parts), own, out)


def kernel_name(dtype: torch.dtype, parts: int) -> str:
    """The kernel's name: one for each dtype and number of parts."""
    return f"add_{parts}_of_{str(dtype).removeprefix('torch.')}"


def kernel_source(dtype: torch.dtype, parts: int) -> str:
    """The kernel, without `HELPERS`."""
    element, add, read, keep = FORMATS[dtype]

    def total(node: TreeNode) -> str:
        if node[1] - node[0] == 1:
            return read.format(f"part{node[0]}[place]")
        left, right = addition_tree_children(node)
        return f"{add}({total(left)}, {total(right)})"

    text = KERNEL.replace("NAME", kernel_name(dtype, parts)).replace("THREADS", str(THREADS))
    text = text.replace("PARAMETERS", ", ".join(f"const ELEMENT* part{index}" for index in range(parts)))
    return text.replace("ELEMENT", element).replace("TOTAL", keep.format(total((0, parts))))


Launch = Callable[[Sequence[Tensor], Tensor], None]
"""Launches the kernel on the current stream: (parts, result)."""


@cache
def compiled_kernels(device: int, parts: int) -> dict[torch.dtype, Launch] | None:
    """The kernels for so many parts on a CUDA device; None where they cannot be compiled, which is said.

    Loading them may wait for all that the device is doing: call it before another rank can wait for this one.
    """
    from raypar.comm.nccl.bindings import compile_cuda

    source = HELPERS + "".join(kernel_source(dtype, parts) for dtype in FORMATS)
    try:
        found = {dtype: compile_cuda(source, kernel_name(dtype, parts), device) for dtype in FORMATS}
    except Exception as error:  # of CuPy, of NVIDIA's compiler, of the driver: there are many
        log.warning(
            "the kernel for sums over %d ranks cannot be used (%s: %s): each sum is %d operations, with the same bits; "
            "install CuPy as `raypar doctor` says",
            parts,
            type(error).__name__,
            error,
            parts - 1,
        )
        return None
    return {dtype: _launch(device, launch) for dtype, launch in found.items()}


def _launch(device: int, launch: Callable[[int, int, tuple[int, ...], int], None]) -> Launch:
    def run(parts: Sequence[Tensor], out: Tensor) -> None:
        blocks = min(MOST_BLOCKS, -(-out.numel() // THREADS))
        addresses = [part.data_ptr() for part in parts]
        stream = torch.cuda.current_stream(device).cuda_stream
        launch(blocks, THREADS, (*addresses, out.data_ptr(), out.numel()), stream)

    return run


def compile_ahead(device: torch.device, parts: int) -> None:
    """Compile and load what sums over so many ranks need on a device; nothing where they need no kernel."""
    if device.type == "cuda" and parts <= MOST_PARTS:
        compiled_kernels(device.index, parts)


def _on_cuda(parts: Sequence[Tensor], own: int, out: Tensor) -> Tensor:
    known = len(parts) <= MOST_PARTS and out.dtype in FORMATS
    kernels = compiled_kernels(out.device.index, len(parts)) if known else None
    if kernels is None:
        add_over_tree(parts, own, out)
    elif out.numel():
        kernels[out.dtype](parts, out)
    return out


def _by_operations(parts: Sequence[Tensor], own: int, out: Tensor) -> Tensor:
    add_over_tree(parts, own, out)
    return out


_LIBRARY = torch.library.Library("raypar", "FRAGMENT")
_LIBRARY.define("add_over_tree(Tensor[] parts, int own, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.impl("add_over_tree", _by_operations, "CPU")
_LIBRARY.impl("add_over_tree", _on_cuda, "CUDA")
