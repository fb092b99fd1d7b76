"""Where a plan's layers are cut into stages: where the simulated step on measured times is fastest.

Equal numbers of layers leave workers idle: an embedding costs little and a head much, a worker with two chunks has the sum of
both, and a position with more replicas can have more layers. Results do not depend on the cut. They do depend on each layer's
number of shards, so a cut between stages with different numbers of shards stays where it is.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from raypar.plan import ParallelPlan
from raypar.planner.layer_partition import balanced_cuts
from raypar.schedule.instructions import INPUT_GRADIENTS, VALUES, Order, Schedule
from raypar.schedule.simulate import SimulationCosts
from raypar.schedule.timeline import Timeline

WORTH_SHARE, WORTH_MS = 0.02, 1.0
"""A step must be predicted to become faster by this share and by so many ms, or the layers stay shared out by their number:
measured times differ by as much from run to run, and the cut should not."""
NEAR_SHARE = 0.005
"""Of the cuts that are predicted to be slower than the fastest by at most this share the one nearest to the even cut is taken,
so that noise does not decide between equal ones."""
MOST_COMPARED = 5000
"""Of up to so many cuts the best is found; of more a local search looks at some."""
MOST_SIMULATED = 80_000
"""Instructions that are simulated for one plan: at most about 0.5 s (AMD EPYC, 2026)."""
PATIENCE = 12
"""The local search gives up when the moves from so many cuts in a row have led to nothing better."""
SIMULATION_OVERHEAD = 200
"""The cost of a simulation beside its instructions, in instructions."""

SplitPoints = tuple[int, ...]
"""First layers of stages 1, 2, ..."""
PredictStep = Callable[[ParallelPlan], tuple[Timeline, int]]
"""(the predicted step of a plan, bytes of memory that its largest worker lacks)."""


@dataclass(frozen=True)
class StageBalance:
    """The best cut of a plan's layers into stages beside the one by number of layers, and which of them was chosen.

    The steps are those of workers that have a processor each: where they share some, every cut takes as long.
    """

    even: ParallelPlan
    """The plan with nearly equal numbers of layers in all stages."""
    even_step: Timeline
    """Its predicted step."""
    even_lacks_bytes: int
    """Bytes of memory that its largest worker lacks."""
    best: ParallelPlan
    """The plan whose step is predicted to be the fastest (to `NEAR_SHARE`), of those that lack the least memory."""
    best_step: Timeline
    """Its predicted step."""
    best_lacks_bytes: int
    """Bytes of memory that its largest worker lacks."""
    fastest_ms: float
    """The shortest predicted step of any of those; that of `best` is at most `NEAR_SHARE` longer."""

    @property
    def gain(self) -> float:
        """How much longer the step of `even` is than that of `best`, as a fraction."""
        best_ms = self.best_step.makespan_ms
        return self.even_step.makespan_ms / best_ms - 1 if best_ms else 0.0

    @property
    def best_is_chosen(self) -> bool:
        """Whether `best` is chosen: it is clearly faster, or it fits into memory and `even` does not."""
        if self.best_lacks_bytes < self.even_lacks_bytes:
            return True
        return self.even_step.makespan_ms > max(self.fastest_ms * (1 + WORTH_SHARE), self.fastest_ms + WORTH_MS)

    @property
    def plan(self) -> ParallelPlan:
        """The plan that was chosen."""
        return self.best if self.best_is_chosen else self.even


def find_balanced_stages(
    even: ParallelPlan,
    schedule: Schedule,
    layer_costs: SimulationCosts,
    predict: PredictStep,
    *,
    is_chain: bool = True,
) -> StageBalance:
    """The best cut of the layers of `even` over its stages.

    `schedule`: that of `even`; under another cut what makes values and gradients is the same. `layer_costs`: what each layer
    costs as a stage of its own, as its shards compute it. `predict`: the objective. `is_chain`: whether every layer needs the
    one before it. Deterministic, in a time that `MOST_SIMULATED` limits; exact for up to `MOST_COMPARED` cuts unless that
    limit is reached.
    """
    given = even.split_points
    search = _SplitPointSearch(even, schedule, layer_costs, predict, is_chain)
    if math.prod(math.comb(len(range(*part)), len(at)) for part, at in search.free_parts) <= MOST_COMPARED:
        search.compare(search.all_cuts())
    else:
        search.descend()
    best = search.nearest_of_the_best()
    (even_step, even_lacks), (best_step, best_lacks) = search.seen[given], search.seen[best]
    fastest_ms = search.seen[search.best][0].makespan_ms
    return StageBalance(even, even_step, even_lacks, even.with_split_points(best), best_step, best_lacks, fastest_ms)


class StepBound:
    """A time that no step can be below, by the split points alone: much cheaper than a simulation."""

    fill_ms: tuple[float, ...]
    """By layer: time until the first microbatch has come through all layers before it; zeros where layers do not need each
    other."""
    drain_ms: tuple[float, ...]
    """By layer: time of one microbatch's input gradients in all layers before it."""
    work: list[list[_StageWork]]
    """By position: what its busiest worker computes, by stage."""
    layers: int
    """Number of layers."""

    def __init__(self, even: ParallelPlan, schedule: Schedule, costs: SimulationCosts, is_chain: bool) -> None:
        """`schedule`: that of `even`; `costs`: those of each layer as a stage of its own."""
        self.layers = even.stages[-1].last
        kinds = {type(instruction) for order in schedule for instruction in order}
        sums = {kind: (0.0, *itertools.accumulate(costs.compute_ms(kind))) for kind in kinds}
        nothing = (0.0,) * (self.layers + 1)
        fills, drains = ([sums[k] for k in kinds if what in k.makes and is_chain] for what in (VALUES, INPUT_GRADIENTS))
        self.fill_ms, self.drain_ms = (min(ways, key=lambda ms: ms[-1], default=nothing) for ways in (fills, drains))
        busiest: dict[int, Order] = {}
        for rank, seat in enumerate(even.seats):
            busiest[seat.position] = max(busiest.get(seat.position, ()), schedule[rank], key=len)
        self.work = []
        for order in busiest.values():
            parts: dict[int, list[tuple[tuple[float, ...], int, bool]]] = {}
            for (stage, kind), count in sorted(Counter((i.stage, type(i)) for i in order).items(), key=lambda item: item[0][0]):
                if kind.makes:  # what makes nothing for others may be missing under another cut
                    is_urgent = VALUES in kind.makes or INPUT_GRADIENTS in kind.makes
                    parts.setdefault(stage, []).append((sums[kind], count, is_urgent))
            self.work.append([_StageWork(stage, tuple(of_stage)) for stage, of_stage in parts.items()])

    def ms(self, points: SplitPoints) -> float:
        """The bound for these split points.

        A worker waits until a microbatch has come through the layers before its first one, does its work, and after its last
        input gradients those layers still compute theirs; weight gradients may be computed beside that.
        """
        at = (0, *points, self.layers)
        most = 0.0
        for stages in self.work:
            begin = at[stages[0].stage]
            busy = urgent = 0.0
            for stage, parts in stages:
                first, last = at[stage], at[stage + 1]
                for sums, count, is_urgent in parts:
                    ms = count * (sums[last] - sums[first])
                    busy += ms
                    if is_urgent:
                        urgent += ms
            most = max(most, self.fill_ms[begin] + max(busy, urgent + self.drain_ms[begin]))
        return most


