"""Compares merged states of an object that measures, as if each came from another worker, with one updated in order."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Sequence

import torch
from torch import Tensor

from raypar.errors import ConfigError
from raypar.model.capture.tensors_in_values import flatten
from raypar.model.graph import ModelOutput
from raypar.model.random_state import preserve_random_state
from raypar.torch_compat.pytree import tree_unflatten
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.metrics.metric import Batch, ObjectMetric, values_by_name
from raypar.worker.metrics.metric_state import MetricObject, State


def difference_of_merged(metric: ObjectMetric, in_order: MetricObject, states: Sequence[State]) -> tuple[str, str] | None:
    """(the name of a value, in words how it differs) where merged states give another value than `in_order`, which has taken
    the same microbatches one after the other; None without a difference. Raises `ConfigError` if they cannot be merged."""
    wanted, count = values_by_name(metric.name, in_order.compute()), len(states)
    try:
        sent: list[State] = pickle.loads(pickle.dumps(metric.pack(states)))  # as if each came from another worker
        merged = values_by_name(metric.name, metric.compute(functools.reduce(metric.merge, sent)))
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        raise ConfigError(
            f"metric {metric.name!r}: the states of {count} microbatches cannot be merged: {error_text(error)}",
            cure="take another metric, or give the object a merge_state of its own, or a function that returns (sum, count)",
        ) from error
    name = next((name for name in wanted if not _same_bits(wanted[name], merged.get(name))), None)
    if name is None:
        return None
    given = f"of {count} microbatches merged states give {merged.get(name)!r}"
    return name, f"{given}, and one object updated in order {wanted[name]!r}"


class ObjectTrialInValidation:
    """The comparison of a worker's first microbatches, in host memory, for a model too large for the trial before the run."""

    def __init__(self, metric: ObjectMetric, microbatches: int) -> None:
        self._metric, self._left = metric, microbatches
        self._in_order = metric.new()
        self._states: list[bytes] = []

    def add(self, output: ModelOutput, batch: Batch, target: Tensor) -> str | None:
        """Take the next microbatch. A warning where something differs, or could not be tried; then the trial is over."""
        if not self._left:
            return None
        self._left -= 1
        name = self._metric.name
        try:
            with preserve_random_state(), torch.no_grad():
                found = self._compare(output, target)
        except ConfigError as error:
            what = error.what
        except USER_CODE_ERRORS as error:  # such as a value that few samples do not have
            reraise_ctrl_c(error)
            what = f"whether states of metric {name!r} merge right could not be tried with few samples ({error_text(error)})"
        else:
            if found is None:
                if not self._left:
                    self._forget()
                return None
            what = f"metric {found[0]!r} depends on how states are merged: {found[1]}"
        self._left = 0
        self._forget()
        return (
            f"{what}\n  cure: its value may depend on the plan: take another metric, give its object attributes that can be "
            f"pickled one by one, or accept this with metrics.{name}.exact: false"
        )

    def _forget(self) -> None:
        """States may hold all outputs of their microbatches."""
        self._in_order, self._states = self._metric.new(), []

    def _compare(self, output: ModelOutput, target: Tensor) -> tuple[str, str] | None:
        leaves, structure = flatten(output)
        host = tree_unflatten([leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
        with preserve_random_state():  # the update draws what the measurement has drawn
            self._states.append(pickle.dumps(self._metric.pack([self._metric.measure(host, {}, target.cpu())])))
        self._in_order.update(host, target.cpu())
        states: list[State] = [state for each in self._states for state in pickle.loads(each)]
        return difference_of_merged(self._metric, copy.deepcopy(self._in_order), states)


def _same_bits(a: float, b: float | None) -> bool:
    """Whether two numbers are the same; NaN is as NaN."""
    return b is not None and (a == b or (math.isnan(a) and math.isnan(b)))
