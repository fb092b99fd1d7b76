"""Notices operations that the calls of PyTorch's functions do not show during a trace."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from raypar.model.capture.memoryless_tensor import READ_VALUES, MemorylessTensor, has_dynamic_shape, memory_of
from raypar.model.capture.refusal import Refused, user_location
from raypar.torch_compat.avoid_dynamo_import import without_dynamo
from raypar.torch_compat.dispatch import (
    OperatorValue,
    TorchDispatchMode,
    draws_random_numbers,
    run_operation,
    schema_of,
    written_tensors,
)
from raypar.torch_compat.pytree import tree_flatten

if TYPE_CHECKING:
    from raypar.torch_compat.dispatch import OpOverload


@without_dynamo
class OperationWatch(TorchDispatchMode):
    """Sees every operation of a forward that is traced, those inside of units too.

    It notices operations that draw random numbers, those whose shape depends on values, and which memory they make. It refuses
    those that write into parameters, and those of a unit that read a tensor which is neither made in this call nor an argument.
    """

    def __init__(self, model: nn.Module, fields: Iterable[Tensor]) -> None:
        """`fields`: the batch."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew_random_numbers = False
        """Whether an operation of the present event has drawn random numbers."""
        self.gave_dynamic_shape = False
        """Whether one has read values, so that the shape of what the event returns may depend on them."""
        self._parameters = {memory_of(parameter): name for name, parameter in model.named_parameters()}
        """`memory_of` -> name of each parameter."""
        self._buffers = {memory_of(buffer): name for name, buffer in model.named_buffers()}
        """`memory_of` -> name of each buffer."""
        self._made: dict[int, Tensor] = {}
        """`memory_of` -> a tensor that an operation has made; kept, so that no number is used twice."""
        self._maker = {memory_of(value): 0 for value in fields}
        """`memory_of` a tensor whose values are not the same in every forward -> number of the event that has made or last
        written it; 0 for batch fields."""
        self._event = 0
        """The number of the present event."""
        self._unit: str | None = None
        """The name of the unit whose call it is; None if it is the call of a function."""
        self._given: Collection[int] = ()
        """`memory_of` the tensors among its arguments."""
        self.after: Callable[[str, Sequence[OperatorValue], OperatorValue], None] | None = None
        """Called with name, arguments and result of each operation."""
        self._deadline, self._seconds = math.inf, math.inf
        """When the unit that runs must have ended, and how long it may take."""
        self._is_paused = False
        """Whether it notices nothing, because the operations are the recorder's own."""

    def begin_event(self, number: int, unit: str | None, tensors: Iterable[Tensor]) -> None:
        """Forget what was noticed before. `tensors`: the arguments of the event."""
        self.drew_random_numbers = self.gave_dynamic_shape = False
        self._event, self._unit, self._given = number, unit, {memory_of(value) for value in tensors}

    def has_made(self, tensor: Tensor) -> bool:
        """Whether an operation of this forward has made the memory of a tensor."""
        return memory_of(tensor) in self._made

    def varies(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor are not the same in every forward."""
        return memory_of(tensor) in self._maker

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Context that refuses a unit which takes longer than this."""
        self._deadline, self._seconds = time.monotonic() + seconds, seconds
        try:
            yield
        finally:
            self._deadline = math.inf

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context of the recorder's own operations."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[OperatorValue, ...] = (),
        kwargs: Mapping[str, OperatorValue] | None = None,
    ) -> OperatorValue:
        if self._is_paused:
            return run_operation(func, args, kwargs)
        draws = draws_random_numbers(func)
        self.drew_random_numbers |= draws
        self.gave_dynamic_shape |= func in READ_VALUES or has_dynamic_shape(func, args)
        if time.monotonic() > self._deadline:
            raise Refused(
                f"unit {self._unit} has run for {self._seconds:.0f} s while it was recorded, at {user_location()}: it reads "
                "values, and may never end on small random numbers",
                "give its loop a largest number of rounds",
            )
        given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        memories = {memory_of(value) for value in given}
        if self._unit is not None:
            for value in given:
                self._refuse_hidden(value)
        varies = draws or any(isinstance(value, MemorylessTensor) for value in given) or not memories.isdisjoint(self._maker)
        if schema_of(func).is_mutable:
            for value in written_tensors(func, args, kwargs or {}):
                self._refuse_parameter_write(value)
                if varies:
                    self._maker[memory_of(value)] = self._event
        out = run_operation(func, args, kwargs)
        if self.after is not None:
            self.after(schema_of(func).name.rpartition("::")[2], args, out)
        for made in tree_flatten(out)[0]:
            if isinstance(made, Tensor) and not made.is_meta and memory_of(made) not in memories:  # neither view nor written
                self._made.setdefault(memory_of(made), made)
                if varies:
                    self._maker.setdefault(memory_of(made), self._event)
        return out

    def _refuse_hidden(self, value: Tensor) -> None:
        """Raises `Refused` for a tensor that a unit reads although nothing has given it to it."""
        memory = memory_of(value)
        maker = self._maker.get(memory)
        if maker is None or maker == self._event or memory in self._given:
            return
        if memory in self._buffers:
            raise Refused(
                f"unit {self._unit} reads its buffer {self._buffers[memory]!r} at {user_location()}, which an earlier call has "
                "written: layers are apart, and each would see its own writes only",
                "call the module once, on what torch.cat makes of the inputs; or make a module around all calls a unit "
                "(model.units)",
            )
        what = "a field of the batch" if maker == 0 else "what code outside of this call has made or written"
        raise Refused(
            f"unit {self._unit} reads a tensor {list(value.shape)} at {user_location()} that is not among its "
            f"arguments: {what}, and left in an attribute or variable, where the unit does not find it on another worker",
            "pass it as an argument, or make a module around both a unit (model.units)",
        )

    def _refuse_parameter_write(self, value: Tensor) -> None:
        """Raises `Refused` if a tensor that is written is a parameter."""
        name = self._parameters.get(memory_of(value))
        if name is not None:
            raise Refused(
                f"the forward writes into parameter {name} at {user_location()}: each microbatch would change it, on its own "
                "replica only",
                "use the operation that returns a new tensor (weight * mask), or change parameters in the optimizer",
            )
