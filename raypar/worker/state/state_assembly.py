"""Assembles a worker's state under a new plan from what it holds and what it was sent, one parameter after the other.

Elements that others own and that are gathered later get no memory, and the old state of a parameter is let go as soon as its
new state is made. So at most the old and the new state are in memory, what both have once, and one parameter's state besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from raypar.errors import RayparError
from raypar.model.layer_skeletons import state_shapes
from raypar.plan import StagePlan
from raypar.plan.ownership import OwnedRun
from raypar.plan.pieces import AdoptPlanCommand
from raypar.plan.shard_ranges import (
    IndexRanges,
    TensorCut,
    count_indices,
    indices_at_positions,
    merge_ranges,
    subtract_ranges,
)
from raypar.plan.tensor_parallel_layout import shard_slice_shape
from raypar.plan.wording import after_steps
from raypar.worker.checkpoint.state_key import AVERAGE, OPTIMIZER, PARAMETER, StateKey
from raypar.worker.layer_precisions import dtype_of_job
from raypar.worker.stage.initial_state import InitialStageState
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage
from raypar.worker.stage.tensors_without_memory import without_memory
from raypar.worker.state.file_memory import FileMemoryPool
from raypar.worker.state.parameter_state import (
    ParameterSlice,
    ParameterState,
    StateByKey,
    assemble_parameter,
    copy_elements,
    part_of_run,
    tensor_in,
)
from raypar.worker.step.optimizer_state import Value
from raypar.worker.step.owned_parameters import run_key
from raypar.worker.worker_core import WorkerCore


@dataclass(frozen=True)
class _Wanted:
    """A parameter or buffer that a virtual shard of a stage has."""

    index: ShardOfStage
    name: str
    slice: ParameterSlice
    """Which part of it the stage has."""
    runs: Sequence[tuple[int, int]] | None
    """The runs of the part that are kept; None: all of it is."""
    waits_for_gather: bool
    """Whether the rest has no memory before it is gathered."""


@dataclass
class StateAssembly:
    """The state of one worker on its way from one plan to the next."""

    core: WorkerCore
    """Knows the model and how it is cut."""
    worker: int
    """The worker's number, for messages."""
    command: AdoptPlanCommand
    """What the worker is to adopt: the new plan, and its program."""
    rank: int
    """Its rank there."""
    whole_cut: Callable[[str], TensorCut | None]
    """Parameter that is whole here -> how shards would cut it; None: they would not."""
    base: dict[str, list[ParameterState]]
    """Parameter or buffer -> parts of its state here. In the end each part is the new one's, or one that this does not have."""
    stages: dict[ShardOfStage, InitialStageState] = field(default_factory=dict)
    """What the new stages begin with, in tensors that may be written to and that no other has."""
    kept: dict[ShardOfStage, dict[str, StateByKey]] = field(default_factory=dict)
    """Stage -> parameter, or key of a run of one -> its state, of which optimizers may take over what is elementwise."""
    left: dict[str, list[ParameterState]] = field(default_factory=dict)
    """What is in `base` and in no new stage."""
    _taken: set[int] = field(default_factory=set)
    """`id` of the tensors that a stage has."""

    def run(self) -> None:
        """Assemble all parameters and buffers. Raises `RayparError` if elements are missing."""
        wanted = self._wanted()
        for name in [*(name for name in self.base if name not in wanted), *wanted]:
            made = [holding for each in wanted.get(name, ()) for holding in self._make(each)]
            self.left[name] = self._what_is_left(name, made)
            self.base[name] = [*made, *self.left[name]]

    def _wanted(self) -> dict[str, list[_Wanted]]:
        plan = self.command.assignment.plan
        owner = self.core.ownership_of(plan)
        found: dict[str, list[_Wanted]] = {}
        for index in plan.stages_of(self.rank):
            stage, role = plan.stages[index], plan.role_in(self.rank, index)
            layout = self.core.layout(stage.virtual_shards) if stage.virtual_shards > 1 else None
            run = stage.run_of(role.shard)
            for number in run if layout is not None else (0,):
                self.stages[index, number], self.kept[index, number] = InitialStageState(), {}
                own = owner.runs_by_name(index, number, role.replica)
                left_out = self._computed_once(stage) if number > run[0] else frozenset[str]()
                for name in state_shapes(self.core.graph, stage.first, stage.last):
                    if name in owner.sizes(self.rank) and name not in left_out:
                        cut = layout.cuts.get(name) if layout is not None else None
                        place = ParameterSlice() if cut is None else ParameterSlice(cut, number)
                        runs = own.get(name)
                        is_whole = runs == [(0, count_indices(place.spans(self._shapes[name].numel())))]
                        waits = owner.divides(index, "parameter")
                        found.setdefault(name, []).append(
                            _Wanted((index, number), name, place, None if is_whole else runs, waits)
                        )
        return found

    def _make(self, wanted: _Wanted) -> list[ParameterState]:
        """Make what a stage has of a parameter; returns it as parts of the parameter's state."""
        if wanted.runs is not None:
            return self._make_runs(wanted, wanted.runs)
        name, place = wanted.name, wanted.slice
        holdings, size = self.base.get(name, ()), self._shapes[name].numel()
        shape, whole = partial(self._shape, name), partial(self.whole_cut, name)
        made = assemble_parameter(holdings, place, size, shape, whole, self.core.device)
        if made is None:
            raise self._lacks(name)
        kept, is_new = made[0], made[1] and id(tensor_in(made[0])) not in self._taken
        kept = {key: self._own(value, copy=not is_new) if isinstance(value, Tensor) else value for key, value in kept.items()}
        kept = self._in_files(kept)
        self._taken.add(id(tensor_in(kept)))
        self.stages[wanted.index].values[name] = tensor_in(kept)
        self.kept[wanted.index][name] = kept
        return [ParameterState(kept, place)]

    def _in_files(self, state: StateByKey) -> StateByKey:
        """The same state, where that of the optimizer is in files if it is to lie there: so memory never holds all of it."""
        files = self.core.optimizer_files
        return state if files is None else {key: _moved(key, value, files) for key, value in state.items()}

    def _own(self, value: Tensor, *, copy: bool) -> Tensor:
        return value.to(self.core.device if value.dim() else value.device, copy=copy)

    def _make_runs(self, wanted: _Wanted, runs: Sequence[tuple[int, int]]) -> list[ParameterState]:
        """As `_make`, of a parameter of which some runs are kept."""
        name, place, shape = wanted.name, wanted.slice, self._shape(wanted.name)
        local = tuple(shape) if place.cut is None else shard_slice_shape(place.cut, shape, place.shard)
        dtype = dtype_of_job(self.core.spec)
        make = without_memory if wanted.waits_for_gather else torch.empty
        stage, found = self.stages[wanted.index], list[ParameterState]()
        stage.values[name] = tensor = make(local, dtype=dtype, device=self.core.device)
        for start, stop in runs:
            spans = indices_at_positions(place.spans(shape.numel()), start, stop)
            state = copy_elements(self.base.get(name, ()), spans, self.whole_cut(name), self.core.device)
            if state is None:
                raise self._lacks(name)
            state = self._in_files(state)
            if wanted.waits_for_gather:
                stage.runs[OwnedRun(name, start, stop)] = tensor_in(state)
            else:
                state[PARAMETER] = tensor.view(-1)[start:stop].copy_(tensor_in(state))
            self.kept[wanted.index][run_key(name, start, stop)] = state
            found += _parts_by_span(state, spans)
        return found

    def _what_is_left(self, name: str, made: Sequence[ParameterState]) -> list[ParameterState]:
        """The parts of a parameter's state that are here and in no new stage, in memory that has nothing else."""
        there, found = merge_ranges(span for each in made for span in each.spans), list[ParameterState]()
        for holding in self.base.get(name, ()):
            spans = subtract_ranges(holding.spans, there)
            if holding.is_read_only or spans == holding.spans:
                found += [holding.in_own_memory()] if spans else []
                continue
            for start, stop in spans:
                state = copy_elements([holding], ((start, stop),), self.whole_cut(name))
                assert state is not None
                found.append(ParameterState(state, ParameterSlice(start=start)))
            there = merge_ranges([*there, *spans])
        return found

    def _computed_once(self, stage: StagePlan) -> frozenset[str]:
        """Parameters and buffers of the layers of a stage that only the first virtual shard of a worker has."""
        graph, core = self.core.graph, self.core
        if core.spec.sequence_parallel:
            return frozenset()
        found = core.layout(stage.virtual_shards).computed_once(stage.first, stage.last, len(graph.layers))
        return frozenset(name for layer in found for name in state_shapes(graph, layer, layer + 1))

    def _lacks(self, name: str) -> RayparError:
        what = f"worker {self.worker} lacks elements of {name} of the state {after_steps(self.command.steps_done)}"
        return RayparError(what, cure="report this: the pieces that it holds and was sent do not cover them")

    def _shape(self, name: str) -> torch.Size:
        """Shape of an unsharded parameter or buffer."""
        return self._shapes[name]

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        return state_shapes(self.core.graph)


def _parts_by_span(state: StateByKey, spans: IndexRanges) -> list[ParameterState]:
    """The state of a run as parts of its parameter's, each of which has consecutive elements."""
    found, before = list[ParameterState](), 0
    for start, stop in spans:
        here = slice(before, before + stop - start)
        found.append(ParameterState(part_of_run(state, here), ParameterSlice(start=start)))
        before = here.stop
    return found


def _moved(key: StateKey, value: Value, files: FileMemoryPool) -> Value:
    """An entry of a parameter's state, in a file if it is one of those that are offloaded, and large enough."""
    if key.kind not in (OPTIMIZER, AVERAGE.kind) or not isinstance(value, Tensor):
        return value
    return value if value.nbytes < files.small_bytes or files.has(value) else files.copy_of(value)
