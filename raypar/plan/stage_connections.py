"""The connections between the stages of a model: values along edges, and tied parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.tensor_parallel_layout import TensorParallelLayout

LATER_USE = "@"
"""In the name of a parameter that a layer of a captured model uses after others: `<qualified name>@<layer name>`."""


def owner_of(parameter: str) -> str:
    """Qualified name of the module that has a parameter or buffer."""
    name, later, layer = parameter.partition(LATER_USE)
    return name.rpartition(".")[0] + later + layer


@dataclass(frozen=True, slots=True)
class StageEdge:
    """All values that one stage produces and another uses: one message a microbatch, straight to the consumer."""

    src: int
    """The stage that produces the values."""
    dst: int
    """The stage that uses them."""
    values: tuple[str, ...] = ("x",)
    """Names of the values."""
    nbytes: int = 0
    """Bytes of the values of one microbatch, for the simulator; 0 if unknown."""
    differentiable: bool = True
    """Whether gradients of the values are sent back."""


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that layers of several stages use."""

    name: str
    """Its first qualified name."""
    stages: tuple[int, ...]
    """The stages that use it, ascending."""


@dataclass(frozen=True, slots=True)
class StageConnections:
    """Everything that connects the stages of one plan of one model."""

    edges: tuple[StageEdge, ...]
    """Values that are sent from stage to stage."""
    ties: tuple[TiedParameter, ...] = ()
    """Parameters that several stages use."""

    @staticmethod
    def chain(stages: int, nbytes: Sequence[int] | int = 0) -> StageConnections:
        """The connections of a sequential model: each stage feeds the next. `nbytes`: one number, or one for each edge."""
        sizes = [nbytes] * (stages - 1) if isinstance(nbytes, int) else list(nbytes)
        return StageConnections(tuple(StageEdge(s, s + 1, nbytes=sizes[s]) for s in range(stages - 1)))

    def into(self, stage: int) -> tuple[StageEdge, ...]:
        """The edges whose values the stage uses, in order of their sources."""
        return tuple(e for e in self.edges if e.dst == stage)

    def out_of(self, stage: int) -> tuple[StageEdge, ...]:
        """The edges whose values the stage produces, in order of their destinations."""
        return tuple(e for e in self.edges if e.src == stage)


@dataclass(frozen=True)
class ModelOutline:
    """A model's layers as plain data, for code that may not import the user's: all that programs and state depend on."""

    layers: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    """(name, values it reads, values it writes) in execution order."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Tied parameters, each as a tuple of its qualified names."""
    elements: tuple[dict[str, int], ...] = ()
    """By layer: name -> number of elements, of its parameters (a tie under its first name), then of its buffers."""
    shardings: Mapping[int, Mapping[str, TensorCut]] = field(default_factory=dict)
    """Number of shards -> parameter -> how it is cut over them; a parameter without an entry is whole on every shard."""
    layouts: Mapping[int, TensorParallelLayout] = field(default_factory=dict)
    """Number of shards -> the layout for them: the shardings, the styles, and the collectives and costs of layers."""
    buffers: frozenset[str] = frozenset()
    """Names in `elements` that are buffers."""
    frozen: frozenset[str] = frozenset()
    """Names in `elements` of parameters that are not trained."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """Name of a parameter or buffer -> index of its layer, where the name does not begin with the layer's name."""

    def crossing(self, plan: ParallelPlan) -> StageConnections:
        """The connections between the stages of a plan of this model."""
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
        if parameter in self.owners:
            return self.owners[parameter]
        owners = [i for i, (name, _, _) in enumerate(self.layers) if parameter.startswith(name + ".")]
        return max(owners, key=lambda i: len(self.layers[i][0]))
