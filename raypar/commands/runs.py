"""`raypar runs`: lists the runs in a runs folder; with --address (or RAY_API_SERVER_ADDRESS) a cluster's submitted jobs.

State, step and loss of a run are those of its folder, of a job those that its log says.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from raypar.commands.submit import add_address_argument

if TYPE_CHECKING:
    from raypar.console.run_table import RunRow
    from raypar.launch.cluster_jobs import ClusterJob
    from raypar.launch.job_server import JobServer
    from raypar.storage.run_folder import RunFolder
    from raypar.storage.storage_uri import StorageUri

TAIL_BYTES = 256 << 10
"""How much of a run's metrics and events is read: the last steps, and the end."""
DEADLINE_S = 60.0
"""How long the logs of a cluster's jobs may take to read, all together; those that are not read have no step and loss."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar runs`."""
    where = "where runs lie, a folder or a URI such as s3://BUCKET/runs (default runs/); given, the cluster is not asked"
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help=where)
    parser.add_argument("--run-dir", dest="run_dir_option", metavar="RUN_DIR", help="the same")
    add_address_argument(parser)
    parser.add_argument("--last", type=int, default=20, metavar="N", help="show the last N (default 20; 0: all)")
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> int:
    """Print the list, the last one last; exit code 0, also if it is empty."""
    import os
    import time

    from raypar.console.json_stdout import json_stdout, json_text
    from raypar.console.run_table import format_run_table
    from raypar.errors import ConfigError
    from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment, tree_without_certain_secrets
    from raypar.files.untrusted_files import printable
    from raypar.launch.job_server import connect_job_server, find_server_address

    if args.last < 0:
        raise ConfigError(f"--last {args.last}", cure="give a number of runs, or 0 for all")
    if args.run_dir is not None and args.run_dir_option is not None:
        raise ConfigError(
            f"two places of runs are given: {args.run_dir} and --run-dir {args.run_dir_option}", cure="give one of them"
        )
    run_dir = args.run_dir if args.run_dir is not None else args.run_dir_option
    if args.address is not None and run_dir is not None:
        raise ConfigError("--address lists a cluster's jobs, --run-dir the runs in a folder", cure="give one of them")
    address = find_server_address(args.address) if run_dir is None else None
    now, known = time.time(), secrets_of_environment(os.environ)
    with json_stdout(args.json) as out:
        if address is None:
            place = run_dir or "runs/"
            rows = list_runs_in_folder(place, args.last, now)
        else:
            server = connect_job_server(address)
            place = server.name
            rows = list_cluster_runs(server, args.last)
        if args.json:
            print(json_text(tree_without_certain_secrets([row.facts() for row in rows], known)), file=out)
        else:
            table = format_run_table(rows, now) if rows else f"no runs in {place}"
            print(printable(redact_certain_secrets(table, known)), file=out)
    return 0


def list_runs_in_folder(run_dir: str, last: int, now: float) -> list[RunRow]:
    """The rows of the runs below `run_dir` that were started or resumed last, in that order."""
    from raypar.files.untrusted_files import explain_read_errors
    from raypar.storage.run_folder import RunFolder, check_local_path, parse_storage_location

    if (shared := parse_storage_location(run_dir, "--run-dir")) is not None:
        return list_runs_on_storage(shared, last, now)
    root = check_local_path(run_dir, "--run-dir")
    with explain_read_errors(root):
        folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
        runs = [RunFolder(path) for path in folders if (path / "job.yaml").exists() or (path / "checkpoints").is_dir()]
    runs.sort(key=lambda run: read_start_time(run) or 0.0)
    return [read_run_row(run, now) for run in runs[-last or None :]]


def list_runs_on_storage(run_dir: StorageUri, last: int, now: float) -> list[RunRow]:
    """The same of runs below a place on shared storage."""
    from raypar.storage.folder_download import list_runs_below
    from raypar.storage.run_folder import RunFolder

    rows = []
    for uri, _ in list_runs_below(run_dir)[-last or None :]:
        with RunFolder.open_for_reading(str(uri), with_job=False, last_bytes=TAIL_BYTES) as run:
            rows.append(read_run_row(run, now))
    return rows


def read_start_time(run: RunFolder) -> float | None:
    """When the run was started or resumed."""
    for path in (run.cluster, run.job, run.path):
        with contextlib.suppress(OSError):
            return path.lstat().st_mtime
    return None


def read_run_row(run: RunFolder, now: float) -> RunRow:
    """The row of the run in a folder. A file that cannot be read is left out."""
    from raypar.commands.status import read_job_step_count
    from raypar.console.run_table import RunRow, build_run_row
    from raypar.errors import ConfigError
    from raypar.launch.new_run_lines import NewLines
    from raypar.record.fold import RunView, timeline

    try:
        return build_run_row(
            run.name,
            run.place,
            RunView.of(timeline(NewLines(run.metrics, TAIL_BYTES).read(), NewLines(run.events, TAIL_BYTES).read())),
            steps=read_job_step_count(run),
            members=run.read_document(run.members, damaged=True),
            locked=run.is_locked(),
            started_s=read_start_time(run),
            now=now,
        )
    except ConfigError as error:
        return RunRow(name=run.name, path=run.place, state="unreadable", why=error.what)


def list_cluster_runs(server: JobServer, last: int) -> list[RunRow]:
    """The rows of the jobs that were submitted last, in that order."""
    import time

    from raypar.launch.cluster_jobs import parse_ray_job_record

    jobs = sorted(map(parse_ray_job_record, server.jobs()), key=lambda job: job.started_s or 0.0)[-last or None :]
    until_s = time.monotonic() + DEADLINE_S
    newest_first = [read_job_row(server, job, with_log=time.monotonic() < until_s) for job in reversed(jobs)]
    return newest_first[::-1]


def read_job_row(server: JobServer, job: ClusterJob, *, with_log: bool) -> RunRow:
    """The row of a job, with what its log says of its run."""
    from raypar.console.run_table import RunRow
    from raypar.launch.cluster_jobs import LogFacts, describe_failure
    from raypar.launch.find_cluster_job import JobWithLog, read_job_with_log

    found = read_job_with_log(server, job) if with_log else JobWithLog(job, LogFacts())
    said = found.log
    if found.state == "waiting":
        why = said.waiting or ""
    elif found.state == "failed":
        why = describe_failure(job, said)
    else:
        why = said.end or job.message
    return RunRow(
        name=found.name,
        state=found.state,
        step=said.step,
        steps=said.steps,
        loss=said.loss,
        started_s=job.started_s,
        updated_s=job.ended_s,
        why=why,
        submission_id=job.submission_id,
    )
