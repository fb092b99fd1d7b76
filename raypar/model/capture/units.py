"""Which modules of a model are its units: those that run whole, in one layer."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from raypar.errors import ModelError

LARGE_PART = 0.3
"""An element of a container that holds more than this share of the model's parameters is split further, if it can be."""

NEARLY_ALL = 0.8
"""A unit beside containers that holds more than this share of the model's parameters is opened, if its code can be captured."""

MOST_WHOLE = 0.5
"""A module whose own code cannot be captured runs whole, if it holds at most this share of the model's parameters."""

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

Units = Mapping[str, nn.Module]
"""Qualified name -> module, in the order of the model's modules."""


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """The units of a model about which the user says nothing.

    They are the elements of every container that has at least two modules of one class, and what stands beside it. In a model
    without such containers, whose only block is called several times say, containers of one module count too.
    """
    total = sum(p.numel() for p in model.parameters()) or 1
    fewest = 2 if any(_has_blocks(part, 2) for part in model.modules()) else 1
    deep = {id(module): any(_has_blocks(part, fewest) for part in module.modules()) for module in model.modules()}

    def is_large(module: nn.Module) -> bool:
        return sum(p.numel() for p in module.parameters()) > LARGE_PART * total

    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            is_list = _has_blocks(child, fewest) or isinstance(child, (nn.ModuleList, nn.ModuleDict))
            is_block = _has_blocks(module, fewest) and not is_list
            if _is_never_called(child) or (deep[id(child)] and (not is_block or is_large(child))):
                walk(child, where)
            elif id(child) not in seen:
                seen.add(id(child))
                found[where] = child

    walk(model, "")
    return found


def open_units(model: nn.Module, units: Units) -> dict[str, nn.Module]:
    """Units such that none holds nearly all of the model: in the place of such a unit stand the modules inside it.

    Elements of containers stay whole, as do PyTorch's own modules.
    """
    total = sum(p.numel() for p in model.parameters()) or 1
    found: dict[str, nn.Module] = {}

    def add(path: str, module: nn.Module) -> None:
        holds = sum(p.numel() for p in module.parameters())
        parent = model.get_submodule(path.rpartition(".")[0])
        whole = isinstance(parent, _CONTAINERS) or type(module).__module__.startswith("torch.") or not list(module.children())
        if whole or holds <= NEARLY_ALL * total:
            if not any(module is each for each in (*units.values(), *found.values())) or units.get(path) is module:
                found[path] = module
            return
        for name, child in module.named_children():
            inner = child.named_children() if _is_never_called(child) else [("", child)]
            for key, each in inner:
                add(f"{path}.{name}.{key}" if key else f"{path}.{name}", each)

    for path, module in units.items():
        add(path, module)
    return found


def divide_into_branches(model: nn.Module, units: Units, branches: Mapping[str, Collection[str]]) -> dict[str, nn.Module]:
    """Units such that those whose modules form parallel branches are divided into these modules.

    `branches`: such a unit -> the modules that its code calls.
    """
    found: dict[str, nn.Module] = {}

    def add(path: str, module: nn.Module, called: Collection[str]) -> None:
        for name, child in module.named_children():
            where = f"{path}.{name}"
            if any(other.startswith(where + ".") for other in called):
                add(where, child, called)  # a container whose elements are called
            else:
                found[where] = child

    for path, module in units.items():
        if path in branches:
            add(path, module, branches[path])
        else:
            found[path] = module
    return found


def units_by_pattern(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The units that the user names, and around them the largest modules that have none of those inside.

    Raises `ModelError` for a pattern that matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    chosen: set[str] = set()
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise ModelError(
                f"the pattern {pattern!r} of model.units matches no module (nearest: {', '.join(near)})",
                cure="write names of modules as named_modules() gives them; * matches anything",
            )
        chosen |= set(hits)
    outermost = {name for name in chosen if not any(name.startswith(other + ".") for other in chosen)}
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            inside = any(unit.startswith(where + ".") for unit in outermost)
            if where not in outermost and (inside or _is_never_called(child)):
                walk(child, where)
            else:
                found[where] = child

    walk(model, "")
    return found


def refine_units(model: nn.Module, units: Units, path: str) -> dict[str, nn.Module]:
    """Units such that the module at `path`, which is inside of one, is one itself, as are the modules beside it."""
    outer = next(unit for unit in units if path.startswith(unit + "."))
    found = {unit: module for unit, module in units.items() if unit != outer}
    while outer != path:
        for name, child in model.get_submodule(outer).named_children():
            here = f"{outer}.{name}"
            if here != path and not path.startswith(here + "."):
                found[here] = child
        outer += "." + path[len(outer) + 1 :].partition(".")[0]
    return {**found, path: model.get_submodule(path)}


def coarsen_units(model: nn.Module, units: Units, path: str) -> dict[str, nn.Module] | None:
    """Units such that the module at `path`, which has units inside, runs whole; None if it holds too much of the model."""
    module = model.get_submodule(path)
    total = sum(p.numel() for p in model.parameters())
    if sum(p.numel() for p in module.parameters()) > MOST_WHOLE * total:
        return None
    kept = {unit: part for unit, part in units.items() if not unit.startswith(path + ".")}
    return {**kept, path: module}


def _has_blocks(module: nn.Module, fewest: int) -> bool:
    """Whether it is a container of at least so many modules of one class."""
    return isinstance(module, _CONTAINERS) and max(Counter(map(type, module.children())).values(), default=0) >= fewest


def _is_never_called(module: nn.Module) -> bool:
    """Whether it is a container without a forward, whose elements other code calls."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward
