"""Initial values of a run that begins with weights from a file: each tensor is read when it is asked for, and not kept."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from raypar.errors import CheckpointError
from raypar.model.build import parameter_shapes, persistent_buffers, state_on_meta
from raypar.model.graph import Graph
from raypar.worker.spec import JobSpec
from raypar.worker.weights_file import FLOATING, open_weights, resolve
from raypar.worker.weights_matching import check


class Values(Protocol):
    """What the model begins with by itself."""

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor in memory of its own) of each of `names` once, in any order; floating point in `dtype`."""

    def release(self) -> None:
        """Free what is kept for `stream`."""


@dataclass(frozen=True)
class WeightsFromFile:
    """Values by name: those of a file, and the model's `own` where the file has none."""

    path: Path
    """As `resolve` has found it."""
    fingerprint: str
    """`WeightsFile.fingerprint` of the file with which `names` were matched."""
    names: Mapping[str, str]
    """The model's name -> the file's (`Matching.names`)."""
    own: Values
    notes: tuple[str, ...] = ()
    """Lines for people: casts, what is left out."""

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor in memory of its own) of each of `names` once: on the CPU, contiguous, floating point in `dtype`.

        The model's own values are made only where some of `names` need them. Raises `CheckpointError` for another file under
        the same path, as another node may have it.
        """
        with open_weights(self.path) as file:
            found = file.fingerprint()
            if found != self.fingerprint:
                raise CheckpointError(
                    f"{self.path} is another file on {socket.gethostname()} than where the run was started: its fingerprint is "
                    f"{found[:12]}, not {self.fingerprint[:12]}",
                    cure="put one file in a place that all nodes share, or the same file on each of them",
                )
            for name in names:
                if name in self.names:
                    stored = self.names[name]
                    yield name, file.read(stored, dtype if file.names[stored].dtype in FLOATING else None)
        rest = [name for name in names if name not in self.names]
        if rest:
            yield from self.own.stream(rest, dtype)

    def release(self) -> None:
        """Free what the model's own values keep."""
        self.own.release()


def pinned(spec: JobSpec) -> JobSpec:
    """The job, whose `init_from` names one file or checkpoint for all workers, by its absolute path and fingerprint. Raises
    `CheckpointError`."""
    if spec.init_from is None:
        return spec
    path, _ = resolve(spec.init_from.path)
    with open_weights(path) as file:
        fingerprint = file.fingerprint()
    return replace(spec, init_from=replace(spec.init_from, path=str(path.resolve())), init_fingerprint=fingerprint)


def weights_from_file(spec: JobSpec, graph: Graph, own: Values) -> WeightsFromFile:
    """What the layers of `graph` begin with under `spec.init_from`. Raises `CheckpointError` for weights of another model."""
    source = spec.init_from
    assert source is not None
    state = state_on_meta(graph, 0, len(graph.layers), getattr(torch, spec.dtype))
    kept = {*parameter_shapes(graph), *persistent_buffers(graph)}
    path, _ = resolve(source.path) if not spec.init_fingerprint else (Path(source.path), ())
    with open_weights(path) as file:
        found = check(
            file,
            {name: tuple(tensor.shape) for name, tensor in state.items() if name in kept},
            graph.ties,
            [name for name in state if name not in kept],
            source=source,
            dtype=spec.dtype,
            dtypes={name: tensor.dtype for name, tensor in state.items()},
        )
        fingerprint = spec.init_fingerprint or file.fingerprint()
    return WeightsFromFile(path, fingerprint, found.names, own, found.notes)
