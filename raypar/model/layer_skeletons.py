"""Skeletons of layers (modules without values): reads names and shapes from them, and puts values into copies.

The user's model function runs once per worker (`worker.layer_graph_of_job`). A *skeleton* is one of the
modules it made, with parameters and buffers on the meta device. The modules of every stage of every plan are copies of its
layers' skeletons with values put in (`model.materialise`): initial ones, or those that other workers, a mirror or a checkpoint
hold.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raypar.errors import ModelError, with_article
from raypar.model.graph import Graph, Layer, join_names
from raypar.model.refuse_framework_wrappers import refuse_framework_wrappers
from raypar.model.synchronised_norms import read_synchronised_norms
from raypar.plan import ModelOutline
from raypar.torch_compat.autograd import has_hooks_on_sums
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo
from raypar.torch_compat.modules import NormBase, non_persistent_buffer_names

STATE_DTYPES = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip
"""Dtypes in which checkpoints hold buffers, beside the job's: those of safetensors."""
_TENSOR_CLASSES = (Tensor, nn.Parameter, nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)


@dataclass(frozen=True, slots=True)
class LayerSize:
    """A layer's number of parameters, and their bytes in the job's dtype; a tie counts in the first layer that uses it."""

    name: str
    parameters: int
    nbytes: int


def canonical_names(graph: Graph) -> dict[str, str]:
    """Every tied name -> the first name of its tie."""
    return {name: names[0] for names in graph.ties for name in names}


def build_on_meta(layer: Layer) -> nn.Module:
    """A new skeleton of the layer, the caller's own. Raises `ModelError` as `refuse_unsupported_modules` does."""
    with meta_operations_without_dynamo(), torch.device("meta"):
        module = layer.build()
    read_synchronised_norms(module)
    refuse_unsupported_modules(layer.name, module)
    return module


def shared_skeleton(layer: Layer) -> nn.Module:
    """The layer's skeleton, made once and shared by all callers: read only. Raises `ModelError` as `build_on_meta` does."""
    kept = vars(layer)  # beside the fields, which alone decide whether two layers are equal
    if "_skeleton" not in kept:
        if isinstance(layer.build, SkeletonCopier):
            refuse_unsupported_modules(layer.name, layer.build.skeleton)
            kept["_skeleton"] = layer.build.skeleton
        else:
            kept["_skeleton"] = build_on_meta(layer)
    skeleton: nn.Module = kept["_skeleton"]
    return skeleton


def refuse_unsupported_modules(layer: str, module: nn.Module) -> None:
    """Raises `ModelError` for modules that cannot be trained on workers.

    Those are modules that other frameworks wrap around a model, modules that change their parameters in forward, modules that
    wait for other microbatches or have sparse gradients, and modules whose parameters or buffers cannot be trained, moved or
    saved (`_refuse_tensor`).
    """
    refuse_framework_wrappers(layer, module)
    for name, tensor in named_state([(layer, module)]):
        _refuse_tensor(name, tensor)
    for path, part in module.named_modules():
        name = join_names(layer, path) or "the model"
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                f"{name} is {with_article(type(part).__name__)} of torch.jit, whose parameters workers cannot put in place",
                cure="give the module from which it was scripted or traced",
            )
        if isinstance(part, nn.SyncBatchNorm):
            raise ModelError(
                f"{name} is a subclass of SyncBatchNorm, which would stop inside the layer until other replicas' microbatches "
                "are there",
                cure="use BatchNorm, whose statistics are of one microbatch, or GroupNorm, whose statistics are of one sample",
            )
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            if part.max_norm is not None:
                raise ModelError(
                    f"{name} is {with_article(type(part).__name__)} with max_norm, which forward would apply to its weight",
                    cure="leave max_norm out, or normalise the vectors that the layer returns",
                )
            if part.sparse:
                raise ModelError(
                    f"{name} is {with_article(type(part).__name__)} with sparse gradients, which cannot be summed over "
                    "replicas",
                    cure="leave sparse=True out",
                )


