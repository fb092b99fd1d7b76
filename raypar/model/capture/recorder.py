"""Runs a model's forward once and records it: unit calls, and the calls of PyTorch's functions between them.

During a trace parameters have no values; batch fields and buffers do. Tensors that depend only on these two are therefore
computed, and Python code may read their values; every such read is recorded as a guard. Reading the values of any other tensor
is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from raypar.errors import with_article
from raypar.model.capture.absent_tensor import AbsentTensor, ValuesNeeded, has_dynamic_shape, memory_of
from raypar.model.capture.may_hide_tensors import may_hide_tensors
from raypar.model.capture.refusal import InnerModuleUsed, Refused, users_place
from raypar.model.capture.run_unit_on_random_values import run_with_random_values
from raypar.model.capture.trace import (
    AutocastState,
    Event,
    EventId,
    Guard,
    Rewrite,
    TensorFacts,
    TensorKey,
    TensorKind,
    Trace,
    comparable,
)
from raypar.model.without_dynamo import without_dynamo

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


class Recorder(TorchFunctionMode):
    """Records the calls that are made while it is entered. `record_forward` is the way to use it."""

    def __init__(
        self, model: nn.Module, units: Mapping[str, nn.Module], fields: Mapping[str, Tensor], like: Trace | None = None
    ) -> None:
        super().__init__()
        self.like = like
        """The training trace, if this trace is in evaluation mode. A call that returned a new tensor there but returns its own
        argument here (dropout) gets a view, so that both traces have the same values."""
        self.passed_through: set[EventId] = set()
        """Events that have returned one of their arguments."""
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
        self.story: list[tuple[Any, ...]] = []
        """(call, place, what its arguments are) of every event that is not pure: equal for two traces of one batch, unless the
        forward depends on something that it has left behind."""
        self._uninitialised: set[int] = set()
        """`memory_of` of tensors whose values nothing has set (torch.empty)."""
        self._inside_event = 0
        """Above 0 while an event runs: what it calls is part of it."""
        self._thread = threading.get_ident()
        """The thread that traces."""
        self._keys: dict[int, TensorKey] = {}
        """`id` of a tensor -> its present version."""
        self._alive: list[Tensor] = []
        """All known tensors, kept so that no `id` is used twice."""
        self._by_memory: dict[int, list[Tensor]] = {}
        """`memory_of` -> known tensors in it."""
        self._pure: set[TensorKey] = set()
        """Tensors that depend on batch fields, buffers and constants alone."""
        self._watch = _OperationWatch({memory_of(p): name for name, p in model.named_parameters()})
        """Notices random operations, shapes that depend on values, and writes into parameters."""
        self._unit_calls = 0
        """Number of unit calls so far."""
        self._unit_has_asked = False
        """Whether Python code inside of the unit that runs has read values."""
        self._set_by_units: dict[int, dict[str, str]] = {}
        """`id` of a unit -> {attribute that its call has set to another number or text: name of the unit}."""
        self._calls: Counter[tuple[int, str]] = Counter()
        """(number of unit calls before, function) -> number of its calls."""
        self._numbers = 0
        """Number of values and constants so far."""
        self._random_state = _python_random_state()
        """Python's and numpy's generators when code between units began to run."""
        self._torch_random_state = torch.random.get_rng_state()
        """PyTorch's generator after the last event."""
        self._ambient_autocast = _autocast_state()
        """Autocast as it is around the model."""
        self._ambient_settings = _settings_of_contexts()
        """Other settings that contexts change, as they are around the model."""
        for name, parameter in model.named_parameters():
            self._bind(parameter, TensorKey("parameter", name))
        for name, buffer in model.named_buffers():
            self._bind(buffer, TensorKey("buffer", name))
        for name, value in fields.items():
            self._bind(value, TensorKey("field", name))
        self._pure |= {key for key in self._keys.values() if key.kind != "parameter"}

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _new_key(self, kind: TensorKind) -> TensorKey:
        self._numbers += 1
        return TensorKey(kind, str(self._numbers))

    def _bind(self, tensor: Tensor, key: TensorKey) -> None:
        """Know a tensor under a key from now on."""
        if id(tensor) not in self._keys:
            self._alive.append(tensor)
            self._by_memory.setdefault(memory_of(tensor), []).append(tensor)
        self._keys[id(tensor)] = key
        self._note(tensor, key)

    def _note(self, tensor: Tensor, key: TensorKey) -> None:
        self.facts[key] = TensorFacts(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, memory_of(tensor))

    def _leaf(self, value: Any) -> Any:
        """An argument as an event keeps it."""
        if not isinstance(value, Tensor):
            if may_hide_tensors(value):
                raise _hidden_tensors(value)
            return value
        key = self._keys.get(id(value))
        if key is None:
            return self._constant(value)
        if self.facts[key].requires_grad != value.requires_grad:
            raise Refused(
                f"a tensor {list(value.shape)} has got its gradient where the capture does not look, and is used at "
                f"{users_place()}",
                "call custom autograd functions as Function.apply(...) there, not through a name bound before; "
                "or make the module that does it a unit (model.units)",
            )
        return key

    def _constant(self, value: Tensor) -> TensorKey:
        """The key of a tensor that nothing recorded has made. Raises for one that depends on the forward."""
        if id(value) in self.made_inside:
            raise InnerModuleUsed(self.made_inside[id(value)][0])
        hidden = isinstance(value, AbsentTensor) or value.is_meta or value.requires_grad or _is_wrapped_by_functorch(value)
        if hidden or self._watch.has_made(value):
            raise Refused(
                f"a tensor {list(value.shape)} that is used at {users_place()} was made where the capture does not look",
                "return it from the module that makes it, or make a module around both a unit (model.units)",
            )
        key = self._new_key("constant")
        self._bind(value, key)
        self._pure.add(key)
        with self._watch.paused():
            self.constants[key] = value.detach().clone()
        return key

    # -- events --------------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._inside_event:
            self._unit_has_asked |= getattr(func, "__name__", "") in _GIVE_ANSWERS
            return func(*args, **kwargs)
        if func is Tensor.__iter__:
            return iter(self.record(Tensor.unbind, (args[0], 0), {}, lambda: Tensor.unbind(args[0], 0)))
        return self.record(func, args, kwargs, lambda: func(*args, **kwargs))

    def call_unit(self, name: str, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit: an event, unless an event is running."""
        if self._inside_event or threading.get_ident() != self._thread:
            return call(module, *args, **kwargs)
        self._refuse_python_random()
        self._unit_calls += 1
        before = _plain_attributes(module)

        def run() -> Any:
            self._unit_has_asked = False
            try:
                out = call(module, *args, **kwargs)
            except (RuntimeError, NotImplementedError, ValuesNeeded, TypeError, ValueError):
                out = run_with_random_values(name, module, call, args, kwargs)
            self._refuse_numbers_of_values(name, module, out)
            changed = {key for key, value in _plain_attributes(module).items() if before.get(key, value) != value}
            self._set_by_units.setdefault(id(module), {}).update(dict.fromkeys(changed, name))
            return out

        try:
            return self.record(name, args, kwargs, run)
        finally:
            self._random_state = _python_random_state()

    def record(self, call: Callable[..., Any] | str, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run one event, whose result `run()` gives; returns that."""
        self._inside_event += 1
        self._refuse_own_seeds()
        self._refuse_contexts()
        try:
            return self._record(call, args, kwargs, run)
        finally:
            self._torch_random_state = torch.random.get_rng_state()
            self._inside_event -= 1

    def _record(self, call: Callable[..., Any] | str, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        flat, structure = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        name = call if isinstance(call, str) else getattr(call, "__name__", str(call))
        asks = not isinstance(call, str) and (name in _GIVE_ANSWERS or (name == "__format__" and args[1:] not in ((), ("",))))
        if tensors and not isinstance(call, str) and name in _NEVER_REPLAYED and not _sets_plain_attribute(call):
            raise Refused(
                f"{_NEVER_REPLAYED[name]} between units, at {users_place()}, would be left out by workers",
                "do it inside a module, and make that a unit (model.units)",
            )
        if asks:
            self._refuse_unknown_answers(name, tensors)
        leaves = tuple(self._leaf(value) for value in flat) if tensors or isinstance(call, str) else None
        described = None if leaves is None else tuple(map(self._describe, flat, leaves))  # before it writes into them
        versions = [tensor._version for tensor in tensors]
        out = self._separate_results(name, tensors, self._run(call, run))
        results = [out] if isinstance(out, Tensor) else tree_flatten(out)[0]
        written = [
            tensor
            for place, (tensor, version) in enumerate(zip(tensors, versions, strict=True))
            if tensor._version != version or (place == 0 and name in _CHANGE_GRADIENT_STATE and not isinstance(call, str))
        ]
        if not isinstance(call, str) and not written and not asks and not any(isinstance(each, Tensor) for each in results):
            return out  # a shape, a dtype: a property of tensors, not of their values
        if leaves is None:
            leaves = tuple(self._leaf(value) for value in flat)
        self._add_event(call, leaves, structure, out, results, written)
        if not self.events[-1].is_pure:
            self.story.append((name, self.events[-1].place, described or tuple(map(self._describe, flat, leaves))))
        elif "empty" in name:
            self._uninitialised |= {memory_of(value) for value in results if isinstance(value, Tensor)}
        if asks or (self._watch.gave_dynamic_shape and self.events[-1].is_pure):
            self.guards.append(Guard(len(self.events) - 1, comparable(out)))
        return out

    def _describe(self, value: Any, leaf: Any) -> Any:
        """An argument in the story: its value, if it depends on the batch, buffers and constants alone."""
        if not isinstance(leaf, TensorKey):
            return value if isinstance(value, _NUMBERS) else type(value)
        if leaf not in self._pure or isinstance(value, AbsentTensor) or memory_of(value) in self._uninitialised:
            return tuple(value.shape), value.dtype
        # Of one element `contiguous()` keeps any stride, with which `view` does not take another dtype.
        with self._watch.paused():
            bits = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
        return tuple(value.shape), value.dtype, hashlib.blake2b(bits).digest()

    def _separate_results(self, name: str, tensors: Sequence[Tensor], out: Any) -> Any:
        """The result; in evaluation mode with views in the place of arguments that are not returned in training (dropout)."""
        units = self._unit_calls
        self._calls[units, name] += 1
        event: EventId = (units, name, self._calls[units, name])
        given = {id(tensor) for tensor in tensors}
        if not any(isinstance(value, Tensor) and id(value) in given for value in tree_flatten(out)[0]):
            return out
        self.passed_through.add(event)
        if self.like is None or event in self.like.passed_through:
            return out
        return tree_map(lambda value: value.view_as(value) if isinstance(value, Tensor) and id(value) in given else value, out)

    def _run(self, call: Callable[..., Any] | str, run: Callable[[], Any]) -> Any:
        """The event's result. Raises `Refused` where a function needs values that are not there."""
        self._watch.reset()
        try:
            return run()
        except ValuesNeeded as error:
            raise Refused(
                f"a shape, or what Python does next, depends on the values of an activation ({error}) at {users_place()}",
                "compute it inside a module that returns tensors of fixed shapes, and make that a unit (model.units); "
                "use torch.where in place of boolean indices",
            ) from error

    def _add_event(
        self, call: Callable[..., Any] | str, leaves: tuple[Any, ...], structure: Any, out: Any, results: Any, written: Any
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
            and not self._watch.drew_random_numbers
            and not any(self.facts[key].requires_grad for key in made)
            and all(key in self._pure for key in (*inputs, *(rewrite.before for rewrite in rewrites)))
            and not any(key.is_state for key in before)
        )
        if is_pure:
            self._pure |= set(made)
        autocast = _autocast_state()
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
                autocast=None if autocast == self._ambient_autocast else autocast,
                is_pure=is_pure,
                place=users_place(),
            )
        )

    def _rewrite(self, written: Sequence[Tensor]) -> tuple[Rewrite, ...]:
        """Give every known tensor that shares memory with a written one a new version."""
        found: dict[TensorKey, Rewrite] = {}
        for tensor in written:
            for each in self._by_memory.get(memory_of(tensor), [tensor]):
                key = self._keys[id(each)]
                if key.is_state or any(rewrite.after == key for rewrite in found.values()):
                    continue
                after = self._new_key("value")
                found[key] = Rewrite(key, after)
                self._bind(each, after)
        return tuple(found.values())

    def refuse_set_attribute(self, module: nn.Module, key: str) -> None:
        """Raises `Refused` where code between units reads an attribute that the call of a unit has set to another value."""
        unit = self._set_by_units.get(id(module), {}).get(key)
        if unit is not None and not self._inside_event and threading.get_ident() == self._thread:
            raise Refused(
                f"code between units reads the attribute {key!r} of {unit} ({type(module).__name__}) at {users_place()}, which "
                "the module's own call has set: in a record it would stay as it is now",
                "return a tensor from the module, or make a module around both a unit (model.units)",
            )

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _refuse_unknown_answers(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Raises `Refused` if Python code looks at what does not depend on the batch alone."""
        for tensor in tensors:
            key = self._keys.get(id(tensor))
            if key is None:
                key = self._constant(tensor)
            if key in self._pure:
                continue
            raise Refused(
                "the forward decides by the values of an activation, a parameter or a random number: "
                f"{name}() of a tensor {list(tensor.shape)} at {users_place()}",
                "decide inside of a module, and make that a unit (model.units); what skips layers at random (layerdrop) "
                "must be set to 0",
            )

    def _refuse_numbers_of_values(self, name: str, module: nn.Module, out: Any) -> None:
        """Raises `Refused` if a unit that has read values returns a number: code after it would always get this one."""
        numbers = [value for value in tree_flatten(out)[0] if isinstance(value, (int, float, complex, str, numpy.generic))]
        if numbers and self._unit_has_asked:
            raise Refused(
                f"unit {name} ({type(module).__name__}), called at {users_place()}, reads values and returns {numbers[0]!r}: "
                "in a record it would stay as it is now",
                "return it as a tensor, or make a module around all that uses it a unit (model.units)",
            )

    def _refuse_python_random(self) -> None:
        """Raises `Refused` if code between units has drawn from Python's or numpy's generators."""
        if _python_random_state() != self._random_state:
            raise Refused(
                f"the forward draws from Python's random or numpy's between units, before {users_place()}: layers would be "
                "left out, or numbers be other ones, on every worker",
                "set what does so to 0 (layerdrop), or draw with torch",
            )

    def _refuse_own_seeds(self) -> None:
        """Raises `Refused` if code between units has set PyTorch's generator: a replay would not."""
        if not torch.equal(torch.random.get_rng_state(), self._torch_random_state):
            raise Refused(
                f"the forward seeds PyTorch's generator between units, before {users_place()} (torch.manual_seed, "
                "set_rng_state), and workers would not",
                "leave it out: raypar seeds every layer of every microbatch; or do it inside of a module, and make that a unit "
                "(model.units)",
            )

    def _refuse_contexts(self) -> None:
        """Raises `Refused` if code between units has changed a setting, in a context say: a replay would not."""
        now = _settings_of_contexts()
        changed = [name for name, value in now.items() if value != self._ambient_settings[name]]
        if changed:
            raise Refused(
                f"the forward changes {changed[0]} between units, before {users_place()}, and workers would not",
                "do it inside of a module, and make that a unit (model.units); or in the model function, for the whole run",
            )

    def note_inner_call(self, module: nn.Module) -> None:
        """Raises `InnerModuleUsed` for a module inside of a unit that code between units calls."""
        path = self.paths.get(id(module))
        if self._inside_event or threading.get_ident() != self._thread or path is None or path in self.units:
            return
        if any(path.startswith(unit + ".") for unit in self.units):
            raise InnerModuleUsed(path)

    def note_inner_result(self, module: nn.Module, out: Any) -> None:
        """Keep what a module inside of a unit returns, in case that code between units reads it."""
        path = self.paths.get(id(module))
        if not self._inside_event or threading.get_ident() != self._thread or path is None or path in self.units:
            return
        for value in tree_flatten(out)[0]:
            if isinstance(value, Tensor):
                self.made_inside.setdefault(id(value), (path, value))

    def finish(self, out: Any) -> Trace:
        """The trace of a forward that returned `out`."""
        self._inside_event += 1
        self._refuse_python_random()
        leaves, structure = tree_flatten(out)
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
            story=(*self.story, ("return", "its end", described)),
        )


