"""How a trace is refused: errors that users' `except Exception` does not catch, and cures that name a setting of the model."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

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


SKIPS_LAYERS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Settings of libraries by which layers are skipped at random."""
DRAWS_MASKS = ("mask_time_prob", "mask_feature_prob")
"""Settings by which masks are drawn with numpy."""


def cure_for_cache(model: nn.Module) -> str:
    """The cure for a cache object (of keys and values) that is passed between modules."""
    asking = [(path, config) for path, config in _configs(model) if getattr(config, "use_cache", False)]
    if any(path == "" for path, _ in asking):
        return "set use_cache=False in the model's config"
    if asking:
        path, config = asking[0]
        return f"set use_cache=False in the config of {path} ({type(config).__name__}) too: it is another than the model's"
    if any(type(module).__name__ == "PrefixEncoder" for module in model.modules()):
        return "prefix tuning passes a cache, whatever use_cache says: use LoRA or prompt tuning, which pass none"
    return "have the code that makes it pass None, or tensors; or make the module that calls both a unit (model.units)"


def settings_to_be_zero(model: nn.Module, names: tuple[str, ...]) -> str:
    """Names of those settings that are not 0, for a message; empty if all are 0.

    If the model has none of them, the first name: its own setting may have another name.
    """
    found = [(name, value) for name in names for value in _values(model, name)]
    return ", ".join(dict.fromkeys(name for name, value in found if value)) if found else names[0]


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(module's name, config) of every config, those of the outermost modules first; that of the model has no name."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        config = vars(module).get("config")
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            yield path, config


def _values(model: nn.Module, name: str) -> Iterator[Any]:
    """The values of a setting: attributes of modules; where no module has it, of configs."""
    own = [vars(module)[name] for module in model.modules() if name in vars(module)]
    for value in own or [getattr(config, name, None) for _, config in _configs(model)]:
        if isinstance(value, (int, float)):
            yield value
