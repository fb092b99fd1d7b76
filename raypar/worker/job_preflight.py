"""Checks a job before anything is started: names, data, shapes, the loss. Needs no cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from raypar.errors import ConfigError, ModelError, UserCodeError, with_article
from raypar.files.json_type import Json
from raypar.job import FunctionConfig, Job, LrScheduleConfig
from raypar.model.capture.module_graph import (
    buffers_written_in_capture,
    check_evaluation_calls_same_units,
    line_about_evaluation_mode,
    line_about_parameters_added_by_layer,
    line_about_synchronised_norms,
)
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import frozen_parameters, norms_with_running_statistics, parameter_shapes, shared_skeleton
from raypar.plan.wording import count_noun
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.check_capture_with_numbers import check_capture_with_numbers
from raypar.worker.check_cast_parameters import check_cast_parameters, line_about_cast_parameters
from raypar.worker.check_deterministic_kernels import check_deterministic_kernels
from raypar.worker.check_first_microbatches import check_first_microbatch, check_validation_sets
from raypar.worker.check_layer_shapes import check_layer_shapes
from raypar.worker.check_layers_with_numbers import check_layers_with_numbers
from raypar.worker.check_loss import line_about_mixed_samples
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.data.data_fingerprint import MODULE, VALIDATION, fingerprint_of_streams
from raypar.worker.data.padding import MASKED_LABEL
from raypar.worker.data.user_dataset import content_digest
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.make_worker_assignments import make_validation_batching
from raypar.worker.measure_profile import read_microbatches
from raypar.worker.metrics.metric_trial import try_metrics
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import cure_of_buffer_writes
from raypar.worker.stage.loss import make_loss_function
from raypar.worker.step.learning_rates import check_scheduler, is_scheduler
from raypar.worker.step.optimizer_and_parameter_groups import check_optimizer_groups, naming_optimizer
from raypar.worker.step.optimizer_trial import OptimizerTrial
from raypar.worker.trace_batch_shapes_ahead import trace_ladder, trace_ladders_of_validation
from raypar.worker.try_optimizer_of_job import try_optimizer_of_job


@dataclass(frozen=True)
class PreflightResult:
    """What `preflight` has found out about a job."""

    graph: Graph
    """The layer graph of the model."""
    job: Job
    """The job, with what was found out of its data: `data.streams` of iterable data."""
    samples: int
    """Number of training samples; 0 of iterable data."""
    data_digest: str | None
    """What the training data says of what it holds; None if it says nothing."""
    samples_of_sets: Mapping[str, int]
    """Validation set -> number of its samples; the name of one alone is empty. Empty without validation."""
    batch: Mapping[str, Tensor]
    """The first microbatch."""
    optimizer: OptimizerTrial | None = None
    """What a trial has found out about the optimizer; None if nothing is trained."""
    notes: tuple[str, ...] = ()
    """Lines for the user: what the initial values cost."""
    fingerprint: Mapping[str, Json] = field(default_factory=dict)
    """Digests of a few microbatches (`data_fingerprint.py`); empty for forward passes."""

    @property
    def validation_samples(self) -> int:
        """Number of samples of a validation pass; 0 without validation."""
        return sum(self.samples_of_sets.values())


TRAINS_NOTHING = (
    "no parameter of the model requires a gradient: the run trains nothing\n  cure: leave requires_grad on for those that are "
    "to be trained"
)


def preflight(spec: Job, now_checking: Callable[[str], None] = lambda what: None) -> PreflightResult:
    """Import every function, call the model function, read one microbatch and send it through the layers by shape.

    `now_checking`: gets what is checked next, in words, before users' code is called for it. Raises the `RayparError` that says
    what is wrong and how to cure it.
    """
    guard = TorchStateGuard(spec.threads)  # its lines are not shown: workers run the same code, and show theirs
    guard.establish()
    model = f"the model {spec.model.label}"
    _check_loss_and_optimizer(spec, guard, now_checking)
    now_checking(f"the data set {spec.data.label}")
    with guard.watching("the job's data"):
        spec, dataset, notes_about_streams = resolve_streams(spec)
    now_checking(model)
    with guard.watching("the job's code"):
        graph = make_layer_graph(spec, guard.watching)
    trial = _try_optimizer(spec, graph, guard, now_checking)
    _check_written_buffers(spec, graph)
    now_checking(f"the first microbatch of the data set {spec.data.label}")
    with guard.watching("the job's data"):
        samples = len(dataset) if spec.data.streams is None else 0
        names, measured, fingerprint = check_first_microbatch(spec, graph, dataset, guard)
    if spec.steps < 1:
        raise ConfigError(f"steps is {spec.steps}", cure="set steps >= 1")
    (batch,) = read_microbatches(spec, graph, [0])
    fingerprint = fingerprint or fingerprint_of_streams(spec, batch)
    now_checking(f"the layers of {model} and the loss {spec.loss.label}, with the first microbatch")
    with guard.watching("the job's layers"):
        mixed, not_compared = _check_layers(spec, graph, batch)
    now_checking("the validation data")
    with guard.watching("the job's data"):
        validation, of_sets = check_validation_sets(spec, graph, guard)
        fingerprint |= {VALIDATION: of_sets} if of_sets else {}
    if graph.module_digest and spec.forward_passes is None:
        fingerprint |= {MODULE: graph.module_digest}
    with guard.watching("the job's layers"):
        now_checking(f"the traces of {model}")
        of_lengths = _trace_ladders(spec, graph, validation)
    if spec.metrics:
        now_checking(f"the metrics {', '.join(spec.metrics)}")
    with guard.watching("the job's metrics"):
        of_metrics = try_metrics(spec, graph, validation, samples or spec.batch_size)
    of_values = graph.initial_values.notes if graph.initial_values is not None else ()
    if trial is None and parameter_shapes(graph):
        not_compared = (TRAINS_NOTHING,)
    of_data = _notes_about_data(spec, graph, names, measured, batch, samples)
    more = (
        line_about_cast_parameters(spec, graph),
        line_about_running_statistics(spec, graph),
        mixed,
        *of_lengths,
        *not_compared,
        line_about_parameters_added_by_layer(graph),
        line_about_evaluation_mode(graph),
        line_about_synchronised_norms(graph),
    )
    notes = (*of_values, *notes_about_streams, *of_data, *of_metrics, *(line for line in more if line is not None))
    return PreflightResult(graph, spec, samples, content_digest(dataset), validation, batch, trial, notes, fingerprint)


def _check_loss_and_optimizer(spec: Job, guard: TorchStateGuard, now_checking: Callable[[str], None]) -> None:
    """Import the functions of loss, optimizer and learning rates; call the function of the learning rates."""
    with guard.watching("the job's code"):
        now_checking(f"the loss {spec.loss.label}")
        make_loss_function(spec.loss)
        now_checking(f"the optimizer {spec.optimizer.label}")
        for each in spec.optimizer.each:
            with naming_optimizer(spec.optimizer, each):
                each.resolve()
        for scheduled in _schedules_of(spec):
            now_checking(f"the lr_schedule {scheduled.label}")
            if not is_scheduler(scheduled):
                _check_lr_schedule(scheduled)


def _schedules_of(spec: Job) -> list[LrScheduleConfig]:
    """The schedules of the job's learning rates, each once."""
    found: list[LrScheduleConfig] = []
    for each in spec.optimizer.each:
        ref = spec.schedule_of(each)
        if ref is not None and ref not in found:
            found.append(ref)
    return found


