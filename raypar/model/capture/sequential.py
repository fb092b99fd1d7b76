"""The layer graph of what the user's model function returned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from weakref import ReferenceType

from torch import Tensor, nn

from raypar.errors import ModelError, with_article
from raypar.model.capture.module_graph import ModuleCaptureOptions, capture_module_graph
from raypar.model.deferred_init import OperationRecording, materialise_hidden_tensors, materialise_tensor_attributes
from raypar.model.graph import Graph, MadeModel
from raypar.model.initial_values import CallGuard, DeferredInitialValues, LayerBuildValues, SeededByNameValues, WholeModelValues
from raypar.model.initial_values_source_protocol import InitialValues
from raypar.model.layer_skeletons import (
    SkeletonCopier,
    build_on_meta,
    make_skeletons,
    named_state,
    refuse_lazy_parameters,
    refuse_unsupported_modules,
)
from raypar.model.parameter_aliasing_check import (
    Replaced,
    refuse_parameter_aliasing,
    refuse_shared_statistics,
    refuse_undeclared_ties,
    tensors_in_functions,
)
from raypar.model.random_state import RandomState
from raypar.model.refuse_framework_wrappers import refuse_framework_wrappers
from raypar.model.synchronised_norms import read_synchronised_norms
from raypar.torch_compat.modules import has_hooks

_ACCEPTED = "return nn.Sequential, a list of modules (or of (name, module) pairs), or a raypar.Graph"


def capture_layer_graph(
    made: MadeModel,
    *,
    input: str,
    again: Callable[[], Mapping[str, Tensor]] | None = None,
    recording: OperationRecording | None = None,
    notes: tuple[str, ...] = (),
    replaced: Replaced = "nothing",
    whole: ModuleCaptureOptions | None = None,
) -> Graph:
    """The graph of the layers of `made`; a hand-written `Graph` is returned as it is.

    Layers are built from skeletons (`model.layer_skeletons`); their values are in `Graph.initial_values`. Parameters that
    layers share become ties. `input`: the batch field that the first layer reads. `again`: makes the values again after they
    were released. `recording`: of the values, if the model function ran with deferred initialisation. `notes`: see
    `InitialValues`. `replaced`: what the job gives other values than these. `whole`: how a module that is no chain of layers is
    captured; None: it is refused. Raises `ModelError` for anything that is not layers, `Undeferrable` where a recording does
    not do.
    """
    if isinstance(made, Graph):
        _check_ties(made)
        return made
    if isinstance(made, nn.Module):
        refuse_framework_wrappers("", made)
    captured = whole_module(made) if whole is not None else None
    if captured is not None and whole is not None and isinstance(captured, nn.Sequential) and _is_chain(captured):
        whole = replace(whole, units=whole.units or tuple(name for name, _ in captured.named_children()))
    pairs = layers_in(made) if captured is None else [("", captured)]
    statistics: dict[str, ReferenceType[Tensor]] = {}
    for name, module in pairs:
        read_synchronised_norms(module)
        refuse_unsupported_modules(name, module)
        refuse_shared_statistics(name, module, statistics)
        _refuse_skips_beside_the_chain(name, module)
    refuse_lazy_parameters(pairs)
    refuse_parameter_aliasing(pairs, replaced)
    state = state_in(made) if whole is not None else dict(named_state(pairs))
    if recording is not None:
        for _, layer in pairs:
            materialise_tensor_attributes(layer, list(state.values()), recording)
        used = {id(tensor) for tensor in tensors_in_functions(pairs)}
        materialise_hidden_tensors([tensor for tensor in state.values() if id(tensor) not in used], recording)
    initial: InitialValues = (
        WholeModelValues(state, again, notes) if recording is None else DeferredInitialValues(state, recording, notes)
    )
    if captured is not None and whole is not None:
        return capture_module_graph(captured, initial, whole)
    seen: dict[int, list[str]] = {}
    for name, layer in pairs:
        for path, parameter in layer.named_parameters():
            seen.setdefault(id(parameter), []).append(f"{name}.{path}")
    ties = tuple(tuple(names) for names in seen.values() if len(names) > 1)
    graph = Graph.sequential([(name, SkeletonCopier(bare)) for name, bare in make_skeletons(pairs)], input=input, ties=ties)
    return replace(graph, initial_values=initial)


def whole_module(made: MadeModel) -> nn.Module | None:
    """The module that has to be captured; None for what is a chain of layers, or no module.

    A chain with a layer that writes in place what it reads is captured: the layer gets a copy then, as inside of a module.
    """
    if not isinstance(made, nn.Module):
        return None
    if _is_chain(made):
        in_place = isinstance(made, nn.Sequential) and _own_calls(made) is None and any(map(_writes_its_input, made))
        return made if in_place else None
    return made


def _is_chain(made: nn.Module) -> bool:
    """Whether a module is its children in a row: an `nn.Sequential` or `nn.ModuleList` whose class has no other forward."""
    if isinstance(made, nn.Sequential):
        return type(made).forward is nn.Sequential.forward
    return isinstance(made, nn.ModuleList) and type(made).forward is nn.ModuleList.forward


def _writes_its_input(layer: nn.Module) -> bool:
    """Whether a layer is `nn.ReLU(inplace=True)` or the like, or begins with one."""
    if type(layer).forward is nn.Sequential.forward:
        return _writes_its_input(layer[0]) if len(layer) else False  # type: ignore[index, arg-type]
    return bool(getattr(layer, "inplace", False)) and not list(layer.children())


def _refuse_skips_beside_the_chain(name: str, layer: nn.Module) -> None:
    """Raises `ModelError` for a `@skippable` layer of torchgpipe or fairscale that hands a tensor to another layer."""
    parts = [
        part for part in layer.modules() if hasattr(type(part), "stashable_names") and hasattr(type(part), "poppable_names")
    ]
    stashed, popped = (
        {skip for part in parts for skip in getattr(type(part), kind)} for kind in ("stashable_names", "poppable_names")
    )
    if stashed != popped:
        what = (
            f"stashes {', '.join(sorted(stashed - popped))}"
            if stashed - popped
            else f"pops {', '.join(sorted(popped - stashed))}"
        )
        raise ModelError(
            f"layer {name!r} is @skippable and {what}: it passes a tensor beside the chain, where workers do not see it",
            cure="give the model as one module whose forward keeps the tensor in a variable and passes it on: raypar records "
            "that, and sends it from stage to stage",
        )


def state_in(made: MadeModel) -> dict[str, Tensor]:
    """Name -> tensor of every parameter and buffer of what the model function returned, under all of their names."""
    module = whole_module(made)
    if module is None:
        return dict(named_state(layers_in(made)))
    named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {name: tensor for kind in named for name, tensor in kind}


def layers_in(made: MadeModel) -> list[tuple[str, nn.Module]]:
    """(name, module) of each layer of an nn.Sequential, a list of modules or of (name, module) pairs.

    Raises `ModelError` for anything else.
    """
    if isinstance(made, nn.Sequential):
        if type(made).forward is not nn.Sequential.forward:
            raise ModelError(
                f"{type(made).__name__} is an nn.Sequential with a forward of its own, which its children in a row are not",
                cure="move what its forward does into layers of the chain, or return a raypar.Graph",
            )
        if (own := _own_calls(made)) is not None:
            raise ModelError(
                f"the {type(made).__name__} that the model function returned has {own}, and workers call its layers only",
                cure="give it to a layer of the chain: the first one, or the last",
            )
        pairs: list[tuple[str, nn.Module]] = list(made.named_children())
        if len(pairs) != len(made):  # named_children drops repeats of one module
            raise ModelError(
                "a module stands in the nn.Sequential more than once",
                cure="make a module per place and share their parameters (they become ties)",
            )
        return pairs
    if not isinstance(made, (Sequence, nn.ModuleList)) or isinstance(made, (str, bytes)):
        if isinstance(made, nn.Module):
            what = f"the model is {with_article(type(made).__name__)}, whose forward raypar cannot cut"
            raise ModelError(what, cure=_ACCEPTED)
        raise ModelError(f"the model function returned {with_article(type(made).__name__)}", cure=_ACCEPTED)
    pairs = []
    for index, item in enumerate(made):
        name, module = item if isinstance(item, tuple) and len(item) == 2 else (str(index), item)
        if not isinstance(module, nn.Module):
            raise ModelError(f"layer {name!r} is {with_article(type(module).__name__)}, not an nn.Module", cure=_ACCEPTED)
        pairs.append((str(name), module))
    return pairs


def _own_calls(chain: nn.Sequential) -> str | None:
    """What calling the chain does besides calling its layers one after the other; None if nothing."""
    if has_hooks(chain):
        return "hooks of its own"
    if "forward" in vars(chain) or type(chain).__call__ is not nn.Sequential.__call__:
        return "a forward of its own"
    return None


def replace_builds_by_skeletons(
    graph: Graph, *, seed: int, state: RandomState, guard: CallGuard = contextlib.nullcontext, replaced: Replaced = "nothing"
) -> Graph:
    """A hand-written graph whose builds return copies of skeletons; its `initial_values` has the values.

    Every user's build runs once here, in the random stream that continues from `state`, and again whenever values are read.
    `seed`: for `Graph.init`. `guard`: entered around every build. `replaced`: see `capture_layer_graph`. Raises `ModelError`
    for inconsistent ties and for layers that raypar does not support.
    """
    built = LayerBuildValues(graph, seed, state, guard)
    layers = []
    seen: dict[str, ReferenceType[nn.Parameter]] = {}
    statistics: dict[str, ReferenceType[Tensor]] = {}
    for layer, (name, module) in zip(graph.layers, built.modules(), strict=True):
        read_synchronised_norms(module)
        refuse_unsupported_modules(name, module)
        refuse_parameter_aliasing([(name, module)], replaced if graph.init is None or replaced == "all" else "parameters")
        refuse_undeclared_ties(name, module, seen, graph.ties)
        refuse_shared_statistics(name, module, statistics)
        ((_, bare),) = make_skeletons([(name, module)])
        layers.append(replace(layer, build=SkeletonCopier(bare)))
    made = replace(graph, layers=tuple(layers))
    _check_ties(made)
    return replace(made, initial_values=built if graph.init is None else SeededByNameValues(made, seed, built, guard))


def _check_ties(graph: Graph) -> None:
    """Raises `ModelError` unless a tie's names are parameters of one shape, all trained or all frozen.

    Otherwise results would depend on where the plan splits the model.
    """
    layers = {layer.name: layer for layer in graph.layers}
    modules: dict[str, nn.Module] = {}
    for names in graph.ties:
        found: list[tuple[str, tuple[int, ...], bool]] = []
        for name in names:
            owner = graph.layer_of(name)
            if owner not in modules:
                modules[owner] = build_on_meta(layers[owner])
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
