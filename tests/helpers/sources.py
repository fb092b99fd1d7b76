"""raypar's source files as syntax trees, each parsed once in a process."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "raypar"


@functools.cache
def source_files() -> tuple[Path, ...]:
    """Every module of raypar."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The file's syntax tree; leave it as it is."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the file's syntax tree."""
    return tuple(ast.walk(tree_of(path)))
