"""Counts what one training step asks of the device of `helpers.pretend`: operations that write memory, host reads and waits.

A plain loop on the same device stands beside: the model, its loss, the gradients' norm and clipping, the optimizer, as users
write them. On a GPU each operation is a kernel or a few, and each read and wait stops the host. Messages between workers come
late here (`LateScheduler`): a worker that may have to wait for one does.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from helpers import pretend
from helpers.model_zoo import import_transformers
from helpers.norm_networks import ResNet
from helpers.recomputed_layouts import count_recomputations
from torch import Tensor, nn
from torch.nn import functional as F

from raypar.comm import collectives, local_transport
from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.nccl.tree_sum import add_over_tree_on_device
from raypar.comm.routine import Routine, RoutineWait
from raypar.comm.transport import Handle
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PrecisionConfig
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

State = dict[str, Any]
PACKAGE = str(Path(__file__).parents[2] / "raypar") + "/"
FEWER, MORE = 2, 4
"""Microbatches of a step: the table's is the larger number; the difference tells what each microbatch adds."""
WARM = 2
"""Steps before the one that is counted."""
WANTED = 1.05
"""What may be asked of the device beside the loop, for each operation of the loop; one more for each message."""

NO_WRITE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias", "set_"}
NO_WRITE |= {"lift_fresh", "resize_", "detach_", "as_strided_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_"}
"""Operations that write no memory although their schemas do not say so."""
SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal"}
"""Operations before whose end the host does not know the result's size, or that return a number: it waits."""


