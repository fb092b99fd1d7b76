"""Styles: how a layer is cut over shards; the styles a model gets when a plan names none."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import nn

from raypar.errors import PlanError
from raypar.model.build import outline_of, parameter_shapes, skeleton
from raypar.model.graph import Graph
from raypar.plan import Outline
from raypar.plan.shard_ranges import (
    Cut,
    IndexRanges,
    count_indices,
    even_range,
    merge_ranges,
    repeat_ranges,
    scale_ranges,
    shift_ranges,
)

KINDS = {
    "column": "Linear: cut by output features (column/2: two equal parts, as gate and up in one matrix)",
    "row": "Linear: cut by input features; the shards' contributions are summed",
    "heads": "Linear that makes queries: cut by heads (heads:8 when the module does not say how many)",
    "kv-heads": "Linear that makes keys or values: cut by heads (kv-heads:8/2 for 8 query heads and 2 key heads)",
    "qkv": "Linear that makes [queries, keys, values]: each cut by heads (qkv:8 or qkv:8/2)",
    "qkv-interleaved": "Linear that makes [query, key, value] head after head: cut by heads",
    "heads-row": "Linear that reads attention's output: cut by input features, by heads",
    "vocabulary": "Embedding or output layer: cut by vocabulary",
    "gathered": "Linear: cut by output features, which are then gathered",
    "whole": "any layer: not cut",
}
"""What may stand in `plan.styles`."""

_BY_HEADS = ("heads", "kv-heads", "qkv", "qkv-interleaved", "heads-row")
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")


@dataclass(frozen=True, slots=True)
class ShardingStyle:
    """`heads` query heads and `kv_heads` key heads where the kind goes by heads (0: not known yet); `parts` of a column."""

    kind: str
    heads: int = 0
    kv_heads: int = 0
    parts: int = 1

    def __str__(self) -> str:
        if self.kind in _BY_HEADS and self.heads:
            return f"{self.kind}:{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads not in (0, self.heads) else "")
        return f"{self.kind}/{self.parts}" if self.parts > 1 else self.kind


def parse_style(text: str) -> ShardingStyle:
    """`kind`, `kind:heads`, `kind:heads/key heads` or `column/parts`. Raises `PlanError`."""
    kind, colon, numbers = text.partition(":")
    try:
        if colon:
            heads, _, kv = numbers.partition("/")
            if kind in _BY_HEADS and int(heads) > 0 and (not kv or int(kv) > 0):
                return ShardingStyle(kind, int(heads), int(kv) if kv else int(heads))
        else:
            kind, slash, parts = text.partition("/")
            if (kind in KINDS and not slash) or (kind == "column" and int(parts) > 0):
                return ShardingStyle(kind, parts=int(parts) if slash else 1)
    except ValueError:
        pass
    near = difflib.get_close_matches(text.partition(":")[0], KINDS, n=1)
    raise PlanError(
        f"{text!r} is no style" + (f" (nearest: {near[0]})" if near else ""),
        cure=f"use one of {', '.join(KINDS)}; heads:8, kv-heads:8/2, qkv:8/2 say how many heads, column/2 how many parts",
    )


@dataclass(frozen=True)
class ShardLayout:
    """How the model is cut over `shards`: `styles` by module name, `cuts` by parameter name, canonical and others of a tie.
    What is in neither is whole on every shard. `shares`: column layers that read one value together with others.

    One shard has cuts too: they number a parameter's elements alike under every number of shards (`slices`).
    """

    shards: int
    styles: Mapping[str, ShardingStyle]
    cuts: Mapping[str, Cut]
    shares: frozenset[str] = frozenset()


def layout_of(graph: Graph, shards: int, styles: Mapping[str, str] | None = None, *, infer: bool = True) -> ShardLayout:
    """`styles`: pattern of module or parameter names (`block*.up`, `*.up.weight`) -> style; the first that matches counts.

    What no pattern matches gets what `inferred` finds. Raises `PlanError` for a pattern that matches nothing, a style that
    does not fit, more shards than there is to share out, and ties whose names are cut differently.
    """
    modules = {name: (module, parents) for name, module, parents in _modules(graph)}
    given = _matched(modules, styles or {})
    found = dict(given)
    if infer:
        guessed = {name: style for name, style in infer_styles(graph).items() if name not in given}
        found |= _without_unequal_ties(graph, guessed, found)
    found = {name: _with_heads(name, style, *modules[name]) for name, style in found.items() if style.kind != "whole"}
    cuts: dict[str, Cut] = {}
    for name, style in found.items():
        cuts |= cuts_of(name, modules[name][0], style, shards)
    _check_ties(graph, found, cuts)
    return ShardLayout(shards, found, cuts, _sharing(found))


def outline_of_shards(graph: Graph, shards: Iterable[int], styles: Mapping[str, str]) -> Outline:
    """The graph without the model, and how it is cut over these numbers of shards."""
    return replace(outline_of(graph), cuts={count: layout_of(graph, count, styles).cuts for count in shards if count > 1})


def _modules(graph: Graph) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """(qualified name, module that owns parameters, the modules it is in, innermost first)."""
    for layer in graph.layers:
        root = skeleton(layer)
        for path, module in root.named_modules():
            if any(p is not None for p in module._parameters.values()):
                steps = path.split(".") if path else []
                parents = tuple(root.get_submodule(".".join(steps[:i])) for i in reversed(range(len(steps))))
                yield f"{layer.name}.{path}" if path else layer.name, module, parents


def _matched(modules: Mapping[str, tuple[nn.Module, Any]], styles: Mapping[str, str]) -> dict[str, ShardingStyle]:
    found: dict[str, ShardingStyle] = {}
    for pattern, text in styles.items():
        style = parse_style(text)
        hits = [
            name
            for name, (module, _) in modules.items()
            if fnmatch.fnmatchcase(name, pattern)
            or any(fnmatch.fnmatchcase(f"{name}.{key}", pattern) for key, p in module._parameters.items() if p is not None)
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


# -- defaults ----------------------------------------------------------------------------------------------------------

_COLUMNS = {"up", "up_proj", "gate", "gate_proj", "fc1", "c_fc", "w1", "w3", "lin1", "linear1", "dense_h_to_4h", "fc_in"}
_ROWS = {"down", "down_proj", "fc2", "w2", "lin2", "linear2", "dense_4h_to_h", "fc_out", "c_proj"}
_FUSED = {"qkv": "qkv", "qkv_proj": "qkv", "Wqkv": "qkv", "c_attn": "qkv", "query_key_value": "qkv-interleaved"}
_SEPARATE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"), ("q", "k", "v"))
_OUTPUTS = ("o_proj", "out_proj", "project", "proj", "wo", "c_proj", "out", "o", "dense")
_TOKENS = {"token", "tokens", "tok_embeddings", "wte", "embed_tokens", "word_embeddings", "token_embedding", "tok_emb"}
_LOGITS = {"logits", "lm_head", "output", "unembed", "embed_out", "head"}


def _linear(module: object) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and _plain(module)


def _plain(module: nn.Module) -> bool:
    """Has nothing of its own that the layer in its place would lack: hooks, a forward of this one object, a computed weight."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return module._parameters.get("weight") is not None and "forward" not in vars(module) and not any(hooks)


