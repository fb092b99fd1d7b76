"""Says in which layer each event of a trace runs: with the unit before it, or, where branches meet, in a layer of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from raypar.model.capture.trace_data import TensorKey, Trace

ONLY_LAYER = "model"
"""Name of the layer of a model that calls no modules."""
OWN_CODE = "join"
"""Name of a layer in which branches meet in the model's own code."""


@dataclass
class LayerDraft:
    """A layer while it is cut."""

    name: str
    """Its name."""
    own: list[int] = field(default_factory=list)
    """Indices of the events that run here alone."""
    chosen: set[int] = field(default_factory=set)
    """Indices of all events that run here."""
    incoming: dict[TensorKey, None] = field(default_factory=dict)
    """Values that other layers make."""
    fields: dict[str, None] = field(default_factory=dict)
    """Batch fields that are read."""
    state: dict[TensorKey, None] = field(default_factory=dict)
    """Parameters and buffers that are read."""


@dataclass
class LayerDrafts:
    """The layers of a trace, in order, with the events that run in them alone."""

    drafts: list[LayerDraft] = field(default_factory=list)
    """The layers."""
    joined: frozenset[int] = frozenset()
    """Numbers of the unit calls after which glue may be in another layer than its unit. They are those of the first trace, so
    that evaluation, where nothing is drawn, has the same layers."""
    _layer_of: dict[TensorKey, int] = field(default_factory=dict)
    """Value -> index of the layer that makes it."""
    _behind: list[int] = field(default_factory=list)
    """The layers that a layer needs, as bits."""
    _names: Counter[str] = field(default_factory=Counter)
    """How many layers have a name, apart from their numbers."""

    def begin(self, name: str) -> None:
        """Begin the next layer."""
        self._names[name] += 1
        count = self._names[name]
        self.drafts.append(LayerDraft(name if count == 1 else f"{name}#{count}"))
        self._behind.append(0)

    def add(self, trace: Trace, index: int) -> None:
        """Add an event to the last layer."""
        here = len(self.drafts) - 1
        self.drafts[here].own.append(index)
        for source in self.sources(trace, index) - {here}:
            self._behind[here] |= 1 << source | self._behind[source]
        for key in trace.events[index].makes:
            if key.kind == "value":
                self._layer_of.setdefault(key, here)

    def sources(self, trace: Trace, index: int) -> set[int]:
        """The layers that make what an event reads."""
        return {self._layer_of[key] for key in _read_by(trace, index) if key in self._layer_of}

    def is_join(self, trace: Trace, index: int) -> bool:
        """Whether an event needs the last layer's unit, and a layer that this one does not need: both can run at the same
        time."""
        here, sources = len(self.drafts) - 1, self.sources(trace, index)
        has_unit = any(trace.events[other].is_unit for other in self.drafts[here].own)
        return (
            has_unit and here in sources and any(source != here and not self._behind[here] >> source & 1 for source in sources)
        )


def draft_layers(trace: Trace, branching: Collection[str], joined: frozenset[int] | None) -> LayerDrafts:
    """The layers of a trace. `branching`: modules whose units form parallel branches. `joined`: as in `LayerDrafts`, of the
    first trace; None if this is the first.

    A layer is a unit call with the glue up to the next one. Only glue that is a branching module's own code may be elsewhere,
    unless it draws random numbers: what the unit call before has no part in belongs to the next one, and where branches meet a
    layer without a unit begins, which has the module's name. So no branch waits for another.
    """
    found = LayerDrafts()
    runs = _runs(trace)
    if joined is None:
        joined = frozenset(n for n, run in enumerate(runs) if not any(trace.events[index].draws for index in run[1:]))
    found.joined = joined
    early: Sequence[int] = ()
    for number, run in enumerate(runs):
        call = trace.events[run[0]].call if run else None
        if not isinstance(call, str):
            early = run
            continue
        found.begin(call)
        last = number == len(runs) - 1
        first_of_next = len(run)
        if branching and number in joined and not last:
            first_of_next = _first_of_next(trace, run, branching)
        for index in (*early, *run[:first_of_next]):
            event = trace.events[index]
            if event.home in branching and number in joined and not event.is_unit and found.is_join(trace, index):
                found.begin(event.home or OWN_CODE)
            found.add(trace, index)
        early = run[first_of_next:]
    if not found.drafts:
        found.begin(ONLY_LAYER)
        for index in early:
            found.add(trace, index)
    return found


def _runs(trace: Trace) -> list[list[int]]:
    """Indices of the events that are not pure: before the first unit call, then each unit call with the glue behind it."""
    runs: list[list[int]] = [[]]
    for index, event in enumerate(trace.events):
        if event.is_unit:
            runs.append([])
        if not event.is_pure:
            runs[-1].append(index)
    return runs


def _first_of_next(trace: Trace, run: Sequence[int], branching: Collection[str]) -> int:
    """The place in a unit call and its glue from which on all is a branching module's own code, and needs nothing before it
    here."""
    place = len(run)
    for candidate in range(len(run) - 1, 0, -1):
        if trace.events[run[candidate]].home not in branching:
            break
        before = {key for index in run[:candidate] for key in trace.events[index].makes}
        if all(before.isdisjoint(_read_by(trace, index)) for index in run[candidate:]):
            place = candidate
    return place


def _read_by(trace: Trace, index: int) -> list[TensorKey]:
    """What an event reads, and what it changes."""
    event = trace.events[index]
    return [*event.inputs, *(rewrite.before for rewrite in event.rewrites)]
