"""Sends a microbatch through all layers and the loss without numbers, before a run: do shapes and dtypes fit?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from raypar.errors import DataError, ModelError, RayparError, error_message, with_article
from raypar.job import Job
from raypar.model.capture.module_graph import captured_outputs_on_meta
from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import build_on_meta, convert_module_dtype, norms_with_running_statistics
from raypar.model.rounded_parameters import as_layers_read, as_loss_reads, round_parameters_of
from raypar.plan.wording import count_noun
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, cure_for_known_error, error_text
from raypar.worker.check_loss import check_loss_of_microbatch
from raypar.worker.data.sample_reader import WHERE_FIELDS_ARE_NAMED
from raypar.worker.layer_precisions import autocast_of, dtype_of_job, parameter_dtype_of
from raypar.worker.stage.layer_call import refuse_input_writes


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
        check_loss_of_microbatch(spec, graph, values, batch)
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
                out = _module_on_meta(layer, dtype_of_job(spec), rounded_to)(*inputs)
            if autocast is None:
                _check_dtypes_with_zeros(layer, inputs, dtype_of_job(spec), rounded_to)
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
            raise _misfit_error(layer, values, dtype_of_job(spec), rounded_to, error) from error
        values.update(zip(layer.outputs, _outputs(layer, out), strict=True))
    values = {name: as_loss_reads(value, rounded_to) for name, value in values.items()} | fields
    check_loss_of_microbatch(spec, graph, values, batch)
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
