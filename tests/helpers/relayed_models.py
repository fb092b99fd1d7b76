"""Models whose gradients show in which order they are added; as layers, and as one plain module.

`branching` and `branched`: parallel branches, some of whose readers of a value do not need each other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from helpers.reference import computing_in, seed_of
from torch import Tensor, nn

from raypar.job import Job
from raypar.model.graph import Graph, Layer
from raypar.model.materialise import materialise

WIDTH, LENGTH = 8, 6


class Embed(nn.Module):
    """x [mb, 6] -> [mb, LENGTH, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, LENGTH * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).view(-1, LENGTH, WIDTH)


class Several(nn.Module):
    """Uses its input four times."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x).tanh() * x + self.other(x).sigmoid() + 0.3 * x.exp()


class Lying(nn.Module):
    """Returns its input transposed, every second row of it, and its mean expanded: none lies in memory as a new tensor does."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.transpose(1, 2), x[:, 1::2], x.mean(1, keepdim=True).expand(-1, LENGTH, -1)


class Drop(nn.Module):
    """Dropout, whose mask is drawn in the order of the input's strides."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


class Mix(nn.Module):
    """Joins a transposed value with two others, one of them expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, u: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return self.shared(u.transpose(1, 2)) + e * e + F.dropout(w, 0.2, self.training)


class Detached(nn.Module):
    """Reads `e` without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, c: Tensor, e: Tensor) -> Tensor:
        return c + self.shared(e.detach()).tanh()


class NoGradient(torch.autograd.Function):
    """Leaves the gradient of its input undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


class Ending(nn.Module):
    """Reads `s` and gives it an undefined gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, d: Tensor, s: Tensor) -> Tensor:
        return self.inner(d).relu() + NoGradient.apply(s).mean(1, keepdim=True)


class Join(nn.Module):
    """Reads two of the values that others read too, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, f: Tensor, s: Tensor, e: Tensor) -> Tensor:
        return self.shared(f) + F.dropout(s, 0.4, self.training).mean(1, keepdim=True) + e.sin() * e


class Head(nn.Module):
    """[mb, LENGTH, WIDTH] -> [mb]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(LENGTH * WIDTH, 1)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h.flatten(1)).squeeze(1)


class Drawn(nn.Module):
    """Reads some values, the first one twice. Returns what it computes: as it is, swapped in memory, by half, or expanded."""

    def __init__(self, reads: int, writes: int, kind: int) -> None:
        super().__init__()
        self.writes, self.kind = writes, kind
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(reads - 1))

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        out = self.shared(x).tanh() * x
        for linear, other in zip(self.others, others, strict=True):
            out = out + linear(F.dropout(other, 0.2, self.training)).sigmoid() * other
        if self.kind == 1:  # lies in memory with its last dims swapped
            out = (out.transpose(1, 2) * 0.9).transpose(1, 2)
        elif self.kind == 2:  # every second row of a larger tensor
            out = torch.cat([out, out.exp()], 1)[:, ::2]
        elif self.kind == 3:
            out = out.mean(1, keepdim=True).expand(-1, LENGTH, -1)
        return (out, out.sin()) if self.writes == 2 else out


def drawn(seed: int) -> Graph:
    """A graph of 6 to 10 layers that read values of any layers before them, with a tie of two to four uses; by lot."""
    dice = random.Random(seed)
    values, layers = ["v0"], [Layer("embed", Embed, ("x",), ("v0",))]
    count = dice.randint(5, 9)
    for index in range(1, count + 1):
        reads = [dice.choice(values[-4:]), *(dice.choice(values) for _ in range(dice.randint(0, 2)))]
        writes = tuple(f"v{len(values) + i}" for i in range(dice.choice([1, 1, 2])))
        values += writes
        build = partial(Drawn, len(reads), len(writes), dice.randrange(4))
        layers.append(Layer(f"layer{index}", build, tuple(reads), writes))
    tied = sorted(dice.sample(range(1, count + 1), dice.randint(2, min(4, count))))
    read = (values[-1], *dice.sample(values[:-1], dice.randint(1, 2)))
    return Graph(
        tuple(layers),
        outputs=read,
        rebuild_output=lambda *found: {"out": found[0].mean((1, 2)), "first": found[1], "last": found[-1]},
        ties=(tuple(f"layer{index}.shared.weight" for index in tied),),
    )


class Blend(nn.Module):
    """Reads each value once."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        out = self.shared(x).tanh()
        for other in others:
            out = out + 0.7 * other
        return out


