"""`raypar evaluate RUN`: the validation loss of a run's trained weights, over its validation data or another data set."""

from __future__ import annotations

import argparse
import time

from raypar.console.command_arguments import add_forward_arguments
from raypar.user_code.stop_signals_outside_training import stopped_before_training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar evaluate`."""
    add_forward_arguments(parser)


@stopped_before_training()
def run(args: argparse.Namespace) -> int:
    """Print the loss; exit code 0."""
    start = time.monotonic()
    from raypar.console.event_printer import EventPrinter
    from raypar.console.json_stdout import json_stdout
    from raypar.job.read_job import parse_data_argument
    from raypar.launch.evaluate_run import describe_evaluation, evaluate_checkpoint
    from raypar.launch.forward_run import Cluster, find_trained_run, naming_argument
    from raypar.record.events import StartupStage
    from raypar.storage.find_best_checkpoint import find_best_step_of_run

    with json_stdout(args.json) as out:
        console = EventPrinter(steps=0, as_json=args.json, start_s=start, out=out)
        data = parse_data_argument(args.data) if args.data is not None else None
        step = args.step if args.best is None else find_best_step_of_run(args.run, args.run_dir, args.best)
        found = find_trained_run(args.run, args.run_dir, step, args.overrides, console, average=args.average)
        console(StartupStage(stage="read", text=f"checkpoint {found.checkpoint}"))
        with naming_argument(data, "--data"):
            facts = evaluate_checkpoint(
                found.job,
                found.checkpoint,
                data,
                console,
                Cluster(args.address, args.local_nodes),
                batch_size=args.batch_size,
                samples=args.samples,
            )
        if not args.json:
            print(describe_evaluation(facts), file=out)
    return 0
