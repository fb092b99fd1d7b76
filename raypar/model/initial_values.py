"""Initial values of parameters and buffers: those that the user's code gives them (`raypar/NUMERICS.md`, rule 2).

One process that seeds Python, numpy and torch and calls the model function has all values at once. A worker reads them one
whole tensor at a time, and keeps what it owns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.deferred_init import OperationRecording
from raypar.model.graph import Graph, Layer, join_names
from raypar.model.initial_values_source_protocol import DimRanges, InitialValues
from raypar.model.layer_skeletons import (
    build_on_meta,
    canonical_names,
    named_state,
    put_buffers,
    refuse_lazy_parameters,
    state_shapes,
)
from raypar.model.model_function_allocations import call_counting_allocations
from raypar.model.random_state import RandomState, preserve_random_state, seed_all
from raypar.plan.seeds import seed_of
from raypar.plan.stage_connections import LATER_USE
from raypar.torch_compat.modules import reset_function

CallGuard = Callable[[str], contextlib.AbstractContextManager[str | None]]
"""guard(caller): a context for one call of the user's code; on exit it restores process state that the call left changed.

`caller` describes the call in messages. `TorchStateGuard.watching` of `worker.process.torch_state_guard` is one."""


class WholeTensorValues:
    """Base of `InitialValues` classes whose code makes whole tensors: they offer no slices."""

    def stream_slices(self, slices: Mapping[str, DimRanges], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `InitialValues.stream_slices`: nothing can be had in slices."""
        return iter(())


def initial_values_of(graph: Graph, seed: int) -> InitialValues:
    """The graph's initial values: `graph.initial_values`, or, for a hand-written graph, what its layers' builds give."""
    if graph.initial_values is not None:
        return graph.initial_values
    built = LayerBuildValues(graph, seed)
    return built if graph.init is None else SeededByNameValues(graph, seed, built)


def prepare_initial_value(name: str, tensor: Tensor, dtype: torch.dtype, *, is_parameter: bool, own: bool = False) -> Tensor:
    """A tensor as workers hold it: on the CPU, contiguous, floating point in `dtype`.

    The result is a copy, unless `own` says that nobody else uses the tensor's memory. Raises `ModelError` for a tensor on the
    meta device, and for a parameter with NaN: `model_function_allocations` fills uninitialised memory with NaN.
    """
    if tensor.is_meta:
        raise ModelError(
            f"{name} has no values: it is on the meta device",
            cure="leave torch.device('meta') out of the model function (workers make what they own only), or set init_from",
        )
    if is_parameter and (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any()):
        raise ModelError(
            f"parameter {name} is left without values, or without some of them, by the model function: it holds NaN",
            cure="give it values where it is made (torch.empty has none), or set init: by-name if its module's "
            "reset_parameters() does",
        )
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    copies = not own or tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.detach().to(device="cpu", dtype=kind, copy=copies, memory_format=torch.contiguous_format).contiguous()


class WholeModelValues(WholeTensorValues):
    """Values of a model that was built whole. `make`: builds it again after `release`; without it, `release` keeps them."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        make: Callable[[], Mapping[str, Tensor]] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._tensors: Mapping[str, Tensor] | None = tensors
        """The model's parameters and buffers by name; None after `release`."""
        self._make = make
        self.notes = notes

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `InitialValues`."""
        if self._tensors is None:
            assert self._make is not None
            self._tensors = self._make()
        for name in names:
            tensor = self._tensors[name]
            yield name, prepare_initial_value(name, tensor, dtype, is_parameter=isinstance(tensor, nn.Parameter))

    def release(self) -> None:
        """See `InitialValues`."""
        if self._make is not None:
            self._tensors = None


@dataclass
class DeferredInitialValues(WholeTensorValues):
    """Values of a model run with deferred initialisation: each large tensor is computed when `stream` reaches it.

    `tensors`: as the model function made them, real or on the meta device. `recording`: how to compute the latter.
    """

    tensors: Mapping[str, Tensor]
    recording: OperationRecording
    notes: tuple[str, ...] = ()

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `InitialValues`."""
        for name in names:
            tensor = self.tensors[name]
            is_parameter, deferred = isinstance(tensor, nn.Parameter), self.recording.tracks(tensor)
            own = deferred and not self.recording.is_real(tensor)
            value = self.recording.values(tensor) if deferred else tensor
            yield name, prepare_initial_value(name, value, dtype, is_parameter=is_parameter, own=own)

    def release(self) -> None:
        """Nothing to free: the recording is small."""