def _embedding(module: object) -> bool:
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward and _plain(module)


def infer_styles(graph: Graph) -> dict[str, ShardingStyle]:
    """Styles by common names, where a whole pattern is there: column layers with the row layer that takes their features,
    q, k and v with attention's output and a number of heads, an embedding and an output layer of one vocabulary."""
    found: dict[str, ShardingStyle] = {}
    vocabularies: set[int] = set()
    for layer in graph.layers:
        root = skeleton(layer)
        for path, parent in root.named_modules():
            prefix = f"{layer.name}.{path}." if path else f"{layer.name}."
            children = dict(parent.named_children())
            steps = path.split(".") if path else []
            around = [parent, *(root.get_submodule(".".join(steps[:i])) for i in reversed(range(len(steps))))]
            if type(parent).__module__.startswith("torch.nn.") and not isinstance(parent, (nn.Sequential, nn.ModuleDict)):
                continue  # nn.TransformerEncoderLayer and nn.MultiheadAttention read their layers' weights themselves
            taken = _attention(children, around)
            taken |= _mlp({name: child for name, child in children.items() if name not in taken})
            found |= {prefix + name: style for name, style in taken.items()}
            for name, child in children.items():
                if name in _TOKENS and _embedding(child) and not child.scale_grad_by_freq:
                    found[prefix + name] = ShardingStyle("vocabulary")
                    vocabularies.add(child.num_embeddings)
    layer = graph.layers[-1]
    for path, module in skeleton(layer).named_modules():
        name = f"{layer.name}.{path}" if path else layer.name
        if name.rpartition(".")[2] in _LOGITS and _linear(module) and module.out_features in vocabularies:
            found[name] = ShardingStyle("vocabulary")
    return found


