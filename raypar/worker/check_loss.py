"""Checks a loss before a run: what it returns, whether that has a gradient, and whether samples of a microbatch depend on each
other in it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from raypar.errors import DataError, ModelError, with_article
from raypar.job import Job
from raypar.model.capture.module_graph import fields_without_target
from raypar.model.graph import Graph
from raypar.model.random_state import preserve_random_state, seed_all
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS
from raypar.worker.stage.loss import make_loss_function, make_loss_of_output, wrong_losses

_CHECKED_SAMPLES, _CHECKED_PLACES = 4, 8
"""How many samples, and how many places of each (tokens), `check_sum_and_count` gives to the loss."""


def check_sum_and_count(spec: Job, graph: Graph, values: Mapping[str, Tensor], target: Tensor | None) -> None:
    """Raises `ModelError` for a loss that returns a pair other than (sum, count), such as (mean, accuracy).

    The loss is called with a few samples, with other outputs for them, and with all of them twice: the count must be the same,
    and then twice as large, as the sum must be. (A count of 1 is accepted too: all microbatches then weigh the same.) A loss
    that raises is left to the first step. `values`: on the meta device; `target`: the batch's field; None if a layer writes it.
    """
    outputs = [values[name] for name in graph.loss_inputs]
    if target is None or not target.dim() or not all(x.dim() and len(x) == len(target) and x.numel() for x in outputs):
        return
    shared = [all(x.dim() > dim and x.shape[dim] == size for x in outputs) for dim, size in enumerate(target.shape)]
    dims = len(shared) if all(shared) else shared.index(False)
    places = tuple(slice(_CHECKED_PLACES if dim else _CHECKED_SAMPLES) for dim in range(dims))
    target = target[places]
    with preserve_random_state(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first microbatch shows them
        wrong = [random_output(x[places].shape, x.dtype) for x in outputs]
        half_right = [move_half_to_target(x, target) for x in wrong]
        loss = graph.loss_of_values(make_loss_function(spec.loss))
        try:
            found = [loss(*wrong, target), loss(*half_right, target), loss(*(torch.cat([x, x]) for x in (*half_right, target)))]
            if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in found):
                return
            (_, other), (total, count), (total_of_twice, count_of_twice) = ((float(a), float(b)) for a, b in found)
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            return
    what = f"the loss {spec.loss.label} returned a pair whose"
    if other != count:
        raise ModelError(
            f"{what} second value depends on the model's output ({other:.6g} for one, {count:.6g} for another), so it is no "
            "count, by which the first value would be divided",
            cure="return the loss alone, or (sum, count): the sum over samples or tokens, and how many they are",
        )
    if not math.isclose(count_of_twice, 2 * count, rel_tol=1e-6) and (count, count_of_twice) != (1, 1):
        raise ModelError(
            f"{what} second value is {count:.6g} for {len(target)} samples and {count_of_twice:.6g} for the same samples "
            "twice, so it is no count, by which the first value would be divided",
            cure="return the loss alone, or (sum, count): the sum over samples or tokens, and how many they are",
        )
    if total and count_of_twice != count and math.isclose(total_of_twice, total, rel_tol=1e-4):
        raise ModelError(
            f"{what} first value is {total:.6g} for {len(target)} samples and for the same samples twice, so it is a mean, "
            "which would be divided by the second value, a count, once more",
            cure="return the mean alone, or the sum with the count (reduction='sum')",
        )


def check_weighted_losses(spec: Job, graph: Graph, values: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
    """Raises `ModelError` for a loss that returns something else than a value for each weight (`loss.sample_weight`). A loss
    that raises is left to the first step. `values`: on the meta device; `batch`: the first microbatch."""
    name = spec.loss.sample_weight
    assert name is not None
    if spec.loss_target_name not in batch:  # a layer writes it
        return
    outputs = [random_output(values[each].shape, values[each].dtype) for each in graph.loss_inputs]
    with preserve_random_state(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first microbatch shows them
        loss = graph.loss_of_values(make_loss_of_output(spec.loss))
        try:
            found = loss(*outputs, batch[spec.loss_target_name].clone())
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            return
    weights = batch[name]
    if not isinstance(found, Tensor) or found.shape != weights.shape:
        raise ModelError(*wrong_losses(found, spec.loss.label, weights))
    if not bool((weights >= 0).all()):
        raise DataError(
            f"field {name!r}, which loss.sample_weight names, has the weight {float(weights.min())}",
            cure="give finite weights >= 0; of a sample that does not count 0",
        )


def random_output(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A random output for a loss: numbers in (0, 1), which may be probabilities; zeros for an integer dtype."""
    return torch.rand(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def move_half_to_target(output: Tensor, target: Tensor) -> Tensor:
    """The output with half of its samples moved to their targets, where the two shapes show how; else unchanged."""
    moved, half = output.clone(), slice((len(output) + 1) // 2)
    if target.shape == output.shape:
        moved[half] = target[half].to(output.dtype)
    elif not target.is_floating_point() and target.dim() == output.dim() - 1:
        for classes in (1, -1):  # a class for each place; PyTorch's losses have the classes in dim 1, other code in the last
            if output.select(classes, 0).shape == target.shape and int(target.max()) < output.shape[classes]:
                moved[half].scatter_(classes, target[half].long().clamp(min=0).unsqueeze(classes), 1.0)
                break
    return moved


MOST_LOSS_NUMBERS = 1 << 20
"""Losses of larger outputs are not tried."""
_TOLERANCE = 1e-3
"""Largest change of a gradient, as a share of the largest gradient, that counts as none."""


def line_about_mixed_samples(spec: Job, graph: Graph, values: Mapping[str, Tensor], target: Tensor | None) -> str | None:
    """A line for the user if the loss mixes the samples of a microbatch; None if not, or if it cannot be tried.

    The loss is computed twice, with other outputs for the second half of the batch and the same targets. The gradients of the
    first half are the same both times unless the loss mixes samples. (Gradients are compared because the loss of one sample
    also changes where it is a mean over tokens that are not masked.) `values`: outputs on the meta device, for their shapes.
    """
    if spec.loss.is_loss_of_model or spec.microbatches == 1 or target is None or not target.dim():
        return None
    outputs, samples = [values[name] for name in graph.loss_inputs], len(target)
    if not all(x.dim() and len(x) == samples for x in outputs) or sum(x.numel() for x in outputs) > MOST_LOSS_NUMBERS:
        return None
    if samples < 2 or not any(x.is_floating_point() for x in outputs):
        return None
    half = samples // 2
    with preserve_random_state(), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first microbatch shows them
        seed_all(0)
        first, other = ([random_output(x.shape, x.dtype) for x in outputs] for _ in range(2))
        mixed = [torch.cat([a[:half], b[half:]]) for a, b in zip(first, other, strict=True)]
        try:
            weighted = spec.loss.sample_weight is not None
            loss = graph.loss_of_values(make_loss_of_output(spec.loss) if weighted else make_loss_function(spec.loss))
            one, two = (_gradients(loss, given, target) for given in (first, mixed))
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            return None
    largest = max((float(gradient.abs().max()) for gradient in one if gradient.numel()), default=0.0)
    change = max((float((a[:half] - b[:half]).abs().max()) for a, b in zip(one, two, strict=True) if a.numel()), default=0.0)
    if not change > _TOLERANCE * largest:
        return None
    return (
        f"the loss {spec.loss.label} compares the samples of a microbatch with each other (the gradient of one depends on the "
        f"outputs of others): it sees the {samples} samples of a microbatch, not the batch of {spec.batch_size}\n"
        "  cure: set microbatches to fewer, if it needs more samples at once"
    )


def _gradients(
    loss: Callable[..., Tensor | tuple[Tensor, Tensor | float]], outputs: Sequence[Tensor], target: Tensor
) -> list[Tensor]:
    """The gradients of the outputs."""
    seed_all(0)
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in outputs]
    found = loss(*leaves, target.clone())
    total = (found[0] if isinstance(found, tuple) else found).sum()  # of values for each weight, too
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(total, trained, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(trained, gradients, strict=True)]


def check_loss_of_microbatch(spec: Job, graph: Graph, values: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
    """Raises `DataError` for a target that the samples lack, `ModelError` for a loss that returns neither a scalar with a
    gradient nor (sum, count). A loss that raises is left to the first step, which has its own traceback.

    `values`: fields and values of layers, on the meta device; `batch`: the first microbatch.
    """
    target = spec.loss_target_name
    if target not in values:
        raise DataError(
            f"the loss reads field {target!r}, which the samples do not have",
            cure=f"choose data.target: one of {list(batch)}",
        )
    if spec.loss.sample_weight is None:
        check_sum_and_count(spec, graph, values, batch.get(target))
    else:
        check_weighted_losses(spec, graph, values, batch)
    beside = spec.loss_fields[1:]
    loss, read = graph.loss_of_values(make_loss_function(spec.loss)), [values[name] for name in graph.loss_inputs]
    called = _call_loss(loss, read, [values[target], *(values[name] for name in beside)])
    if called is None and target in batch and sum(tensor.numel() for tensor in read) <= MOST_LOSS_NUMBERS:  # it reads numbers
        with preserve_random_state():
            called = _call_loss(
                loss, [random_output(tensor.shape, tensor.dtype) for tensor in read], [batch[name] for name in spec.loss_fields]
            )
    if called is None:
        return  # if it is wrong, the first step says so with its own traceback
    found, trained = called
    total = found[0] if isinstance(found, tuple) and len(found) == 2 else found
    if total is None and (given := fields_without_target(graph, target)) is not None:
        raise ModelError(
            f"the loss {spec.loss.label} returned None: the forward of the model was given {', '.join(given)}, and not "
            f"{target!r}, although it has a parameter of that name, so what it returns has no loss",
            cure=f"set loss: model, with which forward is given {target!r} and its own loss is taken; or compute the loss "
            "of the output and the target",
        )
    number = isinstance(total, (int, float)) or type(total).__module__ == "numpy"
    if number or (isinstance(total, Tensor) and total.numel() == 1 and trained and total.grad_fn is None):
        kind = (
            "a tensor that does not depend on the output" if isinstance(total, Tensor) else with_article(type(total).__name__)
        )
        raise ModelError(
            f"the loss {spec.loss.label} returned {kind}: without a gradient nothing would be trained",
            cure="return the tensor that is computed from the output, by differentiable operations: no .item(), no float(), no "
            "detach(), no numpy, no torch.no_grad()",
        )
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else with_article(type(total).__name__)
        shape = "None" if total is None else shape
        raise ModelError(
            f"the loss {spec.loss.label} returned {shape}, not a scalar", cure="return a scalar, or (sum, count) as scalars"
        )
    if isinstance(found, tuple) and len(found) == 2 and not isinstance(found[1], (int, float, Tensor)):
        raise ModelError(
            f"the loss {spec.loss.label} returned a pair whose second value is {with_article(type(found[1]).__name__)}, and it "
            "is the count by which the first is divided",
            cure="return the loss alone, or (sum, count): the sum over samples or tokens, and how many they are",
        )


def _call_loss(
    loss: Callable[..., Tensor | tuple[Tensor, Tensor | float]], read: Sequence[Tensor], beside: Sequence[Tensor]
) -> tuple[Tensor | tuple[Tensor, Tensor | float], bool] | None:
    """(what the loss returns for outputs like these, whether they require gradients); None if it raises."""
    given = [tensor.detach().requires_grad_(tensor.is_floating_point()).clone() for tensor in read]
    try:
        with torch.enable_grad(), meta_operations_without_dynamo(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first microbatch shows them
            return loss(*given, *(tensor.clone() for tensor in beside)), any(tensor.requires_grad for tensor in given)
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        return None
