"""Traces a model for each kind of batch that it meets, and keeps the traces: a layer asks here for its program."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raypar.errors import ModelError, RayparError
from raypar.model.capture.cut_trace_into_layers import CutTrace, LayerProgram, buffers_read_by, cut_into_layers
from raypar.model.capture.forward_inputs import ForwardInputs
from raypar.model.capture.memoryless_tensor import MemorylessTensor
from raypar.model.capture.record_forward import record_forward
from raypar.model.capture.refusal import InnerModuleUsed, Refused
from raypar.model.capture.replay import Values, run_event
from raypar.model.capture.state_before_trace import Held, ModuleAttributes, StateBefore, held_by, is_changed, state_of
from raypar.model.capture.trace_data import Guard, TensorKey, Trace, comparable
from raypar.model.capture.units import coarsen_units, refine_units
from raypar.model.copy_on_device import on_host
from raypar.model.random_state import preserve_random_state
from raypar.model.rounded_parameters import as_layers_read
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo
from raypar.torch_compat.modules import non_persistent_buffer_names
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, cure_for_known_error, error_text, is_chain_of_users

MANY_TRACES = 8
"""After so many traces of one signature the user is told."""


class RetraceCounter:
    """Counts the traces of each signature, and keeps a line for the user where there are many."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        """Key -> line for the user, one for each place. A key is the same in all processes."""
        self._counts: Counter[Hashable] = Counter()
        """Signature -> number of its traces."""
        self._seconds: defaultdict[Hashable, float] = defaultdict(float)
        """Signature -> time that its traces took."""

    def add(self, signature: Hashable, made: Trace, before: Trace | None, seconds: float) -> None:
        """Count a new trace. `before`: the trace of the same signature that was used last. `seconds`: time of the new one."""
        self._counts[signature] += 1
        self._seconds[signature] += seconds
        count, guard = self._counts[signature], _first_new_answer(made, before)
        if count < MANY_TRACES or guard is None:
            return
        event = made.events[guard.event]
        read = f"{event.label.strip('_')}() at {event.location}"
        self.lines.setdefault(
            f"many traces: {read}",
            f"the forward reads {read} between units, and the answer is another for each batch: the forward has been "
            f"recorded {count} times, {1000 * self._seconds[signature] / count:.1f} ms each\n"
            "  cure: compute it with tensors (torch.arange(n) < lengths[:, None], torch.where), or inside a module that is a "
            "unit (model.units)",
        )


def _first_new_answer(made: Trace, before: Trace | None) -> Guard | None:
    """The first thing that the forward has read whose answer is not that of the trace before."""
    pairs = zip(made.guards, before.guards, strict=False) if before is not None else ()
    return next((new for new, old in pairs if new.answer != old.answer), None)


MOST_TRACES = 32
"""Size of the LRU cache of traces, beside those made ahead. A forward that reads values of the batch in Python needs a trace
for each set of answers."""
MOST_REFINEMENTS = 500
"""Limit on how often a unit is split because outer code uses a module inside it."""

Signature = tuple[Hashable, ...]
"""Whether the model trains, and name, shape and dtype of each batch field."""


@dataclass(frozen=True)
class _Answer:
    """The last batch that was looked up, and its trace."""

    batch: Mapping[str, tuple[weakref.ReferenceType[Tensor], int]]
    """Field -> (tensor, its version)."""
    training: bool
    """Whether the model trains."""
    found: CutTrace
    """The trace."""

    def is_for(self, fields: Mapping[str, Tensor], *, training: bool) -> bool:
        """Whether this is the answer for these very tensors."""
        if training != self.training or fields.keys() != self.batch.keys():
            return False
        for name, value in fields.items():  # asked for every layer
            tensor, version = self.batch[name]
            if tensor() is not value or version != value._version:
                return False
        return True


class TraceCache:
    """The traces of one model, by what decides them: shapes of the batch, and what the forward reads of its values."""

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        inputs: ForwardInputs,
        autocast_dtype: torch.dtype | None = None,
        *,
        rounded_to: torch.dtype | None = None,
        units_are_named: bool = False,
        branching: Collection[str] | None = None,
    ) -> None:
        self.model = model
        """The model, with memoryless parameters and real buffers."""
        self.skeleton: nn.Module | None = None
        """The model as it was made, on the meta device; None in tests that trace a module by itself."""
        self._made_training = [(part, part.training) for part in model.modules()]
        """Every module and its training mode as made: what a constructor has put into evaluation mode stays in it."""
        self.units = dict(units)
        """Qualified name -> unit, in `model`."""
        self.units_are_named = units_are_named
        """Whether the user has named them, so that no other module runs whole."""
        self.branching = branching
        """Modules whose units form parallel branches; None if nobody has looked for them yet."""
        self._opened = set[str]()
        """Former units without parameters, whose code is recorded like that between units."""
        self._divided: list[str] = []
        """Modules inside of units which code outside of them uses."""
        self.inputs = inputs
        """How batch fields reach the forward."""
        self.autocast_dtype = autocast_dtype
        """The dtype of the autocast in which the job runs its layers; None: there is none."""
        self.rounded_to = rounded_to
        """The dtype of the copies of parameters that layers compute with, and in which they read fields; None: the job's."""
        self.written_buffers: frozenset[str] = frozenset()
        """Buffers that the first trace's forward has written or replaced, apart from running statistics and caches."""
        self.output_forms: list[tuple[Hashable, ...]] = []
        """What forwards have returned beside tensors, by leaf of the output."""
        self._form_numbers: weakref.WeakKeyDictionary[CutTrace, int] = weakref.WeakKeyDictionary()
        """Trace -> its index in `output_forms`."""
        self._first_trace: CutTrace | None = None
        """The first trace. It defines the layers; every later trace must have the same layers, values and parameters."""
        self.first_batch: Mapping[str, Tensor] = {}
        """The batch of the first trace."""
        self.first_lengths: Mapping[str, Sequence[int]] = {}
        """Padded field -> the lengths of its samples before they were padded, in the first batch."""
        self.ahead: dict[Hashable, str | None] = {}
        """Which batches have been traced ahead, as the caller names them -> a line for the user, if that was not possible."""
        self._room = MOST_TRACES
        """How many traces are kept."""
        self._traces: OrderedDict[Signature, list[CutTrace]] = OrderedDict()
        """Traces by signature; those of one signature differ in what the forward has read."""
        self.repeated = RetraceCounter()
        """Lines for the user about batches that are traced anew again and again."""
        self._lock = threading.RLock()
        """Held while a trace is looked for or made."""
        self._last: _Answer | None = None
        """The last answer: the layers of a stage ask for the same batch one after the other."""

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Give buffers the values with which the run begins: a weights file may have others than the model function.

        Raises `ModelError` if the forward, which decides by a buffer's value in Python, calls other units now.
        """
        with self._lock, torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in values:
                    buffer.copy_(values[name])
            if not self._answers_as_before(self.first_trace, self.first_batch):
                self._traces.clear()
                self._last = None
                self.trace_of(self.first_batch, training=True)

    @property
    def first_trace(self) -> CutTrace:
        """The first trace, which decides the layers."""
        assert self._first_trace is not None, "the model has not been traced yet"
        return self._first_trace

    def trace_for_layer(self, index: int, fields: Mapping[str, Tensor], *, training: bool) -> CutTrace:
        """A trace whose program of a layer is that for a batch. Raises `ModelError` as `trace_of` does."""
        first_trace = self.first_trace
        return first_trace if first_trace.is_fixed(index) else self.trace_of(fields, training=training)

    def number_of_output_form(self, found: CutTrace) -> int:
        """The index in `output_forms` of what a trace has returned beside tensors."""
        with self._lock:
            if found not in self._form_numbers:
                self._form_numbers[found] = len(self.output_forms)
                self.output_forms.append(found.trace.output_leaves_without_tensors)
            return self._form_numbers[found]

    def trace_of(self, fields: Mapping[str, Tensor], *, training: bool) -> CutTrace:
        """The trace for a batch; made if none of those kept fits it.

        Raises `ModelError` for a forward that cannot be captured, or whose layers do not fit those of the first trace.
        """
        if self.rounded_to is not None:
            fields = {name: as_layers_read(value, self.rounded_to) for name, value in fields.items()}
        with self._lock:
            if self._last is not None and self._last.is_for(fields, training=training):
                return self._last.found
            found = self._find(fields, training=training)
            batch = {name: (weakref.ref(value), value._version) for name, value in fields.items()}
            self._last = _Answer(batch, training, found)
            return found

    def trace_ahead(self, fields: Mapping[str, Tensor], *, training: bool) -> None:
        """Trace the model for a batch that is to come; the trace has a place of its own beside the `MOST_TRACES` others. Raises
        as `trace_of` does."""
        with self._lock:
            before = sum(map(len, self._traces.values()))
            self._room += 1  # first, so that it takes no other's place
            try:
                self.trace_of(fields, training=training)
            finally:
                self._room -= sum(map(len, self._traces.values())) == before

    def _find(self, fields: Mapping[str, Tensor], *, training: bool) -> CutTrace:
        signature = (training, *((name, tuple(value.shape), value.dtype) for name, value in fields.items()))
        kept = self._traces.setdefault(signature, [])
        self._traces.move_to_end(signature)
        known = any(value.is_meta or isinstance(value, MemorylessTensor) for value in fields.values())
        for number, cut in enumerate(kept):
            if known or self._answers_as_before(cut, fields):
                kept.append(kept.pop(number))
                return cut
        start = time.perf_counter()
        made = self._trace(fields, training=training)
        if self._first_trace is None:
            self._first_trace, self.first_batch = made, dict(fields)
        else:
            _check_fits(made, self._first_trace, training=training)
        self.repeated.add(signature, made.trace, kept[-1].trace if kept else None, time.perf_counter() - start)
        kept.append(made)
        while sum(map(len, self._traces.values())) > self._room:
            oldest = next(key for key, cuts in self._traces.items() if cuts)
            self._traces[oldest].pop(0)
        return made

    def _answers_as_before(self, cut: CutTrace, fields: Mapping[str, Tensor]) -> bool:
        """Whether every guard of the trace gives the same answer for this batch."""
        if not cut.guard_events:
            return True
        answers = {guard.event: guard.answer for guard in cut.trace.guards}
        written = any(event.written for _, event in cut.guard_events)
        read = {key for _, event in cut.guard_events for key in event.inputs}
        given: Values = {TensorKey("field", name): value for name, value in fields.items()}
        given = {key: on_host(value) for key, value in given.items() if key in read} | dict(cut.trace.constants)
        values = {key: value.clone() if written else value for key, value in given.items()}
        with torch.no_grad():
            for index, event in cut.guard_events:
                values.update((key, self.model.get_buffer(key.name)) for key in event.inputs if key.kind == "buffer")
                out = run_event(event, self.model, values)
                if index in answers and comparable(out) != answers[index]:
                    return False
        return True

    def _trace(self, fields: Mapping[str, Tensor], *, training: bool) -> CutTrace:
        """A new trace. The units become finer until no code outside of them uses what is inside."""
        given = {name: on_host(fields[name]) for name in self.inputs.fields}
        with self._undisturbed(training=training) as before:
            for _ in range(MOST_REFINEMENTS):
                try:
                    trace = self._record(given, training=training)
                    self._refuse_changed_state(before, trace)
                    made = cut_into_layers(trace, self._parameters_of_modules(trace), self.branching or (), self._first_trace)
                    if self._first_trace is None:
                        self.written_buffers = (before.written_buffers() | before.replaced_buffers()) - before.statistics
                    self._refuse_memory(before, trace, given, training=training)
                    return made
                except InnerModuleUsed as found:
                    self._refine(found.path)
                except Refused as error:
                    if not self._open(error.unit_without_parameters) and not self._coarsen(error.module):
                        raise error.error from None
                except RayparError:
                    raise
                except USER_CODE_ERRORS as error:
                    reraise_ctrl_c(error)
                    raise self._forward_error(fields, error) from error
                before.restore()
        raise ModelError(
            f"the units of the model have been divided {MOST_REFINEMENTS} times, and code between them still uses modules "
            "inside of them",
            cure="name the units (model.units), or return a raypar.Graph",
        )

    def _record(self, given: Mapping[str, Tensor], *, training: bool) -> Trace:
        """The trace of one call of the forward."""
        return record_forward(
            self.model,
            self.units,
            given,
            lambda fields: self.inputs.call(self.model, fields),
            like=None if self._first_trace is None or training else self._first_trace.trace,
            finds_branches=self._first_trace is None and not self.units_are_named and self.branching is None,
        )

    def _refuse_memory(self, before: StateBefore, trace: Trace, given: Mapping[str, Tensor], *, training: bool) -> None:
        """Raises `ModelError` if the forward depends on what former calls have left in attributes, lists, dicts or global
        variables: if it does something else, or leaves something else, when it is called again on the same batch.

        A forward that leaves something, a table for a length say, is called on the first batch in between.
        """
        others: list[str | None] = []

        def call(fields: Mapping[str, Tensor], wanted: Trace | None) -> None:
            before.restore_buffers()
            others.append(self._other_calls(fields, wanted, training=training))

        left = held_by(self.model)
        if self._first_trace is not None:
            if all(left[name] == before.held[name] for name, _, _ in self._glue_modules(before.attributes)):
                return
            first = {name: self.first_batch[name].cpu() for name in self.inputs.fields}
            call(first, self._first_trace.trace if training else None)
            call(given, trace)
            left = held_by(self.model)
        call(given, trace)
        self._refuse_changed_attributes(before, left)
        for what in filter(None, others):
            raise ModelError(
                f"the forward of {type(self.model).__name__} does not do the same when it is called again on the same "
                f"batch: it {what}; so it depends on what a call leaves in attributes or global variables, or (sizes) on "
                "random numbers, which workers do not",
                cure="keep what a forward leaves for the next one in a buffer (model.buffers), or in a module that is a unit "
                "(model.units); make a module around all whose sizes random numbers decide a unit",
            )

    def _other_calls(self, given: Mapping[str, Tensor], wanted: Trace | None, *, training: bool) -> str | None:
        """What the forward, called now, does otherwise than in the trace `wanted`; None if nothing."""
        try:
            again = self._record(given, training=training)
        except Refused as error:
            return f"uses something that the capture has not seen ({error.error.what})"
        if wanted is None or again.call_log == wanted.call_log:
            return None
        new = next((new for new, old in zip(again.call_log, wanted.call_log, strict=False) if new != old), None)
        if new is None:
            return "ends after fewer calls"
        return f"calls {new[0]} at {new[1]} with other arguments, or instead of another call"

    def _glue_modules(self, attributes: Sequence[ModuleAttributes]) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """(name, module, its former attributes) of the modules that are in no unit."""
        names = {id(module): name for name, module in self.model.named_modules()}
        for module, former, _ in attributes:
            name = names[id(module)]
            if not any(name == unit or name.startswith(unit + ".") for unit in self.units):
                yield name, module, former

    def _refuse_changed_state(self, before: StateBefore, trace: Trace) -> None:
        """Raises `ModelError` for what a forward changes, and a replay would not change or not see."""
        self._refuse_replaced_parts(before.attributes)
        written = before.written_buffers() | before.statistics
        for guard in trace.guards:
            for name in sorted(buffers_read_by(trace, guard.event) & written):
                raise ModelError(
                    f"the forward decides by the values of its buffer {name!r} at {trace.events[guard.event].location}, and "
                    "changes that buffer: workers run a record, in which the decision stays as it was",
                    cure="decide without Python (torch.where), or inside of a module, and make that a unit (model.units)",
                )

    def _refuse_replaced_parts(self, attributes: Sequence[ModuleAttributes]) -> None:
        """Raises `ModelError` if the forward has replaced parameters or modules, or code between units buffers: a replay would
        not."""
        formers = {id(value): content for _, _, kept in attributes for value, content in kept if isinstance(content, dict)}
        for name, module in self.model.named_modules():
            for kind, parts in (("parameter", module._parameters), ("module", module._modules)):
                former_parts = formers.get(id(parts), parts)
                changed = [key for key in {**former_parts, **parts} if former_parts.get(key) is not parts.get(key)]
                if changed:
                    raise ModelError(
                        f"the forward of {type(self.model).__name__} replaces {kind} {changed[0]!r} of "
                        f"{name or 'the model'} ({type(module).__name__}), and workers run a record of it, which does not",
                        cure="do it in the model function, before it returns the model",
                    )
        for name, module, _ in self._glue_modules(attributes):
            for key, former in formers[id(module._buffers)].items():
                now = module._buffers.get(key)
                is_cache = key in non_persistent_buffer_names(module) and not isinstance(now, MemorylessTensor)
                if now is not former and not is_cache:
                    raise ModelError(
                        f"the forward of {name or type(module).__name__} assigns a new tensor to its buffer {key!r} between "
                        "units, which workers would not",
                        cure=f"write into it, with a setting of model.buffers: self.{key}.copy_(...); or do it in a module "
                        "that is a unit (model.units)",
                    )

    def _refuse_changed_attributes(self, before: StateBefore, left: Held) -> None:
        """Raises `ModelError` if an attribute does not hold what code between units has left in it in the first of several
        calls, `left`: a replay would not change it."""
        for name, module, _ in self._glue_modules(before.attributes):
            for key, first in left[name].items():
                if is_changed(first, now := state_of(vars(module).get(key))):
                    former = before.held[name].get(key)
                    values = f" from {former!r} to {first!r}, then to {now!r}" if isinstance(now, (int, float, str)) else ""
                    raise ModelError(
                        f"the forward of {type(module).__name__} changes its attribute {key!r}{values} in every call, and "
                        "workers run a record of it, in which the attribute stays as it was",
                        cure="leave it to a callback, keep it in a buffer (model.buffers), or in a module that is a unit "
                        "(model.units)",
                    )

    def _forward_error(self, fields: Mapping[str, Tensor], error: BaseException) -> ModelError:
        """The error for a forward that raises."""
        given = ", ".join(f"{name} {list(fields[name].shape)} {fields[name].dtype}" for name in self.inputs.fields)
        return ModelError(
            f"the forward of {type(self.model).__name__}, given {given}, raised {error_text(error)}\n"
            f"{''.join(traceback.format_exception(error, chain=is_chain_of_users(error)))}",
            cure=cure_for_known_error(error, self.model)
            or "call the model on one batch by itself; compare the shapes of samples (data) with what it expects",
        )

    def _parameters_of_modules(self, trace: Trace) -> dict[str, set[str]]:
        """Unit, or module that a unit is given -> names of its parameters, as traces have them."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        given = {path: self.model.get_submodule(path) for event in trace.events for path in event.modules}
        return {path: {names[id(p)] for p in module.parameters()} for path, module in (given | self.units).items()}

    def _refine(self, path: str) -> None:
        if self._first_trace is not None:
            raise ModelError(
                f"with this batch code between the units uses module {path!r}, which is inside of one",
                cure=f"name it as a unit: model.units: [{path!r}, ...]",
            )
        self._divided.append(path)
        self.units = refine_units(self.model, self.units, path)

    def _open(self, unit: str) -> bool:
        """Let the code of a unit be recorded like that between units, where its reads of the batch are seen; whether it may."""
        if self._first_trace is not None or self.units_are_named or not unit:
            return False
        self.units = {name: module for name, module in self.units.items() if name != unit}
        self._opened.add(unit)
        return True

    def _coarsen(self, path: str) -> bool:
        """Let a module whose own code between units cannot be captured run whole, in one layer; whether it may."""
        if self._first_trace is not None or self.units_are_named or not path or path in self._opened:
            return False
        if any(divided.startswith(path + ".") for divided in self._divided):
            return False  # code outside of it uses what is inside
        found = coarsen_units(self.model, self.units, path)
        self.units = found or self.units
        return found is not None

    @contextlib.contextmanager
    def _undisturbed(self, *, training: bool) -> Iterator[StateBefore]:
        """The state in which a forward is traced; what it changes is put back: generators, buffers. Yields what was before."""
        for part, made in self._made_training:
            part.training = training and made
        before = StateBefore(self.model)
        autocast = torch.autocast(
            "cpu", self.autocast_dtype or torch.bfloat16, enabled=self.autocast_dtype is not None, cache_enabled=False
        )
        # A batch of a new form may come inside of a recomputed layer, which keeps what autograd saves: not what a trace saves.
        own_hooks = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
        try:
            with (
                preserve_random_state(),
                meta_operations_without_dynamo(),
                torch.set_grad_enabled(training),
                autocast,
                own_hooks,
            ):
                yield before
        finally:
            before.restore()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _check_fits(made: CutTrace, first_trace: CutTrace, *, training: bool) -> None:
    """Raises `ModelError` unless what passes between the layers is what the first trace says."""
    names, wanted = [layer.name for layer in made.layers], [layer.name for layer in first_trace.layers]
    if names != wanted:
        odd = next((a for a, b in zip(names, wanted, strict=False) if a != b), f"{len(names)} layers, not {len(wanted)}")
        raise _misfit(f"the units are called in another order ({odd})")
    if (made.trace.output_structure, _kinds(made.trace)) != (first_trace.trace.output_structure, _kinds(first_trace.trace)):
        raise _misfit("the model returns something else")
    for index, (new, first) in enumerate(zip(made.layers, first_trace.layers, strict=True)):
        for what, one, other in (("reads", new.reads, first.reads), ("writes", new.outputs, first.outputs)):
            if _names(one) != _names(other):
                raise _misfit(f"layer {new.name!r} {what} {_names(one)}, not {_names(other)}")
        if more := ({key.name for key in new.state} | set(new.modules)) - (
            {key.name for key in first.state} | set(first.modules)
        ):
            raise _misfit(f"layer {new.name!r} uses {', '.join(sorted(more))}")
        if first_trace.is_fixed(index) and not _is_same_call(new, first, training=training):
            raise _misfit(f"layer {new.name!r} does not call its module in the same way")
    for value, gradient in made.value_gradients.items() if training else ():
        if gradient != first_trace.value_gradients[value]:
            raise _misfit(f"{value!r} carries {'a' if gradient else 'no'} gradient")


def _names(pairs: Sequence[tuple[str, TensorKey]]) -> list[str]:
    return [name for name, _ in pairs]


def _kinds(trace: Trace) -> list[str]:
    """What each leaf of the output is: a tensor, None, or something else."""
    return ["tensor" if isinstance(leaf, TensorKey) else "none" if leaf is None else "other" for leaf in trace.output_leaves]


def _is_same_call(layer: LayerProgram, first: LayerProgram, *, training: bool) -> bool:
    """Whether a layer that did nothing but call its module still calls it so: with the same arguments, in the same contexts."""

    def describe(program: LayerProgram) -> tuple[Hashable, ...]:
        (event,), names = program.events, {key: name for name, key in program.reads}
        return event.structure, tuple(names[key] for key in event.inputs), event.grad or not training, event.autocast

    return layer.is_bare_call and describe(layer) == describe(first)


def _misfit(what: str) -> ModelError:
    return ModelError(
        f"with this batch, or in evaluation, the forward takes another path than with the first batch in training: {what}",
        cure="give all batches the same form (pad them, and always pass the masks); what differs in evaluation (self.training) "
        "belongs into a module, and what returns more then (use_mems_eval, use_cache) must be False; or make the module around "
        "the decision a unit (model.units)",
    )
