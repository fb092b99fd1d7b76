"""One plain process that trains any layer graph by the numerics contract: a second reading, sharing no code with the workers.

It holds the whole model, runs every microbatch through all layers with one autograd graph, and adds block gradients by a tree
of its own. Only the layer-graph types are raypar's.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import hashlib
import inspect
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from raypar.job import Job, LossScaleConfig, SingleOptimizerConfig
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import convert_module_dtype
from raypar.model.materialise import materialise

PIECE = 32768
"""Elements of the norm's pieces (rule 7)."""


def seed_of(*place: object) -> int:
    text = "/".join(map(str, place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def lying_as_new(x: Tensor) -> Tensor:
    """Contiguous, from a multiple of 64 bytes on."""
    return x if x.is_contiguous() and x.data_ptr() % 64 == 0 else x.clone(memory_format=torch.contiguous_format)


def sum_of_squares(gradients: Iterable[Tensor | None]) -> float:
    """Rule 7: of all pieces of all gradients, added exactly."""
    whole = [lying_as_new(gradient).flatten() for gradient in gradients if gradient is not None]
    return math.fsum(float(torch.dot(piece, piece)) for one in whole for piece in one.split(PIECE))


def name_values(values: dict[str, Tensor], names: tuple[str, ...], returned: tuple[Tensor, ...]) -> None:
    """Rule 4: the tensors themselves; but a parameter, a tensor with a hook, and one that is a value already as a view."""
    for name, value in zip(names, returned, strict=True):
        apart = value.requires_grad and (value.is_leaf or value._backward_hooks)
        again = any(value is other for other in values.values())
        values[name] = value.view_as(value) if apart or again else value


@dataclass
class Result:
    """After each step: loss, norm, scaled gradients by canonical name; at the end parameters, buffers, optimizer state."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    validated: dict[int, float] = field(default_factory=dict)
    """Steps done -> the metric that a scheduler was given."""
    rates: list[list[float]] = field(default_factory=list)
    """By step: what a scheduler has made of the learning rates of the groups, for the next one."""
    samples: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    """Of streams: (step, microbatch) -> (epoch, index) of its samples."""


def tree(sums: list[Any]) -> Any:
    if len(sums) == 1:
        return sums[0]
    left = 1
    while left * 2 < len(sums):
        left *= 2
    a, b = tree(sums[:left]), tree(sums[left:])
    return b if a is None else a if b is None else a + b


def build(graph: Graph, spec: Job, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Rule 2: what the user's code gives, in one process that has seeded everything. Each layer has parameters of its own."""
    random.seed(spec.seed)
    numpy.random.seed(spec.seed % 2**32)
    torch.manual_seed(spec.seed)
    made = graph if graph.initial_values is None else spec.model.call()
    if made is None:  # a graph that a test has captured by hand: initial values are not what it is about
        return materialise(graph, 0, len(graph.layers), seed=spec.seed, dtype=dtype)
    if isinstance(made, Graph):
        layers = [(layer.name, layer.build()) for layer in made.layers]
    elif isinstance(made, nn.Sequential):
        layers = list(made.named_children())
    elif isinstance(made, nn.Module):  # captured: its layers, with the values that its own constructor has drawn
        state = dict(made.named_parameters(remove_duplicate=False)) | dict(made.named_buffers(remove_duplicate=False))
        return materialise(graph, 0, len(graph.layers), seed=spec.seed, dtype=dtype, values=state)
    else:
        layers = [item if isinstance(item, tuple) else (str(place), item) for place, item in enumerate(made)]
    shared = Counter(id(p) for _, module in layers for p in module.parameters())
    apart = {name for name, module in layers if any(shared[id(p)] > 1 for p in module.parameters())}
    return {name: convert_module_dtype(copy.deepcopy(module) if name in apart else module, dtype) for name, module in layers}


def computing_in(spec: Job) -> contextlib.AbstractContextManager[Any]:
    """Rule 13: one layer's forward, or the loss, in bfloat16 or float16 as PyTorch's autocast decides."""
    if spec.precision is None or spec.precision.compute is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", lower_dtype(spec), cache_enabled=False)


def lower_dtype(spec: Job) -> torch.dtype | None:
    """Rule 13: what autocast casts to, or parameters are rounded to."""
    found = spec.precision and (spec.precision.compute or spec.precision.parameters)
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[found] if found else None


def loss_scale_exponent(one: LossScaleConfig, skipped: list[bool]) -> int:
    """Rule 13: k of the next step's scale 2^k, as GradScaler goes from step to step. `skipped`: by step so far."""
    scale, clean = one.init_scale, 0
    for step in skipped:
        clean = 0 if step else clean + 1
        if step:
            scale = max(scale * one.backoff_factor, 2.0**-24)
        elif clean == one.growth_interval:
            scale, clean = scale * one.growth_factor if scale * one.growth_factor <= 2.0**127 else scale, 0
    return math.frexp(scale)[1] - 1


def rounds(spec: Job) -> bool:
    """Rule 13: whether layers compute with rounded copies of float32 parameters."""
    return spec.precision is not None and spec.precision.parameters is not None


def adds_in_float32(spec: Job) -> bool:
    """Rule 13: whether the gradients of such copies are added in float32, not in their own dtype."""
    return rounds(spec) and spec.precision is not None and spec.precision.gradients == "float32"


def round_parameters(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """All floating point parameters, but those of norms with running statistics."""
    for module in modules:
        for part in module.modules():
            if not (isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats):
                for parameter in part.parameters(recurse=False):
                    parameter.data = parameter.data.to(dtype) if parameter.is_floating_point() else parameter.data


def read_by_layer(spec: Job, fields: Mapping[str, Tensor], values: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    """A layer's inputs: fields of the batch in the dtype of the parameters."""
    lower = {name for name, field in fields.items() if rounds(spec) and field.is_floating_point()}
    return [values[name].to(lower_dtype(spec)) if name in lower else values[name] for name in names]


def read_by_loss(spec: Job, value: Tensor) -> Tensor:
    return value.float() if rounds(spec) and value.dtype == lower_dtype(spec) else value


class OtherBuffers:
    """Rule 14: buffers that forward writes, beside those of norms, which simply run: their microbatches begin with the step's
    first value; at its end `last` has the last one written, `sum` what each microbatch has added.
    Non-persistent ones that are replaced are caches."""

    def __init__(self, modules: dict[str, nn.Module], policy: str) -> None:
        self.policy, self.modules = policy, modules
        self.places = [
            (part, key)
            for module in modules.values()
            for part in module.modules()
            if not isinstance(part, nn.modules.batchnorm._NormBase)
            for key, buffer in part._buffers.items()
            if buffer is not None and policy != "refuse"
        ]

    def begin_step(self) -> None:
        parts = {id(part): part for module in self.modules.values() for part in module.modules()}.values()
        self.all = [(part, key, b.clone()) for part in parts for key, b in part._buffers.items() if b is not None]
        self.first = [part._buffers[key].clone() for part, key in self.places]
        self.new = [value.clone() for value in self.first]

    def begin_microbatch(self) -> None:
        for (part, key), value in zip(self.places, self.first, strict=True):
            part._buffers[key] = value.clone()
        self.given = [(part._buffers[key], part._buffers[key]._version) for part, key in self.places]

    def end_microbatch(self) -> None:
        for place, (part, key) in enumerate(self.places):
            now, (given, version) = part._buffers[key], self.given[place]
            if now is not given and key in part._non_persistent_buffers_set:
                continue  # a cache
            if now is not given or now._version != version or not torch.equal(now, self.first[place]):
                added = self.new[place] + (now - self.first[place]) if self.policy == "sum" else now
                self.new[place] = added.detach().clone()

    def skip_step(self) -> None:
        for part, key, value in self.all:
            part._buffers[key] = value.clone()

    def end_step(self) -> None:
        for (part, key), value in zip(self.places, self.new, strict=True):
            part._buffers[key] = value


def names_of_groups(one: SingleOptimizerConfig, trained: Iterable[str]) -> list[list[str]]:
    """The names in each of an optimizer's groups, those of none last."""
    groups: list[list[str]] = [[] for _ in (*one.options_by_pattern, None)]
    for name in trained:
        matches = [i for i, (p, _) in enumerate(one.options_by_pattern) if fnmatch.fnmatchcase(name, p)]
        groups[matches[0] if matches else -1].append(name)
    return groups


def optimizer_of(one: SingleOptimizerConfig, trained: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """One optimizer of these parameters."""
    groups, given = names_of_groups(one, trained), [*(o for _, o in one.options_by_pattern), {}]
    optimizer = one.resolve()(
        [{"params": [trained[n] for n in names], **over} for names, over in zip(groups, given, strict=True) if names],
        **one.args,
    )
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


class Several:
    """Several optimizers of a plain loop: a parameter is trained by the first whose pattern matches its name."""

    def __init__(self, spec: Job, trained: Mapping[str, nn.Parameter]) -> None:
        self.param_groups, self.done, left = [], 0, dict(trained)
        self.state: dict[Any, Any] = {}
        self.parts: list[tuple[torch.optim.Optimizer, Any, list[Any]]] = []
        for entry in spec.optimizer.entries:
            mine = {name: left.pop(name) for name in list(left) if fnmatch.fnmatchcase(name, entry.match)}
            optimizer, ref = optimizer_of(entry, mine), entry.lr_schedule or spec.lr_schedule
            schedule = ref.partial() if ref else None
            if schedule and next(iter(inspect.signature(schedule).parameters)) == "optimizer":
                schedule = schedule(optimizer)
            self.parts.append((optimizer, schedule, [group.get("lr") for group in optimizer.param_groups]))
        assert not left

    def step(self) -> None:
        for optimizer, schedule, base in self.parts:
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                if schedule is not None and not hasattr(schedule, "step") and lr is not None:
                    group["lr"] = lr * schedule(self.done)
            optimizer.step()
            if hasattr(schedule, "step"):
                schedule.step()
            self.state |= optimizer.state
        self.done += 1


def train(graph: Graph, spec: Job, changed: Mapping[int, Job] | None = None) -> Result:
    """`changed`: step -> the job from this step on, with other values of the keys that may change when a run is resumed."""
    torch.set_num_threads(spec.threads)
    dtype = getattr(torch, spec.dtype)
    modules = build(graph, spec, dtype)
    uses: dict[str, nn.Parameter] = {}
    for layer in graph.layers:
        for path, parameter in modules[layer.name].named_parameters():
            uses[layer.qualify(path)] = parameter
    canonical = {name: names[0] for names in graph.ties for name in names}
    owners: dict[str, list[str]] = {}
    for name in uses:
        owners.setdefault(canonical.get(name, name), []).append(name)
    for names in owners.values():
        for other in names[1:]:
            uses[other].data = uses[names[0]].data
    parameters = {name: uses[names[0]] for name, names in owners.items()}
    if rounds(spec):  # the optimizer's parameters are float32, layers have copies
        parameters = {n: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for n, p in parameters.items()}
        round_parameters(modules.values(), lower_dtype(spec))
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}

    groups = names_of_groups(spec.optimizer, trained)
    optimizer = Several(spec, trained) if spec.optimizer.entries else optimizer_of(spec.optimizer, trained)
    base = [group.get("lr") for group in optimizer.param_groups]
    schedule = spec.lr_schedule.partial() if spec.lr_schedule else None
    is_one = not spec.optimizer.entries
    scheduler = (
        schedule(optimizer)
        if is_one and schedule and next(iter(inspect.signature(schedule).parameters)) == "optimizer"
        else None
    )

    data, loss_fn, position = data_of(spec), spec.loss.partial(), 0
    result = Result()
    streams = [stream(spec, k) for k in range(spec.data.streams or 0)]
    others = OtherBuffers(modules, spec.model.buffers)
    for step in range(spec.steps):
        if step in (changed or {}):
            former, spec = spec, changed[step]
            data = data if spec.data == former.data else data_of(spec)
            given = [*(o for _, o in spec.optimizer.options_by_pattern), {}]
            for group, over in zip(optimizer.param_groups, [o for o, n in zip(given, groups, strict=True) if n], strict=True):
                group |= {**spec.optimizer.args, **over}
            base = [group.get("lr") for group in optimizer.param_groups]
            schedule = spec.lr_schedule.partial() if spec.lr_schedule else None
        m, batch, blocks = spec.microbatches, spec.batch_size, spec.batching.blocks
        others.begin_step()
        exponent = (
            loss_scale_exponent(spec.precision.loss_scale, result.skipped) if lower_dtype(spec) == torch.float16 else None
        )
        block_sums: list[dict[str, Tensor | None] | None] = []
        losses: list[tuple[float, float]] = []
        for block in range(blocks):
            members = range(block * m // blocks, (block + 1) * m // blocks)
            for parameter in uses.values():
                parameter.grad = None
            sums: dict[str, Tensor] = {}
            for microbatch in members:
                first, last = microbatch * batch // m, (microbatch + 1) * batch // m
                if streams:
                    read = [next(streams[microbatch % len(streams)]) for _ in range(first, last)]
                    rows = [row for _, row in read]
                    fields = collated(rows, spec, step, microbatch) if spec.data.collate else stack(rows, spec)
                    result.samples[step, microbatch] = [place for place, _ in read]
                else:
                    fields = samples(data, spec, position + first, position + last)
                values = dict(fields)
                others.begin_microbatch()
                for layer in graph.layers:
                    here = seed_of(spec.seed, "forward", step, microbatch, layer.name)
                    torch.manual_seed(here)
                    random.seed(here % 2**32)
                    numpy.random.seed(here % 2**32)
                    with computing_in(spec):
                        out = modules[layer.name](*read_by_layer(spec, fields, values, layer.inputs))
                    name_values(values, layer.outputs, out if isinstance(out, tuple) else (out,))
                with computing_in(spec):
                    read = [read_by_loss(spec, values[name]) for name in graph.outputs or [graph.output]]
                    output = graph.rebuild_output(*read) if graph.rebuild_output else read[0]
                    found = loss_fn(output, read_by_loss(spec, fields[spec.data.target or "y"]))
                if spec.loss.sample_weight is not None:  # rule 5
                    weights = fields[spec.loss.sample_weight]
                    found = ((found * weights).sum(), weights.sum())
                if isinstance(found, tuple):
                    total, count = found[0].to(dtype) if found[0].dtype == lower_dtype(spec) else found[0], found[1]
                else:
                    count = len(fields[spec.data.target or "y"])
                    total = (found.to(dtype) if found.dtype == lower_dtype(spec) else found) * float(count)
                others.end_microbatch()
                counted = {buffer: buffer.clone() for module in modules.values() for buffer in module.buffers()}
                total.backward(None if exponent is None else torch.tensor(2.0**exponent))
                for buffer, value in counted.items():  # what checkpointing inside a layer has counted again
                    buffer.copy_(value)
                for name, parameter in uses.items() if adds_in_float32(spec) else ():  # each gradient is added in float32
                    if parameter.grad is not None:
                        sums[name] = sums[name] + parameter.grad.float() if name in sums else parameter.grad.float()
                    parameter.grad = None
                losses.append((float(total.detach()), float(count)))
            row = {n: sums.get(n) for n in uses} if adds_in_float32(spec) else {n: p.grad for n, p in uses.items()}
            block_sums.append(row if len(members) else None)
        gradients: dict[str, Tensor | None] = {}
        for name in trained:
            total_gradient = None
            for use in reversed(owners[name]):
                summed = tree([None if b is None else b[use] for b in block_sums])
                if summed is not None:
                    summed = summed.float() if rounds(spec) else summed
                    total_gradient = summed if total_gradient is None else total_gradient + summed
            gradients[name] = total_gradient
        count = math.fsum(c for _, c in losses)
        scale = 1.0 if exponent is None else 2.0**exponent
        total_square = sum_of_squares(gradients.values())
        norm = math.sqrt(total_square) / scale / count
        factor = 1 / count if spec.clip_norm is None else min(1.0, spec.clip_norm / (norm + 1e-6)) / count
        for name, parameter in trained.items():
            gradient = gradients[name]
            parameter.grad = None if gradient is None else gradient.mul_(factor / scale)
        loss = math.fsum(s for s, _ in losses) / count
        result.skipped.append(not math.isfinite(norm))
        if result.skipped[-1] and exponent is not None:
            others.skip_step()
            position += batch
            result.losses.append(loss)
            result.norms.append(norm)
            result.gradients.append({})
            if scheduler is not None:
                scheduler.step()
            continue
        here = seed_of(spec.seed, "optimizer", step)
        torch.manual_seed(here)
        random.seed(here % 2**32)
        numpy.random.seed(here % 2**32)
        factor = schedule(step) if schedule and scheduler is None else 1.0
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            if lr is not None and scheduler is None:
                group["lr"] = lr * factor
        optimizer.step()
        for name, names in owners.items() if rounds(spec) else ():
            for use in names:
                uses[use].data.copy_(parameters[name].data)
        if scheduler is not None and spec.lr_schedule.metric is None:  # rule 8: the plain loop
            scheduler.step()
        others.end_step()
        if scheduler is not None and spec.lr_schedule.metric and (step + 1) % spec.validation.every == 0:
            result.validated[step + 1] = validated(graph, spec, modules, spec.lr_schedule.metric)
            scheduler.step(result.validated[step + 1])
        if scheduler is not None:
            result.rates.append([group["lr"] for group in optimizer.param_groups])
        position += batch
        result.losses.append(loss)
        result.norms.append(norm)
        result.gradients.append({n: None if g is None else g.clone() for n, g in gradients.items()})
    result.parameters = {name: parameter.detach() for name, parameter in parameters.items()}
    result.buffers = {layer.qualify(path): b for layer in graph.layers for path, b in modules[layer.name].named_buffers()}
    result.state = {name: dict(optimizer.state.get(p, {})) for name, p in trained.items()}
    return result


@torch.no_grad()
def validated(graph: Graph, spec: Job, modules: dict[str, nn.Module], metric: str) -> float:
    """Rules 1, 5 and 8: the loss of a validation, or a metric that is a function of (output, target) and gives (sum, count)."""
    data, name = spec.validation.call(), metric.removeprefix("validation_")
    of_microbatch = -(-spec.batch_size // spec.microbatches)
    n = spec.validation.samples or len(data)
    k = -(-n // of_microbatch)
    totals, counts = [], []
    for part in modules.values():
        part.eval()
    for microbatch in range(k):
        rows = [data[index] for index in range(microbatch * n // k, (microbatch + 1) * n // k)]
        fields = stack(rows, spec)
        values = dict(fields)
        for layer in graph.layers:
            out = modules[layer.name](*read_by_layer(spec, fields, values, layer.inputs))
            name_values(values, layer.outputs, out if isinstance(out, tuple) else (out,))
        target = fields[spec.data.target or "y"]
        output = read_by_loss(spec, values[graph.output]) if name == "loss" else values[graph.output]
        found = (spec.loss if name == "loss" else spec.metrics[name]).partial()(output, target)
        one, of = found if isinstance(found, tuple) else (found * float(len(target)), len(target))
        totals.append(float(one))
        counts.append(float(of))
    for part in modules.values():
        part.train()
    add = math.fsum if name == "loss" else sum
    return add(totals) / add(counts)


def permuted_index(x: int, size: int, key: int) -> int:
    """Rule 1, `shuffle: indexed`: one number at a time, in Python's integers."""

    def mixed(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    a = math.isqrt(size - 1) + 1
    while True:
        pair = list(divmod(x, a))
        for number in range(8):
            round_key = mixed((key + (number + 1) * 0x9E3779B97F4A7C15) % 2**64)
            side = number % 2
            pair[side] = (pair[side] + mixed((pair[1 - side] + round_key) % 2**64) % a) % a
        x = pair[0] * a + pair[1]
        if x < size:
            return x


def ids_of_epoch(data: Any, spec: Job, epoch: int) -> list[int]:
    """Rule 1, a sampler that is a function of (dataset, epoch), weights and lengths that are functions of the data set."""
    here = seed_of(spec.seed, "sampler", epoch)
    generator = torch.Generator().manual_seed(here)
    if spec.data.weights is not None:
        weights = torch.as_tensor(spec.data.weights.partial()(data), dtype=torch.float64)
        return torch.multinomial(weights, len(data), spec.data.weights.replacement, generator=generator).tolist()
    if spec.data.group_by is not None:
        from transformers.trainer_pt_utils import get_length_grouped_indices

        return get_length_grouped_indices(list(spec.data.group_by.partial()(data)), spec.batch_size, generator=generator)
    random.seed(here)
    numpy.random.seed(here % 2**32)
    torch.manual_seed(here)
    assert spec.data.sampler is not None
    return [int(index) for index in spec.data.sampler.partial()(data, epoch)]


def data_of(spec: Job) -> Any:
    """The data set; of `data.mix` of map-style data the samples of all sources, one after the other."""
    if spec.data.mix and spec.data.streams:
        return None
    if spec.data.mix:
        return torch.utils.data.ConcatDataset(one.call() for one in spec.data.mix)
    return spec.data.call()


def mixed_id(spec: Job, sizes: list[int], position: int) -> tuple[int, int]:
    """Rule 1, `data.mix`: (epoch of its source, id) at a position, counted from the beginning of the run."""
    ratios = [Fraction(str(source.ratio)) for source in spec.data.mix]
    given = [0] * len(ratios)
    for place in range(1, position + 2):
        lacks = [ratio * place / sum(ratios) - count for ratio, count in zip(ratios, given, strict=True)]
        source = lacks.index(max(lacks))
        given[source] += 1
    epoch, entry = divmod(given[source] - 1, sizes[source])
    here = seed_of(seed_of(spec.seed, "mix", source), "epoch", epoch)
    if spec.data.shuffle == "indexed":
        entry = permuted_index(entry, sizes[source], here)
    elif spec.data.shuffle:
        entry = int(torch.randperm(sizes[source], generator=torch.Generator().manual_seed(here))[entry])
    return epoch, sum(sizes[:source]) + entry


def samples(data: Any, spec: Job, start: int, stop: int) -> dict[str, Tensor]:
    rows = []
    sizes = [len(source.call()) for source in spec.data.mix]
    named = spec.data.sampler or spec.data.weights or spec.data.group_by
    length = len(ids_of_epoch(data, spec, 0)) if named else len(data)
    used = length // spec.batch_size * spec.batch_size if spec.data.drop_last else length
    for place in range(start, stop):
        epoch, entry = divmod(place, used)
        here = seed_of(spec.seed, "epoch", epoch)
        if spec.data.mix:
            epoch, index = mixed_id(spec, sizes, place)
        elif named:
            index = ids_of_epoch(data, spec, epoch)[entry]
        elif spec.data.shuffle == "indexed":
            index = permuted_index(entry, len(data), here)
        elif spec.data.shuffle:
            index = int(torch.randperm(len(data), generator=torch.Generator().manual_seed(here))[entry])
        else:
            index = entry
        here = seed_of(spec.seed, "sample", epoch, index) % 2**32
        random.seed(here)
        numpy.random.seed(here)
        torch.manual_seed(here)
        rows.append(data[index])
    if spec.data.collate is not None:
        microbatch = next(
            m for m in range(spec.microbatches) if m * spec.batch_size // spec.microbatches == start % spec.batch_size
        )
        return collated(rows, spec, start // spec.batch_size, microbatch)
    return stack(rows, spec)


def padded(spec: Job, key: str, rows: list[list[int]]) -> Tensor:
    """Rule 1, `data.pad`: lists of whole numbers."""
    most = max(map(len, rows))
    while most not in (spec.data.pad.to or range(spec.data.pad.multiple, 10**6, spec.data.pad.multiple)):
        most += 1
    value = spec.data.pad.value.get(key, -100 if key == spec.data.target else 0)
    return torch.tensor([row + [value] * (most - len(row)) for row in rows])


def packed(rows: list[dict[str, Any]], spec: Job) -> dict[str, Tensor]:
    """Rule 1, `data.pack`: lists of whole numbers. The longest document goes first, each into the first row with room."""
    pack, place = spec.training_data.pack, []
    packs = [key for key, value in rows[0].items() if isinstance(value, list) and key != "attention_mask"]
    room: dict[int, int] = {}
    for document in sorted(rows, key=lambda row: len(row[packs[0]]), reverse=True):
        size = len(document[packs[0]])
        row = min(row for row in range(len(rows)) if room.get(row, pack.to) >= size)
        room[row] = room.get(row, pack.to) - size
        place.append((row, document))
    found: dict[str, list[list[int]]] = {}
    for row in range(max(pack.rows, len(room))):
        here = [document for where, document in place if where == row]
        left = room.get(row, pack.to)
        for key in packs:
            fill = pack.value.get(key, -100 if key == spec.loss_target_name else 0)
            parts = [list(document[key]) for document in here]
            if key == spec.loss_target_name and spec.training_data.pack.first_label == "mask":
                parts = [[-100, *part[1:]] for part in parts]
            found.setdefault(key, []).append([word for part in parts for word in part] + [fill] * left)
        sizes = [len(document[packs[0]]) for document in here]
        found.setdefault("position_ids", []).append([at for size in sizes for at in range(size)] + [0] * left)
        numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
        found.setdefault("document_ids", []).append(numbers + [-1] * left)
    numbers = [(row, number) for row, each in enumerate(found["document_ids"]) for number in each]
    ends = [0, *(at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1])]
    most = len(rows) + len(found["document_ids"]) + 1
    cu_seqlens = torch.tensor(ends + [len(numbers)] * (most - len(ends)), dtype=torch.int32)
    return {"cu_seqlens": cu_seqlens} | {key: torch.tensor(value) for key, value in found.items()}


def collated(rows: list[Any], spec: Job, step: int, microbatch: int) -> dict[str, Tensor]:
    """Rule 1: the user's own collation, seeded by its place."""
    function = spec.data.collate.resolve()
    collate = function(**spec.data.collate.args) if isinstance(function, type) else spec.data.collate.partial()
    here = seed_of(spec.seed, "collate", step, microbatch) % 2**32
    random.seed(here)
    numpy.random.seed(here)
    torch.manual_seed(here)
    made = collate(rows)
    fields = made if hasattr(made, "items") else dict(zip("xyz", made, strict=False))
    return {key: torch.as_tensor(value) for key, value in flat("", fields) if not isinstance(value, (str, list))}


def flat(prefix: str, fields: Any) -> list[tuple[str, Any]]:
    return [
        pair
        for key, value in fields.items()
        for pair in (flat(f"{prefix}{key}.", value) if hasattr(value, "items") else [(prefix + key, value)])
    ]


def stack(samples: list[Any], spec: Job) -> dict[str, Tensor]:
    rows = [row if isinstance(row, dict) else dict(zip("xyz", row, strict=False)) for row in samples]
    if spec.data.pack is not None:
        return packed(rows, spec)
    if spec.data.pad is not None:
        return {key: padded(spec, key, [list(row[key]) for row in rows]) for key in rows[0]}
    read = [key for key, value in rows[0].items() if not isinstance(value, str)]
    return {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in read}


def stream(spec: Job, number: int) -> Iterator[tuple[tuple[int, int], Any]]:
    """Rule 1, streams: ((epoch, index), sample) of one stream, for ever."""
    if spec.data.mix:
        yield from mixed_stream(spec, number)
    from torch.utils.data._utils import worker

    data, window = None, max(1, spec.data.shuffle_window)
    for epoch in itertools.count():
        if data is None or hasattr(data, "__next__"):
            here = seed_of(spec.seed, "stream")
            random.seed(here % 2**32)
            numpy.random.seed(here % 2**32)
            torch.manual_seed(here % 2**32)
            data = spec.data.call()
            if hasattr(data, "__next__"):  # a function is called as the worker
                random.seed(here % 2**32)
                numpy.random.seed(here % 2**32)
                torch.manual_seed(here % 2**32)
                worker._worker_info = worker.WorkerInfo(id=number, num_workers=spec.data.streams, seed=here, dataset=None)
                data = spec.data.call()
                worker._worker_info = None
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        iterator, read, part = None, 0, []
        while True:
            here = seed_of(spec.seed, "stream", epoch, number, *(() if iterator is None else (read,)))
            random.seed(here % 2**32)
            numpy.random.seed(here % 2**32)
            torch.manual_seed(here % 2**32)
            worker._worker_info = worker.WorkerInfo(id=number, num_workers=spec.data.streams, seed=here, dataset=data)
            try:
                if iterator is None:
                    iterator = iter(data)
                    continue
                part.append(((epoch, read), next(iterator)))
                read += 1
            except StopIteration:
                break
            finally:
                worker._worker_info = None
            if len(part) == window:
                yield from shuffled(spec, part, epoch, number)
                part = []
        yield from shuffled(spec, part, epoch, number)


def mixed_stream(spec: Job, number: int) -> Iterator[tuple[tuple[int, int], Any]]:
    """Rule 1, `data.mix` of iterable data: each source is read as the data of a job of its own."""
    ratios, parts = [Fraction(str(source.ratio)) for source in spec.data.mix], []
    for at, source in enumerate(spec.data.mix):
        data = spec.data.replace(mix=(), function=source.function, args=source.args)
        parts.append(stream(spec.replace(data=data, seed=seed_of(spec.seed, "mix", at)), number))
    given = [0] * len(ratios)
    for place in itertools.count(1):
        lacks = [ratio * place / sum(ratios) - count for ratio, count in zip(ratios, given, strict=True)]
        source = lacks.index(max(lacks))
        given[source] += 1
        yield next(parts[source])


def shuffled(spec: Job, part: list[Any], epoch: int, number: int) -> list[Any]:
    if spec.data.shuffle_window < 2 or not part:
        return part
    here = seed_of(spec.seed, "window", epoch, number, part[0][0][1] // spec.data.shuffle_window)
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(here)).tolist()
    return [part[place] for place in order]
