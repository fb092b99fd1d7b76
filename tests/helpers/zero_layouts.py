"""Layouts whose replicas divide state (ZeRO), compared with one process: what owners have, put together, and every copy."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from helpers import parity, reference, shard_grid
from helpers.parity import STEPS, Layout, Precision, differences, share_out_anew
from helpers.shard_grid import Cell, different, one_process
from torch import Tensor

from raypar.plan import ParallelPlan, ownership
from raypar.plan.stage_plan import GatherSpan
from raypar.worker import squares_on_device
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage
from raypar.worker.step.owned_parameters import OwnedParameter
from raypar.worker.worker_core import WorkerCore

PIECE = 16
"""Elements at whose multiples runs begin in these tests, whose parameters are small."""


@contextlib.contextmanager
def small_pieces(elements: int = PIECE) -> Iterator[None]:
    """Inside, owners' runs begin at multiples of so many elements, and the norm's pieces have as many, in references too."""
    kept = ownership.CANONICAL_PIECE, squares_on_device.CANONICAL_PIECE, reference.PIECE
    ownership.CANONICAL_PIECE = squares_on_device.CANONICAL_PIECE = reference.PIECE = elements
    try:
        yield
    finally:
        ownership.CANONICAL_PIECE, squares_on_device.CANONICAL_PIECE, reference.PIECE = kept


@functools.cache
def expected(model: str, microbatches: int, blocks: int, compute: Precision = None) -> reference.Result:
    """As `helpers.parity.expected`, with small pieces of the norm."""
    with small_pieces():
        return parity.expected.__wrapped__(model, microbatches, blocks, compute)


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class DividedLayout(Layout):
    """A layout whose replicas divide state."""

    @property
    def plan(self) -> ParallelPlan:
        """The plan of this cell, at level 1."""
        return super().plan.with_zero(1)


class LayeredLayout(Layout):
    """A layout whose replicas divide parameters, too, and gather them layer by layer."""

    @property
    def plan(self) -> ParallelPlan:
        """The plan of this cell, at level 3."""
        return super().plan.with_zero(3).with_gather("layer")


Read = Callable[[WorkerCore, ShardOfStage, OwnedParameter], Tensor | None]


def alike_with_nan(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether tensors are equal. A step that is skipped leaves gradients in which numbers that are none may stand."""
    if one is None or other is None:
        return one is other
    nowhere, nor_here = one.isnan(), other.isnan()
    return torch.equal(nowhere, nor_here) and torch.equal(one.masked_fill(nowhere, 0), other.masked_fill(nor_here, 0))


def put_together(run: OneProcessRun, read: Read) -> dict[tuple[int, int, str], list[Tensor | None]]:
    """(stage, virtual shard, parameter) -> what is read of its owners' runs, as a tensor of its shape; every copy of what no
    replicas divide. None where no owner has anything. Every element has one owner, and other holders have the same."""
    parts: dict[tuple[int, int, str, int], list[tuple[OwnedParameter, Tensor | None]]] = {}
    shapes: dict[tuple[int, int, str], torch.Size] = {}
    for core in run.cores:
        for index, stage in core.stages.items():
            divided = core.ownership.divides(index[0], "optimizer")
            for each in core.step_commit.owned[index]:
                shapes[(*index, each.name)] = stage.parameters[each.name].shape
                copy = 0 if divided and stage.parameters[each.name].numel() else core.rank
                parts.setdefault((*index, each.name, copy), []).append((each, read(core, index, each)))
    found: dict[tuple[int, int, str], list[Tensor | None]] = {}
    for (*place, _), runs in parts.items():
        key = (place[0], place[1], place[2])
        runs.sort(key=lambda run: run[0].run or (0, 0))
        size, before = shapes[key].numel(), 0
        alike = [list(of) for _, of in itertools.groupby(runs, key=lambda run: run[0].run)]
        for (each, value), *others in alike:
            assert all(alike_with_nan(value, same) for _, same in others), f"{key}: holders of {each.key}"
        runs = [of[0] for of in alike]
        for each, _ in runs:
            start, stop = each.run or (0, size)
            assert start == before, f"{key}: a gap or an overlap at {start}"
            before = stop
        assert before == size, f"{key}: {before} of {size} elements have an owner"
        values = [value for _, value in runs]
        none = all(value is None for value in values)
        assert none or all(value is not None for value in values), key
        flat = all(value is not None and value.shape == each.parameter.shape for each, value in runs)
        if none or not flat:
            assert none or all(alike_with_nan(value, values[0]) for value in values), f"{key}: owners differ"
            found.setdefault(key, []).append(values[0])
        else:
            found.setdefault(key, []).append(torch.cat([value.reshape(-1) for value in values]).view(shapes[key]))
    return found


def gradients_of(run: OneProcessRun) -> dict[tuple[int, int, str], list[Tensor | None]]:
    """The scaled gradients of the last step, as `put_together` has them."""
    return put_together(run, lambda core, index, each: each.parameter.grad)


def state_of(run: OneProcessRun, key: str) -> dict[tuple[int, int, str], list[Tensor | None]]:
    """An entry of the optimizers' state."""

    def read(core: WorkerCore, index: ShardOfStage, each: OwnedParameter) -> Tensor | None:
        if not each.parameter.requires_grad:
            return None
        return core.step_commit.optimizers[index].state[each.parameter].get(key)

    return put_together(run, read)


def by_name(found: dict[tuple[int, int, str], list[Any]]) -> dict[str, list[Any]]:
    """Without stages and shards."""
    named: dict[str, list[Any]] = {}
    for (_, _, name), values in found.items():
        named.setdefault(name, []).extend(values)
    return named


def check_zero(
    layout: Layout,
    level: int | Sequence[int],
    plan: ParallelPlan | None = None,
    later: Any = None,
    order_seed: int = 0,
    holders: int = 1,
    gather: GatherSpan = "step",
) -> int:
    """Run a layout in one process: loss, norm, whether a step is skipped, gradients, parameters, state and buffers must be
    those of the reference. Returns how many runs are parts of parameters."""
    want = expected(layout.model, layout.microbatches, layout.blocks, layout.compute)
    plan = (plan or layout.plan).with_zero(level, holders).with_gather(gather)
    with (
        small_pieces(),
        OneProcessRun(layout.job, plan, layout.schedule, graph=layout.graph, seed=order_seed) as run,
    ):
        for step in range(STEPS):
            if later is not None and step == 2:
                share_out_anew(run, layout.schedule, later)
            reports = run.step(step)
            assert {r.loss for r in reports} == {want.losses[step]}, f"{layout}, step {step}: loss"
            assert {repr(r.norm) for r in reports} == {repr(want.norms[step])}, f"{layout}, step {step}: norm"
            assert {r.skipped for r in reports} == {want.skipped[step]}, f"{layout}, step {step}: skipped"
            found = by_name(gradients_of(run))
            if want.skipped[step]:
                continue
            bad = [d for n, g in want.gradients[step].items() if n in found for d in differences(n, found[n], g)]
            assert not bad, f"{layout}, step {step}: gradients of {bad}"
        parameters = run.parameters()
        bad = [d for n, p in want.parameters.items() if not freed(run, n) for d in differences(n, parameters[n], p)]
        for key in sorted({key for of in want.state.values() for key in of}):
            state = by_name(state_of(run, key))
            for name, keys in want.state.items():
                bad += differences(f"{name}.{key}", state[name], keys.get(key))
        masters = by_name(put_together(run, lambda core, index, each: each.parameter.detach()))
        bad += [d for n, p in masters.items() for d in differences(f"{n} at its owners", p, want.parameters[n])]
        bad += [d for n, b in want.buffers.items() for d in differences(n, run.buffers()[n], b)]
        bad += copies_that_differ(run)
        assert not bad and not run.warnings, f"{layout}: {bad} {run.warnings}"
        return sum(e.run is not None for core in run.cores for own in core.step_commit.owned.values() for e in own)


