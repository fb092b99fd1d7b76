"""Arguments of subcommands: those that several share (job file, run, where runs lie, cluster), and numbers that are checked."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T", int, float)

RUN_DIR = "runs/"
"""Where runs lie unless `--run-dir` says something else."""
RUN_OR_JOB_HELP = (
    "of a cluster: submission id, or name as `raypar runs` shows it; else name of a run under --run-dir, or its path or URI"
)
"""What names a run, for commands that take a run folder or a cluster's job."""


def add_job_arguments(parser: argparse.ArgumentParser, where: str = "") -> None:
    """Add `JOB` and `--set`. `where`: what else the help says of the file."""
    parser.add_argument("job", help=f"job file (YAML){where}")
    add_set_argument(parser)


def add_set_argument(parser: argparse.ArgumentParser, limit: str = "") -> None:
    """Add `--set`, which may be given several times. `limit`: what the help says of keys that it does not take."""
    key = "override a job key" + limit
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help=key)


def add_resume_argument(parser: argparse.ArgumentParser, first: str = "", second: str = "") -> None:
    """Add `--resume` and `--no-resume`. `first`, `second`: what the help says of resuming, and of beginning anew."""
    text = f"resume the last run of this name if it is the same job and has steps left{first}, else begin a new one{second}"
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=None, help=text)


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `train` and `resume` share."""
    parser.add_argument("--stop-at-step", type=int, metavar="K", help="stop after K steps with a checkpoint, to be resumed")
    add_cluster_arguments(parser)


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where workers are found, and `--json`."""
    parser.add_argument("--address", help="join the Ray cluster there (default: RAY_ADDRESS, else a local Ray cluster)")
    parser.add_argument(
        "--local-nodes",
        type=int,
        default=1,
        metavar="N",
        help="start the local Ray cluster with N nodes on this machine, each of which may be killed or drained (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")


def add_forward_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what commands share that pass data through a trained model."""
    parser.add_argument("run", help="a run's name under --run-dir, or the path or URI of a run or of one checkpoint")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the checkpoint after so many steps (default: the last that is whole)")
    add_best_argument(which)
    add_average_argument(parser)
    parser.add_argument(
        "--data",
        metavar="MODULE:NAME",
        help="the data set: its function, a section `validation` as YAML, {function: ..., args: {...}}, or the "
        "name of one of the job's validation sets (default: the job's)",
    )
    parser.add_argument("--batch-size", type=count, metavar="N", help="samples in the model at once (default: as in training)")
    parser.add_argument("--samples", type=count, metavar="N", help="how many samples are used, the first ones (default: all)")
    add_set_argument(parser, ", such as plan.stages=1")
    add_run_dir_argument(parser)
    add_cluster_arguments(parser)


def add_run_folder_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `RUN`, which may be left out, and `--run-dir`."""
    parser.add_argument(
        "run",
        nargs="?",
        help="name of a run under --run-dir, or the path or URI of its folder (default: the one started last there)",
    )
    add_run_dir_argument(parser)


class TakesArguments(Protocol):
    """A parser of arguments, or a group of one."""

    @property
    def add_argument(self) -> Callable[..., argparse.Action]: ...


def add_best_argument(parser: TakesArguments) -> None:
    """Argument `--best`, of commands that take a checkpoint of a run."""
    parser.add_argument(
        "--best",
        nargs="?",
        const="",
        metavar="METRIC",
        help="the best checkpoint by a metric of the run's checkpoint.best (default: the first one)",
    )


def add_average_argument(parser: TakesArguments) -> None:
    """Argument `--average`, of commands that read weights."""
    parser.add_argument(
        "--average", action="store_true", help="the average of the weights, of a run that trains with `average`"
    )


def add_run_dir_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--run-dir`, a folder or a URI."""
    parser.add_argument(
        "--run-dir", default=RUN_DIR, help="where runs lie, a folder or a URI such as s3://BUCKET/runs (default runs/)"
    )


def add_run_dir_or_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--run-dir` and `--address`, of which the first excludes the second."""
    parser.add_argument("--run-dir", help="where runs lie (default runs/); given, the cluster is not asked")
    add_job_server_argument(parser)


def add_job_server_argument(parser: argparse.ArgumentParser, default: str = "RAY_API_SERVER_ADDRESS") -> None:
    """Add `--address`, a cluster's job server. `default`: where the address is found without it, as text."""
    parser.add_argument("--address", metavar="URL", help=f"the cluster's job server, http://HEAD:8265 (default: {default})")


def add_list(group: argparse._ArgumentGroup, option: str, parse: Callable[[str], float], text: str) -> None:
    """Add an option that takes values in groups: `1 1 3 1`, or `1,1,3,1`. `parse`: of one value."""

    def values(word: str) -> list[float]:
        return [parse(part) for part in word.split(",") if part]

    group.add_argument(option, nargs="+", type=values, metavar="X", help=text)


def count(word: str) -> int:
    """A whole number of at least 1, as the type of an argument."""
    return _number(word, int, 1)


def amount(word: str) -> float:
    """A finite number of at least 0, as the type of an argument."""
    return _number(word, float, 0)


def _number(word: str, kind: type[T], least: int) -> T:
    try:
        value = kind(word)
    except ValueError:
        value = None
    if value is None or not least <= value < math.inf:
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{word!r} is not {what} of at least {least}")
    return value
