"""One replica of one stage: its layers, run forward and backward a microbatch at a time by the numerics contract."""

from __future__ import annotations

import contextlib
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU, as_aligned
from raypar.errors import RayparError, UserCodeError
from raypar.model.build import canonical_names
from raypar.model.graph import Graph, Layer
from raypar.model.materialise import materialise
from raypar.model.split_linear import Stash, split_linears
from raypar.model.tensor_parallel.build import materialise_shard, sharded_loss
from raypar.model.tensor_parallel.gradient_reuse import GradientBuffers
from raypar.model.tensor_parallel.linear import ShardedLinear, split_sharded_linears
from raypar.plan import ParallelPlan, Routing
from raypar.plan.seeds import seed_of
from raypar.user_code import USER_CODE_ERRORS, error_text, reraise_ctrl_c
from raypar.worker.compute_state import StateGuard
from raypar.worker.data import WHERE_FIELDS_ARE_NAMED
from raypar.worker.gpu_process import make_seeder
from raypar.worker.gradient_accumulator import GradientAccumulator, Ready
from raypar.worker.job_spec import JobSpec
from raypar.worker.stage_shard import StageShard

Batch = Mapping[str, Tensor]


_WRITTEN_IN_PLACE = (
    "is a view and is being modified inplace",
    "a leaf Variable that requires grad is being used in an in-place operation",
    "a view of a leaf Variable that requires grad is being used in an in-place operation",
)
"""What PyTorch says when a layer writes into an alias or a received value."""


def _contiguous(gradient: Tensor | None) -> Tensor | None:
    """A hook: the gradient, contiguous and aligned, as one from another stage is."""
    return None if gradient is None else as_aligned(gradient)


Hook = Callable[[Tensor | None], Tensor | None]


def _alias(x: Tensor, hooks: OrderedDict[int, Hook]) -> Tensor:
    """A layer's own alias of a value, contiguous and aligned; the gradient that comes back for it will be so too (rule 4).

    A view and a hook, because an autograd function of our own costs ten times as much in a forward pass. The hook is looked up
    in `hooks` when a gradient comes. What follows is what `Tensor.register_hook` does, less the handle to remove the hook: its
    Python is a third of a percent of a small GPT's step.
    """
    lying = as_aligned(x)
    alias = x.view_as(x) if lying is x else lying
    alias._backward_hooks = hooks
    alias.grad_fn._register_hook_dict(alias)  # type: ignore[union-attr]
    return alias


_KEEP_CONTIGUOUS: OrderedDict[int, Hook] = OrderedDict({0: _contiguous})


def gradient_counts(graph: Graph, plan: ParallelPlan, value: str, consumer_stage: int) -> int:
    """How many gradients of `value` come back from a consuming stage: one a layer, or one in all from the last consumer.

    Folding goes from the last consumer to the first, so only the stage that holds the last one may fold its own.
    """
    consumers = graph.consumers(value)
    stage = plan.stages[consumer_stage]
    here = [c for c in consumers if stage.first <= c < stage.last]
    return 1 if consumers[-1] in here else len(here)


