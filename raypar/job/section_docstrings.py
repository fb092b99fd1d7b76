"""The docstrings of a job's sections and of their keys, as the reference page and the JSON schema show them."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap

from pydantic import BaseModel


def section_docstring(section: type[BaseModel]) -> str:
    """The docstring of a section, in one line."""
    return inspect.cleandoc(section.__doc__ or "").replace("\n", " ")


def key_docstring(section: type[BaseModel], name: str) -> str:
    """The docstring of a key, in one line. Raises `TypeError` if it has none."""
    for cls in section.__mro__:
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            found = _attribute_docstrings(cls).get(name)
            if found is not None:
                return re.sub(r"\bNone(?=[:,])", "*none*", found)
    raise TypeError(f"{section.__name__}.{name} has no docstring")


@functools.cache
def _attribute_docstrings(cls: type) -> dict[str, str]:
    """Attribute -> its docstring, which is the string below it in the class's source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for attribute, below in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(attribute, ast.AnnAssign)
            and isinstance(attribute.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[attribute.target.id] = " ".join(below.value.value.split())
    return found
