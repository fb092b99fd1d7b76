"""Sharding styles by name. To add one, write a file beside this one and add its class to the list."""

from __future__ import annotations

import difflib
import re

from raypar.errors import PlanError
from raypar.model.tensor_parallel.styles.attention import AttentionStyle
from raypar.model.tensor_parallel.styles.column import ColumnStyle
from raypar.model.tensor_parallel.styles.experts import ExpertsStyle
from raypar.model.tensor_parallel.styles.gathered_output import GatheredStyle
from raypar.model.tensor_parallel.styles.heads import HeadsStyle
from raypar.model.tensor_parallel.styles.heads_row import HeadsRowStyle
from raypar.model.tensor_parallel.styles.kv import KvStyle
from raypar.model.tensor_parallel.styles.kv_heads import KvHeadsStyle
from raypar.model.tensor_parallel.styles.qkv import QkvStyle
from raypar.model.tensor_parallel.styles.qkv_interleaved import QkvInterleavedStyle
from raypar.model.tensor_parallel.styles.row import RowStyle
from raypar.model.tensor_parallel.styles.style import ShardingStyle
from raypar.model.tensor_parallel.styles.vocabulary import VocabularyStyle
from raypar.model.tensor_parallel.styles.whole import WholeStyle

STYLES: dict[str, type[ShardingStyle]] = {
    style.name: style
    for style in (
        ColumnStyle,
        RowStyle,
        HeadsStyle,
        KvHeadsStyle,
        KvStyle,
        QkvStyle,
        QkvInterleavedStyle,
        HeadsRowStyle,
        AttentionStyle,
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
    near = difflib.get_close_matches(text.partition(":")[0], STYLES, n=1)
    raise PlanError(
        f"{text!r} is no style" + (f" (nearest: {near[0]})" if near else ""),
        cure=f"use one of {', '.join(STYLES)}; heads:8, kv-heads:8/2, qkv:8/2 say how many heads, column/2 how many parts",
    )
