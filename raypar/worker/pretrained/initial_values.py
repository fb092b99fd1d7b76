"""Initial values of a run with `init_from`: each tensor is read from the file when it is needed, and not kept."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from raypar.errors import CheckpointError
from raypar.job import Job
from raypar.job.function_section import FROM_FOLDER
from raypar.model.graph import Graph
from raypar.model.initial_values_source_protocol import DimRanges, InitialValues
from raypar.model.layer_skeletons import parameter_shapes, parameters_and_buffers_on_meta, persistent_buffers
from raypar.plan.wording import count_noun
from raypar.storage.checkpoint_store import CheckpointRef
from raypar.worker.layer_precisions import dtype_of_job
from raypar.worker.pretrained.open_weights import absolute_weights_path, open_weights, resolve_weights_source
from raypar.worker.pretrained.weights_file import FLOATING
from raypar.worker.pretrained.weights_matching import match_weights

PEFT = "base_model.model."
"""How the names of a module of `peft` begin, whose base model has adapters."""
_OF_SAVED_MODULE = re.compile(r"\.modules_to_save\.[^.]+\.")
"""In the names of a module that is trained whole, beside adapters."""


@dataclass(frozen=True)
class WeightsFromFile:
    """`InitialValues` that come from a file; tensors that the file lacks get the model's own values."""

    path: str | Path | CheckpointRef
    """What `resolve_weights_source` returned."""
    fingerprint: str
    """`WeightsFile.fingerprint` of the file when `names` was made."""
    names: Mapping[str, str]
    """The model's name -> the file's (`WeightsMatch.names`)."""
    own: InitialValues
    """The model's own values."""
    notes: tuple[str, ...] = ()
    """Lines for the user: casts, tensors that are not used."""

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `InitialValues`. The model's own values are made only if some of `names` need them.

        Raises `CheckpointError` if the path leads to another file here, as it may on another node.
        """
        yield from self._read({name: None for name in names if name in self.names}, dtype)
        rest = [name for name in names if name not in self.names]
        if rest:
            yield from self.own.stream(rest, dtype)

    def stream_slices(self, slices: Mapping[str, DimRanges], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `InitialValues`. Of what the file has the slice alone is read. Raises as `stream` does."""
        there = {name: each for name, each in slices.items() if name in self.names}
        if there:
            yield from self._read(there, dtype)

    def _read(self, slices: Mapping[str, DimRanges | None], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of these slices (None: the whole tensor), from the file. Raises `CheckpointError` if the file is
        another one."""
        with open_weights(self.path) as file:
            found = file.fingerprint()
            if found != self.fingerprint:
                raise CheckpointError(
                    f"{self.path} is another file on {socket.gethostname()} than where the run was started: its fingerprint is "
                    f"{found[:12]}, not {self.fingerprint[:12]}",
                    cure="put one file in a place that all nodes share, or the same file on each of them",
                )
            for name, part in slices.items():
                stored = self.names[name]
                yield name, file.read(stored, dtype if file.names[stored].dtype in FLOATING else None, part)

    def release(self) -> None:
        """See `InitialValues`."""
        self.own.release()


def with_weights_fingerprint(spec: Job) -> Job:
    """The job with the absolute path and the fingerprint of what `init_from` names, so that all workers read the same file.

    Raises `CheckpointError`.
    """
    if spec.init_from is None:
        return spec
    path, _ = resolve_weights_source(spec.init_from.path)
    with open_weights(path) as file:
        fingerprint = file.fingerprint()
    return spec.replace(init_from=spec.init_from.of_file(absolute_weights_path(path), fingerprint))


def weights_from_file(spec: Job, graph: Graph, own: InitialValues) -> WeightsFromFile:
    """The initial values of `graph` under `spec.init_from`. Raises `CheckpointError` for weights of another model."""
    source = spec.init_from
    assert source is not None
    state = parameters_and_buffers_on_meta(graph, 0, len(graph.layers), dtype_of_job(spec))
    kept = {*parameter_shapes(graph), *persistent_buffers(graph)}
    path = source.path if source.fingerprint else resolve_weights_source(source.path)[0]
    with open_weights(path) as file:
        all_names = dict.fromkeys([*state, *(name for tie in graph.shared_names for name in tie)])
        names = None if source.says_how_names_differ else names_in_base_model(all_names, file.names)
        there = names if names is not None else {name: name for name in all_names}
        found = match_weights(
            file,
            {there[name]: tuple(tensor.shape) for name, tensor in state.items() if name in kept and name in there},
            [[there[name] for name in tie if name in there] for tie in graph.shared_names],
            [there[name] for name in state if name not in kept and name in there],
            source=source,
            dtype=spec.dtype,
            dtypes={there[name]: tensor.dtype for name, tensor in state.items() if name in there},
            may_differ_by_prefix=spec.model.function == FROM_FOLDER and not source.says_how_names_differ,
        )
        fingerprint = source.fingerprint or file.fingerprint()
    notes = [*found.notes]
    if names is not None:
        notes.append(
            f"{count_noun(len(there.keys() & state.keys()), 'tensor')} of the base model begin as in {file.path.name}, and "
            f"{count_noun(len(kept - there.keys()), 'tensor')} of adapters as the model function made them"
        )
    stored = {name: found.names[base] for name, base in there.items() if base in found.names}
    return WeightsFromFile(path, fingerprint, stored, own, (*notes, *own.notes))


def names_in_base_model(names: Collection[str], stored: Collection[str]) -> dict[str, str] | None:
    """The model's name -> the base model's, for a model with adapters of `peft` and the weights of its base model; adapters'
    own tensors have none. None for other models, and for weights that have the model's names."""
    if not any(name.startswith(PEFT) for name in names) or any(name.startswith(PEFT) for name in stored):
        return None
    adapted = {name.partition(".base_layer.")[0] for name in names if ".base_layer." in name}
    found: dict[str, str] = {}
    for name in names:
        whole = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        whole = _OF_SAVED_MODULE.sub(".", whole)
        parts = name.split(".")
        inside = any(".".join(parts[:length]) in adapted for length in range(1, len(parts)))
        if name.startswith(PEFT) and (not inside or ".base_layer." in name):
            found[name] = whole.removeprefix(PEFT)
    return found
