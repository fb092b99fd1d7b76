"""Optimizers whose state lies in files (`plan.optimizer_in`): a few parameters are stepped after the other.

State that an optimizer makes, at its first step as a rule, is moved to files before the next parameters are stepped, so memory
never holds all of it. The files of the next parameters are read ahead meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from raypar.job import AverageConfig, OptimizerConfig, SingleOptimizerConfig
from raypar.worker.process.allocator_and_garbage_collector import large_blocks_returned
from raypar.worker.stage.layer_tensors import StageTensors
from raypar.worker.state.file_memory import FileMemoryPool
from raypar.worker.step.optimizer_and_parameter_groups import build_optimizer, optimizer_group_of, parameters_by_optimizer
from raypar.worker.step.owned_parameters import OwnedParameter
from raypar.worker.step.several_optimizers import SeveralOptimizers
from raypar.worker.step.weight_averages import WeightAverages

WINDOW_BYTES = 8 << 20
"""Parameters that are stepped together have so many bytes, unless one alone has more: the state of so many may be in memory
before it is in files. Smaller windows would cost calls, each about 0.1 ms."""


class OffloadedOptimizer(SeveralOptimizers):
    """An optimizer of the job as several, each of which steps a window of its parameters and has its state in files."""

    def __init__(
        self, windows: Sequence[torch.optim.Optimizer], files: StateInFiles, averages: WeightAverages | None = None
    ) -> None:
        super().__init__(windows, averages)
        self._files = files

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of each window, in order, while the state of the next one is read."""
        self._files.read_ahead(self.optimizers[0])
        for each, following in zip(self.optimizers, (*self.optimizers[1:], None), strict=True):
            if following is not None:
                self._files.read_ahead(following)
            with contextlib.nullcontext() if _has_state(each) else large_blocks_returned():
                each.step()
                self._files.take(each)

    @contextlib.contextmanager
    def taking_state(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """See `SeveralOptimizers.taking_state`: what it has got is moved to files."""
        with large_blocks_returned():
            yield
            self._files.take(optimizer)


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step makes no state for the first time, unless the optimizer has none at all."""
    with_gradients = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return all(parameter in optimizer.state for parameter in with_gradients)


class StateInFiles:
    """The tensors of optimizers' state that lie in files."""

    def __init__(self, pool: FileMemoryPool) -> None:
        self._pool = pool
        self._there: dict[tuple[int, str], Tensor] = {}
        """(`id` of a parameter, name of a state of it) -> the tensor in a file."""

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Move to files what the state of an optimizer's parameters has in memory. The tensors stay the same objects, which
        the optimizer may have elsewhere, too. Small ones stay where they are."""
        for parameter, entries in optimizer.state.items():
            for name, value in entries.items():
                if type(value) is not Tensor or value.nbytes < self._pool.small_bytes:
                    continue
                there = self._there.get((id(parameter), name))
                if there is not None and there.data_ptr() == value.data_ptr():
                    continue
                if there is not None and _lie_alike(there, value):
                    there.copy_(value)
                elif self._pool.has(value):
                    there = self._there[id(parameter), name] = value.detach()
                else:
                    there = self._there[id(parameter), name] = self._pool.copy_of(value)
                value.data = there

    def read_ahead(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the system begin to read an optimizer's state."""
        for entries in optimizer.state.values():
            for value in entries.values():
                if type(value) is Tensor:
                    self._pool.read_ahead(value)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()


def build_offloaded_optimizers(
    spec: OptimizerConfig,
    parameters: Mapping[str, nn.Parameter],
    pool: FileMemoryPool,
    names: Mapping[str, str] = MappingProxyType({}),
    average: AverageConfig | None = None,
) -> OffloadedOptimizer:
    """The job's optimizer over `parameters`, as `build_optimizers` makes it, with its state, and averages, in files."""
    files, made = StateInFiles(pool), list[torch.optim.Optimizer]()
    for each, own in parameters_by_optimizer(spec, parameters, names):
        for window in _windows(each, own, names):
            with large_blocks_returned():  # some make their state with themselves
                made.append(build_optimizer(each, window, names))
                files.take(made[-1])
    averages = WeightAverages(average, parameters, pool.copy_of) if average is not None else None
    return OffloadedOptimizer(made, files, averages)


def _windows(
    spec: SingleOptimizerConfig, parameters: Mapping[str, nn.Parameter], names: Mapping[str, str]
) -> Iterator[dict[str, nn.Parameter]]:
    """The parameters in the order in which one optimizer of all of them would step them, in windows."""
    trained = [key for key, parameter in parameters.items() if parameter.requires_grad]
    window, nbytes = dict[str, nn.Parameter](), 0
    for key in sorted(trained, key=lambda key: optimizer_group_of(spec, names.get(key, key))):
        window[key] = parameters[key]
        nbytes += parameters[key].nbytes
        if nbytes >= WINDOW_BYTES:
            yield window
            window, nbytes = {}, 0
    if window:
        yield window


def move_masters_to_files(owned: Sequence[OwnedParameter], tensors: StageTensors, pool: FileMemoryPool) -> None:
    """Move those of the owned parameters to files of which layers compute with a copy in a lower precision."""
    for each in owned:
        if each.name in tensors.rounded:
            each.parameter.data = pool.copy_of(each.parameter)
