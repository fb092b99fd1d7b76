"""Finds units whose modules form parallel branches, in what the modules of a unit pass each other while it is recorded.

Branches are chains of modules that read the same values, do not need each other, and meet in one concatenation or sum. Several
workers can compute them at the same time, if the modules are units of their own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raypar.model.capture.operation_watch import OperationWatch
from raypar.model.capture.tensors_in_values import flatten
from raypar.model.capture.trace_data import Event, TensorKey
from raypar.torch_compat.process_state import saved_tensors_hooks
from raypar.torch_compat.pytree import tree_flatten

WORTH = 0.1
"""A unit is divided if more than this share of its multiplications can be done beside its longest branch."""

_CONCATENATES = frozenset(("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "row_stack"))
_ADDS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))
"""Names of the functions in which branches meet. What meets in a product needs both at once: gates, queries and keys."""

_PRODUCTS = {"mm": 0, "bmm": 0, "linear": 0, "addmm": 1, "baddbmm": 1}
"""Operation -> index of the argument whose last dimension is summed over."""


@dataclass
class _Step:
    """A call of a module by the unit's own code, or of a function between such calls."""

    module: str = ""
    """Qualified name of the module; of a function empty, or the module whose own code calls it."""
    is_call: bool = False
    """Whether it is the module's call."""
    joins: str = ""
    """`cat` or `sum`, if branches may meet in it."""
    reads: dict[int, None] = field(default_factory=dict)
    """The steps whose results it reads, by number; the unit's arguments as -1, -2, ..."""
    operands: list[int | None] = field(default_factory=list)
    """Of a join: where each tensor comes from, as in `reads`; None for state and constants."""
    multiplications: int = 0
    """How many it needs."""