def copies_that_differ(run: OneProcessRun) -> list[str]:
    """The copies in a lower precision, of all workers, that are not their owners' masters, rounded."""
    masters = put_together(run, lambda core, index, each: each.parameter.detach())
    return [
        f"the copy of {name} of rank {core.rank}"
        for core in run.cores
        for index, stage in core.stages.items()
        for name, copy in stage.weights.rounded.items()
        if stage.parameters[name].requires_grad and not torch.equal(copy.detach(), masters[(*index, name)][0].to(copy.dtype))
    ]


def freed(run: OneProcessRun, name: str) -> bool:
    """Whether some worker has no master of a parameter, because others own it; then its copies are looked at instead."""
    found = False
    for core in run.cores:
        for stage in core.stages.values():
            found |= name in stage.weights.freed_masters
    return found


def run_cell(cell: Cell, plan: ParallelPlan, order_seed: int = 0) -> shard_grid.Run:
    """As `helpers.shard_grid.run`."""
    found = shard_grid.Run([], [], [], {}, {})
    with small_pieces(), OneProcessRun(cell.job, plan, cell.schedule, graph=cell.graph, seed=order_seed) as local:

        def keyed(values: dict[tuple[int, int, str], Any]) -> dict[shard_grid.Key, list[Any]]:
            named: dict[shard_grid.Key, list[Any]] = {}
            for (stage, number, name), value in values.items():
                named.setdefault((name, plan.stages[stage].virtual_shards, number), []).extend(value)
            return named

        for step in range(shard_grid.STEPS):
            reports = local.step(step)
            assert len({repr((r.loss, r.norm, r.skipped)) for r in reports}) == 1
            found.losses.append(reports[0].loss)
            found.norms.append(reports[0].norm)
            gradients = keyed(gradients_of(local))
            if reports[0].skipped:
                gradients.clear()  # compared with those of other holders alone
            found.gradients.append({key: [v if v is None else v.clone() for v in of] for key, of in gradients.items()})
        local.parameters()
        found.parameters = keyed(put_together(local, lambda core, index, each: each.parameter.detach()))
        for core in local.cores:
            for (index, number), stage in core.stages.items():
                for name, parameter in stage.parameters.items():
                    key = name, plan.stages[index].virtual_shards, number
                    if name not in stage.weights.freed_masters:
                        found.parameters.setdefault(key, []).append(parameter.detach())
        bad = copies_that_differ(local)
        assert not bad, bad
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            for key, values in keyed(state_of(local, kind)).items():
                states = found.state.setdefault(key, [{} for _ in values])
                for state, value in zip(states, values, strict=True):
                    if value is not None:
                        state[kind] = value
    return found


@functools.cache
def same_shards_in_one_process(cell: Cell, shards: tuple[int, ...]) -> shard_grid.Run:
    """As `helpers.shard_grid.one_process`, with small pieces of the norm."""
    with small_pieces():
        return one_process.__wrapped__(cell, shards)


def check_cell(cell: Cell, plan: ParallelPlan, order_seed: int = 0) -> None:
    """A plan with shards whose replicas divide state: the bits of the same shards in one process."""
    got = run_cell(cell, plan, order_seed)
    alone = replace(cell, schedule="gpipe", replicas=(1,), shards=(), recompute=())
    alike = same_shards_in_one_process(alone, plan.shards_by_layer)
    for mine, wanted in zip(got.gradients, alike.gradients, strict=True):
        mine |= {key: [None] for key, of in wanted.items() if key not in mine and of == [None]}  # frozen: they have no owner
    bad = list(different(got, alike))
    assert not bad, f"{cell} {plan}: {bad[:8]} and {len(bad) - 8} more"
