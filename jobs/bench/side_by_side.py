"""What benches of contenders that train in turn have in common: arguments, the turns, times and ratios as text, the page."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Contender, alternate, page, spread

Infos = dict[str, list[dict[str, Any]]]
"""Contender -> what each of its workers says of itself at the end."""


def bench_parser(doc: str | None, *, rounds: int, steps: int, of_each: str = "of each contender") -> argparse.ArgumentParser:
    """A parser of --json, --page, --rounds and --steps, with these defaults. `doc`: the bench's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps, help=f"steps {of_each} in a round")
    return parser


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def train_in_turn(contenders: Iterable[Contender], given: argparse.Namespace) -> tuple[dict[str, list[float]], Infos]:
    """(seconds a step by contender, one number a round; what they say of themselves). Starts all, and ends them."""
    started: list[Contender] = []
    try:
        for contender in contenders:
            started.append(contender)
            contender.start()
        seconds = alternate(started, rounds=given.rounds, steps=given.steps, say=say)
        return seconds, {contender.name: contender.info() for contender in started}
    finally:
        for contender in started:
            contender.stop()


def last_losses(infos: Infos) -> dict[str, float]:
    """Contender -> its last loss; a worker without the last layer knows none."""
    return {name: next(info["loss"] for info in of if info["loss"] is not None) for name, of in infos.items()}


def turns_text(given: argparse.Namespace, of_each: str = "of each") -> str:
    """How contenders were timed, and how their ratios are taken."""
    return (
        f"{given.rounds} rounds of {given.steps} steps {of_each} in turn, in an order that is reversed every other round. "
        "Ratios are taken inside a round; intervals are a bootstrap's of their median."
    )


def ms_cells(seconds: Sequence[float], digits: int = 1) -> list[str]:
    """Cells of a table: the median in milliseconds, and the quartiles."""
    low, high = spread(seconds)
    return [f"{1e3 * statistics.median(seconds):.{digits}f}", f"{1e3 * low:.{digits}f} to {1e3 * high:.{digits}f}"]


def interval_text(ratio: Mapping[str, float]) -> str:
    """The interval of a ratio, and of how many pairs it is. `ratio`: a `Ratio` as a dict."""
    return f"95 % interval {ratio['lower']:.3f} to {ratio['upper']:.3f}, {ratio['pairs']} pairs"


def verdict(holds: bool) -> str:
    """Of a limit."""
    return "holds" if holds else "DOES NOT HOLD"


def losses_text(*, equal: bool) -> str:
    """Of losses that should be equal."""
    return f"Losses {'are equal to the last bit' if equal else 'DIFFER'}."


def command_line() -> str:
    """The command that runs this bench, for its page."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--json"]
    return " ".join(["python", f"jobs/bench/{Path(sys.argv[0]).name}", *arguments])


def print_and_write(given: argparse.Namespace, title: str, text: str, found: Mapping[str, Any]) -> None:
    """Print the text, or with --json what was found, and write the page if one is asked for."""
    print(json.dumps(found) if given.json else text)
    if given.page:
        given.page.write_text(page(title, command_line(), text))
