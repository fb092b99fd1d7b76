"""Splits a trace into layers: a layer is one call of a unit and the glue, the PyTorch calls, up to the next unit call.

Glue before the first unit call belongs to the first layer; where parallel branches meet, a layer may be glue alone
(`layer_drafts.py`). Glue is pure if it depends only on the batch, buffers and constants, draws no random numbers and carries no
gradient; each layer that needs it recomputes it. Every other value is passed from the layer that computes it to the layers that
read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from raypar.model.capture.layer_drafts import LayerDraft, draft_layers
from raypar.model.capture.refusal import Refused
from raypar.model.capture.trace_data import Event, TensorKey, Trace

USES = "~"
"""Submodule of a layer that holds one leaf for each use of a parameter that the layer uses several times."""


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """What one layer does."""

    name: str
    """The layer's name: the qualified name of its unit; for a later call of it with its number."""
    events: tuple[Event, ...]
    """The events that it runs, in order."""
    reads: tuple[tuple[str, TensorKey], ...]
    """(value of the graph, key) of each value that other layers made, in the order of their names."""
    fields: tuple[str, ...]
    """Batch fields that its events read."""
    outputs: tuple[tuple[str, TensorKey], ...]
    """(value of the graph, key) of each value that other layers or the loss read."""
    copied: frozenset[TensorKey]
    """Tensors from outside of the layer that its events write into: they are copied first."""
    state: tuple[TensorKey, ...]
    """Parameters and buffers that its glue reads."""

    @cached_property
    def unit(self) -> str | None:
        """Qualified name of the unit; None if it calls none."""
        return next((event.call for event in self.events if isinstance(event.call, str)), None)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Qualified names of the modules that the unit is given as arguments."""
        return tuple(dict.fromkeys(path for event in self.events for path in event.modules))

    @cached_property
    def read_keys(self) -> tuple[TensorKey, ...]:
        """Keys of the values that it reads."""
        return tuple(key for _, key in self.reads)

    @cached_property
    def output_keys(self) -> tuple[TensorKey, ...]:
        """Keys of the values that it writes."""
        return tuple(key for _, key in self.outputs)

    @cached_property
    def unvarying(self) -> tuple[Event, ...]:
        """Events that make the same in every call, such as position ids: glue behind which nothing is read. None are where an
        event writes in place, or where the layer returns what they make."""
        made, found = set[TensorKey](), list[Event]()
        for event in self.events:
            if event.rewrites or event.written:
                return ()
            if event.is_pure and not event.modules and made.issuperset(event.inputs):
                made.update(event.makes)
                found.append(event)
        return () if made.intersection(self.output_keys) else tuple(found)

    @cached_property
    def varying(self) -> tuple[Event, ...]:
        """The other events."""
        return tuple(event for event in self.events if event not in self.unvarying)

    @cached_property
    def unvarying_keys(self) -> tuple[TensorKey, ...]:
        """What the other events read of that."""
        made = {key for event in self.unvarying for key in event.makes}
        return tuple(dict.fromkeys(key for event in self.varying for key in event.inputs if key in made))

    @cached_property
    def kept(self) -> dict[tuple[torch.device, bool], list[tuple[TensorKey, Tensor, int]]]:
        """(device, whether under autocast) -> (key, tensor, its version) of each of these, once a call there has made them."""
        return {}

    @cached_property
    def is_bare_call(self) -> bool:
        """Whether it does nothing but call its unit with values of other layers."""
        return (
            len(self.events) == 1
            and self.events[0].is_unit
            and not self.fields
            and all(isinstance(leaf, TensorKey) and leaf.kind == "value" for leaf in self.events[0].leaves)
            and not self.copied
            and self.events[0].result_form is None
            and [key for _, key in self.outputs] == [key for key in self.events[0].outputs if key is not None]
        )


@dataclass(frozen=True, eq=False)
class CutTrace:
    """A trace, cut into layers."""

    trace: Trace
    """The trace."""
    layers: tuple[LayerProgram, ...]
    """The layers, in order."""
    outputs: tuple[str, ...]
    """The tensors that the forward returned, as values that the last layer writes."""
    joined: frozenset[int] = frozenset()
    """As in `LayerDrafts`."""

    def is_fixed(self, index: int) -> bool:
        """Whether the layer's program is the same for every batch, so that it is not given the batch fields."""
        tells_numbers = self.returns_numbers and index == len(self.layers) - 1
        return self.layers[index].is_bare_call and not self.trace.guards and not tells_numbers

    @cached_property
    def returns_numbers(self) -> bool:
        """Whether the forward returned something beside tensors and None, which may be another for each batch.

        The last layer then also writes which of `TraceCache.output_forms` it is.
        """
        return any(leaf is not None for leaf in self.trace.output_leaves_without_tensors)

    @property
    def form_output(self) -> str:
        """The name of the value that says which form it is."""
        return f"{self.layers[-1].name}.form"

    @cached_property
    def guard_events(self) -> tuple[tuple[int, Event], ...]:
        """(index, event) of the events that must run to know what the guards ask. Of guards behind which no event reads a
        field, a buffer or a constant there are none: batches of one signature all have the answer."""
        chosen = set[int]()
        for guard in self.trace.guards:
            behind = _events_behind(self.trace, [guard.event])
            if any(_reads_what_is_given(self.trace.events[index]) for index in behind):
                chosen |= behind
        return tuple((index, self.trace.events[index]) for index in sorted(chosen))

    @cached_property
    def value_gradients(self) -> Mapping[str, bool]:
        """Value of the graph -> whether it carries a gradient."""
        return {
            name: self.trace.facts[key].requires_grad for layer in self.layers for name, key in (*layer.reads, *layer.outputs)
        }


