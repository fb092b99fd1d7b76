"""Runs a few microbatches before a run as one process would: one after the other, under plain autograd, on the CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU
from raypar.errors import ModelError
from raypar.job import Job, LossScaleConfig, OptimizerConfig, PrecisionConfig
from raypar.model.capture.memoryless_tensor import ValuesNeeded
from raypar.model.graph import Graph, join_names
from raypar.model.layer_skeletons import parameters_and_buffers_on_meta
from raypar.model.python_state import PythonState
from raypar.model.random_state import RandomState, seed_all
from raypar.model.rounded_parameters import round_parameters_of
from raypar.plan.seeds import seed_of
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.check_state_between_microbatches import ComputedMicrobatch, compute_with_and_without_state
from raypar.worker.layer_precisions import autocast_of, dtype_of_job, layer_precision_of, parameter_dtype_of
from raypar.worker.measure_profile import read_microbatches_of_steps
from raypar.worker.process.seed_generators import make_seeder

MOST_BYTES = 64 << 20
"""Models with more bytes of parameters and buffers are not computed: comparing one takes six times as much memory."""
TOLERANCES = {"float32": 1e-4, "float64": 1e-9}
"""Dtype -> largest difference, as a share of the largest number in a tensor. Additions in another order stay far below it; a
wrong layer's smallest effect is far above. Mixed precisions have their own (`AutocastPrecision.comparison_tolerance`)."""


def comparison_tolerance(spec: Job) -> float:
    """The largest relative difference between numbers that count as equal under the job's dtype or precision."""
    lower = layer_precision_of(spec.precision)
    return TOLERANCES[spec.dtype] if lower is None else lower.comparison_tolerance


def with_few_microbatches(spec: Job, few: int) -> Job:
    """The job on the CPU, with steps of `few` of its microbatches, which change no parameter, and streams for each at most."""
    data = spec.data if spec.data.streams is None else spec.data.replace(streams=min(few, spec.data.streams))
    return spec.replace(
        data=data,
        batch_size=few * spec.batch_size // spec.microbatches,
        microbatches=few,
        virtual_replicas=0,
        clip_norm=None,
        lr_schedule=None,
        validation=None,
        metrics={},
        metrics_every=0,
        non_finite="skip",
        device="cpu",
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.0}),
        precision=_unscaled(spec.precision),
    )


def _unscaled(precision: PrecisionConfig | None) -> PrecisionConfig | None:
    """The same with a loss that begins with the scale 1, as under plain autograd: no overflow is due to a scale then."""
    if precision is None or precision.loss_scaling is None:
        return precision
    return precision.replace(loss_scale=LossScaleConfig(init_scale=1.0))


MOST_SECONDS = 3.0
"""A model of which one microbatch takes longer than this is not compared."""
MICROBATCHES = 3
"""Number of microbatches that are computed."""
UNSEEN = (
    "state that its code keeps between microbatches (counters, averages) is not seen then: try a smaller configuration once "
    "(examples/guides/your_own_model.md)"
)
"""What a user should do about a model that was not looked through for state."""

Batches = Sequence[tuple[tuple[int, int], Mapping[str, Tensor]]]
"""((step, microbatch), its fields) of each microbatch."""


def first_microbatches(spec: Job, graph: Graph) -> tuple[Job, Batches]:
    """(the job with steps of at most `MICROBATCHES` microbatches, the first `MICROBATCHES` of it).

    With two replicas one worker computes two of a step of three.
    """
    few = min(MICROBATCHES, spec.microbatches)
    small = with_few_microbatches(spec, few)
    places = [divmod(number, few) for number in range(MICROBATCHES)]
    return small, list(zip(places, read_microbatches_of_steps(small, graph, places), strict=True))


def refuse_large_models(spec: Job, graph: Graph) -> None:
    """Raises `NotCompared` for models that are not computed before a run (`MOST_BYTES`)."""
    state = parameters_and_buffers_on_meta(graph, 0, len(graph.layers), dtype_of_job(spec))
    size = sum(tensor.nbytes for tensor in state.values())
    if size > MOST_BYTES:
        raise NotCompared(f"its parameters and buffers have {size / 2**20:.0f} MiB, and up to {MOST_BYTES >> 20} MiB are tried")


class NotCompared(Exception):
    """Why microbatches could not be computed before the run."""


class _Run(NamedTuple):
    """One microbatch, computed once."""

    computed: ComputedMicrobatch
    """What it gave."""
    draws_in_backward: bool
    """Whether the backward pass has drawn random numbers, or set a generator."""


_seed_layer = make_seeder(CPU)
"""Seeds the generators as workers do before a layer's forward (rule 3 of the numerics contract)."""


