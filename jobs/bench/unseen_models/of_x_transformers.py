"""x_transformers: decoders, encoders and both, with what its attention layers can do."""

from __future__ import annotations

from typing import Any

import x_transformers as x
from torch import nn

from unseen_models.case import Batch, Case, ids, noise

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "rel_pos_bias": {"rel_pos_bias": True}, "alibi_pos_bias": {"alibi_pos_bias": True},
    "rotary_pos_emb": {"rotary_pos_emb": True}, "rotary_xpos": {"rotary_xpos": True},
    "dynamic_pos_bias": {"dynamic_pos_bias": True},
    "use_rmsnorm": {"use_rmsnorm": True}, "ff_glu": {"ff_glu": True}, "ff_swish": {"ff_swish": True, "ff_glu": True},
    "sandwich_norm": {"sandwich_norm": True}, "gate_residual": {"gate_residual": True}, "shift_tokens": {"shift_tokens": 1},
    "macaron": {"macaron": True}, "attn_qk_norm": {"attn_qk_norm": True}, "attn_kv_heads": {"attn_kv_heads": 1},
    "attn_talking_heads": {"attn_pre_talking_heads": True}, "attn_num_mem_kv": {"attn_num_mem_kv": 4},
    "attn_gate_values": {"attn_gate_values": True}, "residual_attn": {"residual_attn": True},
    "use_scalenorm": {"use_scalenorm": True}, "resi_dual": {"resi_dual": True},
}  # fmt: skip
"""Name -> arguments of the attention layers."""


def names() -> list[str]:
    """Decoders with every option, and the other models."""
    return [*(f"Decoder {name}" for name in OPTIONS), *_OTHERS]


def _vit() -> nn.Module:
    return x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=x.Encoder(dim=32, depth=3, heads=2))  # type: ignore[no-any-return]


def _both() -> nn.Module:
    sizes = {"num_tokens": 99, "depth": 3, "heads": 2, "max_seq_len": 32}
    given = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in sizes.items()}
    return x.XTransformer(dim=32, tie_token_emb=True, **given)  # type: ignore[no-any-return]


def _continuous() -> nn.Module:
    layers = x.Encoder(dim=32, depth=3, heads=2)
    return x.ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=32, attn_layers=layers)  # type: ignore[no-any-return]


def _encoder(**given: Any) -> nn.Module:
    layers = x.Encoder(dim=32, depth=3, heads=2, **given)
    return x.TransformerWrapper(num_tokens=99, max_seq_len=32, attn_layers=layers)  # type: ignore[no-any-return]


_TOKENS: Batch = {"x": ids(2, 12)}
_OTHERS: dict[str, Case] = {
    "Encoder": Case(_encoder, lambda: dict(_TOKENS)),
    "Encoder rel_pos_bias": Case(lambda: _encoder(rel_pos_bias=True), lambda: dict(_TOKENS)),
    "ViTransformerWrapper": Case(_vit, lambda: {"img": noise(2, 3, 32, 32)}),
    "ContinuousTransformerWrapper": Case(_continuous, lambda: {"x": noise(2, 12, 8)}),
    "XTransformer": Case(_both, lambda: {"src": ids(2, 12), "tgt": ids(2, 9)}),
}


def case(name: str) -> Case:
    """One of them."""
    if name in _OTHERS:
        return _OTHERS[name]
    given = OPTIONS[name.removeprefix("Decoder ")]

    def make() -> nn.Module:
        layers = x.Decoder(dim=32, depth=3, heads=2, **given)
        return x.TransformerWrapper(num_tokens=99, max_seq_len=32, attn_layers=layers)  # type: ignore[no-any-return]

    return Case(make, lambda: dict(_TOKENS))
