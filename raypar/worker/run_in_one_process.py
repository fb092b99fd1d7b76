"""A whole plan in one process: every worker's core over the local transport, interleaved by the cooperative scheduler.

It is the executable specification of a run: `raypar debug` steps through it, the parity grid compares it with one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from raypar.comm import blocking_code_as_routine
from raypar.comm.blocking_code_as_routine import as_routine, keep_all_generators
from raypar.comm.buffer_pool import CPU
from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import Routine
from raypar.errors import ConfigError
from raypar.job import Job
from raypar.job.lr_schedule_metric import FollowedMetric
from raypar.model.graph import Graph, Layer
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.microbatches import mean_loss_by_set
from raypar.plan.wording import count_noun, word_form
from raypar.schedule import registry
from raypar.schedule.instructions import Instruction, Schedule
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.sample_order import SamplePosition
from raypar.worker.data.stream_loader import StreamLoader
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import LayerFunction, PassContext
from raypar.worker.stage.layer_tensors import LayerTensors
from raypar.worker.step.optimizer_state import Value, read_optimizer_state
from raypar.worker.worker_core import WorkerCore
from raypar.worker.worker_reports import StepReport, ValidationReport, merge_validation_losses

T = TypeVar("T")

MOST_SAMPLES = 5
"""How many samples with numbers that are not finite are named."""


class Breakpoint:
    """Where a debugger shall stop: at the instructions of one stage and microbatch in one step."""

    def __init__(self, text: str) -> None:
        """`text`: STEP,STAGE,MICROBATCH, of `--stop-at`: the step from 1, the others from 0.

        Raises `ConfigError` for another form.
        """
        self.text = text
        """As the user wrote it."""
        try:
            step, stage, microbatch = (int(part) for part in text.split(","))
        except ValueError:
            cure = "for example --stop-at 3,1,0"
            raise ConfigError(f"--stop-at {text!r} is not STEP,STAGE,MICROBATCH", cure=cure) from None
        self.place = (step - 1, stage, microbatch)
        """(step, stage, microbatch), all from 0."""

    def check_is_reached(self, steps: range, stages: int, microbatches: int) -> None:
        """Raise `ConfigError` if a run of these steps, from 0, with so many stages and microbatches never comes there."""
        if any(at not in there for at, there in zip(self.place, (steps, range(stages), range(microbatches)), strict=True)):
            which = count_noun(len(steps), "step") if steps.start == 0 else f"steps {steps.start + 1} to {steps.stop}"
            raise ConfigError(
                f"--stop-at {self.text} is never reached: {which}, {count_noun(stages, 'stage')}, "
                f"{count_noun(microbatches, 'microbatch', 'microbatches')}",
                cure="steps count from 1, stages and microbatches from 0; --steps runs more steps",
            )

    def is_at(self, step: int, instruction: Instruction) -> bool:
        """Whether this instruction of a step, from 0, is one of them."""
        return self.place == (step, getattr(instruction, "stage", None), getattr(instruction, "microbatch", None))


class OneProcessRun:
    """A run of one plan whose workers all live in this process."""

    spec: Job
    """The job."""
    plan: ParallelPlan
    """The plan that is run."""
    graph: Graph
    """The whole model."""
    guard: TorchStateGuard
    """Restores process state that users' code leaves changed; all workers are in one process."""
    warnings: list[str]
    """Lines about process state that users' code has left changed so far (see `TorchStateGuard`)."""
    mesh: LocalMesh
    """The workers' transports."""
    scheduler: CooperativeScheduler
    """Lets the workers take turns."""
    cores: list[WorkerCore]
    """The workers, by rank."""
    followed: FollowedMetric | None
    """The metric that the learning rates follow, with its values; None: they are a function of the step."""
    metrics: dict[str, float]
    """Name -> value of the job's metrics in the last step or validation; of several sets `SET/NAME`, and `SET/loss`."""

    def __init__(
        self,
        spec: Job,
        plan: ParallelPlan,
        schedule: str | Schedule,
        *,
        graph: Graph | None = None,
        seed: int | None = None,
        cost_ms: Callable[[Instruction], float] = lambda instruction: 0.0,
        before_compute: Callable[[int, Instruction], None] | None = None,
        device: torch.device = CPU,
        guard: TorchStateGuard | None = None,
        nodes: Sequence[int] = (),
    ) -> None:
        """`schedule`: a name of the registry, or a schedule of the user's. `seed`: picks the order in which workers that can
        run take turns; results do not depend on it. `cost_ms`, `before_compute`, `nodes`: see `Interpreter`."""
        self.spec, self.plan = spec, plan
        self.guard = guard if guard is not None else TorchStateGuard(spec.threads)
        if graph is None:
            self.guard.establish("the process that made this run")
            graph = make_layer_graph(spec, self.guard.watching)
        self.graph = graph
        routing, crossing = MicrobatchRouting(plan, spec.batching), graph.crossing(plan)
        order = registry.build_schedule(schedule, routing, connections=crossing) if isinstance(schedule, str) else schedule
        self.warnings, self.metrics, self.followed = [], {}, spec.make_followed_metric({})
        self.mesh = LocalMesh(plan.world)
        self.scheduler = CooperativeScheduler(seed)
        samples = {name: one.samples or len(spec.data_of_set(one).call()) for name, one in spec.validation_sets.items()}
        self.cores = [WorkerCore(spec, graph=self.graph, device=device, guard=self.guard) for _ in range(plan.world)]
        parts = make_worker_assignments(spec, self.graph, plan, order, validation_samples=samples)
        for core, part, transport in zip(self.cores, parts, self.mesh.transports, strict=True):
            core.adopt(part, transport, cost_ms=cost_ms, before_compute=before_compute, nodes=nodes)

    def step(self, step: int, *, trace: bool = False) -> list[StepReport]:
        """Run one step on every worker; returns their reports by rank. If its learning rate follows a validation directly
        before it that has not been run, that is run first."""
        if self.followed is not None and self.followed.lacks(step):
            self.validate(step)
        reports = self._run([core.routine(step, trace=trace) for core in self.cores])
        self._keep_warnings(reports)
        self.metrics = {name: value for report in reports for name, value in report.metrics.items()}
        return reports

    def validate(self, step: int) -> float:
        """Run one validation pass after `step` steps; returns its loss. The learning rates of later steps follow it, if they
        follow any."""
        reports = self._run([core.validation_routine(step) for core in self.cores])
        self._keep_warnings(reports)
        losses = {m: pair for report in reports for m, pair in report.losses.items()}
        batching = self.cores[0].assignment.validation_microbatches
        of_sets = mean_loss_by_set(batching, losses)
        metrics = {name: value for report in reports for name, value in report.metrics.items()}
        self.metrics = {**{f"{name}/loss": loss for name, loss in of_sets.items()}, **metrics}
        loss = merge_validation_losses(reports)
        if self.followed is not None:
            self.followed.add_validation(step, loss, of_sets, metrics)
            self.follow(self.followed.values)
        return loss

    def follow(self, validated: Mapping[int, float]) -> None:
        """Go on with the values of the metric that the learning rates follow: number of steps done -> value."""
        if self.followed is not None:
            self.followed.values.update(validated)
            for core in self.cores:
                core.validated.update(validated)

    def _keep_warnings(self, reports: Sequence[StepReport | ValidationReport]) -> None:
        self.warnings += [line for report in reports for _, line in report.warnings]

    def _run(self, routines: list[Routine[T]]) -> list[T]:
        """Run one routine for each worker. Layers on shards wait for each other in the middle of a layer, so their workers run
        in threads that take turns."""
        keep = partial(self.guard.keep_in_turn, keep_all_generators)

        def in_turn(core: WorkerCore, routine: Routine[T]) -> Routine[T]:
            work = partial(blocking_code_as_routine.run_or_yield, routine)
            return as_routine(work, keep) if core.waits_inside_layers else routine

        return self.scheduler.run([in_turn(*each) for each in zip(self.cores, routines, strict=True)], self.mesh)

    def parameters(self) -> dict[str, list[Tensor]]:
        """Parameter -> the copy of every worker that has it; of a parameter that is cut over shards, each worker's slice. Where
        replicas divide state, what owners have changed is gathered before."""
        self.scheduler.run([core.step_commit.gather.gather_everything() for core in self.cores], self.mesh)
        return self._collect(lambda parameter: parameter.detach())

    def weights_hash(self) -> str | None:
        """`weights_hash` of the whole model, as a run's last line has it; None where shards have parts of parameters, or
        replicas may have parts of masters."""
        if max(self.plan.virtual_shard_counts) > 1 or (self.spec.precision is not None and self.spec.precision.parameters):
            return None
        return weights_hash({name: copies[0] for name, copies in self.parameters().items()})

    def gradients(self) -> dict[str, list[Tensor | None]]:
        """Parameter -> every worker's copy of its scaled gradient in the last step; None where replicas divide it."""
        return self._collect(lambda parameter: parameter.grad)

    def buffers(self) -> dict[str, list[Tensor]]:
        """Buffer -> the copy of every worker that has it."""
        found: dict[str, list[Tensor]] = {}
        for core in self.cores:
            for stage in core.stages.values():
                for name, buffer in stage.buffers.items():
                    found.setdefault(name, []).append(buffer)
        return found

    def _collect(self, read: Callable[[Tensor], T]) -> dict[str, list[T]]:
        """Parameter -> what `read` returns for it on every worker that has it."""
        found: dict[str, list[T]] = {}
        for core in self.cores:
            for stage in core.stages.values():
                for name, parameter in stage.parameters.items():
                    found.setdefault(name, []).append(read(parameter))
        return found

    def optimizer_state(self) -> dict[str, list[dict[str, Value]]]:
        """Parameter -> every worker's optimizer state of it. Where replicas divide it: run of it (`owned_parameters.run_key`)
        -> its owner's."""
        found: dict[str, list[dict[str, Value]]] = {}
        for core in self.cores:
            for optimizer in core.step_commit.optimizers.values():
                for name, state in read_optimizer_state(optimizer).parameters.items():
                    found.setdefault(name, []).append(dict(state))
        return found

    def close(self) -> None:
        """Stop the workers' loaders and transports."""
        for core in self.cores:
            core.close()

    def __enter__(self) -> OneProcessRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class FirstNonFinite:
    """Finds the first NaN or infinite number of a run: in what layers are given (a sample, say), in their parameters, their
    outputs, or the gradients of these outputs."""

    found: str | None = None
    """The first NaN or infinite number: layer, microbatch, step and tensor, as text; None while there is none."""

    def __init__(self, run: OneProcessRun) -> None:
        """Watches the layers of a run from its next step on."""
        for core in run.cores:
            for stage in core.stages.values():
                for layer in stage.layers:
                    layer.call = self._watched(layer.layer, layer.call, core.loader, stage.batch_fields)

    def _watched(
        self, layer: Layer, call: LayerFunction, loader: MicrobatchLoader | StreamLoader | None, fields: Collection[str]
    ) -> LayerFunction:
        """The layer's call, which checks its inputs, parameters and outputs, with hooks that check the outputs' gradients.

        `loader` reads the `fields` of the batch, whose samples are named.
        """

        def watched(forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            place = f"layer {layer.name!r} in microbatch {forward_pass.microbatch} of step {forward_pass.step + 1}"
            for name, value in zip(layer.inputs, inputs, strict=True):
                before = self.found
                self._look(value, f"{place}: its input {name!r} has {{}}")
                if before is None and self.found is not None and loader is not None and name in fields:
                    samples = loader.sample_positions(forward_pass.step, forward_pass.microbatch)
                    self.found += f", in {name_samples_not_finite(value, samples)} (field {name!r})"
            for name, value in weights.module.named_parameters():
                self._look(value, f"{place}: its parameter {name!r} has {{}}")
            returned = call(forward_pass, weights, inputs)
            for output, value in zip(layer.outputs, returned, strict=True):
                self._look(value, f"{place}: its output {output!r} has {{}}")
                if value.grad_fn is not None and self.found is None:
                    text = f"{place}, in the backward pass: the gradient of its output {output!r} has {{}}"
                    value.grad_fn.register_prehook(lambda gradients, text=text: self._look_at_all(gradients, text))
            return returned

        return watched

    def _look_at_all(self, gradients: Sequence[Tensor | None], text: str) -> None:
        for gradient in gradients:
            if gradient is not None:
                self._look(gradient, text)

    def _look(self, value: Tensor, text: str) -> None:
        if self.found is None and value.is_floating_point() and not value.isfinite().all():
            kind = "NaN" if value.isnan().any() else "infinite numbers"
            self.found = text.format(f"{kind} ({int((~value.isfinite()).sum())} of {value.numel()} numbers)")

    def describe(self) -> str:
        """Text on where the first NaN or infinite number was."""
        return (
            self.found
            or "the loss, a parameter's gradient or the gradient norm (what layers are given, hold and return is finite)"
        )


def name_samples_not_finite(rows: Tensor, samples: Sequence[SamplePosition]) -> str:
    """The ids of the samples whose rows have NaN or infinite numbers: `samples 17, 201`, the first few of them.

    `rows` [samples, ...]: a field of a microbatch; `samples`: its (epoch, id).
    """
    is_odd = (~rows.isfinite()).reshape(len(samples), -1).any(dim=1).tolist()
    ids = [str(one) for (_, one), odd in zip(samples, is_odd, strict=True) if odd]
    more = len(ids) - MOST_SAMPLES
    return f"{word_form(ids, 'sample', 'samples')} {', '.join(ids[:MOST_SAMPLES])}" + f" and {more} more" * (more > 0)