def _try_optimizer(
    spec: Job, graph: Graph, guard: TorchStateGuard, now_checking: Callable[[str], None]
) -> OptimizerTrial | None:
    """See `try_optimizer_of_job`; a scheduler of the learning rates is tried on it, too."""
    shapes, frozen = parameter_shapes(graph), frozen_parameters(graph)
    check_optimizer_groups(spec.optimizer, shapes, [name for name in shapes if name not in frozen])
    now_checking(f"the optimizer {spec.optimizer.label}, on small parameters")
    with guard.watching("the job's optimizer"):
        trial = try_optimizer_of_job(spec, graph)
    labels = ", ".join(ref.label for ref in _schedules_of(spec) if is_scheduler(ref))
    if trial is not None and labels:
        now_checking(f"the lr_schedule {labels}")
        with guard.watching(f"the lr_schedule {labels}"):
            check_scheduler(spec, graph, min(spec.steps, SCHEDULED_STEPS))
    return trial


def _check_layers(spec: Job, graph: Graph, batch: Mapping[str, Tensor]) -> tuple[str | None, tuple[str, ...]]:
    """Send the first microbatch through the layers. Returns the line about mixed samples, and about what was not compared."""
    values = check_layer_shapes(spec, graph, batch)
    if spec.device != "cpu" and spec.reduction == "canonical":
        check_deterministic_kernels(spec, graph, batch)
    mixed = line_about_mixed_samples(spec, graph, values, batch.get(spec.loss_target_name)) if values else None
    check_cast_parameters(spec, graph)
    not_compared = (*check_capture_with_numbers(spec, graph), *check_layers_with_numbers(spec, graph))
    if spec.validation is not None:
        check_evaluation_calls_same_units(graph, batch)
    return mixed, not_compared


def _trace_ladders(spec: Job, graph: Graph, validation: Mapping[str, int]) -> list[str]:
    """See `trace_ladder`; of training, and of validation sets of so many samples. Returns the lines for the user, each once."""
    lines = [trace_ladder(spec, graph, spec.batching, training=True)]
    if (batching := make_validation_batching(spec, validation)) is not None:
        lines += trace_ladders_of_validation(spec, graph, batching)
    return [line for line in dict.fromkeys(lines) if line is not None]


