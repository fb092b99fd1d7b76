"""A worker's state in checkpoints: copied to host memory, written in the background, read back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypar.errors import CheckpointError
from raypar.model.initial_values_source_protocol import InitialValues
from raypar.plan.shard_ranges import count_indices, merge_ranges, positions_of_indices
from raypar.worker.checkpoint.checkpoint_files import (
    CheckpointAt,
    KeptState,
    Scalar,
    ShardRecord,
    SharedState,
    StateName,
    TensorSlices,
    encode_tensor,
    load_manifest,
    read_checkpoint_buffers,
    read_checkpoint_state,
    read_shared_state,
    write_shard,
)
from raypar.worker.checkpoint.expected_optimizer_state import check_kept_state
from raypar.worker.checkpoint.manifest import EncodedTensor
from raypar.worker.checkpoint.state_key import ATTRIBUTE, BUFFER, CACHE, GROUP, OPTIMIZER, PARAMETER, StateKey, optimizer_key
from raypar.worker.pretrained.frozen_values import read_frozen_values
from raypar.worker.stage.stage import Stage
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage
from raypar.worker.state.parameter_state import tensor_in
from raypar.worker.step.optimizer_state import OptimizerState, Value, read_optimizer_state, write_optimizer_state

WRITE_TIMEOUT_S = 600.0
"""How long the disk may take to write one worker's file."""


@dataclass(frozen=True)
class StateSnapshot:
    """Copies of parameters, optimizer state and buffers at one committed step."""

    tensors: Mapping[StateName, Tensor]
    """(parameter or buffer, what it is of it) -> copy in host memory."""
    scalars: Mapping[StateName, Scalar]
    """(parameter, what it is of it) -> number that the optimizer keeps, such as its step count."""
    slices: Mapping[StateName, TensorSlices] = field(default_factory=dict)
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
    names: Mapping[int, Iterable[str]],
) -> StateSnapshot:
    """Copy the state of the named parameters and buffers to host memory. `names`: by index of the stage, as `Ownership` gives
    them; of what is cut, each virtual shard of the worker adds its slice.

    `optimizers`: by stage; a snapshot has no state of those that are left out. Raises `StateNotKeptError` for optimizer state
    that cannot be kept, by name.
    """
    tensors: dict[StateName, Tensor] = {}
    scalars: dict[StateName, Scalar] = {}
    parts: dict[StateName, list[tuple[Tensor, TensorSlices]]] = {}
    shared: list[tuple[int, SharedState]] = []
    kept: dict[str, list[str]] = {}
    first = {index: min(number for at, number in stages if at == index) for index, _ in stages}
    with torch.no_grad():
        for (index, number), stage in stages.items():
            optimizer, is_first = optimizers.get((index, number)), number == first[index]
            state = read_optimizer_state(optimizer) if optimizer is not None else OptimizerState()
            if optimizer is not None and is_first:
                kept |= {name: sorted(of) for name, of in state.parameters.items()}
                of_groups = {(pattern, GROUP): _encoded(entries) for pattern, entries in state.groups.items()}
                of_optimizers = {(pattern, ATTRIBUTE): _encoded(entries) for pattern, entries in state.attributes.items()}
                shared.append((index, {**of_groups, **of_optimizers}))
            for name in names.get(index, ()):
                if name in stage.buffers:
                    if is_first:
                        tensors[name, BUFFER if name in stage.persistent else CACHE] = _copy(stage.buffers[name])
                    continue
                shard, parameter = stage.shard, stage.parameters[name]
                is_cut = shard is not None and name in shard.layout.cuts
                of_optimizer = {optimizer_key(key): value for key, value in state.parameters.get(name, {}).items()}
                for key, value in {PARAMETER: parameter, **of_optimizer}.items():
                    if shard is not None and is_cut and isinstance(value, Tensor) and value.shape == parameter.shape:
                        owned = shard.owned(name, value)
                        if owned.numel():
                            parts.setdefault((name, key), []).append((owned, shard.slices(name, value)))
                    elif is_first and not (is_cut and shard is not None and shard.group.shard > 0):
                        # A step count of what is cut, which is every shard's, is written by the first of all.
                        if isinstance(value, Tensor):
                            tensors[name, key] = _copy(value)
                        else:
                            scalars[name, key] = value
        slices: dict[StateName, TensorSlices] = {}
        for name_and_key, of_shards in parts.items():
            tensors[name_and_key], slices[name_and_key] = _joined_slices(of_shards)
    ties = {others[0]: others[1:] for stage in stages.values() for others in stage.graph.shared_names}
    return StateSnapshot(tensors, scalars, slices, ties, tuple(shared), kept if optimizers else None)


