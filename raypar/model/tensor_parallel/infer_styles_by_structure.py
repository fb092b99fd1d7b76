"""Infers sharding styles from what the layers of a captured model compute, where module names do not tell.

Each layer runs once on tensors without values (`record_layers`). Modules that can be cut together are found in that record
(`find_mlps_and_attention`). A group's styles are used only if its layers then run on shards (`find_why_styles_fail`). The
styles do not depend on the number of shards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from raypar.errors import ModelError, RayparError, error_message
from raypar.model.capture.module_graph import recorded_values, runs_of_leaf_units, samples_of
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import parameter_shapes, shared_skeleton
from raypar.model.tensor_parallel.find_mlps_and_attention import (
    Styles,
    find_mlps_and_attention,
    linears_with_one_row_per_sample,
)
from raypar.model.tensor_parallel.record_layer_calls import LayerRecord, record_layers
from raypar.model.tensor_parallel.styles.head_styles import is_plain_attention
from raypar.model.tensor_parallel.styles.linear_styles import GatheredStyle, VocabularyStyle
from raypar.model.tensor_parallel.styles.style import ShardingStyle, is_plain_linear
from raypar.model.tensor_parallel.try_styles import find_why_styles_fail
from raypar.plan.stage_connections import owner_of, parameter_of
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS

SHARD_COUNTS = (2, 3)
"""Numbers of shards with which inferred styles are tried: one that divides most numbers of heads, and one that does not."""
WORTH_GATHERING = 0.01
"""A linear layer with one row for each sample, such as one that modulates a block by a time step, gets the style `gathered` if
it has more than this share of the model's parameters: its output is small."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What was inferred from what the layers of a model compute."""

    groups: tuple[Styles, ...] = ()
    """Qualified module name -> style, of modules that are cut together."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Qualified module name -> why the group that it is in stays whole."""


def add_styles_by_structure(
    graph: Graph, named: Mapping[str, ShardingStyle], given: Mapping[str, ShardingStyle]
) -> dict[str, ShardingStyle]:
    """The styles `named`, found by module names and the model's own plan, with inferred ones where names do not suffice.

    If names find any layer, all layers that run with these styles keep them, so results stay bit-identical to earlier versions.
    The structure decides about layers that do not run so (an adapter around some modules), and about models without known
    names. `given`: the job's styles; a group with a module in it is left to them.
    """
    layers = {layer.qualify(path): layer.name for layer in graph.layers for path, _ in shared_skeleton(layer).named_modules()}
    unproved = _layers_not_as_named(graph, {**named, **given}, layers)
    kept = {name: style for name, style in named.items() if layers.get(name) not in unproved}
    is_known = any(not isinstance(style, VocabularyStyle) for style in kept.values())
    structure = structure_of(graph, only=unproved if is_known else None)
    found = dict(kept)
    for group in _groups_with_equal_ties(graph, structure.groups):
        if not any(name in given or name in found for name in group):
            found |= group
    decided = {layers[name] for name in found.keys() - kept.keys()}
    undecided = {name: style for name, style in named.items() if layers.get(name) not in decided}
    return undecided | found  # styles by name of layers that fail with them, without inferred ones: refused before the run


def structure_of(graph: Graph, *, only: frozenset[str] | None = None) -> Structure:
    """The groups that can be cut, of the layers `only` (None: of all); computed once for a graph. Empty for models that are
    not captured."""
    kept = vars(graph).setdefault("_structure", {})  # beside the fields, which alone decide whether two graphs are equal
    if only not in kept:
        kept[only] = _find_structure(graph, only)
    found: Structure = kept[only]
    return found


def has_inferred_structure(graph: Graph, layout: TensorParallelLayout) -> bool:
    """Whether the layout has styles that the structure decided."""
    found: Iterable[Structure] = vars(graph).get("_structure", {}).values()
    return any(name in layout.styles for structure in found for group in structure.groups for name in group)


def reasons_for_whole(graph: Graph) -> dict[str, str]:
    """Qualified module name -> why the group that it is in stays whole, as far as layouts of the graph have asked."""
    found: Iterable[Structure] = vars(graph).get("_structure", {}).values()
    return {name: why for structure in found for name, why in structure.refused.items()}


def _find_structure(graph: Graph, only: frozenset[str] | None) -> Structure:
    values = recorded_values(graph) if only is None or only else {}
    if not values:
        return Structure()
    groups: list[Styles] = []
    refused: dict[str, str] = {}
    answers: dict[Hashable, _Answer] = {}
    worth = sum(shape.numel() for shape in parameter_shapes(graph).values()) * WORTH_GATHERING
    for first, last in runs_of_leaf_units(graph):
        if only is not None and not any(layer.name in only for layer in graph.layers[first:last]):
            continue
        try:
            record = record_layers(graph, first, last, values)
        except USER_CODE_ERRORS as error:  # its code does not run without numbers
            reraise_ctrl_c(error)
            continue
        modules = _modules_of(graph, first, last)
        names = list(dict.fromkeys(call.module for call in record.calls if call.module is not None))
        key = _key_of(record, {name: _kind(modules[name]) for name in names})
        if key not in answers:
            answers[key] = _groups_of_layers(graph, first, last, record, modules, values, worth).at(names)
        groups += [{names[place]: style for place, style in group.items()} for group in answers[key].groups]
        refused |= {names[place]: why for place, why in answers[key].refused.items()}
    return Structure(tuple(groups), refused)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Groups and refusals of some layers, by each module's place in the record: equal layers have equal answers."""

    groups: tuple[Mapping[int, ShardingStyle], ...]
    refused: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class _Found:
    """Groups and refusals of some layers, by qualified module name."""

    groups: list[Styles]
    refused: Mapping[str, str]

    def at(self, names: list[str]) -> _Answer:
        """The same by each module's place in `names`."""
        places = {name: place for place, name in enumerate(names)}
        return _Answer(
            tuple({places[name]: style for name, style in group.items()} for group in self.groups),
            {places[name]: why for name, why in self.refused.items()},
        )


