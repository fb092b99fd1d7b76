"""A digest of what a module computes besides its parameters: classes, options, configuration, as far as attributes say it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from raypar.model.graph import MadeModel
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS

OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has, which are hooks and the like."""
OF_A_COPY = frozenset(["name_or_path", "_name_or_path", "transformers_version"])
"""Keys of a configuration that say where it comes from."""


def digest_of_module(made: MadeModel) -> str:
    """The digest of a module, or of a list of them; empty for anything else."""
    given = made if isinstance(made, Sequence) else [made]
    parts = [part for part in given if isinstance(part, nn.Module)]
    if len(parts) < len(given):
        return ""
    found, seen = hashlib.blake2b(digest_size=8), set[int]()
    for number, part in enumerate(parts):
        for name, module in part.named_modules():
            kind = type(module)
            found.update(f"{number}.{name} {kind.__module__}.{kind.__qualname__}\n".encode())
            for key, text in sorted(_options(module, seen)):
                found.update(f"{key}={text}\n".encode())
    return found.hexdigest()


def _options(module: nn.Module, seen: set[int]) -> Iterator[tuple[str, str]]:
    """(name, value) of the attributes that are plain values, and of its configuration, unless that is one of `seen`."""
    for key, value in vars(module).items():
        if key in OF_TORCH:
            continue
        if (text := _plain_text(value)) is not None:
            yield key, text
        elif hasattr(type(value), "to_dict") and id(value) not in seen:  # `PretrainedConfig`, from a file
            seen.add(id(value))
            settings = _settings_of(value)
            for name, setting in settings.items() if isinstance(settings, Mapping) else ():
                if name not in OF_A_COPY and (text := _plain_text(setting)) is not None:
                    yield f"{key}.{name}", text


def _settings_of(configuration: Any) -> object:
    """What an object's `to_dict` gives; None if it raises, as one of the user's own kind may."""
    try:
        return configuration.to_dict()
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        return None


def _plain_text(value: object) -> str | None:
    """A value as text; None for one that is not plain, and for a path: a file may lie elsewhere."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return None if "/" in value else value
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (tuple, list)):
        texts = [_plain_text(one) for one in value]
        return None if None in texts else str(texts)
    return None
