"""Compares a captured model with the user's own module on numbers, before a run.

A record cannot know all that Python code between units, and inside of them, may depend on: global variables, shared objects,
state of a call before. So a few microbatches of the first step are computed twice: by the module as it is, under plain
autograd, and by its layers, each stage by itself, on two replicas. Loss and gradients must be the same.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.capture.absent_tensor import ValuesNeeded
from raypar.model.capture.module_graph import traces_of
from raypar.model.capture.trace_cache import TraceCache
from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import SkeletonCopier, put_values
from raypar.model.random_state import preserve_random_state, seed_all
from raypar.plan import ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.user_code_errors import USER_CODE_ERRORS, error_text, reraise_ctrl_c
from raypar.worker.job_spec import JobSpec, OptimizerSpec, Ref, loss_target_name
from raypar.worker.measure_profile import read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.loss_function import make_loss_function

MOST_BYTES = 64 << 20
"""Models with more bytes of parameters and buffers are not compared: it takes six times as much memory."""
MOST_SECONDS = 3.0
"""A model of which one microbatch takes longer than this is not compared."""
MICROBATCHES = 3
"""Number of microbatches that are compared: with two replicas one worker computes two of them."""
MOST_STAGES = 8
"""Number of stages into which the model is cut."""
TOLERANCES = {"float32": 1e-4, "float64": 1e-9}
"""Largest difference, as a share of the largest number in a tensor. Far more than sums in another order make, which is the
least that a wrong record does. Each mixed precision has its own (`AutocastPrecision.comparison_tolerance`)."""


def check_capture_with_numbers(spec: JobSpec, graph: Graph) -> None:
    """Raises `ModelError` if the layers of a captured model do not compute what the user's module computes.

    Large and slow models (`MOST_BYTES`, `MOST_SECONDS`) are not compared, and a module that raises is left to the first step.
    """
    cache = traces_of(graph)
    if cache is None or cache.skeleton is None or graph.initial_values is None or _size(cache.skeleton, spec) > MOST_BYTES:
        return
    few = min(MICROBATCHES, spec.microbatches)
    small = replace(
        spec,
        batch_size=few * spec.batch_size // spec.microbatches,
        microbatches=few,
        virtual_replicas=0,
        clip_norm=None,
        lr_schedule=None,
        validation=None,
        non_finite="skip",
        device="cpu",
        optimizer=OptimizerSpec(Ref("torch.optim:SGD", {"lr": 0.0}), ()),
    )
    batches = read_microbatches(small, graph, range(few))
    with preserve_random_state():
        plain = _PlainModule(small, graph, cache)
        with contextlib.closing(plain):
            if not plain.run(batches):
                return
        stages = min(len(graph.layers), MOST_STAGES)
        plan = ParallelPlan.mesh(pp=stages, dp=min(2, few), layers=len(graph.layers))
        with OneProcessRun(small, plan, "1f1b", graph=graph) as run:
            loss = run.step(0)[0].loss
            found = {name: copies[0] for name, copies in run.gradients().items()}
    plain.compare(loss, found)


def _size(skeleton: nn.Module, spec: JobSpec) -> int:
    """Bytes of a model's parameters and buffers."""
    item = getattr(torch, spec.dtype).itemsize
    return sum(t.numel() * item for t in (*skeleton.parameters(), *skeleton.buffers()))


class _PlainModule:
    """The user's module with its initial values, run as it is; its gradients are added by autograd."""

    def __init__(self, spec: JobSpec, graph: Graph, cache: TraceCache) -> None:
        assert cache.skeleton is not None and graph.initial_values is not None
        self._spec, self._graph, self._cache = spec, graph, cache
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
        """Units whose calls have begun in this microbatch."""
        self._depth = 0
        """How many calls of units are under way."""
        self._microbatch = 0
        """The microbatch under way."""
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
        """Sums of the losses and counts so far."""

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def run(self, batches: list[Mapping[str, Tensor]]) -> bool:
        """Run the microbatches, forward and backward; whether all of them could be, in a short time."""
        buffers = [(part, dict(part._buffers)) for part in self.model.modules()]
        values = {id(b): b.clone() for b in self.model.buffers()}
        for self._microbatch, batch in enumerate(batches):
            start = time.monotonic()
            for part, former in buffers:  # rule 14: each microbatch begins with the buffers of the step's beginning
                part._buffers.update(former)
            with torch.no_grad():
                for buffer in self.model.buffers():
                    buffer.copy_(values[id(buffer)])
            try:
                self._run(batch)
            except ValuesNeeded as error:
                raise ModelError(
                    f"the forward of {type(self.model).__name__} keeps a tensor of one call for later ones, outside of its "
                    f"modules: {error_text(error)}",
                    cure="keep it in a buffer (register_buffer), or make it in each call",
                ) from error
            except USER_CODE_ERRORS as error:
                reraise_ctrl_c(error)
                return False
            if [name.partition("#")[0] for name in self._layers] != self._started and self._cache.units:
                return False  # a unit is called otherwise than by its class's __call__: its random numbers are not known
            if time.monotonic() - start > MOST_SECONDS:
                return False
        return True

    def _run(self, batch: Mapping[str, Tensor]) -> None:
        """Forward and backward of one microbatch."""
        self._started, self._depth = [], 0
        fields = {name: batch[name].clone() for name in self._cache.inputs.fields}
        self._seed(self._layers[0])
        with self._autocast():
            output = self._cache.inputs.call(self.model, fields)
            found = make_loss_function(self._spec.loss)(output, batch.get(loss_target_name(self._spec)))
        total, count = found if isinstance(found, tuple) else (found, None)
        if count is None:
            count = float(batch[loss_target_name(self._spec)].shape[0])
            total = total * count
        total.backward()
        self.total += float(total.detach())
        self.count += float(count)

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
        if self._depth == 1:
            self._started.append(unit)
            number = len(self._started)
            if 1 < number <= len(self._layers):
                self._seed(self._layers[number - 1])

    def _end(self) -> None:
        self._depth -= 1

    def _seed(self, layer: str) -> None:
        seed_all(seed_of(self._spec.seed, "forward", 0, self._microbatch, layer))

    def compare(self, loss: float, found: Mapping[str, Tensor | None]) -> None:
        """Raises `ModelError` if the layers' loss or a gradient is another than the module's."""
        autocast = self._spec.precision.autocast
        tolerance = TOLERANCES[self._spec.dtype] if autocast is None else autocast.comparison_tolerance
        wanted = self.total / self.count if self.count else math.nan
        if not math.isfinite(wanted):
            return  # gradients say nothing then
        if not math.isclose(loss, wanted, rel_tol=tolerance, abs_tol=1e-12):
            raise self._error(f"their loss is {loss:.8g}, the module's {wanted:.8g}")
        named = dict(self.model.named_parameters(remove_duplicate=False))
        if not all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in named.values()):
            return  # the step is skipped by its norm, and the layers have no gradients
        for name, gradient in found.items():
            own = named[name].grad
            zero = torch.zeros(())
            one, other = (zero if value is None else value.detach() for value in (gradient, own))
            difference = float((one - other / self.count).abs().max()) if one.numel() and other.numel() else 0.0
            largest = float(other.abs().max() / self.count) if other.numel() else 0.0
            if difference > tolerance * largest + 1e-12:
                raise self._error(f"the gradient of {name} differs by {difference:.3g} (its largest number is {largest:.3g})")

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
