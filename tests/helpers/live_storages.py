"""The memory that stages keep while a plan runs: distinct storages alive, counted after every compute instruction.

A dispatch mode sees every storage that a worker's compute instruction makes, in autograd too. Weak references tell which of
them are alive. Stages receive copies, and messages carry copies, so a storage that is alive is kept by the stage itself.
Gradients of parameters and losses are recognised by their addresses and left out, and what their reduction makes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raypar.comm.gradient_reduction import GradientReduction
from raypar.comm.gradient_scatter import ScatterReduction
from raypar.comm.operation_phase import Phases
from raypar.schedule.instructions import Compute, compute_classes
from raypar.worker.stage.stage import Stage
from raypar.worker.step.interpreter import TRAINING_RULES, Interpreter
from raypar.worker.step.parameter_requests import ParameterRequests


@dataclass(frozen=True)
class Kept:
    """What a worker keeps after an instruction, in bytes."""

    rank: int
    after: str
    """The instruction."""
    total: int
    stash: int
    """The part that is kept for weight gradients."""


@dataclass
class _Seen:
    ref: StorageWeakRef
    address: int
    nbytes: int


@dataclass(eq=False)
class LiveStorages(TorchDispatchMode):
    """The storages made by each worker's compute instructions, and what each instruction leaves alive."""

    kept: list[Kept] = field(default_factory=list)
    """One for each compute instruction, in the order in which they ran."""
    settle: Callable[[int], None] = lambda rank: None
    """Called with a worker's rank before its storages are counted."""
    _seen: dict[int, dict[int, _Seen]] = field(default_factory=dict)
    """Rank -> identity of a storage -> the storage."""
    _here: threading.local = field(default_factory=threading.local)
    """`rank`: the worker whose instruction runs in a thread; None: nobody's storages are counted. Instructions that wait for
    others in the midst of a layer have threads of their own."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (rank := getattr(self._here, "rank", None)) is not None:
            self._note(rank, made)
        return made

    def _note(self, rank: int, made: Any) -> None:
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                self._seen.setdefault(rank, {})[ref.cdata] = _Seen(ref, storage.data_ptr(), storage.nbytes())

    @contextmanager
    def _counting_for(self, rank: int | None) -> Iterator[None]:
        before, self._here.rank = getattr(self._here, "rank", None), rank
        try:
            yield
        finally:
            self._here.rank = before

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count inside the interpreter's compute rules from now on."""
        for kind in compute_classes():
            monkeypatch.setitem(TRAINING_RULES, kind, self._watched(TRAINING_RULES[kind]))
        batch, route = Interpreter._batch, Interpreter._route

        def private_batch(interpreter: Interpreter, *place: int) -> Mapping[str, Tensor]:
            with self._counting_for(None):
                found = batch(interpreter, *place)
            return {name: value.clone() for name, value in found.items()}

        def copied_route(interpreter: Interpreter, key: Any, maker: int, user: int, tensors: list[Tensor]) -> None:
            with self._counting_for(None):
                route(interpreter, key, maker, user, [_copy(tensor) for tensor in tensors])

        def uncounted(submit: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                with self._counting_for(None):
                    return submit(*args)

            return run

        answers = ParameterRequests._answers

        def uncounted_answers(requests: ParameterRequests, reader: int) -> Phases:
            phases = answers(requests, reader)
            while True:
                with self._counting_for(None):
                    phase = next(phases, None)
                if phase is None:
                    return
                yield phase

        monkeypatch.setattr(ParameterRequests, "_answers", uncounted_answers)
        for posting in ("ask", "end"):
            monkeypatch.setattr(ParameterRequests, posting, uncounted(getattr(ParameterRequests, posting)))
        for reduction in (GradientReduction, ScatterReduction):
            monkeypatch.setattr(reduction, "submit_gradients", uncounted(reduction.submit_gradients))
        monkeypatch.setattr(Interpreter, "_batch", private_batch)
        monkeypatch.setattr(Interpreter, "_route", copied_route)

    def _watched(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        def run(interpreter: Interpreter, instruction: Compute, step: int, received: dict[str, Tensor]) -> Any:
            guard = next(iter(interpreter.stages.values())).guard
            with self, guard.accepting_contexts(), self._counting_for(interpreter.rank):
                copies = {name: _copy(tensor) for name, tensor in received.items()}
                received.clear()
                result = rule(interpreter, instruction, step, copies)
                del copies
            self.kept.append(self._count(interpreter, instruction))
            return result

        return run

    def _count(self, interpreter: Interpreter, instruction: Compute) -> Kept:
        self.settle(interpreter.rank)
        seen = self._seen.setdefault(interpreter.rank, {})
        for key in [key for key, one in seen.items() if one.ref.expired()]:
            del seen[key]
        others = {a for stage in interpreter.stages.values() for a in _not_kept(stage)}
        stashed = {
            t.untyped_storage().data_ptr()
            for stage in interpreter.stages.values()
            for live in stage._live.values()
            for deferred in live.stash
            for t in deferred.kept
        }
        # The storage of a parameter that is freed until the next gather stays, without memory.
        parameters = {p.untyped_storage()._cdata for p in _parameters(interpreter)}
        alive = [one for key, one in seen.items() if one.address not in others and key not in parameters]
        return Kept(
            interpreter.rank,
            str(instruction),
            sum(one.nbytes for one in alive),
            sum(one.nbytes for one in alive if one.address in stashed),
        )


def _parameters(interpreter: Interpreter) -> Iterator[Tensor]:
    """What layers compute with, masters, and owners' runs."""
    for stage in interpreter.stages.values():
        yield from stage.parameters.values()
        yield from map(stage.weights.computed_with, stage.parameters)
    for owned in interpreter.step_commit.owned.values():
        yield from (each.parameter for each in owned)


def _copy(tensor: Tensor) -> Tensor:
    """The same numbers in memory of their own, as a message brings them."""
    with torch.no_grad():  # no detach(): the mode would count the storage that is copied
        copied = tensor.clone()
    return copied.requires_grad_(tensor.requires_grad)


def _not_kept(stage: Stage) -> set[int]:
    """Addresses of a stage's state, sums of gradients and losses."""
    sums = stage.gradients
    reduction = getattr(sums.on_ready, "__self__", None)
    held: list[Any] = [
        *(_of_reduction(reduction) if isinstance(reduction, GradientReduction) else []),
        *stage.parameters.values(),
        *stage.buffers.values(),
        *(leaf.grad for leaf in sums.leaves),
        sums._open,
        sums._sums,
        sums._deferred,
        list(stage.losses.values()),
    ]
    return {t.untyped_storage().data_ptr() for t in tree_leaves(held) if isinstance(t, torch.Tensor)}


def _of_reduction(reduction: GradientReduction) -> list[Any]:
    """Gradients that a reduction has."""
    return [reduction._totals, *((one.terms, one.memory) for one in reduction._sums.values())]