def branching() -> Graph:
    """Ten layers; three branches read `e`, in one layer several times, and `a` is read by two that do not need each other."""
    return Graph(
        (
            Layer("embed", Embed, ("x",), ("e",)),
            Layer("several", Several, ("e",), ("a",)),
            Layer("again", partial(Drawn, 2, 1, 1), ("a", "e"), ("a2",)),
            Layer("drop", Drop, ("e",), ("b",)),
            Layer("blend", Blend, ("b", "e"), ("b2",)),
            Layer("twice", Blend, ("e", "e"), ("c",)),
            Layer("ending", Ending, ("c", "e"), ("d",)),
            Layer("inner", partial(Drawn, 1, 1, 2), ("a",), ("f",)),
            Layer("join", partial(Drawn, 4, 1, 0), ("a2", "b2", "d", "f"), ("h",)),
            Layer("head", Head, ("h",), ("out",)),
        ),
        outputs=("out", "e", "h"),
        rebuild_output=rebuild,
        ties=(("again.shared.weight", "blend.shared.weight", "inner.shared.weight"),),
    )


def branched(seed: int) -> Graph:
    """Two to four branches of one to three layers, two times one after the other, which read what is before them; by lot."""
    dice = random.Random(seed)
    values, layers = ["v0"], [Layer("embed", Embed, ("x",), ("v0",))]

    def add(reads: list[str]) -> str:
        value = f"v{len(values)}"
        kind = dice.randrange(4)
        build = partial(Drawn, len(reads), 1, kind) if dice.random() < 0.6 else Blend
        values.append(value)
        layers.append(Layer(f"layer{len(layers)}", build, tuple(reads), (value,)))
        return value

    for _ in range(2):
        before, ends = list(values[-3:]), []
        for _ in range(dice.randint(2, 4)):
            end = dice.choice(before)
            for _ in range(dice.randint(1, 3)):
                end = add([end, *(dice.choice(before) for _ in range(dice.randint(0, 2)))])
            ends.append(end)
        add(ends)
    read = (values[-1], *dice.sample(values[:-1], dice.randint(1, 2)))
    return Graph(
        tuple(layers),
        outputs=read,
        rebuild_output=lambda *found: {"out": found[0].mean((1, 2)), "first": found[1], "last": found[-1]},
    )


def rebuild(out: Tensor, e: Tensor, h: Tensor) -> dict[str, Tensor]:
    """What the loss gets."""
    return {"out": out, "first": e, "last": h}


def relayed() -> Graph:
    """Ten layers; `e` is read by five of them and by the loss."""
    return Graph(
        (
            Layer("embed", Embed, ("x",), ("e",)),
            Layer("several", Several, ("e",), ("a",)),
            Layer("lying", Lying, ("a",), ("t", "s", "w")),
            Layer("drop", Drop, ("t",), ("u",)),
            Layer("mix", Mix, ("u", "e", "w"), ("c",)),
            Layer("detached", Detached, ("c", "e"), ("d",)),
            Layer("ending", Ending, ("d", "s"), ("f",)),
            Layer("join", Join, ("f", "s", "e"), ("h",)),
            Layer("again", Several, ("h",), ("k",)),
            Layer("head", Head, ("k",), ("out",)),
        ),
        outputs=("out", "e", "h"),
        rebuild_output=rebuild,
        ties=(("mix.shared.weight", "detached.shared.weight", "join.shared.weight"),),
    )


def loss(output: Mapping[str, Tensor], target: Tensor) -> Tensor:
    """Reads three values of the model."""
    wrong = (output["out"] - target).square().mean()
    return wrong + 0.1 * (output["first"] * output["first"]).mean() + 0.1 * output["last"].cos().mean()


class PlainModel(nn.Module):
    """The layers as a plain module, as a user would write it: ties are one parameter, values are Python variables."""

    def __init__(self, graph: Graph, spec: Job) -> None:
        super().__init__()
        self.graph, self.spec = graph, spec
        made = materialise(graph, 0, len(graph.layers), seed=spec.seed, dtype=getattr(torch, spec.dtype))
        self.parts = nn.ModuleDict(made)
        for first, *others in graph.ties:
            for name in others:
                owner, _, key = name.rpartition(".")
                setattr(self.parts.get_submodule(owner), key, self.parts.get_parameter(first))

    def forward(self, step: int, microbatch: int, fields: Mapping[str, Tensor]) -> Any:
        values = dict(fields)
        for layer in self.graph.layers:
            here = seed_of(self.spec.seed, "forward", step, microbatch, layer.name)
            torch.manual_seed(here)
            numpy.random.seed(here % 2**32)
            with computing_in(self.spec):
                made = self.parts[layer.name](*(values[name] for name in layer.inputs))
            values.update(zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True))
        read = [values[name] for name in self.graph.loss_inputs]
        return read[0] if self.graph.rebuild_output is None else self.graph.rebuild_output(*read)

    def gradients(self, microbatch: int, fields: Mapping[str, Tensor], loss: Any) -> dict[str, Tensor | None]:
        """Parameter -> its gradient of one microbatch of the first step, by plain autograd."""
        self.zero_grad(set_to_none=True)
        output = self(0, microbatch, fields)
        with computing_in(self.spec):
            total = loss(output, fields["y"])
        (total.float() * float(len(fields["y"]))).backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.parts.named_parameters()}
