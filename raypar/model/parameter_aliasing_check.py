"""Refuses models that reach a trained parameter's memory in other ways than by the parameter's name.

In one process a view of a parameter's memory, or a function that holds the parameter, sees every step of the optimizer. Workers
give every parameter memory of its own, in a copy of its module: such a view would silently keep the initial values.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.graph import join_names
from raypar.model.layer_skeletons import norms_with_running_statistics
from raypar.torch_compat.modules import KEPT_BY_MODULES, KEPT_BY_RECURRENT_LAYERS
from raypar.torch_compat.storages import storage_id

Replaced = Literal["nothing", "parameters", "all"]
"""Which state does not begin with the model function's values; `all`: parameters and buffers."""
_OWN = KEPT_BY_MODULES | KEPT_BY_RECURRENT_LAYERS
"""Attributes of modules that are known: registered tensors, and what PyTorch's recurrent layers keep of theirs."""


def refuse_parameter_aliasing(layers: Collection[tuple[str, nn.Module]], replaced: Replaced = "nothing") -> None:
    """Raises `ModelError` where the memory of a trained parameter can be reached in another way than by its name.

    That is by another parameter or buffer object, by a plain attribute, or by a function that a module keeps.
    `replaced`: what gets other values than the model function's (`init_from`, `init: by-name`). It may not be in functions
    either where it is not trained, or as a view in an attribute: these would keep the model function's values.
    """
    trained, other = _trained(layers), _not_trained(layers, replaced)
    for layer, module in layers:
        inside = set(module.modules())
        for path, part in module.named_modules():
            where = join_names(layer, path)
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is None:
                    continue
                buffer = key in part._buffers
                for name, parameter in trained.get(_memory(tensor), ()):
                    if (buffer or parameter is not tensor) and _overlap(parameter, tensor):
                        raise ModelError(
                            f"{where}.{key} and the trained parameter {name} share memory without being one parameter",
                            cure="to tie two parameters give both places one nn.Parameter (a.weight = b.weight); else give "
                            "each memory of its own: .clone()",
                        )
            for key, value in vars(part).items():
                if key not in _OWN:
                    _refuse_held(f"{where}.{key}", value, trained, inside)
                    _refuse_former_values(f"{where}.{key}", value, other, inside)


_Registered = dict[int, list[tuple[str, Tensor]]]
"""`_memory` -> (name, tensor) of each registered tensor in it."""


def _trained(layers: Collection[tuple[str, nn.Module]]) -> _Registered:
    """The trained parameters."""
    found: _Registered = {}
    for layer, module in layers:
        for path, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.numel():
                found.setdefault(_memory(parameter), []).append((join_names(layer, path), parameter))
    return found


def _not_trained(layers: Collection[tuple[str, nn.Module]], kinds: Replaced) -> _Registered:
    """Frozen parameters, and buffers if `kinds` is `all`, that get other values than the model function's."""
    found: _Registered = {}
    for layer, module in layers if kinds != "nothing" else ():
        for path, tensor in (*module.named_parameters(), *(module.named_buffers() if kinds == "all" else ())):
            if not tensor.requires_grad and tensor.numel():
                found.setdefault(_memory(tensor), []).append((join_names(layer, path), tensor))
    return found


def _refuse_former_values(where: str, value: Any, registered: _Registered, inside: Collection[nn.Module]) -> None:
    """Raises `ModelError` if the attribute `value` (called `where`) would keep values that the job replaces."""
    for held, holder in _held(value, "", inside, set()):
        for name, tensor in registered.get(_memory(held), ()):
            if (holder or held is not tensor) and _overlap(tensor, held):
                raise ModelError(
                    f"{where} holds {name} {_HOLDERS[holder][0]}: it would keep the model function's values, which init_from "
                    "or init: by-name replaces",
                    cure=_HOLDERS[holder][1],
                )


def _refuse_held(where: str, value: Any, trained: _Registered, inside: Collection[nn.Module]) -> None:
    """Raises `ModelError` if the attribute `value` (called `where` in the message) holds a trained parameter's memory."""
    for held, holder in _held(value, "", inside, set()):
        for name, parameter in trained.get(_memory(held), ()):
            if _overlap(parameter, held):
                raise ModelError(
                    f"{where} holds the trained parameter {name} {_HOLDERS[holder][0]}: it would not change with the parameter",
                    cure=_HOLDERS[holder][1],
                )