def _attention(children: Mapping[str, nn.Module], around: Sequence[nn.Module]) -> dict[str, ShardingStyle]:
    heads, kv = _attribute(around, _HEADS), _attribute(around, _KV_HEADS)
    if not heads:
        return {}
    kv = kv or heads
    found: dict[str, ShardingStyle] = {}
    for name, kind in _FUSED.items():
        if kind == "qkv-interleaved" and kv != heads:
            continue
        if _linear(children.get(name)) and children[name].out_features % (heads + 2 * kv) == 0:  # type: ignore[operator]
            found = {name: ShardingStyle(kind, heads, kv)}
            features = children[name].out_features // (heads + 2 * kv) * heads  # type: ignore[operator]
            break
    for q, k, v in _SEPARATE:
        if not found and all(_linear(children.get(name)) for name in (q, k, v)):
            features = children[q].out_features  # type: ignore[assignment]
            if features % heads or children[k].out_features % kv or children[v].out_features % kv:  # type: ignore[operator]
                continue
            found = {
                q: ShardingStyle("heads", heads, kv),
                k: ShardingStyle("kv-heads", heads, kv),
                v: ShardingStyle("kv-heads", heads, kv),
            }
    if not found:
        return {}
    for name in _OUTPUTS:
        if name not in found and _linear(children.get(name)) and children[name].in_features == features:
            return {**found, name: ShardingStyle("heads-row", heads, kv)}
    return {}


def _mlp(children: Mapping[str, nn.Module]) -> dict[str, ShardingStyle]:
    columns = {name: child for name, child in children.items() if name in _COLUMNS and _linear(child)}
    rows = {name: child for name, child in children.items() if name in _ROWS and _linear(child)}
    if len(rows) != 1 or not columns:
        fused = children.get("gate_up_proj")
        if len(rows) == 1 and _linear(fused) and fused.out_features == 2 * next(iter(rows.values())).in_features:  # type: ignore[union-attr, operator]
            return {"gate_up_proj": ShardingStyle("column", parts=2), next(iter(rows)): ShardingStyle("row")}
        return {}
    (row,) = rows
    if any(child.out_features != rows[row].in_features for child in columns.values()):
        return {}
    return {**{name: ShardingStyle("column") for name in columns}, row: ShardingStyle("row")}


def _attribute(around: Sequence[nn.Module], names: Sequence[str]) -> int:
    for module in around:
        for owner in (module, getattr(module, "config", None)):
            for name in names:
                value = getattr(owner, name, None)
                if type(value) is int and value > 0:
                    return value
    return 0


