"""Compares a captured model with the user's own module on numbers, before a run.

A record does not show all that the Python code of a model may depend on: global variables, shared objects, state of an earlier
call. So a few microbatches of the first step are computed twice: by the module as it is, under plain
autograd, and by its layers, each stage by itself, on two replicas. Loss and gradients must be the same.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU
from raypar.errors import ModelError
from raypar.model.capture.absent_tensor import ValuesNeeded
from raypar.model.capture.module_graph import traces_of
from raypar.model.capture.trace_cache import TraceCache
from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import SkeletonCopier, put_values
from raypar.model.python_state import PythonState
from raypar.model.random_state import RandomState, preserve_random_state, seed_all
from raypar.plan import ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.user_code_errors import USER_CODE_ERRORS, error_text, reraise_ctrl_c
from raypar.worker.check_state_between_microbatches import ComputedMicrobatch, compute_with_and_without_state
from raypar.worker.job_spec import JobSpec, loss_target_name
from raypar.worker.measure_profile import read_microbatches_of_steps
from raypar.worker.numeric_check_settings import MOST_BYTES, comparison_tolerance, with_few_microbatches
from raypar.worker.process.gpu_setup import make_seeder
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.loss_function import make_loss_function

MOST_SECONDS = 3.0
"""A model of which one microbatch takes longer than this is not compared."""
MICROBATCHES = 3
"""Number of microbatches that are computed; those of one step are compared: with two replicas one worker computes two."""
MOST_STAGES = 8
"""Number of stages into which the model is cut."""


def check_capture_with_numbers(spec: JobSpec, graph: Graph) -> str | None:
    """Raises `ModelError` if the layers of a captured model do not compute what the user's module computes, or if a microbatch
    depends on what another has left (`compute_with_and_without_state`).

    Returns None after a comparison, and for models that are not captured; else a line for the user about what was not looked
    at: the model is too large (`MOST_BYTES`) or too slow (`MOST_SECONDS`), its own code raises, which the first step reports,
    or its code holds too much outside of parameters and buffers.
    """
    cache = traces_of(graph)
    if cache is None or cache.skeleton is None or graph.initial_values is None:
        return None
    if (size := _size(cache.skeleton, spec)) > MOST_BYTES:
        what = f"its parameters and buffers have {size / 2**20:.0f} MiB, and up to {MOST_BYTES >> 20} MiB are tried"
        return _not_compared(what)
    few = min(MICROBATCHES, spec.microbatches)
    small = with_few_microbatches(spec, few)
    places = [divmod(number, few) for number in range(MICROBATCHES)]
    batches = read_microbatches_of_steps(small, graph, places)
    with preserve_random_state():
        plain = _PlainModule(small, graph, cache, list(zip(places, batches, strict=True)))
        with contextlib.closing(plain):
            try:
                plain.run(few)
            except _NotCompared as found:
                return _not_compared(str(found))
        stages = min(len(graph.layers), MOST_STAGES)
        plan = ParallelPlan.mesh(pp=stages, dp=min(2, few), layers=len(graph.layers))
        with OneProcessRun(small, plan, "1f1b", graph=graph) as run:
            loss = run.step(0)[0].loss
            gradients = {name: copies[0] for name, copies in run.gradients().items()}
    if (why := plain.compare(loss, gradients)) is not None:
        return _not_compared(why)
    return None if plain.unread is None else f"{plain.unread}; {_UNSEEN}"


_UNSEEN = (
    "state that its code keeps between microbatches (counters, averages) is not seen then: try a smaller configuration once "
    "(examples/guides/your_own_model.md)"
)
"""What a user should do about a model that was not compared."""


def _not_compared(why: str) -> str:
    return f"the layers were not compared with the model on numbers: {why}; {_UNSEEN}"


class _NotCompared(Exception):
    """Why the module could not be run as it is."""


def _size(skeleton: nn.Module, spec: JobSpec) -> int:
    """Bytes of a model's parameters and buffers."""
    item = getattr(torch, spec.dtype).itemsize
    return sum(t.numel() * item for t in (*skeleton.parameters(), *skeleton.buffers()))


class _Run(NamedTuple):
    """One microbatch, computed once."""

    computed: ComputedMicrobatch
    """What it gave."""
    draws_in_backward: bool
    """Whether the backward pass has drawn random numbers, or set a generator."""


_seed_layer = make_seeder(CPU)
"""Seeds the generators as workers do before a layer's forward (rule 3 of the numerics contract)."""


