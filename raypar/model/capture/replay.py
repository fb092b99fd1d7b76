"""Runs the program of one layer: the same calls as in the trace, on the layer's own inputs and modules."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.capture.cut_trace_into_layers import LayerProgram
from raypar.model.capture.trace_data import Event, ModuleArgument, TensorKey, Trace, form_of
from raypar.torch_compat.autograd import innermost_transform
from raypar.torch_compat.process_state import count_dispatch_modes, count_function_modes, is_any_autocast_enabled
from raypar.torch_compat.pytree import tree_flatten, tree_unflatten

CPU = torch.device("cpu")

Values = dict[TensorKey, Tensor]
"""Tensors of one call of a layer, by the trace's keys."""


def run_layer(program: LayerProgram, module: nn.Module, values: Values, device: torch.device = CPU) -> None:
    """Run the events of a layer on a device; adds to `values` what they make."""
    for key in program.state:
        values[key] = _attribute(module, key.name)
    for key in program.copied:
        values[key] = values[key].clone()  # the layer owns what it writes into
    if program.unvarying:
        _add_unvarying(program, module, values, device)
    for event in program.varying:
        run_event(event, module, values, device)


_MOST_KEPT_BYTES = 1 << 16
"""Of one tensor: masks of long sequences are made anew."""


def _add_unvarying(program: LayerProgram, module: nn.Module, values: Values, device: torch.device) -> None:
    """Add what the program's unvarying events make. It is kept from call to call, on each device, under autocast apart,
    until somebody writes into it. Not inside modes and transforms, whose tensors are others."""
    plain = not count_dispatch_modes() and not count_function_modes() and innermost_transform() is None
    place = device, is_any_autocast_enabled()
    kept = program.kept.get(place) if plain else None
    if kept is not None and all(tensor._version == version for _, tensor, version in kept):
        for key, tensor, _ in kept:
            values[key] = tensor
        return
    for event in program.unvarying:
        run_event(event, module, values, device)
    made = [(key, values[key]) for key in program.unvarying_keys]
    if plain and all(_may_be_kept(tensor, device) for _, tensor in made):
        program.kept[place] = [(key, tensor, tensor._version) for key, tensor in made]


def _may_be_kept(tensor: Tensor, device: torch.device) -> bool:
    is_plain = type(tensor) is Tensor and tensor.device == device and not tensor.is_inference()
    return is_plain and tensor.untyped_storage().nbytes() <= _MOST_KEPT_BYTES


def check_against_record(program: LayerProgram, values: Values, trace: Trace) -> None:
    """Raises `ModelError` for a tensor of another shape or dtype than in the record: what Python code has made of the shape
    then is wrong. `values`: all tensors of one call of the layer."""
    gone = {rewrite.before for event in program.events for rewrite in event.rewrites}  # `unsqueeze_` has given it another shape
    for event in program.events:
        for key in (*event.inputs, *event.makes):
            value, fact = values.get(key), trace.facts.get(key)
            if type(value) is not Tensor or fact is None or key in gone:  # the part of a shard stands in for the whole
                continue
            either = trace.has_fused_units and value.is_floating_point() and fact.dtype.is_floating_point
            if tuple(value.shape) != fact.shape or not (either or value.dtype == fact.dtype):
                raise ModelError(
                    f"layer {program.name!r}: a tensor of {event.label} at {event.location} is {list(value.shape)} "
                    f"{value.dtype}, and was {list(fact.shape)} {fact.dtype} when the forward was recorded, with parameters "
                    "without values",
                    cure="make the module that computes it a unit (model.units), or the one around it; and report it: an "
                    "operation of PyTorch has another shape on the meta device",
                )


