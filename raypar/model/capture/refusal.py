"""How a trace is refused: errors that users' `except Exception` does not catch, with the file and line of the user's code."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

from raypar.errors import ModelError

_NOT_USERS = (
    *(str(package) + os.sep for package in (Path(torch.__file__).parent, Path(__file__).parents[2])),
    "<frozen",
    "<string>",
)
"""Beginnings of the file names of PyTorch's and raypar's own code; torchvision's folder begins as PyTorch's does."""
_PYTHONS = sysconfig.get_path("stdlib")
"""Beginning of the file names of Python's own library, in which packages may be installed too."""


class Refused(BaseException):
    """The forward does something that cannot be captured. A `BaseException`: users' `except Exception` does not catch it."""

    def __init__(self, what: str, cure: str) -> None:
        super().__init__(what, cure)
        self.error = ModelError(what, cure)
        """The error to raise to the user."""
        self.module = ""
        """Qualified name of the module whose own code does it, between units, or that has units inside and is an argument of
        another; empty for the model, or if it is not known."""
        self.unit_without_parameters = ""
        """Qualified name of a unit that causes it and has no parameters: its code may be recorded in the place of its call."""


class InnerModuleUsed(BaseException):
    """A module inside of a unit is called, or what it made is read, outside of the unit: it must be a unit itself."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path
        """The module's qualified name."""


def user_location() -> str:
    """File and line of the innermost frame that is neither PyTorch's nor raypar's nor Python's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_USERS) and (not file.startswith(_PYTHONS) or "site-packages" in file):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown location"
