"""Styles from the tensor-parallel plan that a model brings along: `base_model_tp_plan` of Hugging Face's configurations.

Such a plan maps patterns of module names to the words of `transformers`. Its patterns begin at the base model
(`layers.*.self_attn.q_proj` in `model.`). Plans of classes (`_tp_plan`, for heads) are not read.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from raypar.errors import PlanError
from raypar.model.capture.captured_layer import CapturedLayer, cache_of
from raypar.model.graph import Graph, join_names
from raypar.model.layer_skeletons import SkeletonCopier
from raypar.model.tensor_parallel.styles.head_styles import HeadsRowStyle, HeadsStyle, KvHeadsStyle
from raypar.model.tensor_parallel.styles.linear_styles import (
    ColumnStyle,
    ExpertsStyle,
    GatheredStyle,
    RowStyle,
    VocabularyStyle,
    WholeStyle,
    are_cuttable_experts,
)
from raypar.model.tensor_parallel.styles.style import ShardingStyle
from raypar.plan.stage_connections import LATER_USE

_STYLES: dict[str, ShardingStyle] = {
    "colwise": ColumnStyle(),
    "rowwise": RowStyle(),
    "packed_colwise": ColumnStyle(2),
    "colwise_gather_output": GatheredStyle(),
    "rowwise_split_input": RowStyle(),
    "replicated_with_grad_allreduce": WholeStyle(),
    "embedding_rowwise": VocabularyStyle(),
    "moe_tp_experts": ExpertsStyle(),
    "mla_kv_a_proj": WholeStyle(),
    "replicate": WholeStyle(),
}
"""Word of `transformers` -> style. Of q, k, v and what reads attention's output: see `_by_heads`."""

_QUERIES, _KEYS = (
    ("q_proj", "q_b_proj", "query", "wq", "q"),
    ("k_proj", "v_proj", "kv_b_proj", "key", "value", "wk", "wv", "k", "v"),
)


def library_styles(
    graph: Graph, modules: Mapping[str, nn.Module], given: Mapping[str, ShardingStyle]
) -> dict[str, ShardingStyle]:
    """Qualified module name -> style, of the modules that the model's own plan names; empty for models without one.

    `modules`: those that own parameters; `given`: the styles that the job gives, which count first. Output layers (`lm_head`)
    are left to inference, which knows what reads them. Raises `PlanError` for a module that cannot be cut as the plan says.
    """
    plan = find_library_plan(graph)
    found: dict[str, ShardingStyle] = {}
    for name, module in modules.items():
        if name in given:
            continue
        for pattern, word in plan.items():
            if fnmatch.fnmatchcase(name.partition(LATER_USE)[0], pattern):
                found[name] = _style_of(name, word, module)
                break
    return {name: _by_heads(name, style, found) for name, style in found.items()}


def find_library_plan(graph: Graph) -> dict[str, str]:
    """Pattern of qualified module names -> word, of a captured model and the models in it."""
    build = graph.layers[0].build
    shell = build.skeleton if isinstance(build, SkeletonCopier) else None
    if not isinstance(shell, CapturedLayer):
        return {}
    found: dict[str, str] = {}
    for path, module in cache_of(shell).model.named_modules():
        for pattern, word in _own_plan(module):
            found.setdefault(join_names(path, pattern), word)
    return found


def _own_plan(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(pattern, word) of the base models among the modules: those whose class says that they are one."""
    plan: Any = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if isinstance(plan, Mapping) and getattr(module, "base_model", None) is module:
        yield from plan.items()


def _style_of(name: str, word: str, module: nn.Module) -> ShardingStyle:
    """The style that a word of the plan means for a module. Raises `PlanError` if there is none, or it does not fit."""
    style = _STYLES.get(word)
    pattern = ".".join("*" if step.isdigit() else step for step in name.partition(LATER_USE)[0].split("."))
    if style is None:
        raise PlanError(
            f"the model's own tensor-parallel plan gives {name}, a {type(module).__name__}, the style {word}, which raypar "
            "does not have",
            cure=f"say how it is cut, or that every shard has all of it: plan.styles: {{'{pattern}': whole}}",
        )
    if isinstance(style, ExpertsStyle) and not are_cuttable_experts(module):
        return WholeStyle()  # experts with biases, or with weights the other way round
    try:
        style.check_fits(name, module)
    except PlanError as error:
        raise PlanError(
            f"the model's own tensor-parallel plan ({word}) cannot be kept: {error.what}",
            cure=f"say how it is cut, or that every shard has all of it: plan.styles: {{'{pattern}': whole}}",
        ) from error
    return style


def _by_heads(name: str, style: ShardingStyle, found: Mapping[str, ShardingStyle]) -> ShardingStyle:
    """The style for attention's layers: columns of queries, keys and values are cut by heads, and so what reads the result."""
    parent, _, own = name.partition(LATER_USE)[0].rpartition(".")
    later = name.partition(LATER_USE)[1] + name.partition(LATER_USE)[2]
    beside = [join_names(parent, query) + later for query in _QUERIES]
    if isinstance(style, ColumnStyle) and style.parts == 1:
        return HeadsStyle() if own in _QUERIES else KvHeadsStyle() if own in _KEYS else style
    if isinstance(style, RowStyle) and any(isinstance(found.get(each), ColumnStyle) for each in beside):
        return HeadsRowStyle()
    return style
