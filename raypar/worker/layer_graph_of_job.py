"""A job's layer graph: its model function is called, and the module that it returns is captured."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from torch import Tensor

from raypar.errors import ModelError, RayparError, UserCodeError
from raypar.job import DataConfig, FunctionConfig, Job
from raypar.model.capture.module_graph import (
    ModuleCaptureOptions,
    put_initial_buffers_into_captured_model,
    refuse_parameters_in_no_unit,
)
from raypar.model.capture.sequential import capture_layer_graph, replace_builds_by_skeletons, state_in
from raypar.model.deferred_init import OperationRecording, Undeferrable, run_with_deferred_init
from raypar.model.graph import Graph, MadeModel
from raypar.model.initial_values import CallGuard, SeededByNameValues
from raypar.model.model_function_allocations import WHOLE_BYTES, AllocationLimitExceeded, call_counting_allocations
from raypar.model.module_options_digest import digest_of_module
from raypar.model.parameter_aliasing_check import Replaced
from raypar.model.random_state import RandomState, preserve_random_state, seed_all
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, cure_for_known_error, error_text
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.data.sample_order import SampleOrder, SamplePosition
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.data.stream_loader import FirstSamples, first_samples
from raypar.worker.data.user_dataset import is_stream, make_dataset
from raypar.worker.layer_precisions import autocast_of, dtype_of_job, parameter_dtype_of
from raypar.worker.metrics.metric import make_metrics
from raypar.worker.pretrained.initial_values import WeightsFromFile, weights_from_file

__all__ = ["make_layer_graph"]

LOADS_BYTES = 1 << 20
"""A model function that copies more than this from files and arrays gets a line which says what that costs."""


def make_layer_graph_without_values(spec: Job) -> Graph:
    """The layer graph of the user's model, when only shapes are needed; no random values are drawn."""
    if spec.deferred_init == "never" or spec.init_from is not None:  # a file's names are compared with the model's
        return make_layer_graph(spec)
    replaced: Replaced = "parameters" if spec.init == "by-name" else "nothing"
    try:
        with preserve_random_state():
            made, recording = _run_deferred(spec, draws=False)
            if not isinstance(made, Graph):
                graph = _capture(spec, contextlib.nullcontext, made, recording=recording, replaced=replaced)
                return of_job(replace(graph, initial_values=None), spec)
    except (Undeferrable, UserCodeError):
        pass  # with the values it may be possible; an error of the function's own comes again
    return make_layer_graph(spec)


def make_layer_graph(spec: Job, guard: CallGuard = contextlib.nullcontext) -> Graph:
    """The layer graph of the user's model, with its initial values in `Graph.initial_values`.

    Calls the model function as one process would, after seeding Python, numpy and torch with the job's seed; restores the
    generators. A small model is built whole, a large one with deferred initialisation. `guard`: entered around calls of the
    user's code. Raises `ModelError` if the function does not return layers, `UserCodeError` if it raises.
    """
    replaced: Replaced = "all" if spec.init_from is not None else "parameters" if spec.init == "by-name" else "nothing"
    with preserve_random_state():
        with guard(f"the model function {spec.model.label}"):
            made, recording, notes = _call_whole_or_deferred(spec)
            digest = digest_of_module(made)
        if isinstance(made, Graph):
            graph = replace_builds_by_skeletons(made, seed=spec.seed, state=RandomState.now(), guard=guard, replaced=replaced)
        else:
            captured = partial(_capture, spec, guard, replaced=replaced)
            try:
                graph = captured(made, recording=recording, notes=notes)
            except Undeferrable as error:
                with guard(f"the model function {spec.model.label}"):
                    made, _, notes = _call_whole_because(spec, str(error))
                graph = captured(made, notes=notes)
    if spec.init == "by-name":
        assert graph.initial_values is not None
        graph = replace(graph, initial_values=SeededByNameValues(graph, spec.seed, graph.initial_values, guard))
    if spec.init_from is not None:
        assert graph.initial_values is not None
        values = weights_from_file(spec, graph, graph.initial_values)
        put_initial_buffers_into_captured_model(graph, values, dtype_of_job(spec))
        graph = replace(graph, initial_values=values)
    if spec.init == "by-name":
        of_file = graph.initial_values.names if isinstance(graph.initial_values, WeightsFromFile) else ()
        refuse_parameters_in_no_unit(graph, of_file)
    return of_job(replace(graph, buffer_policy=spec.model.buffers, module_digest=digest), spec, guard)


