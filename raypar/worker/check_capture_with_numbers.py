"""Compares a captured model with the user's own module on numbers, before a run.

A record does not show all that the Python code of a model may depend on: global variables, shared objects, state of an earlier
call. So a few microbatches of the first step are computed twice: by the module as it is, under plain
autograd, and by its layers, each stage by itself, on two replicas. Loss and gradients must be the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypar.errors import ConfigError, ModelError
from raypar.job import Job
from raypar.model.capture.module_graph import traces_of
from raypar.model.capture.trace_cache import TraceCache
from raypar.model.graph import Graph, Layer, ModelOutput
from raypar.model.layer_skeletons import SkeletonCopier, put_values
from raypar.model.random_state import preserve_random_state
from raypar.model.rounded_parameters import as_layers_read, as_loss_reads
from raypar.plan import ParallelPlan
from raypar.torch_compat.pytree import tree_flatten, tree_unflatten
from raypar.worker.check_packing import check_documents_apart, check_first_label, line_about_documents, packing_of
from raypar.worker.check_state_between_microbatches import ComputedMicrobatch
from raypar.worker.data.packing import Packing
from raypar.worker.data.padding import MASKED_LABEL
from raypar.worker.layer_precisions import dtype_of_job
from raypar.worker.plain_microbatches import (
    UNSEEN,
    Batches,
    NotCompared,
    PlainMicrobatches,
    comparison_tolerance,
    first_microbatches,
    refuse_large_models,
)
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.loss import loss_of_model, make_loss_function

MOST_STAGES = 8
"""Number of stages into which the model is cut."""


def check_capture_with_numbers(spec: Job, graph: Graph) -> tuple[str, ...]:
    """Raises `ModelError` if the layers of a captured model do not compute what the user's module computes, or if a microbatch
    depends on what another has left (`compute_with_and_without_state`).

    Returns lines for the user about what was not looked at, and why: the model is too large or too slow (`PlainMicrobatches`),
    its own code raises, which the first step reports, or its code holds too much outside of parameters and buffers. None are
    for models that are not captured.
    """
    cache = traces_of(graph)
    if cache is None or cache.skeleton is None or graph.initial_values is None:
        return ()
    packing, lines = packing_of(spec), list[str]()
    with preserve_random_state():
        try:
            refuse_large_models(spec, graph)
            small, batches = first_microbatches(spec, graph)
            with contextlib.closing(_PlainModule(small, graph, cache, batches)) as plain:
                plain.add(plain.run(few := small.microbatches))
                if spec.loss.count is not None:
                    plain.check_label_count()
                if packing is not None and (why := plain.check_packing(packing)) is not None:
                    lines.append(line_about_documents(why))
        except NotCompared as found:
            of_documents = () if packing is None else (line_about_documents(str(found)),)
            return _not_compared(str(found)), *of_documents
        stages = min(len(graph.layers), MOST_STAGES)
        plan = ParallelPlan.mesh(pp=stages, dp=min(2, few), layers=len(graph.layers))
        with OneProcessRun(small, plan, "1f1b", graph=graph) as run:
            loss = run.step(0)[0].loss
            gradients = {name: copies[0] for name, copies in run.gradients().items()}
    if (why := plain.compare(loss, gradients)) is not None:
        return _not_compared(why), *lines
    return (*plain.lines_about_unread(), *lines)


def _not_compared(why: str) -> str:
    return f"the layers were not compared with the model on numbers: {why}; {UNSEEN}"


class _PlainModule(PlainMicrobatches):
    """The user's module with its initial values, run as it is; its gradients are added by autograd."""

    def __init__(self, spec: Job, graph: Graph, cache: TraceCache, batches: Batches) -> None:
        assert cache.skeleton is not None and graph.initial_values is not None
        self._cache = cache
        self.model = SkeletonCopier(cache.skeleton)()
        dtype = dtype_of_job(spec)
        own = {name for layer in graph.layers for _, name in layer.own_names or ()}
        names = [name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())]
        aliases = dict(graph.aliases)
        homes = {name: name if name in own else aliases[name] for name in names}
        values = dict(graph.initial_values.stream(list(dict.fromkeys(homes.values())), dtype))
        own_names = tuple((name, name) for name in names)
        whole = Layer("model", lambda: self.model, inputs=("batch",), outputs=("output",), own_names=own_names)
        copies = {name: values[home].clone() for name, home in homes.items()}
        put_values(Graph((whole,), output="output"), whole, self.model, copies, dtype)
        super().__init__(spec, type(self.model).__name__, {"": self.model}, batches)
        programs = cache.first_trace.layers
        self._layers = [program.name for program in programs if program.unit is not None or program is programs[0]]
        """Names of the layers that call units, in order; of a model without units that of its only layer."""
        self._started: list[str] = []
        """Units whose calls have begun in this microbatch's forward."""
        self._calls: dict[str, list[str]] = {}
        """Unit -> the layers that are its calls in this microbatch's forward."""
        self._depth = 0
        """How many calls of units are under way."""
        self._hooks = [
            hook
            for name in cache.units
            for unit in (self.model.get_submodule(name),)
            for hook in (
                unit.register_forward_pre_hook(lambda module, args, name=name: self._begin(name), prepend=True),
                unit.register_forward_hook(lambda *args: self._end(), always_call=True),
            )
        ]
        self.total, self.count = 0.0, 0.0
        """Sums of the losses and counts."""
        self.gradients: dict[str, Tensor] = {}
        """Sums of the gradients."""

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def add(self, microbatches: Sequence[ComputedMicrobatch]) -> None:
        """Add up what microbatches gave."""
        for found in microbatches:
            self.total += found.total
            self.count += found.count
            for name, gradient in found.gradients.items():
                self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | float | None]:
        """(loss, count) of one microbatch."""
        beside = map(batch.get, self._spec.loss_fields)
        leaves, structure = tree_flatten(self._own_output(batch))
        read = [as_loss_reads(leaf, self.rounded_to) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        found = make_loss_function(self._spec.loss)(tree_unflatten(read, structure), *beside)
        return found if isinstance(found, tuple) else (found, None)

    def _own_output(self, batch: Mapping[str, Tensor]) -> ModelOutput:
        """What the module returns for a microbatch."""
        self._started, self._calls, self._depth = [], {}, 0
        fields = {name: as_layers_read(batch[name].clone(), self.rounded_to) for name in self._cache.inputs.fields}
        self.seed(self._layers[0])
        return self._cache.inputs.call(self.model, fields)

    def check_label_count(self) -> None:
        """Raises `ConfigError` if `loss.count` is not what the model's mean is taken over: another first label of each sequence
        changes the loss of a model that counts it, and of no other."""
        name, batch = self._spec.loss_target_name, self._batches[0][1]
        labels = batch[name]
        valid = labels[labels != MASKED_LABEL]
        if labels.dim() < 2 or labels.shape[-1] < 2 or not valid.numel() or labels.is_floating_point():
            return
        means = []
        for first in (int(valid[0]), MASKED_LABEL):
            changed = labels.clone()
            changed[..., 0] = first
            with torch.no_grad(), self._autocast():
                means.append(float(loss_of_model(self._own_output({**batch, name: changed}), changed)))
        if not all(map(math.isfinite, means)):
            return
        found = "labels" if means[0] != means[1] else "shifted_labels"
        if found != self._spec.loss.count:
            does = "counts" if found == "labels" else "leaves out"
            raise ConfigError(
                f"loss.count is {self._spec.loss.count}, and the loss of {self.label} {does} the first label of each sequence",
                cure=f"set loss.count: {found}",
            )

    def check_packing(self, packing: Packing) -> str | None:
        """Raises and returns as `check_documents_apart` and `check_first_label` do."""
        batch = self._batches[0][1]

        def loss(changed: Mapping[str, Tensor]) -> float:
            return float(self._sum_and_count(changed)[0])

        if not self._spec.loss.is_loss_of_model:
            check_first_label(self._spec, packing, batch, loss)
        with self._autocast():
            is_loss = self._spec.loss.is_loss_of_model
            return check_documents_apart(packing, batch, self._own_output, label=self.label, is_loss=is_loss)

    def check_calls(self) -> None:
        """Raises `NotCompared` if units were called otherwise than the record says."""
        if [name.partition("#")[0] for name in self._layers] != self._started and self._cache.units:
            odd = next((name for name in self._cache.units if name not in self._started), "a unit")
            raise NotCompared(f"{odd} is called otherwise than by its class's __call__, so its random numbers are not known")

    def _begin(self, unit: str) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if self.in_backward:  # checkpointing recomputes the calls of a unit from the last to the first
            calls = self._calls.get(unit, [])
            if calls:
                torch.manual_seed(self.seed_of(calls.pop() if len(calls) > 1 else calls[0]))
            return
        self._started.append(unit)
        number = len(self._started)
        if number <= len(self._layers):
            self._calls.setdefault(unit, []).append(self._layers[number - 1])
            if number > 1:
                self.seed(self._layers[number - 1])

    def _end(self) -> None:
        self._depth -= 1

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