def distinct(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A tensor that a layer returns under two names is two values, each with gradients of its own to fold (rule 4)."""
    seen: set[int] = set()
    found = []
    for output in outputs:
        again = id(output) in seen and output.requires_grad
        seen.add(id(output))
        found.append(_alias(output, _KEEP_CONTIGUOUS) if again else output)
    return tuple(found)


@contextlib.contextmanager
def inputs_unwritten(layer: Layer, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Refuses a layer that writes into what it reads: another consumer would see that in its own stage, but not in another.

    Raises `UserCodeError`, also in place of PyTorch's error about the aliases that layers read through.
    """
    before = [tensor._version for tensor in inputs]
    try:
        yield
    except RuntimeError as error:
        _refuse_writing(layer, inputs, before, error)
        raise
    if [tensor._version for tensor in inputs] != before:
        _refuse_writing(layer, inputs, before)


def _refuse_writing(layer: Layer, inputs: Sequence[Tensor], before: Sequence[int], error: Exception | None = None) -> None:
    """`error`: what the layer raised; returns if that had other reasons."""
    if error is not None and not any(words in str(error) for words in _WRITTEN_IN_PLACE):
        return
    written = [name for name, t, version in zip(layer.inputs, inputs, before, strict=True) if t._version != version]
    raise UserCodeError(
        f"layer {layer.name!r} writes into its input {' or '.join(map(repr, written or layer.inputs))} in place, "
        "which other layers may read too" + (f" ({error})" if error is not None else ""),
        cure="use the operation that returns a new tensor (inplace=False, relu instead of relu_), or clone the input first",
    ) from error


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer as the stage was given it: part of its state, which forward may not change."""

    path: str
    owner: nn.Module
    key: str
    tensor: Tensor
    persistent: bool
    """Whether PyTorch's state_dict has it. Of one that it has not (a cache) forward may put another tensor in its place."""


def _buffers_of(module: nn.Module) -> tuple[_Buffer, ...]:
    """Every buffer of a layer once, under its first path."""
    return tuple(
        _Buffer(path, owner, key, tensor, key not in owner._non_persistent_buffers_set)
        for path, tensor in module.named_buffers()
        for owner, key in [(module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2])]
    )


