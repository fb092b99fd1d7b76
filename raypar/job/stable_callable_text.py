"""Texts for functions and their arguments: in messages, in checkpoints' contracts, and for arguments that do not fit."""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from raypar.errors import ConfigError
from raypar.files.printable_text import repr_text

CONTRACT_CHARACTERS = 10_000
"""The longest text of a function that a contract holds as it is. That of a list of samples is the text of all of them."""


def argument_refusal(function: Callable[..., Any], args: Mapping[str, Any], label: str, key: str) -> ConfigError | None:
    """The error for arguments `args` that a function does not take, or for those that it needs and does not get.

    None if its signature takes `args`, or is not known. `label`: the function's name; `key`: the job's key of the arguments.
    """
    try:
        taken = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    named = {one.name: one for one in taken if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    lacks = [one.name for one in named.values() if one.default is one.empty and one.name not in args]
    unknown = [name for name in args if name not in named]
    if any(one.kind is one.VAR_KEYWORD for one in taken):
        unknown = []
    shown = ", ".join(
        name if one.default is one.empty else f"{name}={repr_text(one.default, 60)}" for name, one in named.items()
    )
    takes = f"it takes {shown}" if shown else "it takes none"
    if unknown:
        near = difflib.get_close_matches(unknown[0], named, n=1)
        cure = (f"did you mean {near[0]}? " if near else f"leave {unknown[0]} out of {key}: ") + takes
        return ConfigError(f"{key}.{unknown[0]}: {label} has no such argument", cure)
    if lacks:
        given = "from Python the dict in (function, dict)"
        return ConfigError(f"{key} lacks {', '.join(lacks)}, which {label} needs", f"add it to {key} ({given}): {takes}")
    return None


def shorten_contract_text(text: str) -> str:
    """A text as a contract holds it: with its hash in place of most of it if it is longer than `CONTRACT_CHARACTERS`."""
    if len(text) <= CONTRACT_CHARACTERS:
        return text
    return f"{text[:80]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()})"


def stable_callable_label(target: Callable[..., Any], inside: tuple[int, ...] = ()) -> str:
    """Text for a callable that is the same in every process: its name; for a `partial` or loss module also its values.

    `inside`: see `stable_argument_text`.
    """
    if isinstance(target, functools.partial):
        inside = (*inside, id(target))
        given = [stable_argument_text(value, inside) for value in target.args]
        given += [f"{name}={stable_argument_text(value, inside)}" for name, value in sorted(target.keywords.items())]
        return f"partial({', '.join([stable_callable_label(target.func, inside), *given])})"
    if hasattr(target, "named_buffers") and not isinstance(target, type):  # a loss module
        options = [f"{k}={v!r}" for k, v in vars(target).items() if isinstance(v, (int, float, str)) and k[0] != "_"]
        options += [f"{name}={stable_argument_text(buffer)}" for name, buffer in target.named_buffers()]
        return f"{type(target).__qualname__}({', '.join(o for o in options if not o.startswith('training='))})"
    return str(getattr(target, "__qualname__", "")) or without_addresses(repr(target))


def stable_argument_text(value: Any, inside: tuple[int, ...] = ()) -> str:
    """Text for an argument that is the same in every process; for a tensor or array: shape, type and a hash of the values.

    `inside`: ids of the containers around the argument; a container inside itself is `...`, as in Python's `repr`.
    """
    if id(value) in inside:
        return "..."
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [stable_argument_text(item, (*inside, id(value))) for item in value]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, (set, frozenset)) else parts)})"
    if isinstance(value, Mapping):
        inside = (*inside, id(value))
        return (
            "{"
            + ", ".join(f"{stable_argument_text(k, inside)}: {stable_argument_text(v, inside)}" for k, v in value.items())
            + "}"
        )
    if hasattr(value, "named_parameters") and not isinstance(value, type):
        return " ".join(
            [
                stable_callable_label(value),
                *(f"{name}={stable_argument_text(tensor)}" for name, tensor in value.named_parameters()),
            ]
        )
    if callable(value):
        return stable_callable_label(value, inside)
    if all(hasattr(value, name) for name in ("dtype", "shape", "tolist")):
        try:
            values = value.tolist()
        except (RuntimeError, TypeError):  # no dense values of its own: meta, sparse, quantized
            return without_addresses(repr(value))
        digest = hashlib.sha256(repr(values).encode()).hexdigest()
        return f"{type(value).__name__}({value.dtype}, {list(value.shape)}, sha256 {digest[:16]})"
    return without_addresses(repr(value))


def find_unstable_argument(target: Any, inside: tuple[int, ...] = ()) -> str | None:
    """The `repr` of an argument, bound by a `functools.partial`, that is known by its address only; None if there is none.

    A resumed run could not tell such an argument from another. `inside`: see `stable_argument_text`.
    """
    if id(target) in inside:
        return None
    if isinstance(target, functools.partial):
        given = [*target.args, *target.keywords.values(), target.func]
    elif isinstance(target, Mapping):
        given = list(target.values())
    elif isinstance(target, (list, tuple, set, frozenset)):
        given = list(target)
    else:
        if isinstance(target, type) or hasattr(target, "__qualname__") or hasattr(target, "named_buffers"):
            return None
        text = re.sub(rf"(<function [^ ]+){_ADDRESS}>", r"\1>", repr(target))  # in a dataclass, say: its name tells it
        return None if without_addresses(text) == text else repr(target)
    inside = (*inside, id(target))
    found = (find_unstable_argument(value, inside) for value in given)
    return next((one for one in found if one is not None), None)


def without_addresses(text: str) -> str:
    """A `repr` without the addresses of objects, which differ from process to process."""
    return re.sub(_ADDRESS, "", text)


_ADDRESS = r" at 0x[0-9a-fA-F]+"
"""An address in a `repr`: Python writes small letters, numpy's generators capitals."""
