"""What runs in a worker's data processes: reads samples there, and packs them for the way back."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NoReturn

import torch
from torch import Tensor

from raypar.errors import RayparError, UserCodeError
from raypar.job import DataConfig
from raypar.user_code.user_code_errors import error_text
from raypar.worker.data.collate import MicrobatchPlace
from raypar.worker.data.sample_order import SamplePosition
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.data.user_dataset import MapStyleDataset, make_dataset
from raypar.worker.process.environment_and_signals_guard import StateWarnings
from raypar.worker.process.torch_state_guard import DEFAULT_TORCH_STATE, TorchStateGuard

Packed = dict[str, tuple[bytearray, torch.dtype, tuple[int, ...]]]
Answer = tuple[Packed, StateWarnings]
"""A microbatch, and lines about process state that the data set has left changed."""

ReadRequest = tuple[list[SamplePosition], MicrobatchPlace, tuple[str, ...], tuple[str, ...]]
"""What `read_in_data_process` is given."""

Batches = tuple[tuple[str, ...], tuple[str, ...]]
"""(fields that are collated, all fields of a collated batch)."""


@dataclass
class DataProcess:
    """What a data process has."""

    spec: DataConfig
    """The data set and how it is collated."""
    seed: int
    """The job's seed."""
    dataset: MapStyleDataset | RayparError
    """The data set; the error with which it could not be made."""
    guard: TorchStateGuard
    """Restores process state that the data set leaves changed."""
    readers: dict[Batches, SampleReader] = field(default_factory=dict)
    """Fields -> what reads them: another plan may need others."""

    def reader(self, batches: Batches) -> SampleReader:
        """What reads these fields. Raises the error of the data set."""
        if isinstance(self.dataset, RayparError):
            raise self.dataset
        if batches not in self.readers:
            fields, names = batches
            self.readers[batches] = SampleReader.of(
                self.dataset, self.spec, self.seed, fields, guard=self.guard, batch_names=names
            )
        return self.readers[batches]


_process: DataProcess | None = None
"""Of this process, if it is a data process."""


def serve_reads(requests: Connection, spec: DataConfig, seed: int) -> None:
    """What a data process does: answer each `ReadRequest` with an `Answer` or an error, until nobody is there. Then it ends."""
    signal.signal(signal.SIGTERM, lambda number, frame: _end_at_once())
    start_data_process(spec, seed)
    while True:
        try:
            request: ReadRequest = requests.recv()
        except (EOFError, ConnectionError):
            _end_at_once()
        try:
            answer: Answer | Exception = read_in_data_process(*request)
        except Exception as error:
            answer = error if _is_picklable(error) else UserCodeError(f"the data set raised {error_text(error)}")
        try:
            requests.send(answer)
        except ConnectionError:
            _end_at_once()


def _end_at_once() -> NoReturn:
    """End this process, whose worker is gone, while other workers recover: Python's own end, with PyTorch imported, takes a
    second of a processor."""
    os.nice(19)
    for process in multiprocessing.active_children():  # of the data set: nobody else knows of them
        process.kill()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _is_picklable(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def start_data_process(spec: DataConfig, seed: int) -> None:
    """Runs once in every data process: makes the data set."""
    global _process
    guard = TorchStateGuard(
        threads=1, base=DEFAULT_TORCH_STATE
    )  # the arguments are unpickled, and the data set's module imported, by now
    guard.establish("the module of the data set")
    try:
        with guard.watching(f"the data set function {spec.label}"):
            dataset = make_dataset(spec)
    except RayparError as error:
        dataset = error
    _process = DataProcess(spec, seed, dataset, guard)


def read_in_data_process(
    places: list[SamplePosition], at: MicrobatchPlace, fields: tuple[str, ...], batch_names: tuple[str, ...]
) -> Answer:
    """Read the samples of the microbatch `at`. `batch_names`: all fields of a collated batch; empty: not known."""
    assert _process is not None, "start_data_process runs first"
    packed = _pack(_process.reader((fields, batch_names)).read(places, at))
    _process.guard.check_all("the data set's __getitem__")
    return packed, _process.guard.lines()


def _pack(batch: Mapping[str, Tensor]) -> Packed:
    """Plain bytes: torch's own way to another process is shared memory, one file descriptor a tensor."""
    return {
        name: (bytearray(t.contiguous().reshape(-1).view(torch.uint8).numpy().data), t.dtype, tuple(t.shape))
        for name, t in batch.items()
    }


def unpack(packed: Packed) -> dict[str, Tensor]:
    return {
        name: torch.frombuffer(data, dtype=dtype).clone().reshape(shape) if data else torch.empty(shape, dtype=dtype)
        for name, (data, dtype, shape) in packed.items()
    }
