"""One plain process that trains the user's own module by the numerics contract: its forward as it is, under plain autograd.

Norms with running statistics simply run. Of the captured graph only the names are used: which modules are units, in which order
layers come.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy
import torch
from helpers.reference import OtherBuffers, Result, computing_in, samples, seed_of, sum_of_squares, tree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from raypar.job import Job
from raypar.model.capture.captured_layer import cache_of
from raypar.model.graph import Graph

Use = tuple[str, str, int]
"""Parameter, layer, and which use there: 0 for that of the layer's unit, or for all of them."""


class _LayersOf(TorchFunctionMode):
    """Follows a module's forward: as a layer begins, it seeds (rule 3), and gives modules the layer's leaves (rule 6).

    A parameter that several layers use, and one of them several times, has a leaf for each use of code between units there: see
    `count_uses`.
    """

    def __init__(self, model: nn.Module, graph: Graph, spec: Job) -> None:
        super().__init__()
        self.model, self.spec = model, spec
        cache = cache_of(graph.layers[0].build.skeleton)  # type: ignore[attr-defined]
        programs = cache.first_trace.layers
        self.order = [program.name for program in programs if program.unit is not None or program is programs[0]]
        self.places = [(m, k, p) for m in model.modules() for k, p in m._parameters.items() if p is not None]
        self.leaves: dict[Use, nn.Parameter] = {}
        self.name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        """`id` of a parameter, and of each of its leaves -> its name."""
        self.uses: dict[str, list[Use]] = {}
        """Parameter -> its uses, in the order of the forward."""
        self.counting = self.active = False
        self.again: Iterator[str] = iter(())
        """The layers that an activation checkpoint computes again."""
        self.hooks = []
        for name in cache.units:
            unit = model.get_submodule(name)
            before = unit.register_forward_pre_hook(
                lambda module, args, kwargs, name=name: self.enter(name, args, kwargs), prepend=True, with_kwargs=True
            )
            after = unit.register_forward_hook(lambda *args: self.leave(), always_call=True)
            self.hooks += [before, after]

    @contextlib.contextmanager
    def microbatch(self, step: int, microbatch: int) -> Iterator[None]:
        """Context of one forward."""
        self.step, self.number, self.depth = step, microbatch, 0
        self.calls: Counter[str] = Counter()
        self.started: list[str] = []
        self.numbers: Counter[tuple[str, str]] = Counter()
        self.begin(self.order[0])
        apply = torch.autograd.Function.apply.__func__  # no torch function: the mode sees what its forward calls only
        counted = classmethod(lambda cls, *args: self.call(functools.partial(self.as_one_use, apply, cls), args, {}))
        checkpoint = functools.partial(self.checkpoint, torch.utils.checkpoint.checkpoint)
        self.active = True
        with (
            self,
            mock.patch.object(torch.autograd.Function, "apply", counted),
            mock.patch.object(torch.utils.checkpoint, "checkpoint", checkpoint),
        ):
            yield
        self.active = False
        assert self.started in (self.order, []), (self.started, self.order)

    @contextlib.contextmanager
    def count_uses(self) -> Iterator[None]:
        """Context of a forward that counts the uses of all parameters."""
        self.counting = True
        with self.microbatch(0, 0):
            yield
        self.counting = False
        for uses in self.uses.values():
            layers = Counter(layer for _, layer, _ in uses)
            if len(layers) == 1 or len(uses) == len(layers):  # one leaf a layer
                uses[:] = [(name, layer, 0) for name, layer in dict.fromkeys(use[:2] for use in uses)]
            else:
                uses[:] = [(name, layer, number if layers[layer] > 1 else 0) for name, layer, number in uses]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation returns that is called between units with the leaves of its uses."""
        if self.depth or not any(id(value) in self.name_of for value in tree_leaves((args, kwargs))):
            return func(*args, **(kwargs or {}))
        layer, found = self.layer, list[Use]()

        def leaf_of_use(value: Any) -> Any:
            name = self.name_of.get(id(value))
            if name is None:
                return value
            number = 1 + self.numbers[name, layer] + sum(use[0] == name for use in found)
            found.append((name, layer, number))
            if self.counting:
                return value
            # Code may have read the attribute while an earlier layer was under way.
            return self.leaf(found[-1] if found[-1] in self.uses[name] else (name, layer, 0), value)

        args, kwargs = tree_map(leaf_of_use, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if any(isinstance(value, Tensor) for value in tree_leaves(out)):  # not a shape, a dtype
            self.numbers.update(use[:2] for use in found)
            if self.counting:
                for use in reversed(found):  # autograd adds the gradients of one operation's arguments first to last
                    self.uses.setdefault(use[0], []).append(use)
        return out

    def as_one_use(self, func: Any, *args: Any) -> Any:
        """What a function returns whose own operations count as no uses."""
        self.depth += 1
        try:
            return func(*args)
        finally:
            self.depth -= 1

    def checkpoint(self, original: Any, function: Any, *args: Any, **options: Any) -> Any:
        """Activation checkpointing between units: the backward pass calls units again, each after the seeds of its layer."""
        layers: list[str] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                self.again = iter(layers)
                return function(*args, **kwargs)
            before = len(self.started)
            try:
                return function(*args, **kwargs)
            finally:
                layers[:] = self.started[before:]

        return original(run, *args, **options)

    def leaf(self, use: Use, parameter: Tensor) -> nn.Parameter:
        """The leaf of a use."""
        if use not in self.leaves:
            self.leaves[use] = self.as_one_use(lambda p: nn.Parameter(p.data, requires_grad=p.requires_grad), parameter)
            self.name_of[id(self.leaves[use])] = use[0]
        return self.leaves[use]

    def enter(self, unit: str, args: Any, kwargs: Any) -> Any:
        self.depth += 1
        if self.depth > 1:
            return None  # a unit that another one calls is part of that
        if not self.active:
            self.seed(next(self.again))
            return None
        self.calls[unit] += 1
        name = unit if self.calls[unit] == 1 else f"{unit}#{self.calls[unit]}"
        self.started.append(name)
        if len(self.started) > 1:
            self.begin(name)  # what comes before the first unit has begun its layer already
        else:
            self.seed(name)
        if self.counting:
            for parameter in dict.fromkeys(self.name_of[id(p)] for p in self.model.get_submodule(unit).parameters()):
                self.uses.setdefault(parameter, []).append((parameter, self.layer, 0))
        return tree_map(self.leaf_of_argument, (args, kwargs))

    def leaf_of_argument(self, value: Any) -> Any:
        """The leaf of this layer for a parameter that is an argument of its unit, read while the layer before was under way."""
        name = self.name_of.get(id(value))
        if name is None:
            return value
        self.numbers[name, self.layer] += 1
        use = (name, self.layer, self.numbers[name, self.layer])
        if self.counting:
            self.uses.setdefault(name, []).append(use)
        return self.leaf(use if use in self.uses[name] else (name, self.layer, 0), value)

    def leave(self) -> None:
        self.depth -= 1

    def seed(self, layer: str) -> None:
        here = seed_of(self.spec.seed, "forward", self.step, self.number, layer)
        torch.manual_seed(here)
        random.seed(here % 2**32)
        numpy.random.seed(here % 2**32)

    def begin(self, layer: str) -> None:
        self.layer = layer
        for module, key, parameter in self.places:
            setattr(module, key, self.leaf((self.name_of[id(parameter)], layer, 0), parameter))
        self.seed(layer)

    def take_gradients(self) -> dict[Use, Tensor | None]:
        found = {use: leaf.grad for use, leaf in self.leaves.items()}
        for leaf in self.leaves.values():
            leaf.grad = None
        return found

    def end(self) -> None:
        for module, key, parameter in self.places:
            setattr(module, key, parameter)
        for hook in self.hooks:
            hook.remove()


def make_model(spec: Job) -> nn.Module:
    """Rule 2: the user's module with its initial values."""
    for seed in (random.seed, torch.manual_seed):
        seed(spec.seed)
    numpy.random.seed(spec.seed % 2**32)
    model: nn.Module = spec.model.call()
    if spec.init_from is not None:
        model.load_state_dict(torch.load(spec.init_from.path))
    return model.to(getattr(torch, spec.dtype)).train()


