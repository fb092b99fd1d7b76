"""Models of Hugging Face's `transformers` as they are, from small configurations: nothing is downloaded, nothing is changed.

`pip install transformers`. Sizes are in the job files: `gpt2.yaml`, `llama.yaml`, `vit_digits.yaml` and `t5_reversal.yaml`.
A pretrained model is the same configuration with weights: `init_from` in the job file.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from examples import gpt


def model(name: str, config: str, **sizes: Any) -> nn.Module:
    """The model `transformers.<name>` of a `transformers.<config>` with these sizes."""
    import transformers  # takes seconds, which a process that only reads the job need not wait

    made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    return made


def next_token_loss(output: Any, targets: Tensor) -> tuple[Tensor, int]:
    """Cross-entropy of a `ModelOutput`'s logits and the next tokens of `examples.gpt:text`: (sum, number of tokens)."""
    return gpt.loss(output.logits, targets)
