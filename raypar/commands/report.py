"""`raypar report RUN`: writes one HTML file with the whole story of a run, fit to be sent to a colleague.

The file needs nothing beside it and loads nothing. The run may be finished, stopped or still running.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from raypar.console.run_folder_arguments import add_run_folder_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from raypar.storage.run_folder import RunFolder

JOB_CHARACTERS = 60_000
"""A longer job file is cut."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar report`."""
    add_run_folder_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="the file to write (default: NAME.html in this folder)")


def run(args: argparse.Namespace) -> int:
    """Write the report; exit code 0, however the run ended. Raises `ConfigError` if there is no such run."""
    import os
    import time
    from functools import partial

    from raypar.commands.status import write_option_output_file
    from raypar.files.redact_secrets import redact_text, secrets_of_environment
    from raypar.files.untrusted_files import printable
    from raypar.launch.find_cluster_job import open_run_folder

    known = secrets_of_environment(os.environ)
    with open_run_folder(args.run, args.run_dir) as folder:
        out = args.out if args.out is not None else f"{folder.path.resolve().name}.html"
        page = printable(report_page(folder, time.time(), partial(redact_text, known=known), known))
    write_option_output_file(out, page, "--out")
    print(f"report: {out} ({len(page.encode()) / 1000:,.0f} kB)")
    return 0


def report_page(folder: RunFolder, now: float, clean: Callable[[str], str], known: list[str]) -> str:
    """The report of the run in a folder as HTML. `clean` removes secrets; `known`: texts that are secrets anywhere."""
    from raypar.commands.status import read_status
    from raypar.console.run_report import RunFiles, build_run_report
    from raypar.console.run_report_html import run_report_html
    from raypar.record.fold import RunView

    files = RunFiles(
        view=RunView.of(folder.read_timeline()),
        plan=folder.read_document(folder.plan, damaged=True),
        members=folder.read_document(folder.members, damaged=True),
        job=read_job_without_secrets(folder, known),
        swimlane=read_swimlane(folder, clean),
        totals=folder.read_document(folder.totals, damaged=True),
        has_drawing_file=folder.swimlane.is_file(),
    )
    status = read_status(folder, files.view, now)
    return run_report_html(build_run_report(status, files, now, clean))


def read_job_without_secrets(folder: RunFolder, known: list[str]) -> str | None:
    """The job file, written anew without secrets; of one that is no YAML the reason; None if there is none."""
    import os

    from raypar.errors import ConfigError
    from raypar.files.redact_secrets import redact_text, redact_value
    from raypar.files.safe_yaml import dump_yaml, parse_yaml
    from raypar.files.untrusted_files import read_limited_text

    if not os.path.lexists(folder.job):
        return None
    try:
        job = parse_yaml(read_limited_text(folder.job, follow=False), folder.job.name)
    except ConfigError as error:
        return f"(the job file cannot be read: {redact_text(error.what, known)})"
    text = dump_yaml(redact_value(job, known))
    return (
        text
        if len(text) <= JOB_CHARACTERS
        else f"{text[:JOB_CHARACTERS]}\n... and {len(text) - JOB_CHARACTERS:,} characters more"
    )


def read_swimlane(folder: RunFolder, clean: Callable[[str], str]) -> str | None:
    """The drawing of a step, drawn from the data that the run has left in its trace; None if there are none."""
    from raypar.draw.swimlane_data import draw_step_of_trace
    from raypar.errors import ConfigError

    try:
        trace = folder.read_document(folder.trace, damaged=True)
    except ConfigError:
        return None
    return draw_step_of_trace(trace, clean) if trace is not None else None
