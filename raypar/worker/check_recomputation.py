"""Checks, before a run, that a layer computes the same when recomputation runs its forward a second time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raypar.errors import UserCodeError
from raypar.worker.stage.stage import Stage


def check_layer_recomputes(name: str, stage: Stage, received: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> None:
    """Run the layer twice. Raise `UserCodeError` if the second run gives other results, or if a run changes a buffer.

    `stage`: a stage of this layer alone, under a plan that recomputes it.
    """
    stage.begin_step(0)
    first = {value: tensor.clone() for value, tensor in _run(stage, received, fields).items()}
    buffers = _copy_buffers(stage)
    second = _run(stage, received, fields)
    changed = [path for path, tensor in _copy_buffers(stage).items() if not _same_bits(buffers.get(path), tensor)]
    if changed:
        raise UserCodeError(
            f"layer {name!r} writes its buffer {changed[0]!r} whenever its forward runs: recomputation would write it "
            "twice for a microbatch",
            cure="leave the layer out of plan.recompute, or compute the buffer from what does not change (shapes, parameters)",
        )
    for value, tensor in second.items():
        if not _same_bits(first[value], tensor):
            raise UserCodeError(
                f"layer {name!r} computes another {value!r} when its forward runs again with the same inputs: recomputed "
                "activations would not be those of the forward",
                cure="leave the layer out of plan.recompute, or let its forward depend on its inputs and parameters only",
            )
    stage.recompute(0)  # raises if it saves other tensors
    stage.begin_step(0)


def _run(stage: Stage, received: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A forward of microbatch 0: the values that other stages read, and the loss if the stage has one."""
    outputs = stage.checkpointed_forward(0, received, fields)
    return outputs if stage.loss is None else outputs | {"loss": torch.as_tensor(stage.losses[0][0])}


def _copy_buffers(stage: Stage) -> dict[str, Tensor]:
    """Qualified name -> copy of the buffer."""
    return {
        f"{layer}.{path}": tensor.clone() for layer, module in stage.modules.items() for path, tensor in module.named_buffers()
    }


def _same_bits(a: Tensor | None, b: Tensor) -> bool:
    if a is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
