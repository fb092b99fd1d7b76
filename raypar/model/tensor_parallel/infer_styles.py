"""Styles that a model gets without being told, found by the names that layers commonly have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from raypar.model.graph import Graph
from raypar.model.layer_skeletons import shared_skeleton
from raypar.model.tensor_parallel.styles.head_styles import (
    HeadsRowStyle,
    HeadsStyle,
    HeadStyle,
    KvHeadsStyle,
    QkvInterleavedStyle,
    QkvStyle,
    find_head_counts,
)
from raypar.model.tensor_parallel.styles.linear_styles import ColumnStyle, RowStyle, VocabularyStyle
from raypar.model.tensor_parallel.styles.style import ShardingStyle, is_plain_embedding, is_plain_linear
from raypar.model.transposed_linear import linear_features

_COLUMNS = {"up", "up_proj", "gate", "gate_proj", "fc1", "c_fc", "w1", "w3", "lin1", "linear1", "dense_h_to_4h", "fc_in"}
_COLUMNS |= {"wi", "wi_0", "wi_1", "ffn", "intermediate.dense"}
_ROWS = {"down", "down_proj", "fc2", "w2", "lin2", "linear2", "dense_4h_to_h", "fc_out", "c_proj"}
_ROWS |= {"wo", "ffn_output", "output.dense"}
_FUSED: dict[str, type[HeadStyle]] = {
    "qkv": QkvStyle,
    "qkv_proj": QkvStyle,
    "Wqkv": QkvStyle,
    "c_attn": QkvStyle,
    "query_key_value": QkvInterleavedStyle,
}
_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("self.query", "self.key", "self.value"),
    ("attention.query", "attention.key", "attention.value"),
)
_OUTPUTS = ("o_proj", "out_proj", "project", "proj", "wo", "c_proj", "out", "o", "dense", "out_lin", "output.dense")
_NESTED = ("self", "attention", "intermediate", "output")
"""Modules of one layer each, or of three, in which BERT and its like have what belongs together: `output.dense`."""
_TOKENS = {"token", "tokens", "tok_embeddings", "wte", "embed_tokens", "word_embeddings", "token_embedding", "tok_emb"}
_LOGITS = {"logits", "lm_head", "output", "unembed", "embed_out", "head", "decoder", "proj_out"}


def infer_styles(graph: Graph) -> dict[str, ShardingStyle]:
    """Qualified module name -> style, where a whole pattern of common names is there.

    The patterns: column layers with the row layer that reads their features; q, k and v with the layer that reads attention's
    output and a known number of heads; an embedding, and an output layer with the same vocabulary.
    """
    found: dict[str, ShardingStyle] = {}
    vocabularies: set[int] = set()
    for layer in graph.layers:
        root = shared_skeleton(layer)
        for path, parent in root.named_modules():
            children = _children(parent)
            steps = path.split(".") if path else []
            around = [parent, *(root.get_submodule(".".join(steps[:i])) for i in reversed(range(len(steps))))]
            if type(parent).__module__.startswith("torch.nn.") and not isinstance(parent, (nn.Sequential, nn.ModuleDict)):
                continue  # nn.TransformerEncoderLayer and nn.MultiheadAttention read their layers' weights themselves
            styles = _attention_styles(children, around)
            styles |= _mlp_styles({name: child for name, child in children.items() if name not in styles})
            names = {name: layer.qualify(f"{path}.{name}" if path else name) for name in children}
            found |= {names[name]: style for name, style in styles.items()}
            for name, child in children.items():
                if name in _TOKENS and is_plain_embedding(child) and not child.scale_grad_by_freq:
                    found[names[name]] = VocabularyStyle()
                    vocabularies.add(int(child.num_embeddings))  # type: ignore[arg-type]
    layer = graph.layers[-1]
    for path, module in shared_skeleton(layer).named_modules():
        name = layer.qualify(path)
        if name.rpartition(".")[2] in _LOGITS and is_plain_linear(module) and linear_features(module)[1] in vocabularies:
            found[name] = VocabularyStyle()
    return found


def _children(parent: nn.Module) -> dict[str, nn.Module]:
    """The modules in a module by name, and those in the ones among them that `_NESTED` names."""
    found = dict(parent.named_children())
    for name in _NESTED:
        if name in found:
            found |= {f"{name}.{own}": child for own, child in found[name].named_children()}
    return found


def _attention_styles(children: Mapping[str, nn.Module], around: Sequence[nn.Module]) -> dict[str, ShardingStyle]:
    """Styles of the layers of one attention module; empty unless it has them all. `around`: the modules it is in."""
    inside = [child for name, child in children.items() if name in _NESTED]  # of which one may say how many heads it has
    heads, kv_heads = find_head_counts([around[0], *inside, *around[1:]])
    if not heads:
        return {}
    if kv_heads != heads:
        falcon = _falcon_styles(children, around[0], heads, kv_heads)
        if falcon:
            return falcon
    found: dict[str, ShardingStyle] = {}
    features = 0
    for name, style in _FUSED.items():
        if style is QkvInterleavedStyle and kv_heads != heads:
            continue
        child = children.get(name)
        if child is not None and is_plain_linear(child) and linear_features(child)[1] % (heads + 2 * kv_heads) == 0:
            found = {name: style(heads, kv_heads)}
            features = linear_features(child)[1] // (heads + 2 * kv_heads) * heads
            break
    for names in _SEPARATE:
        linears = [child for child in map(children.get, names) if child is not None and is_plain_linear(child)]
        if found or len(linears) < 3:
            continue
        sizes = [linear_features(linear)[1] for linear in linears]
        if sizes[0] % heads or sizes[1] % kv_heads or sizes[2] % kv_heads:
            continue
        features = sizes[0]
        of_keys = KvHeadsStyle(heads, kv_heads)
        found = dict(zip(names, (HeadsStyle(heads, kv_heads), of_keys, of_keys), strict=True))
    if not found:
        return {}
    for name in _OUTPUTS:
        child = children.get(name)
        if name not in found and child is not None and is_plain_linear(child) and linear_features(child)[0] == features:
            return {**found, name: HeadsRowStyle(heads, kv_heads)}
    return {}


def _falcon_styles(
    children: Mapping[str, nn.Module], attention: nn.Module, heads: int, kv_heads: int
) -> dict[str, ShardingStyle]:
    """Styles of Falcon's attention with fewer key heads: its fused layer makes, for each key head in turn, the queries of its
    group, the key and the value; with a single one, all queries, the key and the value. Empty for other modules."""
    fused, out, grouped = (
        children.get("query_key_value"),
        children.get("dense"),
        getattr(attention, "new_decoder_architecture", None),
    )
    if grouped is None or fused is None or out is None or not (is_plain_linear(fused) and is_plain_linear(out)):
        return {}
    if linear_features(fused)[1] * heads != linear_features(out)[0] * (heads + 2 * kv_heads) or heads % kv_heads:
        return {}
    if grouped:
        return {"query_key_value": HeadsStyle(kv_heads, kv_heads), "dense": HeadsRowStyle(kv_heads, kv_heads)}
    return {"query_key_value": QkvStyle(heads, kv_heads), "dense": HeadsRowStyle(heads, kv_heads)}


def _mlp_styles(children: Mapping[str, nn.Module]) -> dict[str, ShardingStyle]:
    """Styles of column layers and the one row layer that reads their features; empty unless both are there."""
    linears = {name: linear_features(child) for name, child in children.items() if is_plain_linear(child)}
    columns = {name: features for name, features in linears.items() if name in _COLUMNS}
    rows = {name: features for name, features in linears.items() if name in _ROWS}
    if len(rows) != 1:
        return {}
    (row,) = rows
    if not columns:
        fused = linears.get("gate_up_proj")
        if fused is not None and fused[1] == 2 * rows[row][0]:
            return {"gate_up_proj": ColumnStyle(2), row: RowStyle()}
        return {}
    if any(made != rows[row][0] for _, made in columns.values()):
        return {}
    return {**{name: ColumnStyle() for name in columns}, row: RowStyle()}
