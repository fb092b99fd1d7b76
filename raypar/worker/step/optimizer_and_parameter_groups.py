"""Optimizers by name: any `torch.optim` class without closure, one or several, with parameters chosen by name patterns."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from raypar.errors import ConfigError, UserCodeError, error_message
from raypar.job import AverageConfig, OptimizerConfig, OptimizerEntry, SingleOptimizerConfig
from raypar.job.function_section import ALL_PARAMETERS
from raypar.torch_compat.avoid_dynamo_import import without_dynamo
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.step.optimizer_state import GIVEN, OptimizerSettingsWhenMade
from raypar.worker.step.several_optimizers import SeveralOptimizers
from raypar.worker.step.weight_averages import WeightAverages


def optimizer_group_of(spec: SingleOptimizerConfig, name: str) -> int:
    """Index of the first group whose pattern matches; the last, unnamed group otherwise."""
    return next((i for i, group in enumerate(spec.groups) if fnmatch.fnmatchcase(name, group["match"])), len(spec.groups))


def optimizer_entry_of(spec: OptimizerConfig, name: str) -> SingleOptimizerConfig | None:
    """The first optimizer whose pattern matches a parameter's name; None: none of several does."""
    return next((each for each in spec.each if _matches(each, name)), None)


def _matches(spec: SingleOptimizerConfig, name: str) -> bool:
    return fnmatch.fnmatchcase(name, spec.pattern_of_all)


@contextlib.contextmanager
def naming_optimizer(spec: OptimizerConfig, one: SingleOptimizerConfig) -> Iterator[None]:
    """Has errors about one of several optimizers begin with its key in the job."""
    try:
        yield
    except (ConfigError, UserCodeError) as error:
        if not spec.entries:
            raise
        raise type(error)(f"{spec.key_of(one)}: {error.what}", cure=error.cure) from error


def names_by_entry(spec: OptimizerConfig, names: Iterable[str]) -> list[tuple[SingleOptimizerConfig, list[str]]]:
    """(optimizer, the parameters that it trains) of each, in the job's order. Raises `ConfigError` for one that none trains."""
    found: list[tuple[SingleOptimizerConfig, list[str]]] = [(each, []) for each in spec.each]
    left = []
    for name in names:
        entry = optimizer_entry_of(spec, name)
        if entry is None:
            left.append(name)
        else:
            next(of_entry for each, of_entry in found if each is entry).append(name)
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise ConfigError(
            f"no optimizer trains {shown}: none of the patterns {', '.join(repr(each.pattern_of_all) for each in spec.each)} "
            "matches",
            cure='add an optimizer for the rest as the last one: {match: "*", function: torch.optim:AdamW, args: {...}}; what '
            "is not to be trained needs requires_grad_(False)",
        )
    return found


def check_optimizer_groups(spec: OptimizerConfig, names: Iterable[str], trained: Iterable[str] = ()) -> None:
    """Raises `ConfigError` for a pattern, of a group or of one of several optimizers, that matches no parameter of the whole
    model, and for a trained one that no optimizer trains."""
    names = list(names)
    matched = {id(each): [n for n in names if optimizer_entry_of(spec, n) is each] for each in spec.each}
    for each in spec.each:
        if spec.entries and not matched[id(each)]:
            earlier = {id(entry): entry for n in names if _matches(each, n) if (entry := optimizer_entry_of(spec, n))}
            only = f"only parameters of {' and '.join(map(spec.key_of, earlier.values()))}"
            raise ConfigError(
                f"optimizer pattern {each.pattern_of_all!r} ({spec.key_of(each).partition(' ')[0]}, {each.label}) matches "
                f"{only if earlier else f'none of the {len(names)} parameters'}",
                cure="patterns are shell-style and match qualified names such as "
                f"{', '.join(names[:4])}; the first that matches counts",
            )
        for pattern, _ in each.options_by_pattern:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in matched[id(each)]):
                of = f" of {each.pattern_of_all!r}, {spec.key_of(each).partition(' ')[0]}" if spec.entries else ""
                raise ConfigError(
                    f"optimizer group pattern {pattern!r} matches none of the {len(matched[id(each)])} parameters{of}",
                    cure=f"patterns are shell-style and match qualified names such as {', '.join(matched[id(each)][:4])}",
                )
    names_by_entry(spec, trained)


def _is_number_in_quotes(value: Any) -> bool:
    """Whether `value` is text that reads as a number, such as "3e-4" in quotes."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


def build_optimizers(
    spec: OptimizerConfig,
    parameters: Mapping[str, nn.Parameter],
    names: Mapping[str, str] = MappingProxyType({}),
    average: AverageConfig | None = None,
) -> torch.optim.Optimizer:
    """The job's optimizer over `parameters`, as `build_optimizer` makes it; several, and averages beside it, are one."""
    averages = WeightAverages(average, parameters) if average is not None else None
    made = [build_optimizer(each, own, names) for each, own in parameters_by_optimizer(spec, parameters, names)]
    return made[0] if len(made) == 1 and averages is None else SeveralOptimizers(made, averages)


def parameters_by_optimizer(
    spec: OptimizerConfig, parameters: Mapping[str, nn.Parameter], names: Mapping[str, str]
) -> list[tuple[SingleOptimizerConfig, Mapping[str, nn.Parameter]]]:
    """(optimizer of the job, what it gets of `parameters`), of those that get any. `names`: as in `build_optimizer`."""
    if not spec.entries:
        return [(spec, parameters)]
    trained = [key for key, parameter in parameters.items() if parameter.requires_grad]
    of_names = names_by_entry(spec, dict.fromkeys(names.get(key, key) for key in trained))
    mine = [(each, {key: parameters[key] for key in trained if names.get(key, key) in own}) for each, own in of_names]
    return [(each, own) for each, own in mine if own]


