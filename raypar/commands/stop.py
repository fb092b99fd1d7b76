"""`raypar stop RUN`: lets a run finish its step, save a checkpoint and end, as Ctrl-C does. A run of this machine, a run on S3
wherever it trains, or, with --address (or RAY_API_SERVER_ADDRESS), a cluster's submitted job.

Exit codes: 0 it has ended (or had before); 1 it has not within --wait-s, or it had, and another job of this name has not;
2 no such run, or several that have not ended have this name.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from raypar.commands.submit import RUN_HELP, add_address_argument, names_run_folder, print_to_stderr

if TYPE_CHECKING:
    from raypar.launch.cluster_jobs import ClusterJob
    from raypar.launch.job_server import JobServer
    from raypar.storage.run_folder import RunFolder

WAIT_S = 150.0
"""How long a run may take to end: somewhat longer than Ray waits before it kills a submitted job."""
SAY_S = 2.0
"""Time between two lines about the wait."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar stop`."""
    parser.add_argument("run", help=RUN_HELP)
    parser.add_argument("--run-dir", help="where runs lie (default runs/); given, the cluster is not asked")
    add_address_argument(parser)
    parser.add_argument("--wait-s", type=float, default=WAIT_S, metavar="S", help="wait so long for its end (default 150)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Stop the run and say what it has left; see above for the exit codes."""
    from raypar.console.json_stdout import json_stdout, json_text
    from raypar.errors import ConfigError
    from raypar.launch.find_cluster_job import choose_job_to_stop, find_cluster_job
    from raypar.launch.job_server import connect_job_server, find_server_address

    if not args.wait_s > 0:
        raise ConfigError(f"--wait-s {args.wait_s:g}", cure="give the seconds that the run may take to end, more than 0")
    address = None if names_run_folder(args.run, args.run_dir, args.address) else find_server_address(args.address)
    with json_stdout(args.json) as out:
        if address is None:
            facts = stop_run_of_folder(args.run, args.run_dir or "runs/", args.wait_s)
        else:
            server = connect_job_server(address)
            facts = stop_job(server, choose_job_to_stop(find_cluster_job(server, args.run), args.run), args.wait_s)
        text = facts.pop("text")
        print(json_text(facts) if args.json else text, file=out)
    return 0


def stop_run_of_folder(run: str, run_dir: str, wait_s: float) -> dict[str, Any]:
    """Stop the run in a folder or on S3; returns its facts afterwards, with a `text` for people. Raises `ConfigError`."""
    from raypar.launch.stop_local_run import stop_local_run
    from raypar.launch.stop_run_on_storage import stop_run_on_storage
    from raypar.storage.run_folder import RunFolder

    with RunFolder.open_for_reading(run, run_dir, with_job=False, last_bytes=0) as folder:
        if folder.shared is None:
            return describe_stopped_run(folder, stop_local_run(folder, wait_s, print_to_stderr))
        stopped = stop_run_on_storage(folder.shared.uri, wait_s, print_to_stderr)
        place = folder.place
    with RunFolder.open_for_reading(place, with_job=False) as folder:  # again: the copy above is from before its end
        return describe_stopped_run(folder, stopped)


def describe_stopped_run(folder: RunFolder, stopped: bool) -> dict[str, Any]:
    """Facts of a run that does not train any more, with a `text` for people. `stopped`: whether it did before."""
    import time

    from raypar.commands.runs import read_run_row
    from raypar.storage.checkpoint_store import open_checkpoint_store
    from raypar.storage.run_folder import resume_argument

    row = read_run_row(folder, time.time())
    at = f"after {row.step} of {row.steps} steps" if row.steps is not None else f"after {row.step} steps"
    text = f"run {folder.name} has ended {at}" if stopped else f"nothing trains run {folder.name}: it is {row.state} {at}"
    saved = sorted(name for name in open_checkpoint_store(folder.checkpoint_location).names() if name.startswith("step_"))
    if saved and row.state != "done":
        text += f"\nnext: raypar resume {resume_argument(folder.place)} goes on from {saved[-1]}"
    return {**row.facts(), "stopped": stopped, "checkpoint": saved[-1] if saved else None, "text": text}


def stop_job(server: JobServer, job: ClusterJob, wait_s: float) -> dict[str, Any]:
    """Stop a submitted job; returns what it has come to, with a `text` for people. Raises `ClusterError` after `wait_s`."""
    from raypar.launch.cluster_jobs import read_log_facts
    from raypar.launch.follow_job import wait_for_job_end

    stopped = not job.over
    if stopped:
        server.stop(job.submission_id)
        job = wait_for_job_end(server, job.submission_id, wait_s, print_to_stderr)
    said = read_log_facts(server.log(job.submission_id))
    name = f"job {job.submission_id}" + f" ({said.run or job.name})" * bool(said.run or job.name)
    if not stopped:
        text = f"{name} had ended already: {job.state}"
    elif job.state == "stopped":
        text = f"{name} has stopped\n{said.end}" if said.end else f"{name} was stopped before it had saved anything new"
        text += "\nnext: submit the same job again, and it goes on from its last checkpoint" * bool(said.end)
    else:
        text = f"{name} ended by itself meanwhile: {job.state}"
    return {
        "name": said.run or job.name,
        "submission_id": job.submission_id,
        "state": job.state,
        "stopped": stopped and job.state == "stopped",
        "step": said.step,
        "steps": said.steps,
        "saved": said.end,
        "text": text,
    }
