"""A model as layers: named layers that read named values and write named values, in the order they run.

Values that no layer writes are fields of the batch (`x`, `input_ids`, ...). Stages are consecutive layers; everything
that crosses between them (activations, skips, ties) follows from this description alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.initial_values_source_protocol import InitialValues
from raypar.plan.model_outline import ModelOutline
from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.stage_connections import LATER_USE, StageConnections

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


MadeModel: TypeAlias = "nn.Module | Graph | Sequence[nn.Module] | Sequence[tuple[str, nn.Module]]"
"""What a model function returns: a module, its layers in a row, with names or without, or their graph."""


def join_names(layer: str, path: str) -> str:
    """`<layer>.<path>`; of a whole model, which has no name, the path alone."""
    return f"{layer}.{path}" if layer and path else layer or path


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
    own_names: tuple[tuple[str, str], ...] | None = None
    """(path in the module, qualified name) of parameters, buffers and modules of a captured model, which keep the names that
    they have there; paths that are left out are qualified names. None: every qualified name is `<layer name>.<path>`."""

    def qualify(self, path: str) -> str:
        """Qualified name of the parameter, buffer or module at `path` in the layer's module; of the module itself for "".

        The module of a layer of a captured model stands for the whole model, which has no name.
        """
        if self.own_names is None:
            return join_names(self.name, path)
        kept = vars(self)  # beside the fields, which alone decide whether two layers are equal
        if "_own_names" not in kept:
            kept["_own_names"] = dict(self.own_names)
        name: str = kept["_own_names"].get(path, path)
        return name


ModelOutput: TypeAlias = (
    "Tensor | Mapping[str, ModelOutput] | Sequence[ModelOutput] | DataclassInstance | bool | int | float | str | bytes | None"
)
"""What a model returns, and a loss and metrics get: tensors, nested in dicts, tuples, lists and dataclasses, with settings."""


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
    init: Callable[[str, Tensor], None] | None = None
    """`init(name, tensor)` fills every parameter in place, torch's generator seeded by its name, instead of the builds."""
    aliases: tuple[tuple[str, str], ...] = ()
    """(another name, qualified name) of parameters and buffers of a captured model: its `state_dict` has both."""
    initial_values: InitialValues | None = field(default=None, compare=False, repr=False)
    """Set by raypar: the values of parameters and buffers, when builds return modules without any."""
    buffer_policy: BufferPolicy = "refuse"
    """Set by raypar, from the job: what becomes of buffers that forward writes."""
    outputs: tuple[str, ...] = ()
    """In the place of `output`: the values of which `rebuild_output` makes what is given to the loss."""
    rebuild_output: Callable[..., ModelOutput] | None = None
    """`rebuild_output(*values)` makes what is given to the loss (a tuple, a dict, an object) of the values of `outputs`. It
    runs where the loss does, and counts as a part of it."""
    batch_names: tuple[str, ...] = ()
    """Set by raypar: the fields of the batch with which a model was captured, also those that it does not read."""
    handed_on: tuple[str, ...] = ()
    """Set by raypar, where data is a stream: the fields of the batch, which the first stage alone reads and hands to the others
    as values. Empty: each stage reads the fields that its layers and the loss need."""
    handed_on_to_loss: tuple[str, ...] = ()
    """Those of `handed_on` that the loss and metrics read: the target, or all of them."""
    module_digest: str = field(default="", compare=False, repr=False)
    """Set by raypar: `digest_of_module` of what the model function returned; empty where it is not known."""

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
        init: Callable[[str, Tensor], None] | None = None,
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
        fields = dict.fromkeys((*self.batch_fields, *self.handed_on))
        return (*fields, *(v for layer in self.layers for v in layer.outputs))

    def with_fields_handed_on(self, of_loss: Sequence[str], *, measured: Sequence[str] = ()) -> Graph:
        """The graph for a stream, which is read once: its first stage reads all fields. `of_loss`: what the loss reads beside
        the output; `measured`: what metrics read beside it."""
        targets = tuple(name for name in of_loss if self.producer(name) is None)
        more = tuple(name for name in measured if self.producer(name) is None)
        fields = tuple(dict.fromkeys((*self.batch_fields, *targets, *more)))
        return replace(self, handed_on=fields, handed_on_to_loss=tuple(dict.fromkeys((*targets, *more))))

    @property
    def loss_inputs(self) -> tuple[str, ...]:
        """The values that the loss reads."""
        return self.outputs or (self.output,)

    def loss_of_values(
        self, loss: Callable[..., Tensor | tuple[Tensor, Tensor | float]]
    ) -> Callable[..., Tensor | tuple[Tensor, Tensor | float]]:
        """The function (a value for each of `loss_inputs`, target) -> loss, of a loss (output, target) -> loss. Weights come
        behind the target of both, where there are any."""
        rebuild, read = self.rebuild_output, len(self.loss_inputs)
        if rebuild is None:
            return loss

        def run(*given: Tensor) -> Tensor | tuple[Tensor, Tensor | float]:
            return loss(rebuild(*given[:read]), *given[read:])

        return run

    def producer(self, value: str) -> int | None:
        """Index of the layer that writes `value`; None for a batch field."""
        return next((i for i, layer in enumerate(self.layers) if value in layer.outputs), None)

    def consumers(self, value: str) -> tuple[int, ...]:
        """Indices of the layers that read `value`, ascending; the loss comes last, with the number of layers as its index."""
        layers = tuple(i for i, layer in enumerate(self.layers) if value in layer.inputs)
        of_loss = value in self.loss_inputs or value in self.handed_on_to_loss
        return (*layers, len(self.layers)) if of_loss else layers

    def reading_layers(self, value: str) -> tuple[int, ...]:
        """Indices of the layers in whose stages `value` is read: the loss runs in the stage of the last layer."""
        return tuple(min(i, len(self.layers) - 1) for i in self.consumers(value))

    def crossing(self, plan: ParallelPlan) -> StageConnections:
        """What crosses between the plan's stages: values by edge, and ties. For programs `make_model_outline` says more."""
        for name in (name for names in self.ties for name in names):
            self.layer_of(name)  # a tie of something that is no parameter is refused
        layers = tuple((x.name, x.inputs, x.outputs) for x in self.layers)
        return ModelOutline(
            layers,
            self.ties,
            loss_inputs=self.loss_inputs,
            owners=self.tensor_owners,
            handed_on=self.handed_on,
            handed_on_to_loss=self.handed_on_to_loss,
        ).crossing(plan)

    @property
    def tensor_owners(self) -> dict[str, int]:
        """Qualified name -> index of the first layer that has it, for names that do not begin with a layer's name."""
        kept = vars(self)  # beside the fields, which alone decide whether two graphs are equal
        if "_tensor_owners" not in kept:
            named = [(name, i) for i, layer in enumerate(self.layers) for _, name in layer.own_names or ()]
            kept["_tensor_owners"] = dict(reversed(named))
        found: dict[str, int] = kept["_tensor_owners"]
        return found

    @property
    def shared_names(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names of one parameter or buffer that users know: the name under which it is stored, then the others."""
        groups = {names[0]: [name for name in names if LATER_USE not in name] for names in self.ties}
        for other, name in self.aliases:
            groups.setdefault(name, [name]).append(other)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    def layer_of(self, parameter: str) -> str:
        """The layer that a qualified parameter name belongs to (layer names may contain dots)."""
        if parameter in self.tensor_owners:
            return self.layers[self.tensor_owners[parameter]].name
        owners = [x.name for x in self.layers if x.own_names is None and parameter.startswith(x.name + ".")]
        if not owners:
            raise ModelError(
                f"no layer owns parameter {parameter!r}",
                cure=f"parameter names start with a layer's name: {', '.join(layer.name for layer in self.layers[:8])}",
            )
        return max(owners, key=len)
