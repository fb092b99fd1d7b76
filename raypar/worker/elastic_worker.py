"""A `WorkerCore` behind the interface of the elastic protocol (`elastic.generation_guard.WorkerTrainingBackend`).

State travels as pieces: elements of a parameter and what the optimizer keeps for them. State that a new plan needs in the very
tensors of this worker's old stages is not copied.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from raypar.comm.routine import Routine, RoutineWait
from raypar.comm.transport import Transport
from raypar.errors import StateNotKeptError
from raypar.plan.pieces import AdoptedStages, AdoptPlanCommand, Digest, Piece, merge_pieces
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.vote_result import VoteResult
from raypar.schedule.gathering import gathers_in_pass
from raypar.worker.checkpoint.state_key import PARAMETER, StateKey
from raypar.worker.process.allocator_and_garbage_collector import large_blocks_returned
from raypar.worker.required_communicators import device_to_device_rank_pairs
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage
from raypar.worker.state.file_memory import FileMemoryPool, check_folder_for_copies
from raypar.worker.state.mirror import Mirror
from raypar.worker.state.parameter_state import (
    WHOLE,
    ParameterSlice,
    ParameterState,
    StateByKey,
    StatePart,
    extract_elements,
    part_of_run,
    run_part,
)
from raypar.worker.state.state_assembly import StateAssembly
from raypar.worker.step.message_tags import state_tag
from raypar.worker.step.optimizer_state import OptimizerState, Value, names_with_patterns, write_optimizer_state
from raypar.worker.step.owned_parameters import named_parameters
from raypar.worker.worker_core import WorkerCore
from raypar.worker.worker_reports import StepReport, ValidationReport


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
        """Raises `ConfigError` where the folder for the mirror's copies takes none."""
        self.core, self.worker = core, worker
        folder = core.spec.elastic.mirror_in if core.spec.elastic is not None else None
        if folder is not None and core.spec.forward_passes is None:
            check_folder_for_copies(folder)  # now, and not in the step after which the first copies are made
        self.mirror = Mirror() if folder is None else Mirror(pool=FileMemoryPool(folder))
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
        memory = {**report.memory, self.mirror.memory_kind: self.mirror.held_bytes} if report.memory else report.memory
        seconds = self.mirror.pop_seconds_spent()
        return replace(report, mirror_seconds=seconds, digest=digest, not_kept=not_kept, memory=memory)

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

    def steps_skipped(self) -> tuple[int, ...]:
        """The steps that were skipped up to the state here, ascending, where the loss is scaled."""
        return tuple(self.core.skipped_steps)

    def abort(self, reason: str) -> None:
        """Make every pending wait of this worker raise; may be called from any thread."""
        self.core.abort(reason)

    def adopt(self, order: tuple[AdoptPlanCommand, Callable[[], Transport]]) -> Routine[None]:
        """Connect, send and receive state, then build stages. Of the old ones the state alone is kept, without what replicas
        have gathered: until the first step of the new plan everybody can go on from it."""
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
        moves_state = part.assignment is not None and not (part.run_begins or part.checkpoint_folder)
        if moves_state:
            self._keep_state_only(base, part.steps_done)
        received = yield from self._exchange(part, transport, base)
        if part.assignment is None:
            return
        for name, holdings in received.items():
            base.setdefault(name, []).extend(holdings)
        del received
        transport.forget_freed_memory()  # so what was received takes none once it is in its place
        assembly = StateAssembly(self.core, self.worker, part, transport.rank, self._whole, base) if moves_state else None
        if assembly is not None:
            self.core.renew_optimizer_files()
            frees = self.core.optimizer_files is not None or gathers_in_pass(part.assignment.plan)
            with large_blocks_returned() if frees else nullcontext():
                assembly.run()
        self.adopt_description = self.core.adopt(
            part.assignment,
            transport,
            values=assembly.stages if assembly is not None else None,
            load=part.checkpoint_folder or None,
            only_weights=part.only_weights,
            nodes=part.nodes,
        )
        self.core.release_initial_values()
        if assembly is not None:
            for index, optimizer in self.core.step_commit.optimizers.items():
                there = assembly.kept[index]
                keys, _ = named_parameters(self.core.step_commit.owned[index])
                mine = {key: there[key] for key in keys if key in there}
                try:
                    state = OptimizerState.of_parameters(mine, names_with_patterns(optimizer))
                    write_optimizer_state(optimizer, state, takes_over=True)
                except StateNotKeptError as error:
                    self.core.not_moved = error
        self.adopt_description["not_kept"] = self.core.why_not_kept()
        self._done, self.core.step_commit.last_decided_step = part.steps_done, part.steps_done - 1
        if not part.checkpoint_folder:
            self.core.skipped_steps[:] = part.skipped_steps
        self._old = assembly.left if assembly is not None else {}
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
        done, parts = self.applied(), self._parts()
        state = {at: kept for at, (kept, _) in parts.items()}
        slices = {at: place for at, (_, place) in parts.items() if place != ParameterSlice()}
        self.mirror.take_snapshot(done, state, transport, slices)

    def _slices(self) -> dict[StatePart, ParameterSlice]:
        """Of what is a part of its parameter: which one."""
        return {at: place for at, (_, place) in self._parts().items() if place != ParameterSlice()}

    def _held_state(self) -> dict[str, list[ParameterState]]:
        """Parameter or buffer -> the parts of its state after `applied()` steps that this worker holds; not copies."""
        self.applied()
        found = {name: list(holdings) for name, holdings in self._old.items()}
        for at, (kept, place) in self._parts().items():
            found.setdefault(at[0], []).insert(0, ParameterState(kept, place))
        return found

    def _keep_state_only(self, base: dict[str, list[ParameterState]], done: int) -> None:
        """Let go of the stages of the plan before: what is needed of them, the state after `done` steps, is in `base`."""
        self._old, self._done = base, done
        self.core.release_stages()
        if (step_commit := getattr(self.core, "step_commit", None)) is not None:
            step_commit.last_decided_step = done - 1
        for name, holdings in base.items():
            base[name] = [holding.in_own_memory() for holding in holdings]

    def _whole(self, name: str) -> TensorCut | None:
        """How shards would cut a parameter that is whole here, if the run may have any; its elements are numbered by that."""
        return self.core.layout(1).cuts.get(name) if self.core.may_have_shards else None

    def _stages_state(self) -> dict[StatePart, StateByKey]:
        """State of this worker's stages that it holds, each once; not copies."""
        return {at: kept for at, (kept, _) in self._parts().items()}

    def _parts(self) -> dict[StatePart, tuple[StateByKey, ParameterSlice]]:
        """State of the parameters and buffers of this worker's stages, each once, and which part of them it is: of what is cut,
        that of each virtual shard; of what replicas divide, the runs that this worker owns; not copies."""
        found: dict[StatePart, tuple[StateByKey, ParameterSlice]] = {}
        for index, stage in self.core.stages.items():
            state = self._state_of_optimizer(index)
            cuts = stage.shard.layout.cuts if stage.shard is not None else {}
            owned = self.core.step_commit.owned[index]
            whole = {each.name for each in owned if each.run is None}
            for name, parameter in stage.parameters.items():
                is_divided = self.core.ownership.divides(index[0], "optimizer" if parameter.requires_grad else "parameter")
                if parameter.numel() and (name in whole or not is_divided):
                    at = name, index[1] if name in cuts else WHOLE
                    place = ParameterSlice(cuts[name], index[1]) if name in cuts else ParameterSlice()
                    found.setdefault(at, ({PARAMETER: parameter.detach(), **state.get(name, {})}, place))
            for each in owned:
                if each.run is not None:
                    place = ParameterSlice(cuts[each.name], index[1]) if each.name in cuts else ParameterSlice()
                    held = place.spans(place.size(stage.parameters[each.name].shape))
                    kept = {PARAMETER: each.parameter.detach(), **state.get(each.key, {})}
                    for (start, _), here in each.parts(held):
                        found.setdefault(run_part(each.name, start), (part_of_run(kept, here), ParameterSlice(start=start)))
            for name, buffer in stage.buffers.items():
                if buffer.numel():
                    found[name, WHOLE] = {PARAMETER: buffer}, ParameterSlice()
        return found

    def _state_of_optimizer(self, index: ShardOfStage) -> Mapping[str, StateByKey]:
        """What the optimizer of a stage keeps, by key of what it trains."""
        optimizer = self.core.step_commit.optimizers.get(index)
        if optimizer is None:
            return {}
        names = names_with_patterns(optimizer)
        try:
            return self.core.optimizer_state(index).by_parameter(names)
        except StateNotKeptError as error:
            return OptimizerState.not_kept(names, error)

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
                found.setdefault(name, []).append(ParameterState(received, ParameterSlice(start=start)))
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
