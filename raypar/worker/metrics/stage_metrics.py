"""The metrics at the end of the model: measured of each microbatch where its output is, gathered, merged and computed once.

The states of all microbatches go to one worker of the last stage, as messages of the pass itself, at its end. So a worker that
is lost, hangs or raises meanwhile is met by what is there for a pass: its deadlines and errors; and a validation that was
broken off is run again by whichever workers there are then. No call of the driver, and no state of the driver's, is needed,
and the driver imports no code of the user's.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from raypar.comm.routine import Routine, RoutineWait
from raypar.comm.transport import Handle, Transport
from raypar.errors import RayparError, UserCodeError
from raypar.model.graph import Graph
from raypar.model.tensor_parallel.build_shard_modules import gather_outputs
from raypar.plan.seeds import seed_of
from raypar.plan.wording import after_steps, count_noun
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.kept_predictions import Prediction
from raypar.worker.metrics.all_predictions import PredictionsMetric
from raypar.worker.metrics.function_trial import FunctionTrialInValidation
from raypar.worker.metrics.metric import Batch, FunctionMetric, Metric, ObjectMetric, part_of_output, values_by_name
from raypar.worker.metrics.metric_state import State
from raypar.worker.metrics.object_trial import ObjectTrialInValidation
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import PassContext
from raypar.worker.stage.layer_tensors import require_value
from raypar.worker.stage.stage_coordinate_in_errors import StageCoordinate
from raypar.worker.stage.stage_shard import StageShard
from raypar.worker.step.message_tags import metrics_tag

K = TypeVar("K")

States = dict[tuple[str, int], dict[str, State]]
"""(validation set, its microbatch) -> metric -> its state after that microbatch. In training the name of the set is empty, as
it is where there is one."""


class MergedStates:
    """The states of a job's metrics after the first microbatches, merged in their order."""

    metrics: Mapping[str, Metric]
    """Name -> metric."""
    count: int
    """How many microbatches were added."""
    states: dict[str, State]
    """Name -> state; empty as long as none was added."""

    def __init__(
        self, metrics: Mapping[str, Metric], *, seed: int, seed_generators: Callable[[int], None], guard: TorchStateGuard
    ) -> None:
        """`seed`: the job's."""
        self.metrics, self.count, self.states = metrics, 0, {}
        self._seed, self._seed_generators, self._guard = seed, seed_generators, guard

    def begin(self) -> None:
        """Forget all."""
        self.count, self.states = 0, {}

    def add(self, found: Mapping[str, State]) -> None:
        """Merge the states after the next microbatch. Raises `UserCodeError`."""
        if not self.count:
            self.states, self.count = dict(found), 1
            return
        for name, state in found.items():
            metric = self.metrics[name]
            if not metric.merges_by_user:
                self.states[name] = metric.merge(self.states[name], state)
                continue
            self._seed_generators(seed_of(self._seed, "metric", name, "merge", self.count))
            with torch.no_grad(), self._user_code(name):
                self.states[name] = metric.merge(self.states[name], state)
        self.count += 1

    def values(self) -> dict[str, float]:
        """Name -> value; nothing where no microbatch was added. The states are used up. Raises `UserCodeError`."""
        found: dict[str, float] = {}
        for name, state in self.states.items():
            self._seed_generators(seed_of(self._seed, "metric", name))
            with torch.no_grad(), self._user_code(name):
                found |= values_by_name(name, self.metrics[name].compute(state))
        self.begin()
        return found

    @contextmanager
    def _user_code(self, name: str) -> Iterator[None]:
        """Run a metric's code that merges or computes inside. Raises `UserCodeError`."""
        try:
            yield
        except RayparError:
            raise
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise UserCodeError(
                f"metric {name!r} raised {error_text(error)}, when it had measured "
                f"{count_noun(self.count, 'microbatch', 'microbatches')}\n{traceback.format_exc()}",
                cure="this is an error of the metric's merge_state or compute, or of what they call",
            ) from error
        self._guard.check(f"metric {name!r}", evaluating=True)