def _without_unequal_ties(
    graph: Graph, guessed: dict[str, ShardingStyle], given: Mapping[str, ShardingStyle]
) -> dict[str, ShardingStyle]:
    """Guesses for a tie hold for all of its names or for none."""
    kept = dict(guessed)
    for names in graph.ties:
        owners = [name.rpartition(".")[0] for name in names]
        if any(o in given for o in owners):
            continue  # what somebody wrote down is judged as it stands
        if len({kept[o].kind if o in kept else "" for o in owners}) > 1:
            for owner in owners:
                kept.pop(owner, None)
    return kept


# -- cuts --------------------------------------------------------------------------------------------------------------


def _with_heads(name: str, style: ShardingStyle, module: nn.Module, parents: Sequence[nn.Module]) -> ShardingStyle:
    """The style with its numbers of heads. Raises `PlanError` when the kind does not fit the module."""
    fits = _linear(module) or (style.kind == "vocabulary" and _embedding(module))
    if not fits:
        kind, own = type(module).__name__, isinstance(module, (nn.Linear, nn.Embedding))
        raise PlanError(
            f"the style {style} does not fit {name}, a {kind}" + " with a forward of its own, hooks or a computed weight" * own,
            cure="vocabulary is for nn.Embedding and nn.Linear, whole for any layer, all others for nn.Linear "
            "(subclasses that keep its forward)",
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        raise PlanError(
            f"{name} scales by what is in all of its vocabulary (max_norm, scale_grad_by_freq)", cure="give it the style whole"
        )
    if style.kind not in _BY_HEADS or style.heads:
        return style
    heads = _attribute(parents, _HEADS)
    if not heads:
        raise PlanError(
            f"the style {style} of {name} goes by heads, and the module it is in does not say how many there are "
            f"(attributes {', '.join(_HEADS)})",
            cure=f"write {style.kind}:8, or {style.kind}:8/2 for 2 key heads",
        )
    return ShardingStyle(style.kind, heads, _attribute(parents, _KV_HEADS) or heads)


def cuts_of(name: str, module: nn.Module, style: ShardingStyle, shards: int) -> dict[str, Cut]:
    """Parameter name -> cut, of one layer. Raises `PlanError` with the numbers that do not fit."""
    if isinstance(module, nn.Embedding):
        held = _shared_out(name, "rows of vocabulary", module.num_embeddings, shards)
        return {f"{name}.weight": Cut(0, module.num_embeddings, held)}
    assert isinstance(module, nn.Linear)
    if style.kind in ("row", "heads-row"):
        if style.kind == "row":
            held = _shared_out(name, "input features", module.in_features, shards)
        else:
            unit = _unit(name, style, module.in_features, style.heads, "input")
            held = tuple(scale_ranges(spans, unit) for spans in _heads_of(name, style, shards))
        return {f"{name}.weight": Cut(1, module.in_features, held)}
    out = module.out_features
    if style.kind in ("column", "gathered", "vocabulary"):
        part = _unit(name, style, out, style.parts, "output")
        held = tuple(repeat_ranges(s, part, style.parts) for s in _shared_out(name, "output features", part, shards))
    else:
        queries = _heads_of(name, style, shards)
        keys = key_heads(queries, style.heads // style.kv_heads)
        if style.kind == "heads":
            unit = _unit(name, style, out, style.heads, "output")
            held = tuple(scale_ranges(s, unit) for s in queries)
        elif style.kind == "kv-heads":
            unit = _unit(name, style, out, style.kv_heads, "output")
            held = tuple(scale_ranges(s, unit) for s in keys)
        elif style.kind == "qkv-interleaved":
            if style.kv_heads != style.heads:
                raise PlanError(
                    f"{name} is interleaved with {style.heads} query heads and {style.kv_heads} key heads",
                    cure="qkv-interleaved needs as many key heads as query heads; give it the style whole",
                )
            unit = _unit(name, style, out, style.heads, "output")
            held = tuple(scale_ranges(s, unit) for s in queries)
        else:
            q, kv = style.heads, style.kv_heads
            unit = _unit(name, style, out, q + 2 * kv, "output")
            held = tuple(
                merge_ranges(scale_ranges((*mine, *shift_ranges(own, q), *shift_ranges(own, q + kv)), unit))
                for mine, own in zip(queries, keys, strict=True)
            )
    cut = Cut(0, out, held)
    return {f"{name}.{key}": cut for key, p in module._parameters.items() if p is not None}


def key_heads(queries: Sequence[IndexRanges], group: int) -> tuple[IndexRanges, ...]:
    """Key heads that each shard's query heads need, every key head serving `group` of them; shards may need the same one."""
    return tuple(merge_ranges((a // group, -(-b // group)) for a, b in spans) for spans in queries)


def _heads_of(name: str, style: ShardingStyle, shards: int) -> tuple[IndexRanges, ...]:
    if style.heads % style.kv_heads:
        raise PlanError(
            f"{name}: {style.heads} query heads cannot share {style.kv_heads} key heads evenly",
            cure="the number of query heads is a multiple of that of key heads",
        )
    return _shared_out(name, "heads", style.heads, shards)


def _shared_out(name: str, what: str, total: int, shards: int) -> tuple[IndexRanges, ...]:
    if shards > total:
        raise PlanError(
            f"{name} has {total} {what} for {shards} shards: some would have none",
            cure=f"set plan.shards <= {total}, or give it and the layers it works with the style whole (plan.styles)",
        )
    return even_range(total, shards)


def _unit(name: str, style: ShardingStyle, features: int, parts: int, which: str) -> int:
    if features % parts:
        raise PlanError(
            f"the style {style} does not fit {name}: {features} {which} features are no multiple of {parts}",
            cure="check the numbers of heads or parts in plan.styles",
        )
    return features // parts


def _check_ties(graph: Graph, styles: Mapping[str, ShardingStyle], cuts: Mapping[str, Cut]) -> None:
    for names in graph.ties:
        for other in names[1:]:
            if cuts.get(other) != cuts.get(names[0]):
                kinds = [str(styles.get(n.rpartition(".")[0], ShardingStyle("whole"))) for n in (names[0], other)]
                raise PlanError(
                    f"the tie {names[0]} = {other} is cut by unequal styles: {kinds[0]} and {kinds[1]}",
                    cure="a tie is one parameter: give both layers the same style (vocabulary, or whole)",
                )


def _sharing(styles: Mapping[str, ShardingStyle]) -> frozenset[str]:
    """Column layers that stand beside others in one module: q, k, v; gate and up."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for name, style in styles.items():
        if style.kind in ("heads", "kv-heads", "column", "gathered"):
            groups.setdefault((name.rpartition(".")[0], style.kind in _BY_HEADS), []).append(name)
    return frozenset(name for names in groups.values() if len(names) > 1 for name in names)


def held_elements(graph: Graph, layout: ShardLayout, shard: int, *, ties_once: bool = True) -> tuple[int, ...]:
    """By layer: how many elements of its parameters a shard holds. `ties_once`: at their first use; else in every layer."""
    counted: set[str] = set()
    found = []
    for index in range(len(graph.layers)):
        fresh = {name: shape for name, shape in parameter_shapes(graph, index, index + 1).items() if name not in counted}
        counted |= fresh.keys() if ties_once else set()
        cuts = layout.cuts
        found.append(sum(prod(elements_on_shard(cuts[n], s, shard)) if n in cuts else s.numel() for n, s in fresh.items()))
    return tuple(found)


def elements_on_shard(cut: Cut, shape: Sequence[int], shard: int) -> tuple[int, ...]:
    """The shape of a shard's slice of a parameter of `shape`."""
    return tuple(count_indices(cut.held[shard]) if dim == cut.dim else n for dim, n in enumerate(shape))
