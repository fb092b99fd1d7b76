"""The squares of a gradient's pieces on a device: one launch for all pieces of a stage (rule 7 of `raypar/NUMERICS.md`).

On CUDA a kernel gets a table of the pieces' addresses and lengths, and has one block of threads for each piece: thread t adds
the squares of the elements t, t + 256, ... in float64, then the threads' sums are added by halves. No step of that depends on
an address, on the other pieces, or on the order in which blocks run. `squares_by_operations` does the same in operations of
PyTorch, for processes in which the kernel cannot be compiled, and for tests. Other devices compute what CPUs do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from raypar.plan.ownership import CANONICAL_PIECE
from raypar.torch_compat.multi_tensor import copy_all

log = logging.getLogger("raypar")

THREADS = 256
"""Threads of a block."""
KERNEL = r"""
extern "C" __global__ void squares(const NUMBER* const* starts, const long long* lengths, double* out) {
    __shared__ double sums[THREADS];
    const NUMBER* piece = starts[blockIdx.x];
    const long long length = lengths[blockIdx.x];
    double sum = 0.0;
    for (long long place = threadIdx.x; place < length; place += THREADS) {
        const double number = (double) piece[place];
        sum = __dadd_rn(sum, __dmul_rn(number, number));
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] = __dadd_rn(sums[threadIdx.x], sums[threadIdx.x + half]);
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
}
"""
"""CUDA C++; NUMBER is float or double."""
NUMBERS = {torch.float32: "float", torch.float64: "double"}
"""The dtypes of gradients."""
AT_ONCE = 256
"""Pieces that `squares_by_operations` takes together, of which it makes a copy."""


@torch.no_grad()
def squares_on_device(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The squares of all pieces of contiguous gradients: float64, one tensor for each device and dtype of them."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return [torch.ops.raypar.squares(same) for same in alike.values()]


def piece_table(places: Sequence[tuple[int, int]], itemsize: int) -> tuple[list[int], list[int]]:
    """(address, length) of each piece of gradients, given their (address, number of elements)."""
    found = [
        (address + start * itemsize, min(CANONICAL_PIECE, size - start))
        for address, size in places
        for start in range(0, size, CANONICAL_PIECE)
    ]
    return [address for address, _ in found], [length for _, length in found]


def squares_by_operations(gradients: Sequence[Tensor]) -> Tensor:
    """What the kernel computes, by operations of PyTorch on the gradients' own device."""
    pieces = [piece for gradient in gradients for piece in gradient.view(-1).split(CANONICAL_PIECE) if len(piece)]
    found = []
    for start in range(0, len(pieces), AT_ONCE):
        some = pieces[start : start + AT_ONCE]
        room = some[0].new_zeros((len(some), CANONICAL_PIECE))  # an element 0.0 adds nothing
        copy_all([row[: len(piece)] for row, piece in zip(room, some, strict=True)], some)
        turns = room.double().square_().view(len(some), -1, THREADS).unbind(1)
        sums = turns[0].clone()
        for turn in turns[1:]:
            sums.add_(turn)
        while (half := sums.shape[1] // 2) > 0:
            sums = sums[:, :half] + sums[:, half:]
        found.append(sums.view(-1))
    return torch.cat(found)


Launch = Callable[[int, Tensor, Tensor], None]
"""Launches the kernel for so many pieces on the current stream: (pieces, table of addresses and lengths, result)."""


@cache
def compiled_kernel(device: int, dtype: torch.dtype) -> Launch | None:
    """The kernel on a CUDA device; None where it cannot be compiled, which is said."""
    from raypar.comm.nccl.bindings import compile_cuda

    try:
        launch = compile_cuda(KERNEL.replace("NUMBER", NUMBERS[dtype]).replace("THREADS", str(THREADS)), "squares", device)
    except Exception as error:  # of CuPy, of NVIDIA's compiler, of the driver: there are many
        log.warning(
            "the kernel of the gradient's norm cannot be used (%s: %s): its pieces are squared by some 140 operations for each "
            "%d of them, with the same bits; install CuPy as `raypar doctor` says",
            type(error).__name__,
            error,
            AT_ONCE,
        )
        return None

    def run(pieces: int, table: Tensor, out: Tensor) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        launch(pieces, THREADS, (table[0].data_ptr(), table[1].data_ptr(), out.data_ptr()), stream)

    return run


_tables: dict[tuple[int, torch.dtype], tuple[tuple[tuple[int, int], ...], Tensor]] = {}
"""(device, dtype) -> (where gradients lay, the table on the device) of the last launch: many lie where they lay before."""


def _table(gradients: Sequence[Tensor]) -> Tensor:
    device, dtype = gradients[0].device, gradients[0].dtype
    places, key = tuple((one.data_ptr(), one.numel()) for one in gradients), (device.index, dtype)
    known = _tables.get(key)
    if known is None or known[0] != places:
        rows = torch.tensor(piece_table(places, dtype.itemsize), dtype=torch.int64).pin_memory()
        _tables[key] = known = places, rows.to(device, non_blocking=True)
    return known[1]


def _on_cuda(gradients: Sequence[Tensor]) -> Tensor:
    run = compiled_kernel(gradients[0].device.index, gradients[0].dtype)
    if run is None:
        return squares_by_operations(gradients)
    table = _table(gradients)
    out = torch.empty(table.shape[1], dtype=torch.float64, device=gradients[0].device)
    run(len(out), table, out)
    return out


def dots_of_pieces(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The squares of contiguous gradients as CPUs make them: `dot` of each piece."""
    found: list[Tensor] = []
    for gradient in gradients:
        flat = gradient if gradient.dim() == 1 else gradient.view(-1)
        pieces = flat.split(CANONICAL_PIECE) if flat.numel() > CANONICAL_PIECE else (flat,)
        found.extend(map(Tensor.dot, pieces, pieces))
    return found


def _as_cpus_do(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack(dots_of_pieces(gradients)).double()


_LIBRARY = torch.library.Library("raypar", "DEF")
_LIBRARY.define("squares(Tensor[] gradients) -> Tensor")
_LIBRARY.impl("squares", _as_cpus_do, "CPU")
_LIBRARY.impl("squares", _on_cuda, "CUDA")