def _modules_of(graph: Graph, first: int, last: int) -> dict[str, nn.Module]:
    """The modules of layers [first, last) by qualified name."""
    layers = graph.layers[first:last]
    return {layer.qualify(path): module for layer in layers for path, module in shared_skeleton(layer).named_modules()}


_Kind = tuple[type[nn.Module], int | None]
"""(class of a module, its number of heads)"""


def _kind(module: nn.Module) -> _Kind:
    return type(module), getattr(module, "num_heads", None)


def _key_of(record: LayerRecord, kinds: Mapping[str, _Kind]) -> Hashable:
    """A key that is equal for layers that compute the same."""
    places = {name: place for place, name in enumerate(kinds)}
    calls = tuple(
        (None if c.module is None else places[c.module], c.function, c.inputs, c.outputs, c.arguments) for c in record.calls
    )
    return calls, tuple(kinds.values()), tuple(record.shapes.values()), record.given, record.outputs


def _groups_of_layers(
    graph: Graph,
    first: int,
    last: int,
    record: LayerRecord,
    modules: Mapping[str, nn.Module],
    values: Mapping[str, Tensor],
    worth: float,
) -> _Found:
    """The groups of layers [first, last) whose styles run on shards, and why the other groups do not."""
    few_rows = linears_with_one_row_per_sample(record, modules, samples_of(graph))
    large = [name for name in few_rows if modules[name].weight.numel() > worth]  # type: ignore[operator]
    proposed = find_mlps_and_attention(record, modules) + [[{name: GatheredStyle()}] for name in large]

    def why_not(styles: Styles) -> RayparError | None:
        try:
            return find_why_styles_fail(graph, first, last, styles, values, SHARD_COUNTS)
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            return ModelError(f"its code does not run on a part of a value ({error_message(error)})", cure="")

    def first_readings() -> list[Styles]:
        found: list[Styles] = []
        for readings in proposed:
            taken = set().union(*found)
            if readings and not taken & readings[0].keys() and not _are_read_by_encoder(readings[0], modules, taken):
                found.append(readings[0])
        return found

    likely = first_readings()
    if likely and why_not({name: style for styles in likely for name, style in styles.items()}) is None:
        return _Found(likely, {})
    groups: list[Styles] = []
    refused: dict[str, str] = {}
    for readings in proposed:
        taken = set().union(*groups)
        possible = [each for each in readings if not taken & each.keys() and not _are_read_by_encoder(each, modules, taken)]
        whys = []
        for styles in possible:
            why = why_not(styles)
            if why is None:
                groups.append(styles)
                break
            whys.append(why)
        else:
            refused |= {name: whys[0].what for name in (possible[0] if possible else ()) if name not in refused}
    taken = set().union(*groups)
    return _Found(groups, {name: why for name, why in refused.items() if name not in taken})


def _are_read_by_encoder(styles: Styles, modules: Mapping[str, nn.Module], taken: set[str]) -> bool:
    """Whether an `nn.TransformerEncoderLayer` would, in evaluation, compute with the weights of these modules itself.

    It does unless its attention is cut, which tells it not to.
    """
    for name in styles:
        owner = owner_of(name)
        inside = not is_plain_attention(modules[name]) and isinstance(modules.get(owner), nn.TransformerEncoderLayer)
        if inside and parameter_of(owner, "self_attn") not in taken:
            return True
    return False


def _layers_not_as_named(graph: Graph, styles: Mapping[str, ShardingStyle], layers: Mapping[str, str]) -> frozenset[str]:
    """Names of layers that do not run with these styles. `layers`: module -> its layer."""
    by_layer: dict[str, dict[str, ShardingStyle]] = {}
    for name, style in styles.items():
        if name in layers:
            by_layer.setdefault(layers[name], {})[name] = style
    values = recorded_values(graph) if by_layer else {}
    found = set()
    answers: dict[Hashable, bool] = {}
    for index, layer in enumerate(graph.layers):
        own, modules = by_layer.get(layer.name, {}), list(shared_skeleton(layer).named_modules())
        linears = [path for path, module in modules if is_plain_linear(module)]
        if not own or all(layer.qualify(path) in own for path in linears) or not all(name in values for name in layer.inputs):
            continue  # names know all of it
        parts = tuple(
            (type(m), str(own.get(layer.qualify(path), "")), *((k, p.shape) for k, p in m._parameters.items() if p is not None))
            for path, m in modules
        )
        key = parts, tuple((values[name].shape, values[name].dtype) for name in layer.inputs)
        if key not in answers:
            try:
                answers[key] = find_why_styles_fail(graph, index, index + 1, own, values, SHARD_COUNTS[:1]) is not None
            except USER_CODE_ERRORS as error:  # its code does not run without numbers
                reraise_ctrl_c(error)
                answers[key] = False
        if answers[key]:
            found.add(layer.name)
    return frozenset(found)


def _groups_with_equal_ties(graph: Graph, groups: tuple[Styles, ...]) -> list[Styles]:
    """The groups, without those that would give the modules of a tied parameter unequal styles."""
    left = list(groups)
    while True:
        styles = {name: style for group in left for name, style in group.items()}
        owners = [[owner_of(name) for name in names] for names in graph.ties]
        odd = {owner for each in owners if len({styles.get(other) for other in each}) > 1 for owner in each}
        kept = [group for group in left if not odd & group.keys()]
        if len(kept) == len(left):
            return kept
        left = kept