def _reads_what_is_given(event: Event) -> bool:
    """Whether an event reads tensors that no event makes, or modules."""
    return event.is_unit or bool(event.modules) or any(key.kind != "value" for key in event.inputs)


def _events_behind(trace: Trace, last: Collection[int]) -> set[int]:
    """Indices of events, and of all those on which they depend."""
    makers = _makers(trace)
    todo, chosen = list(last), set[int]()
    while todo:
        index = todo.pop()
        if index not in chosen:
            chosen.add(index)
            event = trace.events[index]
            needed = (*event.inputs, *(rewrite.before for rewrite in event.rewrites))
            todo += [makers[key] for key in needed if key in makers]
    return chosen


def buffers_read_by(trace: Trace, event: int) -> set[str]:
    """Names of the buffers on which an event depends."""
    behind = _events_behind(trace, [event])
    return {key.name for index in behind for key in trace.events[index].inputs if key.kind == "buffer"}


def cut_into_layers(
    trace: Trace,
    parameters_of_module: Mapping[str, Collection[str]] = MappingProxyType({}),
    branching: Collection[str] = (),
    first: CutTrace | None = None,
) -> CutTrace:
    """The layers of a trace. Raises `Refused` where a write would have to be seen through a view in another layer.

    `parameters_of_module`: unit, or module that a unit is given -> names of its parameters, as the trace has them. `branching`:
    modules whose units form parallel branches. `first`: the first trace, if this is another.
    """
    drafted = draft_layers(trace, branching, first.joined if first is not None else None)
    drafts = drafted.drafts
    live, makers = _live_tensors(trace), _makers(trace)
    for index, draft in enumerate(drafts):
        wanted = list(trace.output_keys) if index == len(drafts) - 1 else []
        _complete(trace, draft, wanted, live, makers)
    _refuse_late_views(trace, {key for draft in drafts for key in draft.incoming})
    value_names, outputs = _name_values(trace, drafts)
    shared = _shared_parameters(trace, drafts, parameters_of_module)
    layers = []
    for index, draft in enumerate(drafts):
        copied = _check_writes(trace, draft, live)
        events, state = _separate_uses(trace, draft, shared, parameters_of_module)
        layers.append(
            LayerProgram(
                name=draft.name,
                events=events,
                reads=tuple(sorted(((value_names[key], key) for key in draft.incoming), key=lambda pair: pair[0])),
                fields=tuple(draft.fields),
                outputs=tuple(outputs[index]),
                copied=copied,
                state=state,
            )
        )
    for draft in drafts:
        _refuse_distant_derivatives(trace, draft)
    final = {key: value for value, key in outputs[-1]}
    return CutTrace(trace, tuple(layers), tuple(final[key] for key in trace.output_keys), drafted.joined)


def _makers(trace: Trace) -> dict[TensorKey, int]:
    """Key -> index of the event that makes it."""
    found: dict[TensorKey, int] = {}
    for index, event in enumerate(trace.events):
        for key in event.makes:
            if key.kind == "value":
                found.setdefault(key, index)
    return found


