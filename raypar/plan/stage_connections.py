"""What crosses between the stages of a model: values along edges, and tied parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.tensor_parallel_layout import TensorParallelLayout


@dataclass(frozen=True, slots=True)
class StageEdge:
    """All values that stage `src` produces and stage `dst` uses: one message a microbatch, straight to the consumer.

    `nbytes` is of one microbatch, for the simulator; 0 when unknown. `differentiable`: whether gradients come back.
    """

    src: int
    dst: int
    values: tuple[str, ...] = ("x",)
    nbytes: int = 0
    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter used by layers of several stages; `stages` ascending."""

    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageConnections:
    """Everything that connects the stages of one plan of one model."""

    edges: tuple[StageEdge, ...]
    ties: tuple[TiedParameter, ...] = ()

    @staticmethod
    def chain(stages: int, nbytes: Sequence[int] | int = 0) -> StageConnections:
        """The crossing of a plain sequential model: each stage feeds the next. `nbytes`: one number, or one per edge."""
        sizes = [nbytes] * (stages - 1) if isinstance(nbytes, int) else list(nbytes)
        return StageConnections(tuple(StageEdge(s, s + 1, nbytes=sizes[s]) for s in range(stages - 1)))

    def into(self, stage: int) -> tuple[StageEdge, ...]:
        """Edges whose values the stage consumes, by source."""
        return tuple(e for e in self.edges if e.dst == stage)

    def out_of(self, stage: int) -> tuple[StageEdge, ...]:
        """Edges whose values the stage produces, by destination."""
        return tuple(e for e in self.edges if e.src == stage)


@dataclass(frozen=True)
class ModelOutline:
    """A model's layers as plain data: all that programs and state depend on, for code that may not import the user's."""

    layers: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    """(name, values it reads, values it writes) in execution order."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Tuples of qualified parameter names that are one parameter."""
    elements: tuple[dict[str, int], ...] = ()
    """By layer: name -> number of elements, of its parameters (a tie under its first name), then of its buffers."""
    shardings: Mapping[int, Mapping[str, TensorCut]] = field(default_factory=dict)
    """Number of shards -> parameter -> how it is cut over so many; a parameter that is not there is whole on every shard."""
    layouts: Mapping[int, TensorParallelLayout] = field(default_factory=dict)
    """Number of shards -> the whole layout for so many: `cuts`, and the styles with all that they answer."""
    buffers: frozenset[str] = frozenset()
    """Which of the names in `elements` are buffers."""
    frozen: frozenset[str] = frozenset()
    """Which of them are parameters that are not trained."""

    def crossing(self, plan: ParallelPlan) -> StageConnections:
        """What crosses between the plan's stages: values by edge, and ties."""
        stage_of = {i: s for s, stage in enumerate(plan.stages) for i in range(stage.first, stage.last)}
        readers: dict[str, set[int]] = {}
        for index, (_, inputs, _) in enumerate(self.layers):
            for value in inputs:
                readers.setdefault(value, set()).add(stage_of[index])
        values: dict[tuple[int, int], list[str]] = {}
        for index, (_, _, outputs) in enumerate(self.layers):
            for value in outputs:
                for dst in sorted(readers.get(value, set()) - {stage_of[index]}):
                    values.setdefault((stage_of[index], dst), []).append(value)
        ties = []
        for names in self.ties:
            stages = sorted({stage_of[self.layer_of(name)] for name in names})
            if len(stages) > 1:
                ties.append(TiedParameter(names[0], tuple(stages)))
        return StageConnections(tuple(StageEdge(src, dst, tuple(v)) for (src, dst), v in sorted(values.items())), tuple(ties))

    def layer_of(self, parameter: str) -> int:
        """Index of the layer that a qualified parameter name belongs to (layer names may contain dots)."""
        owners = [i for i, (name, _, _) in enumerate(self.layers) if parameter.startswith(name + ".")]
        return max(owners, key=lambda i: len(self.layers[i][0]))
