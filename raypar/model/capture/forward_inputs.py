"""How the fields of a batch reach the forward of a model."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from raypar.errors import ModelError, with_article
from raypar.model.capture.refusal import Refused
from raypar.model.graph import ModelOutput


@dataclass(frozen=True)
class ForwardInputs:
    """Which fields of the batch a model's forward is given, and how."""

    positional: tuple[str, ...] = ()
    """Fields that are passed as positional arguments."""
    keywords: tuple[str, ...] = ()
    """Fields that are passed as keyword arguments: they have the names of parameters of forward."""
    wants_loss: bool = False
    """Whether the model computes the loss itself: it is in what the model returns."""
    wants_output: bool = True
    """Whether all that it returns is used; else, of a model that computes the loss, only that."""

    @property
    def fields(self) -> tuple[str, ...]:
        """All of them."""
        return self.positional + self.keywords

    def call(self, model: nn.Module, fields: Mapping[str, Tensor]) -> ModelOutput:
        """What the model returns for a batch, or only the loss in it. Raises `Refused` if it should be there, and is not."""
        out: ModelOutput = model(*(fields[name] for name in self.positional), **{name: fields[name] for name in self.keywords})
        if not self.wants_loss:
            return out
        loss = loss_in(out)
        if not isinstance(loss, Tensor):
            raise Refused(
                f"loss: model, and what {type(model).__name__} returned has no loss, but is "
                f"{with_article(type(out).__name__)}, for the fields {', '.join(self.fields)}",
                "have samples with the labels that its forward takes, or give a loss function of (output, target)",
            )
        return out if self.wants_output else loss


def loss_in(output: ModelOutput) -> ModelOutput:
    """The loss in what a model returns; None if there is none."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def choose_forward_inputs(
    model: nn.Module, fields: Collection[str], *, input: str, target: str, wants_loss: bool, wants_output: bool = True
) -> ForwardInputs:
    """The fields that the forward is given: those that have names of its parameters, all for `forward(self, **fields)`; else
    `input`, as a positional argument.

    The field `target` is for the loss. The forward gets it too if it computes the loss (`wants_loss`), or cannot be called
    without. Raises `ModelError` if no field fits, or a parameter of forward gets none.
    """
    signature = inspect.signature(model.forward).parameters
    parameters = {
        name: parameter
        for name, parameter in signature.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if not parameters and any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature.values()):
        return ForwardInputs((), tuple(name for name in fields if name != target or wants_loss), wants_loss, wants_output)
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    keywords = [name for name in parameters if name in fields and (name != target or wants_loss or name in needed)]
    positional = [input] if input in fields and input not in keywords and input != target else []
    without = [name for name in parameters if name in needed and name not in keywords][len(positional) :]
    if without or not (positional or keywords):
        missing = f"gets no {without[0]!r}" if without else "gets none of them"
        raise ModelError(
            f"the forward of {type(model).__name__} has parameters {', '.join(parameters) or 'none'}, and a sample has fields "
            f"{', '.join(fields)}: it {missing}",
            cure="name the fields as forward's parameters (data.names for tuples), or say which one is the input (data.input)",
        )
    return ForwardInputs(tuple(positional), tuple(keywords), wants_loss, wants_output)
