"""Chooses a plan's split points: those with the fastest simulated step, from the measured times of the layers.

With equal numbers of layers some workers idle: an embedding costs little and an output layer much, a worker with two chunks
has the work of both, and a position with more replicas can take more layers. Results do not depend on split points. They do
depend on each layer's number of shards, so a split point between stages with different numbers of shards does not move.

A "cut" here is a choice of all split points of a plan; the "even" cut gives all stages nearly equal numbers of layers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from raypar.plan import ParallelPlan
from raypar.planner.candidate_plans import balanced_cuts
from raypar.schedule.instructions import INPUT_GRADIENTS, VALUES, Order, Schedule
from raypar.schedule.simulate import SimulationCosts
from raypar.schedule.step_timeline import Timeline

MIN_GAIN_SHARE, MIN_GAIN_MS = 0.02, 1.0
"""The even cut stays unless another is predicted to be faster by more than this share and by more than this many ms: measured
times vary by as much from run to run, and the cut should not."""
TIE_SHARE = 0.005
"""Cuts that are slower than the fastest by at most this share count as equal. Of these the one nearest to the even cut is
taken, so that noise does not decide."""
MAX_COMPARED_CUTS = 5000
"""Up to so many possible cuts are searched exhaustively; among more the search is local."""
MAX_SIMULATED_INSTRUCTIONS = 80_000
"""Budget of simulated instructions for one plan: about 0.5 s (AMD EPYC, 2026)."""
MAX_FRUITLESS_CUTS = 12
"""The local search ends when the neighbours of so many cuts in a row were no improvement."""
SIMULATION_OVERHEAD = 200
"""Fixed cost of one simulation, in instructions."""

SplitPoints = tuple[int, ...]
"""First layers of stages 1, 2, ..."""
PredictStep = Callable[[ParallelPlan], tuple[Timeline, int]]
"""(the predicted step of a plan, bytes of memory that its largest worker lacks)."""


@dataclass(frozen=True)
class StageBalance:
    """The best cut of a plan, beside the even cut, and which of the two was chosen.

    Steps are predicted for workers with a processor each: where workers share processors, every cut takes equally long.
    """

    even: ParallelPlan
    """The plan with nearly equal numbers of layers in all stages."""
    even_step: Timeline
    """Its predicted step."""
    even_lacks_bytes: int
    """Bytes by which its largest worker exceeds its memory."""
    best: ParallelPlan
    """The plan with the fastest predicted step (within `TIE_SHARE`) among those that exceed memory the least."""
    best_step: Timeline
    """Its predicted step."""
    best_lacks_bytes: int
    """Bytes by which its largest worker exceeds its memory."""
    fastest_ms: float
    """The fastest predicted step; that of `best` is slower by at most `TIE_SHARE`."""

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
        return self.even_step.makespan_ms > max(self.fastest_ms * (1 + MIN_GAIN_SHARE), self.fastest_ms + MIN_GAIN_MS)

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
    """The best cut of the layers of `even` into its stages.

    `schedule`: that of `even`; other cuts have the same forwards and backwards. `layer_costs`: of each layer as a stage of its
    own, on its busiest shard. `predict`: the objective. `is_chain`: whether every layer needs the one before it. Deterministic.
    Exact for up to `MAX_COMPARED_CUTS` possible cuts, unless the budget `MAX_SIMULATED_INSTRUCTIONS` is used up before.
    """
    given = even.split_points
    search = _SplitPointSearch(even, schedule, layer_costs, predict, is_chain)
    if math.prod(math.comb(len(range(*part)), len(at)) for part, at in search.movable) <= MAX_COMPARED_CUTS:
        search.simulate_best_first(search.all_cuts())
    else:
        search.search_locally()
    best = search.nearest_to_even()
    (even_step, even_lacks), (best_step, best_lacks) = search.predicted[given], search.predicted[best]
    fastest_ms = search.predicted[search.best][0].makespan_ms
    return StageBalance(even, even_step, even_lacks, even.with_split_points(best), best_step, best_lacks, fastest_ms)


class StepLowerBound:
    """A lower bound of the step time of any split points, much cheaper than a simulation."""

    fill_ms: tuple[float, ...]
    """By layer: time of one microbatch in all layers before it; zeros if the layers are not a chain."""
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
        busiest: dict[tuple[int, ...], Order] = {}
        for rank in range(even.world):
            busiest[even.stages_of(rank)] = max(busiest.get(even.stages_of(rank), ()), schedule[rank], key=len)
        self.work = []
        for order in busiest.values():
            parts: dict[int, list[tuple[tuple[float, ...], int, bool]]] = {}
            for (stage, kind), count in sorted(Counter((i.stage, type(i)) for i in order).items(), key=lambda item: item[0][0]):
                if kind.makes:  # recomputation, which makes no results, may be missing under another cut
                    is_urgent = VALUES in kind.makes or INPUT_GRADIENTS in kind.makes
                    parts.setdefault(stage, []).append((sums[kind], count, is_urgent))
            self.work.append([_StageWork(stage, tuple(of_stage)) for stage, of_stage in parts.items()])

    def ms(self, points: SplitPoints) -> float:
        """The lower bound for these split points.

        A worker first waits until a microbatch has passed the layers before its own, then does its work. After its last input
        gradient those layers still compute theirs; the worker may compute weight gradients meanwhile.
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
    """By class of instructions: (prefix sums [layers + 1] of the ms that one takes in each layer, number of instructions,
    whether other workers wait for them)."""


