"""Computes how a model is cut over shards: which style each layer gets, and what the styles answer, as plain data."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from sys import intern

from torch import nn

from raypar.errors import PlanError
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import make_model_outline, parameter_shapes
from raypar.model.tensor_parallel.find_whole_layers import find_whole_layers
from raypar.model.tensor_parallel.infer_styles import infer_styles
from raypar.model.tensor_parallel.infer_styles_by_structure import add_styles_by_structure
from raypar.model.tensor_parallel.layout_of_styles import Owners, layout_of_styles, modules_with_parameters
from raypar.model.tensor_parallel.library_plan import library_styles
from raypar.model.tensor_parallel.styles.linear_styles import WholeStyle
from raypar.model.tensor_parallel.styles.registry import parse_style
from raypar.model.tensor_parallel.styles.style import ShardingStyle
from raypar.model.tensor_parallel.styles_by_dimension import SHARDS, styles_by_dimension
from raypar.model.tensor_parallel.try_styles import find_split_values_between_layers, with_values_in_parts
from raypar.plan import ModelOutline
from raypar.plan.stage_connections import LATER_USE, owner_of, parameter_of
from raypar.plan.tensor_parallel_layout import ShardWorkShare, TensorParallelLayout


def compute_shard_layout(
    graph: Graph,
    shards: int,
    styles: Mapping[str, str] | None = None,
    dimensions: Mapping[str, str] | None = None,
    *,
    infer: bool = True,
) -> TensorParallelLayout:
    """How the model is cut over so many shards; computed once for a graph.

    `styles`: pattern of module or parameter names (`block*.up`, `*.up.weight`) -> style; the first that matches counts. What
    no pattern matches gets what `infer_styles` finds; with `dimensions` (dimension -> `shards` or `whole`) only if that divides
    one of these. Raises `PlanError` for a pattern that matches nothing, a dimension that no layer has, a style that does not
    fit, more shards than there is to share out, and ties whose names are cut differently.
    """
    kept = vars(graph).setdefault("_layouts", {})  # beside the fields, which alone decide whether two graphs are equal
    key = (shards, tuple((styles or {}).items()), tuple(sorted((dimensions or {}).items())), infer)
    if key not in kept:
        kept[key] = _compute_layout(graph, shards, styles or {}, dimensions or {}, infer=infer)
    found: TensorParallelLayout = kept[key]
    return found


def _compute_layout(
    graph: Graph, shards: int, styles: Mapping[str, str], dimensions: Mapping[str, str], *, infer: bool
) -> TensorParallelLayout:
    modules = modules_with_parameters(graph.layers)
    if dimensions.get("samples") == SHARDS:
        return _layout_by_samples(modules, shards, styles, dimensions)
    given = _styles_by_pattern(modules, styles)
    chosen = dict(given)
    if infer:
        asked = {name: module for name, (module, _) in modules.items()} if shards > 1 or dimensions else {}
        planned = library_styles(graph, asked, given) if asked else {}
        named = _without_unequal_ties(graph, _styles_of_model(graph, planned, given), given)
        inferred = add_styles_by_structure(graph, named, given)
        chosen |= styles_by_dimension(modules, dimensions, inferred, given) if dimensions else inferred
    layout = layout_of_styles(graph.layers, modules, chosen, shards)
    _check_ties(graph, layout)
    layout = with_values_in_parts(layout, find_split_values_between_layers(graph, layout))
    return replace(layout, whole_layers=find_whole_layers(graph, layout))


def _layout_by_samples(
    modules: Owners, shards: int, styles: Mapping[str, str], dimensions: Mapping[str, str]
) -> TensorParallelLayout:
    """The layout of which each shard computes some samples with whole layers. Raises `PlanError` if layers were cut, too."""
    others = [name for name, where in dimensions.items() if where == SHARDS and name != "samples"]
    if others or any(parse_style(text) != WholeStyle() for text in styles.values()):
        raise PlanError(
            f"plan.layout divides samples, and {others[0] if others else 'plan.styles layers'}, over the same shards",
            cure="leave one out; other workers may divide other layers (plan.placements)",
        )
    share = (ShardWorkShare(1 / shards, 1.0),) * shards
    return TensorParallelLayout(shards, {}, {}, costs=dict.fromkeys(modules, share), divides_samples=shards > 1)


def make_model_outline_with_layouts(
    graph: Graph,
    shards: Iterable[int],
    styles: Mapping[str, str],
    dimensions: Mapping[str, str] | None = None,
    *,
    sequence: bool = False,
) -> ModelOutline:
    """The graph without the model, and how it is cut over these numbers of shards. Without shards: not at all. `sequence`:
    under sequence parallelism, where each virtual shard computes every layer."""
    counts = set(shards)
    if max(counts, default=1) == 1:
        return make_model_outline(graph)
    layouts = {count: compute_shard_layout(graph, count, styles, dimensions) for count in sorted(counts)}
    if sequence:
        layouts = {count: replace(layout, whole_layers=frozenset()) for count, layout in layouts.items()}
    cuts = {count: layout.cuts for count, layout in layouts.items() if count > 1}
    return replace(make_model_outline(graph), shardings=cuts, layouts=layouts)


def held_elements_by_layer(graph: Graph, layout: TensorParallelLayout, shard: int) -> tuple[int, ...]:
    """By layer: how many elements of its parameters a shard holds, a tied parameter at its first use."""
    counted: set[str] = set()
    found = []
    for index in range(len(graph.layers)):
        fresh = {name: shape for name, shape in parameter_shapes(graph, index, index + 1).items() if name not in counted}
        counted |= fresh.keys()
        found.append(sum(layout.elements_on_shard(name, shape.numel(), shard) for name, shape in fresh.items()))
    return tuple(found)


def _styles_by_pattern(
    modules: Mapping[str, tuple[nn.Module, tuple[nn.Module, ...]]], styles: Mapping[str, str]
) -> dict[str, ShardingStyle]:
    """The styles that the job gives. Raises `PlanError` for a pattern that matches no module."""
    found: dict[str, ShardingStyle] = {}
    for pattern, text in styles.items():
        style = parse_style(text)
        hits = [
            name
            for name, (module, _) in modules.items()
            if any(fnmatch.fnmatchcase(each, pattern) for each in _names_in_patterns(name, module))
        ]
        if not hits:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.3) or list(modules)[:3]
            raise PlanError(
                f"the pattern {pattern!r} of plan.styles matches no layer (nearest: {', '.join(near)})",
                cure="write names of modules as they stand in checkpoints, without .weight; * matches anything",
            )
        for name in hits:
            found.setdefault(name, style)
    return found


def _styles_of_model(
    graph: Graph, planned: Mapping[str, ShardingStyle], given: Mapping[str, ShardingStyle]
) -> dict[str, ShardingStyle]:
    """The styles that nobody has given: those of the model's own plan, and, where that says nothing, the inferred ones."""
    places = {name.rpartition(".")[0] for name, style in planned.items() if not isinstance(style, WholeStyle)}
    found = {
        intern(name): style
        for name, style in infer_styles(graph).items()
        if name not in given and name.rpartition(".")[0] not in places
    }
    return found | dict(planned)


