"""The values that parameters and buffers have before the first step: those that the user's code gives them (rule 2).

One process that seeds Python, numpy and torch and calls the model function has them all at once. A worker gets them one tensor
at a time, whole, and keeps what it owns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.build import canonical_names, named_state, on_meta, put_buffers, refuse_lazy, state_shapes
from raypar.model.deferred import Recording
from raypar.model.graph import Graph
from raypar.model.model_call import call_watched
from raypar.model.random_state import RandomState, preserved, seed_all
from raypar.plan.seeds import seed_of

Watch = Callable[[str], contextlib.AbstractContextManager[Any]]
"""Entered around a call of the user's code, given words for it: sets back what the call leaves of the process's state."""


class InitialValues(Protocol):
    """Values by name: canonical names of parameters, names of buffers."""

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each of `names` once, in any order: on the CPU, contiguous, floating point ones in `dtype`,
        in memory of its own. Raises `ModelError` for what has no values."""

    def release(self) -> None:
        """Free what is kept for `stream`; it is made again should it be called once more."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for people: what these values cost, or what is not used."""


def initial_values(graph: Graph, seed: int) -> InitialValues:
    """Where the graph's values come from: what was kept when it was made, or the builds of a hand-written graph."""
    if graph.initial is not None:
        return graph.initial
    built = Built(graph, seed)
    return built if graph.init is None else ByName(graph, seed, built)


def as_initial(name: str, tensor: Tensor, dtype: torch.dtype, *, trained: bool, own: bool = False) -> Tensor:
    """A tensor as workers hold it: on the CPU, contiguous, floating point in `dtype`; a copy, unless it is our `own` already.

    Raises `ModelError` for what is on the meta device, and for parameters (`trained`) that hold NaN, as those do that nobody
    filled (`model_call`).
    """
    if tensor.is_meta:
        raise ModelError(
            f"{name} has no values: it is on the meta device",
            cure="leave torch.device('meta') out of the model function (workers make what they own only), or set init_from",
        )
    if trained and tensor.is_floating_point() and bool(tensor.isnan().any()):
        raise ModelError(
            f"parameter {name} is left without (all its) values by the model function: it holds NaN",
            cure="give it values where it is made (torch.empty has none), or set init: by-name if its module's "
            "reset_parameters() does",
        )
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    copies = not own or tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.detach().to(device="cpu", dtype=kind, copy=copies, memory_format=torch.contiguous_format).contiguous()


class Whole:
    """Values of a model that was made whole. `make`: makes them again after `release`."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        make: Callable[[], Mapping[str, Tensor]] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._tensors: Mapping[str, Tensor] | None = tensors
        self._make = make
        self.notes = notes

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `InitialValues`."""
        if self._tensors is None:
            assert self._make is not None
            self._tensors = self._make()
        for name in names:
            tensor = self._tensors[name]
            yield name, as_initial(name, tensor, dtype, trained=isinstance(tensor, nn.Parameter))

    def release(self) -> None:
        """See `InitialValues`."""
        if self._make is not None:
            self._tensors = None


@dataclass
class Deferred:
    """Values of a model whose large tensors were recorded instead of made: each is computed when it is asked for.

    `tensors`: as the model function made them, real or on the meta device.
    """

    tensors: Mapping[str, Tensor]
    recording: Recording
    notes: tuple[str, ...] = ()

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `InitialValues`."""
        for name in names:
            tensor = self.tensors[name]
            trained, absent = isinstance(tensor, nn.Parameter), self.recording.tracks(tensor)
            own = absent and not self.recording.known(tensor)
            value = self.recording.values(tensor) if absent else tensor
            del tensor
            yield name, as_initial(name, value, dtype, trained=trained, own=own)

    def release(self) -> None:
        """The record is small, and stays."""


def by_layer(graph: Graph, seed: int, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """What each layer begins with, one layer after the other; of others only tied parameters are held meanwhile."""
    names = [list(state_shapes(graph, index, index + 1)) for index in range(len(graph.layers))]
    tied = {name for several in graph.ties for name in several}
    everything = list(dict.fromkeys(name for layer in names for name in layer))
    stream = initial_values(graph, seed).stream(everything, dtype)
    have: dict[str, Tensor] = {}
    for layer in names:
        while any(name not in have for name in layer):
            have.update([next(stream)])
        yield {name: have[name] for name in layer}
        have = {name: value for name, value in have.items() if name in tied or name not in layer}


@dataclass
class Built:
    """Values of a hand-written `Graph`: its builds run in layer order in one random stream, one layer is held at a time.

    `seed` begins the stream, or `state`: as the model function has left the generators. `watch(who)`: entered around every
    build.
    """

    graph: Graph
    seed: int
    state: RandomState | None = None
    watch: Watch = contextlib.nullcontext
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
                    yield path, as_initial(path, tensor, dtype, trained=isinstance(tensor, nn.Parameter))
        assert not wanted, f"the graph has no {sorted(wanted)}"

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(layer name, module with its values), one after the other. Draws made in between do not count."""
        random = self.state
        for layer in self.graph.layers:
            with preserved():
                if random is None:
                    seed_all(self.seed)
                else:
                    random.restore()
                with self.watch(f"the constructor of layer {layer.name!r}"):
                    module, _ = call_watched(layer.build)
                random = RandomState.now()
            refuse_lazy([(layer.name, module)])
            yield layer.name, module

    def release(self) -> None:
        """Nothing is kept."""