@without_dynamo
class _OperationWatch(TorchDispatchMode):
    """Notices operations that draw random numbers, those whose shape depends on values, and which memory they make.

    Refuses those that write into parameters."""

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self.parameters = parameters
        """`memory_of` -> name of each parameter."""
        self._made: dict[int, Tensor] = {}
        """`memory_of` -> a real tensor that an operation has made; kept, so that no number is used twice."""
        self._is_paused = False
        """Whether it notices nothing, because the operations are the recorder's own."""
        self.reset()

    def reset(self) -> None:
        """Forget what was noticed."""
        self.drew_random_numbers = False
        self.gave_dynamic_shape = False

    def has_made(self, tensor: Tensor) -> bool:
        """Whether an operation of this forward has made the memory of a tensor."""
        return memory_of(tensor) in self._made

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context of the recorder's own operations."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        self.drew_random_numbers |= torch.Tag.nondeterministic_seeded in func.tags
        self.gave_dynamic_shape |= has_dynamic_shape(func, args)
        if func._schema.is_mutable:
            self._refuse_parameter_writes(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        given = {memory_of(value) for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)}
        for made in tree_flatten(out)[0]:
            is_real = isinstance(made, Tensor) and not isinstance(made, AbsentTensor) and not made.is_meta
            if is_real and memory_of(made) not in given:  # neither a view, nor written in place
                self._made.setdefault(memory_of(made), made)
        return out

    def _refuse_parameter_writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises `Refused` if an operation writes into a parameter."""
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            name = self.parameters.get(memory_of(value)) if is_written and isinstance(value, Tensor) else None
            if name is not None:
                raise Refused(
                    f"the forward writes into parameter {name} at {users_place()}: each microbatch would change it, on its own "
                    "replica only",
                    "use the operation that returns a new tensor (weight * mask), or change parameters in the optimizer",
                )


_ONE_RECORDING = threading.RLock()
"""Held while classes are changed."""


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Context in which the recorder sees every call: of units, of functions, and of custom autograd functions.

    Classes of PyTorch and of units are changed meanwhile, so there is one recording in a process at a time.
    """
    with _ONE_RECORDING, contextlib.ExitStack() as stack:
        _change_classes(recorder, stack)
        with recorder, recorder._watch:
            yield


