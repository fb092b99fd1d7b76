"""From what the user's model function returned to a layer graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raypar.errors import ModelError
from raypar.model.build import on_meta
from raypar.model.graph import Graph

_ACCEPTED = "return nn.Sequential, a list of modules (or of (name, module) pairs), or a raypar.model.graph.Graph"


def capture(made: object, *, input: str) -> Graph:
    """Layers of `made`, which was built under the meta device. Parameters shared between layers become ties.

    `input`: the batch field that the first layer of a chain reads. Raises `ModelError` for anything that is not layers.
    """
    if isinstance(made, Graph):
        _check_ties(made)
        return made
    if isinstance(made, nn.Sequential):
        if type(made).forward is not nn.Sequential.forward:
            raise ModelError(
                f"{type(made).__name__} is an nn.Sequential with a forward of its own, which its children in a row are not",
                cure="move what its forward does into layers of the chain, or return a raypar.model.graph.Graph",
            )
        pairs: list[tuple[str, nn.Module]] = list(made.named_children())
        if len(pairs) != len(made):  # named_children drops repeats of one module
            raise ModelError(
                "a module stands in the nn.Sequential more than once",
                cure="make a module per place and share their parameters (they become ties)",
            )
    elif isinstance(made, (Sequence, nn.ModuleList)) and not isinstance(made, (str, bytes)):
        pairs = []
        for index, item in enumerate(made):
            name, module = item if isinstance(item, tuple) and len(item) == 2 else (str(index), item)
            if not isinstance(module, nn.Module):
                raise ModelError(f"layer {name!r} is a {type(module).__name__}, not an nn.Module", cure=_ACCEPTED)
            pairs.append((str(name), module))
    else:
        raise ModelError(f"the model function returned a {type(made).__name__}", cure=_ACCEPTED)
    seen: dict[int, list[str]] = {}
    for name, module in pairs:
        for path, parameter in module.named_parameters():
            seen.setdefault(id(parameter), []).append(f"{name}.{path}")
    ties = tuple(tuple(names) for names in seen.values() if len(names) > 1)
    return Graph.sequential([(name, _builder(name, module)) for name, module in pairs], input=input, ties=ties)


def _check_ties(graph: Graph) -> None:
    """The names of a tie exist and mean parameters of one shape, all trained or none: else the cut would decide the bits."""
    layers = {layer.name: layer for layer in graph.layers}
    modules: dict[str, nn.Module] = {}
    for names in graph.ties:
        found: list[tuple[str, tuple[int, ...], bool]] = []
        for name in names:
            owner = graph.layer_of(name)
            if owner not in modules:
                modules[owner] = on_meta(layers[owner])
            parameters = dict(modules[owner].named_parameters())
            parameter = parameters.get(name[len(owner) + 1 :])
            if parameter is None:
                raise ModelError(
                    f"the tie {' = '.join(names)} names {name!r}, which is no parameter of layer {owner!r}",
                    cure=f"its parameters are {', '.join(f'{owner}.{path}' for path in parameters) or 'none'}",
                )
            found.append((name, tuple(parameter.shape), parameter.requires_grad))
        for name, shape, trained in found[1:]:
            first, wanted, wanted_trained = found[0]
            if (shape, trained) != (wanted, wanted_trained):
                kinds = {True: "trained", False: "frozen"}
                raise ModelError(
                    f"tied parameters differ: {first} {list(wanted)} is {kinds[wanted_trained]}, "
                    f"{name} {list(shape)} is {kinds[trained]}",
                    cure="a tie is one parameter: give all its names one shape and one requires_grad",
                )


def _builder(name: str, module: nn.Module) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return copy.deepcopy(module)

    if any(b.is_meta for b in module.buffers()):
        first = next(path for path, b in module.named_buffers() if b.is_meta)
        kind = next((type(part).__name__ for part in module.modules() if isinstance(part, _BatchNorm)), None)
        if kind is not None:
            raise ModelError(
                f"layer {name!r} is or has a {kind}: its running statistics depend on how the batch is cut over workers",
                cure="use GroupNorm, LayerNorm or InstanceNorm without running statistics",
            )
        raise ModelError(
            f"buffer {name}.{first} was computed in a constructor, and the whole model is never held in one worker",
            cure="compute it in forward, or return a Graph whose layers have a build function each",
        )
    return build
