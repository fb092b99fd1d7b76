"""Tries a job's optimizers before a run; one of PyTorch's own once in a process."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from raypar.job import Job, SingleOptimizerConfig
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import frozen_parameters, parameter_shapes
from raypar.worker.layer_precisions import dtype_of_job
from raypar.worker.step.optimizer_and_parameter_groups import names_by_entry, naming_optimizer
from raypar.worker.step.optimizer_trial import OptimizerTrial, join_trials, try_optimizer

_TRIALS: dict[tuple[Hashable, ...], OptimizerTrial] = {}
"""Results of the last trials of PyTorch's own optimizers in this process; see `_try_once`."""
TRIALS_KEPT = 64
"""At most so many are kept."""


def try_optimizer_of_job(spec: Job, graph: Graph) -> OptimizerTrial | None:
    """What trials find out about the job's optimizers (`try_optimizer`); None if the model has nothing to train."""
    frozen, dtype = frozen_parameters(graph), dtype_of_job(spec)
    shapes = {name: tuple(shape) for name, shape in parameter_shapes(graph).items() if name not in frozen and shape.numel()}
    trials = []
    for entry, names in names_by_entry(spec.optimizer, shapes):
        if names:
            with naming_optimizer(spec.optimizer, entry):
                trials.append(_try_once(entry, {name: shapes[name] for name in names}, dtype))
    return join_trials(trials) if trials else None


def _try_once(optimizer: SingleOptimizerConfig, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> OptimizerTrial:
    """What a trial of one optimizer finds out.

    One of PyTorch's own optimizers does the same each time: it is not tried again for the same arguments and shapes, unless
    somebody has replaced one of its methods or defaults.
    """
    function = optimizer.resolve()
    try:
        arguments = json.dumps([optimizer.args, optimizer.groups, optimizer.pattern_of_group("")])
    except (TypeError, ValueError):  # a tensor as learning rate, a function, ...
        return try_optimizer(optimizer, shapes, dtype)
    if not any(function is known for known in vars(torch.optim).values()):
        return try_optimizer(optimizer, shapes, dtype)
    known = (function, optimizer.label, arguments, tuple(shapes.items()), dtype)
    found = _TRIALS.get((*known, _code_of_class(function)))
    if found is None:
        found = try_optimizer(optimizer, shapes, dtype)
        while len(_TRIALS) >= TRIALS_KEPT:
            del _TRIALS[next(iter(_TRIALS))]
        # PyTorch itself wraps methods of a class when the first of its optimizers is made: they are looked at after the trial.
        _TRIALS[(*known, _code_of_class(function))] = found
    return found


def _code_of_class(kind: Callable[..., Any]) -> tuple[Hashable, ...]:
    """The functions of a class and of those that it is derived from, and its arguments' defaults."""
    functions = (part for base in getattr(kind, "__mro__", ()) for part in vars(base).values() if inspect.isroutine(part))
    return str(inspect.signature(kind)), *functions
