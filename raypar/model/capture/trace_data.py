"""What one call of a model's forward did, as plain data: events in order, and references to the tensors that they read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from raypar.model.graph import ModelOutput
from raypar.torch_compat.pytree import TreeSpec, tree_flatten

TensorKind = Literal["value", "parameter", "buffer", "field", "constant"]
"""Where a tensor comes from: an event of the trace, the model's state, the batch, or code that no event made."""


EventId = tuple[int, str, int]
"""(unit calls so far, function name, its number since the last unit call): identifies the same call in every trace of a
model."""


@dataclass(frozen=True, slots=True)
class TensorKey:
    """One version of one tensor of a trace. A write in place makes a new version, which is a `value`."""

    kind: TensorKind
    """Where it comes from."""
    name: str
    """Qualified name of a parameter or buffer, name of a batch field, number of a value or constant."""

    def __hash__(self) -> int:
        return hash(self.name)  # the kind hardly ever decides

    @property
    def is_state(self) -> bool:
        """Whether it is a parameter or buffer of the model."""
        return self.kind in ("parameter", "buffer")


@dataclass(frozen=True, slots=True)
class ModuleArgument:
    """A module of the model that is an argument of a unit's call: a position bias that all blocks use, say."""

    path: str
    """Its qualified name."""


@dataclass(frozen=True, slots=True)
class CpuAutocastSetting:
    """The autocast setting that users' code has entered around an event."""

    enabled: bool
    """Whether operations are cast."""
    dtype: torch.dtype
    """The dtype to which they are cast."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One tensor whose storage an event writes in place: its version before and after."""

    before: TensorKey
    """The version that is gone."""
    after: TensorKey
    """The version that the event makes."""


@dataclass(frozen=True, eq=False)
class Event:
    """One call: of a unit, or of a function of PyTorch between units."""

    call: Callable[..., Any] | str
    """The function; of a unit its qualified name."""
    leaves: tuple[Any, ...]
    """The arguments as pytree leaves: tensors as `TensorKey`, modules as `ModuleArgument`, others as they are."""
    structure: TreeSpec
    """The pytree structure of (args, kwargs)."""
    outputs: tuple[TensorKey | None, ...]
    """The tensors among the flattened results; None for other results."""
    returns_tensor: bool
    """Whether the result is one tensor, in no container."""
    rewrites: tuple[Rewrite, ...]
    """All known tensors in the storages that it writes: its written arguments, and views of them."""
    written: tuple[TensorKey, ...]
    """Its arguments that it writes in place, in their versions before."""
    grad: bool
    """False inside users' `torch.no_grad()`."""
    autocast: CpuAutocastSetting | None
    """Autocast, where users' code sets it between units; None: as it is around the model."""
    is_pure: bool
    """Whether it depends on batch fields, buffers and constants alone, without gradient or random numbers."""
    location: str
    """File and line of the user's code that made the call."""
    result_form: Hashable = None
    """Of a unit that has read values, what it returned as `form_of` says it: for other values it may be another."""
    home: str = ""
    """Qualified name of the module whose own code made the call; empty for the model's."""
    draws: bool = False
    """Whether it drew random numbers."""

    @property
    def is_unit(self) -> bool:
        """Whether it is the call of a unit."""
        return isinstance(self.call, str)

    @property
    def inputs(self) -> tuple[TensorKey, ...]:
        """The tensors among the arguments."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorKey))

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Qualified names of the modules among the arguments."""
        return tuple(leaf.path for leaf in self.leaves if isinstance(leaf, ModuleArgument))

    @property
    def makes(self) -> tuple[TensorKey, ...]:
        """All versions of tensors that exist after the event only."""
        return (*(key for key in self.outputs if key is not None), *(rewrite.after for rewrite in self.rewrites))

    @property
    def label(self) -> str:
        """The call in messages."""
        return self.call if isinstance(self.call, str) else getattr(self.call, "__name__", str(self.call))


@dataclass(frozen=True, slots=True)
class Guard:
    """Something that the forward has read from the batch in Python: another answer may lead it another way."""

    event: int
    """Index in `Trace.events` of the (pure) event that gave the answer."""
    answer: Any
    """The answer as `comparable` makes it."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Shape, dtype, requires_grad and storage of one version of a tensor."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """Its dtype."""
    requires_grad: bool
    """Whether it carries a gradient."""
    storage: int
    """A number that is equal for tensors that share memory."""


@dataclass(frozen=True, eq=False)
class Trace:
    """One call of a model's forward."""

    events: tuple[Event, ...]
    """Unit calls, and the calls of PyTorch's functions between them, in order."""
    guards: tuple[Guard, ...]
    """What the forward has read from the batch in Python."""
    output_leaves: tuple[Any, ...]
    """What the forward returned, as pytree leaves: tensors as `TensorKey`."""
    output_structure: TreeSpec
    """The pytree structure of what the forward returned."""
    constants: Mapping[TensorKey, Tensor]
    """Tensors that are neither state nor made by an event: plain attributes, and what code makes of numbers."""
    facts: Mapping[TensorKey, TensorFacts]
    """What is known of each tensor."""
    passed_through: frozenset[EventId]
    """Calls that returned one of their arguments, and did not write it."""
    call_log: tuple[tuple[Hashable, ...], ...]
    """(call, location, what its arguments are) of the events that are not pure, and of the end."""
    gradient_parts: Mapping[str, int]
    """Parameter -> how many gradients autograd adds up for it: one for each use in an operation, inside of units too."""
    most_parts_of_call: Mapping[str, int]
    """Parameter -> the most of these that come from one call of a unit."""
    has_fused_units: bool
    """Whether units have autocast's dtype because a fused operation computes them: on shards, where none does, they may have
    float32."""
    branches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Unit whose modules form parallel branches -> the modules that its code calls; empty if nobody looked for them."""
    branching: frozenset[str] = frozenset()
    """Modules whose units form parallel branches; of the model itself the name is empty."""

    @cached_property
    def output_leaves_without_tensors(self) -> tuple[Any, ...]:
        """What the forward returned, as pytree leaves, with None in the place of each tensor."""
        return tuple(None if isinstance(leaf, TensorKey) else leaf for leaf in self.output_leaves)

    @property
    def output_keys(self) -> tuple[TensorKey, ...]:
        """The tensors that the forward returned."""
        return tuple(leaf for leaf in self.output_leaves if isinstance(leaf, TensorKey))


def comparable(answer: Any) -> Hashable:
    """An answer that Python code got of a tensor, so that two of them can be compared with `==`."""
    if isinstance(answer, Tensor):
        return ("tensor", tuple(answer.shape))
    if hasattr(answer, "tobytes"):  # numpy
        return ("array", tuple(answer.shape), str(answer.dtype), answer.tobytes())
    if isinstance(answer, float) and answer != answer:
        return "nan"
    if isinstance(answer, (list, tuple)):
        return (type(answer).__name__, tuple(map(comparable, answer)))
    plain: Hashable = answer
    return plain


def form_of(result: ModelOutput) -> Hashable:
    """The pytree structure of what a unit returned, with the shape and dtype of each tensor, so that two can be compared."""
    leaves, structure = tree_flatten(result)
    kinds = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
    return structure, tuple(kinds)