SCHEDULED_STEPS = 10_000
"""Through so many steps at most a scheduler is run before the job begins."""
MANY_SAMPLES = 10**7
"""Data sets with more samples are told of `data.shuffle: indexed`."""


def _notes_about_data(
    spec: Job,
    graph: Graph,
    names: Sequence[str],
    measured: Sequence[str] | None,
    batch: Mapping[str, Tensor],
    samples: int,
) -> list[str]:
    """Warnings about the data: batches larger than the data set, fields that nobody reads, masked labels.

    Masked labels matter to a model that takes the mean over the others. `names`, `measured`: all fields, and those that
    metrics get; `samples`: the size of a map-style data set.
    """
    lines, target = [], spec.loss_target_name
    if samples and spec.batch_size > samples:
        lines.append(
            f"batch_size is {spec.batch_size}, and the data set has {count_noun(samples, 'sample')}: each step takes "
            f"some of them more than once, as if it were repeated\n  cure: set batch_size <= {samples}, or give more data"
        )
    if samples > MANY_SAMPLES and spec.data.shuffle is True and not spec.data.names_ids:
        lines.append(
            f"the data set has {samples:,} samples, whose order is a list that every worker makes in each epoch: "
            f"about {samples * 78e-9:.1f} s and {samples * 8 / 2**20:,.0f} MiB\n  cure: set data.shuffle: indexed, which "
            "computes each entry by itself (another order, so other results)"
        )
    read = {*graph.batch_fields, *spec.loss_fields}
    unread = [name for name in names if name not in read and name not in (measured or ())]
    if unread and read <= set(names):  # else by another name: those of a named tuple, x, y
        nobody = (
            "neither the model nor the loss reads" if measured is None else "neither the model, the loss nor a metric reads"
        )
        lines.append(f"{nobody} these fields of the samples: {', '.join(unread)}")
    labels = batch.get(target)
    weighs_samples = spec.loss.is_loss_of_model and spec.loss.count is None
    if weighs_samples and labels is not None and bool((labels == MASKED_LABEL).any()):
        lines.append(
            f"loss: model, and some of {target} are {MASKED_LABEL} (masked): the model takes the mean over the others in each "
            "microbatch, so tokens of microbatches with fewer of them weigh more\n  cure: set loss: {function: model, count: "
            "labels} for the mean over all labels of a step; or count: shifted_labels if the model compares each token with "
            "the next one"
        )
    return lines


def line_about_running_statistics(spec: Job, graph: Graph) -> str | None:
    """A line for the user where norms keep running statistics on GPUs, whose last bits may be others than a plain loop's."""
    for layer in graph.layers if spec.device != "cpu" else ():
        for path, norm in norms_with_running_statistics(shared_skeleton(layer)):
            return (
                f"the running statistics of {layer.qualify(path)} ({type(norm).__name__}) and other norms are alike under "
                "every plan, but may differ by rounding from those of a plain loop, whose kernel may round otherwise\n"
                "  they are used in evaluation only: training has the bits of one process"
            )
    return None


def _check_written_buffers(spec: Job, graph: Graph) -> None:
    """Raise `ModelError` for a captured model whose forward writes a buffer, if the job does not say what becomes of it."""
    written = sorted(buffers_written_in_capture(graph)) if spec.model.buffers == "refuse" else []
    if written:
        more = f" (and {len(written) - 1} more)" if len(written) > 1 else ""
        raise ModelError(
            f"the model's forward writes its buffer {written[0]!r}{more}: replicas would no longer be equal",
            cure=cure_of_buffer_writes(training=True),
        )


def _check_lr_schedule(ref: LrScheduleConfig) -> None:
    """Raises `UserCodeError` if the lr_schedule cannot be called with a step, `ConfigError` if it returns no number, and for a
    metric, which no function of the step gets."""
    if ref.metric is not None:
        raise ConfigError(
            f"lr_schedule.metric is {ref.metric}, and {ref.label} is a function of the step, which gets no metric",
            cure="leave metric out, or give torch.optim.lr_scheduler:ReduceLROnPlateau or a function of the optimizer that "
            "makes such a scheduler",
        )
    schedule = ref.partial()
    try:
        factor = schedule(0)
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        raise UserCodeError(
            f"lr_schedule {ref.label}, called with step 0, raised {error_text(error)}",
            cure="give a function of the step that returns the factor on the learning rates",
        ) from error
    try:
        float(factor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"lr_schedule {ref.label}, called with step 0, returned {with_article(type(factor).__name__)}",
            cure="return a number, the factor on the learning rates",
        ) from error


def find_sibling_function(ref: FunctionConfig, name: str) -> Callable[..., Any] | None:
    """The function `name` of the module that `ref` comes from, or None: `generate` beside the model's function."""
    module = sys.modules.get(getattr(ref.resolve(), "__module__", ""))
    found = getattr(module, name, None)
    return found if callable(found) else None
