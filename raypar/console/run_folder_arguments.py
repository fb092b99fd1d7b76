"""The arguments `RUN` and `--run-dir`, by which several subcommands find a run folder."""

from __future__ import annotations

import argparse

RUN_DIR = "runs/"
"""Where runs lie unless `--run-dir` says something else."""


def add_run_folder_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `RUN`, which may be left out, and `--run-dir`."""
    parser.add_argument(
        "run",
        nargs="?",
        help="name of a run under --run-dir, or the path or URI of its folder (default: the one started last there)",
    )
    add_run_dir_argument(parser)


def add_run_dir_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--run-dir`, a folder or a URI."""
    parser.add_argument(
        "--run-dir", default=RUN_DIR, help="where runs lie, a folder or a URI such as s3://BUCKET/runs (default runs/)"
    )