@dataclass
class Counts:
    """Of one step of all workers, or of a loop."""

    operations: Counter[str] = field(default_factory=Counter)
    """Cause -> operations that write memory of the device."""
    reads: Counter[str] = field(default_factory=Counter)
    """Cause -> reads of device values by the host."""
    waits: Counter[str] = field(default_factory=Counter)
    """What is waited for -> waits of the host for a message."""
    messages: int = 0
    """Messages and parts of collectives, of which each may cost an operation; sent between workers in memory of the device."""
    names: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(cause, operation) -> how often."""

    @property
    def totals(self) -> tuple[int, int, int]:
        """(operations, reads, waits)."""
        return self.operations.total(), self.reads.total(), self.waits.total()


OF_LOOP: dict[str, str] = {}
"""Function of this module -> what it does in the loop."""


# -- what is counted ---------------------------------------------------------------------------------------------------------


@functools.cache
def writes(op: Any) -> bool:
    """Whether the operation writes memory."""
    schema = op._schema
    if schema.name.partition("::")[2] in NO_WRITE or schema.name.endswith("_local_scalar_dense"):
        return False
    aliases = [returned.alias_info for returned in schema.returns]
    return not aliases or any(alias is None or alias.is_write for alias in aliases)


LAYERS, LOSS, BACKWARD, OPTIMIZER, NORM = "layers", "loss", "backward", "optimizer", "norm and clipping"
COPIES, SCALING, BY_HAND = "batches copied", "gradients scaled", "shards by hand"
STATISTICS, ADDITIONS, MESSAGES = "running statistics", "additions over blocks and uses", "messages"
CAUSES = {
    "_ballot": "losses and counts for the vote",
    "_put_gradients": SCALING,
    "fold_gradients": ADDITIONS,
    "run_autograd_backward": BACKWARD,
    "linear_forward": LAYERS,
    "transposed_linear_forward": LAYERS,
    "input_gradient": BACKWARD,
    "weight_gradient": BACKWARD,
    "bias_gradient": BACKWARD,
    "trace_cache.py": "values that the forward reads",
    "gpu_setup.py": COPIES,
    "layer_call.py": LAYERS,
    "sharded_value_torch_functions.py": LAYERS,
    "loss.py": LOSS,
    "graph.py": LOSS,
    "precision.py": LOSS,
    "build_shard_modules.py": LOSS,
    "norm_and_weights_hash.py": NORM,
    "squares_on_device.py": NORM,
    "running_statistics.py": STATISTICS,
    "buffer_updates.py": STATISTICS,
    "buffer_exchange.py": STATISTICS,
    "gradient_accumulator.py": ADDITIONS,
    "addition_tree.py": ADDITIONS,
    "gradient_reduction.py": "reduction over replicas",
    "gradient_buckets.py": "reduction over replicas",
    "holder_buckets.py": "reduction over replicas",
    "gradient_sums.py": "reduction over replicas",
    "collectives.py": "sums over shards",
    "tree_sum.py": "sums over shards",
    "autograd_collectives.py": "sums over shards",
    "shard_group.py": "sums over shards",
    "sent_tensor_layout.py": MESSAGES,
    "local_transport.py": MESSAGES,
    "vocabulary_parallel.py": "shards: vocabulary",
    "linear.py": "shards: linear layers",
    "copy_on_device.py": "",
    "multi_tensor.py": "",
    "buffer_pool.py": "",
}
"""Function, or file, of raypar that is on the stack -> what it does; empty: what its caller does."""


def cause_of(frame: Any) -> str:
    """Why an operation runs: what the innermost function of raypar, or of this module's loop, does."""
    while frame is not None:
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        if "/torch/optim/" in path:
            return OPTIMIZER
        if "/utils/clip_grad" in path:
            return NORM
        if function == "unpack_hook" and path.endswith("/utils/checkpoint.py"):
            return LAYERS
        if path == __file__ and function in OF_LOOP:
            return OF_LOOP[function]
        if path.startswith(PACKAGE):
            file = path.rpartition("/")[2]
            found = CAUSES.get(function, CAUSES.get(file))
            if found is None:
                return LAYERS if "/model/capture/" in path else f"{file.removesuffix('.py')}: {function}"
            if found:
                return found
        frame = frame.f_back
    return BACKWARD  # a thread of autograd


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Context in which everything that the device is asked for is counted."""
    found = Counts()

    def asked(op: Any, args: Sequence[Any], on_host: bool) -> None:
        name = op._schema.name.partition("::")[2]
        cause = LAYERS if name.endswith("batch_norm") else cause_of(sys._getframe(2))
        if on_host or name == "_local_scalar_dense" or name in SIZED_BY_VALUES:
            found.reads[cause] += 1
        if not on_host and writes(op):
            found.operations[cause] += 1
            found.names[cause, name] += 1

    pretend.watchers.append(asked)
    try:
        yield found
    finally:
        pretend.watchers.remove(asked)


def _add_over_tree_of_nccl(parts: Sequence[Tensor], own: int, out: Tensor) -> None:
    """The sum that a collective of the transport makes. Two ranks' is NCCL's own, whose one operation is the message's; more
    ranks' parts are added in one."""
    watching, pretend.watchers[:] = pretend.watchers[:], [] if len(parts) == 2 else pretend.watchers
    try:
        add_over_tree_on_device(parts, own, out)
    finally:
        pretend.watchers[:] = watching


# -- messages that come late -------------------------------------------------------------------------------------------------


