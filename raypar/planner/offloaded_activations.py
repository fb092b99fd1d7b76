"""What offloaded activations take: bytes on their way out and where they lie, and the time in which they are written and read.

A backward has the activations of two layers in memory at a time: of the one that computes, and of the next one, which is read
meanwhile (`worker/stage/activation_offloading.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from raypar.plan import MicrobatchRouting, ParallelPlan, offloading
from raypar.planner.model_profile import LayerProfile, ModelProfile
from raypar.schedule.instructions import ACTIVATIONS, RESIDENT, Schedule


class OffloadTimes(NamedTuple):
    """Times of one microbatch, by stage, as `SimulationCosts` has them; empty tuples: no time."""

    offload_ms: tuple[float, ...] = ()
    """Writing all, beside compute."""
    first_read_ms: tuple[float, ...] = ()
    """Reading what a backward needs first, before it begins."""
    read_wait_ms: tuple[float, ...] = ()
    """How long the backward then waits for the rest, which it reads layer by layer."""


def offload_times(profile: ModelProfile, plan: ParallelPlan, ms_of: Callable[[LayerProfile], float]) -> OffloadTimes:
    """The times of a plan's stages. `ms_of`: the time of a layer's backward."""
    speed = profile.offload_bandwidth
    sizes = [profile.offloaded_bytes(plan, stage) for stage in range(len(plan.stages))]
    if not any(nbytes / speed for nbytes in sizes):
        return OffloadTimes()
    first, wait = [], []
    for stage, place in enumerate(plan.stages):
        reads = {layer: nbytes / speed for layer, nbytes in profile.bytes_read_by_layer(plan, stage).items()}
        layers = {i: ms_of(profile.stage(replace(place, first=i, last=i + 1))) for i in range(place.first, place.last)}
        first.append(next(iter(reads.values()), 0.0))
        wait.append(wait_for_reads(reads, layers))
    return OffloadTimes(tuple(nbytes / speed for nbytes in sizes), tuple(first), tuple(wait))


def wait_for_reads(reads_ms: Mapping[int, float], layers_ms: Mapping[int, float]) -> float:
    """How long a backward waits for reads of offloaded layers. A layer's read begins when the layer before it in the backward
    does, and reads follow each other. `layers_ms`: what the backward of each layer takes; `reads_ms`: what the read of each
    offloaded layer takes, the last layer first, whose read is done when the backward begins."""
    clock = disk = 0.0
    there = dict.fromkeys(list(reads_ms)[:1], 0.0)
    for layer in sorted(layers_ms, reverse=True):
        following = next((each for each in reads_ms if each < layer), None)
        for each in [layer, *([] if following is None else [following])]:
            if each in reads_ms and each not in there:
                there[each] = disk = max(disk, clock) + reads_ms[each]
        clock = max(clock, there.get(layer, 0.0)) + layers_ms[layer]
    return clock - sum(layers_ms.values())


def unwritten_limits(profile: ModelProfile, plan: ParallelPlan) -> tuple[int, ...]:
    """By stage: most bytes of its offloaded activations that wait in memory to be written: those of one layer, up to
    `MOST_UNWRITTEN_BYTES`, but no less than one storage."""
    found = []
    for stage in range(len(plan.stages)):
        written = profile.bytes_written_by_layer(plan, stage).values()
        largest = max((kept.largest_storage for kept in profile.kept), default=0)
        found.append(max(min(offloading.MOST_UNWRITTEN_BYTES, max(written, default=0)), min(largest, max(written, default=0))))
    return tuple(found)


def bytes_in_place(profile: ModelProfile, routing: MicrobatchRouting, orders: Schedule) -> tuple[int, ...]:
    """By rank: bytes of offloaded activations in files, whose pages the system may write out, or in the host's memory, when
    they are most: of the microbatches between the forward that writes them and the backward."""
    plan, found = routing.plan, list[int]()
    is_pinned = profile.activations_place == offloading.HOST
    for order in orders if plan.offload else ():
        there: dict[tuple[int, int], int] = {}
        most = 0
        for i in order:
            if RESIDENT in i.allocates:
                samples = len(routing.microbatches.samples(i.microbatch))
                there[i.stage, i.microbatch] = profile.offloaded_bytes(plan, i.stage, samples, is_pinned=is_pinned)
                most = max(most, sum(there.values()))
            elif ACTIVATIONS in i.frees:
                there.pop((i.stage, i.microbatch), None)
        found.append(most)
    return tuple(found or [0] * plan.world)


def offloaded_keys(orders: Schedule) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) of which activations are offloaded."""
    return frozenset((i.stage, i.microbatch) for order in orders for i in order if RESIDENT in i.allocates)