_HOLDERS = {
    "": ("in a plain attribute", "register it (self.name = parameter, nn.ParameterList), or .clone() what is not to change"),
    "function": (
        "in a variable of a function (as a lambda that uses self does)",
        "make the function a method of a module that has the parameter, or use the module that hooks are given",
    ),
    "module": ("in a module of another layer", "make it one layer, or give this layer a parameter tied to that one"),
}
"""What holds a parameter, as `_held` says -> (the words for it, cure)."""


def _held(value: Any, holder: str, inside: Collection[nn.Module], seen: set[tuple[int, str]]) -> Iterator[tuple[Tensor, str]]:
    """(tensor, what holds it: a key of `_HOLDERS`) of every tensor in `value`, its containers and functions.

    Modules `inside` the layer are copied with it and so are left out, unless a function holds them: functions are not copied.
    `seen`: (id, holder) of what was visited, which ends cycles.
    """
    if (id(value), holder) in seen:
        return
    seen.add((id(value), holder))
    within: list[Any] = []
    if isinstance(value, Tensor):
        yield value, holder
    elif isinstance(value, nn.Module):
        if holder == "function" or value not in inside:
            yield from ((tensor, holder or "module") for tensor in (*value.parameters(), *value.buffers()))
    elif isinstance(value, dict):
        within = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        within = list(value)
    elif isinstance(value, functools.partial):
        within = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        within = [value.__self__]
    elif isinstance(value, types.FunctionType):
        holder = "function"
        within = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable without a value yet
                within.append(cell.cell_contents)
    for item in within:
        yield from _held(item, holder, inside, seen)


def tensors_in_functions(layers: Collection[tuple[str, nn.Module]]) -> Iterator[Tensor]:
    """Tensors in variables of functions that modules keep, and of the modules there: skeletons keep these very functions."""
    for _, module in layers:
        inside = set(module.modules())
        for part in inside:
            for key, value in vars(part).items():
                if key not in _OWN:
                    yield from (tensor for tensor, holder in _held(value, "", inside, set()) if holder)


def refuse_undeclared_ties(
    layer: str,
    module: nn.Module,
    seen: MutableMapping[str, weakref.ReferenceType[nn.Parameter]],
    ties: Sequence[Sequence[str]],
) -> None:
    """Raises `ModelError` for a trained parameter that an earlier build has too, unless a tie names both.

    `seen`: name -> parameter of the earlier builds; this one's are added.
    """
    for path, parameter in module.named_parameters():
        name = f"{layer}.{path}"
        for other, reference in seen.items():
            former = reference()
            if former is None or not (former.requires_grad or parameter.requires_grad):
                continue
            shares = former is parameter or (_memory(former) == _memory(parameter) and _overlap(former, parameter))
            if shares and not any(name in names and other in names for names in ties):
                raise ModelError(
                    f"the builds of two layers share a trained parameter, {other} and {name}, but no tie names them",
                    cure=f"add ties=(({other!r}, {name!r}),) to the Graph, or make a parameter in each build",
                )
    for path, parameter in module.named_parameters():
        seen[f"{layer}.{path}"] = weakref.ref(parameter)


def refuse_shared_statistics(layer: str, module: nn.Module, seen: MutableMapping[str, weakref.ReferenceType[Tensor]]) -> None:
    """Raises `ModelError` for running statistics that norms share: each would add its own calls only.

    `seen`: name -> running mean or variance of the norms before; this layer's are added.
    """
    for path, norm in norms_with_running_statistics(module):
        name = join_names(layer, path)
        own = {f"{name}.{key}": tensor for key in ("running_mean", "running_var") if (tensor := getattr(norm, key)) is not None}
        for other, reference in seen.items():
            former = reference()
            if former is not None and any(_memory(former) == _memory(one) and _overlap(former, one) for one in own.values()):
                raise ModelError(
                    f"{other.rpartition('.')[0]} and {name} share the running statistics of a norm",
                    cure="make a norm for each, which may share weight and bias",
                )
        seen.update((key, weakref.ref(tensor)) for key, tensor in own.items())


def _memory(tensor: Tensor) -> int:
    """A number that is equal for tensors that share memory, real ones and recorded ones (`model.deferred_init`)."""
    return storage_id(tensor) if tensor.layout is torch.strided else id(tensor)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two views of one memory have elements in common."""
    if not one.numel() or not other.numel():
        return False
    (first, last), (begin, end) = _extent(one), _extent(other)
    if last <= begin or end <= first:
        return False
    if one.element_size() != other.element_size():
        return True  # or so it is taken: nobody means to read parts of numbers
    start, size = min(first, begin), one.element_size()
    taken = torch.zeros((max(last, end) - start) // size, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), (first - start) // size).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), (begin - start) // size).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Offsets in the memory: of the tensor's first byte, and of the byte after its last."""
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + span) * tensor.element_size()
