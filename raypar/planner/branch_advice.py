"""Whether a model's parallel branches are worth workers of their own: beside replicas, and beside the plan that is shown."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raypar.plan import Microbatches, ParallelPlan, StageConnections, StagePlan
from raypar.planner.model_profile import ModelProfile
from raypar.planner.predicted_step import predict_step

WORTH = 1.1
"""How many times as fast branches must be on two workers than on one, without any transfers, to be spoken of."""
MOST_STEPS = 20_000
"""A step of more stages times microbatches is not simulated for an advice."""


@dataclass(frozen=True)
class BranchAdvice:
    """A model's branches side by side, on as many workers as the plan may have, beside replicas of the whole model."""

    plan: ParallelPlan
    """The plan with branches side by side, in as many replicas as are best."""
    branches_ms: float
    """Its predicted step."""
    replicas_ms: float
    """That of a replica on each worker."""
    plan_ms: float
    """That of the plan which is shown."""
    is_placed: bool
    """Whether the plan which is shown computes branches side by side."""
    workers: int
    """How many workers there are."""
    microbatches: int
    """Of a step."""

    @property
    def replicas_win(self) -> bool:
        """Whether replicas of the whole model are faster than branches side by side."""
        return self.replicas_ms <= min(self.branches_ms, self.plan_ms if self.is_placed else self.branches_ms)


def advise_on_branches(
    profile: ModelProfile, shown: ParallelPlan, plan_ms: float, microbatches: Microbatches, workers: int
) -> BranchAdvice | None:
    """What branches side by side gain on so many workers; None for a model without branches that gain, and for shards.

    `plan_ms`: the predicted step of `shown`.
    """
    if workers < 2 or profile.is_chain or any(stage.virtual_shards > 1 for stage in shown.stages):
        return None
    work = _work(profile)
    if sum(work) < WORTH * max(_finish(profile, work, 2, with_transfers=False)[1]):
        return None
    found = []
    for replicas in {1, max(1, min(microbatches.count, microbatches.blocks, workers // 2))}:
        plan = place_branches(profile, workers // replicas, replicas)
        if plan is not None and len(plan.stages) * microbatches.count <= MOST_STEPS:
            found.append((predict_step(profile, plan, "list", microbatches)[0].makespan_ms, replicas, plan))
    if not found:
        return None
    branches_ms, _, best = min(found, key=lambda each: each[:2])
    whole = ParallelPlan.mesh(layers=len(profile.layers), dp=workers)
    replicas_ms = predict_step(profile, whole, "1f1b", microbatches)[0].makespan_ms
    is_placed = places_branches(shown, profile.crossing(shown))
    return BranchAdvice(best, branches_ms, replicas_ms, plan_ms, is_placed, workers, microbatches.count)


def place_branches(profile: ModelProfile, workers: int, replicas: int = 1) -> ParallelPlan | None:
    """A plan in which each replica's branches are computed by so many workers at the same time; None if one worker is as good.

    Chains of layers take the worker on which they end soonest, the one with the longest way to the end first (HEFT: Topcuoglu
    et al. 2002). A stage ends where another worker reads what a layer makes, and before a layer that reads from another worker.
    """
    owner, _ = _finish(profile, _work(profile), workers, with_transfers=True)
    used = sorted(set(owner))
    if len(used) == 1:
        return None
    number = {worker: index for index, worker in enumerate(used)}
    elsewhere = [(src, dst) for src, dst in _bytes_between(profile) if owner[src] != owner[dst]]
    ends = {src + 1 for src, _ in elsewhere} | {dst for _, dst in elsewhere}
    ends |= {i for i in range(1, len(owner)) if owner[i] != owner[i - 1]}
    bounds = sorted({0, len(owner), *ends})
    stages = []
    for first, last in itertools.pairwise(bounds):
        rows = tuple((replica * len(used) + number[owner[first]],) for replica in range(replicas))
        stages.append(StagePlan(first, last, rows))
    return ParallelPlan(tuple(stages))


def places_branches(plan: ParallelPlan, connections: StageConnections) -> bool:
    """Whether two stages of which neither needs the other are on different workers."""
    behind: list[int] = []
    for number, stage in enumerate(plan.stages):
        needed = 0
        for edge in connections.into(number):
            needed |= behind[edge.src] | 1 << edge.src
        behind.append(needed)
        mine = {rank for row in stage.workers for rank in row}
        for other in range(number):
            if not needed >> other & 1 and mine.isdisjoint(rank for row in plan.stages[other].workers for rank in row):
                return True
    return False


def _work(profile: ModelProfile) -> list[float]:
    return [layer.forward_ms + layer.backward_ms for layer in profile.layers]


def _bytes_between(profile: ModelProfile) -> Mapping[tuple[int, int], int]:
    """(producer, consumer) -> bytes that pass, by layer."""
    count = len(profile.layers)
    each = ParallelPlan(tuple(StagePlan(i, i + 1, ((i,),)) for i in range(count)))
    return {(edge.src, edge.dst): edge.nbytes for edge in profile.crossing(each).edges}


def _chains(layers: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """The first layer of the chain in which each layer is: where one alone reads another, and nothing else, both are in one.

    A branch stays on one worker so: layer by layer it would wander to whichever worker is idle.
    """
    makers: defaultdict[int, list[int]] = defaultdict(list)
    readers: defaultdict[int, list[int]] = defaultdict(list)
    for src, dst in pairs:
        makers[dst].append(src)
        readers[src].append(dst)
    first = list(range(layers))
    for i in range(layers):
        if len(makers[i]) == 1 and readers[makers[i][0]] == [i]:
            first[i] = first[makers[i][0]]
    return first


def _finish(
    profile: ModelProfile, work: Sequence[float], workers: int, *, with_transfers: bool
) -> tuple[list[int], list[float]]:
    """(worker of each layer, when each worker has ended) in list scheduling of chains by the longest way to the end."""
    passes = _bytes_between(profile)
    chain = _chains(len(work), passes)
    of_chain: defaultdict[int, float] = defaultdict(float)
    for i, ms in enumerate(work):
        of_chain[chain[i]] += ms
    makers: defaultdict[int, dict[int, float]] = defaultdict(dict)
    readers: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for (src, dst), nbytes in passes.items():
        one, other = chain[src], chain[dst]
        if one != other:
            ms = 2 * profile.link.ms(nbytes) if with_transfers else 0.0  # there, and its gradient back
            makers[other][one] = readers[one][other] = max(ms, makers[other].get(one, 0.0))
    rest: dict[int, float] = {}
    for name in sorted(of_chain, reverse=True):  # what reads a chain begins behind it
        rest[name] = of_chain[name] + max((ms + rest[dst] for dst, ms in readers[name].items()), default=0.0)
    owner, ended, free = dict[int, int](), dict[int, float](), [0.0] * workers
    for name in sorted(of_chain, key=lambda name: (-rest[name], name)):
        ends = []
        for worker in range(workers):
            ready = (ended[src] + (ms if owner[src] != worker else 0.0) for src, ms in makers[name].items())
            ends.append(max(free[worker], max(ready, default=0.0)) + of_chain[name])
        owner[name] = ends.index(min(ends))
        ended[name] = free[owner[name]] = min(ends)
    return [owner[name] for name in chain], free
