"""How a step ends on one worker: reduce, complete over shards, add ties, exchange written buffers, vote, scale once, apply.

The order of the additions and the norm are rules 6 to 9 of the numerics contract (`raypar/NUMERICS.md`). The vote decides for
all workers at once: a step counts only when every worker has its reduced gradients, so that a worker that is lost afterwards
takes nothing from the others (`apply_late`).
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from raypar.comm.routine import Routine, StreamWaits
from raypar.comm.routines_in_turn import run_in_turn
from raypar.comm.transport import Transport
from raypar.errors import DataError, NonFiniteError, RayparError, UserCodeError
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import canonical_names
from raypar.plan import MicrobatchRouting, TiedParameter
from raypar.plan.addition_tree import TreeNode
from raypar.plan.ballot import Ballot, OrderOfSamples
from raypar.plan.exact_sum import ExactSum
from raypar.plan.loss_scale import LEAST as LEAST_EXPONENT
from raypar.plan.microbatches import divide_by_count, is_divisor
from raypar.plan.ownership import Ownership
from raypar.plan.seeds import seed_of
from raypar.plan.vote_result import VoteResult
from raypar.plan.wording import count_noun
from raypar.torch_compat.multi_tensor import copy_all, scale_all
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.norm_and_weights_hash import gradient_norm_and_factor, read_together, square_gradients
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.stage import Stage, fold_gradients
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage, reduction_channel
from raypar.worker.step.buffer_exchange import BufferExchange
from raypar.worker.step.learning_rates import LearningRates
from raypar.worker.step.owned_parameters import OwnedParameter, rounded_runs
from raypar.worker.step.parameter_gather import ParameterGather
from raypar.worker.step.several_optimizers import averages_of
from raypar.worker.step.tied_gradients import Runs, TiedGradientExchange
from raypar.worker.step.vote_exchange import VoteExchange

NON_FINITE_CURE = (
    "look at these samples, at log, sqrt and divisions in the model and the loss, and at the precision; lower the learning "
    "rate or set clip_norm if the loss grew before; `non_finite: skip` skips such steps instead"
)
"""What may help against a loss or gradient norm that is not finite, once it is known where it began."""


@dataclass(frozen=True, slots=True)
class InstructionSpan:
    """One executed instruction and its times."""

    label: str
    """The instruction as printed."""
    start_ns: int
    """`time.perf_counter_ns` at its start."""
    end_ns: int
    """`time.perf_counter_ns` at its end."""


class AnyGradientReduction(Protocol):
    """`comm.gradient_reduction.CanonicalReduction` or `FastReduction`."""

    parameters_to_mark: Callable[[], Collection[int]] | None
    """Returns the uses that this replica marks for all replicas, those without microbatches too; None: there are none."""
    marked_parameters: frozenset[int]
    """The uses that any replica has marked; known after `finish`."""
    defined_here: frozenset[int]
    """The uses of which this replica has a gradient; known after `finish`."""
    owned_totals: dict[int, list[Tensor]]
    """Use whose gradient is reduced to its owners -> totals of this replica's runs, flat; known after `finish`."""
    stream_waits: StreamWaits
    """What only the stream waits for."""

    def start(self) -> None:
        """Begin a new step."""

    def submit_gradients(self, uses: Sequence[int], rows: Mapping[TreeNode, Sequence[Tensor | None]]) -> None:
        """Take the subtree sums of some uses of parameters, `rows[node][use]`, which are final."""

    def poll(self) -> None:
        """Make progress where that needs no waiting."""

    def finish(self) -> Routine[list[Tensor | None]]:
        """The reduced gradient of every use: -0.0 where none of several replicas has one, None where a single one has none."""


