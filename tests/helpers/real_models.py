"""Models of sizes that people train, for `shapes_device`, and narrow ones as deep, whose step is the host's own time."""

from __future__ import annotations

from functools import partial
from typing import Any

from helpers.model_zoo import import_transformers
from helpers.operation_budget import OTHERS, Model, transformer
from torch import nn


def _resnet(**sizes: Any) -> nn.Module:
    transformers = import_transformers()
    config = transformers.ResNetConfig(depths=[2, 2, 2, 2], layer_type="basic", **sizes)
    made: nn.Module = transformers.ResNetForImageClassification(config)
    return made


_GPT2 = partial(transformer, "GPT2", n_layer=12)
_LLAMA = partial(transformer, "Llama", num_hidden_layers=12)
_RESNET_18 = partial(_resnet, embedding_size=64, hidden_sizes=[64, 128, 256, 512], num_labels=1000)
_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12}
REAL = {
    "GPT-2 124 M": Model(
        partial(_GPT2, n_embd=768, n_head=12, n_positions=1024, vocab_size=50257), samples=4, size=1024, vocabulary=50257
    ),
    "Llama 162 M": Model(
        partial(_LLAMA, hidden_size=768, intermediate_size=3072, vocab_size=32000, **_HEADS),
        samples=4,
        size=1024,
        vocabulary=32000,
    ),
    "ResNet-18": Model(_RESNET_18, image=True, samples=64, size=224, classes=1000, image_field="pixel_values"),
}
"""GPT-2's smallest; a Llama of its size; ResNet-18 on ImageNet's images, of transformers."""
NARROW = {
    "GPT-2 124 M": Model(partial(_GPT2, n_embd=32, n_head=4, n_positions=64)),
    "Llama 162 M": Model(partial(_LLAMA, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)),
    "ResNet-18": Model(
        partial(_resnet, embedding_size=8, hidden_sizes=[8, 8, 8, 8], num_labels=7),
        image=True,
        size=32,
        image_field="pixel_values",
    ),
}
"""The same operations of tensors so small that computing them takes next to nothing."""
narrow = "{}, narrow".format
"""Name of a model -> name of the narrow one."""
OTHERS |= REAL | {narrow(name): model for name, model in NARROW.items()}
