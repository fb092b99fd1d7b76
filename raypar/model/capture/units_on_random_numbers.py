"""Runs a unit that branches on values on small random numbers, to learn the shapes of its results, and counts its gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from raypar.errors import error_message
from raypar.model.capture.memoryless_tensor import MemorylessTensor, ValuesNeeded, memoryless_like, random_like
from raypar.model.capture.refusal import Refused, user_location
from raypar.model.capture.tensors_in_values import flatten
from raypar.torch_compat.dispatch import without_dispatch_modes, without_torch_function
from raypar.torch_compat.pytree import tree_flatten, tree_map, tree_unflatten

R = TypeVar("R")


@dataclass
class UnitsOnRandomNumbers:
    """Units that a recording ran on random numbers. Autograd's graph of the recording does not pass through them."""

    parts: Counter[int] = field(default_factory=Counter)
    """`id` of a parameter -> number of gradients that autograd would sum for its uses in these units."""
    most_of_call: Counter[int] = field(default_factory=Counter)
    """`id` of a parameter -> the most of these gradients in one call of any unit, on random numbers or not."""
    arguments: list[Any] = field(default_factory=list)
    """All arguments of these units, at which the graph of what comes before them ends."""
    has_fused: bool = False
    """Whether the dtypes of a unit were looked for that one fused operation computes in evaluation."""

    def gradient_parts(self, model: nn.Module, outputs: Iterable[Tensor | None]) -> dict[str, int]:
        """Parameter's name -> number of gradients that autograd sums for it in a backward pass from the model's outputs."""
        parts = self.parts + count_gradient_parts((*outputs, *self.arguments))
        return {name: parts[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in parts}

    def most_parts_of_call(self, model: nn.Module) -> dict[str, int]:
        """Parameter's name -> the most gradients that autograd sums for it in one call of a unit."""
        return {name: self.most_of_call[id(parameter)] for name, parameter in model.named_parameters()}


def graph_nodes(values: Iterable[object]) -> set[Any]:
    """The nodes of autograd's graph that made the tensors among these values."""
    return {value.grad_fn for value in values if isinstance(value, Tensor) and value.grad_fn is not None}


def count_gradient_parts(roots: Iterable[object], before: Iterable[Any] = ()) -> Counter[int]:
    """`id` of a leaf -> number of gradients that a backward pass from these tensors sums for it. `before`: nodes of the graph
    at which the pass ends."""
    found = Counter[int]()
    pending: list[Any] = [*graph_nodes(roots)]
    seen = set(before)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if type(following).__name__ == "AccumulateGrad":
                found[id(following.variable)] += 1
            elif following is not None:
                pending.append(following)
    return found


def run_with_random_values(
    name: str, module: nn.Module, call: Callable[..., R], args: Any, kwargs: Any, parts: Counter[int]
) -> R:
    """What the unit returns, with memoryless tensors in the place of the results.

    It runs twice, on other numbers. Adds to `parts` how many gradients autograd adds up for each of its parameters, by `id`.
    Raises `Refused` if the shapes of its results depend on the numbers.
    """
    found = [_run(seed, name, module, call, args, kwargs, parts if seed == 1 else Counter()) for seed in (1, 2)]
    first, second = ([_shape_or_number(value) for value in flatten(out)[0]] for out in found)
    if first != second:
        raise Refused(
            f"the shape of what {name} ({type(module).__name__}) returns, or a number in it, depends on values: {first} and "
            f"{second}, called at {user_location()}",
            "have it return tensors of fixed shapes, or name a module around it in model.units",
        )
    given = {id(value) for value in tree_flatten((args, kwargs))[0]}  # that are returned as they are: sizes of packed sequences
    absent: R = tree_map(
        lambda value: memoryless_like(value) if isinstance(value, Tensor) and id(value) not in given else value, found[0]
    )
    return absent


FUSED_IN_EVALUATION = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
"""Modules of PyTorch that call one fused operation in evaluation without gradients, unless functions are watched."""


def is_fused_in_evaluation(module: nn.Module) -> bool:
    """Whether PyTorch may compute the unit, or a part of it, by one fused operation in evaluation."""
    return any(isinstance(part, FUSED_IN_EVALUATION) for part in module.modules())


def with_dtypes_of_fused(name: str, module: nn.Module, call: Callable[..., R], args: Any, kwargs: Any, out: R) -> R:
    """What a unit returned in evaluation mode, `out`, with the dtypes that it has outside of a recording: fused operations
    return autocast's where the same module returns float32 in training."""
    with without_torch_function(), without_dispatch_modes():
        found = tree_flatten(run_with_random_values(name, module, call, args, kwargs, Counter()))[0]
    leaves, structure = tree_flatten(out)
    dtypes = iter([value.dtype for value in found if isinstance(value, Tensor)])
    made: R = tree_unflatten([value.to(next(dtypes)) if isinstance(value, Tensor) else value for value in leaves], structure)
    return made


def _shape_or_number(value: Any) -> Hashable | type:
    """What two runs must have in common: a tensor's shape, a number or text, the class of anything else."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return value if isinstance(value, (int, float, complex, str)) else type(value)


def _run(seed: int, name: str, module: nn.Module, call: Callable[..., R], args: Any, kwargs: Any, parts: Counter[int]) -> R:
    generator = torch.Generator().manual_seed(seed)

    def real(value: Tensor) -> Tensor:
        return random_like(value, generator) if isinstance(value, MemorylessTensor) else value

    kept = [(part, key, p) for part in module.modules() for key, p in part._parameters.items() if p is not None]
    made = {id(p): nn.Parameter(real(p.detach()), requires_grad=p.requires_grad) for _, _, p in kept}
    for own, parameter in ((made[id(p)], p) for _, _, p in kept):
        vars(own).update({key: value for key, value in vars(parameter).items() if key != "meta"})
    try:
        for part, key, parameter in kept:
            part._parameters[key] = made[id(parameter)]
        out = call(module, *tree_map(real, args), **tree_map(real, kwargs))
        counted = count_gradient_parts(flatten(out)[0])
        parts.update({key: counted[id(own)] for key, own in made.items() if id(own) in counted})
        return out
    except ValuesNeeded as error:
        raise Refused(
            f"unit {name} ({type(module).__name__}), called at {user_location()}, reads values that the capture has not got: "
            f"{error_message(error)}",
            "register every tensor that it reads as a parameter or buffer",
        ) from error
    finally:
        for part, key, parameter in kept:
            part._parameters[key] = parameter
