"""The tensors that a stage's layers compute with: values in autograd's graph, parameters, one leaf for each use, and buffers.

A stage gets its layers' tensors from `StageTensors.enter_layer`, at every layer boundary. Today these tensors are
whole parameters (or a shard's slices of them), which lie in the modules all the time; where replicas divide them, their memory
is there from a gather to their last use in a step (`step/gathered_memory.py`), or comes for a layer and goes after it
(`step/layer_gather.py`). Weights that are fetched from host memory would be made there, too. Autocast makes none here: it casts
them, for each operation as its lists say. With `precision.parameters` the tensors in the modules are rounded copies, made anew
once a step; the parameters, which `StageTensors` has beside the modules, are their masters (rule 13 of the numerics contract).

A layer reads the very tensor that another layer of the stage returned, so autograd adds the gradients of a value in its own
order. A value from another stage is read through one alias, whose complete gradient is what the stage hands on (rule 4 of the
numerics contract).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from raypar.comm.sent_tensor_layout import copy_as_it_lies
from raypar.errors import UserCodeError
from raypar.model.autograd_function_types import AutogradContext, AutogradFunction
from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import canonical_names
from raypar.model.rounded_parameters import ids_of_rounded_parameters
from raypar.torch_compat.autograd import has_gradient_hooks, share_hooks_of_leaf
from raypar.torch_compat.modules import non_persistent_buffer_names
from raypar.torch_compat.multi_tensor import copy_all
from raypar.worker.data.sample_reader import WHERE_FIELDS_ARE_NAMED
from raypar.worker.stage.tensors_without_memory import has_memory, without_memory

Hook = Callable[[Tensor | None], None]
"""Called with the gradient of a value once it is complete. Returns None, so autograd goes on with the very gradient."""
Hooks = OrderedDict[int, Hook]
"""A tensor's hooks as PyTorch keeps them. The tensors of all microbatches share the dict, so that a hook can be exchanged in
all of them at once."""


def make_alias(value: Tensor) -> Tensor:
    """Another tensor of the same memory, shape and strides, with a node of its own in the autograd graph.

    Not `view_as`, which gives dims of length 1 the strides of a new tensor: a channels_last image of one channel, (4, 1, 2, 1),
    would become (4, 4, 2, 1), and its convolution would choose another kernel.
    """
    return torch.ops.aten.alias.default(value)  # type: ignore[no-any-return]


def memory_begin(tensor: Tensor) -> int:
    """The address of a tensor's storage, which not every device tells of the storage itself."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.itemsize


class _Copy(AutogradFunction):
    """A value's copy, which lies as it does and gives it its gradient."""

    @staticmethod
    def forward(ctx: AutogradContext, value: Tensor) -> Tensor:
        return copy_as_it_lies(value.detach())

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor | None) -> Tensor | None:
        return gradients[0]


def own_tensors(outputs: Sequence[Tensor], values: Collection[int]) -> tuple[Tensor, ...]:
    """The tensors of the values that a layer returned as `outputs`: as a rule these themselves.

    `values`: the `id` of each tensor that is a value already.

    One is an alias if its output is such a value (the layer has returned what it read, or one tensor under two names): the
    gradients of each value are added apart, and users' code may ask whether two values are one object, which they are not where
    they come from another stage. It is one, too, if the output has hooks of users' code, which then come after those that
    readers register, in one stage as in two; and if it is a leaf (a parameter). A leaf's gradient would come at another time
    than that of what a layer computes, and autocast would keep one cast of it for several readers.
    """
    known, found = set[int](), list[Tensor]()
    for output in outputs:
        is_value = id(output) in values or id(output) in known
        if is_value or (output.requires_grad and (output.is_leaf or has_gradient_hooks(output))):
            output = make_alias(output)
        known.add(id(output))
        found.append(output)
    return tuple(found)


