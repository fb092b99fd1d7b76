"""Timelines and runs as Chrome trace events, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypar.draw.run_history_chart import RunHistory
from raypar.files.json_type import Json
from raypar.schedule.instructions import Role, drawing_style
from raypar.schedule.step_timeline import Timeline

_BESIDE: dict[Role, str] = {
    "communication": "gather of parameters",
    "reduction": "reduction",
    "compute": "reads of offloaded activations",
}
"""Role of what runs beside compute -> its name."""


def chrome_trace(
    timeline: Timeline, *, nodes: Sequence[str] = (), name: str = "raypar", swimlane: Mapping[str, Json] | None = None
) -> dict[str, Json]:
    """A timeline as a JSON object in the Trace Event Format: a process per node, a thread per worker, times in microseconds.

    `nodes[rank]` names the machine of each worker (default: all on one called `name`). A worker's gathers, its reductions and
    its reads of offloaded activations get threads of their own, because they overlap compute. The activations that a worker
    holds are a counter.
    `swimlane`: data of the same drawing (`swimlane_data`), which the object shall have too.
    """
    machines = list(nodes) or [name] * len(timeline.spans)
    pids = {machine: pid for pid, machine in enumerate(dict.fromkeys(machines))}
    events: list[dict[str, Json]] = [_metadata("process_name", pid, 0, name=machine) for machine, pid in pids.items()]
    for rank, row in enumerate(timeline.spans):
        pid, compute = pids[machines[rank]], 2 * rank
        beside: dict[Role, int] = {"reduction": compute + 1, "communication": 2 * len(timeline.spans) + rank}
        beside["compute"] = 3 * len(timeline.spans) + rank
        events.append(_metadata("thread_name", pid, compute, name=timeline.names[rank]))
        events.append(_metadata("thread_sort_index", pid, compute, sort_index=compute))
        for role in sorted({span.instruction.role for span in row if span.instruction.runs_beside}):
            events.append(_metadata("thread_name", pid, beside[role], name=f"{timeline.names[rank]}: {_BESIDE[role]}"))
            events.append(_metadata("thread_sort_index", pid, beside[role], sort_index=compute + 1))
        held = 0
        for instruction, start_ms, end_ms in row:
            places = {key: getattr(instruction, key) for key in ("stage", "microbatch") if hasattr(instruction, key)}
            events.append(
                {
                    "ph": "X",
                    "name": str(instruction),
                    "cat": drawing_style(type(instruction)).category,
                    "pid": pid,
                    "tid": beside[instruction.role] if instruction.runs_beside else compute,
                    "ts": start_ms * 1000,
                    "dur": (end_ms - start_ms) * 1000,
                    "args": {**places, "rank": rank},
                }
            )
            if instruction.held_change:
                held += instruction.held_change
                when = (start_ms if instruction.held_change > 0 else end_ms) * 1000
                counter = f"activations of {timeline.names[rank]}"
                events.append({"ph": "C", "name": counter, "pid": pid, "ts": when, "args": {"held": held}})
    other: dict[str, Json] = {"makespan_ms": timeline.makespan_ms} | ({} if swimlane is None else {"swimlane": swimlane})
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


def chrome_trace_of_run(history: RunHistory, *, first: int = 1, name: str = "raypar") -> dict[str, Json]:
    """A whole run as a JSON object in the Trace Event Format, in microseconds from the first step; `first`: that step's number.

    Steps and the pauses between them are slices, losses and joins of workers are instants, the number of workers is a counter.
    """
    events: list[dict[str, Json]] = [_metadata("process_name", 0, 0, name=name)]
    for thread, title in enumerate(("steps", "pauses")):
        events.append(_metadata("thread_name", 0, thread, name=title))
    slices = [(0, f"step {first + i}", start, end) for i, (start, end, _) in enumerate(history.steps)]
    slices += [(1, "nobody trains", start, end) for start, end in history.pauses]
    events += [
        {"ph": "X", "name": title, "pid": 0, "tid": thread, "ts": start * 1e6, "dur": (end - start) * 1e6}
        for thread, title, start, end in slices
    ]
    events += [
        {"ph": "i", "s": "p", "name": mark.label, "cat": mark.kind, "pid": 0, "tid": 1, "ts": mark.at_s * 1e6}
        for mark in history.marks
    ]
    events += [
        {"ph": "C", "name": "workers", "pid": 0, "ts": at_s * 1e6, "args": {"workers": count}}
        for at_s, count in history.workers
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _metadata(kind: str, pid: int, tid: int, **args: str | int) -> dict[str, Json]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
