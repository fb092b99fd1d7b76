"""Annotations say what is meant: few of them have `Any` or `object` in them, or a name that stands for a type with one."""

import ast
import contextlib
import functools
from collections.abc import Iterator

import pytest
from helpers.sources import PACKAGE, source_files, tree_of

SAY_NOTHING = {"Any", "object"}
LARGEST_SHARE = 0.04
"""Of all annotations of arguments, results, variables and fields: those with one of `SAY_NOTHING`, also under another name."""
MOST_CASTS = 4
"""Calls of `typing.cast`, which the type checker believes: `isinstance` and `assert` it checks."""


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Every annotation: of arguments, results, variables and fields."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
                if one is not None and one.annotation is not None:
                    yield one.annotation
            if node.returns is not None:
                yield node.returns
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation


def names_in(expression: ast.expr) -> Iterator[str]:
    """The names in a type, also in texts."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
            with contextlib.suppress(SyntaxError):  # the text of a Literal
                yield from names_in(ast.parse(node.value, mode="eval").body)


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {
        ".".join(("raypar", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): tree_of(path)
        for path in source_files()
    }


def aliases(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """(name, type) of what may be aliases of types: names that a module gives to an expression."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            if isinstance(node.value, (ast.Name, ast.Subscript, ast.BinOp, ast.Attribute)):
                yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield from [(node.target.id, node.value)] if "TypeAlias" in names_in(node.annotation) else []


@functools.cache
def names_in_annotations() -> dict[str, list[set[str]]]:
    """Module -> the names in each of its annotations."""
    return {module: [set(names_in(one)) for one in annotations(tree)] for module, tree in trees().items()}


@functools.cache
def names_that_say_nothing() -> dict[str, set[str]]:
    """Module -> names in it that stand for `Any` or `object`, or for a type with one of them in it."""
    found = {module: set(SAY_NOTHING) for module in trees()}
    given = {module: [(name, set(names_in(value))) for name, value in aliases(tree)] for module, tree in trees().items()}
    imports = {
        module: [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in found]
        for module, tree in trees().items()
    }
    grows = True
    while grows:
        grows = False
        for module in found:
            new = {name for name, names in given[module] if found[module] & names}
            for node in imports[module]:
                new |= {one.asname or one.name for one in node.names if one.name in found[str(node.module)]}
            grows = grows or not new <= found[module]
            found[module] |= new
    return found


@pytest.mark.ci
def test_few_annotations_have_any_or_object_in_them_or_a_name_that_hides_one():
    found = [(module, names) for module, one in names_in_annotations().items() for names in one]
    empty = [names for module, names in found if not names_that_say_nothing()[module].isdisjoint(names)]
    cure = "name a type, a Protocol, a TypedDict or a TypeVar"
    said = f"{len(empty)} of {len(found)} annotations, {len(empty) / len(found):.2%}, have Any or object in them: {cure}"
    assert len(empty) <= LARGEST_SHARE * len(found), said


def casts(tree: ast.AST) -> int:
    """How often `cast`, or `typing.cast`, is called; `memoryview.cast` is another."""
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sum(isinstance(one, (ast.Name, ast.Attribute)) and ast.unparse(one) in ("cast", "typing.cast") for one in called)


@pytest.mark.ci
def test_few_casts_stand_in_the_place_of_types():
    found = {module: count for module, tree in trees().items() if (count := casts(tree))}
    assert sum(found.values()) <= MOST_CASTS, f"{found}: narrow the type by isinstance, or give it where the value is made"
    assert casts(ast.parse("cast(int, a); typing.cast('int', a); view.cast('B'); len(a)")) == 2


def test_a_name_that_stands_for_any_counts_where_it_is_imported_too():
    """`worker.interpreter.InstructionRule` has Any in it, and so has an annotation with it; `Json` has none."""
    assert "InstructionRule" in names_that_say_nothing()["raypar.worker.step.interpreter"]
    assert "Json" not in names_that_say_nothing()["raypar.files.json_type"]
    both = ast.parse("x: dict[str, Any] = {}\ndef f(a: 'list[object]', *b: int) -> None: ...")
    assert [not SAY_NOTHING.isdisjoint(names_in(one)) for one in annotations(both)] == [True, True, False, False]
