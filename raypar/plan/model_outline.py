"""What a plan needs to know of a model, as plain data: its layers, their connections and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.stage_connections import StageConnections, StageEdge, TiedParameter
from raypar.plan.tensor_parallel_layout import TensorParallelLayout


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
    undivided: frozenset[str] = frozenset()
    """Names in `elements` of parameters that one owner keeps whole where replicas divide state, as their optimizer needs."""
    writes_buffers: frozenset[int] = frozenset()
    """Indices of the layers whose forward may write buffers."""
    loss_inputs: tuple[str, ...] = ()
    """Values that the loss reads: the model's output, or those of which it is rebuilt."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """Name of a parameter or buffer -> index of its layer, where the name does not begin with the layer's name."""
    handed_on: tuple[str, ...] = ()
    """Fields of the batch that only the first stage reads, and hands to the others (`Graph.handed_on`)."""
    handed_on_to_loss: tuple[str, ...] = ()
    """Those of them that the loss and metrics read, in the last stage."""

    def crossing(self, plan: ParallelPlan) -> StageConnections:
        """The connections between the stages of a plan of this model. The loss is a consumer in the last stage."""
        stage_of = {i: s for s, stage in enumerate(plan.stages) for i in range(stage.first, stage.last)}
        readers: dict[str, set[int]] = {value: {len(plan.stages) - 1} for value in self.loss_inputs}
        for index, (_, inputs, _) in enumerate(self.layers):
            for value in inputs:
                readers.setdefault(value, set()).add(stage_of[index])
        for value in self.handed_on_to_loss:
            readers.setdefault(value, set()).add(len(plan.stages) - 1)
        values: dict[tuple[int, int], list[str]] = {}
        for value in self.handed_on:
            for dst in sorted(readers.get(value, set()) - {0}):
                values.setdefault((0, dst), []).append(value)
        for index, (_, _, outputs) in enumerate(self.layers):
            for value in outputs:
                for dst in sorted(readers.get(value, set()) - {stage_of[index]}):
                    values.setdefault((stage_of[index], dst), []).append(value)
        ties = []
        for names in self.ties:
            stages = sorted({stage_of[self.layer_of(name)] for name in names})
            if len(stages) > 1:
                ties.append(TiedParameter(names[0], tuple(stages)))
        writing = {stage_of[index] for index in self.writes_buffers}
        return StageConnections(
            tuple(
                StageEdge(src, dst, tuple(v), without_gradient=tuple(x for x in v if x in self.handed_on))
                for (src, dst), v in sorted(values.items())
            ),
            tuple(ties),
            tuple(stage for stage in sorted(writing) if plan.stages[stage].replicas > 1),
        )

    def layer_of(self, parameter: str) -> int:
        """Index of the layer that a qualified parameter name belongs to (layer names may contain dots)."""
        if parameter in self.owners:
            return self.owners[parameter]
        owners = [i for i, (name, _, _) in enumerate(self.layers) if parameter.startswith(name + ".")]
        return max(owners, key=lambda i: len(self.layers[i][0]))
