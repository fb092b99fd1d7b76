"""`raypar logs RUN`: prints the log of a run from its folder, or that of a cluster's submitted job (--address, or
RAY_API_SERVER_ADDRESS); -f follows it to its end.

Exit codes: 0 printed, of a followed run or job: as `raypar submit` (0 done, 1 failed, 130 stopped); 2 no such run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from raypar.commands.submit import RUN_HELP, add_address_argument, follow_to_the_end, names_run_folder, print_to_stderr

if TYPE_CHECKING:
    from raypar.storage.run_folder import RunFolder

POLL_S = 0.5
"""How often a followed run's files are looked at."""
POLL_STORAGE_S = 3.0
"""How often those of a run on shared storage are, at most: each look reads them again, in at most a tenth of the time."""
GONE_S = 30.0
"""How long a followed run without a process on this machine may write nothing."""
GONE_FROM_STORAGE_S = 600.0
"""The same for a run on storage whose lease cannot be read (only S3 has one): it may train on another machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar logs`."""
    parser.add_argument("run", help=RUN_HELP)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    parser.add_argument("--run-dir", help="where runs lie (default runs/); given, the cluster is not asked")
    add_address_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(args: argparse.Namespace) -> int:
    """Print the log; see above for the exit codes."""
    from raypar.console.json_stdout import json_stdout
    from raypar.launch.find_cluster_job import find_cluster_job
    from raypar.launch.job_printer import JobPrinter
    from raypar.launch.job_server import connect_job_server, find_server_address
    from raypar.storage.run_folder import RunFolder

    address = None if names_run_folder(args.run, args.run_dir, args.address) else find_server_address(args.address)
    with json_stdout(args.json) as out:
        if address is None:
            with RunFolder.open_for_reading(args.run, args.run_dir or "runs/", with_job=False) as folder:
                return print_run_log(folder, out, follow=args.follow, as_json=args.json)
        server = connect_job_server(address)
        matched = find_cluster_job(server, args.run)
        job = matched.found.job
        for other in matched.others:
            print_to_stderr(f"note: this is the log of job {job.submission_id}; {args.run} is also {other.describe()}")
        printer = JobPrinter(out, as_json=args.json)
        if args.follow:
            return printer.ended(follow_to_the_end(server, job, printer))
        printer.log(server.log(job.submission_id))
        printer.finish_line()
        return 0


def print_run_log(folder: RunFolder, out: TextIO, *, follow: bool, as_json: bool) -> int:
    """Print the run's events and steps; with `follow` until it has ended. Returns the exit code.

    Raises `ClusterError` for a run that has neither a process on this machine nor news for `GONE_S`.
    """
    import os
    import time

    from raypar.commands.status import read_job_step_count
    from raypar.console.json_stdout import json_text
    from raypar.console.run_log import RunLogFormatter, exit_code_of_end
    from raypar.errors import ClusterError
    from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment, without_certain_secrets
    from raypar.files.untrusted_files import printable
    from raypar.launch.new_run_lines import NewLines
    from raypar.record.events import UnreadableLines
    from raypar.record.fold import RunView, timeline
    from raypar.storage.folder_download import download_run
    from raypar.storage.run_folder import resume_argument

    known = secrets_of_environment(os.environ)
    log, view = RunLogFormatter(read_job_step_count(folder)), RunView()
    files = NewLines(folder.metrics), NewLines(folder.events)
    may_train_elsewhere = make_remote_liveness_check(folder)
    heard_s = time.monotonic()
    while True:
        looked_s = time.monotonic()
        if folder.shared is not None and files[0].offset + files[1].offset:
            download_run(folder.shared.uri, folder.path)
        locked = folder.is_locked()  # before the files: then they hold all that the process has written
        events = list(timeline(files[0].read(), files[1].read()))
        for event in events:
            view.apply(event)
        end = view.ended()
        if as_json:
            facts = (event.facts() for event in events if not isinstance(event, UnreadableLines))
            out.writelines(json_text(without_certain_secrets(one, known)) + "\n" for one in facts)
        else:
            out.writelines(printable(redact_certain_secrets(line, known)) + "\n" for line in log.lines(events))
        out.flush()
        if not follow:
            return 0
        if end is not None and not locked:
            return exit_code_of_end(end.end)
        heard_s = time.monotonic() if events or locked else heard_s
        silent_s = time.monotonic() - heard_s
        if silent_s > GONE_S and not may_train_elsewhere(silent_s):
            who = "no process of this machine" if folder.shared is None else "no process that raypar knows of"
            place = resume_argument(folder.place)
            raise ClusterError(
                f"run {folder.name} has written nothing for {silent_s:.0f} s, and {who} trains it",
                cure=f"`raypar status {place}` says what it was doing; `raypar resume {place}` goes on from its last "
                "checkpoint",
            )
        took_s = time.monotonic() - looked_s
        time.sleep(POLL_S if folder.shared is None else max(POLL_STORAGE_S, 9 * took_s))


def make_remote_liveness_check(folder: RunFolder) -> Callable[[float], bool]:
    """A function from the seconds of a run's silence to whether it may still train on another machine.

    On S3 the run's lease tells it. On other storage a run may be silent for `GONE_FROM_STORAGE_S`. A run in a folder of this
    machine never trains elsewhere: its lock tells whether it trains.
    """
    from raypar.errors import ConfigError
    from raypar.storage.run_lease import is_held
    from raypar.storage.s3_lease_store import s3_lease_store

    if folder.shared is None:
        return lambda silent_s: False
    try:
        store = s3_lease_store(folder.shared.uri)
    except ConfigError:  # boto3 is missing; reading needs none
        store = None
    if store is None:
        return lambda silent_s: silent_s < GONE_FROM_STORAGE_S
    return lambda silent_s: is_held(store.read())
