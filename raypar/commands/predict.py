"""`raypar predict RUN --data MODULE:NAME --out FILE.parquet`: the outputs of a run's trained weights for each sample."""

from __future__ import annotations

import argparse
import time

from raypar.console.command_arguments import add_forward_arguments
from raypar.user_code.stop_signals_outside_training import stopped_before_training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar predict`."""
    add_forward_arguments(parser)
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="the .parquet file to write, a path or URI: a row for each sample; or MODULE:NAME of a function that gets rows",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it is there (default: refuse)")
    parser.add_argument(
        "--function", metavar="MODULE:NAME", help="a function of the output that returns what is kept (default: all of it)"
    )


@stopped_before_training()
def run(args: argparse.Namespace) -> int:
    """Write the file; exit code 0."""
    start = time.monotonic()
    from raypar.console.event_printer import EventPrinter
    from raypar.console.json_stdout import json_stdout
    from raypar.job.read_job import parse_data_argument, parse_function_argument
    from raypar.launch.forward_run import Cluster, find_trained_run, naming_argument
    from raypar.launch.predict_run import PredictionRequest, predict_with_checkpoint
    from raypar.launch.prediction_sinks import open_rows
    from raypar.record.events import StartupStage
    from raypar.storage.find_best_checkpoint import find_best_step_of_run

    with json_stdout(args.json) as out, open_rows(args.out, overwrite=args.overwrite) as rows:
        console = EventPrinter(steps=0, as_json=args.json, start_s=start, out=out)
        data = parse_data_argument(args.data) if args.data is not None else None
        function = parse_function_argument(args.function, "--function") if args.function is not None else None
        step = args.step if args.best is None else find_best_step_of_run(args.run, args.run_dir, args.best)
        found = find_trained_run(args.run, args.run_dir, step, args.overrides, console, average=args.average)
        console(StartupStage(stage="read", text=f"checkpoint {found.checkpoint}"))
        request = PredictionRequest(data, function, args.batch_size, args.samples)
        with naming_argument(data, "--data"):
            predict_with_checkpoint(
                found.job, found.checkpoint, request, rows, console, Cluster(args.address, args.local_nodes)
            )
        if not args.json:
            print(f"{rows.rows:,} rows in {args.out}: {', '.join(rows.columns)}", file=out)
    return 0
