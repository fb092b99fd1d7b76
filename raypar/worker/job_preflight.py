"""Checks a job before anything is started: names, data, shapes, the loss. Needs no cluster."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypar.errors import (
    ConfigError,
    DataError,
    InputError,
    ModelError,
    PlanError,
    RayparError,
    UserCodeError,
    error_message,
    with_article,
)
from raypar.files.json_type import Json
from raypar.job import FunctionConfig, Job, LrScheduleConfig, SingleOptimizerConfig
from raypar.model.capture.module_graph import (
    buffers_written_in_capture,
    captured_outputs_on_meta,
    check_evaluation_calls_same_units,
    fields_without_target,
    line_about_evaluation_mode,
    line_about_parameters_added_by_layer,
    line_about_synchronised_norms,
)
from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import (
    build_on_meta,
    convert_module_dtype,
    frozen_parameters,
    norms_with_running_statistics,
    parameter_shapes,
    shared_skeleton,
)
from raypar.model.random_state import preserve_random_state
from raypar.model.rounded_parameters import as_layers_read, as_loss_reads, round_parameters_of
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.infer_styles_by_structure import has_inferred_structure
from raypar.model.tensor_parallel.meta_check import check_shards_on_meta
from raypar.model.tensor_parallel.styles.linear_styles import ExpertsStyle
from raypar.plan import ParallelPlan
from raypar.plan.wording import count_noun
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, cure_for_known_error, error_text
from raypar.worker.check_capture_with_numbers import check_capture_with_numbers
from raypar.worker.check_cast_parameters import check_cast_parameters, line_about_cast_parameters
from raypar.worker.check_deterministic_kernels import check_deterministic_kernels
from raypar.worker.check_layers_with_numbers import check_layers_with_numbers, check_shards_with_numbers
from raypar.worker.check_loss import (
    MOST_LOSS_NUMBERS,
    check_sum_and_count,
    check_weighted_losses,
    line_about_mixed_samples,
    random_output,
)
from raypar.worker.check_samples_on_shards import check_samples_of_validation, check_samples_suffice
from raypar.worker.data.check_and_count_streams import key_of_set, resolve_streams
from raypar.worker.data.data_fingerprint import (
    MODULE,
    VALIDATION,
    fingerprint_of_samples,
    fingerprint_of_streams,
    fingerprint_of_validation_set,
)
from raypar.worker.data.packing import require_boundaries
from raypar.worker.data.padding import MASKED_LABEL
from raypar.worker.data.sample_order import SampleOrder, SamplePosition
from raypar.worker.data.sample_reader import WHERE_FIELDS_ARE_NAMED, SampleReader
from raypar.worker.data.sampler_weights_group_by import refuse_chance
from raypar.worker.data.stream_loader import FirstSamples, first_samples
from raypar.worker.data.user_dataset import MapStyleDataset, content_digest, make_dataset
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.layer_precisions import autocast_of, parameter_dtype_of
from raypar.worker.make_worker_assignments import batching_of_set, make_validation_batching
from raypar.worker.measure_profile import read_microbatches
from raypar.worker.metrics.metric import make_metrics
from raypar.worker.metrics.metric_trial import try_metrics
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import cure_of_buffer_writes, refuse_input_writes
from raypar.worker.stage.loss import make_loss_function
from raypar.worker.step.learning_rates import check_scheduler, is_scheduler
from raypar.worker.step.optimizer_and_parameter_groups import check_optimizer_groups, names_by_entry, naming_optimizer
from raypar.worker.step.optimizer_trial import OptimizerTrial, join_trials, try_optimizer
from raypar.worker.trace_batch_shapes_ahead import trace_ladder, trace_ladders_of_validation


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


SAMPLES_READ_TWICE = 2
"""So many samples of each data set are read twice before a run."""
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
        names, measured, fingerprint = _check_first_microbatch(spec, graph, dataset, guard)
    if spec.steps < 1:
        raise ConfigError(f"steps is {spec.steps}", cure="set steps >= 1")
    (batch,) = read_microbatches(spec, graph, [0])
    fingerprint = fingerprint or fingerprint_of_streams(spec, batch)
    now_checking(f"the layers of {model} and the loss {spec.loss.label}, with the first microbatch")
    with guard.watching("the job's layers"):
        mixed, not_compared = _check_layers(spec, graph, batch)
    now_checking("the validation data")
    with guard.watching("the job's data"):
        validation, of_sets = _check_validation_sets(spec, graph, guard)
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


def _check_validation_sets(spec: Job, graph: Graph, guard: TorchStateGuard) -> tuple[dict[str, int], dict[str, Json]]:
    """(validation set -> number of its samples, set -> its fingerprint). Raise for what is wrong with the first microbatch of
    one."""
    counts = {name: _count_samples_of_set(spec, name) for name in spec.validation_sets}
    found = {name: _check_first_microbatch_of_set(spec, graph, name, count, guard) for name, count in counts.items()}
    _refuse_sets_that_differ_in_kind({name: batch for name, (batch, _) in found.items()})
    return counts, {name: fingerprint for name, (_, fingerprint) in found.items() if fingerprint}


def _count_samples_of_set(spec: Job, name: str) -> int:
    """How many samples of a validation set a pass has."""
    one = spec.validation_sets[name]
    if one.streams is not None:
        return one.samples
    size = len(make_dataset(spec.data_of_set(one), key_of_set(name)))
    return min(size, one.samples or size)


def _check_first_microbatch(
    spec: Job, graph: Graph, dataset: MapStyleDataset, guard: TorchStateGuard
) -> tuple[tuple[str, ...], tuple[str, ...] | None, dict[str, Json]]:
    """The fields of the first microbatch, those of them that metrics of the batch get, None without such metrics, and the
    fingerprint of the samples, empty of iterable data.

    Raises `DataError` for a `data.collate` whose result depends on the process.
    """
    order, fingerprint = None, dict[str, Json]()
    if spec.data.streams is not None:
        dataset = first_samples(spec)
        places = [(0, index) for index in range(len(dataset))]
    else:
        refuse_chance(spec, dataset)
        order = SampleOrder.of_job(spec, dataset)
        places = order.ids(0, len(spec.batching.samples(0)))
    reader = SampleReader.of(dataset, spec.training_data, spec.seed, guard=guard)
    _check_batch(reader, places, _fields_read(spec, graph), key_of_pad="data")
    reads_batch = any(metric.needs_batch for metric in make_metrics(spec.metrics, spec.loss_target_name).values())
    with preserve_random_state():
        names = reader.field_names(places)
        if order is not None:
            fingerprint = fingerprint_of_samples(spec, dataset, order, _fields_read(spec, graph), guard)
        return names, reader.tensor_names(places) if reads_batch else None, fingerprint


def _fields_read(spec: Job, graph: Graph) -> tuple[str, ...]:
    """The fields of a batch that the model and the loss read."""
    return tuple(dict.fromkeys([*graph.batch_fields, *spec.loss_fields]))


def _check_batch(
    reader: SampleReader, places: Sequence[SamplePosition], read: Sequence[str], *, key_of_pad: str | None
) -> None:
    """Check what makes a batch of samples: names and lengths of `pad`, and that neither `collate` nor samples depend on the
    process.

    `places`: those of a microbatch; `read`: the fields that are used; `key_of_pad`: the job's key of the data to which the
    names in `pad` belong, None where they are not looked at.
    """
    with preserve_random_state():
        padding = reader.packing.padding if reader.packing is not None else reader.padding
        if reader.packing is not None:
            require_boundaries(reader.packing, read)
        if padding is not None:
            if key_of_pad is not None:
                padding.check_names(reader.field_names(places, also=padding.names_given), key_of_pad)
            is_whole = not isinstance(reader.dataset, FirstSamples)
            padding.check_lengths(reader.dataset, len(reader.dataset), read, reader.sample if is_whole else None)
        if reader.collation is not None:
            reader.collation.refuse_dependence_on_process(reader.samples(places), [index for _, index in places], (0, 0), read)
        if not isinstance(reader.dataset, FirstSamples):
            names = reader.field_names(places, also=read)
            few = places if reader.collation is not None else places[:SAMPLES_READ_TWICE]
            replace(reader, fields=tuple(name for name in read if name in names)).refuse_dependence_on_process(few)


def _check_first_microbatch_of_set(
    spec: Job, graph: Graph, name: str, samples: int, guard: TorchStateGuard
) -> tuple[Mapping[str, Tensor], dict[str, Json]]:
    """(the first microbatch of a validation set of so many samples, its fingerprint); both empty of iterable data, which is not
    read. Raise for what is wrong with it, which else would end the run when it has come there."""
    own, key = spec.validation_sets[name], key_of_set(name)
    data = spec.data_of_set(own)
    if data.streams is not None:
        return {}, {}
    dataset, read = make_dataset(data, key), _fields_read(spec, graph)
    batching = batching_of_set(spec, name, samples)
    size = len(batching.samples(0))
    places = SampleOrder(spec.seed, len(dataset), shuffle=False).ids(0, size)
    reader = replace(SampleReader.of(dataset, data, spec.seed, guard=guard), fields=read)
    try:
        _check_batch(reader, places, read, key_of_pad=None if own.pad is None and own.pack is None else key)
        with preserve_random_state():
            batch = reader.read(places)
            return batch, fingerprint_of_validation_set(spec, name, dataset, batching, read, guard)
    except ConfigError:
        raise
    except RayparError as error:
        error.add_place(key)
        raise


def _refuse_sets_that_differ_in_kind(firsts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise `DataError` for validation sets whose fields have other dtypes or numbers of dimensions than the first set's.

    `firsts`: validation set -> its first microbatch.
    """
    known: dict[str, tuple[str, Tensor]] = {}
    for name, batch in firsts.items():
        for key, tensor in batch.items():
            of_set, first = known.setdefault(key, (name, tensor))
            if (tensor.dtype, tensor.dim()) != (first.dtype, first.dim()):
                kinds = [f"{str(one.dtype).removeprefix('torch.')} with {one.dim()} dimensions" for one in (tensor, first)]
                raise DataError(
                    f"field {key!r} is {kinds[0]} in the validation set {name}, and {kinds[1]} in {of_set}",
                    cure="let all sets give samples of one kind: the same dtypes and numbers of dimensions; lengths may differ",
                )


