"""The user's own module with the weights of a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor, nn

from raypar.errors import CheckpointError, ModelError
from raypar.job import FunctionConfig
from raypar.model.capture.sequential import layers_in
from raypar.model.graph import Graph, MadeModel
from raypar.model.random_state import preserve_random_state, seed_all
from raypar.storage.checkpoint_store import CheckpointRef
from raypar.torch_compat.modules import non_persistent_buffer_names
from raypar.worker.checkpoint.checkpoint_files import (
    BUFFER,
    CACHE,
    PARAMETER,
    check_checkpoint_fits_model,
    load_manifest,
)
from raypar.worker.layer_graph_of_job import call_model_function
from raypar.worker.pretrained.frozen_values import AllTensors

OF_THE_RUN = "give the model that was trained, as it was when the checkpoint was written"
"""The cure for a model that a checkpoint does not fit."""
Places = list[tuple[nn.Module, str]]
"""(module, its own name of the tensor) of each place that holds one parameter or buffer."""


def make_trained_module(model: FunctionConfig | nn.Module, seed: int, checkpoint: CheckpointRef) -> nn.Module:
    """The module of a model function with the parameters and buffers of a checkpoint, in evaluation mode.

    The function is called as training calls it: once, after Python, numpy and torch were seeded with `seed`; generators are
    restored. A module that is given itself gets the values in place. Tensors have the dtype in which they were trained. Besides
    the module's own memory one tensor is held at a time. Raises `ModelError` for what is no module, `CheckpointError` for
    a checkpoint of another model.
    """
    with preserve_random_state():
        seed_all(seed)
        made = model if isinstance(model, nn.Module) else call_model_function(model)
        module = as_one_module(made)
    put_state_into_module(module, checkpoint)
    return module.eval()


def as_one_module(made: MadeModel) -> nn.Module:
    """What a model function has returned, as one module: a chain of layers, or a `Graph` that is one, as an `nn.Sequential`.

    Parameters have the names that they have in checkpoints. Raises `ModelError` for anything else.
    """
    if isinstance(made, nn.Module) and not isinstance(made, nn.ModuleList):
        return made
    pairs = _layers_of_graph(made) if isinstance(made, Graph) else layers_in(made)
    dotted = next((name for name, _ in pairs if "." in name or not name), None)
    if dotted is not None:
        raise ModelError(
            f"the layers of the model make no module: {dotted!r} cannot name a part of one",
            cure="give `model`, a module whose parameters have the names of the checkpoint; or `raypar export` the tensors",
        )
    chain = nn.Sequential(OrderedDict(pairs))
    if isinstance(made, Graph):
        _tie_parameters(chain, made.ties)
    return chain


def _layers_of_graph(graph: Graph) -> list[tuple[str, nn.Module]]:
    """(name, module) of the layers of a graph that is a chain. Raises `ModelError` for another graph."""
    before = graph.batch_fields
    for layer in graph.layers:
        if layer.inputs != before or len(before) != 1:
            raise ModelError(
                f"the model is a raypar.Graph whose layer {layer.name!r} reads {', '.join(layer.inputs)}: only a graph in "
                "which each layer reads what the one before it writes is a module (nn.Sequential)",
                cure="give `model`, a module whose parameters have the names of the checkpoint; or `raypar export` the tensors",
            )
        before = layer.outputs
    return [(layer.name, layer.build()) for layer in graph.layers]


def _tie_parameters(module: nn.Module, ties: tuple[tuple[str, ...], ...]) -> None:
    """Make the parameters of each tie one parameter, that of its first name."""
    for first, *others in ties:
        for name in others:
            owner, _, key = name.rpartition(".")
            setattr(module.get_submodule(owner), key, module.get_parameter(first))


def put_state_into_module(module: nn.Module, checkpoint: CheckpointRef) -> None:
    """Give a module the values that a checkpoint has of all its parameters and buffers. Ties stay ties.

    Raises `CheckpointError` if a parameter is in one of them only, has another shape, or is tied in one of them only.
    """
    manifest, tensors = load_manifest(checkpoint), AllTensors(checkpoint, (PARAMETER, BUFFER, CACHE))
    ties = manifest.ties
    found = [
        (tensor, stored_name(names, tensors, ties, checkpoint), names, places)
        for tensor, names, places in tensors_of_module(module)
    ]
    _refuse_lost_ties([(stored, names) for _, stored, names, _ in found], checkpoint)
    shapes = {stored: tuple(tensor.shape) for tensor, stored, _, _ in found if isinstance(tensor, nn.Parameter)}
    check_checkpoint_fits_model(manifest, shapes)
    for tensor, stored, _, places in found:
        if stored in tensors:
            value = tensors[stored]
            if value.shape != tensor.shape:
                raise CheckpointError(
                    f"buffer {stored} is {list(tensor.shape)} in the model and {list(value.shape)} in checkpoint {checkpoint}",
                    cure=OF_THE_RUN,
                )
            _put_value(tensor, value, places)
        elif tensor.is_meta or any(key not in non_persistent_buffer_names(part) for part, key in places):
            raise CheckpointError(f"checkpoint {checkpoint} has no values of buffer {stored}", cure=OF_THE_RUN)


def tensors_of_module(module: nn.Module) -> Iterator[tuple[Tensor, list[str], Places]]:
    """(parameter or buffer, all its names, the places that hold it) of each tensor of a module, once."""
    found: dict[int, tuple[Tensor, list[str], Places]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for kept in (part._parameters, part._buffers):
            for key, tensor in kept.items():
                if tensor is not None:
                    _, names, places = found.setdefault(id(tensor), (tensor, [], []))
                    names.append(f"{path}.{key}" if path else key)
                    places.append((part, key))
    yield from found.values()


def stored_name(
    names: Collection[str], tensors: Mapping[str, Tensor], ties: Mapping[str, str], checkpoint: CheckpointRef
) -> str:
    """The name under which a checkpoint has the tensor with these names; the first of them if it has none.

    Raises `CheckpointError` if the checkpoint has several tensors for them.
    """
    found = dict.fromkeys(ties.get(name, name) for name in names if name in tensors or name in ties)
    if len(found) > 1:
        raise CheckpointError(
            f"{' and '.join(found)} are one tensor in the model, and {len(found)} in checkpoint {checkpoint}",
            cure=OF_THE_RUN,
        )
    return next(iter(found), next(iter(names)))


def _refuse_lost_ties(found: Iterable[tuple[str, Collection[str]]], checkpoint: CheckpointRef) -> None:
    """Raises `CheckpointError` if two tensors of a module are one in the checkpoint. `found`: (stored name, names) of each."""
    seen: dict[str, str] = {}
    for stored, names in found:
        name = next(iter(names))
        if stored in seen:
            raise CheckpointError(
                f"{seen[stored]} and {name} are one tensor in checkpoint {checkpoint}, and two in the model",
                cure=OF_THE_RUN,
            )
        seen[stored] = name


def _put_value(tensor: Tensor, value: Tensor, places: Places) -> None:
    """Put a value where the module has `tensor`. The tensor itself stays, for others who hold it, unless it is on the meta
    device."""
    if not tensor.is_meta:
        tensor.data = value.to(tensor.device)
        return
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(value, tensor.requires_grad)
        for module, key in places:
            module._parameters[key] = made
    else:
        for module, key in places:
            module._buffers[key] = value
