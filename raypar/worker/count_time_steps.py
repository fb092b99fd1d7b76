"""Counts the time steps of recurrent layers, after each of which shards that have parts of these layers wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.utils.rnn import PackedSequence

from raypar.model.tensor_parallel.recurrent import LAYERS, RECURRENT


def count_time_steps(modules: Iterable[nn.Module], forward: Callable[[], object]) -> int:
    """How many time steps, of all layers, the recurrent modules among some modules compute in `forward`.

    It is called only if there are any.
    """
    recurrent = [part for module in modules for part in module.modules() if isinstance(part, RECURRENT)]
    found: list[int] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        found.append(_time_steps(module, args[0]))

    hooks = [part.register_forward_pre_hook(note) for part in recurrent]
    try:
        if recurrent:
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return sum(found)


def _time_steps(module: nn.Module, given: Any) -> int:
    if not isinstance(module, LAYERS):
        return 1
    if isinstance(given, PackedSequence):
        return len(given.batch_sizes) * module.num_layers
    return int(given.shape[module.batch_first and given.dim() == 3]) * module.num_layers
