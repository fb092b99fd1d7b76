"""Gathers the parameters of a stage for each use of them, or layer by layer inside a use, and frees them after it.

Layer by layer two of them are there at most: one computes, the next one arrives. In a forward pass a layer that begins has the
one before it freed and the next one asked for; in a backward pass, from the last layer down, the gradient of a layer's output
does. The next of the last layer is the first one of what the worker computes next, which may be the same: then it stays.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raypar.comm.blocking_code_as_routine import wait_for_handle
from raypar.comm.routine import Routine, RoutineWait
from raypar.worker.stage.layer_tensors import LayerPass
from raypar.worker.step.parameter_requests import ArrivingParameters, ParameterRequests
from raypar.worker.step.transient_parameters import TransientParameters


@dataclass(eq=False)
class LayerGather:
    """The parameters of one stage, or of one virtual shard of it, that come for a use and go after it."""

    memory: TransientParameters
    """Their memory."""
    requests: ParameterRequests
    """Brings them from their owners."""
    groups: Sequence[Sequence[str]]
    """By number of a request: the parameters that come and go with it: those of the layer at this position, and behind the last
    one those of the whole stage."""
    passes: Mapping[LayerPass, Sequence[int]]
    """The layers that a computation goes through, in order."""
    by_layer: bool
    """Whether they come layer by layer; else for a whole use."""
    what: str
    """The parameters, in messages."""
    timeout_s: float | None = None
    """How long a layer waits for its parameters."""
    waited_ns: int = 0
    """How long layers have waited for theirs in this step."""
    _there: dict[int, ArrivingParameters | None] = field(default_factory=dict)
    """Group that is there, or on its way -> what is on its way of it; None once it has arrived."""
    _order: list[int] = field(default_factory=list)
    """The layers with such parameters, in the order of the computation under way."""
    _place: dict[int, int] = field(default_factory=dict)
    """Layer -> its place in `_order`."""
    _pass: LayerPass | None = None
    """The computation under way."""
    _next: Sequence[tuple[LayerGather, int]] = ()
    """The first layers of what the worker computes after it."""

    # -- what the stage calls, layer by layer ----------------------------------------------------------------------------

    def begin(self, kind: LayerPass) -> None:
        """Begin a computation: ask for its first layer."""
        self._pass, self._order = kind, self._layers(kind)
        self._place = {position: place for place, position in enumerate(self._order)}
        first = self._order[:1]
        self._free_all_but(first or self._own_next())
        for position in first:
            self._ask(position)

    def enter(self, position: int) -> None:
        """A layer begins: wait until its parameters are there; free those of the one before it, and ask for the next."""
        place = self._place.get(position)
        if place is None:
            return
        following = self._order[place + 1 : place + 2]
        self._free_all_but([position, *(following or self._own_next())])
        self._ask(position)
        for gather, layer in [(self, layer) for layer in following] or self._next:
            gather._ask(layer)
        self._wait(position)

    def enter_backward(self, position: int) -> None:
        """The same, from a hook of the gradient of what the layer has returned. Of other passes than the stage's own, as a
        gradient that a layer takes in forward, there is nothing to do."""
        if self._pass == "backward":
            self.enter(position)

    def end(self) -> None:
        """End a computation: free all but what the worker computes with next."""
        self._pass = None
        self._free_all_but(self._own_next())

    # -- what the interpreter calls --------------------------------------------------------------------------------------

    def begin_pass(self, *, asks: bool) -> None:
        """Begin a step, or a pass over validation data. `asks`: whether this worker uses the stage in it."""
        self._free_all_but(())
        self._next = ()
        self.requests.begin(asks=asks)

    def goes_on_with(self, following: Sequence[tuple[LayerGather, int]]) -> None:
        """Note what the worker computes with after the computation that begins now."""
        self._next = following

    def first_layer(self, kind: LayerPass) -> int | None:
        """The first layer with such parameters in a computation; None if none has any."""
        return next(iter(self._layers(kind)), None)

    def ask_for_layer(self, position: int) -> None:
        """Ask for a layer's parameters before the computation begins."""
        self._ask(position)

    def ask_for_all(self) -> None:
        """Ask for the parameters of the whole stage."""
        self._ask(len(self.groups) - 1)

    def wait_for_all(self) -> Routine[None]:
        """Wait for what was asked for."""
        for number, arriving in self._there.items():
            if arriving is not None:
                if not arriving.handle.done():
                    yield RoutineWait(arriving.handle, self.what)
                self._put_in_place(number)

    def free_all(self) -> None:
        """Free all that is there."""
        self._free_all_but(())

    def end_pass(self) -> None:
        """End this worker's uses of the stage in the pass."""
        self._next = ()
        self._free_all_but(())
        self.requests.end()

    # -- parts of it -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Break the circles of references of a pass that was not ended; nothing is gathered any more."""
        self._next, self._there = (), {}
        self.requests.serving.clear()

    def _own_next(self) -> list[int]:
        """The layer here of what the worker computes with next."""
        return [layer for gather, layer in self._next if gather is self]

    def _layers(self, kind: LayerPass) -> list[int]:
        return [position for position in self.passes[kind] if self.groups[position]]

    def _ask(self, number: int) -> None:
        if number not in self._there:
            self.memory.fill(self.groups[number])
            self._there[number] = self.requests.ask(number)

    def _wait(self, number: int) -> None:
        arriving = self._there[number]
        if arriving is None:
            return
        if not arriving.handle.done():
            start = time.perf_counter_ns()
            wait_for_handle(arriving.handle, self.what, self.timeout_s)
            self.waited_ns += time.perf_counter_ns() - start
        self._put_in_place(number)

    def _put_in_place(self, number: int) -> None:
        arriving, self._there[number] = self._there[number], None
        if arriving is not None:
            arriving.put_in_place()

    def _free_all_but(self, kept: Sequence[int]) -> None:
        for number in [number for number in self._there if number not in kept]:
            self._wait(number)  # nobody may write to memory that is freed
            del self._there[number]
            self.memory.free(self.groups[number])
