"""What the modules of a model hold before a trace, to be compared and put back after it: attributes, containers, buffers."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from raypar.model.graph import join_names
from raypar.model.layer_skeletons import norms_with_running_statistics, running_statistics_names
from raypar.model.python_state import Content
from raypar.torch_compat.modules import non_persistent_buffer_names

Container = dict[Any, Any] | list[Any] | set[Any]
"""A user's container. It is read and restored by methods of the base class: a subclass may forbid that."""


class ModuleAttributes(NamedTuple):
    """What a module had before a trace."""

    module: nn.Module
    former: dict[str, Any]
    """Its attributes."""
    containers: list[tuple[Container, Container]]
    """Its dicts (buffers, hooks, its own), lists and sets with copies of them."""


Held = dict[str, dict[str, Content]]
"""Module -> attribute -> what it held (`state_of`)."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 4
"""How many containers inside each other are looked into."""


class StateBefore:
    """What a model had before it was traced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        """The model."""
        self.attributes = _attributes_of(model)
        """The attributes of its modules."""
        self.held = held_by(model)
        """What the attributes of its modules held."""
        self._buffers = [(name, buffer, buffer._version, buffer.clone()) for name, buffer in model.named_buffers()]
        """(name, buffer, its version, its value)."""
        norms = norms_with_running_statistics(model)
        self.statistics = frozenset[str]().union(*(running_statistics_names(path, norm) for path, norm in norms))
        """Names of the buffers that norms have as their running statistics."""

    def restore(self) -> None:
        """Put back what the forward has changed."""
        _restore_attributes(self.attributes)
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Put the former values into the buffers."""
        for _, buffer, version, value in self._buffers:
            if buffer._version != version:
                buffer.copy_(value)

    def written_buffers(self) -> frozenset[str]:
        """Names of the buffers into which the forward has written."""
        return frozenset(name for name, buffer, version, _ in self._buffers if buffer._version != version)

    def replaced_buffers(self) -> frozenset[str]:
        """Names of the buffers in whose place the forward has put other tensors; caches (persistent=False) apart."""
        caches = {
            join_names(path, key) for path, module in self.model.named_modules() for key in non_persistent_buffer_names(module)
        }
        now = dict(self.model.named_buffers())
        return frozenset(name for name, buffer, *_ in self._buffers if now.get(name) is not buffer and name not in caches)


def held_by(model: nn.Module) -> Held:
    """What the attributes of a model's modules hold, those of `nn.Module` apart."""
    own = vars(nn.Module()).keys()
    return {
        name: {key: state_of(value) for key, value in vars(module).items() if key not in own}
        for name, module in model.named_modules()
    }


def _attributes_of(model: nn.Module) -> list[ModuleAttributes]:
    return [
        ModuleAttributes(
            module,
            dict(vars(module)),
            [(value, content_of(value)) for value in vars(module).values() if isinstance(value, (dict, list, set))],
        )
        for module in model.modules()
    ]


def _restore_attributes(attributes: list[ModuleAttributes]) -> None:
    """Set the attributes of modules, hooks and buffers among them, to what they were: a trace leaves no caches to the next."""
    for module, former, containers in attributes:
        vars(module).clear()
        vars(module).update(former)
        for value, content in containers:
            restore_container(value, content)


class _Written(NamedTuple):
    """A tensor."""

    tensor: int
    """Its `id`."""
    writes: int
    """How often it has been written."""


class _Identity(int):
    """`id` of an object that is not looked into."""


def state_of(value: Any, depth: int = 0) -> Content:
    """What an attribute holds: numbers and texts by value, containers by content, tensors by identity and number of writes,
    generators of random numbers by their state, other objects by identity."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return _Written(id(value), 0 if value.is_inference() else value._version)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (numpy.random.Generator, numpy.random.BitGenerator)):
        bits: Any = getattr(value, "bit_generator", value)
        return repr(bits.state)
    if isinstance(value, numpy.ndarray):
        return (value.shape, value.tobytes()) if value.dtype != object else _Identity(id(value))
    if depth < _DEPTH and isinstance(value, dict):
        return {key: state_of(each, depth + 1) for key, each in value.items()}
    if depth < _DEPTH and isinstance(value, (list, tuple)):
        return [state_of(each, depth + 1) for each in value]
    return _Identity(id(value))


def is_changed(before: Content, after: Content) -> bool:
    """Whether something that was there has changed: a number, a tensor by a write, a generator by drawing.

    What was None, or is another tensor or object now, may be a cache, as may be what was added to a dict or at the end of a
    list: it is compared by what a second forward does with it.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        return any(key in after and is_changed(each, after[key]) for key, each in before.items())
    if isinstance(before, list) and isinstance(after, list):
        return any(map(is_changed, before, after))
    if isinstance(before, _Written) and isinstance(after, _Written):
        return before.tensor == after.tensor and before.writes != after.writes
    return type(before) is type(after) and before is not None and not isinstance(before, _Identity) and bool(before != after)


def content_of(container: Container) -> Container:
    """A plain dict, list or set of what it holds."""
    if isinstance(container, OrderedDict):
        return dict(OrderedDict.items(container))
    if isinstance(container, dict):
        return dict(dict.items(container))
    return list(list.__iter__(container)) if isinstance(container, list) else set(set.__iter__(container))


def restore_container(container: Container, content: Container) -> None:
    """Restore a container's content, if it has changed: the same objects in the same order.

    A dict may refuse `update` (diffusers' FrozenDict), and a list of its own class do more in `extend` than to keep elements.
    """
    now = content_of(container)
    if list(map(id, _flat(now))) == list(map(id, _flat(content))):
        return
    if isinstance(container, dict):
        # dict's own methods would not tell an OrderedDict of its new keys.
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in content.items():  # type: ignore[union-attr]
            base.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), content)
    else:
        set.clear(container)
        set.update(container, content)


def _flat(content: Container) -> Iterable[Any]:
    """Its elements; the keys and values of a dict."""
    return (each for pair in content.items() for each in pair) if isinstance(content, dict) else content