@dataclass
class ByName:
    """`init: by-name`: every module's `reset_parameters` (or `Graph.init`) under a seed of its name; `buffers`: where buffers
    come from. What constructors give parameters is not used."""

    graph: Graph
    seed: int
    buffers: InitialValues

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `InitialValues`."""
        canonical, wanted = canonical_names(self.graph), set(names)
        for layer in self.graph.layers:
            skeleton = on_meta(layer)
            owned = {canonical.get(f"{layer.name}.{p}", f"{layer.name}.{p}") for p, _ in skeleton.named_parameters()}
            buffers = [f"{layer.name}.{path}" for path, _ in skeleton.named_buffers()]
            kept = dict(self.buffers.stream(buffers, dtype)) if wanted & {*owned, *buffers} else {}
            yield from ((name, kept[name]) for name in buffers if name in wanted)
            wanted -= set(buffers)
            if wanted & owned:
                _make_unfilled(skeleton, dtype)
                put_buffers(layer.name, skeleton, kept)
                with preserved():
                    _initialise(self.graph, layer.name, skeleton, self.seed)
                _refuse_unfilled(self.graph, layer.name, skeleton)
                for path, parameter in skeleton.named_parameters():
                    name = f"{layer.name}.{path}"
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
            return ()
        return (
            "init: by-name: parameters begin with what reset_parameters() gives them, not with what the model function did",
        )


def _make_unfilled(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives every parameter memory, in place, filled with NaN: what nobody initialises is found, instead of being whatever the
    memory held."""
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


def _refuse_unfilled(graph: Graph, layer: str, module: nn.Module) -> None:
    for path, parameter in module.named_parameters():
        if parameter.is_floating_point() and bool(parameter.isnan().any()):
            owner, _, _ = path.rpartition(".")
            kind = type(module.get_submodule(owner)).__name__
            by = "init(name, tensor)" if graph.init is not None else f"reset_parameters() of {kind}"
            raise ModelError(
                f"parameter {layer}.{path} is left without (all its) values by {by}",
                cure="give every parameter its values there: those of the constructor are not kept"
                + ("" if graph.init is not None else "; or set init: model"),
            )


def _initialise(graph: Graph, layer: str, module: nn.Module, seed: int) -> None:
    if graph.init is not None:
        canonical = canonical_names(graph)
        for path, parameter in module.named_parameters():
            name = f"{layer}.{path}"
            with torch.no_grad():
                torch.manual_seed(seed_of(seed, "init", canonical.get(name, name)))
                graph.init(canonical.get(name, name), parameter)
        return
    for path, part in module.named_modules():
        if not any(p is not None for p in part._parameters.values()):
            continue
        name = f"{layer}.{path}" if path else layer
        reset: Callable[[], Tensor | None] | None = getattr(part, "reset_parameters", None) or getattr(
            part, "_reset_parameters", None
        )
        if reset is None:
            raise ModelError(
                f"{name} ({type(part).__name__}) owns parameters but has no reset_parameters()",
                cure="set init: model (what constructors give is kept), add one, or return a Graph with "
                "init=function(name, tensor)",
            )
        torch.manual_seed(seed_of(seed, "init", name))
        reset()
