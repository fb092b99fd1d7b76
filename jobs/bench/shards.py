"""Two shards beside PyTorch's own tensor parallelism: the same GPT, batch, optimizer and threads (one a process), alternating.

`python jobs/bench/shards.py [--json] [--page FILE] [--rounds 20] [--steps 4] [--microbatches 4] [--width 128] [--depth 8]
[--old CHECKOUT]`
Time: raypar's workers over its own transport, `parallelize_module` (DTensor, `loss_parallel`) over gloo, and the plain loop.
Memory: by how much the peak of a shard's process grows when the model gets more blocks, beside what a shard must hold of
them; medians of three runs, because the C library's heap makes some MiB of difference from run to run.
Exit code 1 when a limit is missed. `--old`: a checkout of an older commit, whose workers run beside all others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import ROOT, Contender, environment, ratio, table, torchrun_command, worker_command
from side_by_side import (
    bench_parser,
    interval_text,
    last_losses,
    ms_cells,
    print_and_write,
    say,
    train_in_turn,
    turns_text,
    verdict,
)

SHARDS, FASTER, MEMORY_WITHIN = 2, 1.0, 0.05
THEIRS, OURS, SEQUENCE, PLAIN = (
    "DTensor, 2 shards",
    "raypar, 2 shards",
    "raypar, 2 shards, sequence_parallel",
    "plain, 1 process",
)
OLD, OLD_LIMIT = "older commit: ", 0.97
MODEL = "split_gpt:layers"
LARGE = {"width": 512, "heads": 8, "context": 16, "batch_size": 2}
"""For memory: parameters and what belongs to them are nearly everything."""
DEPTHS = (2, 14)
WORD = 4
"""Bytes of a float32."""
COPIES = 4
"""Of a parameter: itself, its gradient, and the two moments of AdamW."""
MEMORY_RUNS = 3


def raypar(name: str, work: dict[str, int], microbatches: int, *, sequence: bool = False, root: Path = ROOT) -> Contender:
    options: dict[str, Any] = {"work": work, "microbatches": microbatches, "shards": SHARDS, "model": MODEL}
    options |= {"sequence": sequence, "root": root}
    named = name if root == ROOT else f"{OLD}{name}"
    return Contender(
        named, SHARDS, lambda a: [worker_command("raypar", a, rank, **options) for rank in range(SHARDS)], root=root
    )


def dtensor(work: dict[str, int], microbatches: int) -> Contender:
    return Contender(THEIRS, SHARDS, lambda a: [torchrun_command("dtensor", a, SHARDS, work=work, microbatches=microbatches)])


def plain(work: dict[str, int], microbatches: int) -> Contender:
    return Contender(PLAIN, 1, lambda a: [worker_command("plain", a, 0, work=work, microbatches=microbatches)])


def time_steps(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step by contender, one number a round, and the last losses."""
    work = {"width": given.width, "depth": given.depth}
    ours = [
        contender
        for root in (ROOT, *([given.old] if given.old is not None else []))
        for contender in (
            raypar(OURS, work, given.microbatches, root=root),
            raypar(SEQUENCE, work, given.microbatches, sequence=True, root=root),
        )
    ]
    contenders = (dtensor(work, given.microbatches), *ours, plain(work, given.microbatches))
    seconds, infos = train_in_turn(contenders, given)
    old = {name: asdict(ratio(seconds[f"{OLD}{name}"], seconds[name])) for name in (OURS, SEQUENCE) if given.old is not None}
    found = asdict(ratio(seconds[THEIRS], seconds[OURS]))
    return {"seconds": seconds, "loss": last_losses(infos), "ratio": found, "old": old}


def block_elements(width: int) -> int:
    """What one shard holds of a block: its part of 12 width^2 weights and of the column layers' 7 width biases; all of the two
    norms' 4 width and of the row layers' 2 width biases."""
    return (12 * width**2 + 7 * width) // SHARDS + 6 * width