class _PlainModule:
    """The user's module with its initial values, run as it is; its gradients are added by autograd."""

    def __init__(
        self, spec: JobSpec, graph: Graph, cache: TraceCache, batches: list[tuple[tuple[int, int], Mapping[str, Tensor]]]
    ) -> None:
        """`batches`: ((step, microbatch), its fields)."""
        assert cache.skeleton is not None and graph.initial_values is not None
        self._spec, self._graph, self._cache, self._batches = spec, graph, cache, batches
        self.model = SkeletonCopier(cache.skeleton)()
        dtype = getattr(torch, spec.dtype)
        own = {name for layer in graph.layers for _, name in layer.own_names or ()}
        names = [name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())]
        aliases = dict(graph.aliases)
        homes = {name: name if name in own else aliases[name] for name in names}
        values = dict(graph.initial_values.stream(list(dict.fromkeys(homes.values())), dtype))
        own_names = tuple((name, name) for name in names)
        whole = Layer("model", lambda: self.model, inputs=("batch",), outputs=("output",), own_names=own_names)
        copies = {name: values[home].clone() for name, home in homes.items()}
        put_values(Graph((whole,), output="output"), whole, self.model, copies, dtype)
        self._layers = [layer.name for layer in graph.layers]
        """Names of the layers, in order."""
        self._started: list[str] = []
        """Units whose calls have begun in this microbatch's forward."""
        self._calls: dict[str, list[str]] = {}
        """Unit -> the layers that are its calls in this microbatch's forward."""
        self._depth = 0
        """How many calls of units are under way."""
        self._in_backward = False
        """Whether the backward pass is under way, in which activation checkpointing calls units again."""
        self._place = (0, 0)
        """Step and index of the microbatch under way."""
        self._hooks = [
            hook
            for name in cache.units
            for unit in (self.model.get_submodule(name),)
            for hook in (
                unit.register_forward_pre_hook(lambda module, args, name=name: self._begin(name), prepend=True),
                unit.register_forward_hook(lambda *args: self._end(), always_call=True),
            )
        ]
        self._buffers = [(part, dict(part._buffers)) for part in self.model.modules()]
        """Every module and its buffers."""
        self._values = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        """Every buffer and its value before the first microbatch."""
        self.total, self.count = 0.0, 0.0
        """Sums of the losses and counts."""
        self.gradients: dict[str, Tensor] = {}
        """Sums of the gradients."""
        self.unread: str | None = None
        """A place that could not be looked through whole for state, and why."""

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def run(self, few: int) -> None:
        """Run `few` microbatches, forward and backward, and add up what they give.

        Raises `ModelError` if one depends on what others leave behind, `_NotCompared` if they cannot be run in a short time.
        """
        forms = [{name: (value.shape, value.dtype) for name, value in batch.items()} for _, batch in self._batches]
        state = PythonState({"": self.model})
        computed = compute_with_and_without_state(state, self._compute, forms, few)
        self.unread = state.unread
        for found in computed[:few]:
            self.total += found.total
            self.count += found.count
            for name, gradient in found.gradients.items():
                self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient

    def _compute(self, number: int) -> ComputedMicrobatch:
        """One microbatch, forward and backward."""
        start = time.monotonic()
        found = self._run(number)
        if found.draws_in_backward and (
            difference := found.computed.difference(self._run(number, other_numbers=True).computed)
        ):
            raise ModelError(
                f"{type(self.model).__name__} draws random numbers in its backward pass, which are not those of its forward "
                f"({difference} when they are others): activation checkpointing keeps PyTorch's generator only, and only with "
                "preserve_rng_state=True, and which numbers come next depends on the plan",
                cure="draw with torch inside of torch.utils.checkpoint; or use plan.recompute in its place, which seeds all "
                "generators again",
            )
        if [name.partition("#")[0] for name in self._layers] != self._started and self._cache.units:
            odd = next((name for name in self._cache.units if name not in self._started), "a unit")
            raise _NotCompared(f"{odd} is called otherwise than by its class's __call__, so its random numbers are not known")
        if (took := time.monotonic() - start) > MOST_SECONDS:
            raise _NotCompared(f"one microbatch took {took:.1f} s, and up to {MOST_SECONDS:.0f} s are spent on it")
        return found.computed

    def _run(self, number: int, *, other_numbers: bool = False) -> _Run:
        """See `_compute`. `other_numbers`: other random numbers are next when the backward pass begins."""
        self._place, batch = self._batches[number]
        for part, former in self._buffers:  # rule 14: each microbatch begins with the buffers of the step's beginning
            part._buffers.update(former)
        with torch.no_grad():
            for buffer, value in self._values:
                buffer.copy_(value)
        self.model.zero_grad(set_to_none=True)
        try:
            total, count = self._forward(batch)
            if other_numbers:
                seed_all(1)
            before = RandomState.now()
            self._in_backward, self._depth = True, 0
            total.backward()
        except ValuesNeeded as error:
            raise ModelError(
                f"the forward of {type(self.model).__name__} keeps a tensor of one call for later ones, outside of its "
                f"modules: {error_text(error)}",
                cure="keep it in a buffer (register_buffer), or make it in each call",
            ) from error
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise _NotCompared(f"its own forward and backward raised {error_text(error)}") from error
        finally:
            self._in_backward = False
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return _Run(ComputedMicrobatch(float(total.detach()), count, gradients), before.is_changed())

    def _forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """(sum of the losses, count) of one microbatch."""
        self._started, self._calls, self._depth = [], {}, 0
        fields = {name: batch[name].clone() for name in self._cache.inputs.fields}
        self._seed(self._layers[0])
        with self._autocast():
            output = self._cache.inputs.call(self.model, fields)
            found = make_loss_function(self._spec.loss)(output, batch.get(loss_target_name(self._spec)))
        total, count = found if isinstance(found, tuple) else (found, None)
        if count is None:
            count = float(batch[loss_target_name(self._spec)].shape[0])
            total = total * count
        return total, float(count)

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        autocast = self._spec.precision.autocast
        if autocast is None:
            yield
        else:
            with torch.autocast("cpu", autocast.dtype, cache_enabled=False):
                yield

    def _begin(self, unit: str) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if self._in_backward:  # checkpointing recomputes the calls of a unit from the last to the first
            calls = self._calls.get(unit, [])
            if calls:
                torch.manual_seed(self._seed_of(calls.pop() if len(calls) > 1 else calls[0]))
            return
        self._started.append(unit)
        number = len(self._started)
        if number <= len(self._layers):
            self._calls.setdefault(unit, []).append(self._layers[number - 1])
            if number > 1:
                self._seed(self._layers[number - 1])

    def _end(self) -> None:
        self._depth -= 1

    def _seed(self, layer: str) -> None:
        _seed_layer(self._seed_of(layer))

    def _seed_of(self, layer: str) -> int:
        return seed_of(self._spec.seed, "forward", *self._place, layer)

    def compare(self, loss: float, found: Mapping[str, Tensor | None]) -> str | None:
        """Raises `ModelError` if the layers' loss or a gradient is another than the module's.

        Returns why nothing was compared, if so.
        """
        tolerance = comparison_tolerance(self._spec)
        wanted = self.total / self.count if self.count else math.nan
        if not math.isfinite(wanted):
            return f"its loss on the first microbatches is {wanted}"
        if not math.isclose(loss, wanted, rel_tol=tolerance, abs_tol=1e-12):
            raise self._error(f"their loss is {loss:.8g}, the module's {wanted:.8g}")
        odd = next((name for name, gradient in self.gradients.items() if not gradient.isfinite().all()), None)
        if odd is not None:  # the step is skipped by its norm, and the layers have no gradients
            return f"the gradient of {odd} on the first microbatches has numbers that are not finite"
        own_names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        named = dict(self.model.named_parameters(remove_duplicate=False))
        for name, gradient in found.items():
            own = self.gradients.get(own_names[id(named[name])])
            zero = torch.zeros(())
            one, other = (zero if value is None else value.detach() for value in (gradient, own))
            difference = float((one - other / self.count).abs().max()) if one.numel() and other.numel() else 0.0
            largest = float(other.abs().max() / self.count) if other.numel() else 0.0
            if difference > tolerance * largest + 1e-12:
                raise self._error(f"the gradient of {name} differs by {difference:.3g} (its largest number is {largest:.3g})")
        return None

    def _error(self, what: str) -> ModelError:
        few = self._spec.microbatches
        return ModelError(
            f"the layers that were made of {type(self.model).__name__} do not compute what the module computes: on the first "
            f"{few} microbatches {what}. Code in it depends on something that is not passed between its modules: state of a "
            "call before (a counter, a cache, a generator of random numbers), a global variable, an object that modules share, "
            "or values of the batch that it reads in another way than PyTorch shows",
            cure="pass what a module needs as an argument, and keep state in buffers (model.buffers); or make one module of "
            "all that shares it, and that a unit (model.units); examples/guides/your_own_model.md has the list of such things",
        )
