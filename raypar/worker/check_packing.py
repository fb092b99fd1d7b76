"""Looks on numbers, before a run, whether a model keeps the documents of a packed row apart (`data.pack`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from raypar.errors import ConfigError, ModelError
from raypar.job import Job
from raypar.model.graph import ModelOutput
from raypar.torch_compat.pytree import tree_flatten
from raypar.worker.data.packing import CU_SEQLENS, DOCUMENTS, POSITIONS, Packing, cumulative_lengths
from raypar.worker.data.padding import MASKED_LABEL

LARGEST_DIFFERENCE = 1e-8
"""As a share of the largest number. Shapes and kernels are the same, and what is masked is multiplied by 0: there is none."""


def packing_of(spec: Job) -> Packing | None:
    """How the job packs documents; None if it does not."""
    data = spec.training_data
    if data.pack is None:
        return None
    assert data.target is not None, "Job.training_data names it"
    return Packing(data.pack, data.target, data.names)


def check_documents_apart(
    packing: Packing,
    batch: Mapping[str, Tensor],
    output: Callable[[Mapping[str, Tensor]], ModelOutput],
    *,
    label: str,
    is_loss: bool = False,
) -> str | None:
    """Raises `ModelError` if the output for one document of a row depends on the words of another.

    The rows of the batch are taken as two documents, of which one gets other words. `output`: calls the model; `label`: its
    name; `is_loss`: whether it gives its own loss, a mean over the labels, which then are those of the other document only.

    Returns why nothing was compared, if so: the output has no numbers for each word, or no loss.
    """
    halves, half = _as_two_documents(batch, packing), packing.config.to // 2
    compared = False
    for changed, other in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
        given = dict(halves)
        if is_loss:
            labels = given[packing.target] = halves[packing.target].clone()
            labels[:, changed] = labels[:, (other.start or 0)] = MASKED_LABEL
        with torch.no_grad():
            one, two = (
                _of_document(output(each), other, None if is_loss else batch[packing.target].shape[:2])
                for each in (given, _with_other_words(given, packing, changed))
            )
        for usual, found in zip(one, two, strict=True):
            if (change := _largest_change(usual, found)) is None:
                continue
            compared = True
            difference, largest = change
            if not difference <= LARGEST_DIFFERENCE * largest:
                raise ModelError(
                    f"data.pack: what {label} makes of one document of a row depends on the words of another: other words "
                    f"there change it by {difference:.3g}, where its largest number is {largest:.3g}",
                    cure=f"let its attention stay within documents: by {POSITIONS}, which begin at 0 in each (causal language "
                    f"models of transformers do so, with sdpa or eager attention), by {DOCUMENTS}, {CU_SEQLENS} or "
                    "data.pack.mask; or use data.pad",
                )
    shape = "a loss that is a number" if is_loss else "floating-point numbers for each word of a row, [rows, length, ...]"
    return None if compared else f"what {label} returns does not have {shape}"


def line_about_documents(why: str) -> str:
    """The line for the user where `check_documents_apart` has compared nothing."""
    return (
        f"data.pack: whether the model keeps the documents of a row apart was not looked at: {why}\n"
        "  cure: compare once its outputs for a row of two documents with those for each of them by itself, or use data.pad"
    )


def check_first_label(
    spec: Job, packing: Packing, batch: Mapping[str, Tensor], loss: Callable[[Mapping[str, Tensor]], float]
) -> None:
    """Raises `ConfigError` if the job's loss leaves out the first label of each row, and `first_label` is `keep`: so it
    compares each word with the next one, also with that of the next document. `loss`: the loss of a batch."""
    labels = batch[packing.target]
    valid = labels[labels != MASKED_LABEL]
    if packing.config.first_label != "keep" or labels.is_floating_point() or len(valid) < 2 or labels.shape[1] < 2:
        return
    values = []
    for first in (int(valid[0]), MASKED_LABEL):
        changed = labels.clone()
        changed[:, 0] = first
        with torch.no_grad():
            values.append(loss({**batch, packing.target: changed}))
    if values[0] == values[1] and values[0] == values[0]:
        raise ConfigError(
            f"data.pack.first_label is keep, and the loss {spec.loss.label} leaves out the first label of each row: it "
            "compares each word with the next one, which may be another document's",
            cure="set data.pack.first_label: mask",
        )


def _as_two_documents(batch: Mapping[str, Tensor], packing: Packing) -> dict[str, Tensor]:
    """The batch with rows of two documents, each half a row long."""
    length = packing.config.to
    half = length // 2
    places = torch.arange(length)
    documents = (places >= half).long()
    made = {POSITIONS: places - half * documents, DOCUMENTS: documents}
    found = dict(batch)
    for name, value in made.items():
        if name in batch:
            found[name] = value.expand_as(batch[name]).contiguous()
    if CU_SEQLENS in batch:
        rows = int(batch[CU_SEQLENS][-1]) // length
        found[CU_SEQLENS] = cumulative_lengths([[half]] * rows, length, max(rows, len(batch[CU_SEQLENS]) - rows - 1))
    if packing.config.mask in batch:
        assert packing.config.mask is not None
        within = documents[:, None] == documents[None, :]
        found[packing.config.mask] = within.expand_as(batch[packing.config.mask]).contiguous()
    return found


def _with_other_words(batch: Mapping[str, Tensor], packing: Packing, where: slice) -> dict[str, Tensor]:
    """The batch with the words of a part of each row in another order, and taken from other rows."""
    changed = dict(batch)
    for name, value in batch.items():
        if name not in (*packing.made_fields, packing.target) and value.dim() > 1 and value.shape[1] == packing.config.to:
            changed[name] = value.clone()
            changed[name][:, where] = value[:, where].flip(1).roll(1, 0)
    return changed


def _largest_change(usual: Tensor, found: Tensor) -> tuple[float, float] | None:
    """(the largest difference, the largest finite number of `usual`) of two tensors of one shape; None without a number."""
    known = ~(usual.isnan() & found.isnan())
    if not bool(known.any()):
        return None
    usual, found = usual[known], found[known]
    change = torch.where(usual == found, 0.0, (usual - found).abs())  # of equal infinities it would be NaN
    return float(change.max()), float(usual.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _of_document(output: ModelOutput, words: slice, shape: torch.Size | None) -> list[Tensor]:
    """The numbers that an output has for these words of each row; of a loss (`shape` is None) the loss.

    `shape`: [rows, length]; tensors that do not begin so are left out.
    """
    leaves = tree_flatten(output)[0] if not isinstance(output, Tensor) else [output]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if shape is None:
        return [loss for loss in tensors if loss.dim() == 0]
    return [leaf[:, words] for leaf in tensors if leaf.shape[:2] == shape]
