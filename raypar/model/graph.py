"""A model as layers: named layers that read named values and write named values, in the order they run.

Values that no layer writes are fields of the batch (`x`, `input_ids`, ...). Stages are consecutive layers; everything
that crosses between them (activations, skips, ties) follows from this description alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from raypar.errors import ModelError
from raypar.model.initial_values_protocol import InitialValues
from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.stage_connections import ModelOutline, StageConnections

BufferPolicy = Literal["refuse", "last", "sum"]
"""What becomes of buffers that forward writes in training, those of norms with running statistics apart. `refuse`: an error.
`last`: the value of the last microbatch that has written it. `sum`: what each microbatch has added. Each microbatch begins with
the value of the step's beginning."""


@dataclass(frozen=True)
class Layer:
    """One layer. `build()` makes its module, with the values that it begins with.

    `inputs`: values passed to the module's forward, in order; `outputs`: names of what it returns (a tensor, or a tuple).
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("x",)


@dataclass(frozen=True)
class Graph:
    """Layers in execution order, with what connects them.

    Builds run in layer order and draw from the model function's random stream; the values that they give parameters are kept.
    """

    layers: tuple[Layer, ...]
    output: str = ""
    """The value given to the loss; empty if `outputs` are given."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Tuples of qualified parameter names (`layer.path.weight`) that are one parameter, stored under the first name."""
    init: Callable[[str, object], None] | None = None
    """`init(name, tensor)` fills every parameter in place, torch's generator seeded by its name, instead of the builds."""
    initial_values: InitialValues | None = field(default=None, compare=False, repr=False)
    """Set by raypar: the values of parameters and buffers, when builds return modules without any."""
    buffer_policy: BufferPolicy = "refuse"
    """Set by raypar, from the job: what becomes of buffers that forward writes."""
    outputs: tuple[str, ...] = ()
    """In the place of `output`: the values of which `rebuild_output` makes what is given to the loss."""
    rebuild_output: Callable[..., Any] | None = None
    """`rebuild_output(*values)` makes what is given to the loss (a tuple, a dict, an object) of the values of `outputs`. It
    runs where the loss does, and counts as a part of it."""

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if not names:
            raise ModelError("the model has no layers", cure="return at least one layer from the model function")
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ModelError(f"layer names are used twice: {', '.join(twice)}", cure="give every layer a name of its own")
        fields = set(self.batch_fields)
        written: set[str] = set()
        for layer in self.layers:
            early = [value for value in layer.inputs if value not in fields | written]
            if early:
                raise ModelError(
                    f"layer {layer.name!r} reads {early[0]!r}, which is written by itself or by a later layer",
                    cure="put the layers in the order they run, and give what a layer writes another name than what it reads",
                )
            again = written & set(layer.outputs)
            if again:
                raise ModelError(
                    f"value {sorted(again)[0]!r} is written by {layer.name!r} and by an earlier layer",
                    cure="give every value a name of its own",
                )
            written |= set(layer.outputs)
        self._check_outputs(written)

    def _check_outputs(self, written: set[str]) -> None:
        """Raises `ModelError` for outputs that do not say what the loss gets. `written`: the values that layers write."""
        if bool(self.output) == bool(self.outputs) or bool(self.outputs) != (self.rebuild_output is not None):
            raise ModelError(
                f"output is {self.output!r}, outputs are {self.outputs}, rebuild_output is {self.rebuild_output!r}",
                cure="give output, the value that the loss gets, or outputs and rebuild_output, which makes it of them",
            )
        unknown = [value for value in self.loss_inputs if value not in written]
        if unknown:
            raise ModelError(
                f"the output {unknown[0]!r} is written by no layer",
                cure=f"choose values that layers write, such as {', '.join(sorted(self.layers[-1].outputs))}",
            )

    @staticmethod
    def sequential(
        layers: Sequence[tuple[str, Callable[[], nn.Module]]],
        *,
        input: str,
        init: Callable[[str, object], None] | None = None,
        ties: tuple[tuple[str, ...], ...] = (),
    ) -> Graph:
        """A chain: each layer reads the value its predecessor wrote; the first reads the batch field `input`."""
        values = [input, *(f"{name}.out" for name, _ in layers)]
        return Graph(
            tuple(Layer(name, build, (values[i],), (values[i + 1],)) for i, (name, build) in enumerate(layers)),
            output=values[-1],
            init=init,
            ties=ties,
        )

    @property
    def batch_fields(self) -> tuple[str, ...]:
        """Batch fields read by layers, in order of first use."""
        written = {v for layer in self.layers for v in layer.outputs}
        return tuple(dict.fromkeys(v for layer in self.layers for v in layer.inputs if v not in written))

    @property
    def values(self) -> tuple[str, ...]:
        """All values, batch fields first, then in the order they are written."""
        return (*self.batch_fields, *(v for layer in self.layers for v in layer.outputs))

    @property
    def loss_inputs(self) -> tuple[str, ...]:
        """The values that the loss reads."""
        return self.outputs or (self.output,)

    def loss_of_values(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The function (a value for each of `loss_inputs`, target) -> loss, of a loss (output, target) -> loss."""
        rebuild = self.rebuild_output
        if rebuild is None:
            return loss

        def run(*given: Any) -> Any:
            *values, target = given
            return loss(rebuild(*values), target)

        return run

    def producer(self, value: str) -> int | None:
        """Index of the layer that writes `value`; None for a batch field."""
        return next((i for i, layer in enumerate(self.layers) if value in layer.outputs), None)

    def consumers(self, value: str) -> tuple[int, ...]:
        """Indices of the layers that read `value`, ascending; the loss comes last, with the number of layers as its index."""
        layers = tuple(i for i, layer in enumerate(self.layers) if value in layer.inputs)
        return (*layers, len(self.layers)) if value in self.loss_inputs else layers

    def reading_layers(self, value: str) -> tuple[int, ...]:
        """Indices of the layers in whose stages `value` is read: the loss runs in the stage of the last layer."""
        return tuple(min(i, len(self.layers) - 1) for i in self.consumers(value))

    def crossing(self, plan: ParallelPlan) -> StageConnections:
        """What crosses between the plan's stages: values by edge, and ties. For programs `make_model_outline` says more."""
        for name in (name for names in self.ties for name in names):
            self.layer_of(name)  # a tie of something that is no parameter is refused
        layers = tuple((x.name, x.inputs, x.outputs) for x in self.layers)
        return ModelOutline(layers, self.ties, loss_inputs=self.loss_inputs).crossing(plan)

    def layer_of(self, parameter: str) -> str:
        """The layer that a qualified parameter name belongs to (layer names may contain dots)."""
        owners = [layer.name for layer in self.layers if parameter.startswith(layer.name + ".")]
        if not owners:
            raise ModelError(
                f"no layer owns parameter {parameter!r}",
                cure=f"parameter names start with a layer's name: {', '.join(layer.name for layer in self.layers[:8])}",
            )
        return max(owners, key=len)
