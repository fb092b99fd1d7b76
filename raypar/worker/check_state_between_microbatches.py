"""Checks, before a run, that no microbatch depends on what those before it have left, nor a recomputed layer on its first
forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypar.errors import ModelError, UserCodeError
from raypar.model.python_state import PythonState, StateReading
from raypar.worker.stage.buffer_updates import same_bits
from raypar.worker.stage.stage import Stage

_MOST_SUSPECTS = 20
"""Of how many places each is tried by itself, to find the one that a microbatch depends on."""


class ComputedMicrobatch(NamedTuple):
    """What a forward and backward gave."""

    total: float
    """The loss, summed over samples."""
    count: float  # type: ignore[assignment]  # not tuple's method
    """By what the sum is divided."""
    gradients: dict[str, Tensor]
    """Parameter -> its gradient."""

    def difference(self, other: ComputedMicrobatch) -> str | None:
        """What is another number in `other`: the loss, or a gradient; None if nothing is."""
        if repr(self.total) != repr(other.total):
            return f"the loss is {other.total / (other.count or 1):.8g}, not {self.total / (self.count or 1):.8g}"
        for name in dict.fromkeys((*self.gradients, *other.gradients)):
            one, two = self.gradients.get(name), other.gradients.get(name)
            if one is None or two is None or not same_bits(one, two):
                return f"the gradient of {name} is another one"
        return None


def compute_with_and_without_state(
    state: PythonState, compute: Callable[[int], ComputedMicrobatch], forms: Sequence[Any], needed: int
) -> list[ComputedMicrobatch]:
    """The microbatches 0, 1, ..., each computed with what those before it have left. Those after `needed` are left out if none
    leaves anything.

    If one has left something, the next is also computed without, and the last and the first are computed again. Raises
    `ModelError` if that makes a difference, or if a place still changes although the model has met such a microbatch before.
    A table that is made for a size is a cache, and allowed, as is what every microbatch overwrites; a counter and an average
    are not.

    `forms`: of each microbatch, what a cache may depend on (shapes).
    """
    first = before = state.read()
    found: list[ComputedMicrobatch] = []
    for number, form in enumerate(forms):
        if number >= needed and not first.changed(before):
            break
        found.append(compute(number))
        after = state.read()
        if number and first.changed(before):
            state.put_back(first)
            without, left = compute(number), state.read()
            if (difference := without.difference(found[number])) is not None:
                raise _dependence(state, compute, number, (first, before), without, difference)
            differs = set(after.changed(left))
            carried = [place for place in before.changed(after) if place in differs]
            if carried and form in forms[:number]:
                raise _still_changing(carried[0])
            state.put_back(after)
        before = after
    if first.changed(before):
        again = compute(len(found) - 1)
        if changed := before.changed(state.read()):
            raise _still_changing(changed[0])
        if (difference := found[-1].difference(again)) is not None:
            raise _dependence(state, compute, len(found) - 1, (first, before), found[-1], difference)
        if len(found) > 1 and (difference := found[0].difference(compute(0))) is not None:  # as the largest number so far makes
            raise _dependence(state, compute, 0, (first, before), found[0], difference)
        state.put_back(before)
    return found


def _dependence(
    state: PythonState,
    compute: Callable[[int], ComputedMicrobatch],
    number: int,
    readings: tuple[StateReading, StateReading],
    without: ComputedMicrobatch,
    difference: str,
) -> ModelError:
    """The error for a microbatch that depends on what is left: names the place, if one by itself makes the difference.

    `readings`: before the first microbatch, and before this one.
    """
    first, before = readings
    places, guilty = first.changed(before), list[str]()
    for place in places[:_MOST_SUSPECTS] if len(places) > 1 else ():
        state.put_back(before)
        with_all = compute(number)
        state.put_back(before)
        state.put_back(first, only=place)
        if with_all.difference(compute(number)) is not None:
            guilty.append(place)
    return ModelError(
        f"the forward keeps something of one microbatch for the next in {_named(guilty or places)}: with what the microbatches "
        f"before have left there, in microbatch {number} {difference}. Each worker computes some of the microbatches only, so "
        "it would train otherwise than one process",
        cure=_CURE,
    )


def _still_changing(place: str) -> ModelError:
    return ModelError(
        f"{place} is changed by every microbatch, and holds something of those before: what the model computes may come to "
        "depend on how many microbatches a worker has computed, which differs between plans",
        cure=_CURE,
    )


def _named(places: Sequence[str]) -> str:
    more = f" (and {len(places) - 3} more)" if len(places) > 3 else ""
    return ", or ".join(places[:3]) + more


_CURE = (
    "keep it in a buffer (register_buffer), and say in model.buffers what becomes of it (last, sum); leave out what only "
    "counts or measures (a number of calls, a time); draw random numbers from torch, random or numpy themselves, which raypar "
    "seeds before every layer"
)


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
