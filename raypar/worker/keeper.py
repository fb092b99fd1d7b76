"""One worker's share of a checkpoint: copied at once, written in the background; and the way back."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import Tensor

from raypar.worker.checkpoint import PARAMETER, Name, Scalar, ShardRecord, read_tensors, write_shard
from raypar.worker.core import WorkerCore
from raypar.worker.optimizer import load_state, state_of


class Keeper:
    """Saves and restores parameters and optimizer state of a `WorkerCore` that has adopted a plan."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._writer: threading.Thread | None = None
        self._record: ShardRecord | None = None
        self._error: Exception | None = None

    def snapshot(self, folder: Path) -> None:
        """Copy what this worker writes (bytes of its parameters and optimizer state), then write it while training goes on."""
        tensors, scalars = self._share()
        self._record = self._error = None
        file_name = f"worker_{self._core.rank:04d}.safetensors"
        self._writer = threading.Thread(target=self._write, args=(folder, file_name, tensors, scalars), name="raypar-save")
        self._writer.start()

    def result(self) -> ShardRecord | None:
        """Waits for the writer. None when other workers write all that this one holds. Raises `CheckpointError`."""
        assert self._writer is not None
        self._writer.join()
        if self._error is not None:
            raise self._error
        return self._record

    def _share(self) -> tuple[dict[Name, Tensor], dict[Name, Scalar]]:
        """The first replica writes; a parameter tied across stages is written by the first of them."""
        tensors: dict[Name, Tensor] = {}
        scalars: dict[Name, Scalar] = {}
        core = self._core
        if core.assignment.plan.seats[core.rank].replica:
            return tensors, scalars
        first = {tie.name: min(tie.stages) for tie in core.assignment.crossing.ties}
        for index, stage in core.stages.items():
            states = state_of(core.end.optimizers[index]) if index in core.end.optimizers else {}
            for name, parameter in stage.parameters.items():
                if first.get(name, index) != index:
                    continue
                tensors[name, PARAMETER] = parameter.detach().clone()
                for kind, value in states.get(name, {}).items():
                    if isinstance(value, Tensor):
                        tensors[name, kind] = value.detach().clone()
                    else:
                        scalars[name, kind] = value
        return tensors, scalars

    def _write(self, folder: Path, file_name: str, tensors: dict[Name, Tensor], scalars: dict[Name, Scalar]) -> None:
        try:
            if tensors or scalars:
                self._record = write_shard(folder, file_name, tensors, scalars)
        except Exception as error:
            self._error = error

    def restore(self, checkpoint: Path) -> None:
        """Put the checkpoint's values into this worker's parameters and optimizers. Raises `CheckpointError`."""
        for index, stage in self._core.stages.items():
            found = read_tensors(checkpoint, list(stage.parameters))
            with torch.no_grad():
                for name, parameter in stage.parameters.items():
                    parameter.copy_(found[name].pop(PARAMETER))
            if index in self._core.end.optimizers:
                load_state(self._core.end.optimizers[index], {name: kinds for name, kinds in found.items() if kinds})