class _StageWork(NamedTuple):
    """What one worker computes on one stage in a step."""

    stage: int
    """The stage's index."""
    parts: tuple[tuple[tuple[float, ...], int, bool], ...]
    """By class of instructions: (prefix sums [layers + 1] of what one takes in each layer, how many there are, whether other
    workers wait for them)."""


class _SplitPointSearch:
    """A search over the split points of one plan."""

    even: ParallelPlan
    """The plan with nearly equal numbers of layers in all stages."""
    given: SplitPoints
    """Its split points."""
    predict: PredictStep
    """The objective."""
    bound: StepBound
    """A lower bound of the objective."""
    work_sums: tuple[float, ...]
    """Prefix sums [layers + 1] of the time of each layer for one microbatch."""
    price: int
    """What a simulation costs, in instructions."""
    left: int
    """Instructions that may still be simulated."""
    free_parts: list[tuple[tuple[int, int], range]]
    """((first possible place, behind the last one), indices of the split points between) wherever these may move."""
    seen: dict[SplitPoints, tuple[Timeline, int]]
    """Split points -> what was predicted of them."""
    best: SplitPoints
    """The best split points so far."""

    def __init__(
        self, even: ParallelPlan, schedule: Schedule, costs: SimulationCosts, predict: PredictStep, is_chain: bool
    ) -> None:
        self.even, self.predict = even, predict
        self.given = self.best = even.split_points
        self.seen = {self.given: predict(even)}  # first of all: it refuses a schedule that does not fit the plan
        self.bound = StepBound(even, schedule, costs, is_chain)
        whole = zip(costs.forward_ms, costs.input_ms, costs.weight_ms, strict=True)
        self.work_sums = (0.0, *itertools.accumulate(map(sum, whole)))
        self.left, self.price = MOST_SIMULATED, SIMULATION_OVERHEAD + sum(map(len, schedule))
        self.free_parts = list(_free_parts(even))

    def score(self, points: SplitPoints) -> tuple[int, float, int, SplitPoints]:
        """Sort key of a cut: memory that lacks, ms (to a nanosecond: equal steps differ in their last bits), distance."""
        found = self.seen.get(points)
        if found is None:
            self.left -= self.price
            found = self.seen[points] = self.predict(self.even.with_split_points(points))
        step, lacks = found
        return lacks, round(step.makespan_ms, 6), self.distance(points), points

    def distance(self, points: SplitPoints) -> int:
        """By how many layers the split points are away from the even ones, in all."""
        return sum(abs(a - b) for a, b in zip(points, self.given, strict=True))

    def compare(self, cuts: Iterable[SplitPoints]) -> None:
        """Simulate these cuts, the lowest bound first, as long as one of them may be as good as the best; keep the best."""
        for bound, _, points in sorted((self.bound.ms(points), self.distance(points), points) for points in cuts):
            lacks, best_ms, _, _ = self.score(self.best)
            if self.left < self.price or (lacks == 0 and bound > best_ms * (1 + NEAR_SHARE)):
                break
            self.best = min(self.best, points, key=self.score)

    def nearest_of_the_best(self) -> SplitPoints:
        """Of the cuts that are as good as the best, to `NEAR_SHARE`, the one nearest to the even cut."""
        lacks, best_ms, _, _ = self.score(self.best)
        limit_ms = best_ms * (1 + NEAR_SHARE)
        good = [points for points in self.seen if self.score(points)[0] == lacks and self.score(points)[1] <= limit_ms]
        return min(good, key=lambda points: (self.distance(points), self.score(points)))

    def all_cuts(self) -> Iterator[SplitPoints]:
        """All split points that leave every stage a layer."""
        ways = [itertools.combinations(range(*part), len(at)) for part, at in self.free_parts]
        for chosen in itertools.product(*ways):
            points = list(self.given)
            for (_, at), places in zip(self.free_parts, chosen, strict=True):
                points[at.start : at.stop] = places
            yield tuple(points)

    def descend(self) -> None:
        """Look around the even cut and the one with the fastest slowest stage, then around the best cut seen, again and again.

        Ends when moves from `PATIENCE` cuts in a row have led to nothing better.
        """
        self.compare([self._lowest_bound(start) for start in (self.given, self._balanced())])
        looked_around: set[SplitPoints] = set()
        in_vain = 0
        while in_vain < PATIENCE and self.left >= self.price and (left := self.seen.keys() - looked_around):
            points, before = min(left, key=self.score), self.best
            looked_around.add(points)
            self.compare(move for move in self._moves(points) if move not in self.seen)
            in_vain = 0 if self.best != before else in_vain + 1

    def _balanced(self) -> SplitPoints:
        """The cut whose slowest stage is fastest, between the split points that cannot move."""
        points = list(self.given)
        for (low, high), at in self.free_parts:
            first = low - 1
            part = [ms - self.work_sums[first] for ms in self.work_sums[first : high + 1]]
            points[at.start : at.stop] = [first + place for place in balanced_cuts(part, len(at) + 1)]
        return tuple(points)

    def _lowest_bound(self, points: SplitPoints) -> SplitPoints:
        """The cut with the lowest bound that moves lead to."""
        bound = self.bound.ms(points)
        while True:
            lower, there = min(((self.bound.ms(moved), moved) for moved in self._moves(points)), default=(math.inf, points))
            if lower >= bound:
                return points
            bound, points = lower, there

    def _moves(self, points: SplitPoints) -> Iterator[SplitPoints]:
        """The cuts in which one stage gives a layer to another; the stages between them move by one."""
        for (low, high), at in self.free_parts:
            for first in at:
                left = points[first - 1] if first > at.start else low - 1
                for last in range(first, at.stop):
                    right = points[last + 1] if last + 1 < at.stop else high
                    if points[first] - 1 > left:
                        yield (*points[:first], *(p - 1 for p in points[first : last + 1]), *points[last + 1 :])
                    if points[last] + 1 < right:
                        yield (*points[:first], *(p + 1 for p in points[first : last + 1]), *points[last + 1 :])


def _free_parts(plan: ParallelPlan) -> Iterator[tuple[tuple[int, int], range]]:
    """See `_SplitPointSearch.free_parts`: runs of stages with the same number of shards."""
    stages = list(enumerate(plan.stages))
    for _, run in itertools.groupby(stages, key=lambda item: item[1].shards):
        members = list(run)
        (first_index, first), (last_index, last) = members[0], members[-1]
        if first_index < last_index:
            yield (first.first + 1, last.last), range(first_index, last_index)
