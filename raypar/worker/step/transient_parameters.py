"""The memory of whole parameters that comes and goes inside a step: of a layer's, or of a stage's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.plan.ownership import OwnedRun
from raypar.torch_compat.printing import print_tensors_without_memory
from raypar.worker.stage.layer_tensors import StageTensors, memory_begin
from raypar.worker.stage.tensors_without_memory import can_be_resized, has_memory
from raypar.worker.step.owned_parameters import OwnedParameter


@dataclass
class GatheredBytes:
    """Bytes of a worker's memory in which gathered parameters lie."""

    now: int = 0
    """Now."""
    most: int = 0
    """At most, in the pass under way or the last one."""

    def add(self, nbytes: int) -> None:
        """Count memory that a parameter was given, or (below 0) that was freed."""
        self.now += nbytes
        self.most = max(self.most, self.now)


class TransientParameters:
    """What layers of one stage compute with and a worker does not keep: parameters of which it owns runs, or nothing.

    The worker's own runs have memory of their own all the time, and are copied into the whole parameters, which come and go.
    The storage of a whole parameter has no bytes meanwhile; tensors and their views stay the same objects, and their versions,
    so that autograd finds in the backward pass what it has seen in the forward pass. What one replica owns whole, in full
    precision, is never freed. On a device whose storages cannot be resized the memory stays.
    """

    def __init__(self, weights: StageTensors, owned: Sequence[OwnedParameter], gathered: GatheredBytes) -> None:
        """Begins with no memory but that of what is owned. `owned`: of the stage, views of its parameters if these have any;
        `gathered`: counts the bytes of all stages of the worker."""
        print_tensors_without_memory()
        kept = {each.name for each in owned if each.run is None and each.name not in weights.rounded}
        self._weights = weights
        self._runs: dict[str, list[OwnedParameter]] = {}
        """Parameter -> what this worker keeps of it, of those that come and go."""
        self._whole: dict[str, Tensor] = {}
        """Parameter -> what layers compute with, with a version counter of its own."""
        self._owned = {OwnedRun(each.name, *(each.run or (0, each.parameter.numel()))): each for each in owned}
        self._users = Counter[str]()
        """Parameter -> how many groups of parameters that are there have it."""
        weights.temporary = self._addresses = set[int]()
        """Where those begin that are there."""
        self._gathered = gathered
        self._nbytes: dict[str, int] = {}
        """Parameter -> bytes of its memory when it is there."""
        self._may_go = all(map(can_be_resized, {parameter.device for parameter in weights.parameters.values()}))
        """Whether the memory can be freed on this device."""
        for name, parameter in weights.parameters.items():
            if not parameter.numel():
                continue
            if name in kept:
                self._whole[name] = weights.computed_with(name)
                continue
            self._runs[name] = [each for each in owned if each.name == name]
            for each in self._runs[name] if name not in weights.rounded and has_memory(parameter) else ():
                each.parameter.data = each.parameter.detach().clone()
            whole = self._whole[name] = weights.take_empty_memory(name).data
            self._nbytes[name] = whole.untyped_storage().nbytes()
            self._resize(name, 0)

    def come_and_go(self, names: Iterable[str]) -> list[str]:
        """Those of these parameters whose memory comes and goes."""
        return [name for name in names if name in self._runs]

    def owned(self, run: OwnedRun) -> Tensor:
        """A run that this worker holds, flat."""
        return self._owned[run].parameter.detach().view(-1)

    def place(self, run: OwnedRun) -> Tensor:
        """Where a run lies in the whole parameter, which is there."""
        return self._whole[run.name].view(-1)[run.start : run.stop]

    @torch.no_grad()
    def fill(self, names: Iterable[str]) -> None:
        """Have the memory of a group of parameters there, with what this worker keeps in its place."""
        for name in names:
            self._users[name] += 1
            if self._users[name] > 1:
                continue
            self._resize(name, self._nbytes[name])
            self._gathered.add(self._nbytes[name])
            whole = self._whole[name]
            for each in self._runs[name]:
                each.of(whole).copy_(each.parameter)
            if self._may_go:
                self._addresses.add(memory_begin(whole))

    def free(self, names: Iterable[str]) -> None:
        """Free the memory of a group, but for parameters that another group has, which is there."""
        for name in names:
            self._users[name] -= 1
            if not self._users[name]:
                self._gathered.add(-self._nbytes[name])
                self._addresses.discard(memory_begin(self._whole[name]))
                self._resize(name, 0)

    def _resize(self, name: str, nbytes: int) -> None:
        if self._may_go:
            self._whole[name].untyped_storage().resize_(nbytes)
