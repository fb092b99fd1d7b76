"""Reads and writes an optimizer's state: of each parameter, of each group of parameters, and of the optimizer itself.

State of groups and of the optimizer is found by comparison: entries of `param_groups` and attributes that hold something else
than when the optimizer was made, objects in them too. The learning rate is not state: the job sets it before every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raypar.errors import CheckpointError, RayparError, StateNotKeptError, with_article
from raypar.job.function_section import ALL_PARAMETERS, optimizer_of_pattern
from raypar.model.python_state import Content, PythonState, comparable_content, is_same_content
from raypar.worker.checkpoint.manifest import DTYPES
from raypar.worker.checkpoint.safetensors_header import MAX_ELEMENTS
from raypar.worker.checkpoint.state_key import ATTRIBUTE, AVERAGE, GROUP, NOT_KEPT, OPTIMIZER, StateKey, why_unusable_name
from raypar.worker.step.several_optimizers import SeveralOptimizers, averages_of, optimizers_in

Value = Tensor | float | int | bool | None
"""A piece of optimizer state."""
SHARED_BYTES = 64 << 10
"""The largest tensor that many parameters may share: it is saved as text, and moves with each of them."""
GIVEN = "raypar_given"
"""Name of the attribute of an optimizer that holds its `OptimizerSettingsWhenMade`."""
_NOT_ATTRIBUTES = ("state", "param_groups", GIVEN)


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state; its tensors are the optimizer's own, not copies."""

    parameters: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    """Qualified parameter name -> name in `optimizer.state[p]` -> value."""
    groups: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    """Pattern of a group -> name in `param_groups` -> value, of those that are no longer as the job has given them."""
    attributes: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    """Pattern of an optimizer's parameters, `ALL_PARAMETERS` if it is the only one -> attribute of it -> value, of those that
    are no longer as they were when it was made."""

    averages: Mapping[str, Tensor] = field(default_factory=dict)
    """Qualified parameter name -> its moving average, where the job has one and it has begun."""

    def by_parameter(self, names: Mapping[str, str]) -> dict[str, dict[StateKey, Value]]:
        """Parameter -> its own state and what it shares with others: all that a step of it reads. `names`: with patterns.

        So state that parameters share needs no rule of its own where parameters move, or are copied.
        """
        return {
            name: {
                **({AVERAGE: self.averages[name]} if name in self.averages else {}),
                **{StateKey(OPTIMIZER, key): value for key, value in self.parameters.get(name, {}).items()},
                **{StateKey(GROUP, key): value for key, value in self.groups.get(pattern, {}).items()},
                **{StateKey(ATTRIBUTE, key): value for key, value in self._attributes_of(pattern).items()},
            }
            for name, pattern in names.items()
        }

    def _attributes_of(self, pattern: str) -> Mapping[str, Value]:
        """Of the optimizer to which a group belongs."""
        return self.attributes.get(optimizer_of_pattern(pattern), {})

    def shared(self) -> dict[tuple[str, StateKey], Value]:
        """(pattern of a group, or of an optimizer; kind and name) -> value, of what many parameters share."""
        return {
            **{(pattern, StateKey(GROUP, key)): value for pattern, of in self.groups.items() for key, value in of.items()},
            **{(of, StateKey(ATTRIBUTE, name)): value for of, each in self.attributes.items() for name, value in each.items()},
        }

    @staticmethod
    def not_kept(names: Iterable[str], error: StateNotKeptError) -> dict[str, dict[StateKey, Value]]:
        """What stands for the state of parameters if it cannot be moved: whoever needs it gets the error (`of_parameters`)."""
        return {name: {StateKey(NOT_KEPT, error.what): None} for name in names}

    @staticmethod
    def of_parameters(states: Mapping[str, Mapping[StateKey, Value]], names: Mapping[str, str]) -> OptimizerState:
        """The inverse of `by_parameter`. Raises `RayparError` if parameters disagree on what they share, `StateNotKeptError`
        for state that could not be moved (`not_kept`)."""
        parameters: dict[str, dict[str, Value]] = {}
        shared: dict[tuple[str, str], dict[str, Value]] = {}
        first: dict[tuple[str, str], str] = {}
        for name, pattern in names.items():
            if name not in states:
                continue
            found: dict[str, dict[str, Value]] = {OPTIMIZER: {}, GROUP: {}, ATTRIBUTE: {}}
            for key, value in states[name].items():
                if key.kind == NOT_KEPT:
                    raise StateNotKeptError(key.name, cure=_CURE)
                if key.kind in found:
                    found[key.kind][key.name] = value
            if found[OPTIMIZER]:  # an empty dict is not what an optimizer has before its first step
                parameters[name] = found[OPTIMIZER]
            for place in ((pattern, GROUP), (optimizer_of_pattern(pattern), ATTRIBUTE)):
                mine = found[place[1]]
                theirs, other = shared.setdefault(place, mine), first.setdefault(place, name)
                for entry in sorted({*mine, *theirs}):
                    if not is_same_content(comparable_content(mine.get(entry)), comparable_content(theirs.get(entry))):
                        raise RayparError(
                            f"{other} and {name} come with unequal {entry!r}, which they share: "
                            f"{theirs.get(entry)} and {mine.get(entry)}",
                            cure="set plan.stages: 1, or use an optimizer that takes each parameter by itself",
                        )
        groups = {pattern: state for (pattern, kind), state in shared.items() if kind == GROUP}
        attributes = {pattern: state for (pattern, kind), state in shared.items() if kind == ATTRIBUTE}
        averages = {name: value for name in names if isinstance(value := states.get(name, {}).get(AVERAGE), Tensor)}
        return OptimizerState(parameters, groups, attributes, averages)


