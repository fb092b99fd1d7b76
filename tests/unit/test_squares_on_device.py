"""The kernel of the gradient's norm, without a GPU: its text is compiled for the processor, and its threads run in turns."""

import ctypes
import logging
import math
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from raypar.comm.nccl import bindings
from raypar.plan.exact_sum import ExactSum
from raypar.worker import squares_on_device
from raypar.worker.norm_and_weights_hash import read_together
from raypar.worker.squares_on_device import KERNEL, NUMBERS, THREADS, piece_table, squares_by_operations

SHIM = r"""
#include <ucontext.h>
struct Place { unsigned x; };
static Place threadIdx, blockIdx;
static ucontext_t scheduler, threads[THREADS];
static char stacks[THREADS][1 << 14];
static int ended;
#define __global__
#define __shared__ static
static void __syncthreads() { swapcontext(&threads[threadIdx.x], &scheduler); }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dmul_rn(double a, double b) { return a * b; }
KERNEL
static const NUMBER* const* all_starts;
static const long long* all_lengths;
static double* all_out;
static void thread() { squares(all_starts, all_lengths, all_out); ended++; }
extern "C" void launch(int blocks, const NUMBER* const* starts, const long long* lengths, double* out) {
    all_starts = starts; all_lengths = lengths; all_out = out;
    for (int block = blocks - 1; block >= 0; block--) {
        blockIdx.x = block;
        for (auto& one : threads) {
            getcontext(&one);
            one.uc_stack.ss_sp = stacks[&one - threads];
            one.uc_stack.ss_size = sizeof stacks[0];
            one.uc_link = &scheduler;
            makecontext(&one, thread, 0);
        }
        for (ended = 0; ended < THREADS;)
            for (int turn = 0; turn < THREADS; turn++) {
                threadIdx.x = block % 2 ? turn : THREADS - 1 - turn;
                swapcontext(&scheduler, &threads[threadIdx.x]);
            }
    }
}
"""
"""What CUDA has beside the kernel: the threads of a block run in turns, from one `__syncthreads` to the next."""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for C++")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    found = {}
    for dtype, number in NUMBERS.items():
        text = SHIM.replace("KERNEL", KERNEL).replace("NUMBER", number).replace("THREADS", str(THREADS))
        source, library = folder / f"{number}.cpp", folder / f"{number}.so"
        source.write_text(text)
        words = [
            "g++",
            "-std=c++20",
            "-O1",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            "-pthread",
            str(source),
            "-o",
            str(library),
        ]
        subprocess.run(words, check=True, timeout=120)
        found[dtype] = ctypes.CDLL(str(library)).launch
    return found


def by_kernel(launch, gradients):
    """What the kernel makes of the table of these gradients."""
    places = [(gradient.data_ptr(), gradient.numel()) for gradient in gradients]
    table = torch.tensor(piece_table(places, gradients[0].dtype.itemsize), dtype=torch.int64)
    out = torch.full((table.shape[1],), math.pi, dtype=torch.float64)
    launch(len(out), *(ctypes.c_void_p(one.data_ptr()) for one in (table[0], table[1], out)))
    return out


