"""Runs a model's forward once and records it: unit calls, and the calls of PyTorch's functions between them.

During a trace parameters have no values; batch fields and buffers do. Tensors that depend only on these two are therefore
computed, and Python code may read their values; every such read is recorded as a guard. Reading the values of any other tensor
is refused.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raypar.errors import with_article
from raypar.model.capture.attributes_set_while_traced import UnitAttributes
from raypar.model.capture.memoryless_tensor import MemorylessTensor, ValuesNeeded, memory_of
from raypar.model.capture.operation_watch import OperationWatch
from raypar.model.capture.parallel_branches import BranchFinder, modules_with_branches
from raypar.model.capture.refusal import (
    DRAWS_MASKS,
    SKIPS_LAYERS,
    InnerModuleUsed,
    Refused,
    cure_for_cache,
    settings_to_be_zero,
    user_location,
)
from raypar.model.capture.settings_of_contexts import (
    SurroundingSettings,
    cpu_autocast_setting,
    python_random_state,
    settings_of_contexts,
)
from raypar.model.capture.tensors_in_values import flatten, may_hide_tensors
from raypar.model.capture.trace_data import (
    Event,
    EventId,
    Guard,
    ModuleArgument,
    Rewrite,
    TensorFacts,
    TensorKey,
    TensorKind,
    Trace,
    comparable,
    form_of,
)
from raypar.model.capture.units_on_random_numbers import (
    UnitsOnRandomNumbers,
    count_gradient_parts,
    graph_nodes,
    is_fused_in_evaluation,
    run_with_random_values,
    with_dtypes_of_fused,
)
from raypar.model.graph import ModelOutput
from raypar.torch_compat.autograd import is_wrapped_by_transform
from raypar.torch_compat.dispatch import NESTED_TENSORS, PACKING
from raypar.torch_compat.pytree import TreeSpec, tree_flatten, tree_map

R = TypeVar("R")

_MAKERS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    Tensor.new_zeros: torch.zeros,
    Tensor.new_ones: torch.ones,
    Tensor.new_full: torch.full,
    Tensor.new_empty: torch.empty,
}
"""Method that makes a tensor with the dtype and device of another -> function that makes it from a dtype and a device."""

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""(function, arguments, keyword arguments)"""


