"""What `raypar simulate` says of a step: data, text, and the files that it writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from raypar.draw.chrome_trace import chrome_trace
from raypar.draw.swimlane_svg import swimlane_svg
from raypar.draw.text_grid import format_activation_count, format_milliseconds, timeline_text_for_width
from raypar.files.atomic_write import write_text_atomically
from raypar.files.json_type import Json
from raypar.plan import MicrobatchRouting
from raypar.schedule.data_flow import MessageRoute
from raypar.schedule.instructions import Schedule
from raypar.schedule.schedule_csv import format_schedule_csv
from raypar.schedule.simulate import Timeline


def write_simulation(
    files: Mapping[str, Path], schedule: Schedule, timeline: Timeline, title: str, routes: Sequence[MessageRoute]
) -> None:
    """Write the files that are named, each under its kind: csv, svg, trace. Raises `ConfigError` for an unwritable one."""
    texts = {
        "csv": lambda: format_schedule_csv(schedule),
        "svg": lambda: swimlane_svg(timeline, title=title, routes=routes),
        "trace": lambda: json.dumps(chrome_trace(timeline)),
    }
    for kind, path in files.items():
        write_text_atomically(path, texts[kind]())


def simulation_facts(name: str, routing: MicrobatchRouting, timeline: Timeline) -> dict[str, Json]:
    """The step as data. `name`: of its schedule."""
    plan = routing.plan
    facts: dict[str, Json] = {
        "schedule": name,
        "stages": len(plan.grids),
        "replicas": [len(grid) for grid in plan.grids],
        "chunks": len(plan.stages) // len(plan.grids),
        "workers": plan.world,
        "microbatches": routing.microbatches.count,
        "makespan_ms": _tidy(timeline.makespan_ms),
        "bubble_of_ideal": timeline.bubble_of_ideal,
        "bubble_of_total": timeline.bubble_of_total,
        "utilization": timeline.utilization,
        "busy_ms": [_tidy(x) for x in timeline.busy_ms],
        "peak_activations": [_tidy(x) for x in timeline.peak_activations],
    }
    if timeline.peak_bytes is not None:
        facts["peak_activation_bytes"] = list(timeline.peak_bytes)
    return facts


def _tidy(value: float) -> float:
    """The value as an int if it is whole, without the rounding noise of sums of thirds or tenths."""
    near = round(value, 6)
    if abs(near - value) > 1e-9:
        return value
    return int(near) if near == int(near) else near


def simulation_report(title: str, timeline: Timeline, columns: int) -> str:
    """The printed report: title, grid if it fits so many columns, table."""
    lines = [title, ""]
    grid = timeline_text_for_width(timeline, columns)
    lines += [grid, ""] if grid else []
    rows = [
        ("makespan", format_milliseconds(timeline.makespan_ms)),
        ("bubble", f"{timeline.bubble_of_total:.1%} of total, {timeline.bubble_of_ideal:.1%} of ideal"),
        ("utilization", f"{timeline.utilization:.1%}"),
        (
            "peak activations",
            f"{_values([*map(format_activation_count, timeline.peak_activations)])} microbatches, by worker",
        ),
    ]
    if timeline.peak_bytes is not None:
        rows.append(
            ("peak memory", f"{_values([f'{b / 1e6:,.4g}' for b in timeline.peak_bytes])} MB of activations, by worker")
        )
    width = max(len(key) for key, _ in rows)
    lines += [f"{key:<{width}}  {value}" for key, value in rows]
    if not grid:
        lines.append(f"{'picture':<{width}}  too large for this terminal; --svg F draws it")
    return "\n".join(lines)


def _values(shown: Sequence[str], most: int = 16) -> str:
    """The values as text; of many the first ones and the last."""
    return " ".join(shown if len(shown) <= most else [*shown[: most // 2], "...", shown[-1]])
