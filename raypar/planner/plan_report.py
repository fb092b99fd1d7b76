"""Reports of the planner: why it chose a plan, and what becomes of the plan when workers are lost."""

from __future__ import annotations

from raypar.plan import ParallelPlan
from raypar.planner.plan_search import EvaluatedCandidate, PlanChoice, format_mib

REPORT_COLUMNS = ("replicas x stages", "schedule", "workers", "step ms", "bubble", "memory", "verdict")


def plan_report(choice: PlanChoice, *, rows: int = 12) -> str:
    """A table of the chosen plan and the next best, at most `rows` of them, then how many more were considered."""
    shown = choice.verdicts[:rows]
    lines = [REPORT_COLUMNS, *(_row(v, "chosen: the fastest" if v is choice.best else v.reason) for v in shown)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(REPORT_COLUMNS))]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    hidden = len(choice.verdicts) - len(shown)
    if hidden:
        text.append(f"and {hidden} more, none better")
    cut = choice.microbatches
    text.append(f"given by the job: {cut.count} microbatches in {cut.blocks} blocks; available: {choice.workers} workers")
    return "\n".join(text)


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
        f"{candidate.replicas} x {candidate.stages}",
        f"{candidate.schedule}{chunks}",
        str(candidate.plan.world),
        "" if verdict.predicted_ms is None else f"{verdict.predicted_ms:.1f}",
        "" if verdict.bubble is None else f"{100 * verdict.bubble:.1f} %",
        "" if verdict.memory_bytes is None else format_mib(verdict.memory_bytes),
        why,
    )


def plan_report_as_dict(choice: PlanChoice) -> dict[str, object]:
    """The report as plain data, for `--json`."""
    return {
        "workers": choice.workers,
        "microbatches": choice.microbatches.count,
        "virtual_replicas": choice.microbatches.blocks,
        "candidates": [
            {
                "replicas": v.candidate.replicas,
                "stages": v.candidate.stages,
                "schedule": v.candidate.schedule,
                "chunks": v.candidate.chunks,
                "layers": [[s.first, s.last] for s in v.candidate.plan.stages],
                "predicted_ms": v.predicted_ms,
                "bubble_of_total": v.bubble,
                "memory_bytes": v.memory_bytes,
                "verdict": "chosen" if v is choice.best else v.reason,
            }
            for v in choice.verdicts
        ],
    }
