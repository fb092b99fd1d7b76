"""The run machine's diagram, made from its table.

`python -m raypar.elastic.transition_diagram raypar/elastic/RUN_MACHINE.md` writes it into that page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from raypar.elastic.phases import Phase
from raypar.elastic.transition_table import ON_ENTER, RECOVERING, ROWS, TRAINING, TransitionRow

BEGIN, END = "<!-- run machine: generated -->", "<!-- run machine: end -->"
"""The lines in the page that enclose the diagram."""
GROUPS: dict[str, tuple[str, tuple[Phase, ...]]] = {
    "RUN": ("while all workers are well", (*TRAINING, Phase.VALIDATING, Phase.SAVING, Phase.REBALANCING, Phase.ENDING)),
    "RECOVERY": ("from one generation to the next", RECOVERING),
}
"""Name of a group -> (its title, its phases): an edge that all its phases share is drawn once."""

Edges = dict[tuple[str, str], set[str]]
"""(from, to) -> the events that lead there."""


def draw_diagram(rows: Iterable[TransitionRow] = ROWS) -> str:
    """The table's changes of phase as a Mermaid flowchart, which GitHub renders."""
    edges = _merge_edges(_find_edges(rows))
    lines = ["flowchart TD"]
    grouped = {phase for _, phases in GROUPS.values() for phase in phases}
    lines += [_node(phase) for phase in Phase if phase not in grouped]
    for name, (title, phases) in GROUPS.items():
        lines += [f'  subgraph {name} ["{title}"]', *("  " + _node(phase) for phase in phases), "  end"]
    lines += [f'  {a} -- "{"<br/>".join(sorted(events))}" --> {b}' for (a, b), events in edges.items()]
    return "\n".join(["```mermaid", *lines, "```"])


def list_phase_work() -> str:
    """A Markdown table of what starts the work of each phase."""
    lines = ["| phase | when it is entered |", "|---|---|"]
    for phase, start in ON_ENTER.items():
        about = (start.__doc__ or "").partition("\n\n")[0]
        lines.append(f"| {phase.value} | `{start.__module__.rpartition('.')[2]}.{start.__name__}`: {about} |")
    return "\n".join(lines)


def _node(phase: Phase) -> str:
    return f'  {phase.name}["{phase.value}"]'


def _find_edges(rows: Iterable[TransitionRow]) -> Edges:
    """The changes of phase in the order of the phases."""
    found: Edges = {}
    for row in rows:
        for phase in row.phases:
            for to in row.to - {phase}:
                found.setdefault((phase.name, to.name), set()).add(row.event.__name__)
    names = [phase.name for phase in Phase]
    return {edge: found[edge] for edge in sorted(found, key=lambda edge: (names.index(edge[0]), names.index(edge[1])))}


def _merge_edges(edges: Edges) -> Edges:
    """The same, with one edge for those that all phases of a group share, at either end."""
    for name, (_, phases) in GROUPS.items():
        inside = [phase.name for phase in phases]
        outside = [phase.name for phase in Phase if phase not in phases]
        outside += [other for other in GROUPS if other != name]
        for end in outside:
            for pairs, edge in (([(p, end) for p in inside], (name, end)), ([(end, p) for p in inside], (end, name))):
                if all(pair in edges for pair in pairs):
                    edges = {**edges, edge: set().union(*(edges[pair] for pair in pairs))}
                    edges = {pair: events for pair, events in edges.items() if pair not in pairs}
    return edges


def insert_diagram(text: str) -> str:
    """`text` with the present diagram, and the list of the phases' work, between its two marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{draw_diagram()}\n\n{list_phase_work()}\n{END}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(insert_diagram(Path(name).read_text()))
    if not sys.argv[1:]:
        print(draw_diagram())