def _change_classes(recorder: Recorder, stack: contextlib.ExitStack) -> None:
    """Let the recorder see calls that no function mode sees, until the stack ends."""
    apply = torch.autograd.Function.__dict__["apply"]

    def recorded_apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        original = apply.__get__(None, kind)
        if recorder._inside_event or threading.get_ident() != recorder._thread:
            return original(*args, **kwargs)
        return recorder.record(original, args, kwargs, lambda: original(*args, **kwargs))

    def entered(context: torch.autocast) -> Any:
        if context.device != "cpu" and not recorder._inside_event and threading.get_ident() == recorder._thread:
            raise Refused(
                f"the forward enters torch.autocast({context.device!r}) between units at {users_place()}, which a record that "
                "is made on a CPU does not keep",
                "name the device of a tensor: torch.autocast(x.device.type, ...); or set precision: {compute: bf16} in the job",
            )
        return enter(context)

    def called_script(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder._inside_event and threading.get_ident() == recorder._thread:
            raise Refused(
                f"the TorchScript function {function.name!r} is called between units at {users_place()}, and a record does not "
                "see what it does",
                "call the Python function; or call it inside of a module, and make that a unit (model.units)",
            )
        return call_script(function, *args, **kwargs)

    enter, call_script = torch.autocast.__enter__, torch.jit.ScriptFunction.__call__
    hooks = [
        nn.modules.module.register_module_forward_pre_hook(lambda module, args: recorder.note_inner_call(module)),
        nn.modules.module.register_module_forward_hook(lambda module, args, out: recorder.note_inner_result(module, out)),
    ]
    changes: list[tuple[type, str, Any]] = [
        (torch.autograd.Function, "apply", classmethod(recorded_apply)),
        (torch.autocast, "__enter__", entered),
        (torch.jit.ScriptFunction, "__call__", called_script),
        *_changes_of_modules(recorder),
    ]
    for hook in hooks:
        stack.callback(hook.remove)
    for owner, name, value in changes:
        _change_class(stack, owner, name, value)


def _change_class(stack: contextlib.ExitStack, owner: type, name: str, value: Any) -> None:
    """Set an attribute of a class until the stack ends."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _changes_of_modules(recorder: Recorder) -> list[tuple[type, str, Any]]:
    """(class, attribute, value): the outermost `__call__` of a unit, checkpointing included, is an event, and reads of what it
    sets are seen. The units keep their classes, by which users' code may tell them apart."""
    names = {id(unit): name for name, unit in recorder.units.items()}
    owners = {owner for unit in recorder.units.values() for owner in type(unit).__mro__ if "__call__" in vars(owner)}

    def recorded_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(self))
            return original(self, *args, **kwargs) if name is None else recorder.call_unit(name, self, original, args, kwargs)

        return call

    def getattribute(self: nn.Module, key: str) -> Any:
        if id(self) in names:
            recorder.refuse_set_attribute(self, key)
        return object.__getattribute__(self, key)

    calls: list[tuple[type, str, Any]] = [(owner, "__call__", recorded_call(vars(owner)["__call__"])) for owner in owners]
    return [*calls, (nn.Module, "__getattribute__", getattribute)]