class Enqueued:
    """Handle of work that a device does once a collective is over, without the host."""

    def __init__(self, after: Handle | None, work: Callable[[], None]) -> None:
        self._after, self._work, self._is_done = after, work, False

    def done(self) -> bool:
        """See `Handle.done`."""
        return self._is_done

    def go_on(self) -> bool:
        """Do the work if it may be done; whether it is."""
        if self._after is None or self._after.done():
            self._work()
            self._is_done = True
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait`."""
        assert self._is_done

    wait_on_stream = wait


class LateScheduler(CooperativeScheduler):
    """Delivers messages when some worker waits, and not before; counts the waits of the host. Waits between which it asks the
    device for nothing and posts nothing are one wait, for all that they wait for (as for the votes of all others)."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.messages = 0
        self._posted: list[tuple[Any, Any]] = []
        self._enqueued: list[Enqueued] = []
        """Work of devices that waits for messages, in order."""
        self._asked = 0
        """Operations of the device and halves of messages so far, of all workers."""

    def run(self, routines: Sequence[Routine[Any]], mesh: Any = None) -> list[Any]:
        """See `CooperativeScheduler.run`."""
        deliver = local_transport.deliver_message

        def deliver_all() -> None:
            posted, self._posted = self._posted, []
            for pair in posted:
                self.messages += pair[0].tensor is not None and pair[0].tensor.device.type == pretend.NAME
                deliver(*pair)
                while self._enqueued and self._enqueued[0].go_on():
                    self._enqueued.pop(0)

        def enqueue(after: Handle | None, work: Callable[[], None]) -> Enqueued:
            made = Enqueued(after, work)
            if after is not None or not made.go_on():
                self._enqueued.append(made)
            return made

        def waiting(routine: Routine[Any]) -> Routine[Any]:
            error: Exception | None = None
            waited = False
            while True:
                asked = self._asked
                try:
                    operation = next(routine) if error is None else routine.throw(error)
                except StopIteration as end:
                    deliver_all()
                    return end.value
                error = None
                waits = isinstance(operation, RoutineWait) and not operation.on_stream
                goes_on, waited = waited and waits and self._asked == asked, waits
                if isinstance(operation, RoutineWait):
                    if waits and not goes_on:
                        self.waits[re.sub(r"\d+", "N", operation.what)] += 1
                    while self._posted and not operation.handle.done():
                        deliver_all()
                try:
                    yield operation
                except Exception as failed:
                    error = failed

        def count(*given: Any) -> None:
            self._asked += 1

        def match(mesh: Any, *given: Any, **more: Any) -> None:
            count()
            matched(mesh, *given, **more)

        matched = local_transport.LocalMesh.match
        with (
            mock.patch.object(pretend, "watchers", [*pretend.watchers, count]),
            mock.patch.object(local_transport.LocalMesh, "match", match),
            mock.patch.object(local_transport, "deliver_message", lambda *pair: self._posted.append(pair)),
            mock.patch.object(collectives, "add_over_tree", _add_over_tree_of_nccl),
            mock.patch.multiple(
                collectives.MessageBasedTransport,
                run_before=lambda end, operation, work, **more: enqueue(more.get("after"), work),
                run_after=lambda end, after, work, **more: enqueue(after, work),
            ),
        ):
            return super().run([waiting(routine) for routine in routines], mesh)


# -- the models, and raypar's step -------------------------------------------------------------------------------------------


VOCABULARY = 99


@dataclass(frozen=True)
class Model:
    """A small model that people use."""

    make: Callable[[], nn.Module]
    image: bool = False
    biases_after_sums: int = 0
    """Linears whose inputs are cut over shards and that have a bias."""
    samples: int = 2
    """Of a microbatch."""
    size: int = 12
    """Tokens of a sample, or the edge of an image."""
    classes: int = 7
    """Of images."""
    image_field: str = "x"
    vocabulary: int = VOCABULARY


def transformer(name: str, **sizes: int) -> nn.Module:
    """A causal model of transformers."""
    transformers = import_transformers()
    sizes = {"vocab_size": VOCABULARY, **sizes}
    config = getattr(transformers, f"{name}Config")(bos_token_id=1, eos_token_id=2, use_cache=False, **sizes)
    made: nn.Module = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config)
    return made


_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "GPT-2": Model(partial(transformer, "GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=64), biases_after_sums=4),
    "Llama": Model(partial(transformer, "Llama", **_LLAMA)),
    "ResNet": Model(ResNet, image=True),
}
"""Two blocks each, of transformers; four blocks with BatchNorm, written as torchvision's are. GPT-2 has its dropouts."""


OTHERS: dict[str, Model] = {}
"""Beyond those of the table (`real_models`)."""


def model_of(name: str) -> Model:
    """A model of the table, or another one."""
    return MODELS[name] if name in MODELS else OTHERS[name]


def make_model(name: str) -> nn.Module:
    return model_of(name).make()


class Samples:
    """Images with a class each, or tokens that are their own labels."""

    def __init__(self, name: str, size: int = 64) -> None:
        self.model, self.size = model_of(name), max(size, 16 * model_of(name).samples)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator, model = torch.Generator().manual_seed(index), self.model
        if model.image:
            image = torch.randn(3, model.size, model.size, generator=generator)
            return {model.image_field: image, "y": torch.randint(0, model.classes, (), generator=generator)}
        tokens = torch.randint(3, model.vocabulary, (model.size,), generator=generator)
        return {"input_ids": tokens, "y": tokens}


def mean_loss(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of the logits."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


FLOAT32 = PrecisionConfig()


@dataclass(frozen=True)
class Plan:
    """A column of the table."""

    stages: int = 1
    replicas: int = 1
    shards: int = 1
    recompute: bool = False
    """Of all layers, where a backward pass does not follow its forward pass at once."""
    schedule: str = "1f1b"
    precision: PrecisionConfig = FLOAT32

    @property
    def workers(self) -> int:
        return self.stages * self.replicas * self.shards


PLANS = {
    "1 worker": Plan(),
    "2 stages": Plan(stages=2),
    "2 replicas": Plan(replicas=2),
    "2 shards": Plan(shards=2),
    "4 shards": Plan(shards=4),
    "2 x 2 x 2": Plan(2, 2, 2),
    "recompute": Plan(recompute=True, schedule="gpipe"),
    "bf16": Plan(precision=PrecisionConfig(compute="bf16")),
    "bf16 parameters": Plan(precision=PrecisionConfig(parameters="bf16", master="float32")),
    "bf16 gradients": Plan(precision=PrecisionConfig(parameters="bf16", master="float32", gradients="bf16")),
}
FOREACH = {"lr": 1e-3, "foreach": True}
"""Of AdamW, for both: the form that PyTorch takes by itself on a GPU, where it knows the tensors' type."""
CLIP_NORM = 0.5


@functools.cache
def job(model: str, microbatches: int, precision: PrecisionConfig = FLOAT32) -> Job:
    """AdamW with clipping; two samples in each microbatch."""
    return Job(
        name="budget",
        seed=11,
        steps=WARM + 1,
        batch_size=model_of(model).samples * microbatches,
        microbatches=microbatches,
        model=ModelConfig(function=make_model, args={"name": model}),
        loss=LossConfig(function=mean_loss),
        data=DataConfig(function=Samples, args={"name": model}, target="y"),
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args=FOREACH),
        clip_norm=CLIP_NORM,
        precision=precision,
    )


@functools.cache
def graph(model: str) -> Graph:
    """The captured model."""
    return make_layer_graph(job(model, FEWER))


def mesh(model: str, plan: Plan) -> ParallelPlan:
    """The plan of a model."""
    layers = len(graph(model).layers)
    again = tuple(range(layers)) if plan.recompute else ()
    return ParallelPlan.mesh(dp=plan.replicas, pp=plan.stages, tp=plan.shards, layers=layers, recompute=again)


def ours(model: str, plan: Plan, microbatches: int) -> Counts:
    """A step of all of raypar's workers."""
    spec, layers = job(model, microbatches, plan.precision), graph(model)
    with OneProcessRun(spec, mesh(model, plan), plan.schedule, graph=layers, device=pretend.device()) as run:
        for step in range(WARM):
            run.step(step)
        run.scheduler = late = LateScheduler()
        with counting() as found:
            run.step(WARM)
    found.waits, found.messages = late.waits, late.messages
    return found


# -- the plain loop ----------------------------------------------------------------------------------------------------------


def plain_step(model: str, plan: Plan, microbatches: int, device: torch.device) -> Callable[[], None]:
    """A step of one process that trains the whole model by itself, to be called again and again."""
    spec = job(model, microbatches, plan.precision)
    network = spec.model.call().to(device).train()
    masters = Masters(network, plan.precision) if plan.precision.parameters is not None else None
    optimizer = torch.optim.AdamW(network.parameters() if masters is None else masters.parameters, **FOREACH)
    data, each = spec.data.call(), model_of(model).samples
    samples = [[data[each * m + i] for i in range(each)] for m in range(microbatches)]
    batches = [{name: torch.stack([one[name] for one in some]) for name in some[0]} for some in samples]
    again = count_recomputations(mesh(model, plan), plan.schedule, spec.batching) if plan.recompute else 0
    return partial(_train, network, masters, optimizer, batches, again, plan.precision, device)


def loop(model: str, plan: Plan, microbatches: int) -> Counts:
    """The same step of a plain loop."""
    step = plain_step(model, plan, microbatches, pretend.device())
    for _ in range(WARM):
        step()
    with counting() as found:
        step()
    return found


class Masters:
    """Float32 parameters of a network that computes in bfloat16, with list operations where PyTorch has them. What norms with
    running statistics have stays float32, and is the optimizer's own."""

    def __init__(self, network: nn.Module, precision: PrecisionConfig) -> None:
        kept = {id(p) for part in network.modules() if isinstance(part, nn.BatchNorm2d) for p in part.parameters()}
        self._in_bf16 = precision.gradients == "bf16"
        self._own = [p for p in network.parameters() if id(p) not in kept]
        self._masters = [nn.Parameter(p.detach().clone()) for p in self._own]
        self._sums = [torch.zeros_like(p) for p in self._masters]
        self.parameters = [*self._masters, *(p for p in network.parameters() if id(p) in kept)]
        for own in self._own:
            own.data = own.data.bfloat16()

    def take_gradients(self, microbatch: int, microbatches: int) -> None:
        """After a microbatch: its gradients are added in float32, or those of all are taken at the end, added in bfloat16."""
        if self._in_bf16 and microbatch + 1 < microbatches:
            return
        gradients = [own.grad for own in self._own]
        (torch._foreach_copy_ if self._in_bf16 or not microbatch else torch._foreach_add_)(self._sums, gradients)
        for own, master, total in zip(self._own, self._masters, self._sums, strict=True):
            own.grad, master.grad = None, total

    @torch.no_grad()
    def round(self) -> None:
        """After a step."""
        torch._foreach_copy_(self._own, self._masters)


def _train(
    network: nn.Module,
    masters: Masters | None,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[dict[str, Tensor]],
    again: int,
    precision: PrecisionConfig,
    device: torch.device,
) -> None:
    """One step: gradients of the mean loss over all microbatches. `again`: how many of them compute their layers again."""
    optimizer.zero_grad()
    for number, batch in enumerate(batches):
        fields = _copied(batch, device)
        target = fields.pop("y")
        if masters is not None:
            fields = {name: field.bfloat16() if field.is_floating_point() else field for name, field in fields.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=precision.compute is not None):
            output = _called(network, fields, again=number < again)
            loss = _loss(output if masters is None else _in_float32(output), target, len(batches))
        with torch.autograd.set_multithreading_enabled(False):  # a checkpoint inside it calls the device, which is Python
            loss.backward()
        if masters is not None:
            masters.take_gradients(number, len(batches))
    nn.utils.clip_grad_norm_(network.parameters() if masters is None else masters.parameters, CLIP_NORM, foreach=True)
    optimizer.step()
    if masters is not None:
        masters.round()


def _copied(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


def _called(network: nn.Module, fields: dict[str, Tensor], *, again: bool) -> Any:
    if not again:
        return network(**fields)
    return torch.utils.checkpoint.checkpoint(network, use_reentrant=False, **fields)


def _in_float32(output: Any) -> Tensor:
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits.float()


def _loss(output: Any, target: Tensor, microbatches: int) -> Tensor:
    return mean_loss(output, target) / microbatches


OF_LOOP |= {_copied.__name__: COPIES, _called.__name__: LAYERS, _loss.__name__: LOSS, _in_float32.__name__: LOSS}
OF_LOOP |= {Masters.take_gradients.__name__: ADDITIONS, Masters.round.__name__: OPTIMIZER}


class _VocabularyByHand(torch.autograd.Function):
    """Cross-entropy of logits [tokens, 1/n of the vocabulary], without its three sums over shards (Megatron-LM's form)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits - logits.max(dim=-1).values.unsqueeze(-1)
        absent = (target < 0) | (target >= logits.shape[-1])
        place = (target - 0).masked_fill_(absent, 0)
        rows = torch.arange(len(place), device=logits.device)
        chosen = logits[rows, place].masked_fill_(absent, 0.0)
        powers = logits.exp()
        total = powers.sum(dim=-1)
        ctx.save_for_backward(powers.div_(total.unsqueeze(-1)), absent, place, rows)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found, absent, place, rows = ctx.saved_tensors
        found[rows, place] -= 1.0 - absent.float()
        return found.mul_(gradients[0] / len(rows)), None


def more_by_hand() -> int:
    """Operations of a microbatch that a shard's embedding and cross-entropy have by hand, beyond those of the whole layers."""

    def ran(embedded: Callable[[Tensor, Tensor], Tensor], loss: Callable[[Tensor, Tensor], Tensor]) -> int:
        table = torch.ones(5, 4).to(pretend.device()).requires_grad_()
        tokens = torch.arange(3).to(pretend.device())
        with counting() as found, torch.autograd.set_multithreading_enabled(False):
            loss(embedded(table, tokens), tokens).backward()
        return found.operations.total()

    def embedded(table: Tensor, tokens: Tensor) -> Tensor:
        absent = (tokens < 0) | (tokens >= len(table))
        found = F.embedding((tokens - 0).masked_fill_(absent, 0), table)
        return found.masked_fill(absent.unsqueeze(-1), 0.0)

    return ran(embedded, _VocabularyByHand.apply) - ran(lambda table, tokens: F.embedding(tokens, table), F.cross_entropy)


def beside(model: str, found: Counts, plan: Plan, microbatches: int) -> Counter[str]:
    """What plain loops over the same layers ask for, all workers of the plan together, given one loop of the whole model.

    A stage's loop has its own layers, and its own clipping and optimizer; a replica's its own microbatches and the same. A
    shard's has all layers, of 1/n of the size: the same operations, and what a cut vocabulary needs, and a bias that is added
    after a sum over shards.
    """
    each = Counter({cause: count * plan.shards for cause, count in found.operations.items()})
    for cause in (NORM, OPTIMIZER):
        each[cause] = found.operations[cause] * plan.workers
    if plan.shards > 1 and not MODELS[model].image:
        each[BY_HAND] = (more_by_hand() + MODELS[model].biases_after_sums) * plan.shards * microbatches
    return each


@dataclass(frozen=True)
class Row:
    """One line of the table: a model under a plan, and loops beside it."""

    model: str
    plan: str
    found: Counts
    """raypar's, at the larger number of microbatches."""
    loop: Counter[str]
    """Cause -> operations of the loops."""
    loop_reads: int
    """Reads of the host in the whole model's loop, all of which the model's own code makes."""
    reads_each: float
    """Reads that one more microbatch adds, beyond those of the loop."""
    waits_each: float
    """Waits that one more microbatch adds."""

    @property
    def wanted(self) -> int:
        """The most operations that there should be."""
        return int(WANTED * self.loop.total()) + self.found.messages

    @property
    def beyond(self) -> tuple[int, int, int, float, float]:
        """Beyond the loops and a copy for each message: operations; reads and waits in the step; for each microbatch."""
        operations, reads, waits = self.found.totals
        more = operations - self.found.messages - self.loop.total()
        return more, reads - self.loop_reads, waits, self.reads_each, self.waits_each

    @property
    def holds(self) -> bool:
        """Whether it is as it should be. The model's own reads in the loop may be fewer here: of batches the host reads its own
        copy."""
        _, reads, waits, *each = self.beyond
        once = max(reads, waits) <= PLANS[self.plan].workers  # a vote is both: a worker reads its own, then waits for others'
        return self.found.operations.total() <= self.wanted and max(each) <= 0 and once

    @property
    def surplus(self) -> dict[str, int]:
        """Cause -> operations beyond those of the loops, most first; fewer are negative."""
        causes = {*self.found.operations, *self.loop}
        found = {cause: self.found.operations[cause] - self.loop[cause] for cause in causes}
        return {cause: more for cause, more in sorted(found.items(), key=lambda one: -one[1]) if more}


def measure(state: State, model: str, name: str) -> Row:
    """One line, measured in this process, which should run nothing else: `state` is not used."""
    pretend.device()
    torch.backends.cuda.enable_flash_sdp(False)  # of the CPU too: the device has no attention in one piece
    torch.set_num_threads(1)
    plan = PLANS[name]
    few, many = ours(model, plan, FEWER), ours(model, plan, MORE)
    few_loop, many_loop = loop(model, plan, FEWER), loop(model, plan, MORE)
    more = MORE - FEWER
    of_loop = (many_loop.reads.total() - few_loop.reads.total()) / more
    return Row(
        model,
        name,
        many,
        beside(model, many_loop, plan, MORE),
        many_loop.reads.total(),
        (many.reads.total() - few.reads.total()) / more - of_loop,
        (many.waits.total() - few.waits.total()) / more,
    )