class StageMetrics:
    """The metrics of one worker that has the last stage: measures its microbatches, and gathers those of the other replicas."""

    metrics: dict[str, Metric]
    """Name -> metric."""
    states: States
    """What was measured of this worker's microbatches in the pass under way, and is not merged yet."""

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
        merges: bool = True,
        of_sets: Mapping[str, Collection[str]] | None = None,
        samples: Mapping[str, int] | None = None,
        untried: Mapping[str, int] | None = None,
    ) -> None:
        """`target`: the name of the target, as the loss's; `shard`: which shard of the stage this is. The first measures.
        `every`: every how many steps of training; `merges`: whether states are merged, not kept by microbatch; `of_sets`:
        validation set -> its metrics; of one that is not named, all; `samples`: metric -> number of samples that it
        measures in a validation, over all sets and workers; `untried`: metric that was not tried before the run -> number of
        microbatches with which it is tried now."""
        self.metrics, self.states, self._of_sets = dict(metrics), {}, dict(of_sets or {})
        self._codes = {n: m.code if isinstance(m, Prediction) else f"metric {n!r}" for n, m in self.metrics.items()}
        self._merged = {
            name: MergedStates(self.metrics, seed=seed, seed_generators=seed_generators, guard=guard)
            for name in dict.fromkeys(["", *self._of_sets])
        }
        self._samples = dict(samples or {})
        tries = {name: _make_trial(self.metrics.get(name), n) for name, n in (untried or {}).items()}
        self._trials = {name: trial for name, trial in tries.items() if trial is not None}
        self._graph, self._target, self._seed = graph, target, seed
        self._coordinate, self._shard, self._guard = coordinate, shard, guard
        self._seed_generators, self._every, self._merges = seed_generators, every, merges

    def begin(self) -> None:
        """Begin a step or a validation: forget what one that was broken off has left."""
        self.states = {}
        for merged in self._merged.values():
            merged.begin()

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
        found = self.states[forward_pass.data_set, microbatch] = {}
        measured = self.metrics if forward_pass.training else self._of_sets.get(forward_pass.data_set, self.metrics)
        for name, metric in self.metrics.items():
            if name not in measured or (forward_pass.training and not metric.in_training):
                continue
            with self._user_code(name, forward_pass):
                found[name] = metric.measure(part_of_output(metric, output), batch, target)
                if name in self._trials and (line := self._trials[name].add(part_of_output(metric, output), batch, target)):
                    self._guard.pass_on([(f"trial of metric {name}", line)])
                if isinstance(metric, PredictionsMetric):
                    metric.refuse_too_many(found[name], self._samples.get(name, 0))
            if [tensor._version for tensor in given] != versions:
                raise UserCodeError(
                    f"metric {name!r} writes into the output or the batch, "
                    f"{self._coordinate.describe(forward_pass.step, microbatch, forward_pass.data_set)}",
                    cure="compute with new tensors (no in-place operations), or clone them first",
                )
        if self._merges:
            self._merge()

    def _merge(self) -> None:
        """Merge what follows the first microbatches of a set without a gap. Raises `UserCodeError`."""
        for of_set, merged in self._merged.items():
            while (following := self.states.pop((of_set, merged.count), None)) is not None:
                merged.add(following)

    def gather(self, step: int, stage: int, ranks: Sequence[int], transport: Transport) -> Routine[None]:
        """Bring the states of all microbatches to the first of `ranks`, the workers that measure, for `compute`.

        `step`: number of steps that are done; `stage`: the last stage. One message from each other worker, in host memory.
        """
        root, tag = ranks[0], metrics_tag(step, stage)
        if transport.rank not in ranks:
            return
        if transport.rank != root:
            sent = transport.send(self._pack(), to=root, tag=tag)
            self.begin()
            if not sent.done():
                yield RoutineWait(sent, "the states of metrics to be taken")
            return
        awaited: list[tuple[int, Handle]] = [(rank, transport.recv(None, source=rank, tag=tag)) for rank in ranks[1:]]
        for rank, handle in awaited:
            if not handle.done():
                yield RoutineWait(handle, f"the states of metrics of rank {rank} {after_steps(step)}")
            merged, states = pickle.loads(handle.tensor().numpy().tobytes())
            self.states |= states
            for of_set, (count, of_first) in merged.items():  # the microbatches from the first on are one worker's
                self._merged[of_set].count, self._merged[of_set].states = count, of_first

    def compute(self) -> dict[str, float]:
        """Name -> value, of the gathered states of all microbatches, merged in their order; of several validation sets
        `SET/NAME`. Empty on workers that have none, and where states are kept by microbatch.

        Raises `UserCodeError`.
        """
        if not self._merges:
            return {}
        self._merge()
        assert not self.states, "each microbatch of the pass was measured by somebody"
        found: dict[str, float] = {}
        for of_set, merged in self._merged.items():
            found |= {f"{of_set}/{name}" if of_set else name: value for name, value in merged.values().items()}
        return found

    @contextmanager
    def _user_code(self, name: str, forward_pass: PassContext) -> Iterator[None]:
        """Run a metric's code on a microbatch inside, with generators seeded by its place. Raises `UserCodeError`."""
        step, microbatch, data_set = forward_pass.step, forward_pass.microbatch, forward_pass.data_set
        place = (step, microbatch) if forward_pass.training else (microbatch,)
        code = self._codes[name]
        self._seed_generators(seed_of(self._seed, "metric", *place, name))
        try:
            yield
        except RayparError as error:
            raise UserCodeError(f"{error.what}, {self._coordinate.describe(step, microbatch, data_set)}", error.cure) from error
        except USER_CODE_ERRORS as error:
            raise self._coordinate.user_code_error(code, step, microbatch, error, data_set) from error
        self._guard.check(code, evaluating=True)

    def _pack(self) -> Tensor:
        """The states as one message: by set how many microbatches the merged ones are of, and those; and the others."""
        states = pack_states(self.metrics, {(of_set, 0): one.states for of_set, one in self._merged.items() if one.count})
        merged = {of_set: (self._merged[of_set].count, found) for (of_set, _), found in states.items()}
        return torch.frombuffer(bytearray(pickle.dumps((merged, pack_states(self.metrics, self.states)))), dtype=torch.uint8)


def _make_trial(metric: Metric | None, microbatches: int) -> ObjectTrialInValidation | FunctionTrialInValidation | None:
    if isinstance(metric, ObjectMetric):
        return ObjectTrialInValidation(metric, microbatches)
    return FunctionTrialInValidation(metric, microbatches) if isinstance(metric, FunctionMetric) else None


def pack_states(metrics: Mapping[str, Metric], states: Mapping[K, Mapping[str, State]]) -> dict[K, dict[str, State]]:
    """States that can be pickled, their tensors in host memory."""
    packed: dict[K, dict[str, State]] = {place: {} for place in states}
    for name, metric in metrics.items():
        places = [place for place, found in states.items() if name in found]
        for place, state in zip(places, metric.pack([states[place][name] for place in places]), strict=True):
            packed[place][name] = state
    return packed