def of_job(graph: Graph, spec: Job, guard: CallGuard = contextlib.nullcontext) -> Graph:
    """The graph with what the job says of its batches: those of streams are read by the first stage alone, which hands on what
    others read."""
    if not spec.reads_streams:
        return graph
    with guard("the modules of the metrics"):
        reads_batch = any(metric.needs_batch for metric in make_metrics(spec.metrics, spec.loss_target_name).values())
    if not reads_batch:
        return graph.with_fields_handed_on(spec.loss_fields)
    with preserve_random_state(), guard("the data sets"):
        found = _names_of_tensors(spec, spec.training_data)
        for one in spec.validation_sets.values():
            others = _names_of_tensors(spec, spec.data_of_set(one))
            found = tuple(name for name in found if name in others)
    return graph.with_fields_handed_on(spec.loss_fields, measured=found)


def _names_of_tensors(spec: Job, data: DataConfig) -> tuple[str, ...]:
    """The fields of a data set's first microbatch that are tensors."""
    count = len(spec.batching.samples(0))
    dataset = first_samples(spec, data) if data.streams is not None else make_dataset(data)
    places = [(0, index) for index in range(min(count, len(dataset)))]
    return SampleReader.of(dataset, data, spec.seed).tensor_names(places)


def _capture(
    spec: Job,
    guard: CallGuard,
    made: MadeModel,
    *,
    recording: OperationRecording | None = None,
    notes: tuple[str, ...] = (),
    replaced: Replaced = "nothing",
) -> Graph:
    """The graph of what the model function returned. See `capture_layer_graph`."""
    return capture_layer_graph(
        made,
        input=spec.data.input or "x",
        again=partial(_values_again, spec),
        recording=recording,
        notes=notes,
        replaced=replaced,
        whole=module_capture_of_job(spec, guard),
    )


class _Called(NamedTuple):
    """A call of the model function."""

    made: MadeModel
    """What it returned."""
    recording: OperationRecording | None
    """Of its values, if they are deferred."""
    notes: tuple[str, ...]
    """Lines for the user."""


def _call_whole_or_deferred(spec: Job) -> _Called:
    """Call the model function in the way that the job's `deferred_init` asks for.

    `never`: whole. `always`: deferred, and what cannot be deferred is an error. `auto`: whole; if that allocates more than
    `WHOLE_BYTES`, deferred, from the start again; if that is not possible, whole without a limit.
    """
    if spec.deferred_init == "never":
        return _call_whole(spec)
    if spec.deferred_init == "auto":
        try:
            return _call_whole(spec, limit_bytes=WHOLE_BYTES)
        except AllocationLimitExceeded:
            pass
    try:
        return _call_deferred(spec)
    except Undeferrable as error:
        reason = str(error)
    except UserCodeError as error:
        if spec.deferred_init == "always":
            raise UserCodeError(
                f"with deferred initialisation {error.what}",
                cure=f"{error.cure}; if it does not raise there, set deferred_init: never",
            ) from error
        # If the error is the function's own, it comes again below, without deferred initialisation.
        reason = f"with deferred initialisation {error.what.splitlines()[0]}"
    return _call_whole_because(spec, reason)


def _call_whole_because(spec: Job, reason: str) -> _Called:
    """As `_call_whole`, with the line that says why. Raises `ModelError` under `deferred_init: always`."""
    if spec.deferred_init == "always":
        raise ModelError(
            f"the model function {spec.model.label} does what cannot be deferred: {reason}",
            cure="set deferred_init: never, which builds the whole model in every worker",
        )
    made, _, notes = _call_whole(spec)
    line = f"the model cannot be made in parts ({reason}): every worker builds all of it, then keeps only its part"
    return _Called(made, None, (line, *notes))


def _call_whole(spec: Job, limit_bytes: int | None = None) -> _Called:
    """Run the model function as one process would. Raises `AllocationLimitExceeded` beyond `limit_bytes`."""
    seed_all(spec.seed)
    made, loaded = call_counting_allocations(partial(_call_model, spec), limit_bytes)
    return _Called(made, None, _note_of_loads(loaded))


