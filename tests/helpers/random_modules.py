"""Random modules whose forward is a directed graph: skips, ties, shared modules, writes in place."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 6


class TwoOutputs(nn.Linear):
    """Returns two tensors, of which users may leave one."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)
        return {"first": y, "second": y.tanh()}


class WritesItsInput(nn.Module):
    """Writes into what it is given, and returns that."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


class Rows:
    """29 samples of two fields and a target."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {name: torch.randn(WIDTH, generator=generator) for name in ("x", "other", "y")}


def loss(output: dict[str, Any], target: Tensor) -> Tensor:
    """Reads every value that the module returns."""
    read = [output["last"], *output["chosen"]]
    return torch.stack([(value - target).square().mean() for value in read]).sum()


class RandomModule(nn.Module):
    """Units, parameters and buffers, and a list of operations on values [batch, WIDTH] that `seed` decides."""

    def __init__(self, seed: int, p: float = 0.0) -> None:
        super().__init__()
        choose = random.Random(seed)
        kinds = [lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH), lambda: TwoOutputs(WIDTH, WIDTH)]
        self.units = nn.ModuleList(choose.choice(kinds)() for _ in range(choose.randint(3, 6)))
        self.units.extend([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), WritesItsInput()])
        if choose.random() < 0.5:
            self.units[-2].weight = self.units[-3].weight
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("table", torch.arange(float(WIDTH)))
        self.p = p
        calls = [index for index in range(len(self.units)) for _ in range(choose.choice([1, 1, 1, 2]))]
        choose.shuffle(calls)
        self.plan: list[tuple[Any, ...]] = []
        for call in calls:
            self.plan.append(("unit", call, choose.random(), choose.random()))
            self.plan += [(choose.choice(OPERATIONS), choose.random(), choose.random()) for _ in range(choose.randint(0, 3))]
        self.ends = [choose.random() for _ in range(2)]

    def forward(self, x: Tensor, other: Tensor) -> dict[str, Any]:
        values, fresh = [x, other + 0], [other + 1]
        for name, *given in self.plan:
            if name == "unit":
                self._call(given[0], values, fresh, given[1], given[2])
            else:
                self._glue(name, values, fresh, *given)
        values.append(values[-1] + self.units[-3](x))  # what depends on parameters in any case
        chosen = [values[int(end * len(values))] for end in self.ends]
        return {"last": values[-1], "chosen": chosen, "rows": len(x)}

    def _call(self, index: int, values: list[Tensor], fresh: list[Tensor], which: float, both: float) -> None:
        unit = self.units[index]
        if isinstance(unit, WritesItsInput):  # what nobody else has read
            values.append(unit(fresh.pop() if fresh else values[0] + 1))
            return
        made = unit(values[int(which * len(values))])
        if isinstance(made, dict):
            values.append(made["second"])
            if both < 0.5:
                values.append(made["first"])
        else:
            values.append(made)

    def _glue(self, name: str, values: list[Tensor], fresh: list[Tensor], one: float, two: float) -> None:
        a, b = values[int(one * len(values))], values[int(two * len(values))]
        if name == "add":
            values.append(a + b)
        elif name == "twice":
            values.append(a * self.scale + a.tanh())
        elif name == "fresh":
            fresh.append(a + b * 2)
        elif name == "in place" and fresh:
            fresh[-1] += a
            if two < 0.5:
                values.append(fresh.pop())
        elif name == "buffer":
            values.append(a + self.table.cos() * len(a))
        elif name == "dropout":
            values.append(F.dropout(a, self.p, self.training))
        elif name == "no_grad":
            with torch.no_grad():
                mean = a.mean(0)
            values.append(b - mean)
        elif name == "transposed":
            values.append((a.mT.contiguous().mT * 2) @ self.units[-2].weight)


OPERATIONS = ("add", "twice", "fresh", "in place", "buffer", "dropout", "no_grad", "transposed")
