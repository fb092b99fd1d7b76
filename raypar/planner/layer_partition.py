"""Cutting a chain of layers into consecutive stages so that the slowest stage is as fast as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from raypar.errors import PlanError


def balanced_cuts(sums: Sequence[float], stages: int) -> tuple[int, ...]:
    """First layers of stages 1, 2, ... of the contiguous partition whose most expensive stage costs least.

    `sums` [layers + 1] are prefix sums of non-negative layer costs. Exact, by dynamic programming over (stages, layers):
    best(s, i) = min over j of max(best(s - 1, j), cost of [j, i)); the first grows with j, the second shrinks, so the
    crossing is found by bisection: O(stages * layers * log layers). Raises `PlanError` when a stage would be empty.
    """
    layers = len(sums) - 1
    if not 1 <= stages <= layers:
        raise PlanError(f"{layers} layers cannot fill {stages} stages", cure=f"set plan.stages between 1 and {layers}")
    best = list(sums)
    last_cut: list[list[int]] = []
    for stage in range(2, stages + 1):
        row, cut = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for end in range(stage, layers + 1):
            places = range(stage - 1, end)
            crossing = bisect_left(places, True, key=lambda j: best[j] >= sums[end] - sums[j])
            for j in places[max(0, crossing - 1) : crossing + 1]:
                cost = max(best[j], sums[end] - sums[j])
                if cost < row[end]:
                    row[end], cut[end] = cost, j
        last_cut.append(cut)
        best = row
    cuts: list[int] = []
    end = layers
    for cut in reversed(last_cut):
        end = cut[end]
        cuts.append(end)
    return tuple(reversed(cuts))
