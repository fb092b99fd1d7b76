"""Renders the screen of `raypar top` with rich, for a terminal of any size, until a key quits."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from raypar.console.live_run import LiveView, LiveWorker
from raypar.console.run_status import format_loss, format_step_times, local_time
from raypar.draw.line_chart import LOG_FROM
from raypar.errors import ConfigError
from raypar.record.value_text import format_duration

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

BARS = " ▁▂▃▄▅▆▇█"
"""Characters of a sparkline, by height."""
LEAST_STORY_LINES = 4
"""Least number of lines for the last events, if the screen has room for them."""
TITLES = {"running": "green", "ended": "cyan", "starting": "yellow", "recovering": "yellow", "waiting": "yellow"}
"""Phase -> colour."""
NARROW, WIDE = 72, 110
"""Terminals narrower than `NARROW` columns show no nodes and pids; those of `WIDE` columns or more have wide bars."""

QUIT_KEYS = ("q", "Q", "")
"""Keys that end the command; the empty text means that the terminal is gone."""

Show = Callable[[str], str]
"""The text of a value as it is shown: without secrets, and without characters that move the cursor."""


def require_rich() -> None:
    """Raise `ConfigError` if the library that draws the screen is not installed."""
    try:
        import rich  # noqa: F401
    except ImportError:
        raise ConfigError(
            "raypar top draws its screen with the package rich, which is not installed here",
            cure="pip install rich (or raypar[top]); `raypar status` says the same as plain text",
        ) from None


def make_console(width: int | None = None) -> Console:
    """The console on stdout. `width`: where that is no terminal."""
    from rich.console import Console

    return Console(width=width, highlight=False, markup=False, emoji=False)


def show_until_quit(console: Console, look: Callable[[], LiveView], clean: Callable[[str], str], refresh_s: float) -> None:
    """Show what `look` returns, anew after each `refresh_s`, until one of `QUIT_KEYS` or Ctrl-C. `clean` removes secrets."""
    from rich.live import Live

    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
        pressed_keys() as key,
    ):
        while True:
            live.update(top_screen(look(), console.width, console.height, clean), refresh=True)
            if key(refresh_s) in QUIT_KEYS:
                break


@contextlib.contextmanager
def pressed_keys() -> Iterator[Callable[[float], str]]:
    """Gives the block a function that waits some seconds for a key; it returns the key, or a space if none was pressed."""

    def sleep(wait_s: float) -> str:
        time.sleep(wait_s)
        return " "

    def key(wait_s: float) -> str:
        ready, _, _ = select.select([terminal], [], [], wait_s)
        return os.read(terminal, 64).decode(errors="replace")[:1] if ready else " "

    if not sys.stdin.isatty():
        yield sleep
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def top_screen(view: LiveView, width: int, height: int, clean: Callable[[str], str] = str) -> Group:
    """The whole screen: title, progress, loss and speed, workers, and the last events in the remaining lines.

    `clean` removes secrets from a text.
    """
    from rich.console import Group

    def show(value: str) -> str:
        return without_control_characters(clean(value))

    head = [title_line(view, width, show), progress_line(view, width), *fact_lines(view, width, show)]
    parts: list[Text | Table] = [*head]
    room = height - len(head)
    if view.workers and room >= 4:
        lines = min(len(view.workers) + 1, max(3, room - 2 - LEAST_STORY_LINES))
        parts += [blank_line(), workers_table(view, width, lines, show)]
        room -= 1 + lines
    if room >= 2:
        parts += [blank_line(), *story_lines(view, width, room - 1, show)]
    return Group(*parts)


def without_control_characters(text: str) -> str:
    """A text without characters that would move the cursor or change colours: names and messages are not trusted."""
    return "".join(c if c.isprintable() else " " for c in text)


def blank_line() -> Text:
    """An empty line."""
    from rich.text import Text

    return Text()


def title_line(view: LiveView, width: int, show: Show) -> Text:
    """The run's name, its phase, and the time."""
    from rich.text import Text

    status = view.status
    phase = f"{status.phase}: {status.end}" if status.end else status.phase
    colour = "red" if status.end == "failed" or status.silent_s is not None else TITLES.get(status.phase, "yellow")
    if status.silent_s is not None:
        phase = f"no news for {format_duration(status.silent_s)}"
    left = Text.assemble(
        (" raypar top ", "reverse bold"), " ", (show(status.run), "bold"), "  ", (show(phase), f"bold {colour}")
    )
    left.append(f"  generation {status.generation}" if status.generation is not None else "", "dim")
    return text_at_both_ends(left, Text(local_time(view.now), "dim"), width)