def alias_received(value: Tensor, hooks: Hooks) -> Tensor:
    """The tensor through which all layers of a stage read a value from another stage that requires a gradient.

    The gradient reaches `hooks`, with the strides that autograd gave it, and goes no further: the leaf behind the alias takes
    none, because it would copy a gradient that somebody else refers to.
    """
    leaf = value.detach().requires_grad_()
    share_hooks_of_leaf(leaf, hooks)
    alias = make_alias(leaf)
    leaf.requires_grad_(False)
    return alias


def require_value(values: Mapping[str, Tensor], name: str, reader: str) -> Tensor:
    """The value `name`. Raises `UserCodeError` if no layer has written it and the batch has no such field."""
    if name not in values:
        raise UserCodeError(
            f"{reader} reads {name!r}, which no layer writes and the batch does not have (it has {sorted(values)})",
            cure=WHERE_FIELDS_ARE_NAMED,
        )
    return values[name]


def read_inputs(values: Mapping[str, Tensor], names: Sequence[str], layer: str) -> list[Tensor]:
    """A layer's arguments."""
    return [values[name] if name in values else require_value(values, name, f"layer {layer!r}") for name in names]


class ParameterUse(NamedTuple):
    """One layer's use of a trainable parameter: a leaf with a gradient of its own (rule 6 of the numerics contract)."""

    name: str
    """Qualified name (`layer.path`) under which this layer has the parameter; a tie's other names stay as they are."""
    shape: torch.Size
    """Shape of the tensor that this worker holds."""
    dtype: torch.dtype
    """Dtype of its summed gradient. The leaf may be a copy of the parameter in a lower precision, the sum too."""


@dataclass(frozen=True, slots=True)
class LayerBuffer:
    """A buffer as the stage keeps it: part of the stage's state, which changes at commits only (`buffer_updates.py`)."""

    path: str
    """The buffer's path in its layer."""
    owner: nn.Module
    """The module that has the buffer."""
    key: str
    """Its name in `owner`."""
    tensor: Tensor
    """The tensor that holds its value, whatever forward has put in its place."""
    persistent: bool
    """Whether PyTorch's `state_dict` has it. Forward may replace the tensor of a buffer that is not persistent (a cache)."""


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """What one layer computes with."""

    module: nn.Module
    """The layer's module, with the tensors in their places."""
    buffers: tuple[LayerBuffer, ...]
    """The module's buffers as they were given."""
    uses: range
    """Indices in `StageTensors.uses` of this layer's uses."""
    parameters: tuple[str, ...]
    """Canonical names of its parameters, frozen ones too."""


LayerPass = Literal["forward", "recompute", "backward"]
"""In which way a computation goes through a stage's layers."""


class GathersLayers(Protocol):
    """Brings the parameters of a stage layer by layer (`worker/step/layer_gather.py`)."""

    waited_ns: int
    """How long layers have waited for theirs in this step."""

    def begin(self, kind: LayerPass) -> None:
        """A computation begins."""

    def enter(self, position: int) -> None:
        """The computation of a layer begins: returns once its parameters are there."""

    def end(self) -> None:
        """The computation is over."""


