"""Signatures that `help` prints in one line, however many arguments a function takes; tools still find all arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class BriefSignature(inspect.Signature):
    """A signature whose text names only the arguments that must be given. `parameters` has all, with their defaults."""

    def __str__(self) -> str:
        needed = [parameter for parameter in self.parameters.values() if parameter.default is parameter.empty]
        text = str(inspect.Signature([parameter.replace(annotation=parameter.empty) for parameter in needed]))
        return text if len(needed) == len(self.parameters) else f"{text.removesuffix(')')}{', ' * bool(needed)}...)"

    def format(self, *, max_width: int | None = None, quote_annotation_strings: bool = True) -> str:
        """The same text: from Python 3.13 on, `help` asks for it by this method."""
        return str(self)


def with_brief_signature(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: `help` prints the function's arguments in one line (`BriefSignature`)."""
    signature = inspect.signature(function)
    found = BriefSignature(list(signature.parameters.values()), return_annotation=signature.return_annotation)
    function.__signature__ = found  # type: ignore[attr-defined]
    return function