class BranchFinder:
    """Follows the values inside of units that run one after the other, and keeps those units whose modules form branches."""

    def __init__(self, model: nn.Module, paths: Mapping[int, str], watch: OperationWatch) -> None:
        """`paths`: `id` of a module -> its qualified name; `watch` tells of each operation from now on."""
        watch.after = self.note_operation
        self.found: dict[str, tuple[str, ...]] = {}
        """Unit with branches -> the modules that its code calls."""
        self.work: list[int] = []
        """How many multiplications each unit call needs, in their order."""
        self._model, self._paths = model, paths
        self._unit = ""
        """The unit that runs; empty if none does, or if it cannot be divided."""
        self._is_running = False
        """Whether any unit runs."""
        self._steps: list[_Step] = []
        self._depth = 0
        """How many calls of modules inside of the unit are under way."""
        self._multiplications = 0
        """Of the function that runs."""
        self._sources: dict[int, int] = {}
        """`id` of a tensor -> the step that has made or last written it, or the argument that it is."""
        self._alive: list[Any] = []
        """All tensors whose `id` is known, kept so that none is used twice."""
        self._contexts: tuple[Any, ...] = ()
        """The contexts around the unit's call."""

    def begin(self, unit: str, arguments: Any) -> None:
        """A unit is called."""
        module = self._model.get_submodule(unit)
        # `init: by-name` calls its `reset_parameters()`, which workers that have its parameters alone could not.
        is_whole = not list(module.children()) or (module._parameters and hasattr(module, "reset_parameters"))
        self._unit, self._is_running = "" if is_whole else unit, True
        self.work.append(0)
        self._steps, self._depth, self._multiplications = [], 0, 0
        self._alive = [value for value in flatten(arguments)[0] if isinstance(value, Tensor)]
        self._sources = {id(value): -1 - number for number, value in enumerate(self._alive)}
        self._contexts = _contexts()

    def leave_whole(self) -> None:
        """The unit that runs needs values, so it is not divided: nothing of it is kept, which may be large."""
        self._unit, self._alive, self._sources = "", [], {}

    def end(self, *, is_divisible: bool) -> None:
        """The unit has returned. `is_divisible`: whether it has read no values."""
        unit, self._unit, self._is_running = self._unit, "", False
        if unit and is_divisible and has_branches(self._steps, self._steps, self._model):
            self.found[unit] = tuple(dict.fromkeys(step.module for step in self._steps if step.is_call))
        self._alive = []

    def begin_module(self, module: nn.Module) -> None:
        """A module inside of the unit is called."""
        path = self._paths.get(id(module), "")
        if not self._unit or path == self._unit:
            return
        if self._depth == 0:
            self._steps.append(_Step(path, is_call=True))
            if _contexts() != self._contexts or not path.startswith(f"{self._unit}."):
                self._unit = ""  # checkpointing, say, which would be lost; or a module of someone else
        self._depth += 1

    def end_module(self, module: nn.Module) -> None:
        """It has returned."""
        if self._unit and self._paths.get(id(module), "") != self._unit:
            self._depth -= 1

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function inside of the unit; returns its result."""
        if not self._unit:
            return function(*args, **kwargs)
        given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        versions = [value._version for value in given]
        sources = [self._sources.get(id(value)) for value in given]
        number = self._number_of_step()
        out = function(*args, **kwargs)
        made = [value for value in tree_flatten(out)[0] if isinstance(value, Tensor)]
        made += [value for value, version in zip(given, versions, strict=True) if value._version != version]
        if not made:
            return out
        if number == len(self._steps):
            joins = _kind_of_join(function)
            self._steps.append(_Step(joins=joins, operands=sources if joins else []))
        self._steps[number].multiplications += self._multiplications
        self._multiplications = 0
        self._steps[number].reads.update((source, None) for source in sources if source is not None and source != number)
        self._sources.update((id(value), number) for value in made)
        self._alive += made
        return out

    def _number_of_step(self) -> int:
        """The step to which a function belongs: the module that runs, or a new one."""
        return len(self._steps) - (self._depth > 0)

    def note_operation(self, name: str, args: Sequence[Any], out: Any) -> None:
        """PyTorch has computed something inside of the unit. `name`: of the operation."""
        if self._is_running:
            count = multiplications(name, args, out)
            self._multiplications += count
            self.work[-1] += count


def _contexts() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), saved_tensors_hooks(True)


def multiplications(name: str, args: Sequence[Any], out: Any) -> int:
    """How many multiplications an operation needs; 0 for those that are no products of matrices or convolutions."""
    if name in _PRODUCTS:
        return int(out.numel() * args[_PRODUCTS[name]].shape[-1])
    if name == "convolution":
        given, weight, transposed = args[0], args[1], args[6]
        return int((given if transposed else out).numel() * math.prod(weight.shape[1:]))
    return 0


def has_branches(steps: Sequence[_Step], joins: Iterable[_Step], model: nn.Module, home: str = "") -> bool:
    """Whether branches meet in one of the joins, of modules of which it is worth the while to compute them apart.

    `steps`: all that the joins may need. `home`: the module whose own code these are; only what is inside of it counts.
    """
    inside = [not home or f"{step.module}.".startswith(f"{home}.") for step in steps]
    limit = WORTH * sum(step.multiplications for step, own in zip(steps, inside, strict=True) if own)
    behind: list[int] = []  # the steps that a step needs, and itself, as bits
    for number, step in enumerate(steps):
        needed = 1 << number
        for source in step.reads:
            needed |= behind[source] if source >= 0 else 0
        behind.append(needed)
    for join in joins:
        operands = _operands(steps, join) if join.joins else []
        if len(operands) < 2:
            continue
        own = [[n for n in branch if inside[n]] for branch in _only_behind_one(behind, operands)]
        for branches in _that_read_the_same(steps, own, model, alike=join.joins == "sum"):
            work = [sum(steps[n].multiplications for n in branch) for branch in branches]
            if len(work) > 1 and sum(work) - max(work) > limit:
                return True
    return False


def modules_with_branches(events: Sequence[Event], model: nn.Module, work: Iterable[int]) -> frozenset[str]:
    """The modules, the model itself among them, whose units form parallel branches that meet in their own code.

    `work`: multiplications of each unit call.
    """
    numbers, makers = iter(work), dict[TensorKey, int]()
    steps: list[_Step] = []
    joins: defaultdict[str, list[_Step]] = defaultdict(list)
    for number, event in enumerate(events):
        for key in event.inputs:
            if key.kind == "field":
                makers.setdefault(key, -1 - number)
        sources = [makers.get(key) for key in (*event.inputs, *(rewrite.before for rewrite in event.rewrites))]
        if isinstance(event.call, str):
            step = _Step(event.call, is_call=True, multiplications=next(numbers))
        else:
            step = _Step(event.home, joins=_kind_of_join(event.call), operands=sources)
            joins[event.home].append(step)
        step.reads.update((source, None) for source in sources if source is not None)
        steps.append(step)
        for key in event.makes:
            makers.setdefault(key, number)
    return frozenset(home for home, found in joins.items() if has_branches(steps, found, model, home))


def _kind_of_join(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    return "cat" if name in _CONCATENATES else "sum" if name in _ADDS else ""


def _operands(steps: Sequence[_Step], join: _Step) -> list[int]:
    """What meets in a join: the steps whose results it reads; of a sum of sums those of all."""
    found: list[int] = []
    todo = list(join.operands)
    while todo:
        source = todo.pop()
        if source is None or source < 0:
            continue
        step = steps[source]
        if join.joins == "sum" and step.joins == "sum":
            todo += step.operands
        else:
            found.append(source)
    return list(dict.fromkeys(found))


def _only_behind_one(behind: Sequence[int], operands: Collection[int]) -> list[list[int]]:
    """For each operand the steps that it alone needs."""
    once = several = 0
    for operand in operands:
        several |= once & behind[operand]
        once |= behind[operand]
    found = []
    for operand in operands:
        bits = behind[operand] & ~several
        found.append([number for number in range(operand + 1) if bits >> number & 1])
    return found


def _that_read_the_same(
    steps: Sequence[_Step], own: Iterable[list[int]], model: nn.Module, *, alike: bool
) -> list[list[list[int]]]:
    """Groups of branches, those with modules that multiply, of which each reads something that another one reads too.

    `alike`: only branches of the same modules are a group, as the paths of ResNeXt and the experts of a mixture are. A sum of
    others is a residual connection with a projection, or an attention beside an MLP.
    """
    groups: defaultdict[tuple[type, ...], list[list[int]]] = defaultdict(list)
    for branch in own:
        modules = [steps[n].module for n in branch if steps[n].is_call]
        if any(steps[n].multiplications for n in branch if steps[n].is_call):
            groups[_classes(model, modules) if alike else ()].append(branch)
    found = []
    for branches in groups.values():
        reads = [{source for n in branch for source in steps[n].reads} - set(branch) for branch in branches]
        shared = [any(one & other for k, other in enumerate(reads) if k != n) for n, one in enumerate(reads)]
        found.append([branch for branch, shares in zip(branches, shared, strict=True) if shares])
    return found


def _classes(model: nn.Module, paths: Iterable[str]) -> tuple[type, ...]:
    """The classes of modules, and of the modules inside of them that have parameters."""
    modules = [model.get_submodule(path) for path in paths]
    return tuple(type(part) for module in modules for part in module.modules() if part is module or part._parameters)
