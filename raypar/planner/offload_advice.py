"""Lines for plans whose offloading of activations offloads nothing, or saves a worker no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raypar.plan import Microbatches, ParallelPlan, offloading
from raypar.plan.wording import count_noun
from raypar.planner.memory_sheet import MemorySheet, memory_sheets
from raypar.planner.model_profile import ModelProfile
from raypar.planner.offloaded_activations import offloaded_keys
from raypar.planner.plan_search import format_mib
from raypar.schedule.instructions import Schedule
from raypar.schedule.offloading import (
    describe_stages_not_worth_offloading,
    stages_not_worth_offloading,
    without_offloading,
)


def lines_about_activations(
    profile: ModelProfile, plan: ParallelPlan, orders: Schedule, microbatches: Microbatches, sheets: Sequence[MemorySheet]
) -> tuple[str, ...]:
    """A line for a plan whose offloading is in vain; none otherwise. `orders`: of its workers; `sheets`: theirs, by rank."""
    if not plan.offload or not sheets:
        return ()
    if not any(sheet.activation_files or sheet.activation_host for sheet in sheets):
        return (f"plan.activations_in offloads nothing: {_why_nothing(plan, orders)}\n  cure: leave plan.activations_in out",)
    kept = memory_sheets(profile, replace(plan, offload=()), without_offloading(orders), microbatches)
    in_vain = [
        rank
        for rank, (sheet, without) in enumerate(zip(sheets, kept, strict=True))
        if (sheet.activation_files or sheet.activation_host) and sheet.total >= without.total
    ]
    if not in_vain:
        return ()
    rank = max(in_vain, key=lambda each: sheets[each].total - kept[each].total)
    others = f", nor {count_noun(len(in_vain) - 1, 'other worker')}" if len(in_vain) > 1 else ""
    return (
        f"plan.activations_in does not save {plan.coordinate(rank)}{others} any memory: predicted to hold "
        f"{format_mib(sheets[rank].total)} with it, of which {format_mib(sheets[rank].unwritten)} on the way out, and "
        f"{format_mib(kept[rank].total)} without\n  cure: leave plan.activations_in out, or name in plan.offload layers of "
        "other stages only",
    )


def _why_nothing(plan: ParallelPlan, orders: Schedule) -> str:
    """Why a plan under a schedule offloads nothing, by stage."""
    asked = sorted({stage for stage, _ in offloaded_keys(orders)})
    least = f"{offloading.SMALLEST_OFFLOADED_BYTES >> 10} KiB"
    reasons = []
    if asked:
        of = f"stage{'s' if len(asked) > 1 else ''} {', '.join(map(str, asked))}"
        reasons.append(
            f"no offloaded layer of {of} keeps {least} or more of a microbatch in one piece that no other layer keeps"
        )
    reasons.append(describe_stages_not_worth_offloading(stages_not_worth_offloading(orders, plan)))
    return "; ".join(filter(None, reasons))
