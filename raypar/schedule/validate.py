"""The check whether a schedule or its programs would run; problems name the rule, the worker and the instruction."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.errors import ScheduleError
from raypar.plan import MicrobatchRouting, StageConnections
from raypar.schedule.data_flow import DataFlow
from raypar.schedule.instructions import Program, Schedule
from raypar.schedule.program_rules import (
    RuleCheckInput,
    ScheduleProblem,
    check_activation_frees,
    check_activation_limit,
    check_computed_once,
    check_gradient_order,
    check_needs_come_first,
    check_sends_match_receives,
    check_shards_have_same_order,
    check_step_end,
)
from raypar.schedule.validate import Communicators, check_deadlock

__all__ = ["ScheduleProblem", "find_schedule_problems", "validate_schedule"]

Lists = Schedule | tuple[Program, ...]

_CURES = {
    "complete": "every (stage, microbatch) needs F once and B once (or I and W once each), on the worker it is routed to",
    "causal": "put F before B or I, I before W, a receive before its use and a send after what it sends",
    "canonical": "order the weight gradients of a stage by microbatch inside each block; the bits depend on it",
    "together": "give all shards of a replica of a stage one order: they compute every instruction together",
    "paired": "every send needs one receive of the same bundle at its peer, in the same order on both ends",
    "freed": "free the activations of each microbatch once, after its B or W",
    "ended": "a program ends with the reductions of its stages, tied parameters, buffers, the vote and the optimizer step",
    "deadlock-free": "change the order so that no workers wait for each other in a circle",
    "within memory": "start fewer forwards before the first backward (a smaller warmup), or allow more activations",
}


def validate_schedule(
    lists: Lists,
    routing: MicrobatchRouting,
    crossing: StageConnections,
    *,
    memory: Sequence[float] | None = None,
    communicators: Communicators = "pair",
    training: bool = True,
) -> None:
    """Raise `ScheduleError` if there are problems, with the first one in its text. Arguments as of `find_schedule_problems`."""
    found = find_schedule_problems(lists, routing, crossing, memory=memory, communicators=communicators, training=training)
    if found:
        first = found[0]
        where = f"{routing.plan.coordinate(first.rank)}: " if first.rank < routing.plan.world else ""
        more = f" (and {len(found) - 1} more problems)" if len(found) > 1 else ""
        raise ScheduleError(f"{first.rule}: {where}{first.text}{more}", cure=_CURES[first.rule])


def find_schedule_problems(
    lists: Lists,
    routing: MicrobatchRouting,
    crossing: StageConnections,
    *,
    memory: Sequence[float] | None = None,
    communicators: Communicators = "pair",
    training: bool = True,
) -> list[ScheduleProblem]:
    """The problems of orders or of lowered programs. A rule that presupposes another is checked only if the other holds.

    `memory`: most live activations per rank, in microbatches through all of a worker's chunks. `communicators`:
    the communicators through whose in-order queues messages go. `training=False`: the lists are those of a validation pass
    (`lower_validation_pass`).
    """
    world = routing.plan.world
    if len(lists) != world:
        return [ScheduleProblem("complete", min(len(lists), world), f"{len(lists)} lists for a plan of {world} workers")]
    lowered = not training or any(i.role != "compute" for order in lists for i in order)
    case = RuleCheckInput(lists, routing, crossing, DataFlow(crossing, len(routing.plan.stages)), lowered, training)
    found = check_computed_once(case)
    if found:
        return found
    found = check_needs_come_first(case) + check_gradient_order(case) + check_shards_have_same_order(case)
    if lowered:
        found += check_sends_match_receives(case) + check_activation_frees(case) + check_step_end(case)
    if not found:
        found += check_deadlock(case, communicators)
    if memory is not None:
        found += check_activation_limit(case, memory)
    return found
