"""A worker's state in checkpoints: copied to host memory, written in the background, read back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import MappingProxyType

import torch
from torch import Tensor

from raypar.errors import CheckpointError
from raypar.model.initial_values_source_protocol import InitialValues
from raypar.plan.pieces import Piece
from raypar.plan.shard_ranges import IndexRanges, TensorCut, count_indices, intersect_ranges, merge_ranges, positions_of_indices
from raypar.worker.checkpoint.checkpoint_files import (
    CheckpointAt,
    KeptState,
    Scalar,
    ShardRecord,
    SharedState,
    StateName,
    TensorRuns,
    TensorSlices,
    encode_tensor,
    load_manifest,
    read_checkpoint_buffers,
    read_shared_state,
    stream_checkpoint_state,
    write_shard,
)
from raypar.worker.checkpoint.expected_optimizer_state import check_kept_state
from raypar.worker.checkpoint.manifest import EncodedTensor, Manifest
from raypar.worker.checkpoint.state_key import (
    ATTRIBUTE,
    AVERAGE,
    BUFFER,
    CACHE,
    GROUP,
    OPTIMIZER,
    PARAMETER,
    StateKey,
    optimizer_key,
)
from raypar.worker.pretrained.frozen_values import read_frozen_values
from raypar.worker.stage.stage import Stage
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage
from raypar.worker.stage.tensors_without_memory import has_memory
from raypar.worker.state.file_memory import FileMemoryPool
from raypar.worker.state.parameter_state import ParameterSlice
from raypar.worker.step.optimizer_state import OptimizerState, Value, read_optimizer_state, write_optimizer_state
from raypar.worker.step.owned_parameters import OwnedParameter

WRITE_TIMEOUT_S = 600.0
"""How long the disk may take to write one worker's file."""
CopyToHost = Callable[[Tensor], Tensor]
"""Makes a contiguous copy of a tensor in host memory, or in a file."""