def _live_tensors(trace: Trace) -> set[TensorKey]:
    """The versions of tensors that something reads after they are made."""
    live = set(trace.output_keys)
    guards = {guard.event for guard in trace.guards}
    for index in reversed(range(len(trace.events))):
        event = trace.events[index]
        if event.is_pure and index not in guards and not live.intersection(event.makes):
            continue
        live |= {rewrite.before for rewrite in event.rewrites if rewrite.after in live}
        live |= set(event.inputs)
    return live


def _complete(
    trace: Trace,
    draft: LayerDraft,
    wanted: list[TensorKey],
    live: set[TensorKey],
    makers: Mapping[TensorKey, int],
) -> None:
    """Add to a layer the pure events that it needs, and what it reads from outside. `wanted`: tensors that it must return."""
    todo, keys = list(draft.own), list(wanted)
    own = set(draft.own)
    while todo or keys:
        if keys:
            key = keys.pop()
            if key.is_state:
                draft.state[key] = None
            elif key.kind == "field":
                draft.fields[key.name] = None
            elif key.kind == "value":
                maker = makers[key]
                if trace.events[maker].is_pure:
                    todo.append(maker)
                elif maker not in own:
                    draft.incoming[key] = None
            continue
        index = todo.pop()
        if index not in draft.chosen:
            draft.chosen.add(index)
            event = trace.events[index]
            keys += [*event.inputs, *(rewrite.before for rewrite in event.rewrites if rewrite.after in live)]


def _refuse_distant_derivatives(trace: Trace, draft: LayerDraft) -> None:
    """Raises `Refused` for `torch.autograd.grad` by a tensor of another layer, unless the layer receives that alone: the graph
    ends at what a layer receives."""
    received = [key for key in draft.incoming if trace.facts[key].requires_grad]
    for index in draft.own:
        event = trace.events[index]
        if event.call is torch.autograd.grad and len(received) > 1 and not set(received).isdisjoint(event.inputs):
            raise Refused(
                f"torch.autograd.grad at {event.location} is asked for derivatives by a tensor of an earlier layer, and reads "
                f"{len(received)} such tensors: on workers the graph ends at each of them",
                "make a module around all between the tensors and the call, and that a unit (model.units)",
            )


def _modules_of(trace: Trace, draft: LayerDraft) -> list[str]:
    """The unit that a layer calls, and the modules that it is given."""
    calls = [event for event in (trace.events[i] for i in draft.own) if event.is_unit]
    return [path for event in calls for path in (event.label, *event.modules)]


def _shared_parameters(trace: Trace, drafts: list[LayerDraft], parameters_of_module: Mapping[str, Collection[str]]) -> set[str]:
    """Names of the parameters that several layers use."""
    users: Counter[str] = Counter()
    for draft in drafts:
        used = {key.name for key in draft.state if key.kind == "parameter"}
        users.update(used.union(*(parameters_of_module.get(module, ()) for module in _modules_of(trace, draft))))
    return {name for name, count in users.items() if count > 1}


def _separate_uses(
    trace: Trace, draft: LayerDraft, shared: set[str], parameters_of_module: Mapping[str, Collection[str]]
) -> tuple[tuple[Event, ...], tuple[TensorKey, ...]]:
    """(the events of a layer, parameters and buffers that its glue reads).

    If this layer uses a shared parameter several times, every use has a key and a leaf of its own: autograd adds the gradients
    of all uses from the last to the first, so they must be kept apart.
    """
    events = [trace.events[i] for i in sorted(draft.chosen)]
    reads = Counter(key.name for event in events for key in event.inputs if key.kind == "parameter")
    reads.update(name for module in _modules_of(trace, draft) for name in parameters_of_module.get(module, ()))
    several = {name for name, count in reads.items() if count > 1 and name in shared}
    state = {key: None for key in draft.state if key.kind != "parameter" or key.name not in several}
    numbers: Counter[str] = Counter()
    found = []
    for event in events:
        leaves = []
        for leaf in event.leaves:
            if isinstance(leaf, TensorKey) and leaf.kind == "parameter" and leaf.name in several:
                numbers[leaf.name] += 1
                leaf = use_key(leaf.name, numbers[leaf.name])
                state[leaf] = None
            leaves.append(leaf)
        found.append(event if tuple(leaves) == event.leaves else replace(event, leaves=tuple(leaves)))
    return tuple(found), tuple(state)


