"""Tries a job's metrics before the run, on microbatches of its validation that the model with its initial values computes.

What is found: code that raises; a function that returns a mean, which would be added up; an object whose merged states give
another value than one object that takes the microbatches one after the other.
"""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from raypar.comm.buffer_pool import CPU
from raypar.errors import ConfigError, UserCodeError
from raypar.files.printable_text import shorten
from raypar.job import Job, ValidationConfig
from raypar.model.graph import Graph, ModelOutput
from raypar.model.random_state import preserve_random_state
from raypar.plan import ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.metrics.all_predictions import PredictionsMetric
from raypar.worker.metrics.function_trial import Measured, not_tried, numbers_of, refuse_means
from raypar.worker.metrics.metric import Batch, FunctionMetric, Metric, ObjectMetric, values_by_name
from raypar.worker.metrics.metric_state import MetricValue, State
from raypar.worker.metrics.object_trial import difference_of_merged
from raypar.worker.plain_microbatches import MICROBATCHES, NotCompared, refuse_large_models, with_few_microbatches
from raypar.worker.process.seed_generators import make_seeder
from raypar.worker.run_in_one_process import OneProcessRun


class _Recorded:
    """A metric that keeps what it is given."""

    def __init__(self, metric: Metric) -> None:
        self.metric, self.name, self.needs_batch = metric, metric.name, metric.needs_batch
        self.part, self.in_training = metric.part, metric.in_training
        self.given: list[Measured] = []
        self.states: list[State] = []

    def measure(self, output: ModelOutput, batch: Batch, target: Tensor) -> State:
        self.given.append(Measured(output, batch, target))
        self.states.append(self.metric.measure(output, batch, target))
        return self.states[-1]

    merges_by_user = False

    def merge(self, before: State, state: State) -> State:
        return before  # merging is tried afterwards

    def pack(self, states: Sequence[State]) -> list[State]:
        return self.metric.pack(states)

    def compute(self, state: State) -> MetricValue:
        return 0.0


def try_metrics(spec: Job, graph: Graph, validation: Mapping[str, int], samples: int) -> tuple[str, ...]:
    """Lines for the user about metrics that are not exact, or could not be tried. `validation`: validation set -> number of its
    samples; `samples`: number of samples of training that there are at least.

    Raises `ConfigError` for a metric that would give another value than one process with one object, and what metrics raise.
    """
    if not spec.metrics:
        return ()
    try:
        refuse_large_models(spec, graph)
    except NotCompared as found:
        names = ", ".join(spec.metrics)
        return (
            f"the metrics ({names}) were not tried before the run: {found}; what is wrong with them the first validation says",
        )
    with preserve_random_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first validation shows them
        recorded, counts = _record(spec, graph, next(iter(validation.values()), samples)), spec.samples_of_metrics(validation)
        lines = [_check(one, counts[name], spec) for name, one in recorded.items()]
    return tuple(line for line in lines if line is not None)


def _record(spec: Job, graph: Graph, samples: int) -> dict[str, _Recorded]:
    """Each metric with what it was given of at most `MICROBATCHES` microbatches, and measured; of the first validation set, or
    of training. `samples`: those of it."""
    size, data = -(-spec.batch_size // spec.microbatches), spec.training_data
    keys = [name for name in ValidationConfig.model_fields if name in type(data).model_fields]
    first = next(iter(spec.validation_sets.values()), data)
    given = {name: getattr(first, name) for name in keys}
    tried = ValidationConfig.model_construct(**given, samples=min(samples, MICROBATCHES * size)).replace(processes=0)
    few = with_few_microbatches(spec, 1).replace(batch_size=size, validation=tried, metrics=spec.metrics)
    with OneProcessRun(few, ParallelPlan.mesh(layers=len(graph.layers)), "1f1b", graph=graph) as run:
        measuring = run.cores[0].stages[0, 0].metrics
        assert measuring is not None
        recorded = {name: _Recorded(metric) for name, metric in measuring.metrics.items()}
        measuring.metrics.update(recorded)
        run.validate(0)
    return recorded


def _check(one: _Recorded, samples: int, spec: Job) -> str | None:
    """A line for the user, if there is something to be said. Raises `ConfigError`. `samples`: those that it measures in a
    validation."""
    metric = one.metric
    if isinstance(metric, PredictionsMetric):
        return _call_with_few_predictions(metric, one.states, samples)
    if isinstance(metric, FunctionMetric):
        _refuse_two_values(metric.name, lambda: [numbers_of(part) for part in metric.parts(metric.measure(*one.given[0]))])
        tried = [refuse_means(metric, given) for given in one.given]
        if not any(tried):
            return not_tried(metric)
    if isinstance(metric, ObjectMetric):
        return _compare_with_one_object(metric, one, spec)
    return None


# -- functions ---------------------------------------------------------------------------------------------------------------


def _refuse_two_values(name: str, call: Callable[[], list[list[float]] | dict[str, float]]) -> None:
    """Raises `ConfigError` if a function, called twice in the same way, returns two values."""
    found = []
    for _ in range(2):
        with preserve_random_state():  # both calls begin with the same state of the generators
            found.append(call())
    if repr(found[0]) != repr(found[1]):  # NaN is as NaN
        raise ConfigError(
            f"metric {name!r}, called twice with the same output under the same seed, returned {shorten(found[0])} and "
            f"{shorten(found[1])}",
            cure="let it depend on what it is given and the seeded generators of python, numpy and torch alone: no generator "
            "of its own, no counter, no clock",
        )


# -- of all predictions ------------------------------------------------------------------------------------------------------

_OF_CODE = (TypeError, AttributeError, NameError, ImportError, LookupError)
"""Errors that a function raises for any number of samples."""


def _call_with_few_predictions(metric: PredictionsMetric, states: Sequence[State], samples: int) -> str | None:
    """A line for the user, if the function raised what may be because it got few samples. Raises `ConfigError`."""
    try:
        metric.refuse_too_many(states[0], samples)
        few = pickle.dumps(metric.pack(states))

        def compute() -> dict[str, float]:
            return values_by_name(metric.name, metric.compute(functools.reduce(metric.merge, pickle.loads(few))))

        _refuse_two_values(metric.name, compute)
    except ConfigError:
        raise
    except UserCodeError as error:
        raise ConfigError(error.what, error.cure) from error
    except _OF_CODE as error:
        raise ConfigError(
            f"metric {metric.name!r} raised {error_text(error)}",
            cure="it is called with one object that has predictions and label_ids, arrays of NumPy, and returns a dict",
        ) from error
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        return (
            f"metric {metric.name!r} raised {error_text(error)} for the predictions of the first microbatches; whether it does "
            "so for those of all samples the first validation says"
        )
    return None


# -- objects -----------------------------------------------------------------------------------------------------------------


def _compare_with_one_object(metric: ObjectMetric, one: _Recorded, spec: Job) -> str | None:
    """A line for the user about a metric that is not exact and may be so. Raises `ConfigError` for one that may not."""
    in_order, seed_generators = metric.new(), make_seeder(CPU)
    for microbatch, given in enumerate(one.given):
        seed_generators(seed_of(spec.seed, "metric", microbatch, metric.name))  # as each microbatch was measured
        in_order.update(given.output, given.target)
    found = difference_of_merged(metric, in_order, one.states)
    if found is None:
        return None
    name, difference = found
    if spec.metrics[metric.name].exact:
        raise ConfigError(
            f"metric {name!r} would depend on how states are merged: {difference}",
            cure=f"take another metric, or accept the difference with metrics.{metric.name}.exact: false",
        )
    return f"metric {name!r} is not exact: {difference}"