def fold_gradients(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """((g3 + g2) + g1), the undefined ones skipped; `gradients` from the last consumer to the first."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


@dataclass(frozen=True)
class _Call:
    """How one layer is run: worked out once, because a step's Python is slow where caches are cold."""

    layer: Layer
    module: nn.Module
    reads: tuple[tuple[str, str], ...]
    """(value, where from: "here", "elsewhere" or "batch"), each value once"""
    order: tuple[int, ...] | None
    """places of the module's arguments in `reads`; None: as they are"""
    buffers: tuple[_Buffer, ...]
    passed: Hook
    hooks: OrderedDict[int, Hook]
    """Of the aliases of what it reads: `passed` in a backward pass that settles gradients, else `arrived`."""
    arrived: Hook
    caller: str
    """What messages call the layer."""


@dataclass
class _Live:
    """What one microbatch keeps between forward and backward."""

    received: dict[str, list[Tensor]] = field(default_factory=dict)
    """value -> one leaf per consuming layer, in layer order"""
    produced: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    stash: Stash = field(default_factory=list)


class Stage:
    """Layers [first, last) of the graph on one replica.

    `uses`: (qualified name, shape, dtype) of every trainable use of a parameter, in layer order. `parameters`: canonical
    name -> parameter, frozen ones too. `buffers`: qualified name -> buffer as it was given, whatever forward has put in its
    place since. `losses[microbatch]` = (sum, count) where this stage holds the last layer.
    `values`: tensors of all parameters (canonical names) and buffers, which the stage makes its own; by default the initial
    ones.
    `shard`: of which shard this is all meant, where the stage has several; `device`: where it computes; values given lie there.
    `guard`: restores process state that layers and the loss leave changed.
    """

    def __init__(
        self,
        graph: Graph,
        plan: ParallelPlan,
        index: int,
        *,
        spec: JobSpec,
        routing: Routing,
        replica: int,
        loss_fn: Callable[..., Any],
        split: bool = False,
        values: Mapping[str, Tensor] | None = None,
        shard: StageShard | None = None,
        device: torch.device = CPU,
        guard: StateGuard | None = None,
    ) -> None:
        self.guard = guard if guard is not None else StateGuard(spec.threads)
        here = plan.stages[index]
        self.shard = shard
        self.graph, self.index, self.spec = graph, index, spec
        self.layers: tuple[Layer, ...] = graph.layers[here.first : here.last]
        self.first = here.first
        self.computes_loss = here.last == len(graph.layers)
        self._loss_fn = loss_fn if shard is None else sharded_loss(loss_fn, shard.group)
        self._target = spec.data.target or "y"
        self._coordinate = f"stage {index}, replica {replica}" + (f", shard {shard.group.shard}" if shard is not None else "")
        self.before_run = False
        """Its layers are timed: the plan is not the job's, and there is no step yet."""
        self.step = -1
        self.losses: dict[int, tuple[Tensor | float, Tensor | float]] = {}
        self._live: dict[int, _Live] = {}
        self._stash: Stash = []

        dtype = getattr(torch, spec.dtype)
        build = materialise
        if shard is not None:
            build = partial(materialise_shard, layout=shard.layout, group=shard.group)
        self.modules = build(graph, here.first, here.last, seed=spec.seed, dtype=dtype, values=values)
        if device != CPU:
            for module in self.modules.values():
                module.to(device)  # made on the CPU, so that the bits of a new run are those of its seed everywhere
        self._seed = make_seeder(device)
        self._on_cpu = device == CPU
        self._in_backward = False
        """Whether the backward pass of a microbatch is under way."""
        self._loss_hooks: OrderedDict[int, Hook] = OrderedDict({0: partial(self._arrived, "the backward pass of the loss")})
        self._modes = [(part, part.training) for module in self.modules.values() for part in module.modules()]
        """What a constructor has put into evaluation mode stays in it."""
        self._training = True
        canonical = canonical_names(graph)
        self.parameters: dict[str, nn.Parameter] = {}
        self.uses: list[tuple[str, torch.Size, torch.dtype]] = []
        leaves: list[nn.Parameter] = []
        for layer in self.layers:
            for path, parameter in self.modules[layer.name].named_parameters():
                name = f"{layer.name}.{path}"
                home = self.parameters.setdefault(canonical.get(name, name), parameter)
                if home is not parameter:
                    parameter.data = home.data  # one storage, a leaf and a gradient for every layer that uses it
                if parameter.requires_grad:
                    self.uses.append((name, parameter.shape, parameter.dtype))
                    leaves.append(parameter)
        self._use_of = {id(leaf): use for use, leaf in enumerate(leaves)}
        put_off: set[int] = set()
        if split:
            for layer in self.layers:
                for find in (split_linears, split_sharded_linears) if shard is not None else (split_linears,):
                    for linear in find(self.modules[layer.name], lambda: self._stash):
                        put_off |= {id(p) for p in linear.parameters(recurse=False)}
        self._splits = bool(put_off)
        parts = (part for module in self.modules.values() for part in module.modules())
        self._places = GradientBuffers([part for part in parts if isinstance(part, ShardedLinear)])
        self._complete_at: list[list[int]] = [[] for _ in self.layers]
        """By layer, last first: uses whose gradient autograd itself completes (it is not put off) in a whole backward."""
        place = {layer.name: i for i, layer in enumerate(self.layers)}
        for use in reversed(range(len(leaves))):
            if id(leaves[use]) not in put_off:
                self._complete_at[place[graph.layer_of(self.uses[use][0])]].append(use)
        self._calls = [self._call(position) for position in range(len(self.layers))]
        named = [(f"{call.layer.name}.{b.path}", b) for call in self._calls for b in call.buffers]
        self.buffers: dict[str, Tensor] = {name: buffer.tensor for name, buffer in named}
        self.persistent = frozenset(name for name, buffer in named if buffer.persistent)
        """Names of the buffers that exports have."""
        self._closing: int | None = None
        self._not_passed = len(self.layers)

        self._routing = routing
        run = routing.run(index, replica)
        sizes = {block: len(routing.microbatches.of_block(block)) for block in run}
        names = [name for name, _, _ in self.uses]
        self.gradients = GradientAccumulator(leaves, names, run, routing.microbatches.blocks, sizes)

        consumed_here = {v: [i for i in graph.consumers(v) if here.first <= i < here.last] for v in graph.values}
        written = {v for layer in self.layers for v in layer.outputs}
        fields = set(graph.batch_fields)
        self._gradient_counts = {
            v: gradient_counts(graph, plan, v, index)
            for v, consumers in consumed_here.items()
            if consumers and v not in written and v not in fields
        }
        self._outgoing = [v for v in graph.values if v in written and any(c >= here.last for c in graph.consumers(v))]
        read = [v for layer in self.layers for v in layer.inputs if v in fields]
        self.batch_fields = tuple(dict.fromkeys([*read, *([self._target] if self.computes_loss else [])]))

    @property
    def on_ready(self) -> Ready | None:
        """Called once per use and step, for some at a time, when their subtree sums are final; from inside the last backward
        where possible."""
        return self.gradients.on_ready

    @on_ready.setter
    def on_ready(self, call: Ready | None) -> None:
        self.gradients.on_ready = call

    @property
    def waited_ns(self) -> int:
        """How long layers have waited for other shards in this step."""
        return 0 if self.shard is None else self.shard.group.waited_ns

    def partial_uses(self) -> tuple[int, ...]:
        """Uses of parameters that are whole on every shard but have met parts of values: their gradients are parts of a sum."""
        if self.shard is None:
            return ()
        return tuple(self._use_of[leaf] for leaf in self.shard.group.partial if leaf in self._use_of)

    def release(self) -> None:
        """Nothing of this is used any more: breaks the circles in which its modules, their forwards and their hooks hold each
        other."""
        for module in self.modules.values():
            for part in module.modules():
                vars(part).pop("forward", None)
                vars(part).pop("stash", None)
        vars(self).clear()

    def begin_step(self, step: int) -> None:
        """Forget the last step. Gradients of parameters (`.grad`) are no longer valid."""
        self.step = step
        self.losses.clear()
        self._live.clear()
        if self.shard is not None:
            self.shard.group.waited_ns = 0
        self._places.begin_step()
        self.gradients.begin()
        self._train(True)

    def _train(self, mode: bool) -> None:
        if mode != self._training:
            self._training = mode
            for part, made in self._modes:
                part.training = mode and made

    def _call(self, position: int) -> _Call:
        layer = self.layers[position]
        module = self.modules[layer.name]
        written = {value for before in self.layers[:position] for value in before.outputs}
        fields = set(self.graph.batch_fields)
        names = tuple(dict.fromkeys(layer.inputs))
        arrived = partial(self._arrived, f"the backward pass of layer {layer.name!r}")
        return _Call(
            layer=layer,
            module=module,
            reads=tuple((name, "here" if name in written else "batch" if name in fields else "elsewhere") for name in names),
            order=tuple(names.index(name) for name in layer.inputs) if names != layer.inputs else None,
            buffers=_buffers_of(module),
            passed=partial(self._passed, position),
            hooks=OrderedDict({0: arrived}),
            arrived=arrived,
            caller=f"layer {layer.name!r}",
        )

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """`received`: values from other stages; `batch`: fields of this microbatch. Returns the values other stages use."""
        self._places.forward()
        live = self._live[microbatch] = _Live()
        self._stash = live.stash
        values: dict[str, Tensor] = {**received, **batch}
        seed, step = self.spec.seed, self.step
        # All at once: between the layers this code would have to be fetched from memory again each time.
        seeds = [seed_of(seed, "forward", step, microbatch, call.layer.name) for call in self._calls]
        for call, own_seed in zip(self._calls, seeds, strict=True):
            inputs: list[Tensor] = []
            for name, source in call.reads:
                value = values[name] if name in values else self._field(values, name, call.layer)
                if source == "here":
                    if value.requires_grad:
                        value = _alias(value, call.hooks)
                    else:
                        value = as_aligned(value)
                elif source == "elsewhere" and (value.is_floating_point() or value.is_complex()):
                    value = value.detach().requires_grad_()
                    live.received.setdefault(name, []).append(value)
                    value = value.view_as(value)  # as `_alias`: of a leaf autocast would keep one cast for several readers
                inputs.append(value)
            self._seed(own_seed)
            outputs = self._run(call, microbatch, inputs if call.order is None else [inputs[place] for place in call.order])
            if len(outputs) == 1:
                values[call.layer.outputs[0]] = outputs[0]
            else:
                values.update(zip(call.layer.outputs, distinct(outputs), strict=True))
        live.produced = {name: values[name] for name in self._outgoing}
        if self.computes_loss:
            total, count = self._loss(values[self.graph.output], values, microbatch)
            self.losses[microbatch] = (total.detach(), count)
            live.loss = total
        return {name: as_aligned(value.detach()) for name, value in live.produced.items()}

    def evaluate(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """As `forward`, in evaluation mode, keeping nothing but the losses."""
        self._train(False)
        with torch.no_grad():
            values = {**batch, **received}
            for call in self._calls:
                layer = call.layer
                self._seed(seed_of(self.spec.seed, "validation", microbatch, layer.name))
                inputs = [as_aligned(self._field(values, name, layer)) for name in layer.inputs]
                values.update(zip(layer.outputs, self._run(call, microbatch, inputs), strict=True))
            if self.computes_loss:
                self.losses[microbatch] = self._loss(values[self.graph.output], values, microbatch)
        return {name: as_aligned(values[name]) for name in self._outgoing}

    def _field(self, values: Mapping[str, Tensor], name: str, layer: Layer | None) -> Tensor:
        if name not in values:
            reader = f"layer {layer.name!r}" if layer is not None else "the loss"
            raise UserCodeError(
                f"{reader} reads {name!r}, which no layer writes and the batch does not have (it has {sorted(values)})",
                cure=WHERE_FIELDS_ARE_NAMED,
            )
        return values[name]

    def _run(self, call: _Call, microbatch: int, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        layer = call.layer
        versions = [buffer.tensor._version for buffer in call.buffers]
        before = [tensor._version for tensor in inputs]
        try:
            result = call.module(*inputs)
        except USER_CODE_ERRORS as error:
            if isinstance(error, RuntimeError):
                _refuse_writing(layer, inputs, before, error)
            shapes = ", ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in zip(layer.inputs, inputs, strict=True))
            raise self._user_error(f"layer {layer.name!r} (inputs: {shapes})", microbatch, error) from error
        left = self.guard.check(call.caller, evaluating=not self._training)
        if [tensor._version for tensor in inputs] != before:
            _refuse_writing(layer, inputs, before)
        for buffer, version in zip(call.buffers, versions, strict=True):
            if buffer.persistent and buffer.owner._buffers.get(buffer.key) is not buffer.tensor:
                raise UserCodeError(
                    f"layer {layer.name!r} replaces its buffer {buffer.path!r} in forward: replicas would no longer be equal",
                    cure="compute it from the inputs, or register a buffer that is only a cache with persistent=False",
                )
            if buffer.tensor._version != version:
                raise UserCodeError(
                    f"layer {layer.name!r} writes into its buffer {buffer.path!r} in forward: "
                    "replicas would no longer be equal",
                    cure="compute it from the inputs; a buffer that is only a cache: register it with persistent=False, and "
                    "assign a new tensor to it instead of writing into the old one",
                )
        outputs = result if isinstance(result, tuple) else (result,)
        if len(outputs) != len(layer.outputs) or not all(isinstance(o, Tensor) for o in outputs):
            got = ", ".join(type(o).__name__ for o in outputs)
            raise UserCodeError(
                f"layer {layer.name!r} returned ({got}) where {len(layer.outputs)} tensor(s) {layer.outputs} were declared",
                cure="return one tensor per name in the layer's outputs",
            )
        if "grad" in left and self._training:
            self._refuse_lost_graph(call, microbatch, inputs, outputs)
        return outputs

    def _refuse_lost_graph(self, call: _Call, microbatch: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Raises `UserCodeError` if a layer that left gradients switched off has returned a tensor without a graph.

        Grad mode is restored after the layer only, which is too late for what the layer itself has computed.
        """
        trained = any(p.requires_grad for p in (*inputs, *call.module.parameters()))
        if trained and not all(out.requires_grad for out in outputs if out.is_floating_point() or out.is_complex()):
            raise UserCodeError(
                f"{call.caller} left torch.set_grad_enabled(False) behind and returned a tensor without a gradient, "
                f"{self._place(microbatch)}: it and what comes before it would not be trained",
                cure="use it as a context manager: `with torch.no_grad():` around what needs no gradient",
            )

    def _loss(self, output: Tensor, values: Mapping[str, Tensor], microbatch: int) -> tuple[Tensor, Tensor | float]:
        target = self._field(values, self._target, None)
        try:
            if output.requires_grad:
                output = _alias(output, self._loss_hooks)
            found = self._loss_fn(output, target)
        except USER_CODE_ERRORS as error:
            raise self._user_error(
                f"the loss (output {list(output.shape)}, target {list(target.shape)})", microbatch, error
            ) from error
        self.guard.check("the loss", evaluating=not self._training)
        total, count = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(total, Tensor) or total.numel() != 1 or total.dim():
            shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise UserCodeError(
                f"the loss returned {shape}, not a scalar tensor",
                cure="return a 0-dim tensor (mean over samples), or (sum, count) for token-weighted losses",
            )
        if output.requires_grad and not total.requires_grad:
            raise UserCodeError(
                "the loss has no gradient although the model's output has one: nothing would be trained",
                cure="compute it from the output by differentiable operations (no detach(), no .item(), no torch.no_grad())",
            )
        if count is None:
            samples = float(target.shape[0])
            return total * samples, samples
        return total, count

    def _user_error(self, where: str, microbatch: int, error: BaseException) -> RayparError:
        reraise_ctrl_c(error)
        if isinstance(error, RayparError):
            return error
        return UserCodeError(
            f"{where} raised {error_text(error)}\n  {self._place(microbatch)}\n{traceback.format_exc()}",
            cure="this is an error of the user's code; `raypar debug JOB` runs the same plan in one process under pdb",
        )

    def _place(self, microbatch: int) -> str:
        """Where this stage is now, for messages: `at stage 1, replica 0, step 3, microbatch 2`."""
        if self.before_run:
            return f"in layer {self.layers[0].name!r}, with the first microbatch, before the run"
        return f"at {self._coordinate}, step {self.step + 1}, microbatch {microbatch}"

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(
        self, microbatch: int, gradients: Mapping[str, Sequence[Tensor | None]]
    ) -> dict[str, tuple[Tensor | None, ...]]:
        """The whole backward. `gradients[v]`: from outside consumers, last first. Returns them for each received value,
        one per consuming layer here, last first (folded into one where this stage holds the last consumer)."""
        return self._backward(microbatch, gradients, work=2)

    def backward_input(
        self, microbatch: int, gradients: Mapping[str, Sequence[Tensor | None]]
    ) -> dict[str, tuple[Tensor | None, ...]]:
        """As `backward`, but what Linears need for their weights is kept for `backward_weight`."""
        return self._backward(microbatch, gradients, work=1)

    def _backward(
        self, microbatch: int, gradients: Mapping[str, Sequence[Tensor | None]], *, work: int
    ) -> dict[str, tuple[Tensor | None, ...]]:
        self._places.backward()
        live = self._live[microbatch]
        self._stash = live.stash  # a layer that checkpoints runs its forward again in here
        block = self._routing.microbatches.block(microbatch)
        self.gradients.enter(block, join=work == 2 and not self._splits)
        roots: list[Tensor] = []
        starts: list[Tensor | None] = []
        for name, value in live.produced.items():
            gradient = fold_gradients(gradients.get(name, ()))
            if gradient is not None and value.requires_grad:
                roots.append(value)
                starts.append(gradient)
        if live.loss is not None and live.loss.requires_grad:
            roots.append(live.loss)
            starts.append(None)
        if work == 2 and self.gradients.settles(block):
            self._watch(block)
        try:
            if roots:
                self._in_backward = True
                torch.autograd.backward(roots, starts)
        except RayparError:
            raise
        except USER_CODE_ERRORS as error:
            raise self._user_error("the backward pass", microbatch, error) from error
        finally:
            self._in_backward = False
            if self._closing is not None:
                self._watch(None)
            if self.shard is not None:
                self.shard.group.shared = None  # a layer that checkpoints has run its forward again in here
        self.guard.check("the backward pass")
        if work == 2 and live.stash:
            self._weights(microbatch, block)
        returned: dict[str, tuple[Tensor | None, ...]] = {}
        for name, leaves in live.received.items():
            found = [None if leaf.grad is None else as_aligned(leaf.grad) for leaf in reversed(leaves)]
            returned[name] = (fold_gradients(found),) if self._gradient_counts[name] == 1 else tuple(found)
        for name, count in self._gradient_counts.items():
            returned.setdefault(name, (None,) * count)
        live.received.clear()
        live.produced.clear()
        live.loss = None
        self.gradients.finished(block, work)
        return returned

    def _watch(self, block: int | None) -> None:
        """Whether aliases tell `_passed` of the backward pass: of one that closes a block."""
        self._closing = block
        self._not_passed = len(self.layers)
        for call in self._calls:
            call.hooks[0] = call.arrived if block is None else call.passed

    def _passed(self, position: int, gradient: Tensor | None) -> Tensor | None:
        """The hook of aliases: the backward pass has left the layers from `position` on.

        Of what is ready autograd runs the newest first, and a node's users are newer than it, so all that was made after the
        alias is over by now, and with it the gradients of these layers' parameters: they are taken while the cache has them.
        """
        if self._closing is not None and position < self._not_passed:
            uses = [use for uses in self._complete_at[position : self._not_passed][::-1] for use in uses]
            self._not_passed = position
            with torch.no_grad():
                self.gradients.settle(self._closing, uses)
        return self._calls[position].arrived(gradient)

    def _arrived(self, caller: str, gradient: Tensor | None) -> Tensor | None:
        """A hook, called when `caller`, the backward pass of a layer or the loss, has computed a gradient: returns it aligned.

        Restores process state that `caller` left changed, before the next layer's backward pass runs. Not outside of our own
        backward pass: a layer that takes a gradient in forward is inside contexts of its own. Not on a GPU: there hooks run in
        autograd's own threads, whose state is another; `backward` checks once at its end.
        """
        if self._in_backward and self._on_cpu and not torch.is_grad_enabled():
            self.guard.check(caller, evaluating=True)
        return _contiguous(gradient)

    def backward_weight(self, microbatch: int) -> None:
        """The weight gradients that `backward_input` put off."""
        block = self._routing.microbatches.block(microbatch)
        self._weights(microbatch, block)
        self.gradients.finished(block, 1)

    def _weights(self, microbatch: int, block: int) -> None:
        live = self._live[microbatch]
        by_cast: dict[tuple[int, object], Tensor] = {}
        sums: dict[int, Tensor] = {}
        with torch.no_grad():
            for deferred in live.stash:
                pairs = [(deferred.linear.weight, deferred.weight)]
                if deferred.linear.bias is not None:
                    pairs.append((deferred.linear.bias, deferred.bias))
                for parameter, compute in pairs:
                    use = self._use_of[id(parameter)], deferred.cast
                    by_cast[use] = by_cast[use] + compute() if use in by_cast else compute()
            for (use, _), total in by_cast.items():
                total = total.to(self.uses[use][2])  # under torch.autocast gradients are of another dtype
                sums[use] = sums[use] + total if use in sums else total
        live.stash.clear()
        self.gradients.add_deferred(block, sums)

    def free(self, microbatch: int) -> None:
        """The microbatch's activations have had their last use."""
        self._live.pop(microbatch, None)
