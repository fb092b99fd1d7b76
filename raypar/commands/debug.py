"""`raypar debug JOB`, or RUN: runs the whole plan in one process and one thread, so that pdb works everywhere."""

from __future__ import annotations

import argparse
import bdb
import sys
from functools import partial

from raypar.console.command_arguments import add_best_argument, add_run_dir_argument, add_set_argument
from raypar.errors import NonFiniteError
from raypar.plan.loss_scale import format_loss_scale


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar debug`."""
    parser.add_argument(
        "job",
        metavar="JOB|RUN",
        help="job file (YAML), which is run from its first step; or a run, by its name under --run-dir or the path or URI of "
        "its folder, which is run from its last checkpoint with steps left",
    )
    add_set_argument(parser)
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help="how many steps to run (default 2; of a run up to the step after the last one that it has done)",
    )
    parser.add_argument(
        "--stop-at",
        metavar="STEP,STAGE,MICROBATCH",
        help="open pdb just before the instructions of this stage and microbatch in this step; steps count from 1, as they are "
        "printed, stages and microbatches from 0",
    )
    parser.add_argument("--order-seed", type=int, default=None, help="interleave the workers in another (seeded) order")
    add_best_argument(parser)
    add_run_dir_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the first steps of a job, or the next ones of a run, here; exit code 0, or 130 if the debugger was left."""
    from raypar.launch.debug_run import find_debug_start, open_debug_run
    from raypar.worker.run_in_one_process import FirstNonFinite
    from raypar.worker.step.step_commit import NON_FINITE_CURE

    say, warn = partial(print, flush=True), partial(print, "warning:", file=sys.stderr, flush=True)
    with (
        find_debug_start(args.job, args.run_dir, args.overrides, say, warn, args.best) as start,
        open_debug_run(start, start.steps(args.steps), args.stop_at, args.order_seed, say) as local,
    ):
        first = FirstNonFinite(local)
        for step in start.steps(args.steps):
            try:
                report = local.step(step)[0]
            except NonFiniteError as error:
                cure = NON_FINITE_CURE if error.cure.endswith(NON_FINITE_CURE) else error.cure
                raise NonFiniteError(f"{error.what}\n  first not finite: {first.describe()}", cure) from error
            except bdb.BdbQuit:
                print(f"left the debugger in step {step + 1}", file=sys.stderr)
                return 130
            while local.warnings:
                warn(local.warnings.pop(0))
            scale = "" if report.loss_scale is None else f", loss scale {format_loss_scale(report.loss_scale)}"
            say(f"step {step + 1}: loss {report.loss:.6f}, gradient norm {report.norm:.6f}{scale}")
            if report.skipped:
                say(f"  skipped; first not finite: {first.describe()}")
                first.found = None
        if (found := local.weights_hash()) is not None:
            say(f"weights sha256 {found}")
    return 0