class _SplitPointSearch:
    """A search over the split points of one plan."""

    even: ParallelPlan
    """The plan with nearly equal numbers of layers in all stages."""
    even_points: SplitPoints
    """Its split points."""
    predict: PredictStep
    """The objective."""
    bound: StepLowerBound
    """A lower bound of the objective."""
    work_sums: tuple[float, ...]
    """Prefix sums [layers + 1] of the time of each layer for one microbatch."""
    simulation_cost: int
    """Cost of one simulation, in instructions."""
    budget: int
    """Instructions that may still be simulated."""
    movable: list[tuple[tuple[int, int], range]]
    """((first possible layer, last possible layer + 1), range of indices) of each run of split points that may move."""
    predicted: dict[SplitPoints, tuple[Timeline, int]]
    """Split points -> result of `predict`."""
    best: SplitPoints
    """The best split points so far."""

    def __init__(
        self, even: ParallelPlan, schedule: Schedule, costs: SimulationCosts, predict: PredictStep, is_chain: bool
    ) -> None:
        self.even, self.predict = even, predict
        self.even_points = self.best = even.split_points
        self.predicted = {self.even_points: predict(even)}  # first, because it refuses a schedule that does not fit the plan
        self.bound = StepLowerBound(even, schedule, costs, is_chain)
        whole = zip(costs.forward_ms, costs.input_ms, costs.weight_ms, strict=True)
        self.work_sums = (0.0, *itertools.accumulate(map(sum, whole)))
        self.budget, self.simulation_cost = MAX_SIMULATED_INSTRUCTIONS, SIMULATION_OVERHEAD + sum(map(len, schedule))
        self.movable = list(_movable_split_points(even))

    def score(self, points: SplitPoints) -> tuple[int, float, int, SplitPoints]:
        """Sort key of a cut: missing memory, ms (rounded to a nanosecond: equal steps differ in their last bits), distance."""
        found = self.predicted.get(points)
        if found is None:
            self.budget -= self.simulation_cost
            found = self.predicted[points] = self.predict(self.even.with_split_points(points))
        step, lacks = found
        return lacks, round(step.makespan_ms, 6), self.distance(points), points

    def distance(self, points: SplitPoints) -> int:
        """Sum of the distances of the split points from the even ones, in layers."""
        return sum(abs(a - b) for a, b in zip(points, self.even_points, strict=True))

    def simulate_best_first(self, cuts: Iterable[SplitPoints]) -> None:
        """Simulate the cuts in the order of their lower bounds, until none of the others can be as good as the best one."""
        for bound, _, points in sorted((self.bound.ms(points), self.distance(points), points) for points in cuts):
            lacks, best_ms, _, _ = self.score(self.best)
            if self.budget < self.simulation_cost or (lacks == 0 and bound > best_ms * (1 + TIE_SHARE)):
                break
            self.best = min(self.best, points, key=self.score)

    def nearest_to_even(self) -> SplitPoints:
        """Among the cuts that are as good as the best (within `TIE_SHARE`), the one nearest to the even cut."""
        lacks, best_ms, _, _ = self.score(self.best)
        limit_ms = best_ms * (1 + TIE_SHARE)
        good = [points for points in self.predicted if self.score(points)[0] == lacks and self.score(points)[1] <= limit_ms]
        return min(good, key=lambda points: (self.distance(points), self.score(points)))

    def all_cuts(self) -> Iterator[SplitPoints]:
        """All split points with at least one layer in every stage."""
        ways = [itertools.combinations(range(*part), len(at)) for part, at in self.movable]
        for chosen in itertools.product(*ways):
            points = list(self.even_points)
            for (_, at), places in zip(self.movable, chosen, strict=True):
                points[at.start : at.stop] = places
            yield tuple(points)

    def search_locally(self) -> None:
        """Simulate good starting cuts, then again and again the neighbours of the best cut that was not expanded yet."""
        self.simulate_best_first([self._lowest_bound(start) for start in (self.even_points, self._balanced())])
        expanded: set[SplitPoints] = set()
        fruitless = 0
        while (
            fruitless < MAX_FRUITLESS_CUTS
            and self.budget >= self.simulation_cost
            and (left := self.predicted.keys() - expanded)
        ):
            points, before = min(left, key=self.score), self.best
            expanded.add(points)
            self.simulate_best_first(move for move in self._moves(points) if move not in self.predicted)
            fruitless = 0 if self.best != before else fruitless + 1

    def _balanced(self) -> SplitPoints:
        """The cut whose slowest stage is fastest; split points that cannot move stay."""
        points = list(self.even_points)
        for (low, high), at in self.movable:
            first = low - 1
            part = [ms - self.work_sums[first] for ms in self.work_sums[first : high + 1]]
            points[at.start : at.stop] = [first + place for place in balanced_cuts(part, len(at) + 1)]
        return tuple(points)

    def _lowest_bound(self, points: SplitPoints) -> SplitPoints:
        """The local minimum of the lower bound that steepest descent from these split points leads to."""
        bound = self.bound.ms(points)
        while True:
            lower, there = min(((self.bound.ms(moved), moved) for moved in self._moves(points)), default=(math.inf, points))
            if lower >= bound:
                return points
            bound, points = lower, there

    def _moves(self, points: SplitPoints) -> Iterator[SplitPoints]:
        """The neighbours of a cut: one stage gives a layer to another, and the stages between shift by one layer."""
        for (low, high), at in self.movable:
            for first in at:
                left = points[first - 1] if first > at.start else low - 1
                for last in range(first, at.stop):
                    right = points[last + 1] if last + 1 < at.stop else high
                    if points[first] - 1 > left:
                        yield (*points[:first], *(p - 1 for p in points[first : last + 1]), *points[last + 1 :])
                    if points[last] + 1 < right:
                        yield (*points[:first], *(p + 1 for p in points[first : last + 1]), *points[last + 1 :])


def _movable_split_points(plan: ParallelPlan) -> Iterator[tuple[tuple[int, int], range]]:
    """See `_SplitPointSearch.movable`: runs of stages with the same number of shards."""
    stages = list(enumerate(plan.stages))
    for _, run in itertools.groupby(stages, key=lambda item: (item[1].shards, item[1].division)):
        members = list(run)
        (first_index, first), (last_index, last) = members[0], members[-1]
        if first_index < last_index:
            yield (first.first + 1, last.last), range(first_index, last_index)
