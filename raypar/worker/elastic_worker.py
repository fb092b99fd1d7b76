"""A `WorkerCore` behind the interface of the elastic protocol (`elastic.generation_guard.WorkerTrainingBackend`).

State travels as pieces: elements of a parameter and what the optimizer keeps for them. State that a new plan needs in the very
tensors of this worker's old stages is not copied.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from raypar.comm.routine import Routine, RoutineWait
from raypar.comm.transport import Transport
from raypar.errors import RayparError, StateNotKeptError
from raypar.model.layer_skeletons import state_shapes
from raypar.plan.pieces import AdoptedStages, AdoptPlanCommand, Digest, Piece, merge_pieces
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.vote_result import VoteResult
from raypar.plan.wording import after_steps
from raypar.worker.checkpoint.state_key import PARAMETER, StateKey
from raypar.worker.required_communicators import device_to_device_rank_pairs
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage
from raypar.worker.state.mirror import Mirror
from raypar.worker.state.parameter_state import (
    WHOLE,
    ParameterSlice,
    ParameterState,
    StateByKey,
    StatePart,
    assemble_parameter,
    extract_elements,
    tensor_in,
)
from raypar.worker.step.message_tags import state_tag
from raypar.worker.step.optimizer_state import (
    OptimizerState,
    Value,
    names_with_patterns,
    write_optimizer_state,
)
from raypar.worker.worker_core import StepReport, ValidationReport, WorkerCore


class ElasticWorker:
    """One worker of an elastic run: trains, mirrors its state, and hands state over when the plan changes.

    The methods of the first part are those of `elastic.generation_guard.WorkerTrainingBackend`.
    """

    core: WorkerCore
    """Builds stages and runs their steps."""
    worker: int
    """This worker's number, which no other worker of the run ever gets."""
    mirror: Mirror
    """Copies of this worker's state and of its wards'."""
    pass_number: int
    """Which forward pass the next one is, of a run that makes these only (`elastic.run_policy.RunPolicy.forward_passes`)."""
    trace: bool
    """Whether the next step's report contains its spans."""
    adopt_description: AdoptedStages | None
    """What `WorkerCore.adopt` returned last, for the driver; None before the first plan."""
    _done: int
    """Number of steps applied to the state, as `applied` last found."""
    _mirror_snapshot_due: bool
    """Whether the mirror copies the state after the step under way."""
    _old: dict[str, list[ParameterState]]
    """Parameter -> its state that the plan before this one left here; valid, and kept, until the first step of this plan."""

    def __init__(self, core: WorkerCore, worker: int) -> None:
        self.core, self.worker = core, worker
        self.mirror = Mirror()
        self.trace, self.pass_number, self.adopt_description = False, 0, None
        self._done, self._mirror_snapshot_due, self._old = 0, False, {}

    # -- WorkerTrainingBackend ---------------------------------------------------------------------------------------------

    def step(self, step: int, into_mirror: bool = False) -> Routine[StepReport]:
        """Run a step, vote and apply it; then, if `into_mirror`, let the mirror copy the state."""
        self._mirror_snapshot_due = into_mirror
        self.core.step_commit.before_vote = self.mirror.finish if into_mirror else None
        report: StepReport = yield from self.mirror.run_beside_exchange(self.core.routine(step, trace=self.trace))
        if into_mirror:
            self._take_mirror_snapshot(self.core.transport)
        digest = self.mirror.digests.get(step + 1) if into_mirror else None
        not_kept = report.not_kept or (self.core.why_not_kept() if into_mirror else "")
        return replace(report, mirror_seconds=self.mirror.pop_seconds_spent(), digest=digest, not_kept=not_kept)

    def validate(self) -> Routine[ValidationReport]:
        """Run one validation pass."""
        report = yield from self.core.validation_routine(self.applied(), self.pass_number)
        return report

    def applied(self) -> int:
        """Number of steps that are applied to the state here."""
        step_commit = getattr(self.core, "step_commit", None)
        if step_commit is not None and step_commit.last_decided_step >= self._done:
            self._done = step_commit.last_decided_step + 1
            self._old = {}
        return self._done

    def vote_result(self) -> VoteResult | None:
        """The result of the vote on the step that was applied last."""
        step_commit = self.core.step_commit
        if step_commit.outcome is None or not step_commit.applied:
            return step_commit.outcome
        return replace(step_commit.outcome, lr=step_commit.learning_rate)

    def can_apply_late(self) -> bool:
        """Whether the gradients of the open step are reduced and kept, so that `apply_late` can apply the step."""
        return bool(self.core.stages) and self.core.step_commit.can_apply_late

    def apply_late(self, step: int, vote_result: VoteResult) -> None:
        """Apply the open step, on which other workers have received all votes."""
        assert self.core.step_commit.step == step
        self.core.step_commit.apply_late(vote_result)
        if self._mirror_snapshot_due:
            self._take_mirror_snapshot(None)  # the transport is gone; those who applied in time keep the other copies

    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of the state after `applied()` steps that this worker holds."""
        self.applied()
        return merge_pieces(
            Piece(name, start, stop)
            for name, holdings in self._held_state().items()
            for holding in holdings
            for start, stop in holding.spans
        )

    def held_snapshots(self) -> Mapping[int, tuple[Piece, ...]]:
        """Number of steps -> the pieces held here of the mirror snapshot after them."""
        return self.mirror.pieces()

    def digests(self) -> Mapping[int, Digest]:
        """Number of steps done -> digest of the mirror's copy of this worker's own state."""
        return self.mirror.digests

    def abort(self, reason: str) -> None:
        """Make every pending wait of this worker raise; may be called from any thread."""
        self.core.abort(reason)

    def adopt(self, order: tuple[AdoptPlanCommand, Callable[[], Transport]]) -> Routine[None]:
        """Connect, send and receive state, then build stages. Until all state has arrived the old stages stay as they are."""
        part, connect = order
        self.core.take_layouts_from_assignment(part.assignment)
        self.core.data.learn_streams(part)
        self.core.validated.update(part.validated)
        base: dict[str, list[ParameterState]] = {}
        if part.from_mirror:
            base = self.mirror.state_of_snapshot(part.steps_done)
        elif not (part.run_begins or part.checkpoint_folder):
            base = self._held_state() if self.applied() == part.steps_done else {}
        self.mirror.give_up_exchange()
        former, self.core.transport = self.core.transport, None
        if former is not None:
            former.close()
        self.core.transport = transport = connect()  # from here on `abort` is for the new transport
        received = yield from self._exchange(part, transport, base)
        if part.assignment is None:
            return
        for name, holdings in received.items():
            base.setdefault(name, []).extend(holdings)
        values: dict[ShardOfStage, dict[str, Tensor]] | None = None
        if not (part.run_begins or part.checkpoint_folder):
            state = self._assemble_state(part, transport.rank, base)
            values = {key: {name: tensor_in(kept) for name, kept in of.items()} for key, of in state.items()}
        self.adopt_description = self.core.adopt(
            part.assignment, transport, values=values, load=part.checkpoint_folder or None, only_weights=part.only_weights
        )
        self.core.release_initial_values()
        if not (part.run_begins or part.checkpoint_folder):
            for index, optimizer in self.core.step_commit.optimizers.items():
                mine = {name: state[index][name] for name in self.core.stages[index].parameters if name in state[index]}
                try:
                    write_optimizer_state(optimizer, OptimizerState.of_parameters(mine, names_with_patterns(optimizer)))
                except StateNotKeptError as error:
                    self.core.not_moved = error
        self.adopt_description["not_kept"] = self.core.why_not_kept()
        self._done, self.core.step_commit.last_decided_step = part.steps_done, part.steps_done - 1
        self._old = base
        self.mirror.rank, self.mirror.keeper_of = transport.rank, part.mirror_keepers
        self.mirror.compares_digests = self.core.ownership.has_copies(transport.rank)

    def share_out_anew(self, part: AdoptPlanCommand) -> bool:
        """Run other blocks from the next step on, between two steps; False, and nothing has changed, if the stages or the
        connections that are here do not suffice for that."""
        transport, assignment = self.core.transport, part.assignment
        if transport is None or assignment is None or not self.core.can_share_out_anew(assignment):
            return False
        self.core.take_layouts_from_assignment(assignment)
        self.core.data.learn_streams(part)
        self.core.validated.update(part.validated)
        self.core.share_out_anew(assignment)
        return True

    # -- state here -----------------------------------------------------------------------------------------------------------

    def _take_mirror_snapshot(self, transport: Transport | None) -> None:
        done = self.applied()
        self.mirror.take_snapshot(done, self._stages_state(), transport, self._slices())

    def _slices(self) -> dict[StatePart, ParameterSlice]:
        """What is cut over shards -> the part of its parameter that it is."""
        return {
            (name, number): ParameterSlice(stage.shard.layout.cuts[name], number)
            for (_, number), stage in self.core.stages.items()
            if stage.shard is not None
            for name in stage.parameters
            if name in stage.shard.layout.cuts
        }

    def _held_state(self) -> dict[str, list[ParameterState]]:
        """Parameter or buffer -> the parts of its state after `applied()` steps that this worker holds; not copies."""
        self.applied()
        found, slices = {name: list(holdings) for name, holdings in self._old.items()}, self._slices()
        for at, kept in self._stages_state().items():
            found.setdefault(at[0], []).insert(0, ParameterState(kept, slices.get(at, ParameterSlice())))
        return found

    def _assemble_state(
        self, part: AdoptPlanCommand, rank: int, base: Mapping[str, list[ParameterState]]
    ) -> dict[ShardOfStage, dict[str, StateByKey]]:
        """The state that each stage of the new plan needs here, by virtual shard, in tensors that may be written to and that no
        other has. Raises `RayparError` if some is missing."""
        plan = part.assignment.plan
        sizes = self.core.ownership_of(plan).sizes(rank)
        found: dict[ShardOfStage, dict[str, StateByKey]] = {}
        taken = set[int]()
        for index in plan.stages_of(rank):
            stage, run = plan.stages[index], plan.stages[index].run_of(plan.role_in(rank, index).shard)
            layout = self.core.layout(stage.virtual_shards) if stage.virtual_shards > 1 else None
            for number in run if layout is not None else (0,):
                here = found[index, number] = {}
                for name in state_shapes(self.core.graph, stage.first, stage.last):
                    if name not in sizes:
                        continue
                    cut = layout.cuts.get(name) if layout is not None else None
                    place = ParameterSlice() if cut is None else ParameterSlice(cut, number)
                    shape, whole = partial(self._shape, name), partial(self._whole, name)
                    made = assemble_parameter(base.get(name, ()), place, sizes[name], shape, whole, self.core.device)
                    if made is None:
                        what = f"worker {self.worker} lacks elements of {name} of the state {after_steps(part.steps_done)}"
                        raise RayparError(what, cure="report this: the pieces that it holds and was sent do not cover them")
                    kept, writable = made
                    tensor = tensor_in(kept)
                    is_new = writable and id(tensor) not in taken
                    taken.add(id(tensor))
                    here[name] = kept if is_new else {**kept, PARAMETER: tensor.clone()}
        return found

    def _whole(self, name: str) -> TensorCut | None:
        """How shards would cut a parameter that is whole here; its elements are numbered by that."""
        return self.core.layout(1).cuts.get(name)

    def _shape(self, name: str) -> torch.Size:
        """Shape of an unsharded parameter or buffer."""
        return self._shapes[name]

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        return state_shapes(self.core.graph)

    def _stages_state(self) -> dict[StatePart, StateByKey]:
        """State of the parameters and buffers of this worker's stages, each once: of what is cut, that of each virtual shard;
        not copies."""
        found: dict[StatePart, StateByKey] = {}
        for index, stage in self.core.stages.items():
            optimizer = self.core.step_commit.optimizers.get(index)
            state: dict[str, StateByKey] = {}
            if optimizer is not None:
                names = names_with_patterns(optimizer)
                try:
                    state = self.core.optimizer_state(index).by_parameter(names)
                except StateNotKeptError as error:
                    state = OptimizerState.not_kept(names, error)
            cuts = stage.shard.layout.cuts if stage.shard is not None else {}
            for name, parameter in stage.parameters.items():
                if parameter.numel():
                    at = name, index[1] if name in cuts else WHOLE
                    found.setdefault(at, {PARAMETER: parameter.detach(), **state.get(name, {})})
            found |= {(name, WHOLE): {PARAMETER: buffer} for name, buffer in stage.buffers.items() if buffer.numel()}
        return found

    def _exchange(
        self, part: AdoptPlanCommand, transport: Transport, base: Mapping[str, list[ParameterState]]
    ) -> Routine[dict[str, list[ParameterState]]]:
        """Send and receive all state that moves. A header for each pair of workers says what follows.

        Returns parameter -> what was received of it.
        """
        outgoing: dict[int, list[Piece]] = {}
        sources: list[int] = []
        for move in part.moves:
            if move.source == self.worker:
                outgoing.setdefault(move.dest, []).append(move.piece)
            if move.dest == self.worker and move.source not in sources:
                sources.append(move.source)
        headers = {w: transport.recv(None, source=part.rank_of_worker[w], tag=state_tag(0)) for w in sources}
        sent, direct = [], device_to_device_rank_pairs(part)
        for dest, pieces in outgoing.items():
            tensors: list[Tensor] = []
            lines: list[tuple[str, int | None, dict[StateKey, tuple[Value] | None]]] = []
            for piece in pieces:
                start, kept = self._state_to_send(piece, base[piece.name])
                numbers: dict[StateKey, tuple[Value] | None] = {}
                for key, value in kept.items():
                    numbers[key] = None if isinstance(value, Tensor) else (value,)
                lines.append((piece.name, start, numbers))
                for value in kept.values():
                    if isinstance(value, Tensor):
                        value = value.detach().contiguous()
                        tensors.append(value if (transport.rank, part.rank_of_worker[dest]) in direct else value.cpu())
            header = torch.frombuffer(bytearray(pickle.dumps(lines)), dtype=torch.uint8)
            for index, tensor in enumerate([header, *tensors]):
                sent.append(transport.send(tensor, to=part.rank_of_worker[dest], tag=state_tag(index)))
        found: dict[str, list[ParameterState]] = {}
        for source, handle in headers.items():
            yield RoutineWait(handle, f"the list of state from worker {source}")
            lines = pickle.loads(handle.tensor().numpy().tobytes())
            count = sum(value is None for _, _, numbers in lines for value in numbers.values())
            handles = iter(
                [transport.recv(None, source=part.rank_of_worker[source], tag=state_tag(i + 1)) for i in range(count)]
            )
            for name, start, numbers in lines:
                received: StateByKey = {}
                for key, number in numbers.items():
                    if number is not None:
                        received[key] = number[0]
                        continue
                    got = next(handles)
                    yield RoutineWait(got, f"{key} of {name} from worker {source}")
                    received[key] = got.tensor()
                found.setdefault(name, []).append(ParameterState(received, start=start))
        for handle in sent:
            yield RoutineWait(handle, "state to be taken")
        return found

    def _state_to_send(self, piece: Piece, holdings: list[ParameterState]) -> tuple[int | None, StateByKey]:
        """(first element, state) to send for a piece; the first element is None if all of a parameter is sent, in its own
        shape."""
        for holding in holdings:
            if holding.slice.cut is None and holding.start is None and holding.spans == ((piece.start, piece.stop),):
                return None, holding.state
        return piece.start, extract_elements(holdings, piece.start, piece.stop, self._whole(piece.name))
