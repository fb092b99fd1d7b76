"""`raypar status [RUN]`: prints the status of a run from its files alone, without asking Ray."""

from __future__ import annotations

import argparse
from pathlib import Path

from raypar.console.command_arguments import add_run_folder_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar status`."""
    add_run_folder_arguments(parser)
    parser.add_argument("--svg", metavar="FILE", help="draw samples/s, loss and workers over time, with the faults")
    parser.add_argument(
        "--trace", metavar="FILE", help="the same as a trace that opens in Perfetto: steps, and the gaps between"
    )
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the status; exit code 0, however the run ended. Raises `ConfigError` if there is no such run."""
    import json
    import os
    import time

    from raypar.console.read_run_folder import draw_throughput_chart, make_run_trace, read_job_step_count, read_status
    from raypar.console.run_status import format_status
    from raypar.files.atomic_write import write_text_atomically
    from raypar.files.printable_text import printable_text
    from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment, tree_without_certain_secrets
    from raypar.launch.find_cluster_job import open_run_folder
    from raypar.record.fold import RunView

    known = secrets_of_environment(os.environ)
    with open_run_folder(args.run, args.run_dir) as folder:
        view = RunView.of(folder.read_timeline())
        found = read_status(folder, view, read_job_step_count(folder), time.time())
        if args.svg is not None:
            picture = draw_throughput_chart(folder, view, found.steps)
            write_text_atomically(Path(args.svg), picture, cure="give --svg a file you may write")
        if args.trace is not None:
            trace = json.dumps(make_run_trace(folder)) + "\n"
            write_text_atomically(Path(args.trace), trace, cure="give --trace a file you may write")
    if args.json:
        print(json.dumps(tree_without_certain_secrets(found.facts(), known)))
    else:
        print(printable_text(redact_certain_secrets(format_status(found), known)))
    if not args.json:
        for what, file in (("picture", args.svg), ("trace", args.trace)):
            if file is not None:
                print(f"{what}: {file}")
    return 0
