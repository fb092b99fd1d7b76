"""How a step ends on one worker: reduce, complete over shards, add ties, vote, scale once, apply (DESIGN 4.5 and 4.7)."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from raypar.comm.transport import Routine, Transport, Wait
from raypar.elastic.vote_result import VoteResult
from raypar.errors import NonFiniteError, RayparError, UserCodeError
from raypar.model.graph import Graph
from raypar.plan import Routing, Tie
from raypar.plan.addition_tree import TreeNode
from raypar.plan.shard_layout import ShardLayout
from raypar.user_code import USER_CODE_ERRORS, error_text, reraise_ctrl_c
from raypar.worker.compute_state import StateGuard
from raypar.worker.job_spec import JobSpec
from raypar.worker.numerics import norm_and_factor, parameter_squares
from raypar.worker.optimizer import set_learning_rate
from raypar.worker.stage import Stage
from raypar.worker.tags import vote_tag
from raypar.worker.tied_gradients import TieExchange


@dataclass(frozen=True, slots=True)
class InstructionSpan:
    """One executed instruction: `label` as printed, `time.perf_counter_ns` at its start and end."""

    label: str
    start_ns: int
    end_ns: int


class AnyReduction(Protocol):
    """`comm.gradient_reduction.CanonicalReduction` or `FastReduction`."""

    note: Callable[[], Collection[int]]
    """Uses of which the replicas without microbatches are to know what this one knows."""
    noted: frozenset[int]
    """After `finish`: those that any replica has noted."""

    def start(self) -> None:
        """A new step."""

    def ready(self, uses: Sequence[int], rows: Mapping[TreeNode, Sequence[Tensor | None]]) -> None:
        """The subtree sums of some uses of parameters are final: `rows[node][use]`."""

    def poll(self) -> None:
        """Opportunistic progress."""

    def finish(self) -> Routine[list[Tensor | None]]:
        """The reduced gradient of every use, or None where no replica defined one."""


@dataclass
class StepCommit:
    """Holds one worker's reductions and optimizers, by stage."""

    rank: int
    graph: Graph
    routing: Routing
    ties: tuple[Tie, ...]
    stages: Mapping[int, Stage]
    reductions: Mapping[int, AnyReduction]
    optimizers: Mapping[int, torch.optim.Optimizer]
    transport: Transport
    spec: JobSpec
    lr_factor: Callable[[int], float]
    layout: Callable[[int], ShardLayout]
    """How the model is cut over so many shards."""
    guard: StateGuard
    """Restores process state that the lr_schedule and the optimizer leave changed."""

    meanwhile: Callable[[int], None] | None = None
    """What of the next step can be done while the others' votes are on their way."""
    before_vote: Callable[[], Routine[None]] | None = None
    """What has to be complete here before this worker votes."""
    outcome: VoteResult | None = None
    applied: bool = False
    finished: int = -1
    """The last step whose vote was whole and has been acted on: applied, or skipped by all."""
    votable: bool = False
    """The reduced gradients of `step` are complete, kept, and not acted on: `apply_late` may do it."""
    step: int = -1
    _uses: dict[int, list[Tensor | None]] | None = None
    _settled: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._exchange = TieExchange(self.rank, self.graph, self.routing, self.ties, self.transport, self.layout)
        canonical = {name: names[0] for names in self.graph.ties for name in names}
        self._places: dict[int, dict[str, list[int]]] = {}
        for index, stage in self.stages.items():
            places = self._places[index] = {}
            for place, (name, _, _) in enumerate(stage.uses):
                places.setdefault(canonical.get(name, name), []).append(place)

    def begin(self, step: int) -> None:
        """Forget the last step; nothing of it is needed any more. Its gradients would be a second set beside the new ones."""
        self.step, self.outcome, self.applied, self._uses = step, None, False, None
        self.votable = False
        self._settled = {}
        for stage in self.stages.values():
            for parameter in stage.parameters.values():
                parameter.grad = None
        self._exchange.found.clear()
        for index, stage in self.stages.items():
            self.reductions[index].start()
            stage.on_ready = self.reductions[index].ready
            self.reductions[index].note = stage.partial_uses
            if stage.gradients.has_only_empty_blocks:
                self.reductions[index].ready(range(len(stage.uses)), {})

    def reduce(self, stage: int) -> None:
        """All of the stage's gradients on this worker are final; their buckets are posted, help those that wait for a reply."""
        self.reductions[stage].poll()

    def _reduced(self) -> Routine[dict[int, list[Tensor | None]]]:
        if self._uses is None:
            found = {}
            for index in sorted(self.stages):
                found[index] = yield from self.reductions[index].finish()
                shard = self.stages[index].shard
                if shard is not None:
                    names = [name for name, _, _ in self.stages[index].uses]
                    yield from shard.complete(names, found[index], self.reductions[index].noted)
            self._uses = found
        return self._uses

    # -- ties --------------------------------------------------------------------------------------------------------

    def _uses_of(self, stage: int, tie: str) -> list[int]:
        """Indices of the stage's uses of a parameter, in layer order."""
        return self._places[stage].get(tie, [])

    def exchange_ties(self) -> Routine[None]:
        """Every worker that holds a tied parameter gets the reduced gradients of its uses in all other stages."""
        reduced = yield from self._reduced()
        yield from self._exchange.run(self.step, lambda stage, name: [reduced[stage][i] for i in self._uses_of(stage, name)])

    def _settle(self) -> Routine[dict[int, dict[str, Tensor | None]]]:
        """Stage -> canonical parameter name -> gradient, unscaled, uses added in layer order."""
        reduced = yield from self._reduced()
        tied = {tie.name: tie for tie in self.ties}
        settled: dict[int, dict[str, Tensor | None]] = {}
        for stage in sorted(self.stages):
            gradients: dict[str, Tensor | None] = {}
            for name in self.stages[stage].parameters:
                uses: list[Tensor | None] = []
                for src in tied[name].stages if name in tied else (stage,):
                    if src in self.stages:
                        uses += [reduced[src][i] for i in self._uses_of(src, name)]
                    else:
                        uses += self._exchange.found.get((name, src), ())
                gradients[name] = _sum_in_order(uses)
            settled[stage] = gradients
        return settled

    # -- vote ----------------------------------------------------------------------------------------------------------

    def vote(self) -> Routine[None]:
        """Gather ready flag, losses, counts and squared norms of all workers; set `outcome` and the parameters' `.grad`."""
        self.guard.check_all(f"a layer, the loss or the data set, up to step {self.step + 1},")
        self._settled = yield from self._settle()
        self.votable = True
        if self.before_vote is not None:
            yield from self.before_vote()
        mine = self._ballot(self._settled)
        world = self.routing.plan.world  # the transport may connect workers without a seat too, which handed over state
        others = [rank for rank in range(world) if rank != self.rank]
        tag = vote_tag(self.step)
        recvs = {rank: self.transport.recv(None, source=rank, tag=tag) for rank in others}
        sends = [self.transport.send(mine, to=rank, tag=tag) for rank in others]
        if others and self.meanwhile is not None:
            self.meanwhile(self.step + 1)
        ballots = {self.rank: mine}
        for rank, handle in recvs.items():
            if not handle.done():
                yield Wait(handle, f"the vote of {self.routing.plan.coordinate(rank)} on step {self.step}")
            ballots[rank] = handle.tensor()
        for handle in sends:
            if not handle.done():
                yield Wait(handle, "the own vote to be taken")
        self._count([ballots[rank].tolist() for rank in range(world)])

    def _ballot(self, settled: Mapping[int, Mapping[str, Tensor | None]]) -> Tensor:
        """float64 [2 + 3 L + 1 + sum(2 + P)]: ready, L losses (microbatch, sum, count), stages (index, P, squares).

        The replicas of a stage have the same gradients: each squares a share of the parameters. Of each parameter every shard
        squares what it counts; all have the same losses, which the first tells.
        """
        losses: list[float] = []
        plan = self.routing.plan
        seat = plan.seats[self.rank]
        for stage in self.stages.values() if seat.shard == 0 else ():
            for microbatch, (total, count) in stage.losses.items():
                losses += [float(microbatch), float(total), float(count)]
        ballot = [1.0, len(losses) / 3, *losses, len(settled)]
        first_of = {tie.name: tie.stages[0] for tie in self.ties}
        for index, gradients in settled.items():
            shard = self.stages[index].shard
            own = [
                gradient if shard is None else shard.counted(name, gradient)
                for name, gradient in gradients.items()
                if gradient is not None and first_of.get(name, index) == index
            ]
            share = _share([g.numel() for g in own], seat.replica, plan.stages[index].replicas)
            squares = parameter_squares(own[share])
            ballot += [index, len(squares), *squares]
        return torch.tensor(ballot, dtype=torch.float64)

    def _count(self, ballots: list[list[float]]) -> None:
        losses: dict[int, tuple[float, float]] = {}
        squares: dict[int, dict[int, list[float]]] = {}
        for seat, ballot in zip(self.routing.plan.seats, ballots, strict=True):
            numbers: Iterator[float] = iter(ballot)
            ready, loss_count = next(numbers), int(next(numbers))
            assert ready == 1.0
            for _ in range(loss_count):
                microbatch, total, count = next(numbers), next(numbers), next(numbers)
                losses[int(microbatch)] = (total, count)
            for _ in range(int(next(numbers))):
                stage, size = int(next(numbers)), int(next(numbers))
                mine = squares.setdefault(stage, {}).setdefault(seat.shard, [])
                mine.extend(next(numbers) for _ in range(size))  # ranks of replicas ascend
        total = count = 0.0
        for microbatch in sorted(losses):
            total += losses[microbatch][0]
            count += losses[microbatch][1]
        in_order = [s for stage in sorted(squares) for s in _over_shards(squares[stage])]
        norm, factor = norm_and_factor(in_order, count, self.spec.clip_norm)
        loss = total / count if count else math.nan
        finite = math.isfinite(loss) and math.isfinite(norm)
        self.outcome = VoteResult(loss, count, norm, factor, skipped=not finite)

    # -- apply ---------------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Scale every gradient once and run the optimizer; a non-finite step is skipped or stops the job, by policy."""
        outcome = self.outcome
        assert outcome is not None, "the optimizer may only run after the whole vote"
        if outcome.count == 0 and self.spec.non_finite == "stop":
            raise NonFiniteError(
                f"step {self.step + 1}: the counts returned by the loss add up to 0 over {self.spec.microbatches} microbatches",
                cure="return (sum, count) with the number of terms that count, or set `non_finite: skip` to skip such steps",
            )
        if outcome.skipped and self.spec.non_finite == "stop":
            raise NonFiniteError(
                f"step {self.step + 1}: loss {outcome.loss}, gradient norm {outcome.norm}",
                cure="lower the learning rate or set clip_norm; `non_finite: skip` skips such steps instead",
            )
        unscaled: dict[int, Tensor] = {}
        shared: list[tuple[nn.Parameter, Tensor]] = []
        for stage, gradients in self._settled.items():
            for name, gradient in gradients.items():
                parameter = self.stages[stage].parameters[name]
                if gradient is not None and id(gradient) in unscaled:
                    shared.append((parameter, gradient))
                    continue
                parameter.grad = gradient
                if gradient is not None:
                    unscaled[id(gradient)] = gradient
        if unscaled:
            torch._foreach_mul_(list(unscaled.values()), outcome.factor)
        for parameter, gradient in shared:
            parameter.grad = gradient.clone()
        if not outcome.skipped:
            for optimizer in self.optimizers.values():
                with self._user_code("lr_schedule"):
                    set_learning_rate(optimizer, self.lr_factor(self.step))
                self.guard.check("the lr_schedule", thorough=True)
                with self._user_code(f"the optimizer {type(optimizer).__name__}"):
                    optimizer.step()
                self.guard.check("the optimizer", thorough=True)
        self.applied = not outcome.skipped
        self.votable, self.finished = False, self.step

    @contextlib.contextmanager
    def _user_code(self, what: str) -> Iterator[None]:
        """Run user code inside; raises a `UserCodeError` that begins with `what` if that raises."""
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
        """Act on a vote that was whole elsewhere (DESIGN 4.7): everybody has voted, so our gradients are reduced."""
        assert self.votable, f"no gradients of step {self.step} are kept"
        self.guard.establish()
        self.outcome = outcome
        self.apply()


def _over_shards(squares: Mapping[int, Sequence[float]]) -> Sequence[float]:
    """Each parameter's square, ((t0 + t1) + t2) over shards."""
    total, *others = (squares[shard] for shard in sorted(squares))
    for more in others:
        total = [a + b for a, b in zip(total, more, strict=True)]
    return total


def _share(sizes: Sequence[int], part: int, parts: int) -> slice:
    """A contiguous part of things of these sizes; all parts together are everything, in order, and about equally large."""
    total = max(1, sum(sizes))
    before = itertools.accumulate(sizes[:-1], initial=0) if sizes else ()
    owners = [parts * start // total for start in before]  # beyond the last where nothing but empty ones follow
    return slice(bisect.bisect_left(owners, part), len(owners) if part == parts - 1 else bisect.bisect_right(owners, part))


def _sum_in_order(uses: list[Tensor | None]) -> Tensor | None:
    """((u1 + u2) + u3) over the defined ones; a single one is returned as it is."""
    total: Tensor | None = None
    for use in uses:
        if use is not None:
            total = use if total is None else total + use
    return total