_TRIALS: dict[tuple[Hashable, ...], OptimizerTrial] = {}
"""Results of the last trials of PyTorch's own optimizers in this process; see `_try_once`."""
TRIALS_KEPT = 64


def try_optimizer_of_job(spec: Job, graph: Graph) -> OptimizerTrial | None:
    """What trials find out about the job's optimizers (`try_optimizer`); None if the model has nothing to train."""
    frozen, dtype = frozen_parameters(graph), _dtype(spec)
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


def check_model_can_shard(spec: Job, checked: PreflightResult, plan: ParallelPlan) -> tuple[str, ...]:
    """Check that the model can be cut over the plan's shards by `spec.styles` and run so; that the optimizer allows the plan.

    Returns lines for the user: what could not be compared on numbers.
    Raises `PlanError` for styles and numbers that do not fit, `ModelError` for layers that need other shards' parts,
    `ConfigError` for an optimizer that would train otherwise than in one process (`OptimizerTrial.check_plan`).
    """
    lines: list[str] = []
    if checked.optimizer is not None:
        checked.optimizer.check_plan(plan)
        if spec.optimizer_in is not None:
            checked.optimizer.check_steps_in_windows()
    for shards in sorted(plan.virtual_shard_counts):
        if shards > 1 or spec.styles or spec.layout:
            layout = compute_shard_layout(checked.graph, shards, dict(spec.styles), dict(spec.layout))
        if shards > 1:
            if not layout.styles and not layout.divides_samples:
                raise PlanError(
                    f"{'virtual_shards' if spec.virtual_shards else 'plan.shards'} is {shards}, but none of the model's layers "
                    "has a style: every shard would compute all of it",
                    cure="name layers in plan.styles (for example '*.up': column, '*.down': row), or set it to 1",
                )
            if layout.divides_samples:
                check_samples_suffice(spec, shards)
            (target, *weights), loss = spec.loss_fields, make_loss_function(spec.loss)
            on_meta: dict[str, Any] = {"weights": weights, "sequence": spec.sequence_parallel, "dtype": _dtype(spec)}
            runs = check_shards_on_meta(checked.graph, layout, loss, checked.batch, target, **on_meta)
            reads_numbers = layout.divides_samples and not runs
            if layout.divides_samples:
                check = partial(check_shards_on_meta, checked.graph, layout, loss, target=target, training=False, **on_meta)
                check_samples_of_validation(spec, checked, shards, check)
            if reads_numbers or has_inferred_structure(checked.graph, layout) or ExpertsStyle.name in layout.styles.values():
                not_compared = check_shards_with_numbers(spec, checked.graph, layout)
                if not_compared is not None:
                    lines.append(
                        f"the layers on {shards} shards were not compared with the whole ones on numbers: {not_compared}; code "
                        "that reads the size or the numbers of its own weights is not seen then: try a smaller model once"
                    )
    return tuple(lines)


