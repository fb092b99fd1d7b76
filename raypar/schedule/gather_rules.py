"""The rule `gathered`: parameters that come and go are there when they are needed, and owners serve all that readers ask for.

`gathering.py` puts it into programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from raypar.schedule.gathering import gathers_in_pass, readers, requests, stages_gathered
from raypar.schedule.instructions import Compute, Gather, Instruction, Release, ServeParameters
from raypar.schedule.program_rules import RuleCheckInput, ScheduleProblem


def check_gathers(case: RuleCheckInput) -> list[ScheduleProblem]:
    """Rule `gathered`: what computes with the parameters of a stage that are gathered by microbatch stands between their gather
    and their release, all that is gathered is released, and each owner serves each reader as often as that asks, from the
    beginning of the pass on."""
    plan = case.routing.plan
    found = [problem for rank in range(len(case.lists)) for problem in _check_worker(case, rank)]
    if found or not gathers_in_pass(plan):
        return found
    asked = requests([tuple(order) for order in case.lists], plan)
    for rank, order in enumerate(case.lists):
        served = Counter[tuple[int, int]]()
        for i in order:
            if type(i) is ServeParameters:
                served[i.stage, i.reader] += i.count
        due = Counter(
            {(s, reader): asked.get((s, reader), 0) for s in plan.stages_of(rank) for reader in readers(plan, s, rank)}
        )
        for stage, reader in sorted({*served, *due}):
            if served[stage, reader] != due[stage, reader]:
                text = f"serves worker {reader} parameters of stage {stage} {served[stage, reader]} times, asked for"
                found.append(ScheduleProblem("gathered", rank, f"{text} {due[stage, reader]} times"))
    return found


def _check_worker(case: RuleCheckInput, rank: int) -> list[ScheduleProblem]:
    """The problems of one worker's gathers and releases, and of where it begins to serve."""
    by_microbatch = stages_gathered(case.routing.plan, rank, "microbatch")
    found = [ScheduleProblem("gathered", rank, text) for text in _gather_texts(case.lists[rank], by_microbatch)]
    computed = False
    for i in case.lists[rank]:
        computed = computed or isinstance(i, Compute)
        if type(i) is ServeParameters and computed:
            found.append(ScheduleProblem("gathered", rank, f"{i} stands behind a computation, for which readers would wait"))
    return found


def _gather_texts(order: Sequence[Instruction], by_microbatch: frozenset[int]) -> list[str]:
    there: set[int] = set()
    found: list[str] = []
    for i in order:
        if isinstance(i, Compute):
            if i.needs_weights and i.stage in by_microbatch - there:
                found.append(f"{i} computes with parameters of stage {i.stage} that are not gathered for it")
        elif type(i) is Gather:
            if i.stage not in by_microbatch:
                found.append(f"{i} gathers parameters of stage {i.stage}, which do not come and go by microbatch")
            elif i.stage in there:
                found.append(f"{i} gathers parameters that are there")
            there.add(i.stage)
        elif type(i) is Release:
            if i.stage not in there:
                found.append(f"{i} releases parameters that are not there")
            there.discard(i.stage)
    return found + [f"the parameters of stage {stage} are not released" for stage in sorted(there)]
