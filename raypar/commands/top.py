"""`raypar top [RUN]`: shows a run live on the terminal, from its folder alone: workers, memory, loss, events."""

from __future__ import annotations

import argparse
import sys

from raypar.console.command_arguments import add_run_folder_arguments

REFRESH_S = 1.0
"""Time between two reads of the files."""
REFRESH_STORAGE_S = 3.0
"""The same for a run on shared storage, whose last lines are read again each time."""
ONCE_LINES = 40
"""Height of the screen that is printed without a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar top`."""
    add_run_folder_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print the screen once, also where there is no terminal")


def run(args: argparse.Namespace) -> int:
    """Show the run until `q` or Ctrl-C. Raises `ConfigError` without such a run, without rich, and without a terminal."""
    import os
    from functools import partial

    from raypar.console.live_run import follow_run_folder
    from raypar.console.top_screen import make_console, require_rich, show_until_quit, top_screen
    from raypar.errors import ConfigError
    from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment
    from raypar.launch.find_cluster_job import open_run_folder

    require_rich()
    clean = partial(redact_certain_secrets, known=secrets_of_environment(os.environ))
    console = make_console()
    with open_run_folder(args.run, args.run_dir) as folder:
        look = follow_run_folder(folder)
        if args.once:
            height = console.height if console.is_terminal else ONCE_LINES
            console.print(top_screen(look(), console.width, height, clean))
            return 0
        if not sys.stdout.isatty():
            raise ConfigError(
                "raypar top draws on a terminal, but its output is not a terminal",
                cure="add --once to print the screen once, or use `raypar status` or `raypar logs -f`",
            )
        show_until_quit(console, look, clean, REFRESH_S if folder.shared is None else REFRESH_STORAGE_S)
    return 0