def without_dtype_and_device_tensor(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call with dtype and device in place of a tensor of which it reads only these; other calls unchanged.

    `mask.type_as(x)`, `x.new_zeros(3)`: so a mask that is made in an activation's dtype does not depend on the activation, and
    each stage that needs the mask can compute it.
    """
    if func in (Tensor.type_as, Tensor.to) and len(args) > 1 and isinstance(args[1], Tensor):
        return Tensor.to, (args[0], args[1].device, args[1].dtype, *args[2:]), dict(kwargs)
    if func in _MAKERS and args and args[0].layout is torch.strided:
        given = {key: value for key, value in kwargs.items() if value is not None}
        return _MAKERS[func], args[1:], {"dtype": args[0].dtype, "device": args[0].device, **given}
    return func, args, dict(kwargs)


MOST_UNIT_SECONDS = 60.0
"""How long a unit may run while it is recorded: without values, or on small random numbers."""
_GIVE_ANSWERS = frozenset(
    ("__bool__", "item", "tolist", "__int__", "__float__", "__index__", "__complex__", "__contains__", "numpy", "__array__",
     "equal", "allclose", "is_nonzero")
)  # fmt: skip
"""Functions that tell Python code values."""
_NUMBERS = (bool, int, float, complex, str, bytes, torch.dtype)
"""Types of arguments that are compared by value."""
_CHANGE_GRADIENT_STATE = frozenset(("__setitem__", "requires_grad_", "detach_"))
"""Functions that change their first argument, whatever its version says."""
_NEVER_REPLAYED = {
    "register_hook": "a hook on a tensor",
    "register_post_accumulate_grad_hook": "a hook on a tensor",
    "retain_grad": "retain_grad() of a tensor",
    "backward": "a backward pass",
    "__set__": "an assignment to an attribute of a tensor (.data, .grad)",
    "__reduce_ex__": "pickling or copy.copy() of a tensor (torch.save)",
    "set_": "a change of a tensor's memory",
    "resize_": "a change of a tensor's memory",
}
"""Functions between units that a replay would leave out -> what to call them."""

_FIXED_SHAPES = (
    "compute it inside a module that returns tensors of fixed shapes, and make that a unit (model.units); use torch.where in "
    "place of boolean indices"
)
_CURES_BY_OPERATION = {
    PACKING: "give the lengths as a field of the batch; or put packing, the recurrent net and "
    "pad_packed_sequence(..., total_length=...) inside a module, and make that a unit (model.units)",
    "sparse": "multiply sparse tensors inside a module that returns dense ones, and make that a unit (model.units)",
    NESTED_TENSORS: "make nn.TransformerEncoder with enable_nested_tensor=False",
}
"""Part of the name of an operation that needs values -> its own cure."""


class Recorder(TorchFunctionMode):
    """Records the calls that are made while it is entered. `record_forward.py` is the way to use it."""

    _inside_event = 0
    """Above 0 while an event runs: what it calls is part of it."""
    _sizes_are_read = False
    """Whether the values that decide the shape of the result of the function to be called have been read."""
    _event_number = 0
    """Number of the event that runs, or of the last one."""
    _unit_calls = 0
    """Number of unit calls so far."""
    _unit_has_asked = False
    """Whether Python code inside of the unit that runs has read values."""
    _numbers = 0
    """Number of values and constants so far."""

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        fields: Mapping[str, Tensor],
        like: Trace | None = None,
        finds_branches: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        """The model."""
        self.like = like
        """The training trace, if this trace is in evaluation mode. A call that returned a new tensor there but returns its own
        argument here (dropout) gets a view, so that both traces have the same values."""
        self.passed_through: set[EventId] = set()
        """Events that have returned one of their arguments, and not written it."""
        self.events: list[Event] = []
        """The events so far."""
        self.guards: list[Guard] = []
        """What Python code has read so far."""
        self.constants: dict[TensorKey, Tensor] = {}
        """Tensors that nothing here has made, with copies of their values."""
        self.facts: dict[TensorKey, TensorFacts] = {}
        """What is known of each version of each tensor."""
        self.made_inside: dict[int, tuple[str, Tensor]] = {}
        """`id` of a tensor that a module inside of a unit returned -> (that module, the tensor)."""
        self.units = units
        """Qualified name -> unit."""
        self.paths = {id(module): name for name, module in model.named_modules()}
        """`id` of a module -> its qualified name."""
        self.call_log: list[tuple[Hashable, ...]] = []
        """(call, location, what its arguments are) of every event that is not pure: equal for two traces of one batch, unless
        the forward depends on something that it has left behind."""
        self._uninitialised: set[int] = set()
        """`memory_of` of tensors whose values nothing has set (torch.empty)."""
        self._running: list[str] = []
        """Qualified names of the modules whose own code runs between units, the innermost last."""
        self._thread = threading.get_ident()
        """The thread that traces."""
        self._keys: dict[int, TensorKey] = {}
        """`id` of a tensor -> its present version."""
        self._versions: dict[int, int] = {}
        """`id` of a tensor -> how often it had been written (`_version`) when it was last seen."""
        self._alive: list[Tensor] = []
        """All known tensors, kept so that no `id` is used twice."""
        self._by_memory: dict[int, list[Tensor]] = {}
        """`memory_of` -> known tensors in it."""
        self._pure: set[TensorKey] = set()
        """Tensors that depend on batch fields, buffers and constants alone."""
        self.watch = OperationWatch(model, fields.values())
        """Notices what operations do, inside of units too."""
        self.branches = BranchFinder(model, self.paths, self.watch) if finds_branches else None
        """Finds the units whose modules form parallel branches."""
        self.attributes = UnitAttributes(units, self.watch.varies)
        """Notices attributes that another layer has set."""
        self._calls: Counter[tuple[int, str]] = Counter()
        """(number of unit calls before, function) -> number of its calls."""
        self._on_random_numbers = UnitsOnRandomNumbers()
        """The units that ran on random numbers."""
        self._random_state = python_random_state()
        """Python's and numpy's generators when code between units began to run."""
        self._torch_random_state = torch.random.get_rng_state()
        """PyTorch's generator after the last event."""
        self._surrounding = SurroundingSettings.now()
        """Autocast and the other settings that contexts change, as they are around the model."""
        self._bind_all("parameter", model.named_parameters())
        self._bind_all("buffer", model.named_buffers())
        self._bind_all("field", fields.items())
        self._pure |= {key for key in self._keys.values() if key.kind != "parameter"}

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _new_key(self, kind: TensorKind) -> TensorKey:
        self._numbers += 1
        return TensorKey(kind, str(self._numbers))

    def _bind_all(self, kind: TensorKind, named: Iterable[tuple[str, Tensor]]) -> None:
        """Know tensors under their names from now on."""
        for name, tensor in named:
            self._bind(tensor, TensorKey(kind, name))

    def _bind(self, tensor: Tensor, key: TensorKey) -> None:
        """Know a tensor under a key from now on."""
        if id(tensor) not in self._keys:
            self._alive.append(tensor)
            self._by_memory.setdefault(memory_of(tensor), []).append(tensor)
        self._keys[id(tensor)] = key
        self._versions[id(tensor)] = tensor._version
        self._note(tensor, key)

    def _note(self, tensor: Tensor, key: TensorKey) -> None:
        self.facts[key] = TensorFacts(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, memory_of(tensor))

    def _leaf(self, value: Any, unit: str | None = None) -> Any:
        """An argument as an event keeps it. `unit`: whose call it is."""
        if not isinstance(value, Tensor):
            if unit is not None and isinstance(value, nn.Module) and self._may_be_given(value, unit):
                return ModuleArgument(self.paths[id(value)])
            if may_hide_tensors(value):
                refused = self._hidden_tensors(value)
                if unit is not None and not unit.startswith(f"{self.paths.get(id(value))}."):
                    refused.module = self.paths.get(id(value), "")  # it may be given if it runs whole
                raise refused
            return value
        key = self._keys.get(id(value))
        if key is None:
            return self._constant(value)
        if self.facts[key].requires_grad != value.requires_grad:
            raise Refused(
                f"a tensor {list(value.shape)} has got its gradient where the capture does not look, and is used at "
                f"{user_location()}",
                "call custom autograd functions as Function.apply(...) there, not through a name bound before; "
                "or make the module that does it a unit (model.units)",
            )
        if not key.is_state and self._versions[id(value)] != value._version:
            raise Refused(
                f"a tensor {list(value.shape)} that is used at {user_location()} was written where the capture does not look",
                "write it by PyTorch's own functions; or make the module that does it a unit (model.units)",
            )
        return key

    def _may_be_given(self, module: nn.Module, unit: str) -> bool:
        """Whether the layer that calls a unit can hold this module too: it is in the model, and no other unit is inside it."""
        path = self.paths.get(id(module))
        return bool(path) and not any(each.startswith(f"{path}.") for each in (unit, *self.units))

    def _constant(self, value: Tensor) -> TensorKey:
        """The key of a tensor that nothing recorded has made. Raises for one that depends on the forward."""
        if id(value) in self.made_inside:
            raise InnerModuleUsed(self.made_inside[id(value)][0])
        hidden = isinstance(value, MemorylessTensor) or value.is_meta or value.requires_grad or is_wrapped_by_transform(value)
        if hidden or self.watch.has_made(value):
            raise Refused(
                f"a tensor {list(value.shape)} that is used at {user_location()} was made where the capture does not look",
                "return it from the module that makes it, or make a module around both a unit (model.units)",
            )
        key = self._new_key("constant")
        self._bind(value, key)
        self._pure.add(key)
        with self.watch.paused():
            self.constants[key] = value.detach().clone()
        return key

    # -- events --------------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._inside_event:
            self._unit_has_asked |= getattr(func, "__name__", "") in _GIVE_ANSWERS
            if self.branches is not None:
                return self.branches.call(func, args, kwargs)
            return func(*args, **kwargs)
        func, args, kwargs = without_dtype_and_device_tensor(func, args, kwargs)
        if func is Tensor.__iter__:
            return iter(self.record(Tensor.unbind, (args[0], 0), {}, lambda: Tensor.unbind(args[0], 0)))
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], self._read_slices(args[1]), *args[2:])
        self._read_sizes(func, args)
        return self.record(func, args, kwargs, lambda: func(*args, **kwargs))

    def _read_slices(self, index: Any) -> Any:
        """An index with numbers in the place of tensors that are bounds of slices: reads of values, as `int()` is one."""
        if isinstance(index, tuple):
            return tuple(map(self._read_slices, index))
        if not isinstance(index, slice):
            return index

        def number(bound: Any) -> Any:
            return self.record(Tensor.__int__, (bound,), {}, lambda: int(bound)) if isinstance(bound, Tensor) else bound

        return slice(number(index.start), number(index.stop), number(index.step))

    def _read_sizes(self, func: Any, args: tuple[Any, ...]) -> None:
        """Read the values by which the batch decides the shape of a result, as Python code might: the lengths of sequences that
        are packed, the number of elements that a mask leaves."""
        if getattr(func, "__name__", "") == PACKING:
            self.record(Tensor.tolist, (args[1],), {}, args[1].tolist)
            self._sizes_are_read = True
        if func is Tensor.__getitem__ and self._keys.get(id(args[0])) not in self._pure:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for mask in index:
                if isinstance(mask, Tensor) and mask.dtype is torch.bool and self._keys.get(id(mask)) in self._pure:
                    count = self.record(torch.count_nonzero, (mask,), {}, mask.count_nonzero)
                    self.record(Tensor.item, (count,), {}, count.item)
                    self._sizes_are_read = True

    def call_unit(
        self, name: str, module: nn.Module, call: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> R:
        """Call a unit: an event, unless an event is running."""
        if self._inside_event or threading.get_ident() != self._thread:
            return call(module, *args, **kwargs)
        self._refuse_python_random()
        self._unit_calls += 1

        def run() -> R:
            self._unit_has_asked = False
            if self.branches is not None:
                self.branches.begin(name, (args, kwargs))
            before, parts = graph_nodes(flatten((args, kwargs))[0]), Counter[int]()
            with self.watch.limited(MOST_UNIT_SECONDS):
                try:
                    out = call(module, *args, **kwargs)
                except (RuntimeError, NotImplementedError, ValuesNeeded, TypeError, ValueError):
                    if self.branches is not None:
                        self.branches.leave_whole()
                    out = run_with_random_values(name, module, call, args, kwargs, parts)
                    self._on_random_numbers.parts += parts
                    self._on_random_numbers.arguments += tree_flatten((args, kwargs))[0]
                    self._unit_has_asked = True
                else:
                    parts = count_gradient_parts(flatten(out)[0], before)
                self._on_random_numbers.most_of_call |= parts
                if self.like is not None and torch.is_autocast_enabled("cpu") and is_fused_in_evaluation(module):
                    self._on_random_numbers.has_fused = True
                    out = with_dtypes_of_fused(name, module, call, args, kwargs, out)
            self._unit_has_asked |= self.watch.gave_dynamic_shape
            if self.branches is not None:
                self.branches.end(is_divisible=not self._unit_has_asked)
            self._refuse_numbers_of_values(name, module, out)
            return out

        try:
            return self.record(name, args, kwargs, run)
        finally:
            self._random_state = python_random_state()

    def record(self, call: Callable[..., R] | str, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[[], R]) -> R:
        """Run one event, whose result `run()` gives; returns that."""
        self._inside_event += 1
        self._event_number += 1
        self._refuse_own_seeds()
        self._refuse_contexts()
        try:
            return self._record(call, args, kwargs, run)
        finally:
            self._torch_random_state = torch.random.get_rng_state()
            self._inside_event -= 1

    def _record(self, call: Callable[..., R] | str, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[[], R]) -> R:
        flat, structure = flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        name = call if isinstance(call, str) else getattr(call, "__name__", str(call))
        asks = not isinstance(call, str) and (name in _GIVE_ANSWERS or (name == "__format__" and args[1:] not in ((), ("",))))
        if tensors and not isinstance(call, str) and name in _NEVER_REPLAYED and not _sets_plain_attribute(call):
            raise Refused(
                f"{_NEVER_REPLAYED[name]} between units, at {user_location()}, would be left out by workers",
                "do it inside a module, and make that a unit (model.units)",
            )
        if asks:
            self._refuse_unknown_answers(name, tensors)
        unit = call if isinstance(call, str) else None
        leaves = tuple(self._leaf(value, unit) for value in flat) if tensors or unit is not None else None
        described = None if leaves is None else tuple(map(self._describe, flat, leaves))  # before it writes into them
        versions = [tensor._version for tensor in tensors]
        self.watch.begin_event(self._event_number, call if isinstance(call, str) else None, tensors)
        out = self._run(run)
        unwritten = [tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version == version]
        out = self._separate_results(name, unwritten, out)
        if self.watch.gave_dynamic_shape and not isinstance(call, str):
            self._refuse_unread_sizes(tensors)
        self._sizes_are_read = False
        results = [out] if isinstance(out, Tensor) else flatten(out)[0]
        written = [
            tensor
            for index, (tensor, version) in enumerate(zip(tensors, versions, strict=True))
            if tensor._version != version or (index == 0 and unit is None and _changes_gradient_state(call))
        ]
        if not isinstance(call, str) and not written and not asks and not any(isinstance(each, Tensor) for each in results):
            return out  # a shape, a dtype: a property of tensors, not of their values
        if leaves is None:
            leaves = tuple(self._leaf(value) for value in flat)
        self._add_event(call, leaves, structure, out, results, written)
        if not self.events[-1].is_pure:
            self.call_log.append((name, self.events[-1].location, described or tuple(map(self._describe, flat, leaves))))
        elif "empty" in name:
            self._uninitialised |= {memory_of(value) for value in results if isinstance(value, Tensor)}
        if asks or (self.watch.gave_dynamic_shape and self.events[-1].is_pure):
            self.guards.append(Guard(len(self.events) - 1, comparable(out)))
        return out

    def _describe(self, value: Any, leaf: Any) -> Hashable | type:
        """An argument in the call log: its value, if it depends on the batch, buffers and constants alone."""
        if not isinstance(leaf, TensorKey):
            return comparable(value) if isinstance(value, _NUMBERS) else type(value)
        if leaf not in self._pure or isinstance(value, MemorylessTensor) or memory_of(value) in self._uninitialised:
            return tuple(value.shape), value.dtype
        with self.watch.paused():
            return tuple(value.shape), value.dtype, *map(_digest, _dense_parts(value.detach()))

    def _separate_results(self, name: str, unwritten: Sequence[Tensor], out: R) -> R:
        """The result; in evaluation mode with views in the place of arguments that training does not return as they were: of
        dropout. `unwritten`: the arguments that the call has not written."""
        units = self._unit_calls
        self._calls[units, name] += 1
        event: EventId = (units, name, self._calls[units, name])
        given = {id(tensor) for tensor in unwritten}
        if not any(isinstance(value, Tensor) and id(value) in given for value in tree_flatten(out)[0]):
            return out
        self.passed_through.add(event)
        if self.like is None or event in self.like.passed_through:
            return out
        changed: R = tree_map(
            lambda value: value.view_as(value) if isinstance(value, Tensor) and id(value) in given else value, out
        )
        return changed

    def _run(self, run: Callable[[], R]) -> R:
        """The event's result. Raises `Refused` where a function needs values that are not there."""
        try:
            return run()
        except ValuesNeeded as error:
            raise Refused(
                f"a shape, or what Python does next, depends on the values of an activation ({error}) at {user_location()}",
                next((cure for part, cure in _CURES_BY_OPERATION.items() if part in str(error)), _FIXED_SHAPES),
            ) from error

    def _add_event(
        self,
        call: Callable[..., Any] | str,
        leaves: tuple[Any, ...],
        structure: TreeSpec,
        out: Any,
        results: Sequence[ModelOutput],
        written: Sequence[Tensor],
    ) -> None:
        """Append the event that gave `results` and wrote into the tensors `written`."""
        inputs = [leaf for leaf in leaves if isinstance(leaf, TensorKey)]
        before = tuple(self._keys[id(tensor)] for tensor in written)
        rewrites = self._rewrite(written)
        outputs: list[TensorKey | None] = []
        for each in results:
            if isinstance(each, Tensor):
                self._bind(each, self._keys[id(each)] if id(each) in self._keys else self._new_key("value"))
            outputs.append(self._keys[id(each)] if isinstance(each, Tensor) else None)
        made = [*(key for key in outputs if key is not None), *(rewrite.after for rewrite in rewrites)]
        is_pure = (
            not isinstance(call, str)
            and not self.watch.drew_random_numbers
            and not any(self.facts[key].requires_grad for key in made)
            and all(key in self._pure for key in (*inputs, *(rewrite.before for rewrite in rewrites)))
            and not any(key.is_state for key in before)
        )
        if is_pure:
            self._pure |= set(made)
        autocast = cpu_autocast_setting()
        self.events.append(
            Event(
                call=call,
                leaves=leaves,
                structure=structure,
                outputs=tuple(outputs),
                returns_tensor=isinstance(out, Tensor),
                rewrites=rewrites,
                written=before,
                grad=torch.is_grad_enabled(),
                autocast=None if autocast == self._surrounding.autocast else autocast,
                is_pure=is_pure,
                location=user_location(),
                result_form=form_of(out) if isinstance(call, str) and self._unit_has_asked else None,
                home=self.running_module,
                draws=self.watch.drew_random_numbers,
            )
        )

    def _rewrite(self, written: Sequence[Tensor]) -> tuple[Rewrite, ...]:
        """Give every known tensor that shares memory with a written one a new version."""
        found: dict[TensorKey, Rewrite] = {}
        for tensor in written:
            for each in self._by_memory.get(memory_of(tensor), [tensor]):
                key = self._keys[id(each)]
                self._versions[id(each)] = each._version
                if key.is_state or any(rewrite.after == key for rewrite in found.values()):
                    continue
                after = self._new_key("value")
                found[key] = Rewrite(key, after)
                self._bind(each, after)
        return tuple(found.values())

    @property
    def is_between_units(self) -> bool:
        """Whether code between units runs, in the thread that traces."""
        return not self._inside_event and threading.get_ident() == self._thread

    def note_attribute_write(self, module: nn.Module, key: str, value: Any) -> None:
        """An attribute of a module is about to be set."""
        if threading.get_ident() == self._thread:
            self.attributes.note_write(module, key, value, self._event_number if self._inside_event else None)

    def check_attribute_read(self, module: nn.Module, key: str) -> None:
        """Raises `Refused` for an attribute of a module in a unit that another event has set."""
        if threading.get_ident() == self._thread:
            self.attributes.check_read(module, key, self._event_number if self._inside_event else None)

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _refuse_unknown_answers(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Raises `Refused` if Python code looks at what does not depend on the batch alone."""
        for tensor in tensors:
            key = self._keys.get(id(tensor))
            if key is None:
                key = self._constant(tensor)
            if key in self._pure:
                continue
            skips = settings_to_be_zero(self.model, SKIPS_LAYERS)
            raise Refused(
                "the forward decides by the values of an activation, a parameter or a random number: "
                f"{name}() of a tensor {list(tensor.shape)} at {user_location()}",
                "decide inside of a module, and make that a unit (model.units)"
                + (f"; what skips layers at random ({skips}) must be set to 0" if skips else ""),
            )

    def _refuse_unread_sizes(self, tensors: Sequence[Tensor]) -> None:
        """Raises `Refused` for a result whose shape depends on values, unless the batch decides it and they have been read."""
        if not self._sizes_are_read and not all(self._keys[id(tensor)] in self._pure for tensor in tensors):
            raise Refused(f"a shape depends on the values of an activation at {user_location()}", _FIXED_SHAPES)

    def _refuse_numbers_of_values(self, name: str, module: nn.Module, out: Any) -> None:
        """Raises `Refused` if a unit that has read values returns a number: code after it would always get this one."""
        numbers = [value for value in tree_flatten(out)[0] if isinstance(value, (int, float, complex, str, numpy.generic))]
        if numbers and (self._unit_has_asked or python_random_state() != self._random_state):
            refused = Refused(
                f"unit {name} ({type(module).__name__}), called at {user_location()}, reads values or draws "
                f"random numbers, and returns {numbers[0]!r}: "
                "in a record it would stay as it is now",
                "return it as a tensor, or make a module around all that uses it a unit (model.units)",
            )
            refused.unit_without_parameters = "" if any(True for _ in module.parameters()) else name
            raise refused

    def _refuse_python_random(self) -> None:
        """Raises `Refused` if code between units has drawn from Python's or numpy's generators."""
        if python_random_state() != self._random_state:
            settings = [found for names in (SKIPS_LAYERS, DRAWS_MASKS) if (found := settings_to_be_zero(self.model, names))]
            raise Refused(
                f"the forward draws from Python's random or numpy's between units, before {user_location()}: layers would be "
                "left out, or numbers be other ones, on every worker",
                (f"set what does so to 0 ({', '.join(settings)}); or " if settings else "")
                + "draw with torch, and decide by it inside of a module that is a unit (model.units)",
            )

    def _refuse_own_seeds(self) -> None:
        """Raises `Refused` if code between units has set PyTorch's generator: a replay would not."""
        if not torch.equal(torch.random.get_rng_state(), self._torch_random_state):
            raise Refused(
                f"the forward seeds PyTorch's generator between units, before {user_location()} (torch.manual_seed, "
                "set_rng_state), and workers would not",
                "leave it out: raypar seeds every layer of every microbatch; or do it inside of a module, and make that a unit "
                "(model.units)",
            )

    def _refuse_contexts(self) -> None:
        """Raises `Refused` if code between units has changed a setting, in a context say: a replay would not."""
        now = settings_of_contexts()
        changed = [name for name, value in now.items() if value != self._surrounding.others[name]]
        if changed:
            raise Refused(
                f"the forward changes {changed[0]} between units, before {user_location()}, and workers would not",
                "do it inside of a module, and make that a unit (model.units); or in the model function, for the whole run",
            )

    def note_inner_call(self, module: nn.Module) -> None:
        """Raises `InnerModuleUsed` for a module inside of a unit that code between units calls."""
        path = self.paths.get(id(module))
        if self.branches is not None and self._inside_event and threading.get_ident() == self._thread:
            self.branches.begin_module(module)
        if self._inside_event or threading.get_ident() != self._thread or path is None or path in self.units:
            return
        if any(path.startswith(unit + ".") for unit in self.units):
            raise InnerModuleUsed(path)
        self._running.append(path)

    @property
    def running_module(self) -> str:
        """Qualified name of the innermost module whose own code runs between units; empty for the model."""
        return self._running[-1] if self._running else ""

    def note_inner_result(self, module: nn.Module, out: ModelOutput) -> None:
        """Keep what a module inside of a unit returns, in case that code between units reads it."""
        path = self.paths.get(id(module))
        if self.is_between_units and self._running and path == self._running[-1]:
            self._running.pop()
        if self.branches is not None and self._inside_event and threading.get_ident() == self._thread:
            self.branches.end_module(module)
        if not self._inside_event or threading.get_ident() != self._thread or path is None or path in self.units:
            return
        for value in tree_flatten(out)[0]:
            if isinstance(value, Tensor):
                self.made_inside.setdefault(id(value), (path, value))

    def _hidden_tensors(self, value: Any) -> Refused:
        """The error for an argument that may contain tensors."""
        kind = type(value).__name__
        cure = (
            "pass tensors, numbers, and tuples, lists and dicts of them; or make the module that calls both a unit "
            "(model.units)"
        )
        if "Cache" in kind:
            cure = cure_for_cache(self.model)
        elif isinstance(value, nn.Module) or callable(value):
            cure = "for checkpointing use use_reentrant=False; or make the module around it a unit (model.units)"
        return Refused(f"{with_article(kind)} is passed between units at {user_location()}; it may hide tensors", cure)

    def finish(self, out: Any) -> Trace:
        """The trace of a forward that returned `out`."""
        self._inside_event += 1
        self._refuse_python_random()
        leaves, structure = flatten(out)
        hidden = next((value for value in leaves if not isinstance(value, Tensor) and may_hide_tensors(value)), None)
        if hidden is not None:
            cure = (
                "return tensors, or tuples, lists, dicts and dataclasses of them (a ModelOutput of transformers, a registered "
                "pytree)"
            )
            raise Refused(
                f"the model returns {with_article(type(hidden).__name__)}, into which PyTorch does not look",
                cure_for_cache(self.model) if "Cache" in type(hidden).__name__ else cure,
            )
        kept = tuple(self._leaf(value) for value in leaves)
        described = tuple(self._describe(value, leaf) for value, leaf in zip(leaves, kept, strict=True))
        return Trace(
            events=tuple(self.events),
            guards=tuple(self.guards),
            output_leaves=kept,
            output_structure=structure,
            constants=self.constants,
            facts=self.facts,
            passed_through=frozenset(self.passed_through),
            call_log=(*self.call_log, ("return", "its end", described)),
            gradient_parts=self._on_random_numbers.gradient_parts(self.model, leaves),
            most_parts_of_call=self._on_random_numbers.most_parts_of_call(self.model),
            has_fused_units=self._on_random_numbers.has_fused,
            branches=self.branches.found if self.branches is not None else {},
            branching=frozenset()
            if self.branches is None
            else modules_with_branches(self.events, self.model, self.branches.work),
        )


_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Layout -> the methods that give the dense tensors of which a sparse tensor consists."""


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """The tensor if it is dense, the dense tensors inside it if it is sparse; none for other layouts (nested, MKL-DNN)."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return [tensor]
    return [getattr(tensor, name)() for name in _SPARSE_PARTS.get(tensor.layout, ())]


def _digest(tensor: Tensor) -> bytes:
    """A digest of a dense tensor's values."""
    # `contiguous()` leaves the strides of a single element as they are, and `view(dtype)` may refuse these.
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    content: Any = flat.view(torch.uint8).numpy()
    return hashlib.blake2b(content).digest()


def _changes_gradient_state(call: Any) -> bool:
    """Whether a call changes whether its first argument has a gradient: `x.requires_grad = True` as well."""
    return getattr(call, "__name__", "") in _CHANGE_GRADIENT_STATE or _sets_plain_attribute(call)


def _sets_plain_attribute(call: Any) -> bool:
    """Whether a call of `__set__` sets `requires_grad`, which every tensor keeps by itself."""
    return getattr(call, "__self__", None) is Tensor.requires_grad