@dataclass(frozen=True)
class OptimizerSettingsWhenMade:
    """What entries of `param_groups` and attributes held when an optimizer was made (`comparable_content`).

    What a step has changed since is saved and moved as state; all else a new optimizer has again.
    """

    groups: tuple[Mapping[str, Content], ...]
    """Of each group: key -> what it held."""
    attributes: Mapping[str, Content]
    """Name -> what it held."""

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> OptimizerSettingsWhenMade:
        known = _read_elsewhere(optimizer)
        return OptimizerSettingsWhenMade(
            tuple(
                {key: comparable_content(value, known, SHARED_BYTES) for key, value in _entries(group)}
                for group in optimizer.param_groups
            ),
            {name: comparable_content(value, known, SHARED_BYTES) for name, value in _attributes(optimizer)},
        )


def state_outside_optimizer(optimizer: torch.optim.Optimizer) -> PythonState:
    """What an optimizer's code keeps outside of it: in its class, in global variables, in variables of functions."""
    attributes = [value for _, value in _attributes(optimizer)]
    return PythonState({}, code=(type(optimizer), *attributes), called=("step",), known=_read_elsewhere(optimizer))


def names_with_patterns(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Qualified name of each of the optimizer's parameters -> pattern of its group."""
    return {name: group["raypar_pattern"] for group in optimizer.param_groups for name in group["raypar_names"]}


def named_optimizer_parameters(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by qualified name."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["raypar_names"], group["params"], strict=True)
    }


def read_optimizer_state(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """The optimizer's state, of several that of all. Raises `StateNotKeptError` for state that cannot be kept, by name."""
    averages = averages_of(optimizer)
    return _joined([_read_one(each) for each in optimizers_in(optimizer)], averages.values if averages is not None else {})


def _joined(states: Sequence[OptimizerState], averages: Mapping[str, Tensor]) -> OptimizerState:
    """The state of several optimizers, which have no parameter and no pattern in common, with averages of their parameters."""
    return OptimizerState(
        {name: of for state in states for name, of in state.parameters.items()},
        {pattern: of for state in states for pattern, of in state.groups.items()},
        {pattern: of for state in states for pattern, of in state.attributes.items()},
        averages,
    )


def _by_optimizer(optimizer: torch.optim.Optimizer, attributes: Mapping[str, Value]) -> dict[str, Mapping[str, Value]]:
    """An optimizer's attributes under the pattern of its parameters."""
    return {pattern_of_optimizer(optimizer): attributes}


def pattern_of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """The pattern of the parameters of one optimizer."""
    return next((optimizer_of_pattern(group["raypar_pattern"]) for group in optimizer.param_groups), ALL_PARAMETERS)


def _read_one(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """See `read_optimizer_state`; of one optimizer."""
    named, known, given = named_optimizer_parameters(optimizer), _read_elsewhere(optimizer), getattr(optimizer, GIVEN)
    for key in optimizer.state:
        if not isinstance(key, Tensor) or id(key) not in known:
            raise _cannot_keep(
                f"optimizer.state[{key!r}]" if isinstance(key, (str, int)) else "optimizer.state", "of no parameter"
            )
    parameters = {name: dict(optimizer.state[parameter]) for name, parameter in named.items()}
    for name, state in parameters.items():
        for key, value in state.items():
            if why := why_unusable_name(key) or why_not_kept(value):
                raise _cannot_keep(f"optimizer state {key!r} of {name}", why)
    groups: dict[str, dict[str, Value]] = {}
    for group, were in zip(optimizer.param_groups, given.groups, strict=True):
        what = f" of the optimizer group {group['raypar_pattern']!r}, which a step has changed,"
        were = {key: value for key, value in were.items() if _may_be_state(group, key)}
        groups[group["raypar_pattern"]] = _changed(_entries(group), were, known, what)
    attributes = _changed(
        _attributes(optimizer), given.attributes, known, ", an attribute of the optimizer, which a step has changed,"
    )
    return OptimizerState(parameters, groups, _by_optimizer(optimizer, attributes))


def read_given_values(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """What parameters share, as far as a file can hold it, changed or not: hyperparameters too."""
    groups = {
        group["raypar_pattern"]: {k: v for k, v in _entries(group) if why_not_kept(v) is None}
        for group in optimizer.param_groups
    }
    attributes = {name: value for name, value in _attributes(optimizer) if why_not_kept(value) is None}
    return OptimizerState({}, groups, _by_optimizer(optimizer, attributes))


def copy_optimizer_state(state: OptimizerState) -> OptimizerState:
    """The same state in tensors of its own."""

    def copy(values: Mapping[str, Value]) -> dict[str, Value]:
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}

    return OptimizerState(
        {name: copy(of) for name, of in state.parameters.items()},
        {pattern: copy(of) for pattern, of in state.groups.items()},
        {pattern: copy(of) for pattern, of in state.attributes.items()},
    )


def _changed(
    now: Iterable[tuple[str, Any]], given: Mapping[str, Content], known: Mapping[int, Content], what: str
) -> dict[str, Value]:
    """The values that hold something else than those given. Raises `StateNotKeptError` for what cannot be kept."""
    found: dict[str, Value] = {}
    present = dict(now)
    for name in given.keys() - present.keys():
        raise _cannot_keep(f"{name!r}{what}", "removed")
    for name, value in present.items():
        if name in given and is_same_content(comparable_content(value, known, SHARED_BYTES), given[name]):
            continue
        why = why_unusable_name(name) or why_not_kept(value)
        if why is None and isinstance(value, Tensor) and value.nbytes > SHARED_BYTES:
            why = (
                f"a tensor of {value.nbytes:,} bytes, more than {SHARED_BYTES:,}, which is the most for all parameters together"
            )
        if why is not None:
            raise _cannot_keep(f"{name!r}{what}", why)
        found[name] = value
    return found


def write_optimizer_state(optimizer: torch.optim.Optimizer, state: OptimizerState, *, takes_over: bool = False) -> None:
    """Give the optimizer state that `read_optimizer_state` returned; tensors are copied to where the optimizer keeps them.
    `takes_over`: those with one element for each of the parameter's become its own; nobody else has them.

    A parameter that is missing starts without state, a group without its own entries. Raises `CheckpointError` for entries and
    attributes that no optimizer keeps as its state, which a file may name.
    """
    for each in optimizers_in(optimizer):
        with optimizer.taking_state(each) if isinstance(optimizer, SeveralOptimizers) else contextlib.nullcontext():
            _write_one(each, state, takes_over=takes_over)
    if (averages := averages_of(optimizer)) is not None:
        averages.load(state.averages, takes_over=takes_over)


def _write_one(optimizer: torch.optim.Optimizer, state: OptimizerState, *, takes_over: bool) -> None:
    """See `write_optimizer_state`; what is of one optimizer."""
    attributes = state.attributes.get(pattern_of_optimizer(optimizer), {})
    for name in attributes:
        if name in _NOT_ATTRIBUTES or name.startswith("__") or callable(getattr(type(optimizer), name, None)):
            raise _no_state(f"the attribute {name!r}")
    for group in optimizer.param_groups:
        counts_on_host = not (group.get("fused") or group.get("capturable"))  # as `Optimizer.load_state_dict` has it
        for name, parameter in zip(group["raypar_names"], group["params"], strict=True):
            if name in state.parameters:
                optimizer.state[parameter] = {
                    key: value.to(
                        "cpu" if key == "step" and counts_on_host else parameter.device,
                        copy=not (takes_over and value.dim() and value.shape == parameter.shape),
                    )
                    if isinstance(value, Tensor)
                    else value
                    for key, value in state.parameters[name].items()
                }
        for key, value in state.groups.get(group["raypar_pattern"], {}).items():
            if not _may_be_state(group, key):
                raise _no_state(f"{key!r} of the group {group['raypar_pattern']!r}")
            group[key] = value.clone() if isinstance(value, Tensor) else value
    for name, value in attributes.items():
        setattr(optimizer, name, value.clone() if isinstance(value, Tensor) else value)


# -- values ------------------------------------------------------------------------------------------------------------------


def why_not_kept(value: Any) -> str | None:
    """Why a value cannot be saved, as a noun (`a sparse tensor`); None for tensors and numbers that a file can hold."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        # A device's own class of tensors is none that the copy in host memory keeps.
        if type(value) not in (Tensor, nn.Parameter) and type(value.detach().to("cpu")) is not Tensor:
            return f"a tensor of the class {type(value).__name__}"
        if value.layout != torch.strided or value.is_meta:
            return f"a {'meta' if value.is_meta else 'sparse'} tensor"
        return None if dtype in DTYPES else f"a tensor of dtype {dtype}"
    if value is None or isinstance(value, (bool, float)):
        return None
    if isinstance(value, int):
        return None if abs(value) <= MAX_ELEMENTS else "an integer of more than 64 bits"
    return f"{with_article(type(value).__name__)}, neither tensor nor number"


def _entries(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The entries of a group that may be state of the optimizer."""
    return [(key, value) for key, value in group.items() if _may_be_state(group, key)]


def _may_be_state(group: Mapping[str, Any], key: object) -> bool:
    """Whether an entry of a group is not raypar's: neither its parameters nor what the job's lr_schedule sets in every step."""
    job_sets = key in group.get("raypar_scheduled", ()) or (key == "lr" and group.get("raypar_base_lr") is not None)
    return key != "params" and not str(key).startswith("raypar_") and not job_sets


def _attributes(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(optimizer).items() if name not in _NOT_ATTRIBUTES]


def _read_elsewhere(optimizer: torch.optim.Optimizer) -> dict[int, Content]:
    """`id` of what an attribute may lead to without keeping it: the optimizer, its state, its groups, its parameters."""
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {id(each): "of the optimizer" for each in (optimizer, optimizer.state, groups, *groups, *parameters)}


def _no_state(what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint has {what} as state of the optimizer, which is none", cure="use a checkpoint that raypar has written"
    )


def _cannot_keep(what: str, why: str) -> StateNotKeptError:
    return StateNotKeptError(
        f"{what} is {why}: it cannot be saved, or moved to another worker",
        cure=_CURE,
    )


_CURE = "use an optimizer whose state is tensors and numbers: in optimizer.state[p], in param_groups, or in attributes"
