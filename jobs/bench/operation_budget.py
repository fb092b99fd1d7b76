"""What a training step asks of a device beside a plain loop: operations that write memory, host reads, waits, as integers.

`python jobs/bench/operation_budget.py [--models NAME ...] [--plans "2 stages" ...] [--predict NAME ...] [--json] [--page FILE]`
No GPU is needed: the device is the pretended one of the tests (`tests/helpers/pretend.py`), and counts depend on no clock. What
they would take on a GPU is predicted from them by stated assumptions (`predicted_gpu.py`; `--predict` alone: of no model).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from harness import ROOT, environment, page, table
from predicted_gpu import REAL, section
from side_by_side import command_line

sys.path.insert(0, str(ROOT / "tests"))

from helpers.operation_budget import FEWER, MODELS, MORE, PLANS, WANTED, WARM, Row, measure

NOTE = f"""Counted is one step, after {WARM} others, of all workers of a plan together: {MORE} microbatches, of small models
(two blocks; the ResNet has four), AdamW with `foreach`, `clip_norm`. Counts do not depend on sizes. The norm's squares of
pieces are one operation, as of the kernel on a GPU (the table of pieces is copied to it only when gradients lie
elsewhere than in the step before). *Operations* are those of ATen that write memory of the device; a list of tensors
in one call is one. *Loops* have the same layers, on the same device: forward, loss, backward, `clip_grad_norm_`,
`optimizer.step()`. Beside stages and replicas stand a loop for each, with its own layers or microbatches, clipping
and optimizer; beside shards layers of 1/n of the size, with what a cut vocabulary and biases after sums need by hand;
beside recomputation `torch.utils.checkpoint`; beside bf16 autocast; beside bf16 parameters a bfloat16 module whose
gradients are added to float32 parameters by lists, after each microbatch or (bf16 gradients) after all. *Messages*
are sends and parts of collectives in memory of the device (of two ranks with their sum, which is NCCL's own; those of
more ranks are one operation, as of the kernel on a GPU); `most` is {WANTED} of the loops' operations and one for each
message. *Reads* (of device values by the host) are beyond those that the model's own code makes in the loop. *Waits*
are the host's, for messages, where these come late; those between which it asks the device for nothing and sends
nothing are one, for all that they wait for. Both for all workers, in the step; then what each further microbatch adds,
by steps of {FEWER} and {MORE} microbatches. Wanted: no more operations than `most`; no read or wait a microbatch; one
read and one wait a step and worker, for the vote, which is both: a worker reads its own numbers, sends them as its
vote, and waits for those of the others."""


def line(row: Row) -> list[str]:
    """A row of the table."""
    loops, messages, made = row.loop.total(), row.found.messages, row.found.operations.total()
    _, reads, waits, reads_each, waits_each = row.beyond
    numbers = [made, loops, messages, row.wanted]
    ratio = f"{(made - messages) / loops:.2f}"
    return [
        row.model,
        row.plan,
        *(f"{number:,}" for number in numbers),
        ratio,
        f"{reads}, {reads_each:g}",
        f"{waits}, {waits_each:g}",
        "yes" if row.holds else "NO",
    ]


def causes(row: Row) -> list[str]:
    """Where the operations beyond the loops' come from, what is read, and what is waited for."""
    return [
        row.model,
        row.plan,
        ", ".join(f"{cause} {more:+d}" for cause, more in row.surplus.items()),
        ", ".join(f"{cause} {count}" for cause, count in row.found.reads.most_common()),
        ", ".join(f"{what} {count}" for what, count in row.found.waits.most_common()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--predict", nargs="*", choices=REAL, default=list(REAL), metavar="MODEL", help=f"of {', '.join(REAL)}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", type=Path, help="also write a results page")
    given = parser.parse_args()
    found = []
    for model in given.models:
        for plan in given.plans:
            start = time.process_time()
            found.append(measure({}, model, plan))
            print(f"{model}, {plan}: {time.process_time() - start:.1f} s of the processor", file=sys.stderr, flush=True)
    header = ["model", "plan", "operations", "loops", "messages", "most", "ratio", "reads", "waits", "holds"]
    why = ["model", "plan", "operations beyond the loops'", "reads, the model's own too", "waits"]
    text = f"{NOTE}\n\n{table(header, [line(row) for row in found])}\n\n## Where it comes from\n\n"
    text += f"Negative: fewer than the loops.\n\n{table(why, [causes(row) for row in found])}"
    if given.predict:
        text += f"\n\n{section(given.predict)}"
    numbers = [{"model": row.model, "plan": row.plan, "beyond": row.beyond, "surplus": row.surplus} for row in found]
    print(json.dumps({"environment": environment(), "rows": numbers}) if given.json else text)
    if given.page:
        given.page.write_text(page("What does a training step ask of a device beside a plain loop?", command_line(), text))


if __name__ == "__main__":
    main()
