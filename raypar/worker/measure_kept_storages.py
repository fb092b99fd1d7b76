"""Measures which storages a model's layers keep for the backward of one microbatch (`planner/model_profile.py`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raypar.errors import UserCodeError
from raypar.model.graph import Graph
from raypar.planner.model_profile import BATCH, KeptStorages, LayerStorages, ReadStorage
from raypar.schedule.instructions import ACTIVATIONS
from raypar.worker.stage.stage import Stage
from raypar.worker.stage.stage_coordinate_in_errors import refuses_saved_tensor_hooks
from raypar.worker.stage.stage_in_virtual_shards import ComputesMicrobatches, StageInVirtualShards


def forward_first_microbatch(
    stage: ComputesMicrobatches, received: Mapping[str, Tensor], fields: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A forward of microbatch 0 in a new step; returns the values that other stages read."""
    stage.begin_step(0)
    return stage.forward(0, received, fields)


def random_gradients(outputs: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """A random gradient for each floating point value, as `Stage.backward` takes them."""
    return {name: torch.randn_like(v) if v.is_floating_point() else None for name, v in outputs.items()}


def kept_in_parts(
    whole: Stage, parts: StageInVirtualShards, received: Mapping[str, Tensor], fields: Mapping[str, Tensor]
) -> float:
    """What all virtual shards of a layer keep for the backward of a microbatch, of what the whole layer keeps: each keeps what
    no style cuts. Their number is the answer where a layer's memory cannot be seen."""
    try:
        of_whole = _saved_bytes([whole], whole, received, fields)
        of_parts = _saved_bytes(parts.shards, parts, received, fields)
    except UserCodeError as error:
        if not refuses_saved_tensor_hooks(error.__cause__):
            raise
        return float(len(parts.shards))
    return of_parts / of_whole if of_whole else 1.0


def _saved_bytes(
    stages: Sequence[Stage], together: ComputesMicrobatches, received: Mapping[str, Tensor], fields: Mapping[str, Tensor]
) -> int:
    """Bytes of the storages that `stages` save for the backward when `together` runs them, each in a thread of its own."""
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _has_memory(tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    def watched(stage: Stage, *given: Any) -> dict[str, Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), stage.guard.accepting_contexts():
            return type(stage).forward(stage, *given)

    try:
        for stage in stages:
            vars(stage)["forward"] = partial(watched, stage)
        forward_first_microbatch(together, received, fields)
    finally:
        for stage in stages:
            del vars(stage)["forward"]
    for stage in stages:
        for tensor in (*stage.parameters.values(), *stage.weights.rounded.values(), *stage.buffers.values()):
            found.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def _has_memory(tensor: Tensor) -> bool:
    """Whether the tensor has a storage of its own; a wrapper inside `torch.func` has not."""
    try:
        return bool(tensor.untyped_storage().data_ptr() or not tensor.numel())
    except RuntimeError:
        return False


class KeptStoragesMeasurement:
    """Measures what a model's layers keep of one microbatch: layer by layer, each as a stage of its own.

    Each layer reads the very tensors that the layer before returned, so a storage that both keep is recognised as one.
    """

    def __init__(self, graph: Graph, batch: Mapping[str, Tensor], offloaded: Collection[int] = ()) -> None:
        """`offloaded`: indices of the layers whose activations are to be offloaded."""
        self._graph, self._batch, self._offloaded = graph, batch, offloaded
        self._values: dict[str, Tensor] = {}
        """Values that layers still to be measured read."""
        self._numbers: dict[int, int] = {}
        """Address of a live storage of a value or batch field -> its number."""
        self._sizes: list[int] = []
        """Number of a storage -> its bytes."""
        self._layers: list[LayerStorages] = []
        for field in batch.values():
            self._number(field, self._numbers)

    def inputs(self, stage: Stage) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(received values, fields of the batch) that the stage of the next layer reads."""
        received = {name: self._values[name] for name in stage.values.received}
        return received, {name: self._batch[name] for name in stage.batch_fields}

    def measure(self, index: int, whole: Stage, split: Stage) -> dict[str, Tensor]:
        """Measure the next layer and return its outputs. `whole`: its stage; `split`: its stage with a split backward.

        Raises `UserCodeError` for a layer that is to be offloaded and refuses hooks on saved tensors.
        """
        received, fields = self.inputs(whole)
        known = dict(self._numbers)
        state = (*whole.parameters.values(), *whole.weights.rounded.values(), *whole.buffers.values())
        saved, of_loss, outputs = self._forward(index, whole, received, fields)
        parameters = {t.untyped_storage().data_ptr() for t in state}
        by_layer, by_loss = (
            dict.fromkeys(
                self._number(tensor, known)
                for tensor in tensors
                if _has_memory(tensor) and tensor.untyped_storage().data_ptr() not in parameters
            )
            for tensors in (saved, of_loss)
        )
        self._layers.append(
            LayerStorages(
                tuple({**by_layer, **by_loss}),
                self._stash(split, received, fields, random_gradients(outputs)),
                tuple(self._read(name, value) for name, value in (*received.items(), *fields.items())),
                tuple(by_loss),
                tuple(number for number in by_loss if number not in by_layer),
            )
        )
        self._values.update(outputs)
        self._values = {n: v for n, v in self._values.items() if max(self._graph.consumers(n), default=0) > index}
        alive = {t.untyped_storage().data_ptr() for t in (*self._batch.values(), *self._values.values())}
        for value in self._values.values():
            self._number(value, known)
        self._numbers = {address: number for address, number in known.items() if address in alive}
        return outputs

    def _forward(
        self, index: int, stage: Stage, received: Mapping[str, Tensor], fields: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        """(what the layer saves, what the loss behind it saves, the values that others read). The first two are empty where the
        layer refuses hooks on saved tensors."""
        saved, of_loss = list[Tensor](), list[Tensor]()
        now, loss = saved, stage.loss

        def keep(tensor: Tensor) -> Tensor:
            now.append(tensor.detach())
            return tensor

        def watched(*given: Any) -> Any:
            nonlocal now
            now = of_loss
            assert loss is not None
            return loss(*given)

        vars(stage)["loss"] = None if loss is None else watched
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), stage.guard.accepting_contexts():
                return saved, of_loss, forward_first_microbatch(stage, received, fields)
        except UserCodeError as error:
            if index in self._offloaded or not refuses_saved_tensor_hooks(error.__cause__):
                raise
        finally:
            stage.loss = loss
        return [], [], forward_first_microbatch(stage, received, fields)

    def _stash(
        self,
        split: Stage,
        received: Mapping[str, Tensor],
        fields: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor | None],
    ) -> tuple[int, ...]:
        """Numbers of the storages that `BackwardInput` keeps for `BackwardWeight`."""
        forward_first_microbatch(split, received, fields)
        split.backward_input(0, gradients)
        known = dict(self._numbers)
        kept = [tensor for deferred in split.stash_of(0) for tensor in deferred.kept]
        return tuple(dict.fromkeys(self._number(tensor, known) for tensor in kept))

    def _number(self, tensor: Tensor, known: dict[int, int]) -> int:
        """The number of a tensor's storage; a new one if its address is not in `known`, whose storages must all be alive."""
        storage = tensor.untyped_storage()
        found = known.get(storage.data_ptr())
        if found is None:
            found = known[storage.data_ptr()] = len(self._sizes)
            self._sizes.append(storage.nbytes())
        return found

    def _read(self, name: str, tensor: Tensor) -> ReadStorage:
        producer = self._graph.producer(name)
        return ReadStorage(self._number(tensor, self._numbers), BATCH if producer is None else producer, tensor.requires_grad)

    def activation_bytes(self, index: int) -> int:
        """Bytes of activations that a stage of this layer alone keeps."""
        return self.result().bytes_by_kind(index, index + 1)[ACTIVATIONS]

    def result(self) -> KeptStorages:
        """What the layers measured so far keep."""
        samples = next(iter(self._batch.values())).shape[0]
        return KeptStorages(samples, tuple(self._sizes), tuple(self._layers))
