"""`raypar top [RUN]`: shows a run live on the terminal, from its folder alone: workers, memory, loss, events."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from raypar.console.run_folder_arguments import add_run_folder_arguments

if TYPE_CHECKING:
    from raypar.console.live_run import LiveView
    from raypar.storage.run_folder import RunFolder

REFRESH_S = 1.0
"""Time between two reads of the files."""
REFRESH_STORAGE_S = 3.0
"""The same for a run on shared storage, whose last lines are read again each time."""
FIRST_BYTES = 8 << 20
"""How much of the end of a file the first read takes, some ten thousand steps. Later reads take only new lines."""
ONCE_LINES = 40
"""Height of the screen that is printed without a terminal."""
LARGEST_NUMBER = 2**63
"""A number of job.yaml that is as large as this, or NaN, is ignored: others may have written it."""
QUIT_KEYS = ("q", "Q", "")
"""Keys that end the command; the empty text means that the terminal is gone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar top`."""
    add_run_folder_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print the screen once, also where there is no terminal")


def run(args: argparse.Namespace) -> int:
    """Show the run until `q` or Ctrl-C. Raises `ConfigError` without such a run, without rich, and without a terminal."""
    import os
    from functools import partial

    from raypar.console.top_screen import make_console, require_rich, top_screen
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
        from rich.live import Live

        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(console=console, screen=True, auto_refresh=False) as live,
            pressed_keys() as key,
        ):
            while True:
                live.update(top_screen(look(), console.width, console.height, clean), refresh=True)
                if key(REFRESH_S if folder.shared is None else REFRESH_STORAGE_S) in QUIT_KEYS:
                    break
    return 0


def follow_run_folder(folder: RunFolder) -> Callable[[], LiveView]:
    """A function that returns the run at this moment. Each call reads the lines that are new since the last call."""
    import time

    from raypar.launch.new_run_lines import NewLines
    from raypar.record.fold import RunView

    job = read_job_numbers(folder)
    view, files = RunView(), tuple[NewLines, ...]()

    def look() -> LiveView:
        from raypar.console.live_run import build_live_view
        from raypar.console.run_status import build_run_status
        from raypar.record.fold import timeline
        from raypar.storage.folder_download import download_run

        nonlocal view, files
        if folder.shared is not None and any(file.offset for file in files):
            download_run(folder.shared.uri, folder.path)
        new = [file.read() for file in files]
        if not files or any(file.restarted for file in files):
            view, files = RunView(), tuple(NewLines(path, FIRST_BYTES) for path in (folder.metrics, folder.events))
            new = [file.read() for file in files]
        for event in timeline(*new):
            view.apply(event)
        now = time.time()
        status = build_run_status(
            folder.name,
            folder.place,
            view,
            steps=job.get("steps"),
            plan=folder.read_document(folder.plan, damaged=True),
            members=folder.read_document(folder.members, damaged=True),
            cluster=None,
            now=now,
        )
        totals, price = folder.read_document(folder.totals, damaged=True), job.get("price_per_worker_hour")
        return build_live_view(view, status, totals, now, price)

    return look


def read_job_numbers(folder: RunFolder) -> dict[str, Any]:
    """`steps` and `price_per_worker_hour` of job.yaml, if it has them. Raises `ConfigError` for a link or a FIFO."""
    import os

    from raypar.errors import ConfigError
    from raypar.files.safe_yaml import YamlTooLargeError, parse_yaml
    from raypar.files.untrusted_files import read_limited_text

    if not os.path.lexists(folder.job):
        return {}
    text = read_limited_text(folder.job, follow=False, cure="put the run's job file back")
    try:
        job = parse_yaml(text, str(folder.job))
    except YamlTooLargeError:
        raise
    except ConfigError:
        return {}
    kinds = {"steps": (int,), "price_per_worker_hour": (int, float)}
    given = {key: job[key] for key, kind in kinds.items() if type(job.get(key)) in kind} if isinstance(job, dict) else {}
    return {key: value for key, value in given.items() if abs(value) < LARGEST_NUMBER}


def _sleep_instead(wait_s: float) -> str:
    """Where no key can be pressed: a space, after some seconds."""
    import time

    time.sleep(wait_s)
    return " "


@contextlib.contextmanager
def pressed_keys() -> Iterator[Callable[[float], str]]:
    """Gives the block a function that waits some seconds for a key; it returns the key, or a space if none was pressed."""

    if not sys.stdin.isatty():
        yield _sleep_instead
        return
    import os
    import select
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def key(wait_s: float) -> str:
        ready, _, _ = select.select([terminal], [], [], wait_s)
        return os.read(terminal, 64).decode(errors="replace")[:1] if ready else " "

    tty.setcbreak(terminal)
    try:
        yield key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