def at(gradient, offset):
    """A copy that begins so many elements behind an aligned address."""
    room = torch.empty(gradient.numel() + 128, dtype=gradient.dtype)
    room = room[-(room.data_ptr() // gradient.dtype.itemsize) % 64 :]
    return room[offset : offset + gradient.numel()].copy_(gradient)


SIZES = (1, 255, 256, 257, 32_767, 32_768, 32_769, 70_000)


def gradients_of(dtype):
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(size, generator=generator, dtype=dtype) * 10.0**power for power, size in enumerate(SIZES, -4)]
    for place, value in ((3, math.inf), (5, math.nan), (6, -math.inf)):
        made.append(torch.randn(300, generator=generator, dtype=dtype))
        made[-1][place] = value
    return [*made, torch.full((40,), torch.finfo(dtype).smallest_normal / 8, dtype=dtype), torch.full((9,), -0.0, dtype=dtype)]


def same(found, want):
    return torch.equal(found.view(torch.int64)[~found.isnan()], want.view(torch.int64)[~want.isnan()]) and torch.equal(
        found.isnan(), want.isnan()
    )


@needs_compiler
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_the_kernel_computes_what_operations_of_pytorch_do_at_every_address_and_under_every_division(compiled, dtype):
    gradients = gradients_of(dtype)
    want = squares_by_operations(gradients)
    assert len(want) == sum(math.ceil(gradient.numel() / 32_768) for gradient in gradients)
    for offset in (0, 1, 7, 33, 63):
        assert same(by_kernel(compiled[dtype], [at(gradient, offset) for gradient in gradients]), want), offset
    alone = torch.cat([by_kernel(compiled[dtype], [gradient]) for gradient in reversed(gradients)])
    assert same(alone.flip(0).sort().values, want.sort().values)
    assert same(torch.cat([squares_by_operations(part) for part in (gradients[:3], gradients[3:])]), want)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_operations_of_pytorch_add_by_the_tree_that_the_contract_names(dtype):
    for gradient in gradients_of(dtype)[:-1]:
        want = []
        for piece in gradient.double().split(32_768):
            sums = [0.0] * THREADS
            for place, number in enumerate(piece.tolist()):
                sums[place % THREADS] += number * number
            while (half := len(sums) // 2) > 0:
                sums = [sums[place] + sums[place + half] for place in range(half)]
            want += sums
        assert same(squares_by_operations([gradient]), torch.tensor(want, dtype=torch.float64))


def test_a_table_has_every_piece_once():
    addresses, lengths = piece_table([(1000, 70_000), (5, 0), (400_000, 32_768), (9, 3)], 4)
    assert addresses == [1000, 1000 + 4 * 32_768, 1000 + 8 * 32_768, 400_000, 9]
    assert lengths == [32_768, 32_768, 70_000 - 2 * 32_768, 32_768, 3]


def test_many_pieces_are_taken_together(monkeypatch):
    gradients = gradients_of(torch.float32)
    want = squares_by_operations(gradients)
    monkeypatch.setattr(squares_on_device, "AT_ONCE", 3)
    assert same(squares_by_operations(gradients), want)


def test_a_device_is_asked_once_for_each_dtype_and_what_cpus_compute_is_their_dot():
    gradients = [torch.randn(40_000), torch.empty(0), torch.randn(3, 5), torch.randn(7, dtype=torch.float64)]
    found = squares_on_device.squares_on_device(gradients)
    pieces = [*gradients[0].split(32_768), gradients[2].view(-1), gradients[3]]
    assert len(found) == 2 and read_together(found) == [torch.dot(piece, piece).item() for piece in pieces]
    assert ExactSum.of(read_together([torch.tensor(2.0), *found, 0.5])) == ExactSum.of([2.0, 0.5, *read_together(found)])


def test_where_the_kernel_cannot_be_compiled_operations_of_pytorch_take_its_place_and_a_line_says_so(caplog, monkeypatch):
    def refuse(*given):
        raise RuntimeError("no compiler")

    gradients = gradients_of(torch.float32)
    monkeypatch.setattr(bindings, "compile_cuda", refuse)
    squares_on_device.compiled_kernel.cache_clear()
    with caplog.at_level(logging.WARNING, logger="raypar"):
        for _ in range(2):
            assert same(squares_on_device._on_cuda(gradients), squares_by_operations(gradients))
    assert caplog.text.count("the kernel of the gradient's norm cannot be used (RuntimeError: no compiler)") == 1
    squares_on_device.compiled_kernel.cache_clear()


@needs_compiler
def test_a_launch_gets_the_table_which_is_copied_to_the_device_only_when_gradients_lie_elsewhere(compiled, monkeypatch):
    launches, copies = [], []

    def compile_cuda(source, name, device):
        assert "NUMBER" not in source and "THREADS" not in source and name == "squares"

        def launch(blocks, threads, arguments, stream):
            launches.append((blocks, threads, stream))
            compiled[torch.float32](blocks, *map(ctypes.c_void_p, arguments))

        return launch

    def pinned(tensor):
        copies.append(tensor)
        return tensor

    monkeypatch.setattr(bindings, "compile_cuda", compile_cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(squares_on_device, "_tables", {})
    squares_on_device.compiled_kernel.cache_clear()
    gradients = gradients_of(torch.float32)
    for given, tables in ((gradients, 1), (gradients, 1), ([at(one, 3) for one in gradients], 2), (gradients[:4], 3)):
        want = squares_by_operations(given)
        assert same(squares_on_device._on_cuda(given), want) and len(copies) == tables
        assert launches.pop() == (len(want), THREADS, 5) and not launches
    squares_on_device.compiled_kernel.cache_clear()