def _names_in_patterns(name: str, module: nn.Module) -> Iterator[str]:
    """The names by which patterns find a module: its own, those of its parameters, and, of a later use, those of the first."""
    for each in (name, name.partition(LATER_USE)[0]):
        yield each
        yield from (parameter_of(each, key) for key, parameter in module._parameters.items() if parameter is not None)


def _without_unequal_ties(
    graph: Graph, inferred: Mapping[str, ShardingStyle], given: Mapping[str, ShardingStyle]
) -> dict[str, ShardingStyle]:
    """The inferred styles, but for a tie either all of its names have the same one or none has any."""
    kept = dict(inferred)
    for names in graph.ties:
        owners = [owner_of(name) for name in names]
        if any(owner in given for owner in owners):
            continue  # what somebody wrote down is judged as it stands
        if len({kept[owner].name if owner in kept else "" for owner in owners}) > 1:
            for owner in owners:
                kept.pop(owner, None)
    return kept


def _check_ties(graph: Graph, layout: TensorParallelLayout) -> None:
    """Raises `PlanError` if the names of one parameter are cut differently."""
    for names in graph.ties:
        for other in names[1:]:
            if layout.cuts.get(other) != layout.cuts.get(names[0]):
                first, second = (layout.styles.get(owner_of(name), WholeStyle.name) for name in (names[0], other))
                raise PlanError(
                    f"the tie {names[0]} = {other} is cut by unequal styles: {first} and {second}",
                    cure="a tie is one parameter: give both layers the same style (vocabulary, or whole)",
                )