def run_event(event: Event, module: nn.Module, values: Values, device: torch.device = CPU) -> Any:
    """Run one event, and add to `values` what it makes; returns its result."""
    args, kwargs = _arguments(event, module, values, device)
    call: Callable[..., Any] = _attribute(module, event.call) if isinstance(event.call, str) else event.call
    if args and not isinstance(args[0], Tensor) and isinstance(call, _METHODS):
        call = _method_of_other_class(call, args[0])
    if event.grad and event.autocast is None:
        out = call(*args, **kwargs)
    else:
        with _users_contexts(event, device):
            out = call(*args, **kwargs)
    if event.result_form is not None:
        _check_form(event, out)
    for rewrite in event.rewrites:
        if rewrite.before in values:
            values[rewrite.after] = values[rewrite.before]
    if event.returns_tensor:
        key = event.outputs[0]
        if key is not None:
            values[key] = out
        return out
    for key, result in zip(event.outputs, tree_flatten(out)[0], strict=False):
        if key is not None:
            values[key] = result
    return out


def _check_form(event: Event, out: Any) -> None:
    """Raises `ModelError` if a unit that reads values returns something of another form than in the record."""
    tensors = [value for value in tree_flatten(out)[0] if hasattr(type(value), "__torch_function__")]
    if all(type(value) is Tensor for value in tensors) and form_of(out) != event.result_form:  # no parts of shards
        raise ModelError(
            f"unit {event.label}, called at {event.location}, returns something of another form than in the record, for it "
            f"reads values: {form_of(out)}, not {event.result_form}",
            cure="have it return the same structure and shapes for all values; or make a module around all that uses it a unit "
            "(model.units)",
        )


_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)
"""Types of the methods of tensors that a trace has: `Tensor.float`, `Tensor.__add__`, and `__get__` of `Tensor.mT`."""


def _method_of_other_class(method: Any, value: Any) -> Callable[..., Any]:
    """The function to call in the place of a method of tensors for what is none, as the shard of a value."""
    if isinstance(method, types.MethodWrapperType):  # the `__get__` of an attribute
        return lambda given, *rest: getattr(given, method.__self__.__name__)  # type: ignore[attr-defined]
    own: Callable[..., Any] | None = getattr(type(value), method.__name__, None)
    return own if own is not None else lambda given, *args, **kwargs: getattr(given, method.__name__)(*args, **kwargs)


@contextlib.contextmanager
def _users_contexts(event: Event, device: torch.device) -> Iterator[None]:
    """The contexts that users' code has entered around an event."""
    with contextlib.ExitStack() as stack:
        if not event.grad:
            stack.enter_context(torch.no_grad())
        if event.autocast is not None:
            stack.enter_context(torch.autocast(device.type, event.autocast.dtype, event.autocast.enabled, cache_enabled=False))
        yield


def _arguments(
    event: Event, module: nn.Module, values: Values, device: torch.device
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of an event; where the trace has its own device, the CPU, they have `device`."""
    leaves = [values[leaf] if type(leaf) is TensorKey else leaf for leaf in event.leaves]
    if event.modules:
        leaves = [_attribute(module, leaf.path) if type(leaf) is ModuleArgument else leaf for leaf in leaves]
    if device != CPU:
        leaves = [device if isinstance(leaf, torch.device) and leaf == CPU else leaf for leaf in leaves]
    kept = vars(event)  # beside the fields
    if "_plain_arguments" not in kept:
        kept["_plain_arguments"] = _plain_arguments(event)
    plain: tuple[int, tuple[str, ...]] | None = kept["_plain_arguments"]
    if plain is None:
        args, kwargs = tree_unflatten(leaves, event.structure)
        return args, copy.copy(kwargs)
    count, names = plain
    return leaves[:count], dict(zip(names, leaves[count:], strict=True))


def _plain_arguments(event: Event) -> tuple[int, tuple[str, ...]] | None:
    """(number of positional arguments, names of the keyword arguments) where no argument is a container; else None."""
    args, kwargs = event.structure.children()
    if all(each.is_leaf() for each in (*args.children(), *kwargs.children())):
        return args.num_children, tuple(kwargs.context)
    return None


def _attribute(module: nn.Module, path: str) -> Any:
    """The submodule, parameter or buffer at a path."""
    found: Any = module
    for name in path.split("."):
        modules = vars(found).get("_modules", ())  # `getattr` finds modules last
        found = modules[name] if name in modules else getattr(found, name)
    return found
