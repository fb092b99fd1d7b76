"""`raypar status [RUN]`: prints the status of a run from its files alone, without asking Ray."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raypar.console.run_folder_arguments import add_run_folder_arguments

if TYPE_CHECKING:
    from raypar.console.run_status import RunStatus
    from raypar.record.fold import RunView
    from raypar.storage.run_folder import RunFolder


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

    from raypar.console.run_status import format_status
    from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment, tree_without_certain_secrets
    from raypar.files.untrusted_files import printable
    from raypar.launch.find_cluster_job import open_run_folder
    from raypar.record.fold import RunView

    known = secrets_of_environment(os.environ)
    with open_run_folder(args.run, args.run_dir) as folder:
        view = RunView.of(folder.read_timeline())
        found = read_status(folder, view, time.time())
        if args.svg is not None:
            write_throughput_chart(folder, args.svg, view, found.steps)
        if args.trace is not None:
            write_run_trace(folder, args.trace)
    if args.json:
        print(json.dumps(tree_without_certain_secrets(found.facts(), known)))
    else:
        print(printable(redact_certain_secrets(format_status(found), known)))
    if not args.json:
        for what, file in (("picture", args.svg), ("trace", args.trace)):
            if file is not None:
                print(f"{what}: {file}")
    return 0


def write_throughput_chart(folder: RunFolder, file: str, view: RunView, steps: int | None) -> None:
    """Write the picture of the run's throughput. Raises `ConfigError`."""
    from raypar.draw.throughput_chart import throughput_svg
    from raypar.files.untrusted_files import printable

    of = f" of {steps}" if steps is not None else ""
    done = view.last_step.step if view.last_step is not None else 0
    picture = throughput_svg(view.history.history(), title=f"{folder.name}: {done}{of} steps")
    write_option_output_file(file, printable(picture), "--svg")


def write_run_trace(folder: RunFolder, file: str) -> None:
    """Write the run as a Chrome trace, with every step. Raises `ConfigError`."""
    import json

    from raypar.draw.chrome_trace import chrome_trace_of_run
    from raypar.record.events import StepRecord
    from raypar.record.history import HistoryFold

    fold, first = HistoryFold(most_points=None), None
    for event in folder.read_timeline():
        fold.apply(event)
        if first is None and isinstance(event, StepRecord):
            first = event.step
    trace = chrome_trace_of_run(fold.history(with_losses=False), first=first or 1, name=folder.name)
    write_option_output_file(file, json.dumps(trace) + "\n", "--trace")


def write_option_output_file(file: str, text: str, option: str) -> None:
    """Write `text` into the file that `option` names. Raises `ConfigError`."""
    from pathlib import Path

    from raypar.files.atomic_write import write_text_atomically

    write_text_atomically(Path(file), text, cure=f"give {option} a file you may write")


def read_status(folder: RunFolder, view: RunView, now: float) -> RunStatus:
    """The status of the run in a folder. `view`: what its events say."""
    from raypar.console.run_status import build_run_status

    cluster = folder.read_document(folder.cluster, damaged=True)
    return build_run_status(
        folder.name,
        folder.place,
        view,
        steps=read_job_step_count(folder),
        plan=folder.read_document(folder.plan, damaged=True),
        members=folder.read_document(folder.members, damaged=True),
        cluster=cluster,
        gone=find_dead_local_nodes(cluster or {}),
        resumable=has_checkpoints(folder),
        now=now,
    )


def has_checkpoints(folder: RunFolder) -> bool:
    """Whether the run has checkpoints, whole or not."""
    from raypar.errors import CheckpointError
    from raypar.storage.checkpoint_store import open_checkpoint_store

    with contextlib.suppress(CheckpointError):  # a storage that cannot be read has nothing to resume from
        return any(name.startswith("step_") for name in open_checkpoint_store(folder.checkpoint_location).names())
    return False


def read_job_step_count(folder: RunFolder) -> int | None:
    """The run's number of steps, from job.yaml; without one, as of a job with functions that have no names, from members.json.

    None if neither says. Raises `ConfigError` for a job file that is a link, a FIFO or large.
    """
    import os

    from raypar.errors import ConfigError
    from raypar.files.safe_yaml import YamlTooLargeError, parse_yaml
    from raypar.files.untrusted_files import read_limited_bytes

    if not os.path.lexists(folder.job):
        return (folder.read_document(folder.members, damaged=True) or {}).get("steps")
    content = read_limited_bytes(folder.job, follow=False, cure="put the run's job file back")
    try:
        job = parse_yaml(content.decode(), str(folder.job))
    except YamlTooLargeError:
        raise
    except (ConfigError, UnicodeDecodeError):
        return None
    steps = job.get("steps") if isinstance(job, dict) else None
    return steps if type(steps) is int else None


def find_dead_local_nodes(cluster: Mapping[str, Any]) -> list[str]:
    """Nodes of the run's local Ray cluster that have died; empty without its head: the run is elsewhere, or over."""
    from raypar.ray_compat.raylet_options import parse_raylet_command

    there = {
        node["node"]: (parse_raylet_command(node["pid"]) or ("", ""))[0] == node["node"] for node in cluster.get("nodes", ())
    }
    head_there = any(there[node["node"]] for node in cluster.get("nodes", ()) if node["head"])
    return [node for node, alive in there.items() if not alive] if head_there else []
