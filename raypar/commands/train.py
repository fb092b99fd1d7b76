"""`raypar train JOB`: trains a job on Ray; leaves a run folder with metrics, pictures and checkpoints."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar train`."""
    parser.add_argument("job", help="job file (YAML)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="override a job key")
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that `train` and `resume` share."""
    parser.add_argument("--stop-at-step", type=int, metavar="K", help="stop after K steps with a checkpoint, to be resumed")
    parser.add_argument("--address", help="join the Ray cluster there (default: RAY_ADDRESS, else a Ray of its own)")
    parser.add_argument(
        "--local-nodes",
        type=int,
        default=1,
        metavar="N",
        help="a Ray of its own has N nodes on this machine, each of which may be killed or drained (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")


def run(args: argparse.Namespace) -> int:
    """Trains; exit code 0, or 130 after Ctrl-C. Raises what the run failed with."""
    import time

    start = time.monotonic()
    from raypar.commands._console import Console
    from raypar.config import load_job
    from raypar.launch import raise_failure, run_job

    job = load_job(args.job, args.overrides)
    console = Console(steps=job.steps, as_json=args.json, start_s=start)
    console({"kind": "stage", "stage": "read", "text": f"job {job.name} read from {args.job}: {job.steps} steps"})
    result = run_job(job, console, stop_at_step=args.stop_at_step, address=args.address, local_nodes=args.local_nodes)
    raise_failure(result)
    return console.finish(result)
