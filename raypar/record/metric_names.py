"""The names of what validations measure: `validation_NAME`, and of several data sets `validation/SET/NAME`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from raypar.errors import UserCodeError

VALIDATION = "validation_"
"""What the names of values of a validation begin with, as in `validation_loss`."""
OF_SETS = "validation/"
"""What the names of values of one of several sets begin with, as in `validation/short/loss`."""


def name_in_validation(name: str, of_set: str = "") -> str:
    """The name of what a validation measures as `name`, of one of several sets if it is named."""
    return f"{OF_SETS}{of_set}/{name}" if of_set else f"{VALIDATION}{name}"


def series_of_validation(loss: float, losses_of_sets: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Name -> value of all that a validation measures. `losses_of_sets`: of several sets; `metrics`: as workers name them,
    `NAME`, of several sets `SET/NAME`."""
    series = {name_in_validation("loss"): loss}
    series |= {name_in_validation("loss", of_set): value for of_set, value in losses_of_sets.items()}
    return series | {f"{OF_SETS if losses_of_sets else VALIDATION}{name}": value for name, value in metrics.items()}


def is_of_validation(name: str) -> bool:
    """Whether a number with this name belongs to a validation, not to a step."""
    return name.startswith((VALIDATION, OF_SETS))


def split_name(name: str) -> tuple[str | None, str]:
    """(the set, the name without it) of what a validation measures; the set is empty where there is one, None in training."""
    if name.startswith(OF_SETS):
        of_set, _, short = name.removeprefix(OF_SETS).partition("/")
        return of_set, short
    short = name.removeprefix(VALIDATION)
    return ("", short) if short != name else (None, name)


def short_name(name: str) -> str:
    """The name as lines of a validation have it: `accuracy`, `short/accuracy`."""
    return name.removeprefix(OF_SETS).removeprefix(VALIDATION)


def metric_of(name: str) -> tuple[str | None, str]:
    """(the set, the metric) to which a number belongs: `validation/short/f1/macro` is of the metric `f1` of the set `short`."""
    of_set, short = split_name(name)
    return of_set, short.partition("/")[0]


LOST_NAME_CURE = "let the metric's compute return the same names each time, NaN for one that has no value"
"""What helps where a metric has given a name before and does not now."""


@dataclass
class MeasuredNames:
    """The names under which metrics have given values so far in a run, to see when one of them has none any more."""

    of_validation: bool
    """Whether they belong to validations, not to steps."""
    known: dict[str, str] = field(default_factory=dict)
    """Name -> where it had its last value, such as `the validation after 4 steps`."""
    told: set[str] = field(default_factory=set)
    """Names that were found to have vanished."""

    def note(self, where: str, names: Collection[str], watched: Iterable[tuple[str, str]]) -> str | None:
        """A line about names that had a value before and have none now, each once; None if there are none.

        Raises `UserCodeError` if something depends on one of them. `where`: what has measured `names`; `watched`: (name of a
        number, the key of the job that depends on it).
        """
        needed = {name: key for name, key in watched if is_of_validation(name) == self.of_validation}
        found = f"it has {', '.join(sorted(names)) or 'none'}"
        for name in self._without_value(needed, names):
            ago = f", which {self.known[name]} had" if name in self.known else ""
            what = f"{needed[name]} depends on {name}{ago}, and {where} has no value of it: {found}"
            raise UserCodeError(what, cure=LOST_NAME_CURE)
        vanished = sorted(self.known.keys() - set(names) - self.told)
        self.told |= set(vanished)
        line = (
            f"{where} has no value of {', '.join(vanished)}, which {self.known[vanished[0]]} had: {found}" if vanished else None
        )
        self.known |= dict.fromkeys(names, where)
        return line

    def _without_value(self, needed: Iterable[str], names: Collection[str]) -> list[str]:
        """Of the names that something depends on those that have no value now: they had one before, or their metric gave
        others, or none of its names. Numbers of others, such as callbacks, are left out."""
        measured = {metric_of(name) for name in (*self.known, *names)}
        return sorted({name for name in needed if name not in names and metric_of(name) in measured})
