"""Reads and restores the contents of users' dicts, lists and sets, by methods of the base class: a subclass may forbid that."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

Container = dict[Any, Any] | list[Any] | set[Any]


def content_of(container: Container) -> Container:
    """A plain dict, list or set of what it holds."""
    if isinstance(container, OrderedDict):
        return dict(OrderedDict.items(container))
    if isinstance(container, dict):
        return dict(dict.items(container))
    return list(list.__iter__(container)) if isinstance(container, list) else set(set.__iter__(container))


def put_back(container: Container, content: Container) -> None:
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