def train(graph: Graph, spec: Job, *, leaves: bool = True) -> tuple[Result, nn.Module]:
    """(what the run must have, the trained module).

    `leaves=False`: gradients as autograd adds them, which is the same for a step of one microbatch.
    """
    assert leaves or spec.microbatches == 1
    torch.set_num_threads(spec.threads)
    model = make_model(spec)
    named = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, str] = {}
    for layer in graph.layers:
        for _, name in layer.own_names or ():
            if name in named:
                names.setdefault(id(named[name]), name)
    by_name = {name: named[name] for name in names.values()}
    trained = {name: parameter for name, parameter in by_name.items() if parameter.requires_grad}
    assert {id(p) for p in trained.values()} == {id(p) for p in model.parameters() if p.requires_grad}
    optimizer = spec.optimizer.resolve()(trained.values(), **spec.optimizer.args)
    data, blocks = spec.data.call(), spec.batching.blocks
    inputs = cache_of(graph.layers[0].build.skeleton).inputs  # type: ignore[attr-defined]
    follow, others, result = _LayersOf(model, graph, spec), OtherBuffers({"": model}, spec.model.buffers), Result()
    if not leaves:
        follow.places, follow.name_of = [], {}
    follow.uses = _count_uses(graph, spec, inputs, samples(data, spec, 0, spec.batch_size // spec.microbatches))
    plain_names = {id(parameter): name for name, parameter in model.named_parameters()}
    for step in range(spec.steps):
        for parameter in trained.values():
            parameter.grad = None
        others.begin_step()
        sums: list[dict[Use, Tensor | None] | None] = []
        losses: list[tuple[float, float]] = []
        for block in range(blocks):
            members = range(block * spec.microbatches // blocks, (block + 1) * spec.microbatches // blocks)
            for number in members:
                first, last = (step * spec.batch_size + i * spec.batch_size // spec.microbatches for i in (number, number + 1))
                fields = samples(data, spec, first, last)
                others.begin_microbatch()
                total, count = _loss(model, follow, inputs, spec, fields, step, number)
                others.end_microbatch()
                total.backward()
                losses.append((float(total.detach()), count))
            sums.append(follow.take_gradients() if len(members) else None)
        gradients = {
            n: _add_uses(follow.uses.get(plain_names[id(p)], []), sums) if leaves else p.grad for n, p in trained.items()
        }
        _apply(spec, trained, gradients, math.fsum(count for _, count in losses), result)
        optimizer.step()
        others.end_step()
        result.losses.append(math.fsum(total for total, _ in losses) / math.fsum(count for _, count in losses))
        result.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in trained.items()})
    follow.end()
    result.parameters = {name: parameter.detach() for name, parameter in by_name.items()}
    result.buffers = dict(model.named_buffers(remove_duplicate=False))
    return result, model


def _count_uses(graph: Graph, spec: Job, inputs: Any, fields: Mapping[str, Tensor]) -> dict[str, list[Use]]:
    """Parameter -> its uses in the forward of another copy of the module."""
    follow = _LayersOf(model := make_model(spec), graph, spec)
    with follow.count_uses(), computing_in(spec):
        _call(model, inputs, fields)
    return follow.uses


def _call(model: nn.Module, inputs: Any, fields: Mapping[str, Tensor]) -> Any:
    given = {name: value.clone() for name, value in fields.items()}
    return model(*(given[name] for name in inputs.positional), **{name: given[name] for name in inputs.keywords})


def _loss(
    model: nn.Module, follow: _LayersOf, inputs: Any, spec: Job, fields: Mapping[str, Tensor], step: int, number: int
) -> tuple[Tensor, float]:
    """(sum to differentiate, number of samples) of one microbatch."""
    target = fields[spec.loss_target_name]
    with follow.microbatch(step, number), computing_in(spec):
        output = _call(model, inputs, fields)
    if spec.loss.is_loss_of_model:
        found = output["loss"] if isinstance(output, Mapping) else output.loss
        if spec.loss.count is not None:  # rule 5
            counted = target[..., 1:] if spec.loss.count == "shifted_labels" else target
            count = int((counted != -100).sum())
            found = (found * count if count else found.nan_to_num() * 0, count)
    else:
        with computing_in(spec):
            found = spec.loss.partial()(output, target)
    if spec.loss.sample_weight is not None:  # rule 5
        weights = fields[spec.loss.sample_weight]
        return (found * weights).sum(), float(weights.sum())
    if isinstance(found, tuple):
        return found[0], float(found[1])
    return (found.float() if found.dtype == torch.bfloat16 else found) * float(len(target)), float(len(target))


def _add_uses(uses: list[Use], sums: list[dict[Use, Tensor | None] | None]) -> Tensor | None:
    """Rule 6: the tree over blocks of each use, then the uses, last to first."""
    total = None
    for use in reversed(uses):
        gradient = tree([None if block is None else block.get(use) for block in sums])
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def _apply(spec: Job, trained: Mapping[str, Tensor], gradients: Mapping[str, Any], count: float, result: Result) -> None:
    """Rule 7: the norm, and the scaled gradients."""
    norm = math.sqrt(sum_of_squares(gradients.values())) / count
    factor = 1 / count if spec.clip_norm is None else min(1.0, spec.clip_norm / (norm + 1e-6)) / count
    for name, parameter in trained.items():
        parameter.grad = None if gradients[name] is None else gradients[name].mul_(factor)
    result.norms.append(norm)
