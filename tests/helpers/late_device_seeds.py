"""`python tests/helpers/late_device_seeds.py --seeds 10000 --mutations 400 --page PAGE.md`: many seeds of the programs on late
devices (`helpers.late_programs`), then every mutation (`helpers.late_mutations`) until a seed fails; a page of both."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from pathlib import Path

for folder in (Path(__file__).parents[1], Path(__file__).parents[2]):
    sys.path.insert(0, str(folder))

from helpers import pretend  # noqa: E402
from helpers.late_mutations import MUTATIONS  # noqa: E402
from helpers.late_runs import PROGRAMS, failure  # noqa: E402

GARBAGE_EVERY = 20
"""Seeds after which what they have left is collected."""


def passed(program: str, seeds: range, sanitize_every: int) -> tuple[int, list[str]]:
    """How many seeds pass, and what the others fail with. PyTorch's sanitizer is told of every so many-th."""
    failed = []
    for seed in seeds:
        if found := failure(program, seed, sanitize=seed % sanitize_every == 0):
            failed.append(f"{program}, seed {seed}: {found}")
            print(failed[-1], flush=True)
        if seed % GARBAGE_EVERY == 0:
            gc.collect()
    return len(seeds) - len(failed), failed


def mutation_rows(seeds: int) -> tuple[list[str], list[str]]:
    """Lines of the table, and the mutations that no seed has found though one must."""
    rows, missed = ["| place | what is taken out | seeds until one fails |", "|---|---|---|"], []
    for mutation in MUTATIONS:
        caught, _ = (None, "") if mutation.stays else mutation.seeds_until_caught(seeds)
        gc.collect()
        if mutation.stays:
            told = f"stays: {mutation.stays}"
        elif caught is None:
            told = f"none of {seeds}"
            missed.append(mutation.what)
        else:
            told = f"{caught}" + (f", together with: {mutation.beside}" if mutation.beside else "")
        rows.append(f"| {mutation.place} | {mutation.what} | {told} |")
        print(rows[-1], flush=True)
    return rows, missed


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="of all programs together")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--mutations", type=int, default=0, help="most seeds of a mutation; 0: no mutations")
    parser.add_argument("--sanitize-every", type=int, default=5, help="PyTorch's sanitizer is told of every so many-th seed")
    parser.add_argument("--page", type=Path, help="where to write the page")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    pretend.device()
    lines, failed = ["| program | seeds that pass | of | s a seed |", "|---|---|---|---|"], []
    for program in PROGRAMS:
        count = -(-options.seeds // len(PROGRAMS))
        began = time.monotonic()
        good, bad = passed(program, range(options.first, options.first + count), options.sanitize_every)
        failed += bad
        lines.append(f"| {program} | {good} | {count} | {(time.monotonic() - began) / count:.2f} |")
        print(lines[-1], flush=True)
    rows, missed = mutation_rows(options.mutations) if options.mutations else ([], [])
    if options.page:
        options.page.write_text(page(sys.argv[1:], lines, rows))
    return 1 if failed or missed else 0


def page(arguments: list[str], lines: list[str], rows: list[str]) -> str:
    """The page of `jobs/bench/results`."""
    return "\n".join(
        [
            "# Stream order of the nccl transport, on a late device",
            "",
            "Question: are the waits, events, kept tensors and `record_stream` of `raypar/comm/nccl` enough, and is each",
            "needed? Streams are queues that run late, in any order that CUDA allows, chosen by a seed; freed memory is",
            "overwritten, and reused by stream as PyTorch's allocator does (`tests/helpers/late_device.py`). No GPU and no",
            "NCCL take part.",
            "",
            f"Command: `python tests/helpers/late_device_seeds.py {' '.join(arguments)}`",
            "",
            *lines,
            "",
            *(["Each taken out once, and the seeds of a program until one fails:", "", *rows, ""] if rows else []),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