def _joined_slices(parts: Sequence[tuple[Tensor, TensorSlices]]) -> tuple[Tensor, TensorSlices]:
    """(copy in host memory, where it lies) of the slices of one tensor that virtual shards of a worker own."""
    (first, at), *others = parts
    if not others:
        return _copy(first), at
    held = merge_ranges(span for _, each in parts for span in each.spans)
    shape = list(first.shape)
    shape[at.dim] = count_indices(held)
    whole = torch.empty(shape, dtype=first.dtype)
    for tensor, each in parts:
        before = 0
        for start, stop in positions_of_indices(held, each.spans):
            whole.narrow(at.dim, start, stop - start).copy_(tensor.narrow(at.dim, before, stop - start))
            before += stop - start
    return whole, TensorSlices(at.shape, at.dim, held)


def _encoded(state: Mapping[str, Value]) -> Mapping[str, Scalar | EncodedTensor]:
    """Small tensors and numbers as a manifest has them."""
    return {key: encode_tensor(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def restore_from_checkpoint(
    checkpoint: CheckpointAt,
    stages: Mapping[ShardOfStage, Stage],
    optimizers: Mapping[ShardOfStage, torch.optim.Optimizer],
    initial: InitialValues,
) -> None:
    """Read a checkpoint's state into these stages and optimizers, and only what they hold. Raises `CheckpointError`.

    Without `optimizers` no state of optimizers is read. `initial`: values of buffers that the checkpoint lacks; an older raypar
    saved persistent buffers only.
    """
    if optimizers:
        check_kept_state(load_manifest(checkpoint))
    found = _read_parameters(checkpoint, stages, only_weights=not optimizers)
    shared = read_shared_state(checkpoint)
    wanted = {name: tensor.dtype for stage in stages.values() for name, tensor in stage.buffers.items()}
    buffers = read_checkpoint_buffers(checkpoint, wanted)
    lacking = [name for name in wanted if name not in buffers]
    buffers |= {name: value.to(wanted[name]) for name, value in initial.stream(lacking, torch.float64)} if lacking else {}
    with torch.no_grad():
        for index, stage in stages.items():
            values: dict[str, Tensor] = {name: tensor_in(found[index][name]) for name in stage.parameters}
            values |= {name: value for name, value in buffers.items() if name in stage.buffers}
            for name, tensor in {**stage.parameters, **stage.buffers}.items():
                there = values[name]
                if there.shape != tensor.shape or there.dtype != tensor.dtype:
                    raise CheckpointError(
                        f"{name} is {list(tensor.shape)} {tensor.dtype} in the model and {list(there.shape)} {there.dtype} "
                        f"in checkpoint {checkpoint}",
                        cure="use a checkpoint of this model",
                    )
                tensor.copy_(there)
            if index in optimizers:
                of_optimizer = {
                    name: {key.name: value for key, value in found[index][name].items() if key.kind == OPTIMIZER}
                    for name in stage.parameters
                }
                # No state at all is what an optimizer has before its first step; an empty dict is not the same for all of them.
                kept = {name: state for name, state in of_optimizer.items() if state}
                write_optimizer_state(optimizers[index], OptimizerState(kept, *shared))


def _read_parameters(
    checkpoint: CheckpointAt, stages: Mapping[ShardOfStage, Stage], *, only_weights: bool
) -> dict[ShardOfStage, dict[str, dict[StateKey, Value]]]:
    """By stage: the state of its parameters, each the part that the worker has there."""
    manifest = load_manifest(checkpoint)
    frozen = manifest.frozen.tensors.keys() if manifest.frozen is not None else set[str]()
    alike: dict[tuple[int, int] | None, list[ShardOfStage]] = {}  # a worker may be another shard of another stage
    for index, stage in stages.items():
        group = stage.shard.group if stage.shard is not None else None
        alike.setdefault((group.size, group.shard) if group is not None else None, []).append(index)
    found: dict[ShardOfStage, dict[str, dict[StateKey, Value]]] = {}
    for indices in alike.values():
        names, shard = {name for index in indices for name in stages[index].parameters}, stages[indices[0]].shard
        take = shard.part if shard is not None else None
        state = read_checkpoint_state(checkpoint, names - frozen, take, only_weights=only_weights)
        for name, value in read_frozen_values(manifest, sorted(names & frozen)):
            state[name] = {PARAMETER: value if take is None else take(name, value)}
        found |= dict.fromkeys(indices, state)
    return found


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
