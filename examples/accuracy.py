"""The accuracy of exported weights on a job's validation data: the share of classes, pixels or tokens that are right.

raypar export RUN --out weights.pt && python -m examples.accuracy jobs/vit_digits.yaml weights.pt
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from raypar.job.read_job import load_job


@torch.no_grad()
def accuracy(model: nn.Module, data: Any, samples: int) -> float:
    """Of the first samples, the share of targets that the model's largest logit names, in evaluation mode."""
    model.eval()
    right = total = 0
    for sample in (data[index] for index in range(min(samples, len(data)))):
        fields: dict[str, Tensor] = sample if isinstance(sample, dict) else {}
        output = model(**{n: t[None] for n, t in fields.items()}) if fields else model(sample[0][None])
        logits = output if isinstance(output, Tensor) else output.logits
        target = fields["labels"] if fields else sample[1]
        right += int((logits[0].argmax(0 if logits.ndim == 4 else -1) == target).sum())  # images have their classes first
        total += target.numel()
    return right / total


def main(job: str, weights: str, samples: int = 500) -> None:
    """Print the accuracy of an export."""
    spec = load_job(job)
    if spec.validation is None:
        sys.exit(f"{job} has no validation data")
    model = spec.model.call()
    model.load_state_dict(torch.load(weights, weights_only=True))
    data = spec.validation_data.call()
    print(f"accuracy on {min(samples, len(data))} validation samples: {accuracy(model, data, samples):.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
