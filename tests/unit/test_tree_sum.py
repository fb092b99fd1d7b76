"""The kernel of sums over ranks, without a GPU: its text is compiled for the processor."""

import ctypes
import logging
import math
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from raypar.comm.collectives import add_over_tree
from raypar.comm.nccl import bindings, tree_sum
from raypar.comm.nccl.tree_sum import FORMATS, HELPERS, MOST_BLOCKS, THREADS, compiled_kernels, kernel_name, kernel_source

SHIM = r"""
#include <bit>
struct Place { unsigned x; };
static Place threadIdx, blockIdx, gridDim;
#define __global__
#define __device__ static
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static double __dadd_rn(double a, double b) { return a + b; }
static float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
static int __float_as_int(float number) { return std::bit_cast<int>(number); }
"""
LAUNCHER = r"""
extern "C" void launch_NAME(int blocks, const void** given, long long length) {
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) NAME(ARGUMENTS, length);
}
"""
"""What CUDA has beside the kernel: all threads of all blocks, one after the other."""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for C++")
SIZES = range(2, 17)
EDGES = (0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 65519.0, 65520.0, 1e9, 3e38, -3e38, 2.0**-24, 2.0**-25, 1e-40, 1.0)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Name of a kernel -> what launches it, as `compile_cuda` would."""
    folder = tmp_path_factory.mktemp("kernel")
    text = SHIM + HELPERS
    for size in SIZES:
        for dtype, (element, *_) in FORMATS.items():
            arguments = [f"(const {element}*) given[{index}]" for index in range(size)] + [f"({element}*) given[{size}]"]
            launcher = LAUNCHER.replace("NAME", kernel_name(dtype, size)).replace("THREADS", str(THREADS))
            text += kernel_source(dtype, size) + launcher.replace("ARGUMENTS", ", ".join(arguments))
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(text)
    words = ["g++", "-std=c++20", "-O0", "-ffp-contract=off", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(words, check=True, timeout=120)
    loaded = ctypes.CDLL(str(library))

    def launch(name, blocks, arguments):
        *addresses, length = arguments
        given = (ctypes.c_void_p * len(addresses))(*addresses)
        getattr(loaded, f"launch_{name}")(blocks, given, ctypes.c_longlong(length))

    return launch


@pytest.fixture
def launches(compiled, monkeypatch):
    """(kernel, blocks, stream) of each launch on what stands for a GPU."""
    made = []

    def compile_cuda(source, name, device):
        assert source.count("extern") == len(FORMATS) and all(word not in source for word in ("NAME", "ELEMENT", "TOTAL"))

        def launch(blocks, threads, arguments, stream):
            assert threads == THREADS
            made.append((name, blocks, stream))
            compiled(name, blocks, arguments)

        return launch

    monkeypatch.setattr(bindings, "compile_cuda", compile_cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    compiled_kernels.cache_clear()
    yield made
    compiled_kernels.cache_clear()


def numbers(dtype, size, length):
    """Parts of a sum of all magnitudes, with every pair of edges in the first two, each at another address."""
    generator = torch.Generator().manual_seed(size)
    found = []
    for index in range(size):
        part = torch.randn(length, generator=generator, dtype=torch.float64)
        part *= 2.0 ** torch.randint(-27, 17, (length,), generator=generator)
        edges = [edge for one in EDGES for edge in ((one,) * len(EDGES) if index == 0 else EDGES)] if index < 2 else []
        part[: len(edges)] = torch.tensor(edges, dtype=torch.float64)[:length]
        room = torch.full((length + 16,), 7.0, dtype=dtype)
        found.append(room[index % 8 : index % 8 + length].copy_(part))
    return found


def same(found, want):
    """Bit for bit, of whatever NaN."""
    there = ~want.isnan()
    as_bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[want.dtype.itemsize]
    return torch.equal(found.isnan(), ~there) and torch.equal(found[there].view(as_bits), want[there].view(as_bits))


@needs_compiler
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_kernel_has_the_bits_of_the_operations_that_it_replaces_for_all_sizes_and_addresses(dtype, launches):
    for size in SIZES:
        for length in (1, 3, THREADS - 1, THREADS, 2 * THREADS + 1):
            parts, own = numbers(dtype, size, length), (size + length) % size
            add_over_tree([part.clone() for part in parts], own, want := torch.empty(length, dtype=dtype))
            before, out = [part.clone() for part in parts], torch.empty(length + 1, dtype=dtype)[1:]
            tree_sum._on_cuda([*map(aside, parts)], own, aside(out))
            assert same(out, want), (size, length)
            assert all(same(part, was) for part, was in zip(parts, before, strict=True)), "a part is read only"
            room = parts[own].storage_offset(), parts[own].untyped_storage()
            tree_sum._on_cuda([*map(aside, parts)], own, aside(parts[own]))
            assert same(parts[own], want), "the sum may be where the own part was"
            around = torch.empty(0, dtype=dtype).set_(room[1])
            assert bool((around[: room[0]] == 7).all() and (around[room[0] + length :] == 7).all()), "nothing beside is written"
    assert {(name, stream) for name, _, stream in launches} == {(kernel_name(dtype, size), 5) for size in SIZES}
    assert {blocks for _, blocks, _ in launches} == {1, 3} and len(launches) == 2 * 5 * len(SIZES), "one launch for a sum"


def aside(tensor):
    """A tensor as `_on_cuda` meets it on the first GPU."""
    return SimpleNamespace(dtype=tensor.dtype, device=torch.device("cuda", 0), data_ptr=tensor.data_ptr, numel=tensor.numel)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_short_number_is_kept_and_every_middle_between_two_is_rounded_to_the_even_one(dtype, launches):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    half = torch.where(every.float().abs() < 1, every.float() / 2**12, every.float() / 2**8).to(dtype)
    for parts in ([every, torch.full_like(every, -0.0)], [every, half], [every, half, -half, half / 2]):
        add_over_tree([part.clone() for part in parts], 0, want := torch.empty_like(every))
        tree_sum._on_cuda([*map(aside, parts)], 0, aside(out := torch.empty_like(every)))
        assert same(out, want)


@needs_compiler
def test_threads_go_on_where_there_are_more_elements_than_threads(launches, monkeypatch):
    monkeypatch.setattr(tree_sum, "MOST_BLOCKS", 2)
    parts = numbers(torch.float32, 3, 5 * THREADS + 7)
    add_over_tree([part.clone() for part in parts], 1, want := torch.empty_like(parts[0]))
    tree_sum._on_cuda([*map(aside, parts)], 1, aside(out := torch.empty_like(parts[0])))
    assert same(out, want) and launches == [("add_3_of_float32", 2, 5)]
    tree_sum._on_cuda([*map(aside, [part[:0] for part in parts])], 1, aside(out[:0]))
    assert len(launches) == 1 and MOST_BLOCKS * THREADS < 2**31


def test_where_the_kernel_cannot_be_compiled_operations_take_its_place_and_a_line_says_so(caplog, monkeypatch):
    def refuse(*given):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(bindings, "compile_cuda", refuse)
    compiled_kernels.cache_clear()
    added = []
    monkeypatch.setattr(tree_sum, "add_over_tree", lambda parts, own, out: added.append((len(parts), own)))
    with caplog.at_level(logging.WARNING, logger="raypar"):
        tree_sum.compile_ahead(torch.device("cpu"), 3)
        assert not caplog.text
        for _ in range(2):
            tree_sum.compile_ahead(torch.device("cuda", 0), 3)
            parts = [aside(torch.empty(4)) for _ in range(3)]
            tree_sum._on_cuda(parts, 1, parts[1])
    assert caplog.text.count("the kernel for sums over 3 ranks cannot be used (RuntimeError: no compiler)") == 1
    counts = [aside(torch.empty(4, dtype=torch.int64)) for _ in range(5)]
    tree_sum._on_cuda(counts, 0, counts[0])
    many = [aside(torch.empty(1)) for _ in range(tree_sum.MOST_PARTS + 1)]
    tree_sum._on_cuda(many, 0, many[0])
    tree_sum.compile_ahead(torch.device("cuda", 0), len(many))
    assert added == [(3, 1), (3, 1), (5, 0), (len(many), 0)]
    compiled_kernels.cache_clear()
