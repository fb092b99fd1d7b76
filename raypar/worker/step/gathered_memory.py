"""The memory of a stage's whole parameters where replicas divide them: there from each gather until the last use in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raypar.torch_compat.printing import print_tensors_without_memory
from raypar.worker.stage.layer_tensors import StageTensors, memory_begin
from raypar.worker.stage.tensors_without_memory import can_be_resized, has_memory
from raypar.worker.step.owned_parameters import OwnedParameter


class GatheredMemory:
    """What layers of one stage compute with and a worker does not keep: parameters of which it owns runs, or nothing.

    While a whole parameter is there the worker's runs are views of it. When it is freed each run gets memory of its own, and
    the whole one's storage has no bytes: tensors, their views and what an optimizer keeps for them stay the same objects.
    Copies in a lower precision are always made of masters, which have memory of their own.

    Between `free` and `fill` nobody may read the tensors that layers compute with. On a device whose storages cannot be resized
    the memory stays.
    """

    def __init__(self, weights: StageTensors, owned: Sequence[OwnedParameter]) -> None:
        """Begins with the memory as `weights` have it: not there, or there and then new, so that nothing else refers to it.
        `owned`: of the stage; where the memory is there, views of its parameters."""
        print_tensors_without_memory()
        kept = {each.name for each in owned if each.run is None and each.name not in weights.rounded}
        names = [name for name, parameter in weights.parameters.items() if parameter.numel() and name not in kept]
        self._weights = weights
        self._runs = {name: [each for each in owned if each.name == name] for name in names}
        """Parameter -> what this worker keeps of it."""
        self._whole = dict[str, Tensor]()
        """Parameter -> what layers compute with."""
        for name, runs in self._runs.items():
            self._whole[name] = whole = weights.take_new_memory(name)
            for each in runs if name not in weights.rounded and has_memory(whole) else ():
                each.parameter.data = each.of(whole)
        self._nbytes = {name: whole.nbytes for name, whole in self._whole.items()}
        self._may_go = all(map(can_be_resized, {whole.device for whole in self._whole.values()}))
        """Whether the memory can be freed on this device."""
        self.is_there = all(map(has_memory, self._whole.values()))
        """Whether the whole parameters have memory."""
        self._note_addresses()

    @torch.no_grad()
    def fill(self) -> None:
        """Have the memory there, with what this worker keeps in its place."""
        for name, whole in self._whole.items():
            if not self.is_there:
                whole.untyped_storage().resize_(self._nbytes[name])
            for each in self._runs[name]:
                place = each.of(whole)
                if name in self._weights.rounded:
                    place.copy_(each.parameter)
                elif not self.is_there:
                    place.copy_(each.parameter)
                    each.parameter.data = place
        self.is_there = True
        self._note_addresses()

    @torch.no_grad()
    def free(self) -> None:
        """Free the memory, after the last use of the whole parameters."""
        if not self._may_go:
            return
        for name, whole in self._whole.items() if self.is_there else ():
            if name not in self._weights.rounded:
                for each in self._runs[name]:
                    each.parameter.data = each.parameter.clone()
            whole.untyped_storage().resize_(0)
        self.is_there = False
        self._note_addresses()

    def _note_addresses(self) -> None:
        there = self._whole.values() if self.is_there and self._may_go else ()
        self._weights.temporary = frozenset(map(memory_begin, there))
