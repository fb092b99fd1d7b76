"""Notices what the calls of PyTorch's functions do not show during a trace: operations, and attributes that modules set."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from raypar.model.capture.absent_tensor import READ_VALUES, AbsentTensor, has_dynamic_shape, memory_of
from raypar.model.capture.refusal import Refused, user_location
from raypar.torch_compat.avoid_dynamo_import import without_dynamo
from raypar.torch_compat.dispatch import TorchDispatchMode, draws_random_numbers, schema_of, written_tensors
from raypar.torch_compat.pytree import tree_flatten

if TYPE_CHECKING:
    from raypar.torch_compat.dispatch import OpOverload

T = TypeVar("T")


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
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
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
        varies = draws or any(isinstance(value, AbsentTensor) for value in given) or not memories.isdisjoint(self._maker)
        if schema_of(func).is_mutable:
            for value in written_tensors(func, args, kwargs or {}):
                self._refuse_parameter_write(value)
                if varies:
                    self._maker[memory_of(value)] = self._event
        out = func(*args, **(kwargs or {}))
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


_KEPT = (bool, int, float, complex, str, type(None), Tensor)
"""Types of values that are looked at."""


class UnitAttributes:
    """Refuses reads of an attribute that another event of the same forward has set.

    Layers are apart: what the call of one sets, or code between them, the others do not see. Numbers, texts and tensors are
    looked at; what other objects hold is seen if it is a tensor (`OperationWatch`).
    """

    def __init__(self, units: Mapping[str, nn.Module], varies: Callable[[Tensor], bool]) -> None:
        """`varies`: whether a tensor has other values in another forward."""
        self._varies = varies
        self._names = {
            id(part): f"{name}.{path}" if path else name for name, unit in units.items() for path, part in unit.named_modules()
        }
        """`id` of every module inside of a unit -> its qualified name."""
        self._set: dict[tuple[int, str], tuple[int | None, Any]] = {}
        """(`id` of a module, attribute) -> (event in which it was last set, its value before the forward)."""

    def note_write(self, module: nn.Module, key: str, value: Any, event: int | None) -> None:
        """An attribute is about to be set. `event`: number of the event that runs; None while code between units does."""
        if id(module) not in self._names:
            return
        attribute, former = (id(module), key), vars(module).get(key)
        if attribute in self._set:
            former = self._set[attribute][1]
        elif not (isinstance(value, _KEPT) or isinstance(former, _KEPT)) or _is_same(value, former):
            return
        self._set[attribute] = (event, former)

    def is_set(self, module: nn.Module, key: str) -> bool:
        """Whether the forward has set an attribute."""
        return (id(module), key) in self._set

    def check_read(self, module: nn.Module, key: str, event: int | None) -> None:
        """Raises `Refused` if an attribute that the forward has set is read in another event than that."""
        setter, former = self._set[id(module), key]
        value = vars(module).get(key)
        if setter == event or not isinstance(value, _KEPT) or _is_same(value, former):
            return
        if isinstance(value, Tensor) and not self._varies(value):
            return
        reader = "code between units" if event is None else "another call"
        by = "code between units has set" if setter is None else "the call of a unit has set"
        raise Refused(
            f"{reader} reads the attribute {key!r} of {self._names[id(module)]} ({type(module).__name__}) at "
            f"{user_location()}, which {by}: in a record it would stay as it is now",
            "pass it as an argument, or return it as a tensor; or make a module around both a unit (model.units)",
        )


def _is_same(value: T, other: T) -> bool:
    return value is other or (type(value) is type(other) and not isinstance(value, Tensor) and bool(value == other))
