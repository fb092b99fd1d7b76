"""Reports of the planner: why it chose a plan, and what becomes of the plan when workers are lost."""

from __future__ import annotations

from raypar.files.json_type import Json
from raypar.plan import ParallelPlan
from raypar.plan.parallel_plan import describe_mesh
from raypar.plan.stage_plan import shortest_span
from raypar.plan.wording import align_columns, count_noun
from raypar.planner.model_profile import ModelProfile
from raypar.planner.plan_search import EvaluatedCandidate, PlanChoice, format_mib
from raypar.planner.stage_balance import MIN_GAIN_MS, MIN_GAIN_SHARE, StageBalance
from raypar.schedule.step_timeline import Timeline

REPORT_COLUMNS = ("replicas x stages", "schedule", "workers", "step ms", "bubble", "memory", "verdict")

LEAST_GAIN = f"{100 * MIN_GAIN_SHARE:g} % and {MIN_GAIN_MS:g} ms"
"""The gain above which another cut than the even one is taken, in words."""


def plan_report(choice: PlanChoice, *, rows: int = 12) -> str:
    """A table of the chosen plan and the next best, at most `rows` of them, the plans of one worker and of two replicas, then
    how many more were considered."""
    shown = [v for number, v in enumerate(choice.verdicts) if number < rows or v.candidate.is_yardstick]
    lines = [REPORT_COLUMNS, *(_row(v, v.reason) for v in shown)]
    text = align_columns(lines)
    hidden = len(choice.verdicts) - len(shown)
    if hidden:
        text.append(f"and {hidden} more, none better")
    text += [line] if (line := memory_line(choice)) else []
    if len(choice.plan.stages) > 1:
        text.append(f"stages cut by measured times: plan.cuts={list(choice.plan.split_points)}")
    cut = choice.microbatches
    text.append(
        f"given by the job: {cut.count} microbatches in {cut.blocks} blocks; available: {count_noun(choice.workers, 'worker')}"
    )
    return "\n".join(text)


def short_plan_report(choice: PlanChoice) -> str:
    """The chosen plan's reason beside the best plan that differs from it in replicas or stages and that of one worker, in two
    lines; the table is for models whose steps take longer."""
    chosen = choice.best.candidate
    shown: list[str] = []
    for verdict in choice.verdicts[1:]:
        candidate = verdict.candidate
        of_candidate, of_chosen = ((one.replicas, one.stages, one.shards) for one in (candidate, chosen))
        differs = of_candidate != of_chosen
        if differs and verdict.predicted_ms is not None and (not shown or candidate.plan.world == 1):
            replicas, shards = ((count,) * candidate.stages for count in (candidate.replicas, candidate.shards))
            shown.append(f"{describe_mesh(replicas, shards)} {verdict.predicted_ms:.1f} ms")
    beside = f" (then {', '.join(shown[:2])})" if shown else ""
    cuts = f"; plan.cuts={list(choice.plan.split_points)}, by measured times" if len(choice.plan.stages) > 1 else ""
    more = f"{cuts}; {line}" if (line := memory_line(choice)) else cuts
    return (
        f"{choice.best.reason} of {len(choice.verdicts)} plans of up to {count_noun(choice.workers, 'worker')}{beside}{more}\n"
        "all of them: `raypar plan JOB --workers N`, or candidates in the run's plan.json"
    )


def zero_text(plan: ParallelPlan) -> str:
    """How the replicas of a plan divide state, as text to append to its schedule; empty where each has everything."""
    if not plan.most_zero:
        return ""
    gather = shortest_span(plan.gather_spans)
    return f", ZeRO {plan.most_zero}" + f" by {gather}" * (gather != "step")


def memory_line(choice: PlanChoice) -> str:
    """What the chosen plan does so that it fits into memory, and why; empty if it fits without."""
    best = choice.best
    if not best.changed_for_memory:
        return ""
    needed, has = format_mib(best.bytes_without or 0), format_mib(choice.worker_bytes or 0)
    return f"{best.changed_for_memory}, for memory: without, a worker would need {needed}, and it has {has}"


def stage_balance_text(balance: StageBalance) -> str:
    """A line that names the split points of a plan that gave none, and why they were chosen."""
    even, best = list(balance.even.split_points), list(balance.best.split_points)
    if balance.best_is_chosen:
        text = f"stages cut by measured times, plan.cuts={best}: "
        if balance.best_lacks_bytes < balance.even_lacks_bytes:
            lacks = format_mib(balance.even_lacks_bytes)
            return f"{text}by number of layers, {even}, a worker would need {lacks} more memory than there is"
        before, after = _busy_text(balance.even_step), _busy_text(balance.best_step)
        faster = f"{100 * balance.gain:.0f} % faster than by number of layers, {even}"
        return f"{text}predicted {faster}; with a processor each workers are busy {after} of the time instead of {before}"
    text = f"stages cut by number of layers, plan.cuts={even}: "
    if best == even:
        return f"{text}no cut that was compared is predicted to be faster by more than {LEAST_GAIN}"
    gain_ms = balance.even_step.makespan_ms - balance.best_step.makespan_ms
    gain = f"{gain_ms:.1f} ms ({100 * balance.gain:.1f} %)"
    return f"{text}by measured times, {best}, a step is predicted to be {gain} faster; only more than {LEAST_GAIN} moves a cut"


