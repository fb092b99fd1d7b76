"""A tiny Llama and a tiny GPT-2 of `transformers`, their folders, and tokens to train them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypar.model.pretrained_folder import from_folder


def save_base(folder: Path, kind: str = "llama", **more: Any) -> str:
    """Writes a folder with a model of random weights."""
    import transformers

    torch.manual_seed(5)
    made: Any = {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=31, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24, **more
            )
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=4, n_head=2, **more)
        ),
    }[kind]()
    made.save_pretrained(folder, max_shard_size="10KB")
    return str(folder)


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens, with themselves as labels."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 31, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def loaded(folder: str, adapter: dict[str, Any] | None = None) -> nn.Module:
    """The same as `from_folder`, with the weights of `from_pretrained`: what one process begins with."""
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    made = from_folder(folder, adapter)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" not in name:
                plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
                parameter.copy_(base[plain.replace(".modules_to_save.default.", ".")])
    return made
