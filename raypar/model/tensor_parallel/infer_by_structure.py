"""Styles of models whose names say nothing: by what their layers compute.

Each layer of a captured model runs once on meta tensors (`record_layer`); linear layers that can be cut together are found in
the record (`recognise_groups`), and only what then runs on parts of values is used (`prove_styles`). The same styles are found
under every number of shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from raypar.errors import ModelError, RayparError, error_message
from raypar.model.capture.module_graph import first_parameter_dtype, meta_inputs_of_layers
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import build_on_meta, convert_module_dtype, shared_skeleton
from raypar.model.random_state import preserve_random_state
from raypar.model.tensor_parallel.layer_record import LayerRecord, record_layer
from raypar.model.tensor_parallel.prove_styles import find_why_styles_fail
from raypar.model.tensor_parallel.recognise_groups import Styles, recognise_groups
from raypar.model.tensor_parallel.styles.style import ShardingStyle
from raypar.model.tensor_parallel.styles.vocabulary import VocabularyStyle
from raypar.model.without_dynamo import meta_operations_without_dynamo
from raypar.plan.stage_connections import owner_of
from raypar.user_code_errors import USER_CODE_ERRORS, reraise_ctrl_c

SHARD_COUNTS = (2, 3)
"""Numbers of shards with which inferred styles are tried: one that divides most numbers of heads, and one that does not."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What the layers of a model are, by what they compute."""

    groups: tuple[Mapping[str, ShardingStyle], ...] = ()
    """Qualified module name -> style, of modules that are cut together."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Qualified module name -> why a group that it is in stays whole."""


def with_structure(
    graph: Graph, named: Mapping[str, ShardingStyle], given: Mapping[str, ShardingStyle]
) -> dict[str, ShardingStyle]:
    """The styles `named`, which names and the model's own plan say, and those of layers that they say nothing about.

    A model of which names find any layer is cut as they say: its bits stay those of earlier versions. Where a layer does not run
    so (an adapter around some of its modules), and in models that no name knows, the structure decides. `given`: the job's
    styles; no group has some of its modules cut otherwise.
    """
    unproved = _layers_not_as_named(graph, {**named, **given})
    layers = _layer_of_modules(graph)
    kept = {name: style for name, style in named.items() if layers.get(name) not in unproved}
    known = any(not isinstance(style, VocabularyStyle) for style in kept.values())
    structure = structure_of(graph, only=unproved if known else None)
    found = dict(kept)
    for group in _groups_with_equal_ties(graph, structure.groups):
        if not any(name in given or name in found for name in group):
            found |= group
    for name, style in named.items():  # of what the structure says nothing, names are kept, and the check before a run judges
        if not any(layers.get(other) == layers.get(name) for other in found.keys() - kept.keys()):
            found.setdefault(name, style)
    return found


def structure_of(graph: Graph, *, only: frozenset[str] | None = None) -> Structure:
    """The groups that can be cut, of the layers `only` (None: of all); computed once for a graph. Empty for models that are
    not captured."""
    kept = vars(graph).setdefault("_structure", {})  # beside the fields, which alone decide whether two graphs are equal
    if only not in kept:
        kept[only] = _find_structure(graph, only)
    found: Structure = kept[only]
    return found


def _find_structure(graph: Graph, only: frozenset[str] | None) -> Structure:
    inputs = meta_inputs_of_layers(graph) if only is None or only else {}
    dtype = first_parameter_dtype(graph)
    answers: dict[object, _Answer] = {}
    groups: list[Mapping[str, ShardingStyle]] = []
    refused: dict[str, str] = {}
    for index, layer in enumerate(graph.layers):
        if layer.name not in inputs or (only is not None and layer.name not in only):
            continue
        record = _record(graph, index, inputs[layer.name], dtype)
        if record is None:
            continue
        places = _places(record)
        key = _key_of(record, places, inputs[layer.name])
        if key not in answers:
            answers[key] = _groups_of_layer(graph, index, record, inputs[layer.name], dtype).at(places)
        paths = list(places)
        groups += [
            {layer.qualify(paths[place]): style for place, style in group.items()} for group in answers[key].groups
        ]
        refused |= {layer.qualify(paths[place]): why for place, why in answers[key].refused.items()}
    return Structure(tuple(groups), refused)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was found in a layer: of modules by their number in the record, so that equal layers have equal answers."""

    groups: tuple[Mapping[int, ShardingStyle], ...]
    refused: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class _LayerGroups:
    """What was found in a layer: of modules by their path."""

    groups: tuple[Styles, ...]
    refused: Mapping[str, str]

    def at(self, places: Mapping[str, int]) -> _Answer:
        """The same by the modules' numbers."""
        return _Answer(
            tuple({places[path]: style for path, style in group.items()} for group in self.groups),
            {places[path]: why for path, why in self.refused.items()},
        )