def use_key(parameter: str, number: int) -> TensorKey:
    """The key of one of several uses of a parameter in a layer: a path in the layer's module."""
    return TensorKey("parameter", f"{USES}.{parameter.replace('.', '/')}{USES}{number}")


def used_parameter(path: str) -> tuple[str, str] | None:
    """(name of the parameter, number of the use) of the path of one of several uses; None for other paths."""
    container, _, name = path.partition(".")
    if container != USES:
        return None
    parameter, _, number = name.rpartition(USES)
    return parameter.replace("/", "."), number


def _name_values(trace: Trace, drafts: list[LayerDraft]) -> tuple[dict[TensorKey, str], list[list[tuple[str, TensorKey]]]]:
    """(key -> name of the value, by layer: (name, key) of its outputs). The last layer writes all that the forward returned."""
    crossing = {key for draft in drafts for key in draft.incoming}
    value_names: dict[TensorKey, str] = {}
    outputs: list[list[tuple[str, TensorKey]]] = []
    for index, draft in enumerate(drafts):
        name = draft.name
        made = dict.fromkeys(key for i in sorted(draft.own) for key in trace.events[i].makes if key in crossing)
        mine = [key for key in made if key not in value_names]
        value_names |= {key: f"{name}.out{number}" for number, key in enumerate(mine)}
        outputs.append([(value_names[key], key) for key in mine])
        if index == len(drafts) - 1:
            last = dict.fromkeys(trace.output_keys)
            outputs[-1] += [(f"{name}.out{len(mine) + number}", key) for number, key in enumerate(last)]
    return value_names, outputs


def _check_writes(trace: Trace, draft: LayerDraft, live: set[TensorKey]) -> frozenset[TensorKey]:
    """The tensors from outside of the layer that it writes into.

    Raises `Refused` if a write must be seen through a view that lies elsewhere once the layers are apart.
    """
    origins: dict[TensorKey, TensorKey] = {}
    copied: set[TensorKey] = set()
    for index in sorted(draft.chosen):
        event = trace.events[index]
        for key in event.outputs:
            if key is not None and key not in origins:
                storage = trace.facts[key].storage
                source = next((other for other in event.inputs if trace.facts[other].storage == storage), key)
                origins[key] = origins.get(source, source)
        written = {trace.facts[key].storage: origins.get(key, key) for key in event.written}
        for origin in (origins.get(key, key) for key in event.written):  # also of what .data and detach() return
            if origin.kind == "parameter":
                raise Refused(
                    f"{event.label} between units writes into parameter {origin.name} at {event.location}", _WRITE_CURE
                )
        for rewrite in event.rewrites:
            origin = origins.get(rewrite.before, rewrite.before)
            target = written.get(trace.facts[rewrite.before].storage)
            if rewrite.after in live and target != origin:
                shape = list(trace.facts[rewrite.before].shape)
                raise Refused(
                    f"{event.label} at {event.location} writes into memory that a view {shape} from another layer shares: the "
                    "write would not be seen through it",
                    _WRITE_CURE,
                )
            origins[rewrite.after] = origin
        copied |= {origin for origin in written.values() if _is_from_outside(origin, draft)}
    return frozenset(copied)


def _refuse_late_views(trace: Trace, crossing: Collection[TensorKey]) -> None:
    """Raises `Refused` for a view that was taken before its tensor was written, if other layers read both: autograd puts such a
    view into its graph when it is first read, and the gradients of both are added in an order that no layer alone gives."""
    for event in trace.events:
        for rewrite in event.rewrites:
            fact = trace.facts[rewrite.after]
            if rewrite.before in event.written or rewrite.after not in crossing or not fact.requires_grad:
                continue
            for other in crossing:
                about = trace.facts[other]
                if other != rewrite.after and about.storage == fact.storage and about.requires_grad:
                    raise Refused(
                        f"{event.label} at {event.location} writes into memory of which a view {list(fact.shape)} was taken "
                        f"before; later layers read the view and what was written, {list(about.shape)}",
                        "take the view after the write; or use the operation that returns a new tensor",
                    )


_WRITE_CURE = "use the operation that returns a new tensor; or make the module around both a unit (model.units)"


def _is_from_outside(key: TensorKey, draft: LayerDraft) -> bool:
    """Whether a layer is given this tensor."""
    return key.kind in ("field", "constant") or key in draft.incoming
