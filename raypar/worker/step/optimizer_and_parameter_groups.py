"""Optimizers by name: any `torch.optim` class that needs no closure, with parameter groups chosen by name patterns."""

from __future__ import annotations

import fnmatch
import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypar.errors import ConfigError, PlanError, UserCodeError, error_message
from raypar.job import OptimizerConfig
from raypar.plan.pieces import Piece
from raypar.torch_compat.avoid_dynamo_import import without_dynamo
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.checkpoint.manifest import ALL_PARAMETERS
from raypar.worker.step.optimizer_state import GIVEN, OptimizerSettingsWhenMade


def optimizer_group_of(spec: OptimizerConfig, name: str) -> int:
    """Index of the first group whose pattern matches; the last, unnamed group otherwise."""
    return next((i for i, group in enumerate(spec.groups) if fnmatch.fnmatchcase(name, group["match"])), len(spec.groups))


def check_optimizer_groups(spec: OptimizerConfig, names: Iterable[str]) -> None:
    """Raises `ConfigError` for a group whose pattern matches no parameter of the whole model."""
    names = list(names)
    for pattern, _ in spec.options_by_pattern:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"optimizer group pattern {pattern!r} matches none of the {len(names)} parameters",
                cure=f"patterns are shell-style and match qualified names such as {', '.join(names[:4])}",
            )


def _is_number_in_quotes(value: Any) -> bool:
    """Whether `value` is text that reads as a number, such as "3e-4" in quotes."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


def select_owned_parameters(parameters: Mapping[str, nn.Parameter], pieces: Iterable[Piece]) -> dict[str, nn.Parameter]:
    """The trained ones of a stage's `parameters`, in their order: those whose optimizer state this rank keeps, and empty ones.

    `pieces`: what it keeps of optimizer state (`Ownership.pieces`), of other stages too. Of each trained parameter they must be
    all elements that are here, because an optimizer steps whole tensors; raises `PlanError` where they are not.
    """
    kept: Counter[str] = Counter()
    for piece in pieces:
        kept[piece.name] += piece.size
    for name, parameter in parameters.items():
        trained = parameter.numel() if parameter.requires_grad else 0
        if kept[name] != trained:
            raise PlanError(
                f"{name}: the optimizer would train {trained} elements, but this rank keeps optimizer state of {kept[name]}",
                cure="report this",
            )
    return {name: p for name, p in parameters.items() if kept[name] or (p.requires_grad and not p.numel())}


def build_optimizer(spec: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """One optimizer over `parameters` (qualified name -> parameter, in layer order), in training mode; without frozen ones.

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
    groups = _parameter_groups(spec, parameters)
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


def _parameter_groups(spec: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """The groups of the job that have trained parameters: the job's options, `params`, their `names`, the group's `pattern`."""
    groups: list[dict[str, Any]] = [
        {**overrides, "params": [], "names": [], "pattern": pattern}
        for pattern, overrides in (*spec.options_by_pattern, (ALL_PARAMETERS, {}))
    ]
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            group = groups[optimizer_group_of(spec, name)]
            group["params"].append(parameter)
            group["names"].append(name)
    return [group for group in groups if group["params"]]


def _make_optimizer(spec: OptimizerConfig, make: Callable[..., Any], groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
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