class StageTensors:
    """The tensors of one stage, by layer, by parameter and by use."""

    layer_names: tuple[str, ...]
    """Names of the stage's layers, in order."""
    modules: Mapping[str, nn.Module]
    """Layer name -> module, in layer order."""
    parameters: dict[str, nn.Parameter]
    """Canonical name -> parameter, frozen ones too. A tied parameter stands once, as its first use in this stage. Where layers
    compute with copies in a lower precision these are the masters: all that the optimizer, checkpoints, mirrors and other
    workers see."""
    uses: list[ParameterUse]
    """Every use of a trainable parameter, in layer order."""
    leaves: list[nn.Parameter]
    """By index of `uses`: the tensor to whose `.grad` autograd adds. Leaves of a tie share their memory."""
    rounded: dict[str, nn.Parameter]
    """Canonical name -> the copy in a lower precision that layers compute with, of parameters that have one."""
    freed_masters: set[str]
    """Canonical names of parameters with such a copy of which nothing is here but what the worker's optimizer has: replicas
    divide them. All of `parameters[name]` reads as NaN."""
    sums_in: torch.dtype | None
    """The dtype in which gradients of these copies are added up; None: in that of the parameters, as all others."""
    buffers: dict[str, Tensor]
    """Qualified name -> buffer as it was given, whatever forward has put in its place since."""
    persistent: frozenset[str]
    """Names of the buffers that exports contain."""
    temporary: Set[int]
    """Addresses of the memory of whole parameters that is there now and is freed after a use."""
    gathers: GathersLayers | None
    """Brings parameters layer by layer; None where they are there while the stage computes."""
    _sharing: dict[str, list[nn.Parameter]]
    """Canonical name -> the tensors of one memory that layers compute with."""
    _layers: list[LayerTensors]
    """By position of the layer in the stage."""
    _use_of: dict[int, int]
    """`id` of a leaf -> index of its use."""

    def __init__(
        self,
        graph: Graph,
        layers: Sequence[Layer],
        modules: Mapping[str, nn.Module],
        rounded_to: torch.dtype | None = None,
        sums_in: torch.dtype | None = None,
    ) -> None:
        """`rounded_to`: the dtype of the copies of parameters that layers compute with; None: they compute with these.
        `sums_in`: the dtype in which gradients of copies are added up; None: in that of the parameters."""
        canonical = canonical_names(graph)
        self.layer_names = tuple(layer.name for layer in layers)
        self.modules, self.parameters, self.rounded, self.sums_in = modules, {}, {}, sums_in
        self.freed_masters, self.temporary, self._sharing, self.gathers = set(), frozenset(), {}, None
        self.uses, self.leaves, self._layers = [], [], []
        for layer in layers:
            first, module = len(self.uses), modules[layer.name]
            named = dict(module.named_parameters())
            copied = ids_of_rounded_parameters(module) if rounded_to is not None else ()
            names = dict[str, None]()
            for path in _in_order_of_use(layer, named, canonical):
                parameter, name = named[path], layer.qualify(path)
                names[canonical.get(name, name)] = None
                self._take(parameter, canonical.get(name, name), rounded_to if id(parameter) in copied else None)
                if parameter.requires_grad:
                    home = self.parameters[canonical.get(name, name)]
                    dtype = sums_in if sums_in is not None and id(parameter) in copied else home.dtype
                    self.uses.append(ParameterUse(name, home.shape, dtype))
                    self.leaves.append(parameter)
            self._layers.append(LayerTensors(module, layer_buffers(module), range(first, len(self.uses)), tuple(names)))
        self._use_of = {id(leaf): use for use, leaf in enumerate(self.leaves)}
        buffers = [(layer.qualify(b.path), b) for layer, held in zip(layers, self._layers, strict=True) for b in held.buffers]
        self.buffers = {name: buffer.tensor for name, buffer in buffers}
        self.persistent = frozenset(name for name, buffer in buffers if buffer.persistent)

    def _take(self, parameter: nn.Parameter, name: str, rounded_to: torch.dtype | None) -> None:
        """Take in a layer's parameter, canonically `name`. `rounded_to`: the dtype of the copy that the layer computes with."""
        self._sharing.setdefault(name, []).append(parameter)
        if rounded_to is None:
            home = self.parameters.setdefault(name, parameter)
            if home is not parameter:
                parameter.data = home.data  # one memory, but a leaf and a gradient for every layer that uses it
            return
        if name not in self.parameters:
            self.parameters[name] = master = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            vars(master).update(vars(parameter))
        copy = self.rounded.setdefault(name, parameter)
        parameter.data = _copy_in(rounded_to, self.parameters[name].data) if copy is parameter else copy.data

    def round_parameters(self, *, trained_only: bool = False) -> None:
        """Make the copies that layers compute with those of the parameters as they are now. `trained_only`: a step has changed
        these, and no frozen ones."""
        names = [
            name
            for name, copy in self.rounded.items()
            if name not in self.freed_masters and (self.parameters[name].requires_grad or not trained_only) and has_memory(copy)
        ]
        if names:
            with torch.no_grad():
                copy_all([self.rounded[name] for name in names], [self.parameters[name] for name in names])

    def free_master(self, name: str) -> None:
        """Free the memory of a parameter of which layers use a copy."""
        master = self.parameters[name]
        master.data = torch.full((), float("nan"), dtype=master.dtype, device=master.device).expand(master.shape)
        self.freed_masters.add(name)

    def computed_with(self, name: str) -> Tensor:
        """The tensor of a parameter that layers compute with: it, or its copy in a lower precision."""
        return self.rounded.get(name, self.parameters[name]).detach()

    def take_new_memory(self, name: str) -> Tensor:
        """Move what layers compute with of a parameter into memory that nothing else refers to; returns it. What has no memory
        yet stays without."""
        there = self.computed_with(name)
        return self._move(name, there.clone()) if has_memory(there) else there

    def take_empty_memory(self, name: str) -> Tensor:
        """Give what layers compute with of a parameter memory that is not filled, and its own; returns it."""
        return self._move(name, torch.empty_like(self.computed_with(name)))

    def _move(self, name: str, moved: Tensor) -> Tensor:
        """Have a parameter's memory be that of `moved`."""
        for parameter in self._sharing[name]:
            parameter.data = moved
        return self.computed_with(name)

    def is_temporary(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that is freed after the last use of a step."""
        return bool(self.temporary) and memory_begin(tensor) in self.temporary

    def of_layer(self, position: int) -> LayerTensors:
        """What the stage's layer at `position` computes with."""
        return self._layers[position]

    def enter_layer(self, position: int) -> LayerTensors:
        """The same, ready for its forward, which begins now."""
        if self.gathers is not None:
            self.gathers.enter(position)
        return self._layers[position]

    def outlasting(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What a layer has returned, in memory that lasts where its parameters' goes before all have read it."""
        if self.gathers is None:
            return outputs
        return tuple(_Copy.apply(each) if self.is_temporary(each) else each for each in outputs)

    def use_of(self, leaf: Tensor) -> int:
        """Index of the use whose leaf this is."""
        return self._use_of[id(leaf)]

    def uses_of(self, leaf_ids: Sequence[int]) -> tuple[int, ...]:
        """Indices of the uses with these leaves, given by `id`; ids of other tensors are left out."""
        return tuple(self._use_of[leaf] for leaf in leaf_ids if leaf in self._use_of)


def _copy_in(dtype: torch.dtype, master: Tensor) -> Tensor:
    """A copy in a lower precision; of what has no memory yet, one that has none."""
    return master.to(dtype) if has_memory(master) else without_memory(master.shape, dtype, master.device)


def _in_order_of_use(layer: Layer, paths: Iterable[str], canonical: Mapping[str, str]) -> list[str]:
    """The paths of a layer's parameters; those that are one parameter in the order of their uses, which `own_names` has."""
    order = {path: number for number, (path, _) in enumerate(layer.own_names or ())}
    several: dict[str, list[str]] = {}
    for path in paths:
        several.setdefault(canonical.get(layer.qualify(path), path), []).append(path)
    by_use = {name: iter(sorted(same, key=lambda path: order.get(path, 0))) for name, same in several.items()}
    return [next(by_use[name]) for name in [canonical.get(layer.qualify(path), path) for path in paths]]


def layer_buffers(module: nn.Module) -> tuple[LayerBuffer, ...]:
    """Every buffer of a layer once, under its first path."""
    return tuple(
        LayerBuffer(path, owner, key, tensor, key not in non_persistent_buffer_names(owner))
        for path, tensor in module.named_buffers()
        for owner, key in [(module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2])]
    )