def build_optimizer(
    spec: SingleOptimizerConfig, parameters: Mapping[str, nn.Parameter], names: Mapping[str, str] = MappingProxyType({})
) -> torch.optim.Optimizer:
    """One optimizer over `parameters` (qualified name -> parameter, in layer order), in training mode; without frozen ones.

    `names`: key in `parameters` -> qualified name, which patterns of groups match, where a key is none: of a run of elements.

    Raises `ConfigError` for something that is no optimizer, needs a closure, or does not take the arguments given.
    """
    made = spec.resolve()
    if _needs_closure(made):
        raise ConfigError(
            f"{spec.label} evaluates the loss several times a step (a closure)",
            cure="use an optimizer without closure",
        )
    for kind in _optimizer_classes(made):
        without_dynamo(kind)
    groups = _parameter_groups(spec, parameters, names)
    optimizer = _make_optimizer(spec, made, groups)
    for pattern, overrides in spec.options_by_pattern:
        unknown = sorted(set(overrides) - set(optimizer.defaults))
        if unknown:  # torch would keep it in the group and never read it
            raise ConfigError(
                f"optimizer group {pattern!r} sets {unknown[0]!r}, which {spec.label} does not know",
                cure=f"it knows {', '.join(sorted(optimizer.defaults))}",
            )
    for group, made_group in zip(groups, optimizer.param_groups, strict=True):
        made_group["raypar_names"], made_group["raypar_pattern"] = group["names"], group["pattern"]
        lr = made_group.get("lr")
        made_group["raypar_base_lr"] = None if lr is None else float(lr)
        if isinstance(lr, Tensor):
            made_group["lr"] = lr.clone()  # `set_learning_rate` writes into it, and the same tensor may be in `defaults`
    setattr(optimizer, GIVEN, OptimizerSettingsWhenMade.of(optimizer))
    return optimizer


def _parameter_groups(
    spec: SingleOptimizerConfig, parameters: Mapping[str, nn.Parameter], names: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The groups of the job that have trained parameters: the job's options, `params`, their `names`, the group's `pattern`."""
    groups: list[dict[str, Any]] = [
        {**overrides, "params": [], "names": [], "pattern": spec.pattern_of_group(pattern)}
        for pattern, overrides in (*spec.options_by_pattern, (ALL_PARAMETERS, {}))
    ]
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            group = groups[optimizer_group_of(spec, names.get(name, name))]
            group["params"].append(parameter)
            group["names"].append(name)
    return [group for group in groups if group["params"]]


def _make_optimizer(
    spec: SingleOptimizerConfig, make: Callable[..., Any], groups: Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer that `make` returns for the groups, in training mode. Raises what `build_optimizer` does."""
    try:
        optimizer = make(
            [{key: value for key, value in group.items() if key not in ("names", "pattern")} for group in groups],
            **spec.args,
        )
        if callable(train := getattr(optimizer, "train", None)):  # those that average weights have two modes
            train()
    except (TypeError, ValueError) as error:
        given = {name: value for args in (spec.args, *dict(spec.options_by_pattern).values()) for name, value in args.items()}
        texts = [name for name, value in given.items() if _is_number_in_quotes(value)]
        raise ConfigError(
            f"optimizer {spec.label} refused its arguments: {error_message(error)}",
            cure=f"{texts[0]} is the text {given[texts[0]]!r}: write the number without quotes"
            if texts
            else f"its pattern {spec.match!r} may match parameters that it does not take: let an optimizer before it in the "
            "list train these (the first match wins), or compare its args with the signature"
            if isinstance(spec, OptimizerEntry)
            else "compare optimizer.args and optimizer.groups with the signature; it is called with the parameters: "
            "optimizer=(torch.optim.AdamW, {...}), or lambda parameters: torch.optim.AdamW(parameters, ...)",
        ) from error
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        raise UserCodeError(
            f"optimizer {spec.label} raised {error_text(error)}\n{traceback.format_exc()}",
            cure="make it by itself with optimizer.args",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{spec.label} made a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            cure="name a class such as torch.optim:AdamW",
        )
    return optimizer


def _optimizer_classes(made: Any) -> list[type[torch.optim.Optimizer]]:
    """The optimizer class that `made` is, or whose arguments it holds; else, as nobody knows, those of PyTorch."""
    if isinstance(made, partial):
        return _optimizer_classes(made.func)
    among = [made] if isinstance(made, type) else list(vars(torch.optim).values())
    return [kind for kind in among if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)]


def _needs_closure(made: Any) -> bool:
    """LBFGS, and classes whose `step` cannot be called without one."""
    if not isinstance(made, type) or not issubclass(made, torch.optim.Optimizer):
        return False
    closure = inspect.signature(made.step).parameters.get("closure")
    return issubclass(made, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to its base lr times `factor`; a group without one finds its own."""
    for group in optimizer.param_groups:
        base = group["raypar_base_lr"]
        if isinstance(group.get("lr"), Tensor):
            group["lr"].fill_(base * factor)  # as PyTorch's schedulers do: some optimizers want the tensor that they were given
        elif base is not None:
            group["lr"] = base * factor


def read_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float | None:
    """The learning rate of parameters in no group of their own, at this factor; None for an optimizer without one."""
    base = getattr(optimizer, "defaults", {}).get("lr")
    try:
        return None if base is None else float(base) * factor
    except (TypeError, ValueError):
        return None
