"""The grid of layouts whose replicas divide state: every level, schedule, number of replicas and of shards, and what is drawn
by lot beside them; each compared with one process."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

from helpers.parity import PRECISIONS, Layout, Precision, count_layers
from helpers.shard_grid import Cell
from helpers.shard_grid import graph as graph_on_shards
from helpers.zero_layouts import check_cell, check_zero

from raypar.plan import ParallelPlan
from raypar.plan.gradient_scatter import GradientRoute
from raypar.plan.stage_plan import GATHER_SPANS, GatherSpan
from raypar.schedule import registry

LEVELS = (0, 1, 2, 3)
REPLICAS = {"1": (1,), "2": (2,), "3": (3,), "1, 3": (1, 3), "2, 3": (2, 3)}
"""Name -> replicas of stages in turn."""
SHARDS = (1, 2)
DRAWS = 2
"""So many layouts have the same level, schedule, replicas and number of shards."""
MODELS = {1: ("tangled", "uneasy", "plain"), 2: ("llama", "uneasy llama", "gpt")}
"""Shards -> models: with ties, frozen, empty and undefined parameters, and plain ones."""
MICROBATCHES = (3, 4, 5, 7)
"""Of two and three samples each."""
PRECISIONS_BY_LOT: tuple[Precision, ...] = (None, None, None, *PRECISIONS)
GRADIENTS: tuple[GradientRoute, ...] = ("fold", "scatter")
MOST_WORKERS = 12


@dataclass(frozen=True)
class ZeroLayout:
    """A plan whose replicas divide state, of a cell of the other grids."""

    cell: Layout | Cell
    """Model, schedule, replicas, shards, microbatches, blocks, precision."""
    levels: tuple[int, ...]
    """By position."""
    holders: int
    gradients: GradientRoute
    recompute: tuple[int, ...]
    order_seed: int
    """Of the order in which workers take turns."""
    gather: GatherSpan = "step"
    """How long whole parameters are there, at level 3."""

    def __str__(self) -> str:
        level = "-".join(map(str, dict.fromkeys(self.levels)))
        more = f", {self.holders} holders" * (self.holders > 1) + ", scatter" * (self.gradients == "scatter")
        more += f", by {self.gather}" * (self.gather != "step")
        return f"level {level}, {self.cell}{more}" + f", recompute {len(self.recompute)}" * bool(self.recompute)

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""
        plan = replace(self.cell.plan, recompute=self.recompute)
        return plan.with_zero(self.levels, self.holders).with_gradients(self.gradients).with_gather(self.gather)


def zero_layouts() -> list[ZeroLayout]:
    """All layouts of the grid."""
    axes = itertools.product(LEVELS, registry.NAMES, REPLICAS, SHARDS, range(DRAWS))
    found = []
    for place in axes:
        gather = random.Random(f"gather {place}").choice(GATHER_SPANS) if place[0] == LEVELS[-1] else "step"
        found.append(replace(_draw(random.Random(f"{place}"), *place[:4]), gather=gather))
    return found


def _draw(dice: random.Random, level: int, schedule: str, replicas: str, shards: int) -> ZeroLayout:
    """What is not given is drawn: the model, stages, microbatches, blocks, precision, holders, and how gradients go."""
    model = dice.choice(MODELS[shards])
    layers = count_layers(model) if shards == 1 else len(graph_on_shards(model).layers)
    pattern, chunks = REPLICAS[replicas], registry.resolve_chunks_per_worker(schedule)
    fits = [n for n in (1, 2, 3) if n >= len(pattern) and n * chunks <= layers]
    stages = dice.choice([n for n in fits if sum(_cycle(pattern, n)) * shards <= MOST_WORKERS] or fits[:1])
    counts = _cycle(pattern, stages)
    microbatches = dice.choice(MICROBATCHES)
    blocks = dice.choice((1, microbatches, dice.randint(2, microbatches - 1)))
    compute = dice.choice(PRECISIONS_BY_LOT)
    cell: Layout | Cell
    if shards == 1:
        cell = Layout(model, schedule, counts, microbatches, blocks=blocks, compute=compute)
    else:
        columns = dice.choice(((2,) * stages, (2, 1, 2)[:stages]))
        dtype = "float64" if compute is None and dice.random() < 0.5 else "float32"
        sequence = dice.random() < 0.3 and model != "uneasy llama"  # which needs whole values
        cell = Cell(model, schedule, counts, columns, microbatches, sequence, dtype, blocks, compute)
    levels = (level,) * stages if dice.random() < 0.85 else (level, 0, level)[:stages]
    recompute = dice.choice(((), tuple(range(layers)), tuple(sorted(dice.sample(range(layers), 2)))))
    gradients = dice.choice(GRADIENTS)
    holders = 2 if level and dice.random() < 0.35 else 1
    return ZeroLayout(cell, levels, holders, gradients, recompute, dice.randrange(10))


def _cycle(pattern: tuple[int, ...], stages: int) -> tuple[int, ...]:
    return tuple(itertools.islice(itertools.cycle(pattern), stages))


def check_zero_layout(layout: ZeroLayout) -> None:
    """Losses, norms, skipped steps, gradients, parameters and optimizers' state are those of one process, to the last bit; with
    shards, of one that has all of them."""
    if isinstance(layout.cell, Layout):
        seed = layout.order_seed
        check_zero(layout.cell, layout.levels, layout.plan, None, seed, layout.holders, layout.gather)
    else:
        check_cell(layout.cell, layout.plan, layout.order_seed)