@dataclass
class StepCommit:
    """Ends the steps of one worker: reductions, vote and optimizers of its stages."""

    rank: int
    """This worker's rank."""
    graph: Graph
    """The whole model."""
    routing: MicrobatchRouting
    """The plan, and which replica runs a microbatch."""
    ties: tuple[TiedParameter, ...]
    """Tied parameters of several stages."""
    stages: Mapping[ShardOfStage, Stage]
    """This worker's stages, each virtual shard of one by itself."""
    reductions: Mapping[ShardOfStage, AnyGradientReduction]
    """Stage -> reduction of its gradients over replicas."""
    owned: Mapping[ShardOfStage, Sequence[OwnedParameter]]
    """Stage -> what this rank trains of it: whole parameters, or runs of them where replicas divide state; where these divide
    parameters, its part of frozen ones, too."""
    gather: ParameterGather
    """Brings parameters from the replicas that own them, after each step."""
    optimizers: Mapping[ShardOfStage, torch.optim.Optimizer]
    """Stage -> optimizer of what is owned; stages of which nothing is have none."""
    transport: Transport
    """Connects the workers; may connect some without a seat, too."""
    spec: Job
    """The job."""
    rates: LearningRates
    """The learning rates by step."""
    ownership: Ownership
    """Which rank keeps, and so counts, which piece of state."""
    guard: TorchStateGuard
    """Restores process state that the lr_schedule and the optimizer leave changed."""
    seed_generators: Callable[[int], None]
    """Seeds the generators that the lr_schedule and the optimizer may draw from."""

    while_votes_arrive: Callable[[int], None] | None = None
    """Called with the number of the next step while the votes of other workers are on their way: reads its samples."""
    late_read_ns: int = 0
    """How long that took in the last step, if the votes were there before it was over; else 0, because nobody waited."""
    gather_metrics: Callable[[], Routine[None]] | None = None
    """A routine to complete before this worker votes in a step whose metrics are measured; None: none is."""
    skipped_steps: list[int] = field(default_factory=list)
    """The steps that were skipped so far, ascending, where the loss is scaled: its scale follows from them."""
    order_digest: Callable[[int], int | None] | None = None
    """Step -> a digest of the order of its samples; None for a worker that reads none."""
    before_vote: Callable[[], Routine[None]] | None = None
    """A routine to complete before this worker votes (the mirror's exchange of copies)."""
    stream_waits: StreamWaits = field(default_factory=StreamWaits)
    """What only the stream waits for in this worker's steps and passes."""
    outcome: VoteResult | None = None
    """The vote's result, once the vote of the step is whole."""
    learning_rate: float | None = None
    """The learning rate of the last step that was applied (of groups of their own: not); None: this worker knows none."""
    applied: bool = False
    """Whether the optimizer has run in this step."""
    last_decided_step: int = -1
    """The last step that was decided by a whole vote: applied, or skipped by all workers; -1 before the first."""
    can_apply_late: bool = False
    """Whether the reduced gradients of `step` are complete, kept and not yet applied or skipped, as `apply_late` needs."""
    step: int = -1
    """The step under way, from 0; -1 before the first."""

    _exponent: int = 0
    """The exponent of the loss's scale in the step under way; 0 where it is not scaled."""
    _has_buffer_updates: bool = False
    """Whether the stages have what all replicas have written into buffers in the step under way."""
    _reduced_uses: dict[ShardOfStage, list[Tensor | None]] | None = None
    """Stage -> reduced gradient of each use; None until the reductions are finished."""
    _settled: dict[ShardOfStage, dict[str, Tensor | None]] = field(default_factory=dict)
    """Stage -> canonical parameter name -> gradient, unscaled, uses added up."""
    _settled_runs: dict[ShardOfStage, dict[str, list[Tensor]]] = field(default_factory=dict)
    """Stage -> canonical name of a parameter whose gradient is reduced to its owners -> the same of each run that this rank
    owns. Such parameters have None in `_settled`."""
    _exchange: TiedGradientExchange = field(init=False)
    """Exchanges gradients of tied parameters with workers of other stages."""
    _buffers: BufferExchange = field(init=False)
    """Exchanges with other replicas what forward has written into buffers."""
    _counted: dict[int, tuple[str, ...]] = field(init=False)
    """Index of a stage -> parameters of whose gradients this rank sums the squares, for the norm."""
    _counts: dict[ShardOfStage, dict[str, list[bool]]] = field(init=False)
    """Stage -> canonical parameter name -> of each run of it that this rank holds, whether it counts it in the norm."""
    _bits: dict[str, int] = field(init=False)
    """Canonical parameter name -> its bit in `Ballot.defined`; empty where no stage has replicas."""
    _places: dict[ShardOfStage, dict[str, list[int]]] = field(init=False)
    """Stage -> canonical parameter name -> indices of its uses, in layer order."""

    def __post_init__(self) -> None:
        self._exchange = TiedGradientExchange(
            self.rank,
            self.graph,
            self.routing,
            self.ties,
            self.transport,
            self.ownership,
            self.stages,
            self.stream_waits,
        )
        plan = self.routing.plan
        groups = {key: plan.replica_ranks(key[0], plan.role_in(self.rank, key[0]).shard) for key in self.stages}
        channels = {key: reduction_channel(plan, *key) for key in self.stages}
        self._buffers = BufferExchange(self.rank, self.stages, groups, channels, self.transport, self.stream_waits)
        canonical = canonical_names(self.graph)
        self._counted = self.ownership.norm_parameters(self.rank)
        self._counts = {key: self._runs_counted(*key) for key in self.stages}
        replicated = any(stage.replicas > 1 for stage in plan.stages)
        self._bits = {name: 1 << place for place, name in enumerate(self.ownership.trained if replicated else ())}
        for reduction in self.reductions.values():
            reduction.stream_waits = self.stream_waits
        self.gather.stream_waits = self.stream_waits
        self._places = {}
        for index, stage in self.stages.items():
            places = self._places[index] = {}
            for place, use in enumerate(stage.uses):
                places.setdefault(canonical.get(use.name, use.name), []).append(place)

    def _runs_counted(self, stage: int, number: int) -> dict[str, list[bool]]:
        found: dict[str, list[bool]] = {}
        if self.routing.plan.divides_state(stage):
            replica = self.routing.plan.role_in(self.rank, stage).replica
            counted = self.ownership.counted_runs(stage, number, replica)
            for run in self.ownership.runs(stage, number, replica):
                found.setdefault(run.name, []).append(run in counted)
        return found

    def begin(self, step: int) -> None:
        """Begin a step. Drops the last step's gradients first: kept, they would be a second set beside the new ones."""
        self.step, self.outcome, self.applied, self._reduced_uses = step, None, False, None
        self.can_apply_late = self._has_buffer_updates = False
        self._settled, self._settled_runs, self.late_read_ns = {}, {}, 0
        for owned in self.owned.values():
            for each in owned:
                each.parameter.grad = None
        self._exchange.begin_step()
        scaling = self.spec.loss_scaling
        self._exponent = 0 if scaling is None else scaling.exponent(step, self.skipped_steps)
        for index, stage in self.stages.items():
            stage.loss_scale = None if scaling is None else 2.0**self._exponent
            # First what is marked: a replica without blocks posts its marks when it starts.
            self.reductions[index].parameters_to_mark = stage.partial_uses if stage.shard is not None else None
            self.reductions[index].start()
            stage.on_ready = self.reductions[index].submit_gradients
            if stage.gradients.has_only_empty_blocks:
                self.reductions[index].submit_gradients(range(len(stage.uses)), {})

    def reduce(self, stage: int) -> None:
        """Make progress with the reduction of a stage, all of whose gradients on this worker are final and posted."""
        for (index, _), reduction in self.reductions.items():
            if index == stage:
                reduction.poll()
        self.gather.free(stage)

    def _reduced(self) -> Routine[dict[ShardOfStage, list[Tensor | None]]]:
        """Stage -> reduced gradient of each use, complete over replicas and shards; waits for the reductions."""
        if self._reduced_uses is None:
            found = {}
            for _, keys in groupby(sorted(self.stages), key=itemgetter(0)):
                of_stage = list(keys)
                for key in of_stage:
                    found[key] = yield from self.reductions[key].finish()
                # Virtual shards of this worker wait for each other.
                yield from run_in_turn([self._complete_over_shards(key, found[key]) for key in of_stage])
            self._reduced_uses = found
        return self._reduced_uses

    def _complete_over_shards(self, key: ShardOfStage, reduced: Sequence[Tensor | None]) -> Routine[None]:
        shard, reduction = self.stages[key].shard, self.reductions[key]
        if shard is not None:
            yield from shard.complete(self.stages[key].uses, reduced, reduction.owned_totals, reduction.marked_parameters)

    # -- ties --------------------------------------------------------------------------------------------------------

    def _gradients_of_uses(
        self, reduced: Mapping[ShardOfStage, Sequence[Tensor | None]], stage: ShardOfStage, name: str
    ) -> list[Runs | None]:
        """The reduced gradients of the stage's uses of a parameter, in layer order: their runs, or all as one."""
        totals, found = self.reductions[stage].owned_totals, list[Runs | None]()
        for use in self._places[stage].get(name, ()):
            whole = None if use in totals else reduced[stage][use]
            found.append(totals.get(use, None if whole is None else [whole]))
        return found

    def exchange_ties(self) -> Routine[None]:
        """Exchange the reduced gradients of tied parameters with the other workers that hold them."""
        reduced = yield from self._reduced()
        yield from self._exchange.run(self.step, partial(self._gradients_of_uses, reduced))

    def _settle(self) -> Routine[dict[ShardOfStage, dict[str, Tensor | None]]]:
        """Stage -> canonical parameter name -> gradient, unscaled, uses added from the last layer to the first, in the
        parameter's dtype. Sums in a lower one are dropped here."""
        reduced = yield from self._reduced()
        for index, found in reduced.items():
            self._widen(self.stages[index], found)
        tied = {tie.name for tie in self.ties}
        uses_here = partial(self._gradients_of_uses, reduced)
        settled: dict[ShardOfStage, dict[str, Tensor | None]] = {}
        for key in sorted(self.stages):
            gradients, of_runs = settled.setdefault(key, {}), self._settled_runs.setdefault(key, {})
            for name, parameter in self.stages[key].parameters.items():
                uses = self._exchange.of_all_stages(name, key, uses_here) if name in tied else uses_here(key, name)
                runs = zip(*(use for use in reversed(uses) if use is not None), strict=True)
                folded = [fold_gradients([part.to(parameter.dtype) for part in _alike(of_run)]) for of_run in runs]
                gradients[name] = None
                if self._places[key].get(name, [-1])[0] in self.reductions[key].owned_totals:
                    of_runs[name] = [run.reshape(-1) for run in folded if run is not None]
                elif folded and (whole := folded[0]) is not None:
                    gradients[name] = whole if whole.shape == parameter.shape else whole.view(parameter.shape)
        return settled

    def _widen(self, stage: Stage, uses: list[Tensor | None]) -> None:
        """Convert reduced gradients that are summed in a lower precision than their parameters', in place, and drop the sums
        one by one: the optimizer gets gradients in the parameters' dtype, and memory has room for one set of these."""
        if stage.weights.sums_in is None:
            return
        for place, gradient in enumerate(uses):
            if gradient is not None and gradient.dtype == stage.weights.sums_in:
                uses[place] = gradient.float()

    # -- buffers that forward has written ------------------------------------------------------------------------------

    def exchange_buffers(self) -> Routine[None]:
        """Exchange with the other replicas what forward has written into buffers. A worker votes when it has all of it."""
        yield from self._reduced()  # whose collectives are posted before those of the exchange, on every worker
        yield from self._buffers.run(self.step)
        self._has_buffer_updates = True

    # -- vote ----------------------------------------------------------------------------------------------------------

    def vote(self) -> Routine[None]:
        """Exchange losses, counts and squared norms with all workers, and set `outcome`.

        A worker's vote also says that it has its reduced gradients and is ready to apply them.
        """
        self.guard.check_all(f"a layer, the loss or the data set, up to step {self.step + 1},")
        written = [index for (index, _), stage in self.stages.items() if stage.buffer_updates]
        missing = [index for index in written if self.routing.plan.stages[index].replicas > 1 and not self._has_buffer_updates]
        assert not missing, f"the program has no exchange of the buffers that stages {missing} write"
        self._settled = yield from self._settle()
        if self.gather_metrics is not None:
            yield from self.gather_metrics()
        if self.before_vote is not None:
            yield from self.before_vote()
        ballot, flags = self._ballot(self._settled)  # its read waits for the device, and so for all that streams wait for
        yield from self.stream_waits.finish()  # a worker votes for what is valid
        self._drop_reduced_gradients()
        yield from self._buffers.finish(self.step, iter(flags))
        self.can_apply_late = True
        read_ahead = partial(self.while_votes_arrive, self.step + 1) if self.while_votes_arrive is not None else None
        plan = self.routing.plan
        exchange = VoteExchange(self.transport, self.rank, plan.world, plan.coordinate, read_ahead)
        total = yield from exchange.run(self.step, ballot)
        self.late_read_ns = exchange.late_ns
        self._count(total)
        yield from self._exchange.finish_sends()

    def _ballot(self, settled: Mapping[ShardOfStage, Mapping[str, Tensor | None]]) -> tuple[Ballot, list[float]]:
        """This worker's vote, with the order of its samples where the job has a sampler and this worker reads any; and the
        flags of buffers, which are read at the same time.

        The replicas of a stage have the same gradients, so each squares a share of the parameters; where they divide them, each
        squares its runs. Each shard squares the elements that it counts. All shards have the same losses, which the first one
        tells.
        """
        tell = [stage for (_, number), stage in self.stages.items() if number == 0]
        pairs = [pair for stage in tell for pair in stage.losses.values()]
        counted: list[Tensor] = []
        for index, gradients in settled.items():
            shard = self.stages[index].shard
            defined = [(name, g) for name in self._counted[index[0]] if (g := gradients.get(name)) is not None]
            counted += [g if shard is None else shard.counted(name, g) for name, g in defined]
            for name, runs in self._settled_runs.get(index, {}).items():
                own = [run for run, is_counted in zip(runs, self._counts[index].get(name, ()), strict=True) if is_counted]
                shape = self.stages[index].parameters[name].shape
                whole = [run.view(shape) if run.numel() == shape.numel() else run for run in own]
                counted += whole if shard is None else [shard.counted(name, run) for run in whole]
        losses, counts = ([pair[place] for pair in pairs] for place in range(2))
        flags = self._buffers.flags()
        numbers = iter(read_together([*losses, *counts, *flags, *square_gradients(counted)]))
        total_loss, total_count = (ExactSum.of(islice(numbers, size)) for size in (len(losses), len(counts)))
        raised, squares = list(islice(numbers, len(flags))), ExactSum.of(numbers)
        digest = None
        if self.spec.data.names_ids and self.order_digest is not None:
            digest = self.order_digest(self.step)
        orders = () if digest is None else (OrderOfSamples(self.rank, digest),)
        return Ballot(1, total_loss, total_count, squares, self._defined_here(), orders), raised

    def _drop_reduced_gradients(self) -> None:
        """Let go of reduced gradients where replicas divide these: they are settled."""
        for index in self._settled:
            if self.ownership.divides(index[0], "gradient"):
                self.reductions[index].owned_totals = {}
                if self._reduced_uses is not None:
                    self._reduced_uses[index] = []

    def _defined_here(self) -> int:
        """The bits of the parameters of which this worker has a gradient."""
        found = 0
        for index, places in self._places.items() if self._bits else ():
            here = self.reductions[index].defined_here
            for name, uses in places.items():
                if not here.isdisjoint(uses):
                    found |= self._bits[name]
        return found

    def _count(self, total: Ballot) -> None:
        """Set `outcome` from the votes of all workers (rules 7 and 8 of the numerics contract)."""
        self._refuse_unequal_orders(total)
        loss, count = divide_by_count(total.losses, total.counts)
        norm, factor = gradient_norm_and_factor(total.squares.rounded(), count, self.spec.clip_norm, self._exponent)
        finite = math.isfinite(loss) and math.isfinite(norm)
        scale = None if self.spec.loss_scaling is None else 2.0**self._exponent
        self.outcome = VoteResult(loss, count, norm, factor, skipped=not finite, defined=total.defined, loss_scale=scale)

    def _refuse_unequal_orders(self, total: Ballot) -> None:
        """Raise `DataError` if workers have other orders of the samples."""
        if len(total.orders) > 1:
            first, other = (self.routing.plan.coordinate(order.rank) for order in total.orders)
            raise DataError(
                f"step {self.step + 1}: the sampler of `data` gave {other} other ids than {first}",
                cure="let it depend on the data set, the epoch and the seeded generators of python, numpy and torch alone: "
                "no clock, no order of a set of texts, nothing of the process or the machine",
            )

    # -- apply ---------------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Scale every gradient once, run the optimizers, and give the buffers that forward has written their new values.

        A non-finite step is skipped, or stops the job, by policy; where gradients overflow because the loss is scaled, it is
        skipped by any. A skipped one changes no buffer either.

        Raises `NonFiniteError` where it stops the job, `UserCodeError` for what the lr_schedule or an optimizer raises.
        """
        outcome = self.outcome
        assert outcome is not None, "the optimizer may only run after the whole vote"
        self._refuse_non_finite(outcome)
        self._put_gradients(outcome)
        if not outcome.skipped:
            for optimizer in self.optimizers.values():
                self.seed_generators(seed_of(self.spec.seed, "optimizer", self.step))
                with self._user_code("lr_schedule"):
                    self.learning_rate = self.rates.set(optimizer, self.step)
                self.guard.check("the lr_schedule", compare_everything=True)
                with self._user_code(f"the optimizer {type(optimizer).__name__}"):
                    self._step_in_place(optimizer)
                self.guard.check("the optimizer", compare_everything=True)
                if (averages := averages_of(optimizer)) is not None:
                    averages.update(self.step + 1)
            for index, stage in self.stages.items():
                self._round(index)
                stage.apply_buffer_updates()
            self.gather.mark_stale()
        if outcome.skipped and outcome.loss_scale is not None:
            self.skipped_steps.append(self.step)
        self.applied = not outcome.skipped
        self.can_apply_late, self.last_decided_step = False, self.step

    def _step_in_place(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises `UserCodeError` where replicas divide state and the optimizer gives a parameter other memory: what the layers
        and the other replicas have is the memory that it had."""
        divided = optimizer.param_groups if self.gather.stages or self.gather.layers else []
        before = [each.data_ptr() for group in divided for each in group["params"]]
        optimizer.step()
        if before != [each.data_ptr() for group in divided for each in group["params"]]:
            raise UserCodeError(
                f"the optimizer {type(optimizer).__name__} gives a parameter other memory (p.data = ...) in step "
                f"{self.step + 1}: with plan.zero layers compute with the memory that it had",
                cure="change parameters in place (p.add_, p.copy_), or set plan.zero: 0",
            )

    @contextlib.contextmanager
    def computing_with_averages(self) -> Iterator[None]:
        """What is owned has the values of its averages meanwhile, where these have begun, and gets its own back in any case:
        state that another worker needs is read of it. Whole parameters are stale after either."""
        own: list[tuple[Tensor, Tensor]] = []
        try:
            for optimizer in self.optimizers.values():
                if (averages := averages_of(optimizer)) is not None:
                    for key, value in averages.values.items():
                        parameter = averages.parameters[key].detach()
                        own.append((parameter, parameter.clone()))
                        parameter.copy_(value)
            self._after_owned_values_changed()
            yield
        finally:
            for parameter, value in own:
                parameter.copy_(value)
            self._after_owned_values_changed()

    def _after_owned_values_changed(self) -> None:
        for index in self.stages:
            self._round(index)
        self.gather.mark_stale()

    def gather_parameters(self) -> None:
        """Begin to bring what the step has changed from its owners to the other replicas, before they need it."""
        self.gather.begin()

    def _round(self, index: ShardOfStage) -> None:
        """Make the copies in a lower precision anew that layers of a stage compute with, of what is owned here; those that the
        next gather makes are left to it."""
        if self.gather.comes_and_goes(index):
            return
        weights = self.stages[index].weights
        weights.round_parameters(trained_only=True)
        copies, masters = rounded_runs(self.owned[index], weights)
        if copies:
            copy_all(copies, masters)

    def _refuse_non_finite(self, outcome: VoteResult) -> None:
        """Raises `NonFiniteError` for a step that the job's policy does not skip."""
        if not is_divisor(outcome.count) and self.spec.non_finite == "stop":
            raise NonFiniteError(
                f"step {self.step + 1}: the counts returned by the loss add up to {outcome.count:g} over "
                f"{self.spec.microbatches} microbatches",
                cure="return (sum, count) with the number of terms that count, or set `non_finite: skip` to skip such steps",
            )
        overflows = outcome.skipped and outcome.loss_scale is not None and math.isfinite(outcome.loss)
        if overflows and outcome.loss_scale == 2.0**LEAST_EXPONENT:
            raise NonFiniteError(
                f"step {self.step + 1}: gradient norm {outcome.norm} with the smallest loss scale, 2^{LEAST_EXPONENT}, after "
                f"{count_noun(len(self.skipped_steps), 'skipped step')}: a smaller one would not make the gradients finite",
                cure=f"`raypar debug JOB` names the first layer that was given or returned such a number; {NON_FINITE_CURE}",
            )
        if outcome.skipped and not overflows and self.spec.non_finite == "stop":
            raise NonFiniteError(
                f"step {self.step + 1}: loss {outcome.loss}, gradient norm {outcome.norm}",
                cure=f"{self._cure_of_missing_labels(outcome.loss)}`raypar debug JOB` names the first layer that was given or "
                f"returned such a number; {NON_FINITE_CURE}",
            )

    def _cure_of_missing_labels(self, loss: float) -> str:
        """The beginning of a cure for a mean over no labels, which a model's own loss may have taken; else empty."""
        takes_own_mean = self.spec.loss.is_loss_of_model and self.spec.loss.count is None
        if not takes_own_mean or not math.isnan(loss):
            return ""
        return (
            "if a microbatch may have no label (all -100), set loss: {function: model, count: labels}, or count: "
            "shifted_labels if the model compares each token with the next one; or "
        )

    def _put_gradients(self, outcome: VoteResult) -> None:
        """Put the gradients, times the factor, into the `.grad` of what is owned; None where no worker has one. Parameters of
        two stages that share a gradient (a tie) get one each."""
        everything = (1 << len(self._bits)) - 1
        missing = {} if outcome.defined == everything else {n for n, bit in self._bits.items() if not outcome.defined & bit}
        first: dict[int, ShardOfStage] = {}
        unscaled: list[Tensor] = []
        for index, gradients in self._settled.items():
            of_runs = {name: iter(runs) for name, runs in self._settled_runs[index].items()}
            for each in self.owned[index]:
                each.parameter.grad = None
                if each.name in missing:
                    continue
                if each.name in of_runs:
                    gradient = next(of_runs[each.name], each.parameter.new_empty(0)).view(each.parameter.shape)
                elif (reduced := gradients[each.name]) is not None:
                    gradient = each.of(reduced)
                else:
                    continue
                if gradient.numel() and first.setdefault(gradient.data_ptr(), index) != index:
                    gradient = gradient.clone()
                each.parameter.grad = gradient
                unscaled.append(gradient)
        if unscaled:
            scale_all(unscaled, outcome.factor)

    @contextlib.contextmanager
    def _user_code(self, what: str) -> Iterator[None]:
        """Run users' code inside. Raises a `UserCodeError` that begins with `what` for what the code raises."""
        try:
            yield
        except RayparError:
            raise
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise UserCodeError(
                f"{what} raised {error_text(error)}\n  in step {self.step + 1}\n{traceback.format_exc()}",
                cure="the last lines of the traceback are where your code, or what it called, raised",
            ) from error

    def apply_late(self, outcome: VoteResult) -> None:
        """Apply the step by the result of a vote that other workers have counted and this one has not.

        All workers have voted, so the gradients are reduced everywhere.
        """
        assert self.can_apply_late, f"no gradients of step {self.step} are kept"
        self.guard.establish()
        self.outcome = outcome
        self.apply()

    def release(self) -> None:
        """Let go of stages, optimizers and gradients; what was decided stays known."""
        self.stages, self.reductions, self.owned, self.optimizers = {}, {}, {}, {}
        self.gather.close()
        self.gather, self.can_apply_late = ParameterGather({}), False
        self.before_vote = self.while_votes_arrive = self.gather_metrics = self.order_digest = None
        self._reduced_uses, self._settled, self._settled_runs = None, {}, {}
        del self._exchange, self._buffers


def _alike(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients of the same elements, flat where they differ in shape. A view of one would keep its memory from being used in
    the next step (`weight_gradient_memory_reuse.py`)."""
    return gradients if len({each.shape for each in gradients}) == 1 else [each.reshape(-1) for each in gradients]
