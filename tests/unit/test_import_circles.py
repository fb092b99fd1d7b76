"""No module of raypar needs, by whichever way, a module that needs it: not at the top, for types only, or inside a function."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from helpers.sources import PACKAGE, nodes_of, source_files


def modules() -> dict[str, Path]:
    """Name -> file of every module; a package has the name of its folder."""
    found = {".".join(("raypar", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in source_files()}
    return {name.removesuffix(".__init__"): path for name, path in sorted(found.items())}


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a file names in imports anywhere in it; of `from package import module` the module."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                within = f"{node.module}.{alias.name}"
                if within in known or node.module in known:
                    yield within if within in known else node.module


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components with more than one node, by Tarjan's algorithm (1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in order:
            visit(node)
    return sorted(found)


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"e", "a"}, "e": {"f"}, "f": {"d"}}) == [
        ["b", "c"],
        ["d", "e", "f"],
    ]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_modules_import_each_other():
    known = modules()
    graph = {name: set(imported(path, known)) - {name} for name, path in known.items()}
    assert circles(graph) == []
