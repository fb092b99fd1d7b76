"""The gradient's norm on the processor: raypar's, with exact sums, beside that of before exact sums and PyTorch's own.

`python jobs/bench/norm.py [--rounds N] [--json] [--page FILE]`
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import environment, page, table
from torch import Tensor

from raypar.plan.exact_sum import ExactSum
from raypar.worker.norm_and_weights_hash import read_together, square_gradients

SIZES = {"0.2 M": (256, 64, 4, 128), "12.9 M": (256, 512, 4, 256), "124 M": (50257, 768, 12, 1024)}
"""Parameters -> vocabulary, width, blocks and positions of a GPT-2."""
PIECE, ALIGNED = 32_768, 64
LIMIT = 1.0
"""Wanted: no longer than before exact sums."""
NOTE = """Median times of the norm of a GPT-2's gradients in float32 on one thread, of the processor, in turns. *Before*: the
numerics contract's second edition, as it was before commit bde20035: the dots of pieces of 32,768 elements are added in float64
in Python, by parameter. *PyTorch*: `torch.nn.utils.get_total_norm`, which `clip_grad_norm_` has, read by the host: its sums are
in float32, and depend on how work is divided; that is why raypar's norm is another. A ratio is the median of the rounds'."""


def ours(gradients: Sequence[Tensor]) -> float:
    """What a worker does between its gradients and the norm, without the vote."""
    return math.sqrt(ExactSum.of(read_together(square_gradients(gradients))).rounded())


@torch.no_grad()
def before(gradients: Sequence[Tensor]) -> float:
    """The second edition's, as its code was."""
    flat = [_aligned_contiguous(gradient).view(-1) for gradient in gradients]
    pieces = [one.split(PIECE) if len(one) > PIECE else (one,) for one in flat]
    found = iter(torch.stack([piece.dot(piece) for parts in pieces for piece in parts]).tolist())
    squares = []
    for parts in pieces:
        total = 0.0
        for _ in parts:
            total += next(found)
        squares.append(total)
    total = 0.0
    for square in squares:
        total += square
    return math.sqrt(total)


def _aligned_contiguous(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNED else tensor


def plain(gradients: Sequence[Tensor]) -> float:
    """PyTorch's."""
    return torch.nn.utils.get_total_norm(gradients).item()


WAYS: dict[str, Callable[[Sequence[Tensor]], float]] = {"ours": ours, "before": before, "plain": plain}


def gradients_of(vocabulary: int, width: int, blocks: int, positions: int) -> list[Tensor]:
    """Of a GPT-2 whose head is tied."""
    generator = torch.Generator().manual_seed(1)
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes = [(vocabulary, width), (positions, width), *block * blocks, (width,), (width,)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds by way, and how ours stands beside the others."""
    gradients = gradients_of(*SIZES[name])
    count = sum(gradient.numel() for gradient in gradients)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    order = list(itertools.permutations(WAYS.items()))
    for number in range(min(max(rounds, rounds * 10_000_000 // count), 40 * rounds)):
        for way, norm in order[number % len(order)]:
            start = time.process_time()
            norm(gradients)
            seconds[way].append(time.process_time() - start)
    ratios = {
        f"ours / {way}": statistics.median(one / other for one, other in zip(seconds["ours"], seconds[way], strict=True))
        for way in ("before", "plain")
    }
    return {"parameters": count, "tensors": len(gradients), "rounds": len(seconds["ours"]), **ratios} | {
        way: 1000 * statistics.median(values) for way, values in seconds.items()
    }


def told(rows: Sequence[dict[str, Any]]) -> str:
    """The body of the page."""
    lines = [
        [f"{row['parameters']:,}", f"{row['tensors']}", *(f"{row[way]:.3f}" for way in WAYS), f"{row['ours / before']:.3f}",
         "yes" if row["ours / before"] <= LIMIT else "NO", f"{row['ours / plain']:.2f}", f"{row['rounds']:,}"]
        for row in rows
    ]  # fmt: skip
    header = [
        "parameters",
        "tensors",
        "ours, ms",
        "before, ms",
        "PyTorch, ms",
        "ours / before",
        "holds",
        "ours / PyTorch",
        "rounds",
    ]
    return f"{NOTE}\n\n{table(header, lines)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="of the largest; of smaller ones more")
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, given.rounds) for name in SIZES]
    print(json.dumps({"environment": environment(), "rows": rows}) if given.json else told(rows))
    if given.page:
        command = "python jobs/bench/norm.py " + " ".join(word for word in sys.argv[1:] if word != "--json")
        given.page.write_text(page("What does an exact norm cost on the processor?", command.strip(), told(rows)))
    return 0 if all(row["ours / before"] <= LIMIT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
