"""Which products of a convolution keep their bits when it is cut over shards.

`python jobs/bench/convolution_bits.py [--page FILE] [--kernels AVX2 AVX512 cuDNN]`, a minute for each kind of kernels; without
`--kernels` all that this machine has. Each kind is tried in a process of its own.
Each of 20 shapes, contiguous and channels_last, is cut into 2, 3 and 4 parts: by output channels at multiples of 16, by output
channels elsewhere, by input channels, by rows. Output, gradient of the input and gradient of the weight, in float32 on one
thread, are compared with those of the whole layer: slices with its slices, a sum (over the tree) with the whole. By rows the
input's gradient is made of the rows of the output's gradient that a part is read by, and, to compare, also by adding rows where
parts meet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from harness import ROOT, page, table
from torch import Tensor, nn

sys.path.insert(0, str(ROOT / "tests"))

from helpers.same_shards import over_shards

from raypar.model.convolution_call import ConvolutionCall
from raypar.model.tensor_parallel.halo_exchange import fit_rows
from raypar.model.tensor_parallel.spatial_convolution import ConvolutionByRows
from raypar.plan.spatial_shards import Window, plan_linear, plan_transposed

ROWS, OVERLAPPING = "rows, gradients exchanged", "rows, overlapping rows added"
SPLITS = ("output channels at multiples of 16", "output channels elsewhere", "input channels", ROWS, OVERLAPPING)
PRODUCTS = ("output", "input gradient", "weight gradient")
SUMMED = {SPLITS[0]: PRODUCTS[1], SPLITS[1]: PRODUCTS[1], SPLITS[2]: PRODUCTS[0], ROWS: PRODUCTS[2], OVERLAPPING: PRODUCTS[2]}
"""Split -> the product that is a sum over shards."""
PARTS = (2, 3, 4)


@dataclass(frozen=True)
class Shape:
    """A convolution and its input."""

    given: int
    made: int
    kernel: int | tuple[int, int]
    size: int
    batch: int = 8
    stride: int = 1
    dilation: int = 1
    transposed: bool = False

    @property
    def kind(self) -> str:
        """The kernel, as the table names it."""
        height, width = (self.kernel, self.kernel) if isinstance(self.kernel, int) else self.kernel
        more = f", stride {self.stride}" * (self.stride > 1) + f", dilation {self.dilation}" * (self.dilation > 1)
        return f"{height}x{width}{more}" + ", transposed" * self.transposed

    def layer(self) -> nn.Conv2d | nn.ConvTranspose2d:
        """The whole layer, without a bias, padded so that a stride of 1 keeps the size."""
        sizes = (self.kernel, self.kernel) if isinstance(self.kernel, int) else self.kernel
        padding = tuple(self.dilation * (each - 1) // 2 for each in sizes)
        kind = nn.ConvTranspose2d if self.transposed else nn.Conv2d
        return kind(self.given, self.made, sizes, stride=self.stride, padding=padding, dilation=self.dilation, bias=False)  # type: ignore[arg-type]


SHAPES = (
    Shape(64, 64, 1, 16),
    Shape(64, 256, 1, 14),
    Shape(256, 64, 1, 14),
    Shape(128, 512, 1, 7, stride=2),
    Shape(64, 64, 3, 16),
    Shape(64, 128, 3, 14),
    Shape(128, 128, 3, 14),
    Shape(256, 256, 3, 7),
    Shape(512, 512, 3, 7, batch=2),
    Shape(96, 96, 3, 13),
    Shape(64, 128, 3, 15, stride=2),
    Shape(128, 128, 3, 14, dilation=2),
    Shape(64, 96, 5, 14),
    Shape(64, 64, 5, 16, batch=1),
    Shape(64, 64, 7, 16, stride=2),
    Shape(128, 192, (1, 7), 17),
    Shape(128, 192, (7, 1), 17),
    Shape(96, 128, (3, 1), 17),
    Shape(128, 64, 3, 14, transposed=True),
    Shape(64, 64, 2, 8, stride=2, transposed=True),
)


CUDNN = "cuDNN"
VECTORS = {"AVX2": "AVX2", "AVX512": "ALL"}
"""Vector instructions of PyTorch's kernels, and the value of `ONEDNN_MAX_CPU_ISA` with which oneDNN uses no newer ones. (With
AVX512 it may also use what came after that.)"""

Found = Counter[tuple[str, str, str, str, bool]]
"""(how it is cut, kernel, memory format, product, whether it had the bits of the whole layer) -> how often."""

Products = tuple[Tensor, Tensor, Tensor]
"""(output, gradient of the input, gradient of the weight)."""


class Piece(NamedTuple):
    """What a shard makes of its rows."""

    output: Tensor
    of_input: Tensor
    of_weight: Tensor
    overlap: Tensor | None
    """The gradient of all rows that its rows of the output have read, of these alone."""


def products(layer: nn.Module, x: Tensor, gradient: Tensor) -> Products:
    """(output, gradient of the input, gradient of the weight)."""
    leaf = x.detach().requires_grad_()
    made = layer(leaf)
    made.backward(gradient)
    assert leaf.grad is not None and isinstance(layer.weight, nn.Parameter) and layer.weight.grad is not None
    return made.detach(), leaf.grad, layer.weight.grad


def bounds(split: str, channels: int, parts: int) -> list[int] | None:
    """Where the channels are cut; None where they cannot be cut so."""
    if split == SPLITS[0]:
        found = [16 * (i * (channels // 16) // parts) for i in range(parts)] + [channels]
        return found if channels >= 16 * parts else None
    if split == SPLITS[1]:
        return [0, *(i * channels // parts + (5 if i * channels // parts % 16 == 0 else 0) for i in range(1, parts)), channels]
    return [i * channels // parts for i in range(parts + 1)]


def part_of(whole: nn.Conv2d | nn.ConvTranspose2d, shape: Shape, dim: int, start: int, stop: int) -> nn.Module:
    """The layer with a slice of its weight, in memory of its own, as a shard has it."""
    made = shape.layer()
    part = whole.weight.detach().narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)
    made.weight = nn.Parameter(part)
    return made


def by_rows(
    shape: Shape, whole: Products, layer: nn.Conv2d | nn.ConvTranspose2d, x: Tensor, gradient: Tensor, split: str, parts: int
) -> Iterator[tuple[str, bool]]:
    """(product, whether it has the bits of the whole layer) of a convolution whose rows are cut; nothing where they are too
    few."""
    padding = layer.padding
    window = Window(layer.kernel_size[0], shape.stride, shape.dilation, int(padding[0]), int(padding[0]))
    rows, outputs = x.shape[2], gradient.shape[2]
    plan = (plan_transposed if shape.transposed else plan_linear)(window, rows, outputs, parts)
    if parts > min(rows, outputs) or plan.forward.why_not_from_neighbours() or plan.backward.why_not_from_neighbours():
        return
    rows_of = ConvolutionByRows(
        plan=plan,
        window=window,
        dim=2,
        rows=rows,
        call=ConvolutionCall(layer.stride, (0, int(padding[1])), layer.dilation, shape.transposed, (0, 0), 1, has_bias=False),
    )
    weight = layer.weight.detach()
    pieces = [one_part(rows_of, part, x, gradient, weight, transposed=shape.transposed) for part in range(parts)]
    yield PRODUCTS[0], torch.equal(torch.cat([piece.output for piece in pieces], 2), whole[0])
    if split == ROWS:
        yield PRODUCTS[1], torch.equal(torch.cat([piece.of_input for piece in pieces], 2), whole[1])
    elif not shape.transposed:
        yield PRODUCTS[1], torch.equal(overlapping_rows_added(rows_of, pieces), whole[1])
    yield PRODUCTS[2], torch.equal(over_shards([piece.of_weight for piece in pieces]), whole[2])


def one_part(rows_of: ConvolutionByRows, part: int, x: Tensor, gradient: Tensor, weight: Tensor, *, transposed: bool) -> Piece:
    """What a shard makes of its rows, as `spatial_convolution.py` does."""
    memory = memory_of(x)

    def taken(value: Tensor, start: int, stop: int) -> Tensor:
        return fit_rows(value, 2, 0, start, stop).contiguous(memory_format=memory)

    (start, stop), (first, last) = rows_of.plan.outputs[part], rows_of.plan.forward.held[part]
    if transposed:
        (needed,) = rows_of.plan.forward.needed[part]
        made = rows_of.call.convolve(taken(x, *needed), weight, None)
        output = fit_rows(made, 2, rows_of.window.reads(*needed)[0], start, stop)
        wide = taken(gradient, *rows_of.window.reads(first, last))
        of_input, of_weight, _ = rows_of.call.gradients((wide, taken(x, first, last)), weight, (True, True, False))
        return Piece(output, of_input, of_weight, None)
    wide, own = taken(x, *rows_of.window.reads(start, stop)), taken(gradient, start, stop)
    _, of_weight, _ = rows_of.call.gradients((own, wide), weight, (False, True, False))
    (needed,) = rows_of.plan.backward.needed[part]
    begin, end = rows_of.window.reads(*needed)
    like = torch.empty(*x.shape[:2], max(end, last) - begin, x.shape[3]).to(memory_format=memory)
    of_rows, _, _ = rows_of.call.gradients((taken(gradient, *needed), like), weight, (True, False, False))
    overlap, _, _ = rows_of.call.gradients((own, wide), weight, (True, False, False))
    output = rows_of.call.convolve(wide, weight, None)
    return Piece(output, fit_rows(of_rows, 2, begin, first, last), of_weight, overlap)


def overlapping_rows_added(rows_of: ConvolutionByRows, pieces: Sequence[Piece]) -> Tensor:
    """The gradient of the input, the rows that several parts have read added up, first to last."""
    whole = [
        fit_rows(piece.overlap, 2, rows_of.window.reads(*outputs)[0], 0, rows_of.rows)
        for piece, outputs in zip(pieces, rows_of.plan.outputs, strict=True)
    ]
    return sum(whole[1:], whole[0])


def memory_of(x: Tensor) -> torch.memory_format:
    """How the value lies in memory."""
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last


def compare(shape: Shape, split: str, parts: int, memory: torch.memory_format) -> Iterator[tuple[str, bool]]:
    """(product, whether it has the bits of the whole layer); nothing where the shape cannot be cut so."""
    rows, by_input = split in (ROWS, OVERLAPPING), split == SPLITS[2]
    cut = None if rows else bounds(split, shape.given if by_input else shape.made, parts)
    if cut is None and not rows:
        return
    torch.manual_seed(0)
    layer = shape.layer()
    x = torch.randn(shape.batch, shape.given, shape.size, shape.size).to(memory_format=memory)
    with torch.no_grad():
        out = layer(x)
    gradient = torch.randn(out.shape).to(memory_format=memory)
    want = products(layer, x, gradient)
    if cut is None:
        yield from by_rows(shape, want, layer, x, gradient, split, parts)
        return
    dim = int(by_input != shape.transposed)
    found = []
    for start, stop in itertools.pairwise(cut):
        each = part_of(layer, shape, dim, start, stop)
        own_x = x[:, start:stop].contiguous(memory_format=memory) if by_input else x
        own_gradient = gradient if by_input else gradient[:, start:stop].contiguous(memory_format=memory)
        found.append(products(each, own_x, own_gradient))
    for number, product in enumerate(PRODUCTS):
        pieces = [made[number] for made in found]
        joined = over_shards(pieces) if product == SUMMED[split] else torch.cat(pieces, dim if number == 2 else 1)
        yield product, torch.equal(joined, want[number])


def count(shapes: Sequence[Shape], formats: Sequence[torch.memory_format]) -> Found:
    """How often (split, kernel, memory format, product) had the bits of the whole layer, and how often not."""
    found: Found = Counter()
    for shape in shapes:
        for memory in formats:
            for split in SPLITS:
                for parts in PARTS:
                    for product, equal in compare(shape, split, parts, memory):
                        found[split, shape.kind, str(memory).removeprefix("torch."), product, equal] += 1
        print(".", end="", flush=True, file=sys.stderr)
    return found


def kinds_of_kernels() -> list[str]:
    """Those that this machine has."""
    own = torch.backends.cpu.get_cpu_capability()
    vectors = [kind for kind in VECTORS if list(VECTORS).index(kind) <= list(VECTORS).index(own)] if own in VECTORS else [own]
    return vectors + [CUDNN] * torch.cuda.is_available()


def count_in_a_process(kind: str) -> Found:
    """`count` with this kind of kernels, which a process chooses once."""
    environment = {"ATEN_CPU_CAPABILITY": kind.lower(), "ONEDNN_MAX_CPU_ISA": VECTORS[kind]} if kind in VECTORS else {}
    command = [sys.executable, __file__, "--count", kind]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, check=True)
    return Counter({(*key, equal): number for *key, equal, number in json.loads(done.stdout)})


def tables(found: Found) -> str:
    """A table over all, then one by kernel: equal / compared."""

    def cell(split: str, product: str, **only: str) -> str:
        chosen = [
            (equal, number)
            for (s, kernel, memory, p, equal), number in found.items()
            if (s, p) == (split, product) and only.get("kernel", kernel) == kernel and only.get("memory", memory) == memory
        ]
        tried = sum(number for _, number in chosen)
        text = f"{sum(number for equal, number in chosen if equal)}/{tried}" if tried else ""
        return f"sum: {text}" if text and SUMMED[split] == product else text

    formats, kernels = (list(dict.fromkeys(key[place] for key in found)) for place in (2, 1))
    overall = [[split, *(cell(split, product) for product in PRODUCTS)] for split in SPLITS]
    by_format = [[f"{split}, {m}", *(cell(split, p, memory=m) for p in PRODUCTS)] for split in SPLITS for m in formats]
    by_kernel = [[k, split, *(cell(split, p, kernel=k) for p in PRODUCTS)] for k in kernels for split in SPLITS]
    head = ["cut by", *PRODUCTS]
    return "\n\n".join((table(head, overall + by_format), table(["kernel", *head], by_kernel)))


NOTE = """Equal / compared; *sum*: the product that is added over the shards, by the tree. The contract promises
the pieces' bits only: a sharded run has those of the same shards in one process on the same kind of processor (rule
11 of raypar/NUMERICS.md), not those of whole layers. Here parts lie in memory as the whole does; raypar cuts rows of
contiguous values. What is equal here is so by the kernels that this processor and
this build choose."""


def main() -> None:
    """Print the tables, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--kernels", nargs="+", choices=[*VECTORS, CUDNN], default=kinds_of_kernels(), help="kinds to try")
    parser.add_argument("--count", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.count:
        if given.count == CUDNN:
            torch.set_default_device("cuda")
            torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
        elif given.count != (own := torch.backends.cpu.get_cpu_capability()):
            raise SystemExit(f"this processor and build choose kernels with {own}, not {given.count}")
        found = count(SHAPES, (torch.contiguous_format, torch.channels_last))
        print(json.dumps([[*key, number] for key, number in found.items()]))
        return
    sections = [f"## Kernels with {kind}\n\n{tables(count_in_a_process(kind))}" for kind in given.kernels]
    body = "\n\n".join(sections)
    print(body)
    if given.page:
        command = "python jobs/bench/convolution_bits.py " + " ".join(sys.argv[1:])
        question = "Which products of a convolution keep their bits on shards by channels and by rows"
        given.page.write_text(page(question, command, f"{NOTE}\n\n{body}"))


if __name__ == "__main__":
    main()
