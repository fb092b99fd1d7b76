"""Writes the pictures of a step: predicted and measured swimlanes, and a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raypar.actors.messages import RunRequest
from raypar.draw.chrome_trace import chrome_trace
from raypar.draw.swimlane_as_json import swimlane_data
from raypar.draw.swimlane_svg import swimlanes_svg
from raypar.files.atomic_write import replace_file_atomically
from raypar.plan.wording import count_noun
from raypar.record.folder import SWIMLANE, TRACE
from raypar.schedule.data_flow import message_routes
from raypar.schedule.step_timeline import Timeline

Rows = Sequence[Sequence[tuple[str, float, float]]]
"""Per rank: label, start and end in ms of that worker's clock."""


def write_step_timeline_files(request: RunRequest, step: int, spans: Rows, nodes: Sequence[str]) -> None:
    """Writes `swimlane.svg` and `trace.json` into the run folder; raises `OSError`. `nodes[rank]`: the machine of a worker."""
    names = [request.plan.coordinate(rank) for rank in range(request.plan.world)]
    measured = Timeline.from_spans(align_node_clocks(spans, nodes), names)
    predicted = replace(request.predicted, names=tuple(names))
    panels = [("predicted before the run", predicted), (f"measured: step {step}", measured)]
    routes = message_routes(request.crossing)
    folder = Path(request.folder)
    workers = f"{count_noun(request.plan.world, 'worker')} = {request.plan.describe()}"
    title = f"{request.run}: {workers}, schedule {request.schedule_name}, {request.batching.count} microbatches"
    replace_file_atomically(folder / SWIMLANE, swimlanes_svg(panels, title=title, routes=routes).encode())
    data = swimlane_data(panels, title=title, routes=routes)
    trace = chrome_trace(measured, nodes=list(nodes), name=request.run, swimlane=data)
    replace_file_atomically(folder / TRACE, json.dumps(trace).encode())


def align_node_clocks(rows: Rows, nodes: Sequence[str]) -> Rows:
    """The rows on one clock. Other machines' clocks are shifted so that the vote ends everywhere at the same time."""
    ends = [next((end for label, _, end in reversed(row) if label == "V"), 0.0) for row in rows]
    shift = {node: ends[0] - ends[nodes.index(node)] for node in set(nodes)}
    if nodes:
        shift[nodes[0]] = 0.0
    return [[(label, a + shift[node], b + shift[node]) for label, a, b in row] for row, node in zip(rows, nodes, strict=True)]
