"""Runs layers on numbers before a run: no microbatch or layer may depend on what another has left, nor on cuts over shards."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from raypar.errors import ModelError, UserCodeError
from raypar.job import Job, PlanConfig
from raypar.model.capture.module_graph import traces_of
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import state_shapes
from raypar.model.materialise import materialise
from raypar.model.python_state import StateReading
from raypar.model.random_state import preserve_random_state
from raypar.model.rounded_parameters import as_layers_read, as_loss_reads
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.plan import ParallelPlan
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.worker.check_packing import check_documents_apart, check_first_label, line_about_documents, packing_of
from raypar.worker.data.packing import Packing
from raypar.worker.layer_precisions import dtype_of_job
from raypar.worker.plain_microbatches import (
    MOST_BYTES,
    UNSEEN,
    Batches,
    NotCompared,
    PlainMicrobatches,
    comparison_tolerance,
    first_microbatches,
    refuse_large_models,
    with_few_microbatches,
)
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.loss import make_loss_function


def check_layers_with_numbers(spec: Job, graph: Graph) -> tuple[str, ...]:
    """Raises `ModelError` if a microbatch of hand-written layers depends on what another has left
    (`compute_with_and_without_state`), or a layer on what another has.

    The layers of an `nn.Sequential`, a list or a `raypar.Graph` are what the user says they are: there is nothing to compare
    them with. But their code may keep something outside of parameters and buffers: for the next microbatch, which another
    worker computes, or for a later layer, which is in another stage.

    Returns lines for the user about what was not looked at, and why. None are for captured models.
    """
    if traces_of(graph) is not None:
        return ()
    packing, lines = packing_of(spec), list[str]()
    with preserve_random_state():
        try:
            refuse_large_models(spec, graph)
            layers = _Layers(*first_microbatches(spec, graph), graph)
            layers.check()
            if packing is not None and (why := layers.check_packing(packing)) is not None:
                lines.append(line_about_documents(why))
        except NotCompared as found:
            of_documents = () if packing is None else (line_about_documents(str(found)),)
            return f"the layers were not looked through for state that they keep: {found}; {UNSEEN}", *of_documents
    return (*layers.lines_about_unread(), *lines)


class _Layers(PlainMicrobatches):
    """The layers, one after the other in one process."""

    def __init__(self, spec: Job, batches: Batches, graph: Graph) -> None:
        modules = materialise(graph, 0, len(graph.layers), seed=spec.seed, dtype=dtype_of_job(spec))
        super().__init__(spec, "a layer", modules, batches)
        self._graph = graph
        self._loss = graph.loss_of_values(make_loss_function(spec.loss))
        self._before_each_layer: StateReading | None = None
        """What is put back before each layer runs; None: nothing."""

    def check(self) -> None:
        """See `check_layers_with_numbers`."""
        first = self.state.read()
        one, *_ = self.run(1)
        left = first.changed(self.state.read())
        if not left:
            return
        self.state.put_back(first)
        self._before_each_layer = first
        try:
            difference = one.difference(self.compute(0))
        except NotCompared as error:
            difference = str(error)
        if difference is not None:
            raise ModelError(
                f"a layer reads what another layer of the same microbatch has left in {', or '.join(left[:3])}: without it "
                f"{difference}. A plan may put the layers into different stages, on workers that do not share it",
                cure="return what later layers need as a value, in a raypar.Graph whose layers name their inputs and outputs; "
                "or give one module whose forward passes it on, which raypar records",
            )

    def check_packing(self, packing: Packing) -> str | None:
        """Raises and returns as `check_documents_apart` and `check_first_label` do."""
        batch = self._batches[0][1]
        check_first_label(self._spec, packing, batch, lambda changed: float(self._sum_and_count(changed)[0]))
        with self._autocast():
            return check_documents_apart(
                packing,
                batch,
                lambda changed: [value for name, value in self._values_of(changed).items() if name in self._graph.loss_inputs],
                label="the model",
            )

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | float | None]:
        """(loss, count) of one microbatch."""
        values = self._values_of(batch)
        read = [values[name] for name in (*self._graph.loss_inputs, *self._spec.loss_fields)]
        found = self._loss(*(as_loss_reads(value, self.rounded_to) for value in read))
        return found if isinstance(found, tuple) else (found, None)

    def _values_of(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fields of the batch and values that the layers make of them."""
        values = {name: field.clone() for name, field in batch.items()}
        for layer in self._graph.layers:
            if self._before_each_layer is not None:
                self.state.put_back(self._before_each_layer)
            self.seed(layer.name)
            inputs = [as_layers_read(values[n], self.rounded_to) if n in batch else values[n] for n in layer.inputs]
            out = self.modules[layer.name](*inputs)
            values |= zip(layer.outputs, out if isinstance(out, tuple) else (out,), strict=True)
        return values


