"""`raypar report RUN`: writes one HTML file with the whole story of a run, fit to be sent to a colleague.

The file needs nothing beside it and loads nothing. The run may be finished, stopped or still running.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from raypar.console.command_arguments import add_run_folder_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar report`."""
    add_run_folder_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="the file to write (default: NAME.html in this folder)")


def run(args: argparse.Namespace) -> int:
    """Write the report; exit code 0, however the run ended. Raises `ConfigError` if there is no such run."""
    import os
    import time
    from functools import partial

    from raypar.console.read_run_folder import read_job_step_count, read_report_files, read_status
    from raypar.console.run_report import build_run_report
    from raypar.console.run_report_html import run_report_html
    from raypar.files.atomic_write import write_text_atomically
    from raypar.files.printable_text import printable_text
    from raypar.files.redact_secrets import redact_text, secrets_of_environment
    from raypar.launch.find_cluster_job import open_run_folder

    known = secrets_of_environment(os.environ)
    with open_run_folder(args.run, args.run_dir) as folder:
        out = args.out if args.out is not None else f"{folder.path.resolve().name}.html"
        now, clean = time.time(), partial(redact_text, known=known)
        files = read_report_files(folder, clean, known)
        report = build_run_report(read_status(folder, files.view, read_job_step_count(folder), now), files, now, clean)
        page = printable_text(run_report_html(report))
    write_text_atomically(Path(out), page, cure="give --out a file you may write")
    print(f"report: {out} ({len(page.encode()) / 1000:,.0f} kB)")
    return 0
