"""`raypar status [RUN]`: how a run is getting on, from its folder alone; no Ray is asked."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypar.commands._status import Status
    from raypar.run_folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar status`."""
    parser.add_argument(
        "run", nargs="?", help="name of a run under --run-dir, or the path of its folder (default: the one started last there)"
    )
    parser.add_argument("--run-dir", default="runs/", help="where runs lie (default runs/)")
    parser.add_argument("--svg", metavar="FILE", help="draw samples/s and workers over time, with what befell the run")
    parser.add_argument(
        "--trace", metavar="FILE", help="the same as a trace that opens in Perfetto: steps, and the gaps between"
    )
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Exit code 0, whatever the run's own end was. Raises `ConfigError` when there is no such run."""
    import json
    import time

    from raypar.commands._status import text
    from raypar.run_folder import RunFolder

    folder = RunFolder.latest(args.run_dir) if args.run is None else RunFolder.find(args.run, args.run_dir, with_job=False)
    found = read(folder, time.time())
    if args.svg is not None:
        draw(folder, args.svg, found.steps)
    if args.trace is not None:
        trace(folder, args.trace)
    print(json.dumps(found.facts()) if args.json else text(found))
    if not args.json:
        for what, file in (("picture", args.svg), ("trace", args.trace)):
            if file is not None:
                print(f"{what}: {file}")
    return 0


def draw(folder: RunFolder, file: str, steps: int | None) -> None:
    """Write the picture of the run's throughput. Raises `ConfigError`."""
    from raypar.commands._history import history
    from raypar.schedule.throughput import throughput

    metrics = list(folder.read(folder.metrics))
    seen = history(metrics, list(folder.read(folder.events)))
    done = max((line["step"] for line in metrics if "samples_per_s" in line), default=0)
    of = f" of {steps}" if steps is not None else ""
    write(file, throughput(seen, title=f"{folder.name}: {done}{of} steps"), "--svg")


def trace(folder: RunFolder, file: str) -> None:
    """Write the run as a Chrome trace. Raises `ConfigError`."""
    import json

    from raypar.commands._history import history
    from raypar.schedule.trace import run_trace

    metrics = list(folder.read(folder.metrics))
    seen = history(metrics, list(folder.read(folder.events)))
    steps = [line["step"] for line in metrics if "samples_per_s" in line]
    write(file, json.dumps(run_trace(seen, first=steps[0] if steps else 1, name=folder.name)) + "\n", "--trace")


def write(file: str, text: str, option: str) -> None:
    """Write `text` into the file that `option` names. Raises `ConfigError`."""
    from pathlib import Path

    from raypar.run_folder import write_whole

    write_whole(Path(file), text, cure=f"give {option} a file you may write")


def read(folder: RunFolder, now: float) -> Status:
    """The status of the run in a folder."""
    from raypar.commands._status import status

    cluster = folder.document(folder.cluster, damaged=True)
    return status(
        folder.name,
        str(folder.path),
        steps=steps_of(folder),
        plan=folder.document(folder.plan, damaged=True),
        members=folder.document(folder.members, damaged=True),
        metrics=list(folder.read(folder.metrics)),
        events=list(folder.read(folder.events)),
        cluster=cluster,
        gone=gone(cluster or {}),
        resumable=any(folder.checkpoints.glob("step_*")),
        now=now,
    )


def steps_of(folder: RunFolder) -> int | None:
    """Steps of the run's job; None if its file is missing or damaged. Raises `ConfigError` for a link, a FIFO, or too much."""
    import os

    from raypar.errors import ConfigError
    from raypar.input_files import read_bytes
    from raypar.safe_yaml import TooMuchError, parse_yaml

    if not os.path.lexists(folder.job):
        return None
    content = read_bytes(folder.job, follow=False, cure="put the run's job file back")
    try:
        job = parse_yaml(content.decode(), str(folder.job))
    except TooMuchError:
        raise
    except (ConfigError, UnicodeDecodeError):
        return None
    steps = job.get("steps") if isinstance(job, dict) else None
    return steps if type(steps) is int else None


def gone(cluster: Mapping[str, Any]) -> list[str]:
    """Nodes of a run's own Ray that have died. None where the head is not seen either: the run is elsewhere, or over."""
    from raypar.actors.local_nodes import raylet_of

    there = {node["node"]: (raylet_of(node["pid"]) or ("", ""))[0] == node["node"] for node in cluster.get("nodes", ())}
    head_there = any(there[node["node"]] for node in cluster.get("nodes", ()) if node["head"])
    return [node for node, alive in there.items() if not alive] if head_there else []
