"""Sharding styles by name. To add one, write its class in a file of this folder, and add it to the list."""

from __future__ import annotations

import difflib
import re

from raypar.errors import PlanError
from raypar.model.tensor_parallel.styles.head_styles import (
    AttentionStyle,
    FusedKvStyle,
    HeadsRowStyle,
    HeadsStyle,
    KvHeadsStyle,
    QkvInterleavedStyle,
    QkvStyle,
)
from raypar.model.tensor_parallel.styles.linear_styles import (
    ColumnStyle,
    ExpertsStyle,
    GatheredStyle,
    GroupsStyle,
    RowStyle,
    VocabularyStyle,
    WholeStyle,
)
from raypar.model.tensor_parallel.styles.recurrent_styles import GatesColumnStyle, GatesStyle
from raypar.model.tensor_parallel.styles.spatial_styles import SPATIAL_DIMENSIONS, SpatialGatheredStyle, SpatialStyle
from raypar.model.tensor_parallel.styles.style import ShardingStyle

STYLES: dict[str, type[ShardingStyle]] = {
    style.name: style
    for style in (
        ColumnStyle,
        RowStyle,
        GroupsStyle,
        SpatialStyle,
        SpatialGatheredStyle,
        HeadsStyle,
        KvHeadsStyle,
        FusedKvStyle,
        QkvStyle,
        QkvInterleavedStyle,
        HeadsRowStyle,
        AttentionStyle,
        GatesStyle,
        GatesColumnStyle,
        ExpertsStyle,
        VocabularyStyle,
        GatheredStyle,
        WholeStyle,
    )
}
"""What may stand in `plan.styles`, in the order in which people read it."""


def parse_style(text: str) -> ShardingStyle:
    """The style that a text of `plan.styles` means: `name`, or `name` with options (`heads:8/2`, `column/2`).

    Raises `PlanError` with the nearest name.
    """
    name = re.split("[:/]", text, maxsplit=1)[0]
    options = text[len(name) :]
    try:
        return STYLES[name].parse(options)
    except (KeyError, ValueError):
        pass
    if name in STYLES:
        wrong = f"{text!r} is no style: {name} has no option {options[1:]!r}"
        near = difflib.get_close_matches(options[1:], SPATIAL_DIMENSIONS, n=1) if name == "spatial" else []
    else:
        wrong, near = f"{text!r} is no style", difflib.get_close_matches(text.partition(":")[0], STYLES, n=1)
    raise PlanError(
        wrong + (f" (nearest: {near[0]})" if near else ""),
        cure=f"use one of {', '.join(STYLES)}; heads:8, kv-heads:8/2, qkv:8/2 say how many heads, column/2 how many parts, "
        "column:8 how many units, spatial:width which dim",
    )
