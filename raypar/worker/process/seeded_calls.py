"""Calls of one layer, each as if all generators had been seeded before it (rule 3 of raypar/NUMERICS.md).

To seed PyTorch's generator is cheap. Python's and NumPy's are 5 kB, which are out of the processor's caches by the next layer,
and few layers draw from them. So they are seeded for layers that do: the first call of a layer is watched, and after each later
call it is asked whether the generators have moved. If they have, what the call has computed is dropped, and it is made again
with all of them seeded, as are all calls of this layer from then on. Where several calls can be made again together, it is
asked once, after all of them (`TorchStateGuard.compare_once`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS
from raypar.worker.process.seed_generators import HostGenerators
from raypar.worker.process.watch_generator_use import watching_generator_use

R = TypeVar("R")


class UnseededDraw(BaseException):
    """A call has drawn from generators that were not seeded for it: make it again. No `Exception`: no error of the user."""


class SeededCalls:
    """The calls of one layer in one mode, training or evaluation."""

    draws: bool | None
    """Whether all generators are seeded before each call; None: before the first call."""

    def __init__(
        self, seed_all: Callable[[int], None], seed_torch: Callable[[int], object], generators: HostGenerators | None
    ) -> None:
        """`generators`: Python's and NumPy's; None: seed all before each call."""
        self._seed_all, self._seed_torch, self._generators = seed_all, seed_torch, generators
        self.draws = True if generators is None else None

    @property
    def generators_that_rest(self) -> HostGenerators | None:
        """Python's and NumPy's, if the calls are known to draw nothing from them."""
        return self._generators if self.draws is False else None

    def __call__(self, number: int, function: Callable[..., R], *args: object) -> R:
        """`function(*args)`, with the generators seeded by `number`.

        Raises what that raises, and `UnseededDraw` if the call must be made again, which it then seeds for.
        """
        generators = self._generators
        if self.draws or generators is None:
            self._seed_all(number)
            return function(*args)
        if self.draws is None:
            return self._first_call(generators, number, function, *args)
        self._seed_torch(number)
        if generators.asked_at_end:
            return function(*args)
        generators.seed_if_moved(number)
        try:
            found = function(*args)
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            self._check_unmoved(generators)
            raise
        self._check_unmoved(generators)
        return found

    def _first_call(self, generators: HostGenerators, number: int, function: Callable[..., R], *args: object) -> R:
        self._seed_torch(number)
        generators.seed(number)
        with watching_generator_use(generators.numpy_generator) as use:
            found = function(*args)
        self.draws = use.seen or not generators.are_as_seeded()
        return found

    def _check_unmoved(self, generators: HostGenerators) -> None:
        if not generators.are_as_seeded():
            self.draws = True
            raise UnseededDraw from None