def _call_deferred(spec: Job) -> _Called:
    """Run the model function with deferred initialisation. Raises `Undeferrable`."""
    made, recording = _run_deferred(spec)
    if isinstance(made, Graph):  # hand-written: its builds have not run yet, and run one by one whatever the model's size
        return _call_whole(spec)
    return _Called(made, recording, _note_of_loads(recording.loaded_bytes))


def _run_deferred(spec: Job, *, draws: bool = True) -> tuple[MadeModel, OperationRecording]:
    """(what the model function returns, the recording of its values). `draws`: see `OperationRecording`."""
    seed_all(spec.seed)
    return run_with_deferred_init(partial(_call_model, spec), draws=draws)


def _note_of_loads(nbytes: int) -> tuple[str, ...]:
    """The line for the user about `nbytes` of values that the model function loads itself; none below `LOADS_BYTES`."""
    if nbytes < LOADS_BYTES:
        return ()
    return (
        f"the model function loads {nbytes / 2**20:.0f} MiB of values itself: every worker reads and holds all of them while "
        "it starts; with init_from: FILE a worker reads only what it owns",
    )


_FOREIGN_TORCHVISION_CURE = (
    "the installed torchvision was built for another PyTorch than the installed one (PyPI's, say, which is for CUDA, beside a "
    "PyTorch for CPUs): install both from one index, or uninstall torchvision if the model does not need it"
)
"""For `operator torchvision::nms does not exist`, the cause of which `transformers` hides behind the name of the model."""


def _call_model(spec: Job) -> MadeModel:
    """What the job's model function returns; see `call_model_function`."""
    return call_model_function(spec.model)


def call_model_function(model: FunctionConfig) -> MadeModel:
    """What a user's model function returns. Raises `UserCodeError` if it raises, `ModelError` if it returns None."""
    try:
        made: MadeModel | None = model.call("model.args")
    except RayparError:
        raise
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        frames = traceback.format_exc()
        raise UserCodeError(
            f"the model function {model.label} raised {error_text(error)}\n{frames}",
            cure=_FOREIGN_TORCHVISION_CURE
            if "operator torchvision::" in frames
            else cure_for_known_error(error) or "the last lines above are where it did; it is called with model.args",
        ) from error
    if made is None:
        raise ModelError(f"the model function {model.label} returned None", cure="return an nn.Module, layers or a Graph")
    return made


def _values_again(spec: Job) -> Mapping[str, Tensor]:
    """Name -> tensor of every parameter and buffer, from calling the model function again."""
    with preserve_random_state():
        seed_all(spec.seed)
        made, _ = call_counting_allocations(partial(_call_model, spec))
        return state_in(made)


def module_capture_of_job(spec: Job, guard: CallGuard) -> ModuleCaptureOptions:
    """What the job says about a model that is captured. Its first microbatch is read when it is asked for."""

    calls = "the data set's __getitem__" + (" or data.collate" if spec.data.collate is not None else "")

    @cache
    def reader() -> SampleReader:
        with guard("the data set function"):
            dataset = make_dataset(spec.data)
            if is_stream(dataset):
                dataset = first_samples(spec if spec.data.streams is not None else resolve_streams(spec).job)
            return SampleReader.of(dataset, spec.training_data, spec.seed)

    @cache
    def positions() -> list[SamplePosition]:
        dataset, size = reader().dataset, len(spec.batching.samples(0))
        if isinstance(dataset, FirstSamples):
            return [(0, index) for index in range(size)]
        return SampleOrder.of_job(spec, dataset).ids(0, size)

    def fields() -> tuple[str, ...]:
        with preserve_random_state(), guard(calls):
            return reader().field_names(positions(), also=(spec.data.input or "x", *spec.loss_fields))

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        with preserve_random_state(), guard(calls):
            return replace(reader(), fields=tuple(names)).read(positions())

    def lengths() -> Mapping[str, Sequence[int]]:
        padding = reader().padding
        return {} if padding is None else dict(padding.last_lengths)

    autocast = autocast_of(spec.precision)
    return ModuleCaptureOptions(
        fields,
        read,
        dtype=dtype_of_job(spec),
        input=spec.data.input or "x",
        target=spec.loss_target_name,
        wants_loss=spec.loss.is_loss_of_model,
        wants_output=bool(spec.metrics),
        units=spec.model.units,
        autocast_dtype=autocast.dtype if autocast is not None else None,
        rounded_to=parameter_dtype_of(spec.precision),
        lengths=lengths,
    )
