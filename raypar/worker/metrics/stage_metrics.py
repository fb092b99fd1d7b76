"""The metrics at the end of the model: measured of each microbatch where its output is, gathered, merged and computed once.

The states of all microbatches go to one worker of the last stage, as messages of the pass itself, at its end. So a worker that
is lost, hangs or raises meanwhile is met by what is there for a pass: its deadlines and errors; and a validation that was
broken off is run again by whichever workers there are then. No call of the driver, and no state of the driver's, is needed,
and the driver imports no code of the user's.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from raypar.comm.transport import Handle, Routine, RoutineWait, Transport
from raypar.errors import RayparError, UserCodeError
from raypar.model.graph import Graph
from raypar.model.tensor_parallel.build_shard_modules import gather_outputs
from raypar.plan.seeds import seed_of
from raypar.plan.wording import after_steps
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text, reraise_ctrl_c
from raypar.worker.metrics.metric import Batch, Metric, State, values_by_name
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import PassContext
from raypar.worker.stage.stage_coordinate import StageCoordinate
from raypar.worker.stage.stage_shard import StageShard
from raypar.worker.stage.stage_tensors import require_value
from raypar.worker.step.message_tags import metrics_tag

States = dict[int, dict[str, State]]
"""Microbatch -> metric -> its state after that microbatch."""


class StageMetrics:
    """The metrics of one worker that has the last stage: measures its microbatches, and gathers those of the other replicas."""

    metrics: dict[str, Metric]
    """Name -> metric."""
    states: States
    """What was measured of this worker's microbatches in the pass under way."""

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        *,
        graph: Graph,
        target: str,
        seed: int,
        coordinate: StageCoordinate,
        shard: StageShard | None,
        guard: TorchStateGuard,
        seed_generators: Callable[[int], None],
        every: int = 0,
    ) -> None:
        """`target`: the name of the target, as the loss's; `shard`: which shard of the stage this is. The first measures.
        `every`: every how many steps of training."""
        self.metrics, self.states, self._gathered = dict(metrics), {}, States()
        self._graph, self._target, self._seed = graph, target, seed
        self._coordinate, self._shard, self._guard = coordinate, shard, guard
        self._seed_generators, self._every = seed_generators, every

    def begin(self) -> None:
        """Begin a step or a validation: forget what one that was broken off has left."""
        self.states, self._gathered = {}, {}

    def are_due(self, step: int) -> bool:
        """Whether a step of training, from 0, is measured."""
        return self._every > 0 and (step + 1) % self._every == 0

    def measure(self, forward_pass: PassContext, values: Mapping[str, Tensor], batch: Batch) -> None:
        """Measure one microbatch, without gradients. `values`: all values of the stage; `batch`: the fields that were read.

        An output that is cut over shards is gathered. Raises `UserCodeError`, which names the metric and the microbatch.
        """
        read = [values[name].detach() for name in self._graph.loss_inputs]
        target = require_value(values, self._target, "a metric").detach()
        if self._shard is not None:
            read = gather_outputs(read, self._graph.loss_inputs, self._shard.group)
            if self._shard.group.shard:
                return
        rebuild, microbatch = self._graph.rebuild_output, forward_pass.microbatch
        output = read[0] if rebuild is None else rebuild(*read)
        given = [*read, *batch.values()]
        versions = [tensor._version for tensor in given]
        found = self.states[microbatch] = {}
        for name, metric in self.metrics.items():
            with self._user_code(name, forward_pass):
                found[name] = metric.measure(output, batch, target)
            if [tensor._version for tensor in given] != versions:
                raise UserCodeError(
                    f"metric {name!r} writes into the output or the batch, "
                    f"{self._coordinate.describe(forward_pass.step, microbatch)}",
                    cure="compute with new tensors (no in-place operations), or clone them first",
                )

    def gather(self, step: int, stage: int, ranks: Sequence[int], transport: Transport) -> Routine[None]:
        """Bring the states of all microbatches to the first of `ranks`, the workers that measure, for `compute`.

        `step`: number of steps that are done; `stage`: the last stage. One message from each other worker, in host memory.
        """
        root, states, tag = ranks[0], self.states, metrics_tag(step, stage)
        self.states = {}
        if transport.rank not in ranks:
            return
        if transport.rank != root:
            sent = transport.send(_pack(states), to=root, tag=tag)
            if not sent.done():
                yield RoutineWait(sent, "the states of metrics to be taken")
            return
        awaited: list[tuple[int, Handle]] = [(rank, transport.recv(None, source=rank, tag=tag)) for rank in ranks[1:]]
        for rank, handle in awaited:
            if not handle.done():
                yield RoutineWait(handle, f"the states of metrics of rank {rank} {after_steps(step)}")
            states |= pickle.loads(handle.tensor().numpy().tobytes())
        self._gathered = states

    def compute(self) -> dict[str, float]:
        """Name -> value, of the gathered states of all microbatches, merged in their order; empty on workers that have none.

        Raises `UserCodeError`.
        """
        states, self._gathered = self._gathered, {}
        found: dict[str, float] = {}
        for name, metric in self.metrics.items() if states else ():
            self._seed_generators(seed_of(self._seed, "metric", name))
            with torch.no_grad():
                try:
                    found |= values_by_name(name, metric.compute([states[m][name] for m in sorted(states)]))
                except RayparError:
                    raise
                except USER_CODE_ERRORS as error:
                    reraise_ctrl_c(error)
                    raise UserCodeError(
                        f"metric {name!r} raised {error_text(error)}, when it had measured {len(states)} microbatches\n"
                        f"{traceback.format_exc()}",
                        cure="this is an error of the metric's merge_state or compute, or of what they call",
                    ) from error
                self._guard.check(f"metric {name!r}", evaluating=True)
        return found

    @contextmanager
    def _user_code(self, name: str, forward_pass: PassContext) -> Iterator[None]:
        """Run a metric's code on a microbatch inside, with generators seeded by its place. Raises `UserCodeError`."""
        step, microbatch = forward_pass.step, forward_pass.microbatch
        place = (step, microbatch) if forward_pass.training else (microbatch,)
        self._seed_generators(seed_of(self._seed, "metric", *place, name))
        try:
            yield
        except RayparError as error:
            raise UserCodeError(f"{error.what}, {self._coordinate.describe(step, microbatch)}", error.cure) from error
        except USER_CODE_ERRORS as error:
            raise self._coordinate.user_code_error(f"metric {name!r}", step, microbatch, error) from error
        self._guard.check(f"metric {name!r}", evaluating=True)


def _pack(states: States) -> Tensor:
    """The states as one message."""
    return torch.frombuffer(bytearray(pickle.dumps(states)), dtype=torch.uint8)