def check_other_shard_counts(spec: Job, checked: PreflightResult, plan: ParallelPlan, possible: Iterable[int]) -> None:
    """Check the model for the other numbers of shards (`possible`) that an elastic run may come to have.

    Raises as `check_model_can_shard` does.
    """
    for shards in set(possible) - plan.virtual_shard_counts - {1}:
        try:
            check_model_can_shard(spec, checked, ParallelPlan.mesh(tp=shards, layers=len(checked.graph.layers)))
        except InputError as error:
            what = f"with {shards} shards, to which an elastic run comes when workers are lost: {error.what}"
            raise type(error)(what, error.cure) from error


def check_layer_shapes(spec: Job, graph: Graph, batch: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Send a microbatch through all layers and the loss on the meta device: shapes and dtypes without numbers.

    Returns fields and values by name, as the loss reads them, on the meta device. Code that reads numbers (`.item()`, branches
    on data) cannot be checked this way and is left to the first step: None.
    """
    values = {name: tensor.to("meta") for name, tensor in batch.items()}
    captured = captured_outputs_on_meta(graph)
    rounded_to = parameter_dtype_of(spec.precision)
    if captured is not None:  # its trace has done the same
        values |= {name: as_loss_reads(value, rounded_to) for name, value in captured.items()}
        _check_loss(spec, graph, values, batch)
        return values
    autocast, fields = autocast_of(spec.precision), values
    values = {name: as_layers_read(value, rounded_to) for name, value in values.items()}
    for layer in graph.layers:
        missing = [name for name in layer.inputs if name not in values]
        if missing:
            raise DataError(
                f"layer {layer.name!r} reads {missing[0]!r}, which is neither a field of the samples nor written by a layer",
                cure=f"the samples have fields {sorted(batch)}; {WHERE_FIELDS_ARE_NAMED}",
            )
        try:
            inputs = [values[name] for name in layer.inputs]
            with torch.no_grad(), meta_operations_without_dynamo(), refuse_input_writes(layer, inputs):
                out = _module_on_meta(layer, _dtype(spec), rounded_to)(*inputs)
            if autocast is None:
                _check_dtypes_with_zeros(layer, inputs, _dtype(spec), rounded_to)
        except NotImplementedError:
            return None
        except RayparError:
            raise
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            said = error_message(error)
            if "meta" in said.lower() or "unsupported scalarType" in said:  # `torch.autocast("meta")`
                return None
            if autocast is not None and autocast.dtype_name in said.lower():
                return None  # on the meta device autocast casts nothing; the profile runs the layer with numbers
            raise _misfit_error(layer, values, _dtype(spec), rounded_to, error) from error
        values.update(zip(layer.outputs, _outputs(layer, out), strict=True))
    values = {name: as_loss_reads(value, rounded_to) for name, value in values.items()} | fields
    _check_loss(spec, graph, values, batch)
    return values


def _module_on_meta(layer: Layer, dtype: torch.dtype, rounded_to: torch.dtype | None) -> nn.Module:
    """The layer's module, for a forward without numbers: a cumulative average would ask how many calls have been counted."""
    module = round_parameters_of(convert_module_dtype(build_on_meta(layer), dtype), rounded_to)
    for _, norm in norms_with_running_statistics(module):
        norm.momentum = 0.0
    return module


def _outputs(layer: Layer, out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors that a layer returned. Raises `ModelError` unless there is one for each of its outputs."""
    outputs = out if isinstance(out, tuple) else (out,)
    if len(outputs) == len(layer.outputs) and all(isinstance(each, Tensor) for each in outputs):
        return outputs
    kinds = ", ".join("tensor" if isinstance(each, Tensor) else type(each).__name__ for each in outputs)
    returned = f"{len(outputs)} values ({kinds})" if len(outputs) != 1 else with_article(kinds)
    if len(layer.outputs) > 1:
        what = f"layer {layer.name!r} returned {returned}, not {count_noun(len(layer.outputs), 'tensor')}"
        raise ModelError(what, cure=f"return a tuple of tensors: {', '.join(layer.outputs)}")
    raise ModelError(
        f"layer {layer.name!r} returned {returned}, not one tensor",
        cure="return one tensor, or write the model as a raypar.Graph whose Layer names its outputs "
        '(outputs=("h", "c")) and returns them as one tuple',
    )


_UNUSUAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16)
"""Dtypes of inputs that few layers take unless the job has them; integers of 4 and 8 bytes are ids, and bool is for masks."""


def _check_dtypes_with_zeros(
    layer: Layer, inputs: Sequence[Tensor], dtype: torch.dtype, rounded_to: torch.dtype | None
) -> None:
    """Raises what a layer raises for the dtypes of its inputs: on the meta device products of unequal dtypes pass.

    A layer whose inputs are none of the job's dtype, or that of rounded parameters, is run with zeros; errors about anything
    else are ignored.
    """
    wanted = dtype if rounded_to is None else rounded_to
    if not inputs or any(tensor.dtype == wanted or tensor.dtype not in _UNUSUAL_DTYPES for tensor in inputs):
        return
    module = round_parameters_of(convert_module_dtype(build_on_meta(layer), dtype), rounded_to)
    module = module._apply(lambda x: torch.zeros(x.shape, dtype=x.dtype))
    try:
        with torch.no_grad():
            module(*(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in inputs))
    except RuntimeError as error:
        if "type" in error_message(error):
            raise
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)


def _misfit_error(
    layer: Layer, values: Mapping[str, Tensor], of_job: torch.dtype, rounded_to: torch.dtype | None, error: BaseException
) -> DataError:
    """The error for a layer that raised `error`: it speaks of dtypes if the layer would take its inputs in another one.

    `of_job`: the job's dtype.
    """
    given, wanted = {values[name].dtype for name in layer.inputs}, of_job if rounded_to is None else rounded_to
    for dtype in (wanted, torch.int64):
        inputs = [values[name].to(dtype) for name in layer.inputs]
        try:
            with torch.no_grad(), meta_operations_without_dynamo():
                _module_on_meta(layer, of_job, rounded_to)(*inputs)
        except USER_CODE_ERRORS as again:
            reraise_ctrl_c(again)
            continue
        odd = next((name for name in layer.inputs if values[name].dtype != dtype), layer.inputs[0])
        cure = f"cast it in the data set's __getitem__: torch.as_tensor(value, dtype={dtype})"
        if dtype == rounded_to:  # in which layers are given fields: it is a value
            cure = f"return it in {dtype} from the layer that makes it, or cast it here: x.to(self.weight.dtype); with "
            cure += f"precision.parameters buffers stay {str(of_job).removeprefix('torch.')}"
        elif dtype == wanted and given <= {torch.float32, torch.float64}:
            cure += f", or set dtype: {str(values[odd].dtype).removeprefix('torch.')} in the job"
        return DataError(
            f"layer {layer.name!r} takes {dtype}, and its input {odd!r} is {values[odd].dtype}: {error_text(error)}", cure
        )
    shapes = ", ".join(f"{name} {tuple(values[name].shape)} {values[name].dtype}" for name in layer.inputs)
    return DataError(
        f"the first microbatch does not fit the model: layer {layer.name!r} given {shapes} raised {error_text(error)}",
        cure=cure_for_known_error(error) or "compare the shape of a sample (data) with what the layer expects (model)",
    )


def _check_loss(spec: Job, graph: Graph, values: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
    target = spec.loss_target_name
    if target not in values:
        raise DataError(
            f"the loss reads field {target!r}, which the samples do not have",
            cure=f"choose data.target: one of {list(batch)}",
        )
    if spec.loss.sample_weight is None:
        check_sum_and_count(spec, graph, values, batch.get(target))
    else:
        check_weighted_losses(spec, graph, values, batch)
    beside = spec.loss_fields[1:]
    loss, read = graph.loss_of_values(make_loss_function(spec.loss)), [values[name] for name in graph.loss_inputs]
    called = _call_loss(loss, read, [values[target], *(values[name] for name in beside)])
    if called is None and target in batch and sum(tensor.numel() for tensor in read) <= MOST_LOSS_NUMBERS:  # it reads numbers
        with preserve_random_state():
            called = _call_loss(
                loss, [random_output(tensor.shape, tensor.dtype) for tensor in read], [batch[name] for name in spec.loss_fields]
            )
    if called is None:
        return  # if it is wrong, the first step says so with its own traceback
    found, trained = called
    total = found[0] if isinstance(found, tuple) and len(found) == 2 else found
    if total is None and (given := fields_without_target(graph, target)) is not None:
        raise ModelError(
            f"the loss {spec.loss.label} returned None: the forward of the model was given {', '.join(given)}, and not "
            f"{target!r}, although it has a parameter of that name, so what it returns has no loss",
            cure=f"set loss: model, with which forward is given {target!r} and its own loss is taken; or compute the loss "
            "of the output and the target",
        )
    number = isinstance(total, (int, float)) or type(total).__module__ == "numpy"
    if number or (isinstance(total, Tensor) and total.numel() == 1 and trained and total.grad_fn is None):
        kind = (
            "a tensor that does not depend on the output" if isinstance(total, Tensor) else with_article(type(total).__name__)
        )
        raise ModelError(
            f"the loss {spec.loss.label} returned {kind}: without a gradient nothing would be trained",
            cure="return the tensor that is computed from the output, by differentiable operations: no .item(), no float(), no "
            "detach(), no numpy, no torch.no_grad()",
        )
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else with_article(type(total).__name__)
        shape = "None" if total is None else shape
        raise ModelError(
            f"the loss {spec.loss.label} returned {shape}, not a scalar", cure="return a scalar, or (sum, count) as scalars"
        )
    if isinstance(found, tuple) and len(found) == 2 and not isinstance(found[1], (int, float, Tensor)):
        raise ModelError(
            f"the loss {spec.loss.label} returned a pair whose second value is {with_article(type(found[1]).__name__)}, and it "
            "is the count by which the first is divided",
            cure="return the loss alone, or (sum, count): the sum over samples or tokens, and how many they are",
        )


def _call_loss(
    loss: Callable[..., Tensor | tuple[Tensor, Tensor | float]], read: Sequence[Tensor], beside: Sequence[Tensor]
) -> tuple[Tensor | tuple[Tensor, Tensor | float], bool] | None:
    """(what the loss returns for outputs like these, whether they require gradients); None if it raises."""
    given = [tensor.detach().requires_grad_(tensor.is_floating_point()).clone() for tensor in read]
    try:
        with torch.enable_grad(), meta_operations_without_dynamo(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first microbatch shows them
            return loss(*given, *(tensor.clone() for tensor in beside)), any(tensor.requires_grad for tensor in given)
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        return None


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


def _dtype(spec: Job) -> torch.dtype:
    found: torch.dtype = getattr(torch, spec.dtype)
    return found


def find_sibling_function(ref: FunctionConfig, name: str) -> Callable[..., Any] | None:
    """The function `name` of the module that `ref` comes from, or None: `generate` beside the model's function."""
    module = sys.modules.get(getattr(ref.resolve(), "__module__", ""))
    found = getattr(module, name, None)
    return found if callable(found) else None
