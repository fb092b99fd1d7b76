"""A function fits on a screen, a constructor says little more than what its object consists of, and a command parses, calls and
prints."""

import ast
import functools
from collections.abc import Iterator

from helpers.sources import PACKAGE, source_files, tree_of

FUNCTION_LINES, CONSTRUCTOR_LINES, EXCEPTIONS = 60, 40, 4
COMMAND_LINES = 80
CONSTRUCTORS = {"__init__", "__post_init__", "__new__"}

LONGER = {
    "trainer.py Trainer.__init__": "a line for each of its arguments, which are the public interface",
}
"""What may be longer, and why; at most `EXCEPTIONS` of them."""


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its name, `Class.function` where it is in one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield inside + node.name, node
        name = f"{inside}{node.name}." if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) else inside
        yield from functions(node, name)


def extent(node: ast.stmt) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def documentation(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """The lines below an attribute that say what it is: they are wanted, however many there are."""
    strings = [x for x in node.body[1:] if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
    return list(strings) if node.name in CONSTRUCTORS else []


@functools.cache
def too_long() -> set[str]:
    found = set()
    for path in source_files():
        for name, node in functions(tree_of(path)):
            lines = extent(node) - sum(map(extent, documentation(node)))
            if lines > (CONSTRUCTOR_LINES if node.name in CONSTRUCTORS else FUNCTION_LINES):
                found.add(f"{path.relative_to(PACKAGE).as_posix()} {name}")
    return found


def test_functions_and_constructors_are_short():
    assert sorted(too_long() - set(LONGER)) == []


def test_the_exceptions_are_few_and_needed():
    assert len(LONGER) <= EXCEPTIONS
    assert sorted({*LONGER} - too_long()) == [], "short by now: remove its row"


def test_commands_leave_to_other_rooms_what_they_compute():
    lines = {path.name: len(path.read_text().splitlines()) for path in (PACKAGE / "commands").glob("*.py")}
    assert {name: count for name, count in lines.items() if count >= COMMAND_LINES} == {}