def text_at_both_ends(left: Text, right: Text, width: int) -> Text:
    """A line with one text at its left end and one at its right end."""
    left.truncate(max(1, width - right.cell_len - 1), overflow="ellipsis")
    left.append(" " * max(1, width - left.cell_len - right.cell_len))
    left.append_text(right)
    left.truncate(width)
    return left


def progress_line(view: LiveView, width: int) -> Text:
    """A bar of the steps done, and the predicted time to the end."""
    from rich.text import Text

    status = view.status
    text = f"step {status.step:,}" + (f" of {status.steps:,}" if status.steps is not None else "")
    if status.steps:
        text += f"  {100 * min(1.0, status.step / status.steps):.1f} %"
    if view.eta_s is not None:
        text += f"  {format_duration(view.eta_s)} to go"
    shown = Text(f" {text}")
    if status.steps:
        shown = Text.assemble(" ", progress_bar(status.step / status.steps, max(4, width - len(text) - 4), "cyan"), f"  {text}")
    shown.truncate(width, overflow="ellipsis")
    return shown


def progress_bar(share: float, cells: int, colour: str) -> Text:
    """A bar of so many cells, filled to `share`."""
    from rich.text import Text

    full = round(max(0.0, min(1.0, share)) * cells)
    return Text.assemble(("━" * full, colour), ("┄" * (cells - full), "bright_black"))