def record_forward(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    fields: Mapping[str, Tensor],
    call: Callable[[Mapping[str, Tensor]], Any],
    like: Trace | None = None,
) -> Trace:
    """The trace of `call(fields)`, which calls the model. The caller restores buffers and generators.

    `like`: a trace in training mode, if the model is in evaluation mode now.

    Raises `Refused` for what cannot be captured, `InnerModuleUsed` where the units must be finer.
    """
    given = {name: value.clone() for name, value in fields.items()}  # the forward may write into them
    recorder = Recorder(model, units, given, like)
    with recording(recorder):
        out = call(given)
    return recorder.finish(out)


def _autocast_state() -> AutocastState:
    return AutocastState(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))


def _settings_of_contexts() -> dict[str, Any]:
    """What contexts and functions other than `no_grad` and the CPU's autocast change -> its value."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    # Those of checkpoint() and save_on_cpu() change no number; a record leaves them out, and plan.recompute saves the memory.
    changes_no_number = hooks is None or getattr(hooks[0], "__module__", "").startswith(("torch.", "raypar."))
    return {
        "autocast of GPUs": torch.is_autocast_enabled("cuda"),
        "the attention kernels that may be used (sdpa_kernel)": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
        "hooks on what autograd saves (saved_tensors_hooks)": None if changes_no_number else tuple(map(id, hooks)),
        "inference mode": torch.is_inference_mode_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "which algorithms are allowed (use_deterministic_algorithms)": torch.are_deterministic_algorithms_enabled(),
        "the precision of float32 products (set_float32_matmul_precision)": torch.get_float32_matmul_precision(),
        "whether oneDNN is used (torch.backends.mkldnn.flags)": torch._C._get_mkldnn_enabled(),
        "the number of threads (set_num_threads)": torch.get_num_threads(),
    }


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers or texts."""
    return {key: value for key, value in vars(module).items() if isinstance(value, (int, float, str))}


def _python_random_state() -> tuple[Any, ...]:
    """The state of Python's and numpy's generators, to be compared."""
    state: Any = numpy.random.get_state()
    kind, keys, *rest = state
    return random.getstate(), kind, keys.tobytes(), tuple(rest)


def _is_wrapped_by_functorch(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _sets_plain_attribute(call: Any) -> bool:
    """Whether a call of `__set__` sets `requires_grad`, which every tensor keeps by itself."""
    return getattr(call, "__self__", None) is Tensor.requires_grad


def _hidden_tensors(value: Any) -> Refused:
    """The error for an argument that may contain tensors."""
    kind = type(value).__name__
    cure = "pass tensors, numbers, and tuples, lists and dicts of them; or make the module that calls both a unit (model.units)"
    if "Cache" in kind:
        cure = "set use_cache=False in the model's config"
    elif isinstance(value, (nn.Module,)) or callable(value):
        cure = "for checkpointing use use_reentrant=False; or make the module around it a unit (model.units)"
    return Refused(f"{with_article(kind)} is passed between units at {users_place()}; it may hide tensors", cure)