class PlainMicrobatches:
    """Modules with their initial values, and the microbatches that they compute. A subclass says what a forward is."""

    label: str
    """The model in messages."""
    modules: Mapping[str, nn.Module]
    """Qualified name -> module; a model has the empty name."""
    state: PythonState
    """What the code of the modules keeps outside of parameters and buffers."""
    unread: str | None = None
    """A place that could not be looked through whole for state, and why."""
    in_backward = False
    """Whether a backward pass is under way, in which activation checkpointing calls modules again."""

    def __init__(self, spec: Job, label: str, modules: Mapping[str, nn.Module], batches: Batches) -> None:
        self._spec, self.label, self.modules, self._batches = spec, label, modules, batches
        self.rounded_to = parameter_dtype_of(spec.precision)
        """The dtype of the copies of parameters that layers compute with; None: the job's."""
        for module in modules.values():
            round_parameters_of(module, self.rounded_to)
        self.state = PythonState(modules)
        self._place = (0, 0)
        """Step and index of the microbatch under way."""
        parts = [part for module in modules.values() for part in module.modules()]
        self._buffers = [(part, dict(part._buffers)) for part in parts]
        """Every module and its buffers."""
        self._values = [(b, b.clone()) for module in modules.values() for b in module.buffers()]
        """Every buffer and its value before the first microbatch."""

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | float | None]:
        """(loss, count) of one microbatch; count is None where the loss is a mean over the samples."""
        raise NotImplementedError

    def check_calls(self) -> None:
        """Called after each microbatch. Raises `NotCompared` if the forward was not what workers run."""

    def run(self, few: int) -> list[ComputedMicrobatch]:
        """Compute `few` microbatches, more where they leave something behind; returns those `few`.

        Raises `ModelError` if one depends on what others leave behind, `NotCompared` if they cannot be run in a short time.
        """
        forms = [{name: (value.shape, value.dtype) for name, value in batch.items()} for _, batch in self._batches]
        computed = compute_with_and_without_state(self.state, self.compute, forms, few)
        self.unread = self.state.unread
        return computed[:few]

    def lines_about_unread(self) -> tuple[str, ...]:
        """A line for the user about code that holds too much to be looked through for state; none after a whole look."""
        return () if self.unread is None else (f"{self.unread}; {UNSEEN}",)

    def compute(self, number: int) -> ComputedMicrobatch:
        """One microbatch, forward and backward."""
        start = time.monotonic()
        found = self._run(number)
        if found.draws_in_backward and (
            difference := found.computed.difference(self._run(number, other_numbers=True).computed)
        ):
            raise ModelError(
                f"{self.label} draws random numbers in its backward pass, which are not those of its forward "
                f"({difference} when they are others): activation checkpointing keeps PyTorch's generator only, and only with "
                "preserve_rng_state=True, and which numbers come next depends on the plan",
                cure="draw with torch inside of torch.utils.checkpoint; or use plan.recompute in its place, which seeds all "
                "generators again",
            )
        self.check_calls()
        if (took := time.monotonic() - start) > MOST_SECONDS:
            raise NotCompared(f"one microbatch took {took:.1f} s, and up to {MOST_SECONDS:.0f} s are spent on it")
        return found.computed

    def _run(self, number: int, *, other_numbers: bool = False) -> _Run:
        """See `compute`. `other_numbers`: other random numbers are next when the backward pass begins."""
        self._place, batch = self._batches[number]
        for part, former in self._buffers:  # rule 14: each microbatch begins with the buffers of the step's beginning
            part._buffers.update(former)
        with torch.no_grad():
            for buffer, value in self._values:
                buffer.copy_(value)
        self._forget_gradients()
        try:
            total, count = self._sum_and_count(batch)
            if other_numbers:
                seed_all(1)
            before = RandomState.now()
            self.in_backward = True
            total.backward()
        except ValuesNeeded as error:
            raise ModelError(
                f"the forward of {self.label} keeps a tensor of one call for later ones, outside of its "
                f"modules: {error_text(error)}",
                cure="keep it in a buffer (register_buffer), or make it in each call",
            ) from error
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise NotCompared(f"its own forward and backward raised {error_text(error)}") from error
        finally:
            self.in_backward = False
        spec = self._spec
        dtype = dtype_of_job(spec)
        gradients = {name: p.grad.to(dtype) for name, p in self.named_parameters() if p.grad is not None}
        self._forget_gradients()
        return _Run(ComputedMicrobatch(float(total.detach()), count, gradients), before.is_changed())

    def _sum_and_count(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """(sum of the losses, count) of one microbatch."""
        with self._autocast():
            total, count = self.forward(batch)
        if count is None:
            count = float(batch[self._spec.loss_target_name].shape[0])
            total = total * count
        return total, float(count)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(qualified name, parameter) of every parameter."""
        for name, module in self.modules.items():
            for path, parameter in module.named_parameters():
                yield join_names(name, path), parameter

    def _forget_gradients(self) -> None:
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        autocast = autocast_of(self._spec.precision)
        if autocast is None:
            yield
        else:
            with torch.autocast("cpu", autocast.dtype, cache_enabled=False):
                yield

    def seed(self, layer: str) -> None:
        """Seed the generators as workers do before this layer's forward."""
        _seed_layer(self.seed_of(layer))

    def seed_of(self, layer: str) -> int:
        """The seed of a layer's random numbers in the microbatch under way."""
        return seed_of(self._spec.seed, "forward", *self._place, layer)
