"""peft: each of its methods on a small Llama and a small BERT."""

from __future__ import annotations

from typing import Any

import peft
import transformers
from torch import nn

from unseen_models.case import Case, ids

_LLAMA = ["q_proj", "v_proj"]
_BERT = ["query", "value"]
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4}), "LoRA dropout": ("LoraConfig", {"r": 4, "lora_dropout": 0.1}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True}), "rsLoRA": ("LoraConfig", {"r": 4, "use_rslora": True}),
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 10}), "LoHa": ("LoHaConfig", {"r": 4}), "LoKr": ("LoKrConfig", {"r": 4}),
    "OFT": ("OFTConfig", {"oft_block_size": 8}), "BOFT": ("BOFTConfig", {"boft_block_size": 8}), "VeRA": ("VeraConfig",
    {"r": 4}),
    "IA3": ("IA3Config", {"feedforward_modules": []}), "HRA": ("HRAConfig", {"r": 4}), "Bone": ("BoneConfig", {"r": 4}),
    "RandLoRA": ("RandLoraConfig", {"r": 4}), "FourierFT": ("FourierFTConfig", {"n_frequency": 8}),
    "VBLoRA": ("VBLoRAConfig", {"r": 4, "num_vectors": 8, "vector_length": 8, "topk": 2}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4}), "p-tuning": ("PromptEncoderConfig",
    {"num_virtual_tokens": 4}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4}), "LN tuning": ("LNTuningConfig", {}),
}  # fmt: skip
"""Method -> name of its configuration, and arguments."""


def names() -> list[str]:
    """Methods on both models."""
    return [f"{method} on {model}" for method in METHODS for model in ("llama", "bert")]


def case(name: str) -> Case:
    """One method on one model."""
    method, model = name.split(" on ")
    kind, given = METHODS[method]

    def make() -> nn.Module:
        base = _llama() if model == "llama" else _bert()
        more: dict[str, Any] = {}
        if "tuning" not in method:
            more["target_modules"] = _LLAMA if model == "llama" else _BERT
        if method == "LN tuning":
            more["target_modules"] = ["norm", "input_layernorm"] if model == "llama" else ["LayerNorm"]
        task = "CAUSAL_LM" if model == "llama" else "TOKEN_CLS"
        made: nn.Module = peft.get_peft_model(base, getattr(peft, kind)(task_type=task, **given, **more))
        return made

    return Case(make, lambda: {"input_ids": ids(2, 12)})


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, num_key_value_heads=4,
        use_cache=False,
    )  # fmt: skip
    made: nn.Module = transformers.LlamaForCausalLM(config)
    return made


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    made: nn.Module = transformers.BertForTokenClassification(config)
    return made
