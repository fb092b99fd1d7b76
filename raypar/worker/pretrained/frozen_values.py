"""The frozen values that a checkpoint of `checkpoint.only: trained` leaves out: read again from the weights that the run began
with, which must be the same ones."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from raypar.errors import CheckpointError
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.storage.checkpoint_store import CheckpointRef
from raypar.worker.checkpoint.checkpoint_files import PARAMETER, CheckpointAt, CheckpointTensors, StateKey, load_manifest
from raypar.worker.checkpoint.frozen_table import FrozenTable, FrozenTensor
from raypar.worker.checkpoint.manifest import Manifest
from raypar.worker.pretrained.open_weights import open_weights
from raypar.worker.pretrained.weights_file import FLOATING, WeightsFile

if TYPE_CHECKING:
    from torch import Tensor


def make_frozen_table(spec: Job, graph: Graph) -> FrozenTable | None:
    """The parameters that checkpoints of a job may leave out: those that are not trained, and begin as the weights file has
    them. None if there are none."""
    from raypar.model.layer_skeletons import frozen_parameters, parameter_shapes
    from raypar.worker.pretrained.initial_values import WeightsFromFile

    values, source = graph.initial_values, spec.init_from
    if not isinstance(values, WeightsFromFile) or source is None:
        return None
    shapes = parameter_shapes(graph)
    names = [name for name in shapes if name in frozen_parameters(graph) and name in values.names]
    tensors = {name: FrozenTensor(values.names[name], tuple(shapes[name]), spec.dtype) for name in names}
    ties = {other: tie[0] for tie in graph.shared_names if tie[0] in tensors for other in tie[1:]}
    if not tensors:
        return None
    with open_weights(source.path) as file:
        pieces = file.digest_of_pieces(one.stored for one in tensors.values())
    return FrozenTable(source.path, values.fingerprint, tensors, ties, pieces)


@contextlib.contextmanager
def _opened(manifest: Manifest, frozen: FrozenTable) -> Iterator[WeightsFile]:
    """The weights that have the frozen values. Raises `CheckpointError` if they are gone, or are others."""
    of = f"checkpoint {manifest.checkpoint} holds only what was trained; {len(frozen.tensors)} frozen tensors are those of"
    try:
        file = open_weights(frozen.path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{of} {frozen.path}, which cannot be read: {error.what}", cure=f"put the folder or file back at {frozen.path}"
        ) from error
    with file:
        found = file.fingerprint()
        if found != frozen.fingerprint:
            raise CheckpointError(
                f"{of} {frozen.path} with the fingerprint {frozen.fingerprint[:12]}, and those there have {found[:12]}",
                cure="put the weights back with which the run began",
            )
        if frozen.pieces is not None:
            found = file.digest_of_pieces(one.stored for one in frozen.tensors.values())
            if found != frozen.pieces:
                raise CheckpointError(
                    f"{of} {frozen.path} with the digest {frozen.pieces[:12]}, and those there have {found[:12]}: some of "
                    "their values are others",
                    cure="put the weights back with which the run began",
                )
        yield file


def check_frozen_values(manifest: Manifest) -> None:
    """Raise `CheckpointError` if the frozen values of a checkpoint are gone, or are others."""
    if manifest.frozen is not None:
        with _opened(manifest, manifest.frozen):
            pass


def check_frozen_values_at_resume(manifest: Manifest, spec: Job) -> None:
    """The same, for a run that goes on; its checkpoints may leave frozen values out if this one does."""
    check_frozen_values(manifest)
    if manifest.frozen is None and spec.checkpoint.only == "trained":
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint} holds all values, and checkpoint.only is trained: whether the frozen ones are "
            "still those of init_from is not known",
            cure=f"leave checkpoint.only out; or begin a new run with its weights: init_from={manifest.checkpoint}",
        )


def read_frozen_values(manifest: Manifest, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of those of `names` that a checkpoint leaves out. Raises `CheckpointError`."""
    frozen = manifest.frozen
    wanted = [name for name in names if frozen is not None and name in frozen.tensors]
    if frozen is None or not wanted:
        return
    with _opened(manifest, frozen) as file:
        for name in wanted:
            yield name, _read(file, frozen.tensors[name])


def _read(file: WeightsFile, tensor: FrozenTensor) -> Tensor:
    import torch

    stored = file.names[tensor.stored].dtype
    return file.read(tensor.stored, getattr(torch, tensor.dtype) if stored in FLOATING else None)


class AllTensors(CheckpointTensors):
    """The parameters of a checkpoint, as `CheckpointTensors`, and the frozen ones that it leaves out."""

    def __init__(self, checkpoint: CheckpointAt, kinds: Collection[StateKey] = (PARAMETER,), dtype: str | None = None) -> None:
        super().__init__(checkpoint, kinds, dtype)
        self._file: WeightsFile | None = None
        self._frozen: Mapping[str, FrozenTensor] = {}
        if self._manifest.frozen is not None and PARAMETER in kinds:
            self._frozen = self._manifest.frozen.tensors

    def __getitem__(self, name: str) -> Tensor:
        import torch

        if name not in self._frozen:
            return super().__getitem__(name)
        if self._file is None:
            stack = contextlib.ExitStack()
            assert self._manifest.frozen is not None
            self._file = stack.enter_context(_opened(self._manifest, self._manifest.frozen))
            weakref.finalize(self, stack.close)
        tensor = _read(self._file, self._frozen[name])
        return tensor.to(getattr(torch, self._dtype_of_frozen(name)))

    def _dtype_of_frozen(self, name: str) -> str:
        own = self._frozen[name].dtype
        return self._dtype if self._dtype is not None and "float" in own else own

    def specs(self) -> list[tuple[str, str, Sequence[int]]]:
        """See `CheckpointTensors`."""
        more = [(name, self._dtype_of_frozen(name), one.shape) for name, one in self._frozen.items()]
        return [*super().specs(), *more]

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self._frozen

    def __len__(self) -> int:
        return super().__len__() + len(self._frozen)


def weights_hash_of_checkpoint(checkpoint: CheckpointRef | CheckpointAt) -> str:
    """The weights hash (rule 10) of all parameters, the frozen ones that the checkpoint leaves out too."""
    from raypar.worker.checkpoint.checkpoint_files import checkpoint_weights_hash

    if load_manifest(checkpoint).frozen is None:
        return checkpoint_weights_hash(checkpoint)
    from raypar.worker.norm_and_weights_hash import weights_hash

    return weights_hash(AllTensors(checkpoint))