def fact_lines(view: LiveView, width: int, show: Show) -> list[Text]:
    """Loss with its curve, speed, plan; why the run waits or has ended."""
    from rich.text import Text

    status, lines = view.status, []
    if view.losses or status.non_finite_losses:
        text = Text.assemble(
            (" loss  ", "dim"), (format_loss(status.loss) if status.loss is not None else "not finite", "bold")
        )
        after = f"  validation {format_loss(status.validation_loss)}" if status.validation_loss is not None else ""
        cells = width - text.cell_len - len(after) - 3
        if cells >= 8:
            text.append("  ")
            text.append(sparkline(view.losses, min(cells, 100)), "magenta")
        text.append(after)
        lines.append(text)
    facts = []
    if status.samples_per_s is not None:
        time_of_step, median = format_step_times(status)
        facts += [("", f"{status.samples_per_s:,.0f} samples/s"), ("", time_of_step + (f" ({median})" if median else ""))]
    if view.bubble is not None:
        facts.append(("bubble ", f"{100 * view.bubble:.1f} %"))
    if status.data_wait is not None:
        facts.append(("samples ", f"{100 * status.data_wait:.0f} %"))
    if view.goodput is not None:
        facts.append(("goodput ", f"{100 * view.goodput:.1f} %"))
    if view.cost is not None:
        facts.append(("cost ", f"{view.cost:,.3g}"))
    if facts:
        text = Text(" speed ", "dim")
        for name, value in facts:
            text.append(name, "dim")
            text.append(f"{value}  ", "bold")
        lines.append(text)
    if status.plan:
        there = len(view.workers)
        workers = f"{there} of {status.wanted}" if status.wanted is not None and status.wanted != there else f"{there}"
        text = Text.assemble(
            (" plan  ", "dim"), show(status.plan) + (f", schedule {show(status.schedule)}" if status.schedule else "")
        )
        if status.phase != "ended":
            text.append("   workers ", "dim")
            text.append(workers + f" + {view.spares} in reserve" * bool(view.spares))
        lines.append(text)
    if status.why:
        lines.append(Text.assemble((" why   ", "dim"), (show(status.why), "yellow")))
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def sparkline(values: Sequence[float], cells: int) -> str:
    """The values as a sparkline of at most `cells` characters, each for the mean of consecutive values; `▇▅▃▂▁` falls.

    The scale is logarithmic if all means are positive and the largest is at least `LOG_FROM` times the least.
    """
    if not values or cells < 1:
        return ""
    count = min(cells, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if min(means) > 0 and max(means) / min(means) >= LOG_FROM:
        means = [math.log(value) for value in means]
    low, high = min(means), max(means)
    if not math.isfinite(high - low):
        return ""
    steps = len(BARS) - 2
    return "".join(BARS[1 + (round((value - low) / (high - low) * steps) if high > low else steps // 2)] for value in means)


def workers_table(view: LiveView, width: int, lines: int, show: Show) -> Table:
    """The table of workers in `lines` lines, head included: a row for each worker or, if they do not fit, each stage."""
    from rich.table import Table

    shards = any(one.shard for one in view.workers)
    table = Table(box=None, padding=(0, 1), header_style="dim", expand=False)
    by_stage = len(view.workers) + 1 > lines
    places = ("replica", *("shard",) * shards)
    hosts = ("worker", "node", "pid")[: 1 + (width >= NARROW) + (width >= NARROW + 8 + 8 * shards)]
    cells = 20 if width >= WIDE else 10
    heads = (
        ("stage", "workers", "computing", "", "least", "peak memory")
        if by_stage
        else ("stage", *places, *hosts, "computing", "", "peak memory")
    )
    for name in heads:
        right = name in ("", "least", "peak memory", "workers", "worker", "pid", "replica", "shard")
        table.add_column(name, no_wrap=True, justify="right" if right else "left")
    rows: list[list[str | Text]] = []
    for stage, of in groupby(sorted(view.workers, key=_by_stage), key=lambda one: one.stage):
        here = list(of)
        if by_stage:
            rows.append(stage_row(show(stage), here, cells))
            continue
        for one in here:
            place = [one.replica, *[one.shard] * shards]
            host = [one.worker, one.node, one.pid][: len(hosts)]
            rows.append([show(one.stage), *place, *map(show, host), *busy_cells(one.busy, cells), megabytes(one.peak_bytes)])
    hidden = len(rows) - (lines - 1)
    for row in rows[: lines - 1 - (hidden > 0)]:
        table.add_row(*row)
    if hidden > 0:
        table.add_row(f"+ {hidden + 1}", *[""] * (len(heads) - 1))
    return table


def _by_stage(one: LiveWorker) -> tuple[int, str]:
    """The sort key of a worker: its first stage as a number; rows of a stage keep their order."""
    first = re.match(r"\d+", one.stage)
    return (int(first[0]) if first else 1 << 31, one.stage)


def stage_row(stage: str, workers: Sequence[LiveWorker], cells: int) -> list[str | Text]:
    """The row of a whole stage: mean and least share of computing time, and the largest memory, of its workers."""
    busy = [one.busy for one in workers if one.busy is not None]
    peaks = [one.peak_bytes for one in workers if one.peak_bytes is not None]
    mean = sum(busy) / len(busy) if busy else None
    least = f"{100 * min(busy):.0f} %" if busy else ""
    return [stage, f"{len(workers)}", *busy_cells(mean, cells), least, megabytes(max(peaks, default=None))]


def busy_cells(share: float | None, cells: int) -> list[str | Text]:
    """A bar and a number for the share of time in which a worker computes."""
    if share is None:
        return ["", ""]
    colour = "green" if share >= 0.6 else "yellow" if share >= 0.3 else "red"
    return [progress_bar(share, cells, colour), f"{100 * share:.0f} %"]


def megabytes(size: int | None) -> str:
    """A size as text: `412 MiB`."""
    return "" if size is None else f"{size / 2**20:,.0f} MiB"


def story_lines(view: LiveView, width: int, lines: int, show: Show) -> list[Text]:
    """The last `lines` events, one line each, truncated to the width."""
    from rich.text import Text

    shown = []
    for at, line in view.status.story[-lines:]:
        text = Text.assemble((f" {local_time(at)}  ", "dim"), show(line))
        text.no_wrap = True
        text.truncate(width, overflow="ellipsis")
        shown.append(text)
    return shown
