"""Convolutions on two shards, by width, beside DTensor's: the time of a step, and what each of them can cut.

`python jobs/bench/convolution_shards.py [--json] [--page FILE] [--rounds 24] [--steps 2]`, four minutes.
Time: a small network of convolutions whose images are cut by width, by raypar's workers over its own transport, by DTensor over
gloo, and a plain loop in one process; in turns. Cases: each is tried by DTensor as it is, by DTensor mended as
`convolution_layers.mend_dtensor` says, and by raypar; outputs and gradients are compared with the whole layer's in float64.
Exit code 1 if raypar is slower than DTensor (the lower end of the ratio's interval), or fails in a case.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from convolution_layers import BATCH, CASES, MICROBATCHES, SIZE, Case
from harness import ROOT, Contender, environment, environment_of_children, ratio, table, torchrun_command, worker_command
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
from torch import Tensor, nn

sys.path.insert(0, str(ROOT / "tests"))

from helpers.on_shards import check

from raypar.errors import RayparError

SHARDS, WANTED = 2, 1.0
THEIRS, OURS, PLAIN = "DTensor, 2 shards, mended", "raypar, 2 shards", "plain, 1 process"
CASE_TIMEOUT_S = 60.0
"""Of the processes that try the cases by DTensor, together."""


def time_steps(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step by contender, one number a round, and the last losses."""
    contenders = [
        Contender(THEIRS, SHARDS, lambda a: [torchrun_command("dtensor-convolutions", a, SHARDS)]),
        Contender(OURS, SHARDS, lambda a: [worker_command("convolutions", a, r, shards=SHARDS) for r in range(SHARDS)]),
        Contender(PLAIN, 1, lambda a: [worker_command("plain-convolutions", a, 0)]),
    ]
    seconds, infos = train_in_turn(contenders, given)
    return {"seconds": seconds, "loss": last_losses(infos), "ratio": asdict(ratio(seconds[THEIRS], seconds[OURS]))}


def by_dtensor(*options: str) -> list[str]:
    """What DTensor answers to each case. Processes that end or hang in a case are started again behind it."""
    answers: list[str] = []
    while len(answers) < len(CASES):
        program = [str(Path(__file__).with_name("convolution_layers.py")), str(len(answers)), *options]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SHARDS)]
        what = "ends the process"
        try:
            text = subprocess.run(
                [*launcher, *program],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment_of_children() | {"OMP_NUM_THREADS": "1"},
                timeout=CASE_TIMEOUT_S,
                check=False,
            ).stdout
        except subprocess.TimeoutExpired as error:
            text, what = error.stdout or b"", "does not end"
        found = [json.loads(line)["answer"] for line in text.decode().splitlines() if line.startswith("{")]
        answers += found or [what]
        say(f"DTensor {' '.join(options)}: {len(answers)} of {len(CASES)} cases")
    return answers


def by_raypar(case: Case) -> str:
    """`right`, or the first line of the error."""

    def make() -> nn.Sequential:
        return nn.Sequential(OrderedDict([("net", case.make())]))

    def squares(output: Tensor, target: Tensor) -> Tensor:
        return output.sin().sum()

    with_weights = [name for name, part in make().named_modules() if next(part.parameters(recurse=False), None) is not None]
    styles = dict.fromkeys(with_weights, case.style) if isinstance(case.style, str) else case.style
    styles = {name if name.startswith("net") else f"net.{name}": style for name, style in styles.items()}
    x = torch.randn(case.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        check(make, squares, x, torch.zeros(1), SHARDS, styles=styles)
    except RayparError as error:
        return f"{type(error).__name__}: {error.what.splitlines()[0]}"
    except AssertionError as error:
        return f"wrong: {str(error).splitlines()[0]}"
    return "right"


def time_table(given: argparse.Namespace, timed: dict[str, Any]) -> tuple[list[str], bool]:
    """For people; and whether the limit holds."""
    rows = []
    for name, values in timed["seconds"].items():
        rows.append([name, *ms_cells(values), f"{timed['loss'][name]:.6f}"])
    found = timed["ratio"]
    fast = found["lower"] >= WANTED
    told = [
        "## Time",
        f"Six convolutions (5 x 5, 3 x 3, 2 x 2 with stride 2, 3 x 3, 1 x 1, 3 x 3; 32 and 64 channels) with ReLU, then means "
        f"over the images; {BATCH} images of {SIZE} x {SIZE} in {MICROBATCHES} microbatches, SGD, one thread a process, one "
        f"machine. {turns_text(given)} All begin with the same weights and read the same images, so their losses are equal but "
        "for rounding.",
        table(["contender", "step ms", "quartiles", "last loss"], rows),
        f"raypar is {found['median']:.3f} times as fast as DTensor ({interval_text(found)}); wanted of its lower end "
        f"{WANTED:.2f}: {verdict(fast)}.",
        "A step of raypar is a worker's whole step, with the gradient's norm and the vote that ends it.",
    ]
    return told, fast


def case_table(answers: dict[str, list[str]]) -> tuple[list[str], bool]:
    """For people; and whether raypar is right in every case."""
    rows = [[case.name, *(of_all[n] for of_all in answers.values())] for n, case in enumerate(CASES)]
    counts = ", ".join(f"{name} {sum(a.startswith('right') for a in of_all)}" for name, of_all in answers.items())
    told = [
        "## What can be cut",
        "By width, if the case does not say otherwise, over two processes; images of 8 x 12. *right*: output and all gradients "
        "are those of the whole layer; *made whole*: they are, but each process has computed all of it. Else what is wrong "
        "first, or the first line of the error. Pooling, norms and upsampling stand behind a convolution of 3 x 3.",
        "PyTorch 2.13's DTensor calls the output of a convolution by width whole, though each process has its part "
        "(pytorch/pytorch#191926), and it returns no gradient of the input where it exchanges columns. Both are mended in the "
        "second column, and where time is measured (`convolution_layers.mend_dtensor`).",
        table(["case", *answers], rows),
        f"Right of {len(CASES)}: {counts}.",
    ]
    return told, all(answer == "right" for answer in answers["raypar"])


def main() -> None:
    given = bench_parser(__doc__, rounds=24, steps=2).parse_args()
    facts = environment()
    timed = time_steps(given)
    answers = {
        "DTensor as it is": by_dtensor(),
        "DTensor mended": by_dtensor("--mended"),
        "raypar": [by_raypar(case) for case in CASES],
    }
    before, fast = time_table(given, timed)
    parts, right = case_table(answers)
    text = "\n\n".join([*before, *parts])
    title = "Convolutions on two shards beside DTensor's"
    print_and_write(given, title, text, {"environment": facts, "time": timed, "cases": answers})
    sys.exit(0 if fast and right else 1)


if __name__ == "__main__":
    main()