SMALLEST_SHARE = 1e-2
"""Each gradient's difference is compared with its own largest number, or with this share of the model's largest
if that is more: a gradient whose terms cancel is rounding only."""


def check_shards_with_numbers(spec: Job, graph: Graph, layout: TensorParallelLayout) -> str | None:
    """Raises `ModelError` if the first microbatch has another loss or other gradients on shards than on whole layers.

    `model.tensor_parallel.try_styles` has tried inferred styles already, on tensors without numbers. It sees only what goes
    through PyTorch's functions; users' code that inspects a tensor in another way is found here. So is, where shards divide
    samples, what does not run on some of them in code that needs numbers to run at all.

    Returns why nothing was compared, if so: models of more than `MOST_BYTES`, and losses that are not finite, are not.
    """
    item = dtype_of_job(spec).itemsize
    size = sum(shape.numel() for shape in state_shapes(graph, 0, len(graph.layers)).values()) * item
    if size > MOST_BYTES:
        return f"its parameters and buffers have {size / 2**20:.0f} MiB, and up to {MOST_BYTES >> 20} MiB are tried"
    small = with_few_microbatches(spec, 1).replace(plan=PlanConfig(styles=dict(spec.styles), layout=dict(spec.layout)))
    with preserve_random_state():
        wanted_loss, whole = _run(small, graph, 1)
        try:
            loss, found = _run(small, graph, layout.shards)
        except UserCodeError as error:
            raise _error(layout, error.what) from error
    tolerance = comparison_tolerance(spec)
    if not math.isfinite(wanted_loss):
        return f"the loss of the first microbatch is {wanted_loss}"
    if not math.isclose(loss, wanted_loss, rel_tol=tolerance, abs_tol=1e-12):
        raise _error(layout, f"the loss is {loss:.8g}, without shards {wanted_loss:.8g}")
    top = max((_largest(copies[0]) for copies in whole.values()), default=0.0)
    for name, copies in found.items():
        own = whole[name][0]
        for shard, copy in enumerate(copies):
            want = None if own is None else shard_slice_of(layout, name, own, shard)
            one, other = (torch.zeros(()) if value is None else value for value in (copy, want))
            if one.numel() and other.numel():
                difference = float((one - other).abs().max())
                if difference > tolerance * max(_largest(other), SMALLEST_SHARE * top) + 1e-12:
                    raise _error(layout, f"the gradient of {name} differs by {difference:.3g} on shard {shard}")
    return None


def _run(spec: Job, graph: Graph, shards: int) -> tuple[float, dict[str, list[Tensor | None]]]:
    """(loss, gradients by name and shard) of one step."""
    with OneProcessRun(spec, ParallelPlan.mesh(tp=shards, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        loss = run.step(0)[0].loss
        return loss, {n: [None if g is None else g.detach().clone() for g in copies] for n, copies in run.gradients().items()}


def _largest(value: Tensor | None) -> float:
    return float(value.abs().max()) if value is not None and value.numel() else 0.0


def _error(layout: TensorParallelLayout, what: str) -> ModelError:
    cure = "give the modules around it the style whole (plan.styles: raypar plan shows what is cut and how), and report it"
    if layout.divides_samples:
        cure = "make what meets samples for all of them (x.shape[0]); or take samples out of plan.layout"
    return ModelError(
        f"the layers do not compute on {layout.shards} shards what they compute whole: in the first microbatch {what}", cure
    )