def _refuse_tensor(name: str, tensor: Tensor) -> None:
    """Raises `ModelError` for a tensor that a worker could not make, train, move or save as it is."""
    if type(tensor) not in _TENSOR_CLASSES:
        raise ModelError(
            f"{name} is {with_article(type(tensor).__name__)}, a class of its own, and workers make plain parameters "
            "and buffers only",
            cure="use nn.Parameter or a plain tensor, and let the module do what the class does",
        )
    if tensor.requires_grad and has_hooks_on_sums(tensor):
        raise ModelError(
            f"{name} has a hook on its gradient, which workers do not call: they sum gradients themselves",
            cure="do it in forward: to train some elements only, use mask * w + (1 - mask) * w.detach() there",
        )
    if tensor.is_complex() and tensor.requires_grad:
        raise ModelError(
            f"{name} is a trained parameter of complex numbers, whose gradients have no norm here",
            cure="keep it as real numbers (torch.view_as_real) and call torch.view_as_complex in forward",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise ModelError(
            f"{name} is no dense tensor ({kind}), and workers move and save dense ones only",
            cure="register it in parts, as indices() and values(), and put them together in forward",
        )
    if not tensor.is_floating_point() and tensor.dtype not in STATE_DTYPES:
        cure = "register it as torch.view_as_real(...) and call torch.view_as_complex in forward, or as complex64"
        raise ModelError(
            f"{name} has the dtype {str(tensor.dtype).removeprefix('torch.')}, which checkpoints do not hold",
            cure=cure if tensor.is_complex() else "register it as a tensor of plain numbers",
        )


def convert_module_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module, its floating-point parameters and buffers now in `dtype`. `Module.to` would make complex ones real."""
    module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return module


def layer_sizes(graph: Graph, dtype: torch.dtype = torch.float32) -> tuple[LayerSize, ...]:
    """The size of every layer; allocates none of them."""
    canonical, counted = canonical_names(graph), set[str]()
    sizes = []
    for layer in graph.layers:
        count = 0
        for path, parameter in shared_skeleton(layer).named_parameters():
            name = canonical.get(layer.qualify(path), layer.qualify(path))
            if name not in counted:
                counted.add(name)
                count += parameter.numel()
        sizes.append(LayerSize(layer.name, count, count * dtype.itemsize))
    return tuple(sizes)


def parameter_shapes(graph: Graph, first: int = 0, last: int | None = None) -> dict[str, torch.Size]:
    """Canonical parameter name -> shape, for layers [first, last), in layer order."""
    canonical = canonical_names(graph)
    shapes: dict[str, torch.Size] = {}
    for layer in graph.layers[first:last]:
        for path, parameter in shared_skeleton(layer).named_parameters():
            shapes.setdefault(canonical.get(layer.qualify(path), layer.qualify(path)), parameter.shape)
    return shapes


def frozen_parameters(graph: Graph) -> frozenset[str]:
    """Canonical names of the parameters that are not trained."""
    canonical = canonical_names(graph)
    return frozenset(
        canonical.get(layer.qualify(path), layer.qualify(path))
        for layer in graph.layers
        for path, parameter in shared_skeleton(layer).named_parameters()
        if not parameter.requires_grad
    )


def buffer_shapes(graph: Graph, first: int = 0, last: int | None = None) -> dict[str, torch.Size]:
    """Qualified buffer name -> shape, for layers [first, last), in layer order; non-persistent buffers too.

    A buffer that a layer holds under several names appears under the first.
    """
    return {
        layer.qualify(path): buffer.shape
        for layer in graph.layers[first:last]
        for path, buffer in shared_skeleton(layer).named_buffers()
    }


def persistent_buffers(graph: Graph) -> set[str]:
    """Qualified names of the buffers that are part of PyTorch's state_dict."""
    return {
        layer.qualify(path)
        for layer in graph.layers
        for module in [shared_skeleton(layer)]
        for path, _ in module.named_buffers()
        if path.rpartition(".")[2] not in non_persistent_buffer_names(module.get_submodule(path.rpartition(".")[0]))
    }


def layers_that_write_buffers(graph: Graph) -> frozenset[int]:
    """Indices of the layers whose forward may change buffers: by running statistics, or by the job's policy."""
    return frozenset(
        index
        for index, layer in enumerate(graph.layers)
        for module in [shared_skeleton(layer)]
        if any(norms_with_running_statistics(module))
        or (graph.buffer_policy != "refuse" and any(True for _ in module.buffers()))
    )


def buffers_of_several_layers(graph: Graph) -> frozenset[str]:
    """Qualified names of the buffers that several layers of a chain share."""
    names: dict[int, list[str]] = {}
    for layer in graph.layers:
        for path, buffer in shared_skeleton(layer).named_buffers():
            names.setdefault(id(buffer), []).append(f"{layer.name}.{path}")
    return frozenset(name for shared in names.values() if len(shared) > 1 for name in shared)


def norms_with_running_statistics(module: nn.Module) -> Iterator[tuple[str, NormBase]]:
    """(path, norm) of every norm in `module` whose forward changes running averages in training.

    Norms that a constructor has put into evaluation mode stay in it, and change nothing.
    """
    for path, part in module.named_modules():
        if isinstance(part, NormBase) and part.track_running_stats and part.training and part.running_mean is not None:
            yield path, part


def running_statistics_names(path: str, norm: NormBase) -> frozenset[str]:
    """Qualified names of the running averages of the norm at `path`, and of its count of calls."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    return frozenset(join_names(path, name) for name in names if norm._buffers.get(name) is not None)


def state_shapes(graph: Graph, first: int = 0, last: int | None = None) -> dict[str, torch.Size]:
    """Name -> shape of every parameter (canonical names) and buffer of layers [first, last)."""
    return {**parameter_shapes(graph, first, last), **buffer_shapes(graph, first, last)}


def parameters_and_buffers_on_meta(graph: Graph, first: int, last: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name -> meta tensor of every parameter (canonical names) and buffer of layers [first, last).

    Floating-point ones are in `dtype`.
    """
    canonical = canonical_names(graph)
    found: dict[str, Tensor] = {}
    for layer in graph.layers[first:last]:
        skeleton = shared_skeleton(layer)
        for path, tensor in (*skeleton.named_parameters(), *skeleton.named_buffers()):
            name = layer.qualify(path)
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            found.setdefault(canonical.get(name, name), torch.empty(tensor.shape, dtype=kind, device="meta"))
    return found


def tensor_sizes_by_layer(graph: Graph) -> tuple[dict[str, int], ...]:
    """For each layer: name of a parameter (canonical) or buffer -> number of elements."""
    found = (state_shapes(graph, i, i + 1) for i in range(len(graph.layers)))
    return tuple({name: shape.numel() for name, shape in shapes.items()} for shapes in found)


def make_model_outline(graph: Graph) -> ModelOutline:
    """The graph as `plan` sees it: layers with their inputs and outputs, ties, sizes of parameters and buffers; no modules."""
    return ModelOutline(
        tuple((x.name, x.inputs, x.outputs) for x in graph.layers),
        graph.ties,
        tensor_sizes_by_layer(graph),
        owners=graph.tensor_owners,
        buffers=frozenset(buffer_shapes(graph)),
        frozen=frozen_parameters(graph),
        writes_buffers=layers_that_write_buffers(graph),
        loss_inputs=graph.loss_inputs,
        handed_on=graph.handed_on,
        handed_on_to_loss=graph.handed_on_to_loss,
    )


def put_values(
    graph: Graph, layer: Layer, module: nn.Module, values: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, str]:
    """Put values into a layer's skeleton, in place; returns path of each parameter -> canonical name.

    A parameter that the layer holds at several places stays one object. `values`: by canonical parameter name and by buffer
    name; empty tensors may be missing, and are made: floating point ones in `dtype`.
    """
    canonical = canonical_names(graph)
    names = {path: canonical.get(layer.qualify(path), layer.qualify(path)) for path, _ in module.named_parameters()}
    by_id = {id(p): names[path] for path, p in module.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    value = _value_of(by_id[id(parameter)], parameter, values, dtype)
                    made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                    vars(made[id(parameter)]).update(vars(parameter))
                part._parameters[key] = made[id(parameter)]
    _put_attributes(module, made)
    put_buffers(layer, module, values, dtype)
    return names


def put_buffers(layer: Layer, module: nn.Module, values: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Put values into the buffers of a layer's skeleton, in place; `values` by qualified buffer name. `dtype`: see
    `put_values`."""
    by_id = {id(b): layer.qualify(path) for path, b in module.named_buffers()}
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = _value_of(by_id[id(buffer)], buffer, values, dtype)
                    vars(made[id(buffer)]).update(vars(buffer))
                part._buffers[key] = made[id(buffer)]
    _put_attributes(module, made)


def _put_attributes(module: nn.Module, made: Mapping[int, Tensor]) -> None:
    """Replace tensors of the skeleton that plain attributes hold by the new tensors; `made`: id of the former -> new tensor.

    Raises `ModelError` where the new tensor is a shard's slice: code that reads the attribute expects the whole parameter.
    """

    def put(tensor: Tensor) -> Tensor:
        new = made.get(id(tensor), tensor)
        if new.shape != tensor.shape:
            raise ModelError(
                f"{key!r} of a {type(part).__name__} is a plain attribute with a parameter {list(tensor.shape)} that is cut "
                "over shards",
                cure="read it where it is registered, or give its layer the style whole (plan.styles)",
            )
        return new

    for part in module.modules():
        for key, value in vars(part).items():
            if not key.startswith("_"):
                vars(part)[key] = replace_tensors(value, put)


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any] | None = None) -> Any:
    """`value` with `change(tensor)` in the place of each tensor in lists, tuples and dicts.

    Lists and dicts are changed in place: who shares one still does. `done`: id of a container -> what is in its place now.
    """
    if isinstance(value, Tensor):
        return change(value)
    done = {} if done is None else done
    if type(value) not in (list, tuple, dict):
        return value
    if id(value) in done:
        return done[id(value)]
    done[id(value)] = value
    if type(value) is list:
        value[:] = [replace_tensors(item, change, done) for item in value]
    elif type(value) is dict:
        value.update({key: replace_tensors(item, change, done) for key, item in value.items()})
    else:
        items = tuple(replace_tensors(item, change, done) for item in value)
        if any(a is not b for a, b in zip(items, value, strict=True)):
            done[id(value)] = items
    return done[id(value)]


def _value_of(name: str, skeleton: Tensor, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The value of a tensor of the skeleton. An empty one needs none: state that workers hand over does not contain it."""
    if name in values or skeleton.numel():
        return values[name]
    return torch.empty(skeleton.shape, dtype=dtype if skeleton.is_floating_point() else skeleton.dtype)


# -- from modules with values to skeletons -----------------------------------------------------------------------------------


def named_state(layers: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """(qualified name, tensor) of every parameter and buffer; one that a layer holds under several names, under the first.

    A whole model is a layer without a name.
    """
    for layer, module in layers:
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield join_names(layer, path), tensor


def refuse_lazy_parameters(layers: Collection[tuple[str, nn.Module]]) -> None:
    """Raises `ModelError` for lazy parameters and buffers (`nn.LazyLinear`, ...): their shape is not known yet."""
    for name, tensor in named_state(layers):
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                f"{name} is not initialised yet: a lazy module takes its shape from the first batch",
                cure="run a batch through the model inside the model function, before it returns",
            )


def make_skeletons(layers: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """(name, copy of the module with parameters and buffers on the meta device); tensors that modules share stay shared.

    The modules given may be the user's own, and are not changed.
    """
    layers = list(layers)
    memo: dict[int, Any] = {}
    for _, module in layers:
        for part in module.modules():
            for parameter in part._parameters.values():
                if parameter is not None and id(parameter) not in memo:
                    own = nn.Parameter(_on_meta(parameter), requires_grad=parameter.requires_grad)
                    vars(own).update(vars(parameter))
                    memo[id(parameter)] = own
            for buffer in part._buffers.values():
                if buffer is not None and id(buffer) not in memo:
                    memo[id(buffer)] = _on_meta(buffer)
                    vars(memo[id(buffer)]).update(vars(buffer))
            for value in vars(part).values():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    # Computed from parameters, as `torch.nn.utils.weight_norm` leaves it; PyTorch copies no such tensor.
                    memo.setdefault(id(value), value.detach())
    return [(name, _copy(name, module, memo)) for name, module in layers]


def _copy(name: str, module: nn.Module, memo: dict[int, nn.Module]) -> nn.Module:
    """A deep copy. Raises `ModelError` for a module with something in it that cannot be copied."""
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, NotImplementedError, pickle.PicklingError) as error:
        raise ModelError(
            f"{name or type(module).__name__} ({type(module).__name__}) cannot be copied, as every worker must: {error}",
            cure="make what cannot be copied (locks, open files, generators, sparse tensors) in forward, when it is first "
            "used; or give its class a __deepcopy__",
        ) from error


@dataclass(frozen=True, eq=False)
class SkeletonCopier:
    """A layer's `build` that returns copies of its skeleton.

    Unlike `copy.deepcopy`, keeps attributes that users set on parameters.
    """

    skeleton: nn.Module

    def __call__(self) -> nn.Module:
        ((_, module),) = make_skeletons([("", self.skeleton)])
        return module


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