def initial_values_by_layer(graph: Graph, seed: int, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Each layer's initial values by name, in layer order. Between layers only tied parameters stay in memory."""
    names = [list(state_shapes(graph, index, index + 1)) for index in range(len(graph.layers))]
    last = {name: index for index, layer in enumerate(names) for name in layer}
    everything = list(dict.fromkeys(name for layer in names for name in layer))
    stream = initial_values_of(graph, seed).stream(everything, dtype)
    have: dict[str, Tensor] = {}
    for index, layer in enumerate(names):
        while any(name not in have for name in layer):
            have.update([next(stream)])
        yield {name: have[name] for name in layer}
        have = {name: value for name, value in have.items() if last[name] > index}


@dataclass
class LayerBuildValues(WholeTensorValues):
    """Values of a hand-written `Graph`: its builds run in layer order in one random stream; one layer is held at a time.

    The stream starts from `state` (the generators as the model function left them), or from `seed` if there is none. `guard`
    is entered around every build.
    """

    graph: Graph
    seed: int
    state: RandomState | None = None
    guard: CallGuard = contextlib.nullcontext
    notes: tuple[str, ...] = ()

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `InitialValues`."""
        canonical, wanted = canonical_names(self.graph), set(names)
        for name, module in self.modules():
            if not wanted:
                return
            for path, tensor in named_state([(name, module)]):
                if path in wanted and canonical.get(path, path) == path:
                    wanted.discard(path)
                    yield path, prepare_initial_value(path, tensor, dtype, is_parameter=isinstance(tensor, nn.Parameter))
        assert not wanted, f"the graph has no {sorted(wanted)}"

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(layer name, module with its values) in layer order. What the caller draws between layers does not affect them."""
        random = self.state
        for layer in self.graph.layers:
            with preserve_random_state():
                if random is None:
                    seed_all(self.seed)
                else:
                    random.restore()
                with self.guard(f"the constructor of layer {layer.name!r}"):
                    module, _ = call_counting_allocations(layer.build)
                random = RandomState.now()
            refuse_lazy_parameters([(layer.name, module)])
            yield layer.name, module

    def release(self) -> None:
        """Nothing to free."""


@dataclass
class SeededByNameValues(WholeTensorValues):
    """Values under `init: by-name`: every module's `reset_parameters()` runs under a seed made from the module's name.

    With `Graph.init` that function fills each parameter, under a seed made from the parameter's name. What constructors give
    parameters is not used. `buffers`: where buffers come from. `guard`: entered around calls of the user's code.
    """

    graph: Graph
    seed: int
    buffers: InitialValues
    guard: CallGuard = contextlib.nullcontext

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `InitialValues`."""
        canonical, wanted = canonical_names(self.graph), set(names)
        for layer in self.graph.layers:
            skeleton = build_on_meta(layer)
            owned = {canonical.get(layer.qualify(p), layer.qualify(p)) for p, _ in skeleton.named_parameters()}
            buffers = [layer.qualify(path) for path, _ in skeleton.named_buffers()]
            kept = dict(self.buffers.stream(buffers, dtype)) if wanted & {*owned, *buffers} else {}
            yield from ((name, kept[name]) for name in buffers if name in wanted)
            wanted -= set(buffers)
            if wanted & owned:
                _fill_with_nan(skeleton, dtype)
                put_buffers(layer, skeleton, kept, dtype)
                with preserve_random_state():
                    _initialise(self.graph, layer, skeleton, self.seed, self.guard)
                _refuse_unfilled(self.graph, layer, skeleton)
                for path, parameter in skeleton.named_parameters():
                    name = layer.qualify(path)
                    if canonical.get(name, name) == name and name in wanted:
                        wanted.discard(name)
                        yield name, parameter.detach()
        assert not wanted, f"the graph has no {sorted(wanted)}"

    def release(self) -> None:
        """See `InitialValues`."""
        self.buffers.release()

    @property
    def notes(self) -> tuple[str, ...]:
        """See `InitialValues`."""
        if self.graph.init is not None:
            return self.buffers.notes
        return (
            "init: by-name: parameters begin with what reset_parameters() gives them, not with what the model function did",
            *self.buffers.notes,
        )


def _fill_with_nan(module: nn.Module, dtype: torch.dtype) -> None:
    """Allocate every parameter, in place, filled with NaN, so that `_refuse_unfilled` finds what nobody initialises."""
    made: dict[int, nn.Parameter] = {}  # a parameter used at two places of one layer stays one
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                fresh = torch.zeros(parameter.shape, dtype=kind)
                if fresh.is_floating_point():
                    fresh.fill_(math.nan)
                made[id(parameter)] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
                vars(made[id(parameter)]).update(vars(parameter))
            part._parameters[key] = made[id(parameter)]


def _refuse_unfilled(graph: Graph, layer: Layer, module: nn.Module) -> None:
    """Raises `ModelError` for a parameter that still holds NaN."""
    for path, parameter in module.named_parameters():
        if LATER_USE in layer.qualify(path):
            continue
        if parameter.is_floating_point() and bool(parameter.isnan().any()):
            owner, _, _ = path.rpartition(".")
            kind = type(module.get_submodule(owner)).__name__
            by = "init(name, tensor)" if graph.init is not None else f"reset_parameters() of {kind}"
            raise ModelError(
                f"parameter {layer.qualify(path)} is left without values, or without some of them, by {by}",
                cure="give every parameter its values there: those of the constructor are not kept"
                + ("" if graph.init is not None else "; or set init: model"),
            )


def _initialise(graph: Graph, layer: Layer, module: nn.Module, seed: int, guard: CallGuard) -> None:
    """Give a layer's parameters their values under `init: by-name`, in place. `guard`: see `SeededByNameValues`."""
    if graph.init is not None:
        canonical = canonical_names(graph)
        for path, parameter in module.named_parameters():
            name = layer.qualify(path)
            with torch.no_grad(), guard("the graph's init"):
                torch.manual_seed(seed_of(seed, "init", canonical.get(name, name)))
                graph.init(canonical.get(name, name), parameter)
        return
    for path, part in module.named_modules():
        own = [layer.qualify(join_names(path, key)) for key, p in part._parameters.items() if p is not None]
        if all(LATER_USE in each for each in own):  # none, or values of an earlier layer
            continue
        name = layer.qualify(path)
        reset = reset_function(part)
        if reset is None:
            raise ModelError(
                f"{name} ({type(part).__name__}) owns parameters but has no reset_parameters()",
                cure="set init: model (what constructors give is kept), add one, or return a Graph with "
                "init=function(name, tensor)",
            )
        with guard(f"reset_parameters() of {name}"):
            torch.manual_seed(seed_of(seed, "init", name))
            reset()
