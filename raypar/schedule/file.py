"""Schedules as text: one row per worker, one cell per instruction (`1F0`), so that a user can bring one of their own.

Rows are CSV; `#` starts a comment, empty cells are idle time and are skipped. The compute-only text of
torch.distributed.pipelining's action lists is the same language; its `0REDUCE_GRAD` is skipped, as lowering adds reductions.
"""

from __future__ import annotations

import re

from raypar.errors import ScheduleError
from raypar.schedule.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward, Order, Schedule

_KINDS: dict[str, type[Forward] | type[Backward] | type[BackwardInput] | type[BackwardWeight]] = {
    "F": Forward,
    "B": Backward,
    "I": BackwardInput,
    "W": BackwardWeight,
}
_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_SKIPPED = re.compile(r"|None|\d+REDUCE_GRAD")


def write_csv(schedule: Schedule) -> str:
    """One line per worker; `read_csv` gives the same schedule back."""
    return "".join(",".join(str(i) for i in order) + "\n" for order in schedule)


def read_csv(text: str) -> Schedule:
    """Compute-only orders, one per non-comment line. Raises `ScheduleError` naming row, column and text of a bad cell."""
    orders: list[Order] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0]
        if "#" in line and not content.strip():
            continue
        cells = [(column, cell.strip()) for column, cell in enumerate(content.split(","), start=1)]
        orders.append(tuple(_instruction(cell, number, column) for column, cell in cells if not _SKIPPED.fullmatch(cell)))
    while orders and not orders[-1]:
        orders.pop()
    if not orders:
        raise ScheduleError("the schedule file has no instruction", cure="write one row per worker with cells such as 0F0,0B0")
    return tuple(orders)


def _instruction(cell: str, row: int, column: int) -> Compute:
    found = _CELL.fullmatch(cell)
    if found is None:
        raise ScheduleError(
            f"row {row}, column {column}: {cell!r} is not an instruction",
            cure="write stage, kind (F, B, I or W) and microbatch, for example 1F0",
        )
    return _KINDS[found[2]](int(found[1]), int(found[3]))
