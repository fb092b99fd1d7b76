"""Schedules as CSV text, so that users can bring their own: one row per worker, one cell per instruction (`1F0`).

`#` starts a comment; blank lines and empty cells (idle time) are skipped; a worker without any instruction has the row `-`.
The action lists of torch.distributed.pipelining are read, too. Their sends, receives and reductions are skipped, because
lowering adds its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from raypar.errors import ScheduleError
from raypar.schedule.instructions import Compute, Order, Schedule, compute_classes

_CELL = re.compile(r"([0-9]{1,9})([A-Z])([0-9]{1,9})")
_SKIPPED = re.compile(r"|-|None|\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F\d+|RECV_F\d+|SEND_B\d+|RECV_B\d+)")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def format_schedule_csv(schedule: Schedule) -> str:
    """The schedule as text, one line per worker; `parse_schedule_csv` gives the same schedule back."""
    return "".join((",".join(map(str, order)) or "-") + "\n" for order in schedule)


def parse_schedule_csv(text: str) -> Schedule:
    """The schedule in a CSV text, one order per row. Raises `ScheduleError` with row, column and text of a bad cell."""
    lines = [(number, line.split("#", 1)[0]) for number, line in enumerate(text.splitlines(), start=1)]
    return _read((number, line.split(",")) for number, line in lines if line.strip())


def schedule_from_torch_actions(rows: str | Iterable[str | Sequence[object]]) -> Schedule:
    """A schedule from torch's lists: CSV text, or one row per rank, each CSV text or a list of actions (None is idle time).

    Two actions that torch runs as one (`(0F1;0B0)OVERLAP_F_B`) come one after the other. The result may break rules;
    `validate_schedule` finds that. Raises `ScheduleError` for a text that is no action.
    """
    if isinstance(rows, str):
        return parse_schedule_csv(rows)
    cells = [row.split(",") if isinstance(row, str) else list(map(str, row)) for row in rows]
    return _read(enumerate(cells, start=1))


def _read(rows: Iterable[tuple[int, Sequence[str]]]) -> Schedule:
    orders: list[Order] = []
    kinds = {kind.letter: kind for kind in compute_classes()}
    for number, cells in rows:
        order: list[Compute] = []
        for column, cell in enumerate(cells, start=1):
            order += _instructions(cell.strip(), number, column, kinds)
        orders.append(tuple(order))
    if not any(orders):
        raise ScheduleError("the schedule file has no instruction", cure="write one row per worker with cells such as 0F0,0B0")
    # All stages run all microbatches: a number that is not below this would only make long lists before it is found wrong.
    total = sum(map(len, orders))
    for row in orders:
        for instruction in row:
            if max(instruction.stage, instruction.microbatch) >= total:
                raise ScheduleError(
                    f"{instruction} is the instruction of a stage or microbatch that cannot be: there are {total:,} in all",
                    cure="number stages and microbatches from 0, and write every stage's instructions for all microbatches",
                )
    return tuple(orders)


def _instructions(
    cell: str, row: int, column: int, kinds: Mapping[str, type[Compute]], *, inside: bool = False
) -> Iterator[Compute]:
    found = _CELL.fullmatch(cell)
    kind = kinds.get(found[2]) if found is not None else None
    if found is not None and kind is not None:
        yield kind(int(found[1]), int(found[3]))
        return
    if _SKIPPED.fullmatch(cell):
        return
    overlapped = None if inside else _OVERLAPPED.fullmatch(cell)
    if overlapped is None:
        raise ScheduleError(
            f"row {row}, column {column}: {cell[:40]!r} is not an instruction",
            cure="write stage, kind (F, B, I or W) and microbatch, for example 1F0",
        )
    for part in overlapped[1].split(";"):
        yield from _instructions(part.strip(), row, column, kinds, inside=True)
