"""Records one forward. Classes of PyTorch and of units are changed meanwhile, so that the recorder sees what no function mode
sees."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from raypar.model.capture.recorder import Recorder
from raypar.model.capture.refusal import Refused, user_location
from raypar.model.capture.tensors_in_values import MappedCall, may_hide_tensors
from raypar.model.capture.trace_data import Trace
from raypar.torch_compat.autograd import custom_function_apply, settings_without_distribution_checks, vmap_implementation

P = ParamSpec("P")
R = TypeVar("R")

_VMAP_OPTIONS = 4
"""Number of options of `vmap_impl` before the mapped arguments: in_dims, out_dims, randomness, chunk_size."""
_ONE_RECORDING = threading.RLock()
"""Held while classes are changed."""


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Context in which the recorder sees every call: of units, of functions, and of custom autograd functions.

    Classes of PyTorch and of units are changed meanwhile, so there is one recording in a process at a time.
    """
    with _ONE_RECORDING, contextlib.ExitStack() as stack:
        _change_classes(recorder, stack)
        with recorder, recorder.watch:
            yield


def _change_classes(recorder: Recorder, stack: contextlib.ExitStack) -> None:
    """Let the recorder see calls that no function mode sees, until the stack ends."""
    # `Function.apply` calls that of its base, also where a name was bound to it before: `reverse = Reverse.apply`.
    base, apply = custom_function_apply()

    def recorded_apply(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        original = apply.__get__(None, kind)
        if not recorder.is_between_units:
            return original(*args, **kwargs)
        return recorder.record(original, args, kwargs, lambda: original(*args, **kwargs))

    def entered(context: torch.autocast) -> Any:
        if context.device != "cpu" and recorder.is_between_units:
            raise Refused(
                f"the forward enters torch.autocast({context.device!r}) between units at {user_location()}, which a record "
                "that is made on a CPU does not keep",
                "name the device of a tensor: torch.autocast(x.device.type, ...); or set precision: {compute: bf16} in the job",
            )
        return enter(context)  # type: ignore[no-untyped-call]

    def called_script(function: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_between_units:
            raise Refused(
                f"the TorchScript function {function.name!r} is called between units at {user_location()}, and a record does "
                "not see what it does",
                "call the Python function; or call it inside of a module, and make that a unit (model.units)",
            )
        return call_script(function, *args, **kwargs)

    enter, call_script = torch.autocast.__enter__, torch.jit.ScriptFunction.__call__
    hooks = [
        nn.modules.module.register_module_forward_pre_hook(lambda module, args: recorder.note_inner_call(module)),
        nn.modules.module.register_module_forward_hook(
            lambda module, args, out: recorder.note_inner_result(module, out), always_call=True
        ),
    ]
    changes: list[tuple[type | ModuleType, str, Any]] = [
        *_change_of_vmap(recorder),
        (base, "apply", classmethod(recorded_apply)),
        (torch.autocast, "__enter__", entered),
        (torch.jit.ScriptFunction, "__call__", called_script),
        *settings_without_distribution_checks(),  # to validate reads values, and changes none
        *_changes_of_modules(recorder),
    ]
    for hook in hooks:
        stack.callback(hook.remove)
    for owner, name, value in changes:
        _change_class(stack, owner, name, value)


def _change_of_vmap(recorder: Recorder) -> list[tuple[type | ModuleType, str, Any]]:
    """The changes for `_change_class` with which a call of `torch.vmap` between units is recorded as one event."""
    mapping = vmap_implementation()
    if mapping is None:
        return []
    owner, call_mapped = mapping

    def mapped(function: Callable[..., Any], *given: Any, **kwargs: Any) -> Any:
        options, args = given[:_VMAP_OPTIONS], given[_VMAP_OPTIONS:]
        if not recorder.is_between_units:
            return call_mapped(function, *given, **kwargs)
        call = MappedCall(call_mapped, function, options)
        if may_hide_tensors(call.function):
            raise Refused(
                f"torch.vmap is called between units at {user_location()} with a function that holds a module, or another "
                "object that may contain tensors",
                "pass what the function needs as arguments; or call vmap inside a module, and make that a unit (model.units)",
            )
        return recorder.record(call, (call.held, args, kwargs), {}, lambda: call(call.held, args, kwargs))

    return [(owner, "vmap_impl", mapped)]


def _change_class(stack: contextlib.ExitStack, owner: type | ModuleType, name: str, value: Any) -> None:
    """Set an attribute of a class or of a module of PyTorch's until the stack ends."""
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

    def recorded_call(original: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
        def call(self: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
            name = names.get(id(self))
            return original(self, *args, **kwargs) if name is None else recorder.call_unit(name, self, original, args, kwargs)

        return call

    def getattribute(self: nn.Module, key: str) -> Any:
        if recorder.attributes.is_set(self, key):
            recorder.check_attribute_read(self, key)
        return object.__getattribute__(self, key)

    set_attribute = nn.Module.__setattr__

    def setattribute(self: nn.Module, key: str, value: Any) -> None:
        recorder.note_attribute_write(self, key, value)
        set_attribute(self, key, value)

    calls: list[tuple[type, str, Any]] = [(owner, "__call__", recorded_call(vars(owner)["__call__"])) for owner in owners]
    return [*calls, (nn.Module, "__getattribute__", getattribute), (nn.Module, "__setattr__", setattribute)]


def record_forward(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    fields: Mapping[str, Tensor],
    call: Callable[[Mapping[str, Tensor]], R],
    like: Trace | None = None,
    *,
    finds_branches: bool = False,
) -> Trace:
    """The trace of `call(fields)`, which calls the model. The caller restores buffers and generators.

    `like`: a trace in training mode, if the model is in evaluation mode now. `finds_branches`: whether to look for units whose
    modules form parallel branches.

    Raises `Refused` for what cannot be captured, `InnerModuleUsed` where the units must be finer.
    """
    given = {name: value.clone() for name, value in fields.items()}  # the forward may write into them
    recorder = Recorder(model, units, given, like, finds_branches=finds_branches)
    with recording(recorder):
        try:
            out = call(given)
        except Refused as error:
            error.module = error.module or recorder.running_module
            raise
    return recorder.finish(out)
