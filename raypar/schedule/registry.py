"""The built-in schedules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raypar.errors import ScheduleError
from raypar.plan import MicrobatchRouting, ParallelPlan, StageConnections
from raypar.plan.parallel_plan import Placement
from raypar.schedule.gpipe import gpipe
from raypar.schedule.instructions import Schedule
from raypar.schedule.interleaved import interleaved_1f1b
from raypar.schedule.list_scheduling import list_schedule
from raypar.schedule.naive import naive_schedule
from raypar.schedule.offloading import insert_offloading
from raypar.schedule.one_f_one_b import one_f_one_b
from raypar.schedule.recomputation import insert_recomputation
from raypar.schedule.zero_bubble import zb_h1, zb_v


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """A schedule: its builder, and the plans and options that it takes."""

    build: Callable[..., Schedule]
    """Builds the orders from a routing and the numbers of warmup forwards; from `connections`, too, if it takes them."""
    placement: Placement = "loop"
    """The placement of stages on positions that it needs."""
    chunks: int = 1
    """Stages per worker by default."""
    fixed: bool = True
    """Whether it takes no other number of stages per worker."""
    takes_warmup: bool = False
    """Whether the numbers of forwards before the first backward can be set."""
    takes_any_plan: bool = False
    """Whether stages may lie on any grids of workers, and a worker stand in several."""
    takes_connections: bool = False
    """Whether its orders depend on the connections between stages."""


_ENTRIES: dict[str, ScheduleEntry] = {
    "naive": ScheduleEntry(naive_schedule, fixed=False, takes_any_plan=True),
    "gpipe": ScheduleEntry(gpipe, fixed=False, takes_any_plan=True),
    "1f1b": ScheduleEntry(one_f_one_b, takes_warmup=True),
    "interleaved": ScheduleEntry(interleaved_1f1b, chunks=2, fixed=False, takes_warmup=True),
    "zb-h1": ScheduleEntry(zb_h1, takes_warmup=True),
    "zb-v": ScheduleEntry(zb_v, placement="v", chunks=2, takes_warmup=True),
    "list": ScheduleEntry(list_schedule, fixed=False, takes_any_plan=True, takes_connections=True),
}
ALIASES = {"afab": "gpipe"}
NAMES = tuple(_ENTRIES)


def find_schedule(name: str) -> ScheduleEntry:
    """The registry's entry for a name or alias. Raises `ScheduleError` with similar names if there is none."""
    found = _ENTRIES.get(ALIASES.get(name, name))
    if found is None:
        near = difflib.get_close_matches(name.lower(), NAMES, n=2, cutoff=0.4)
        raise ScheduleError(
            f"unknown schedule {name!r}", cure=f"did you mean {' or '.join(near)}? " * bool(near) + f"one of {', '.join(NAMES)}"
        )
    return found


def placement_of_schedule(name: str) -> Placement:
    """The placement of stages that the schedule needs."""
    return find_schedule(name).placement


def resolve_chunks_per_worker(name: str, chunks: int | None = None) -> int:
    """Stages per worker: `chunks` if the schedule takes that number, or its default if `chunks` is None.

    Raises `ScheduleError` for a number that the schedule does not take.
    """
    known = find_schedule(name)
    if chunks is None:
        return known.chunks
    if chunks < 1 or (known.fixed and chunks != known.chunks):
        raise ScheduleError(
            f"schedule {name} has {known.chunks} stage(s) per worker, not {chunks}",
            cure=f"leave chunks out, or use interleaved for {chunks} chunks",
        )
    return chunks


def schedule_fits_plan(name: str, plan: ParallelPlan) -> bool:
    """Whether the schedule can run the plan; False for a name that is not registered (that of a schedule file)."""
    if ALIASES.get(name, name) not in _ENTRIES:
        return False
    known = find_schedule(name)
    if known.takes_any_plan:
        return True
    return (not known.fixed or len(plan.stages) == len(plan.grids) * known.chunks) and plan.lies_in(known.placement)


def build_schedule(
    name: str,
    routing: MicrobatchRouting,
    *,
    warmup: Sequence[int] | None = None,
    connections: StageConnections | None = None,
) -> Schedule:
    """The orders of compute instructions, by rank of the routing's plan, with the plan's recomputation and offloading.

    `connections`: those between the plan's stages, for schedules that follow them; None: they are a chain.
    Raises `ScheduleError` if the plan does not fit.
    """
    known = find_schedule(name)
    plan = routing.plan
    check_plan_fits(name, plan)
    if warmup is not None and not known.takes_warmup:
        takers = " or ".join(n for n, e in _ENTRIES.items() if e.takes_warmup)
        raise ScheduleError(f"schedule {name} has no warmup to set", cure=f"leave warmup out, or use {takers}")
    more = {"connections": connections} if known.takes_connections else {}
    return insert_offloading(insert_recomputation(known.build(routing, warmup, **more), plan), plan)


def _any_plan() -> str:
    return ", ".join(name for name, entry in _ENTRIES.items() if entry.takes_any_plan)


def check_plan_fits(name: str, plan: ParallelPlan) -> None:
    """Raise `ScheduleError` for a plan that the schedule cannot run."""
    known = find_schedule(name)
    if known.takes_any_plan:
        return
    if not plan.one_role_each:
        raise ScheduleError(
            f"schedule {name} is for plans in which each worker has one role, and some workers of this one compute layers of "
            "several grids (plan.placements)",
            cure=f"set plan.schedule to one that takes any plan: {_any_plan()}",
        )
    if known.fixed and len(plan.stages) != len(plan.grids) * known.chunks:
        raise ScheduleError(
            f"schedule {name} needs {known.chunks} stage(s) per worker; the plan has {len(plan.stages)} on {len(plan.grids)}",
            cure=f"set plan.schedule to one that takes any plan: {_any_plan()}; of a plan made by hand: give it "
            f"{known.chunks} stage(s) per worker",
        )
    if not plan.lies_in(known.placement):
        raise ScheduleError(
            f"schedule {name} wants its stages on positions in {known.placement!r} order; the plan has them on "
            f"{list(plan.grid_of_stage)}",
            cure=f"build the plan with placement={known.placement!r} (registry.placement_of_schedule)",
        )
