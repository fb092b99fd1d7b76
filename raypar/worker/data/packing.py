"""Packs documents of unequal length into rows of one length: `data.pack` (rule 1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.errors import ConfigError, DataError
from raypar.job import PackConfig, PadConfig
from raypar.worker.data.padding import MASKED_LABEL, UNSIGNED, Padding, no_memory_named
from raypar.worker.data.sample_order import SamplePosition

POSITIONS, DOCUMENTS = "position_ids", "document_ids"
"""Fields of packed batches [rows, length]: each word's place in its document, and the document's number in its row."""
CU_SEQLENS = "cu_seqlens"
"""A field of packed batches, int32 [samples + rows + 1]: where documents begin and end in all rows behind each other, as
attention of variable length takes it (`torch.nn.attention.varlen`, flash attention). The end of a row that has no document
counts as one. Documents that are not there have no length: what is left holds rows x length."""
PADDING_MASK = "attention_mask"
"""A field of samples that tokenizers make; packed batches do not have it, for there is nothing to mask in a document."""
NO_DOCUMENT = -1
"""The number in `DOCUMENTS` of places without a document."""


def first_fit_decreasing(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The documents of each row, by first fit decreasing: the longest first, equal ones in their order, each into the first row
    that has room for it. `room`: length of a row."""
    rows: list[list[int]] = []
    left: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        row = next((row for row, free in enumerate(left) if free >= lengths[document]), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(room)
        rows[row].append(document)
        left[row] -= lengths[document]
    return rows


@dataclass(frozen=True)
class Packing:
    """Packs the samples of a microbatch, each a document, into its rows."""

    config: PackConfig
    """The job's `data.pack`."""
    target: str
    """The field that the loss gets as its target: its padding is `MASKED_LABEL`."""
    names: tuple[str, ...] = ()
    """Names of the fields of tuple samples."""

    @property
    def padding(self) -> Padding:
        """How the end of a row is filled; it refuses documents that are too long."""
        pad = PadConfig(to=(self.config.to,), fields=self.config.fields, value=self.config.value)
        return Padding(pad, self.target, self.names, key="pack")

    @property
    def made_fields(self) -> tuple[str, ...]:
        """The fields that tell documents apart."""
        return (POSITIONS, DOCUMENTS, CU_SEQLENS, *((self.config.mask,) if self.config.mask else ()))

    def packs(self, name: str, value: Tensor) -> bool:
        """Whether a field of a sample is packed."""
        if self.config.fields:
            return name in self.config.fields
        return value.dim() > 0 and name not in (PADDING_MASK, self.config.mask)

    def batch_names(self, sample: Mapping[str, Tensor]) -> tuple[str, ...]:
        """The fields of a packed batch of such samples."""
        return tuple(dict.fromkeys([*(name for name, value in sample.items() if self.packs(name, value)), *self.made_fields]))

    def batch(
        self, samples: Sequence[Mapping[str, Tensor]], wanted: Collection[str], places: Sequence[SamplePosition]
    ) -> dict[str, Tensor]:
        """The fields asked for as [rows, length, ...], in fresh memory. `samples`: field -> value [length, ...].

        Raises `DataError` for documents that are too long, whose fields have several lengths, or that are padded.
        """
        lengths = [self._length(sample, index) for sample, (_, index) in zip(samples, places, strict=True)]
        self._refuse_field_in_place_of_mask(samples[0])
        rows = first_fit_decreasing(lengths, self.config.to)
        found = {}
        for name in wanted:
            if name in samples[0] and self.packs(name, samples[0][name]):
                found[name] = self._packed(name, _column(name, samples, places), lengths, rows, places)
            elif name in self.made_fields:
                found[name] = self._made(name, lengths, rows)
            else:
                raise DataError(
                    f"a batch of packed samples has no field {name!r}, only {', '.join(self.batch_names(samples[0]))}",
                    cure="a row has several samples: pack a field with a value for each word, and name it in data.pack.fields, "
                    "if these are given",
                )
        return found

    def _length(self, sample: Mapping[str, Tensor], index: int) -> int:
        """The length of a sample's packed fields."""
        packed = {name: value for name, value in sample.items() if self.packs(name, value)}
        if number := next((name for name, value in packed.items() if not value.dim()), None):
            raise DataError(
                f"sample {index}: its field {number!r} is one number, and data.pack.fields names it",
                cure="give it a value for each word, or leave it out of data.pack.fields",
            )
        lengths = {name: len(value) for name, value in packed.items()}
        if not lengths:
            raise DataError(
                f"sample {index} has no field with a length to be packed", cure="name the packed fields in data.pack.fields"
            )
        (name, length), *others = lengths.items()
        if odd := next(((other, size) for other, size in others if size != length), None):
            raise DataError(
                f"sample {index}: its field {odd[0]!r} has length {odd[1]:,}, and {name!r} has {length:,}",
                cure="give the fields of a document one length, or name those that are packed in data.pack.fields",
            )
        if length > self.config.to:
            raise self.padding.error_of_ladder(name, index, length)
        mask = sample.get(PADDING_MASK)
        if mask is not None and not self.packs(PADDING_MASK, mask) and not bool(mask.all()):
            raise DataError(
                f"sample {index} is padded: its field {PADDING_MASK!r} has zeros",
                cure="give samples without padding (of a tokenizer: padding=False): rows are filled with other documents",
            )
        return length

    def _packed(
        self,
        name: str,
        column: Sequence[Tensor],
        lengths: Sequence[int],
        rows: Sequence[Sequence[int]],
        places: Sequence[SamplePosition],
    ) -> Tensor:
        """A field of the samples in their rows."""
        first = column[0]
        for value, length, (epoch, index) in zip(column, lengths, places, strict=True):
            same_kind = value.shape[1:] == first.shape[1:] and value.dtype == first.dtype
            if value.dim() == 0 or len(value) != length or not same_kind:
                raise DataError(
                    f"sample {index} (epoch {epoch}), field {name!r}: expected a length, then {list(first.shape[1:])} "
                    f"{first.dtype}, as in sample {places[0][1]}, found {list(value.shape)} {value.dtype}",
                    cure="data.pack joins the first dimension only: give every sample the same others, and the same dtype",
                )
        shape = (self._count(rows), self.config.to, *first.shape[1:])
        with no_memory_named(name, shape, first.dtype, "pack"):
            made = first.new_full(shape, self.padding.value(name, first.dtype))
        masked = name == self.target and self.config.first_label == "mask"
        if masked and first.dtype in UNSIGNED:
            raise DataError(
                f"data.pack.first_label is mask, and the target {name!r} ({first.dtype}) cannot have {MASKED_LABEL}",
                cure="give labels as int64",
            )
        for row, documents in zip(made, rows, strict=False):  # rows beyond have no documents
            start = 0
            for document in documents:
                row[start : start + lengths[document]] = column[document]
                if masked and lengths[document]:
                    row[start] = MASKED_LABEL
                start += lengths[document]
        return made

    def _made(self, name: str, lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor:
        """A field that tells documents apart."""
        if name == CU_SEQLENS:
            by_row = [[lengths[document] for document in documents] for documents in rows]
            by_row += [[]] * (self._count(rows) - len(rows))
            return cumulative_lengths(by_row, self.config.to, len(lengths))
        shape = self._count(rows), self.config.to
        with no_memory_named(name, shape, torch.int64, "pack"):
            made = torch.full(shape, 0 if name == POSITIONS else NO_DOCUMENT)
        for row, documents in zip(made, rows, strict=False):
            start = 0
            for number, document in enumerate(documents):
                end = start + lengths[document]
                row[start:end] = torch.arange(lengths[document]) if name == POSITIONS else number
                start = end
        if name in (POSITIONS, DOCUMENTS):
            return made
        with no_memory_named(name, (shape[0], 1, shape[1], shape[1]), torch.bool, "pack"):
            return made[:, None, :, None] == made[:, None, None, :]

    def _count(self, rows: Sequence[Sequence[int]]) -> int:
        """How many rows a microbatch has, of which `rows` have documents."""
        return max(self.config.rows, len(rows))

    def _refuse_field_in_place_of_mask(self, sample: Mapping[str, Tensor]) -> None:
        """Raise `ConfigError` for a name of the mask that a field of the samples has: the field would be lost."""
        mask = self.config.mask
        if mask in (POSITIONS, DOCUMENTS, CU_SEQLENS) or (mask in sample and mask != PADDING_MASK):
            of_whom = "packed batches have" if mask in (POSITIONS, DOCUMENTS, CU_SEQLENS) else "samples have"
            raise ConfigError(
                f"data.pack.mask is {mask!r}, the name of a field that {of_whom}",
                cure="give the name of the attention mask among the parameters of the model's forward",
            )


def cumulative_lengths(rows: Sequence[Sequence[int]], length: int, samples: int) -> Tensor:
    """`CU_SEQLENS` of `samples` documents. `rows`: of each row, the lengths of its documents; `length`: that of a row."""
    ends = [0]
    for row, documents in enumerate(rows):
        for document in documents:
            ends.append(ends[-1] + document)
        ends.append((row + 1) * length)
    ends = sorted(set(ends))
    size = samples + len(rows) + 1
    return torch.tensor(ends + [len(rows) * length] * (size - len(ends)), dtype=torch.int32)


def _column(name: str, samples: Sequence[Mapping[str, Tensor]], places: Sequence[SamplePosition]) -> list[Tensor]:
    """A field of all samples. Raises `DataError` for a sample without it."""
    for sample, (_, index) in zip(samples, places, strict=True):
        if name not in sample:
            raise DataError(
                f"sample {index} has no field {name!r}, and sample {places[0][1]} has it",
                cure="give all samples the same fields",
            )
    return [sample[name] for sample in samples]


def batches_of_all_forms(first: Mapping[str, Tensor], packing: Packing) -> list[dict[str, Tensor]]:
    """Batches with `rows` rows made of the first one's, for models that look in Python whether a row has several documents:
    with the documents of the first microbatch, and with one whole document in each row. Empty without `rows`.

    `first`: its fields, [rows, length, ...], beside which `CU_SEQLENS`, if it is one of them, has other documents: it is there
    for its shape.
    """
    count, length = packing.config.rows, packing.config.to
    if not count:
        return []
    of_rows = {name: value for name, value in first.items() if name != CU_SEQLENS}
    several = {name: value[[row % len(value) for row in range(count)]].clone() for name, value in of_rows.items()}
    whole = {
        POSITIONS: torch.arange(length).expand(count, length).contiguous(),
        DOCUMENTS: torch.zeros(count, length, dtype=torch.int64),
    }
    if packing.config.mask:
        whole[packing.config.mask] = torch.ones(count, 1, length, length, dtype=torch.bool)
    if CU_SEQLENS in first:
        rows = int(first[CU_SEQLENS][-1]) // length
        samples = len(first[CU_SEQLENS]) - rows - 1
        several[CU_SEQLENS] = cumulative_lengths([[1] * min(samples, length)] + [[]] * (count - 1), length, samples)
        whole[CU_SEQLENS] = cumulative_lengths([[]] * count, length, samples)
    return [several, {name: whole.get(name, value) for name, value in several.items()}]


def require_boundaries(packing: Packing, read: Collection[str]) -> None:
    """Raise `ConfigError` for a model that reads none of the fields that tell documents apart. `read`: what it reads."""
    if not set(packing.made_fields) & set(read):
        raise ConfigError(
            f"data.pack puts several documents into a row, and the model reads none of {', '.join(packing.made_fields)}: words "
            "would be related to those of other documents",
            cure="let its forward take one of them; or name its attention mask in data.pack.mask, which is then [rows, 1, "
            "length, length], true within a document; or use data.pad",
        )