def memory() -> dict[str, Any]:
    """Bytes by which the peak of each process grows over `DEPTHS`, one list of runs a shard; and the formula's."""
    found: dict[str, list[list[int]]] = {OURS: [[] for _ in range(SHARDS)], THEIRS: [[] for _ in range(SHARDS)]}
    for _ in range(MEMORY_RUNS):
        for name, grown in found.items():
            less, more = (_peaks(name, depth) for depth in DEPTHS)
            for shard in range(SHARDS):
                grown[shard].append(more[shard] - less[shard])
    blocks = DEPTHS[1] - DEPTHS[0]
    return {"grown": found, "formula": blocks * block_elements(LARGE["width"]) * WORD * COPIES}


def _peaks(name: str, depth: int) -> list[int]:
    """Of each shard's process, in a run of its own."""
    work = {**LARGE, "depth": depth}
    contender = raypar(OURS, work, 1) if name == OURS else dtensor(work, 1)
    try:
        contender.start()
        contender.run(4)
        peaks = [peak for one in contender.info() for peak in one["peak_rss_bytes"]]
    finally:
        contender.stop()
    say(f"{name}, {depth} blocks: {', '.join(f'{peak / 2**20:.0f} MiB' for peak in peaks)}")
    return peaks


def time_table(given: argparse.Namespace, timed: dict[str, Any]) -> tuple[list[str], bool]:
    """For people; and whether the limit holds."""
    rows = []
    for name, values in timed["seconds"].items():
        rows.append([name, *ms_cells(values), f"{timed['loss'][name]:.4f}"])
    found = timed["ratio"]
    fast = found["median"] >= FASTER
    work = f"{given.depth} blocks, width {given.width}, context 128; 32 samples a step in {given.microbatches} microbatches"
    told = [
        "## Time",
        f"One GPT ({work}), AdamW with clipping, one thread a process, one machine. {turns_text(given)} Each initialises in "
        "its own way, so losses are only alike.",
        table(["contender", "step ms", "quartiles", "last loss"], rows),
        f"raypar is {found['median']:.3f} times as fast as DTensor ({interval_text(found)}); wanted {FASTER:.2f}: "
        f"{verdict(fast)}.",
        *(
            f"{name}: {one['median']:.3f} times as fast as the older commit ({interval_text(one)}); {OLD_LIMIT} is wanted of "
            f"the lower end: {verdict(one['lower'] >= OLD_LIMIT)}."
            for name, one in timed["old"].items()
        ),
    ]
    return told, fast


def memory_table(held: dict[str, Any]) -> tuple[list[str], bool]:
    """For people; and whether the limit holds."""
    rows, small = [], True
    for name, grown in held["grown"].items():
        for shard, sizes_of_runs in enumerate(grown):
            size = statistics.median(sizes_of_runs)
            off = size / held["formula"] - 1
            good = abs(off) <= MEMORY_WITHIN
            small &= good or name != OURS
            sizes = [f"{nbytes / 2**20:.1f}" for nbytes in (size, held["formula"])]
            runs = ", ".join(f"{run / 2**20:.1f}" for run in sizes_of_runs)
            rows.append([name, str(shard), runs, *sizes, f"{off:+.1%}", ("yes" if good else "NO") if name == OURS else ""])
    blocks = DEPTHS[1] - DEPTHS[0]
    told = [
        "## Memory of a shard",
        f"By how much the peak of a process (VmHWM) is higher with {blocks} blocks more (width {LARGE['width']}, "
        f"{LARGE['batch_size']} x {LARGE['context']} tokens). Formula: parameters, gradients and AdamW's two moments of what a "
        f"shard holds of a block, (12 w^2 + 7 w) / {SHARDS} + 6 w elements; no activations. Limit: the median within "
        f"{MEMORY_WITHIN:.0%}.",
        table(["contender", "shard", "MiB more, each run", "median", "formula MiB", "off by", "holds"], rows),
    ]
    return told, small


def main() -> None:
    parser = bench_parser(__doc__, rounds=20, steps=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--memory-only", action="store_true", help="leave the time out")
    parser.add_argument("--old", type=Path, help="a checkout of an older commit")
    given = parser.parse_args()
    facts = environment()
    timed, held = None if given.memory_only else time_steps(given), memory()
    parts, good = memory_table(held)
    if timed is not None:
        before, fast = time_table(given, timed)
        parts, good = before + parts, good and fast
    text = "\n\n".join(parts)
    title = "Two shards beside DTensor's parallelize_module"
    print_and_write(given, title, text, {"environment": facts, "time": timed, "memory": held})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
