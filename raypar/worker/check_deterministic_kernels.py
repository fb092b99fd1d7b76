"""Finds operations that have no deterministic kernel on a GPU, before a run that would end with them in its first step.

Workers on GPUs compute with `torch.use_deterministic_algorithms` (`worker/process/gpu_setup.py`), under which these raise.
PyTorch has no list of them that a program can ask; this one is that of its documentation, without what PyTorch replaces by
itself under that setting (bilinear interpolation, padding by replication).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import build_on_meta, convert_module_dtype
from raypar.model.random_state import preserve_random_state
from raypar.model.rounded_parameters import as_layers_read, as_loss_reads, round_parameters_of
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo, without_dynamo
from raypar.torch_compat.dispatch import OperatorValue, TorchDispatchMode, run_operation, schema_of
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS
from raypar.worker.layer_precisions import dtype_of_job, parameter_dtype_of
from raypar.worker.stage.loss import make_loss_function

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from raypar.torch_compat.dispatch import OpOverload

Arguments = Mapping[str, OperatorValue]


def _is_float(given: Arguments, name: str) -> bool:
    tensor = given.get(name)
    return isinstance(tensor, Tensor) and tensor.is_floating_point()


def _is_trained(given: Arguments, name: str) -> bool:
    tensor = given.get(name)
    return isinstance(tensor, Tensor) and tensor.requires_grad


FORWARD: Mapping[str, tuple[Callable[[Arguments], bool], str]] = {
    "aten::nll_loss2d_forward": (
        lambda given: bool(given["reduction"]),
        "give the loss one row for each place: F.cross_entropy(x.movedim(1, -1).reshape(-1, x.shape[1]), y.reshape(-1))",
    ),
    "aten::cumsum": (
        lambda given: _is_float(given, "self") and given.get("dtype") not in (torch.int64, torch.int32),
        "cumsum of integers has one; of floating point numbers take a product with a triangular matrix: x @ torch.triu(ones)",
    ),
    "aten::histc": (lambda given: _is_float(given, "self"), "count with torch.bucketize and torch.bincount without weights"),
    "aten::bincount": (
        lambda given: given.get("weights") is not None,
        "add the weights with torch.zeros(n).index_add(0, index, weights)",
    ),
    "aten::median": (lambda given: "dim" in given, "take x.sort(dim).values at the middle place"),
    "aten::put_": (lambda given: True, "write with x.view(-1).index_put((index,), values)"),
    "aten::scatter_reduce": (lambda given: str(given["reduce"]) == "prod", "use reduce='sum' of logarithms"),
    "aten::_embedding_bag": (
        lambda given: str(given.get("mode")) == "2" and _is_trained(given, "weight"),
        "use F.embedding(x, w).amax(1)",
    ),
    "aten::max_unpool2d": (lambda given: True, "write the values to their places with torch.scatter"),
    "aten::max_unpool3d": (lambda given: True, "write the values to their places with torch.scatter"),
}
"""Operation -> (whether it has none when it is called with these arguments, what to do)."""

_POOL = "use a pooling with a kernel size (F.avg_pool2d, F.max_pool2d), or an output size of 1: x.mean((-2, -1))"
_PAD = "pad with mode='replicate', 'circular' or 'constant', or put flipped slices beside x with torch.cat"
BACKWARD: Mapping[str, tuple[str, str]] = {
    "AdaptiveAvgPool2DBackward": ("adaptive_avg_pool2d", _POOL),
    "AdaptiveAvgPool3DBackward": ("adaptive_avg_pool3d", "use an output size of 1: x.mean((-3, -2, -1))"),
    "AdaptiveMaxPool2DBackward": ("adaptive_max_pool2d", _POOL),
    "AvgPool3DBackward": ("avg_pool3d", "use F.conv3d with equal weights, or F.avg_pool2d over two dimensions, then a mean"),
    "FractionalMaxPool2DBackward": ("fractional_max_pool2d", _POOL),
    "FractionalMaxPool3DBackward": ("fractional_max_pool3d", "use F.max_pool3d"),
    "ReflectionPad1DBackward": ("reflection_pad1d", _PAD),
    "ReflectionPad2DBackward": ("reflection_pad2d", _PAD),
    "ReflectionPad3DBackward": ("reflection_pad3d", _PAD),
    "UpsampleLinear1DBackward": (
        "interpolate(mode='linear')",
        "interpolate x.unsqueeze(2) with mode='bilinear' to (1, size), which has one",
    ),
    "UpsampleBicubic2DBackward": ("interpolate(mode='bicubic')", "use mode='bilinear', which has one"),
    "GridSampler2DBackward": ("grid_sample", "gather the neighbours with torch.gather, and weigh them"),
    "GridSampler3DBackward": ("grid_sample", "gather the neighbours with torch.gather, and weigh them"),
    "CtcLossBackward": ("ctc_loss", "compute this loss on the host: F.ctc_loss(log_probs.cpu(), ...)"),
}
"""Node of autograd, without its number -> (function whose gradient has none, what to do)."""


@without_dynamo
class _OperationsWithoutKernel(TorchDispatchMode):
    """Keeps the first operation that has no deterministic kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: tuple[str, str] | None = None
        """(the operation, what to do)."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[OperatorValue, ...] = (),
        kwargs: Mapping[str, OperatorValue] | None = None,
    ) -> OperatorValue:
        schema = schema_of(func)
        rule = FORWARD.get(schema.name)
        if rule is not None and self.found is None:
            given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs or {})
            if rule[0](given):
                self.found = schema.name.removeprefix("aten::").removesuffix("_forward"), rule[1]
        return run_operation(func, args, kwargs)


def check_deterministic_kernels(spec: Job, graph: Graph, batch: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` for a layer or loss with an operation that has no deterministic kernel on a GPU.

    The first microbatch goes through the layers and the loss on the meta device. Code that reads numbers cannot be looked
    through so: from there on such an operation is met in the first step, whose error has a cure too.
    """
    rounded_to = parameter_dtype_of(spec.precision)
    fields = {name: tensor.to("meta") for name, tensor in batch.items()}
    values = {name: as_layers_read(field, rounded_to) for name, field in fields.items()}
    seen: set[Node] = set()

    def run(who: str, code: Callable[..., Tensor | tuple[Tensor | float, ...]], read: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with _OperationsWithoutKernel() as operations:
            made = code(*read)
        out = tuple(each for each in (made if isinstance(made, tuple) else (made,)) if isinstance(each, Tensor))
        found = operations.found
        if found is None and spec.forward_passes is None:
            found = _gradient_without_kernel(out, seen)
        if found is not None:
            raise _Found(
                f"{who} calls {found[0]}, which has no deterministic kernel on a GPU: PyTorch would raise in the first step",
                cure=f"{found[1]}; or set device: cpu, or reduction: fast, whose results are not the same each time",
            )
        return out

    with preserve_random_state(), torch.enable_grad(), meta_operations_without_dynamo():
        try:
            for layer in graph.layers:
                module = round_parameters_of(convert_module_dtype(build_on_meta(layer), dtype_of_job(spec)), rounded_to)
                made = run(f"layer {layer.name!r}", module, [values[name] for name in layer.inputs])
                values |= zip(layer.outputs, made, strict=True)
            loss = graph.loss_of_values(make_loss_function(spec.loss))
            values = {name: as_loss_reads(value, rounded_to) for name, value in values.items()} | fields
            run(f"the loss {spec.loss.label}", loss, [values[name] for name in (*graph.loss_inputs, *spec.loss_fields)])
        except _Found:
            raise
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)


class _Found(ModelError):
    """What `check_deterministic_kernels` raises."""


def _gradient_without_kernel(tensors: Iterable[Tensor], seen: set[Node]) -> tuple[str, str] | None:
    """(function, what to do) of one whose gradient has no deterministic kernel, among the nodes behind `tensors`. `seen`: nodes
    that are not looked at again."""
    left = [tensor.grad_fn for tensor in tensors]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found = BACKWARD.get(node.name().rstrip("0123456789"))
        if found is not None:
            return found
        left += [before for before, _ in node.next_functions]
    return None