def processors_of_prediction(processors: int | None, workers: int, lengths: str = "") -> str:
    """What a predicted step counts on, in words: `a processor for each worker`, or fewer, on which workers take turns.

    `processors`: of a machine that all workers share (`ModelProfile.processors`); None: each has its own. `lengths`: see
    `ModelProfile.lengths`.
    """
    has_own = processors is None or processors >= workers
    text = "a processor for each worker" if has_own else f"{workers} workers on {count_noun(processors or 0, 'processor')}"
    return f"{text}, {lengths}" if lengths else text


def _busy_text(step: Timeline) -> str:
    """The smallest and the largest share of a step in which a worker is busy."""
    busy = [round(100 * (1 - bubble)) for bubble in step.bubbles]
    return f"{min(busy)} to {max(busy)} %"


def stage_balance_as_dict(balance: StageBalance) -> dict[str, Json]:
    """The balance as plain data. `busy`: by worker, as a share of the step. Times are for workers with a processor each.

    So they are shorter than the plan's own predicted step where workers share processors, and `predicted_for` says so.
    """

    def cut(plan: ParallelPlan, step: Timeline, lacks_bytes: int) -> dict[str, Json]:
        return {
            "cuts": list(plan.split_points),
            "predicted_ms": step.makespan_ms,
            "busy": [1 - bubble for bubble in step.bubbles],
            "lacks_bytes": lacks_bytes,
        }

    return {
        "predicted_for": processors_of_prediction(None, balance.even.world),
        "chosen": "measured times" if balance.best_is_chosen else "number of layers",
        "by_number_of_layers": cut(balance.even, balance.even_step, balance.even_lacks_bytes),
        "by_measured_times": cut(balance.best, balance.best_step, balance.best_lacks_bytes),
    }


def layers_as_dicts(profile: ModelProfile) -> list[dict[str, Json]]:
    """By layer, for plan.json: its name, the number of elements of its parameters and their bytes, whole.

    A tied parameter counts in each of its layers for the bytes, and in one of them for the elements.
    """
    outline = profile.state.outline if profile.state is not None else None
    found: list[dict[str, Json]] = []
    for index, layer in enumerate(profile.layers):
        facts: dict[str, Json] = {"name": layer.name, "parameter_bytes": layer.parameter_bytes}
        if outline is not None and len(outline.elements) == len(profile.layers):
            elements = outline.elements[index]
            facts["parameters"] = sum(size for name, size in elements.items() if name not in outline.buffers)
        found.append(facts)
    return found


def fewer_shards_warnings(plan: ParallelPlan, min_workers: int) -> list[str]:
    """Sentences for the start of an elastic run that may come to have fewer shards, on which the bits depend."""
    counts = {stage.shards for stage in plan.stages}
    most = max(counts)
    if most == 1:
        return []
    if len(counts) > 1:
        return [f"with fewer workers all its layers are cut over {most} shards or fewer, which changes the bits from there on"]
    if min_workers >= most:
        return []
    waits = f"elastic.min_workers={most} waits for others instead"
    return [f"with fewer than {most} workers it goes on with fewer shards, which changes the bits from there on; {waits}"]


def _row(verdict: EvaluatedCandidate, why: str) -> tuple[str, ...]:
    candidate = verdict.candidate
    chunks = f", {candidate.chunks} chunks" if candidate.chunks > 1 else ""
    return (
        f"{candidate.replicas} x {candidate.stages}" + f" x {candidate.shards} shards" * (candidate.shards > 1),
        f"{candidate.schedule}{chunks}{', recomputing' if candidate.plan.recompute else ''}" + zero_text(candidate.plan),
        str(candidate.plan.world),
        "" if verdict.predicted_ms is None else f"{verdict.predicted_ms:.1f}",
        "" if verdict.bubble is None else f"{100 * verdict.bubble:.1f} %",
        "" if verdict.memory_bytes is None else format_mib(verdict.memory_bytes),
        why,
    )


def plan_report_as_dict(choice: PlanChoice) -> dict[str, Json]:
    """The report as plain data, for `--json`."""
    return {
        "workers": choice.workers,
        "microbatches": choice.microbatches.count,
        "virtual_replicas": choice.microbatches.blocks,
        "candidates": [
            {
                "replicas": v.candidate.replicas,
                "stages": v.candidate.stages,
                "shards": v.candidate.shards,
                "schedule": v.candidate.schedule,
                "chunks": v.candidate.chunks,
                "recompute": list(v.candidate.plan.recompute),
                "offload": list(v.candidate.plan.offload),
                "zero": v.candidate.plan.most_zero,
                "gather": shortest_span(v.candidate.plan.gather_spans),
                "layers": [[s.first, s.last] for s in v.candidate.plan.stages],
                "predicted_ms": v.predicted_ms,
                "bubble_of_total": v.bubble,
                "memory_bytes": v.memory_bytes,
                "verdict": "chosen" if v is choice.best else v.reason,
            }
            for v in choice.verdicts
        ],
    }
