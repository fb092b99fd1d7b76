"""transformers: the model of every configuration, with all its sizes made small."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from unseen_models.case import Batch, Case, ids, noise

for _kind in ("llama", "bert", "clip"):  # what their files import takes longer than most models
    importlib.import_module(f"transformers.models.{_kind}.modeling_{_kind}")

SMALL: dict[int, tuple[str, ...]] = {
    32: ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "hidden_dim", "encoder_hidden_dim",
         "projection_dim", "emb_dim", "word_embed_proj_dim", "rnn_hidden_size", "lru_width", "attention_hidden_size",
         "decoder_hidden_size", "image_size", "projection_size", "state_dim", "d_latents"),
    64: ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size",
         "max_position_embeddings", "n_positions", "decoder_intermediate_size", "dim_feedforward", "max_source_positions",
         "max_target_positions", "seq_length", "n_ctx"),
    3: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
        "decoder_num_hidden_layers", "num_encoder_layers"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "decoder_num_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"),
    2: ("num_key_value_heads", "num_experts_per_tok", "top_k", "moe_topk"),
    8: ("patch_size", "d_kv", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    16: ("moe_intermediate_size", "shared_expert_intermediate_size", "bottleneck_dim"),
    99: ("vocab_size",),
    0: ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob", "first_k_dense_replace"),
}  # fmt: skip
"""Size -> the keys of configurations that get it, where they are numbers."""
_WIDTHS = frozenset(SMALL[32]) - {"image_size"}
_DEPTHS_AND_MORE = frozenset((*SMALL[3], *SMALL[99], *SMALL[0]))
FORMS: tuple[dict[str, int], ...] = (
    {key: size for size, keys in SMALL.items() for key in keys},
    {key: 64 if key in _WIDTHS else size for size, keys in SMALL.items() for key in keys},
    {key: 512 if key in _WIDTHS else size for size, keys in SMALL.items() for key in keys},
    {key: size for size, keys in SMALL.items() for key in keys if key in _DEPTHS_AND_MORE},
)
"""Key -> size, of each way to make a configuration small: the first in which the plain module runs is tried."""
MOST_PARAMETERS = 40_000_000
"""Larger ones are not tried."""


def names() -> list[str]:
    """The kinds of models; those that predict tokens with their head."""
    found = [kind for kind in MODEL_MAPPING_NAMES if kind in CONFIG_MAPPING]
    return [
        kind for index, kind in enumerate(found) if MODEL_MAPPING_NAMES[kind] not in map(MODEL_MAPPING_NAMES.get, found[:index])
    ]


def case(name: str) -> Case:
    """A small model, and a batch of what its forward takes."""
    why: Exception | None = None
    for sizes in FORMS:
        try:
            given = _case_of_form(name, sizes)
            given.make().train()(**given.batch())
        except Exception as error:
            why = why or error
        else:
            return given
    assert why is not None
    raise why


def _case_of_form(name: str, sizes: Mapping[str, int]) -> Case:
    config = small_config(CONFIG_MAPPING[name], sizes)
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name, MODEL_MAPPING_NAMES[name])
    kind = getattr(transformers, found if isinstance(found, str) else found[0])
    with torch.device("meta"):
        model = kind(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"it has {count / 1e6:.0f} M parameters")
    batch = batch_of(model, config)

    def make() -> nn.Module:
        made: nn.Module = kind(small_config(CONFIG_MAPPING[name], sizes))
        return made

    return Case(make, lambda: dict(batch))


def small_config(kind: type[Any], sizes: Mapping[str, int], depth: int = 0) -> Any:
    """A configuration whose sizes are small, those of the configurations inside it too."""
    default = kind()
    given: dict[str, Any] = {}
    for key, size in sizes.items():
        value = getattr(default, key, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > size and _is_given(kind, key):
            given[key] = size
    if getattr(default, "attention_type", None) == "block_sparse":  # which such short sequences do not take
        given["attention_type"] = "original_full"
    for key in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(default, key, None)
        if isinstance(value, int) and value >= 99 and _is_given(kind, key):
            given[key] = 1
    for key in getattr(kind, "sub_configs", None) or {}:
        value = getattr(default, key, None)
        if value is not None and depth < 3 and hasattr(type(value), "model_type"):
            given[key] = small_config(type(value), sizes, depth + 1).to_dict()
    config = kind(**given)
    for part in (config, *(getattr(config, key, None) for key in getattr(kind, "sub_configs", None) or {})):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = False
    return config


def _is_given(kind: type[Any], key: str) -> bool:
    """Whether a configuration takes this key itself."""
    parameters = inspect.signature(kind.__init__).parameters
    return key in parameters or key in getattr(kind, "__dataclass_fields__", {})


def batch_of(model: Any, config: Any) -> Batch:
    """A batch for what the model's forward takes first."""
    parameters = inspect.signature(model.forward).parameters
    main = model.main_input_name if model.main_input_name in parameters else next(iter(parameters))
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    size = size if isinstance(size, int) else 32
    channels = getattr(vision, "num_channels", 3)
    inputs = {
        "input_ids": lambda: ids(2, 12),
        "pixel_values": lambda: noise(2, channels if isinstance(channels, int) else 3, size, size),
        "input_values": lambda: noise(2, 2000),
        "input_features": lambda: noise(
            2, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 64)
        ),
    }
    if main not in inputs:
        raise ValueError(f"its forward takes {main!r}")
    batch = {main: inputs[main]()}
    if "decoder_input_ids" in parameters:
        batch["decoder_input_ids"] = ids(2, 7)
    if (
        main == "input_ids"
        and parameters.get("pixel_values") is not None
        and hasattr(config, "vision_config")
        and not any(key.startswith("image_") and "token" in key for key in vars(config))
    ):
        batch["pixel_values"] = inputs["pixel_values"]()
    return batch