def copy_to_host(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()


@dataclass(frozen=True)
class StateSnapshot:
    """Copies of parameters, optimizer state and buffers at one committed step."""

    tensors: Mapping[StateName, Tensor]
    """(parameter or buffer, what it is of it) -> copy in host memory."""
    scalars: Mapping[StateName, Scalar]
    """(parameter, what it is of it) -> number that the optimizer keeps, such as its step count."""
    slices: Mapping[StateName, TensorSlices | TensorRuns] = field(default_factory=dict)
    """Which part of the unsharded tensor a copy is; no entry: all of it."""
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """First name of a tied parameter -> its other names."""
    shared: tuple[tuple[int, SharedState], ...] = ()
    """(stage, optimizer state of the stage that many parameters share): all stages should have it alike."""
    kept: KeptState | None = None
    """What the optimizers hold for each parameter of the stages, copied here or by another worker; None: none is copied."""


def take_snapshot(
    stages: Mapping[ShardOfStage, Stage],
    optimizers: Mapping[ShardOfStage, torch.optim.Optimizer],
    pieces: Mapping[int, Mapping[str, Sequence[Piece]]],
    owned: Mapping[ShardOfStage, Sequence[OwnedParameter]] = MappingProxyType({}),
    *,
    copy: CopyToHost = copy_to_host,
) -> StateSnapshot:
    """Copy the state of parameters and buffers to host memory. `pieces`: by index of the stage, as `Ownership` gives them; of
    what is cut, each virtual shard of the worker adds its slice. `copy`: makes the copies.

    `optimizers`: by stage; a snapshot has no state of those that are left out. `owned`: what they train; without it, whole
    parameters. Raises `StateNotKeptError` for optimizer state that cannot be kept, by name.
    """
    tensors: dict[StateName, Tensor] = {}
    scalars: dict[StateName, Scalar] = {}
    parts: dict[StateName, list[tuple[Tensor, TensorSlices]]] = {}
    shared: list[tuple[int, SharedState]] = []
    kept: dict[str, list[str]] = {}
    runs = SnapshotOfRuns(owned, pieces)
    first = {index: min(number for at, number in stages if at == index) for index, _ in stages}
    with torch.no_grad():
        for (index, number), stage in stages.items():
            optimizer, is_first = optimizers.get((index, number)), number == first[index]
            state = read_optimizer_state(optimizer) if optimizer is not None else OptimizerState()
            keys = {each.key: each.name for each in owned.get((index, number), ())}
            if optimizer is not None and is_first:
                kept |= {keys.get(key, key): sorted(of) for key, of in state.parameters.items()}
                shared.append((index, _shared_state(state)))
            runs.add_stage((index, number), stage, state, is_first=is_first)
            for name in pieces.get(index, ()):
                if name in runs.names or (owned and name in stage.parameters and not _is_here(name, stage, keys)):
                    continue
                if name in stage.buffers:
                    if is_first:
                        tensors[name, BUFFER if name in stage.persistent else CACHE] = copy(stage.buffers[name])
                    continue
                if name not in stage.parameters:  # of a whole layer, which the first one has
                    continue
                shard, parameter = stage.shard, stage.parameters[name]
                cut = shard.layout.cuts.get(name) if shard is not None else None
                if cut is not None and not _is_written(cut, number, parameter, pieces[index][name]):
                    continue
                for key, value in {PARAMETER: parameter, **_beside(name, state)}.items():
                    if shard is not None and cut is not None and isinstance(value, Tensor) and value.shape == parameter.shape:
                        counted = shard.owned(name, value)
                        if counted.numel():
                            parts.setdefault((name, key), []).append((counted, shard.slices(name, value)))
                    elif is_first and not (shard is not None and cut is not None and shard.group.shard > 0):
                        # A step count of what is cut, which is every shard's, is written by the first of all.
                        if isinstance(value, Tensor):
                            tensors[name, key] = copy(value)
                        else:
                            scalars[name, key] = value
        slices: dict[StateName, TensorSlices | TensorRuns] = {}
        for name_and_key, of_shards in parts.items():
            tensors[name_and_key], slices[name_and_key] = _joined_slices(of_shards, copy)
        runs.add_to(tensors, scalars, slices, copy)
    ties = {others[0]: others[1:] for stage in stages.values() for others in stage.graph.shared_names}
    return StateSnapshot(tensors, scalars, slices, ties, tuple(shared), kept if optimizers else None)


def _beside(key: str, state: OptimizerState) -> dict[StateKey, Value]:
    """What is kept beside a parameter, or a run of one: its average, and what the optimizer keeps."""
    average: dict[StateKey, Value] = {AVERAGE: state.averages[key]} if key in state.averages else {}
    return average | {optimizer_key(name): value for name, value in state.parameters.get(key, {}).items()}


def _is_here(name: str, stage: Stage, keys: Mapping[str, str]) -> bool:
    """Whether a parameter's state is this worker's: what is trained may be another replica's."""
    return not stage.parameters[name].requires_grad or name in keys


def _is_written(cut: TensorCut, number: int, parameter: Tensor, pieces: Sequence[Piece]) -> bool:
    """Whether a virtual shard's slice is among the pieces that the worker writes: it may own that of another of its virtual
    shards, and only hold this one, which its owner writes. True of a slice without elements."""
    own = cut.element_ranges(cut.owned(number), ParameterSlice(cut, number).size(parameter.shape))
    return not own or bool(intersect_ranges(own, tuple((piece.start, piece.stop) for piece in pieces)))


class SnapshotOfRuns:
    """What a snapshot has of parameters that replicas divide: runs of elements of the flattened unsharded tensors."""

    names: frozenset[str]
    """The parameters of which this worker owns runs; of these a whole slice is a run, too."""
    shared: dict[StateName, Value]
    """(parameter, what it is of it) -> what is not by element, from the worker with the parameter's first element."""

    def __init__(
        self, owned: Mapping[ShardOfStage, Sequence[OwnedParameter]], pieces: Mapping[int, Mapping[str, Sequence[Piece]]]
    ) -> None:
        """`pieces`: by stage, those to write."""
        self.names = frozenset(each.name for mine in owned.values() for each in mine if each.run is not None)
        self.shared = {}
        self._owned, self._pieces = owned, pieces
        self._parts: dict[StateName, list[tuple[int, int, Tensor]]] = {}
        """By parameter and what it is of it: (first element, element behind the last, flat tensor)."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the unsharded tensors."""

    def add_stage(self, index: ShardOfStage, stage: Stage, state: OptimizerState, *, is_first: bool) -> None:
        """Take in what a virtual shard of a stage owns. `is_first`: it is the worker's one that writes what all have."""
        cuts = stage.shard.layout.cuts if stage.shard is not None else {}
        for each in self._owned.get(index, ()):
            mine = self._pieces.get(index[0], {}).get(each.name, ())
            if each.name not in self.names or not (is_first or each.name in cuts):
                continue
            place = ParameterSlice(cuts[each.name], index[1]) if each.name in cuts else ParameterSlice()
            local = stage.parameters[each.name].shape
            size = place.size(local)
            write: IndexRanges = tuple((piece.start, piece.stop) for piece in mine)
            self._shapes[each.name] = tuple(local)
            if place.cut is not None:
                write = intersect_ranges(write, place.cut.element_ranges(place.cut.owned(index[1]), size))
                self._shapes[each.name] = (place.cut.whole_size, *local[1:])
            beside = _beside(each.key, state)
            run = each if each.run is not None else replace(each, run=(0, local.numel()))
            for (start, stop), here in run.parts(place.spans(size)):
                for a, b in intersect_ranges(((start, stop),), write):
                    self._add(each, {PARAMETER: each.parameter, **beside}, a, b, here.start + a - start)

    def _add(self, owned: OwnedParameter, state: Mapping[StateKey, Value], start: int, stop: int, at: int) -> None:
        """Take in elements [start, stop), which lie at `at` in the run."""
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == owned.parameter.shape:
                part = value.detach().reshape(-1)[at : at + stop - start]
                self._parts.setdefault((owned.name, key), []).append((start, stop, part))
            elif start == 0:
                self.shared[owned.name, key] = value

    def add_to(
        self,
        tensors: dict[StateName, Tensor],
        scalars: dict[StateName, Scalar],
        slices: dict[StateName, TensorSlices | TensorRuns],
        copy: CopyToHost,
    ) -> None:
        """Add copies in host memory, of all runs of a parameter one after the other, and which they are."""
        for name_and_key, parts in self._parts.items():
            parts.sort(key=itemgetter(0))
            tensors[name_and_key] = _own(torch.cat([part for _, _, part in parts]), copy)
            spans = merge_ranges((start, stop) for start, stop, _ in parts)
            slices[name_and_key] = TensorRuns(self._shapes[name_and_key[0]], spans)
        for name_and_key, value in self.shared.items():
            if isinstance(value, Tensor):
                tensors[name_and_key] = copy(value)
            else:
                scalars[name_and_key] = value


def _joined_slices(parts: Sequence[tuple[Tensor, TensorSlices]], copy: CopyToHost) -> tuple[Tensor, TensorSlices]:
    """(copy in host memory, where it lies) of the slices of one tensor that virtual shards of a worker own."""
    (first, at), *others = parts
    if not others:
        return copy(first), at
    held = merge_ranges(span for _, each in parts for span in each.spans)
    shape = list(first.shape)
    shape[at.dim] = count_indices(held)
    whole = torch.empty(shape, dtype=first.dtype)
    for tensor, each in parts:
        before = 0
        for start, stop in positions_of_indices(held, each.spans):
            whole.narrow(at.dim, start, stop - start).copy_(tensor.narrow(at.dim, before, stop - start))
            before += stop - start
    return _own(whole, copy), TensorSlices(at.shape, at.dim, held)


def _shared_state(state: OptimizerState) -> SharedState:
    """What many parameters share, as a manifest has it."""
    of_groups = {(pattern, GROUP): _encoded(entries) for pattern, entries in state.groups.items()}
    of_optimizers = {(pattern, ATTRIBUTE): _encoded(entries) for pattern, entries in state.attributes.items()}
    return {**of_groups, **of_optimizers}


def _encoded(state: Mapping[str, Value]) -> Mapping[str, Scalar | EncodedTensor]:
    """Small tensors and numbers as a manifest has them."""
    return {key: encode_tensor(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def _own(made: Tensor, copy: CopyToHost) -> Tensor:
    """What was made for the snapshot, where `copy` puts copies."""
    return made.cpu() if copy is copy_to_host else copy(made)


def restore_from_checkpoint(
    checkpoint: CheckpointAt,
    stages: Mapping[ShardOfStage, Stage],
    optimizers: Mapping[ShardOfStage, torch.optim.Optimizer],
    initial: InitialValues,
    owned: Mapping[ShardOfStage, Sequence[OwnedParameter]] = MappingProxyType({}),
    *,
    files: FileMemoryPool | None = None,
) -> None:
    """Read a checkpoint's state into these stages and optimizers, and only what they hold. Raises `CheckpointError`.

    Without `optimizers` no state of optimizers is read. `owned`: what they train; without it, whole parameters. `initial`:
    values of buffers that the checkpoint lacks; an older raypar saved persistent buffers only. `files`: where what is read lies
    until it is in its place; None: in memory.
    """
    manifest = load_manifest(checkpoint)
    if optimizers:
        check_kept_state(manifest)
    found = {index: _RestoredStage(stage, owned.get(index), files) for index, stage in stages.items()}
    with torch.no_grad():
        for name, key, value in _stream_parameters(manifest, stages, only_weights=not optimizers):
            having = [each for each in found.values() if name in each.stage.parameters]
            for each in having:
                each.take(checkpoint, name, key, value, is_shared=len(having) > 1)
        _restore_buffers(checkpoint, stages, initial)
        shared = read_shared_state(checkpoint)
        for index, optimizer in optimizers.items():
            # No state at all is what an optimizer has before its first step; an empty dict is not the same for all of them.
            state = OptimizerState(found[index].states, *shared, found[index].averages)
            write_optimizer_state(optimizer, state, takes_over=True)


class _RestoredStage:
    """One stage while its parameters and its optimizer's state are read, tensor by tensor, of which it keeps its own parts."""

    def __init__(self, stage: Stage, owned: Sequence[OwnedParameter] | None, files: FileMemoryPool | None) -> None:
        whole = [OwnedParameter(name, each) for name, each in stage.parameters.items()] if owned is None else owned
        self.stage, self._files = stage, files
        self._owned: dict[str, list[OwnedParameter]] = {}
        """Parameter -> what this worker keeps of it."""
        for each in whole:
            self._owned.setdefault(each.name, []).append(each)
        self.states: dict[str, dict[str, Value]] = {}
        """Key of what an optimizer trains -> its state."""
        self.averages: dict[str, Tensor] = {}
        """The same -> average of the weights."""

    def take(self, checkpoint: CheckpointAt, name: str, key: StateKey, value: Value, *, is_shared: bool) -> None:
        """Take in a parameter or state of one, unsharded. `is_shared`: another stage does so, too."""
        if isinstance(value, Tensor) and self.stage.shard is not None:
            value = self.stage.shard.part(name, value)
        if key == PARAMETER:
            assert isinstance(value, Tensor)
            _check_alike(checkpoint, name, self.stage.parameters[name], value)
            self._fill(name, value)
            return
        shape = self.stage.parameters[name].shape
        for each in self._owned.get(name, ()):
            part = value
            if isinstance(value, Tensor):
                part = self._keep(each.of(value) if value.shape == shape else value, copy=is_shared or each.run is not None)
            if key.kind == OPTIMIZER:
                self.states.setdefault(each.key, {})[key.name] = part
            elif key == AVERAGE and isinstance(part, Tensor):
                self.averages[each.key] = part

    def _keep(self, part: Tensor, *, copy: bool) -> Tensor:
        if self._files is not None:
            return self._files.copy_of(part)
        return part.clone() if copy else part

    def _fill(self, name: str, value: Tensor) -> None:
        """Put the values of a parameter where the stage has it, and where this worker keeps runs of it."""
        weights = self.stage.weights
        whole = weights.computed_with(name) if name in weights.freed_masters else self.stage.parameters[name]
        if has_memory(whole):
            whole.copy_(value)
        for each in self._owned.get(name, ()):
            if name in weights.freed_masters or not has_memory(whole):
                each.parameter.copy_(each.of(value))


def _restore_buffers(checkpoint: CheckpointAt, stages: Mapping[ShardOfStage, Stage], initial: InitialValues) -> None:
    wanted = {name: tensor.dtype for stage in stages.values() for name, tensor in stage.buffers.items()}
    buffers = read_checkpoint_buffers(checkpoint, wanted)
    lacking = [name for name in wanted if name not in buffers]
    buffers |= {name: value.to(wanted[name]) for name, value in initial.stream(lacking, torch.float64)} if lacking else {}
    for stage in stages.values():
        for name, tensor in stage.buffers.items():
            _check_alike(checkpoint, name, tensor, buffers[name])
            tensor.copy_(buffers[name])


def _check_alike(checkpoint: CheckpointAt, name: str, tensor: Tensor, there: Tensor) -> None:
    """Raises `CheckpointError` if a checkpoint has a tensor of another shape or dtype than the model."""
    if there.shape != tensor.shape or there.dtype != tensor.dtype:
        raise CheckpointError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} in the model and {list(there.shape)} {there.dtype} "
            f"in checkpoint {checkpoint}",
            cure="use a checkpoint of this model",
        )


def _stream_parameters(
    manifest: Manifest, stages: Mapping[ShardOfStage, Stage], *, only_weights: bool
) -> Iterator[tuple[str, StateKey, Value]]:
    """(name, key, value) of the state of the parameters of these stages, unsharded, those included that the checkpoint leaves
    out, because they are frozen."""
    frozen = manifest.frozen.tensors.keys() if manifest.frozen is not None else set[str]()
    names = {name for stage in stages.values() for name in stage.parameters}
    yield from stream_checkpoint_state(manifest.checkpoint, names - frozen, only_weights=only_weights)
    yield from ((name, PARAMETER, value) for name, value in read_frozen_values(manifest, sorted(names & frozen)))


class CheckpointWriter:
    """Writes one snapshot at a time in a background thread, so that training goes on meanwhile."""

    _thread: threading.Thread | None
    """Writes the last snapshot that was started; None before the first."""
    _record: ShardRecord | None
    """What was written, once that is done."""
    _error: Exception | None
    """Why it could not be written."""

    def __init__(self) -> None:
        self._thread, self._record, self._error = None, None, None

    def start(self, checkpoint: CheckpointAt, file_name: str, state: StateSnapshot) -> None:
        """Begin to write. Waits for a snapshot that is still being written; raises `CheckpointError` if that takes too long."""
        if self._thread is not None:
            self._wait(WRITE_TIMEOUT_S)
        self._record = self._error = None

        def write() -> None:
            try:
                self._record = write_shard(
                    checkpoint, file_name, state.tensors, state.scalars, state.slices, state.ties, state.shared, state.kept
                )
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=write, name="raypar-checkpoint", daemon=True)
        self._thread.start()

    def _wait(self, timeout_s: float) -> None:
        assert self._thread is not None, "nothing was started"
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"the disk did not take a checkpoint within {timeout_s:g} s", cure="set run_dir to a faster disk"
            )

    def result(self, timeout_s: float = WRITE_TIMEOUT_S) -> ShardRecord:
        """Wait until the file is written, and describe it. Raises the error of writing it, or `CheckpointError` after
        `timeout_s`."""
        self._wait(timeout_s)
        if self._error is not None:
            raise self._error
        assert self._record is not None
        return self._record