def _record(graph: Graph, index: int, inputs: Sequence[Tensor], dtype: torch.dtype | None) -> LayerRecord | None:
    """The record of a layer; None if it does not run without numbers."""
    with torch.enable_grad(), meta_operations_without_dynamo(), torch.device("meta"), preserve_random_state():
        made = build_on_meta(graph.layers[index])
        try:
            return record_layer(made if dtype is None else convert_module_dtype(made, dtype), inputs)[0]
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            return None


def _places(record: LayerRecord) -> dict[str, int]:
    """Path of a module -> its number, in the order in which modules were first called."""
    paths = dict.fromkeys(call.module for call in record.calls if call.module is not None)
    return {path: place for place, path in enumerate(paths)}


def _key_of(record: LayerRecord, places: Mapping[str, int], inputs: Sequence[Tensor]) -> object:
    """What layers have in common that compute the same."""
    calls = tuple(
        (None if c.module is None else places[c.module], c.function, c.inputs, c.outputs, c.arguments) for c in record.calls
    )
    given = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in inputs)
    return calls, tuple(record.shapes.values()), record.outputs, given


def _groups_of_layer(
    graph: Graph, index: int, record: LayerRecord, inputs: Sequence[Tensor], dtype: torch.dtype | None
) -> _LayerGroups:
    """The groups of one layer of which a reading was proved; why others were not."""
    layer = graph.layers[index]
    modules: dict[str, nn.Module] = dict(shared_skeleton(layer).named_modules())
    taken: set[str] = set()
    groups: list[Styles] = []
    refused: dict[str, str] = {}
    for readings in recognise_groups(record, modules):
        why: RayparError | None = None
        for styles in readings:
            if taken & styles.keys():
                break
            qualified = {layer.qualify(path): style for path, style in styles.items()}
            try:
                failed = find_why_styles_fail(graph, index, qualified, inputs, dtype, SHARD_COUNTS)
            except USER_CODE_ERRORS as error:
                reraise_ctrl_c(error)
                failed = ModelError(f"its code does not run on a part of a value ({error_message(error)})", cure="")
            if failed is None:
                groups.append(styles)
                taken |= styles.keys()
                why = None
                break
            why = why or failed
        if why is not None and readings:
            refused |= {path: why.what for path in readings[0] if path not in refused}
    return _LayerGroups(tuple(groups), {path: why for path, why in refused.items() if path not in taken})


def _layers_not_as_named(graph: Graph, styles: Mapping[str, ShardingStyle]) -> frozenset[str]:
    """Layers of a captured model that do not run with these styles."""
    by_layer: dict[str, dict[str, ShardingStyle]] = {}
    layers = _layer_of_modules(graph)
    for name, style in styles.items():
        if name in layers:
            by_layer.setdefault(layers[name], {})[name] = style
    inputs, dtype = (meta_inputs_of_layers(graph), first_parameter_dtype(graph)) if by_layer else ({}, None)
    found = set()
    answers: dict[object, bool] = {}
    for index, layer in enumerate(graph.layers):
        if layer.name not in inputs or layer.name not in by_layer:
            continue
        key = _likeness(graph, index, by_layer[layer.name], inputs[layer.name])
        if key not in answers:
            try:
                failed = find_why_styles_fail(graph, index, by_layer[layer.name], inputs[layer.name], dtype, SHARD_COUNTS[:1])
            except USER_CODE_ERRORS as error:
                reraise_ctrl_c(error)
                failed = None
            answers[key] = failed is not None
        if answers[key]:
            found.add(layer.name)
    return frozenset(found)


def _likeness(graph: Graph, index: int, styles: Mapping[str, ShardingStyle], inputs: Sequence[Tensor]) -> object:
    """What layers have in common that are made alike and have the same styles."""
    layer = graph.layers[index]
    parts = tuple(
        (type(module), str(styles.get(layer.qualify(path), "")), tuple((k, p.shape) for k, p in module._parameters.items() if p is not None))
        for path, module in shared_skeleton(layer).named_modules()
    )
    return parts, tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in inputs)


def _layer_of_modules(graph: Graph) -> dict[str, str]:
    """Qualified name of a module -> the layer that it is in."""
    return {layer.qualify(path): layer.name for layer in graph.layers for path, _ in shared_skeleton(layer).named_modules()}


def _groups_with_equal_ties(
    graph: Graph, groups: Sequence[Mapping[str, ShardingStyle]]
) -> list[Mapping[str, ShardingStyle]]:
    """The groups without those that have one name of a parameter, and not the others in the same style."""
    left = list(groups)
    while True:
        styles = {name: style for group in left for name, style in group.items()}
        odd = {
            owner
            for names in graph.ties
            for owner in map(owner_of, names)
            if len({styles.get(other) for other in map(owner_of, names)}) > 1
        }
        kept = [group for group in left if not odd & group.keys()]
        if len(kept) == len(left):
            return kept
        left = kept
