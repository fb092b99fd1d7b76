"""The layers that a job's patterns name."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from raypar.errors import PlanError


def match_layer_patterns(key: str, patterns: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """Indices of the layers whose names match one of the patterns (`*` and `?`), ascending. `key`: where the job has the
    patterns; `names`: the model's layer names, in order.

    Raises `PlanError` for a pattern that matches no layer.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            raise PlanError(
                f"{key} has {pattern!r}, which matches none of the {len(names)} layers",
                cure=(f"did you mean {' or '.join(near)}? " if near else "")
                + f"layers are {shorten_layer_names(names)}; a pattern may have * and ?; all of them: full",
            )
    return tuple(i for i, name in enumerate(names) if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def describe_layers(layers: Sequence[int], names: Sequence[str]) -> str:
    """Some of a model's layers as text: `all 8 layers`, `3 of 8 layers: block0, block1, block2`; empty for none."""
    if not layers:
        return ""
    if len(layers) == len(names):
        return f"all {len(names)} layers"
    return f"{len(layers)} of {len(names)} layers: {shorten_layer_names([names[i] for i in layers])}"


def shorten_layer_names(names: Sequence[str]) -> str:
    """The names as a list, of more than six the first ones and the last."""
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:4])}, ..., {names[-1]}"
