"""What a worker's tensors take between two steps, by the kinds of the memory sheet: the measured side of its prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from raypar.worker.stage.layer_tensors import memory_begin
from raypar.worker.stage.stage import Stage
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage
from raypar.worker.step.owned_parameters import OwnedParameter
from raypar.worker.step.parameter_gather import ParameterGather
from raypar.worker.step.several_optimizers import averages_of, optimizers_in


def held_memory(
    stages_by_index: Mapping[ShardOfStage, Stage],
    optimizers: Iterable[torch.optim.Optimizer],
    owned: Mapping[ShardOfStage, Sequence[OwnedParameter]],
    gather: ParameterGather,
) -> dict[str, int]:
    """Kind of memory -> bytes of the storages of its tensors, each storage once; kinds without any are left out.

    Whole parameters that come for a use (of `gather`) are counted as in the step under way, or the last one, when they were
    most. Gradients and activations come and go within a step, so that they are not among them.
    """
    found: dict[str, int] = {}
    seen = set[int]()
    stages, optimizers = list(stages_by_index.values()), list(optimizers)
    for kind, tensors in (
        ("parameter", _computed_with(stages)),
        (
            "parameter",
            (each.parameter for index, of in owned.items() for each in of if not _is_rounded(stages_by_index[index], each)),
        ),
        ("master", (each for stage in stages for name, each in stage.parameters.items() if name in stage.weights.rounded)),
        ("master", (each.parameter for of_stage in owned.values() for each in of_stage)),
        ("buffer", (each for stage in stages for each in stage.buffers.values())),
        ("average", (each for optimizer in optimizers for each in _averages(optimizer))),
        ("optimizer", (each for optimizer in optimizers for each in _state(optimizer))),
    ):
        for tensor in tensors:
            nbytes, begin = tensor.untyped_storage().nbytes(), memory_begin(tensor)
            if nbytes and begin not in seen:
                seen.add(begin)
                found[kind] = found.get(kind, 0) + nbytes
    by_step = {index: stage for index, stage in stages_by_index.items() if index not in gather.layers}
    gathered = sum(_kept_by_others(stage, owned[index]) for index, stage in by_step.items())
    if gathered or gather.gathered_bytes.most:
        parameters = found.pop("parameter", 0) - gathered - gather.gathered_bytes.now  # none, where masters alone are kept
        found |= {"parameter": parameters} if parameters else {}
        found["gathered"] = gathered + gather.gathered_bytes.most
    return found


def _is_rounded(stage: Stage, owned: OwnedParameter) -> bool:
    """Whether layers compute with a copy in a lower precision."""
    return owned.name in stage.weights.rounded


def _kept_by_others(stage: Stage, owned: Sequence[OwnedParameter]) -> int:
    """Bytes of what layers compute with that is there until its last use in a step, without the worker's own part of it."""
    kept, found = Counter[str](), 0
    for each in owned:
        kept[each.name] += each.parameter.numel()
    for name in stage.parameters:
        whole = stage.weights.computed_with(name)
        if stage.weights.is_temporary(whole):
            found += (whole.numel() - kept[name]) * whole.itemsize
    return found


def _computed_with(stages: Iterable[Stage]) -> Iterator[Tensor]:
    """The parameters that layers compute with."""
    for stage in stages:
        rounded = stage.weights.rounded
        yield from rounded.values()
        yield from (each for name, each in stage.parameters.items() if name not in rounded)


def _averages(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    averages = averages_of(optimizer)
    if averages is not None:
        yield from averages.values.values()


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors that an optimizer keeps, scalars too."""
    for each in optimizers_in(optimizer):
        for kept in each.state.values():
            yield from (value for value in kept.values() if isinstance(value, Tensor))
