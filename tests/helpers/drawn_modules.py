"""Plain modules drawn by lot: skips, diamonds, ties, modules that are called twice, norms, in-place code, unused results."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, WIDTH = 4, 6


class Rows:
    """29 samples with three fields and a target."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x, other, y = (torch.randn(LENGTH, WIDTH, generator=generator) for _ in range(3))
        return {"x": x, "other": other, "keep": torch.arange(LENGTH) < 1 + index % LENGTH, "y": y}


class Mlp(nn.Module):
    """Uses its input three times."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) + x * x.sigmoid()


class Normed(nn.Module):
    """A norm with running statistics over a transposed value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


class Pair(nn.Module):
    """Reads two values; returns a tuple, whose second part is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
        made = self.first(x).tanh() + (0 if other is None else self.second(other) * other)
        return made, made.flip(1).transpose(1, 2).transpose(1, 2)


class Named(nn.Module):
    """Returns a dict of a value, None, and what nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, *, hidden: Tensor) -> dict[str, Tensor | None]:
        made = self.drop(self.linear(hidden))
        return {"hidden": made, "none": None, "unused": made.exp()}


class Drawn(nn.Module):
    """A forward of 5 to 12 steps, each a unit call or glue on values before; what it returns has several values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice = random.Random(seed)
        kinds = [dice.choice([nn.Linear, Mlp, Normed, Pair, Named]) for _ in range(dice.randint(3, 6))]
        self.units = nn.ModuleList(kind(WIDTH, WIDTH) if kind is nn.Linear else kind() for kind in kinds)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        linears = [
            m.linear if isinstance(m, (Named, Normed)) else m for m in self.units if isinstance(m, (nn.Linear, Named, Normed))
        ]
        if len(linears) > 1 and dice.random() < 0.5:
            linears[-1].weight = linears[0].weight
        steps: list[tuple[Any, ...]] = [("unit", index) for index in range(len(kinds))]
        steps += [("unit", i) for i, kind in enumerate(kinds) if kind is not Normed and dice.random() < 0.3]
        dice.shuffle(steps)
        for _ in range(dice.randint(2, 7)):
            steps.insert(dice.randint(1, len(steps)), (dice.choice(GLUE),))
        self.steps = [(*step, dice.random(), dice.random(), dice.random() < 0.5) for step in steps]
        self.form = dice.randrange(3)

    def forward(self, x: Tensor, other: Tensor, keep: Tensor) -> Any:
        values = [x, other * 0.5]
        for kind, *given, first, second, late in self.steps:
            recent = values[-3:] if late else values
            a, b = recent[int(first * len(recent))], values[int(second * len(values))]
            values += self.run_unit(self.units[given[0]], a, b, late) if kind == "unit" else [self.glue(kind, a, b, keep)]
        last, before = values[-1] * self.scale, values[len(values) // 2]
        if self.form == 0:
            return last
        return (last, [before, None]) if self.form == 1 else {"last": last, "before": before, "x": x, "again": last}

    def run_unit(self, unit: nn.Module, a: Tensor, b: Tensor, late: bool) -> list[Tensor]:
        if isinstance(unit, Pair):
            return list(unit(a, b) if late else unit(a))
        return [unit(hidden=a)["hidden"]] if isinstance(unit, Named) else [unit(a)]

    def glue(self, kind: str, a: Tensor, b: Tensor, keep: Tensor) -> Tensor:
        if kind == "add":
            return a + b * self.scale
        if kind == "twice":
            return a * a.cos() + b
        if kind == "masked":
            return torch.where(keep[..., None], a, b + self.shift)
        if kind == "dropout":
            return F.dropout(a.transpose(1, 2), 0.2, self.training).transpose(1, 2)
        if kind == "expand":
            return a.mean(1, keepdim=True).expand(-1, LENGTH, -1)
        if kind == "slices":
            return torch.cat([a, b.detach()], 2)[..., ::2]
        if kind == "in place":
            made = a.clone()
            made.mul_(0.9).add_(b)
            made[:, 0] = b[:, 1]
            made[:, 2:] *= self.scale
            return made
        with torch.no_grad():
            shift = b.mean()
        return F.relu(a - shift, inplace=True)


GLUE = ("add", "twice", "masked", "dropout", "expand", "slices", "in place", "no grad")


def make_drawn(seed: int) -> nn.Module:
    """The module of a seed, as a model function."""
    return Drawn(seed)


def loss(output: Any, target: Tensor) -> Tensor:
    """Reads all values of the output."""
    found = [value for value in torch.utils._pytree.tree_leaves(output) if isinstance(value, Tensor)]
    return sum((value - target).square().mean() for value in found)  # type: ignore[return-value]
