"""Reads samples by id, each seeded by its place, and collates their fields into tensors (rule 1)."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import Tensor

from raypar.data.batch_fields import flatten_fields, top_values, value_at
from raypar.errors import ConfigError, DataError, RayparError, UserCodeError
from raypar.job import DataConfig
from raypar.plan.seeds import seed_of
from raypar.plan.wording import word_form
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import error_text
from raypar.worker.data.collate import Collation, MicrobatchPlace, make_collation, refuse_unequal_batches
from raypar.worker.data.packing import Packing
from raypar.worker.data.padding import Padding
from raypar.worker.data.sample_order import SamplePosition
from raypar.worker.data.user_dataset import MapStyleDataset, reads_by_list
from raypar.worker.process.seed_generators import seed_host_generators
from raypar.worker.process.torch_state_guard import TorchStateGuard

T = TypeVar("T")

INPUT_NAMES = ("input_ids", "pixel_values", "inputs", "input", "image", "images", "img", "features", "tokens", "text", "x")
TARGET_NAMES = ("labels", "label", "targets", "target", "y")
"""What fields for the first layer, and for the loss, are often called; to guess them in messages."""
GETITEM = "the data set's __getitem__"
"""What lines about process state blame, and errors name."""
_LARGEST = 2**63 - 1
"""The largest integer that a tensor holds."""
WHERE_FIELDS_ARE_NAMED = (
    "name the fields there are: data.input and data.target, for tuples data.names (from Python keys of the dict data=)"
)
"""Cure of errors about fields of samples."""


def name_fields_cure(fields: Collection[str]) -> str:
    """The cure of errors about fields of samples, with the fields that a sample has, if it has two or more."""
    others = [name for name in fields if name not in TARGET_NAMES]
    target = next((name for name in TARGET_NAMES if name in fields), others[-1] if len(others) > 1 else None)
    first = next((name for name in INPUT_NAMES if name in others), next(iter(others), None))
    if first is None or target is None or first == target:
        return WHERE_FIELDS_ARE_NAMED
    return f'set data.input: {first}, data.target: {target} (from Python data={{"function": ..., "input": "{first}", ' + (
        f'"target": "{target}"}}), or which of the fields the first layer and the loss read'
    )


@dataclass(frozen=True)
class SampleReader:
    """Reads the samples of one microbatch and makes a batch of the fields asked for. Works in any process."""

    dataset: MapStyleDataset
    """The user's data set."""
    names: tuple[str, ...]
    """Names of the fields of tuple samples; empty: `FIELD_NAMES`."""
    fields: tuple[str, ...]
    """The fields of the batch."""
    seed: int
    """The job's seed."""
    guard: TorchStateGuard | None = None
    """Restores process state that a sample leaves changed, so that the next one does not depend on it."""
    collation: Collation | None = None
    """The job's own collation; None: each field's values are stacked."""
    padding: Padding | None = None
    """How values of unequal length are stacked; None: they must be of one length."""
    packing: Packing | None = None
    """How samples are packed into rows; None: each has a row."""

    @classmethod
    def of(
        cls,
        dataset: MapStyleDataset,
        spec: DataConfig,
        seed: int,
        fields: Sequence[str] = (),
        *,
        guard: TorchStateGuard | None = None,
        batch_names: Sequence[str] = (),
    ) -> SampleReader:
        """A reader as the job's `data` says. `batch_names`: the fields of every collated batch; empty: not known.

        Raises as `make_collation` does.
        """
        collation, padding, packing = make_collation(spec, seed, expected=batch_names, guard=guard), None, None
        if spec.pack is not None:
            if collation is not None or spec.pad is not None:
                other = "pad" if collation is None else f"collate {collation.label}"
                raise ConfigError(f"data has pack and {other}, and each of them makes batches", cure="leave one of them out")
            assert spec.target is not None, "Job.training_data names it"
            packing = Packing(spec.pack, spec.target, spec.names)
        if spec.pad is not None:
            if collation is not None:
                raise ConfigError(
                    f"data has pad, and collate {collation.label}, which makes batches of its own",
                    cure="pad in the collate function, or leave one of them out",
                )
            assert spec.target is not None, "Job.training_data names it"
            padding = Padding(spec.pad, spec.target, spec.names)
        return cls(dataset, spec.names, tuple(fields), seed, guard, collation, padding, packing)

    def read(self, places: Sequence[SamplePosition], at: MicrobatchPlace = (0, 0)) -> dict[str, Tensor]:
        """Read samples: field -> [samples, ...], in fresh memory. `at`: the microbatch that they are.

        Leaves python, numpy and torch seeded by the last sample, or by the collation.
        """
        if self.collation is not None:
            ids = [index for _, index in places]
            return self.collation.tensors(self.collation.values(self.samples(places), ids, at), self.fields, ids, at)
        if self.packing is not None:
            return self.packing.batch(self._samples(places, self._tensors), self.fields, places)
        rows = self._samples(places, self._values)
        return {name: self._batch(name, [row[place] for row in rows], places) for place, name in enumerate(self.fields)}

    def refuse_dependence_on_process(self, places: Sequence[SamplePosition]) -> None:
        """Raise `DataError` if these samples, read twice under the same seeds, are two batches: workers that read the same
        samples, or the same ones again after a failure, would train on others."""
        first, second = (self.read(places) for _ in range(2))
        maker = f"data set {type(self.dataset).__name__}"
        if self.collation is not None:
            maker = f"data.collate {self.collation.label} of {maker}"
        refuse_unequal_batches(
            first,
            second,
            f"{maker}, asked twice for {word_form(places, 'sample', 'samples')} "
            f"{', '.join(str(index) for _, index in places)} under the same seed, gave",
            cure="let a sample depend on its id"
            + (", what collate returns on its samples," if self.collation is not None else "")
            + " and on the generators of python, numpy and torch alone, which are seeded for it: no generator of its own, no "
            "counter, no clock, and leave samples that are kept as they are",
        )

    def sample(self, index: int) -> object:
        """A sample as it is in epoch 0. Leaves generators seeded by it."""
        return self._sample((0, index), seeded=self._seeded)

    def samples(self, places: Sequence[SamplePosition]) -> list[object]:
        """The samples at these places, as the data set gives them. Leaves python, numpy and torch seeded by the last one."""
        return self._samples(places, lambda sample, _: sample)

    def _samples(self, places: Sequence[SamplePosition], take: Callable[[Any, int], T]) -> list[T]:
        """What `take(sample, index)` returns for the samples at these places, read one after the other, or all at once where
        that gives the same ones. A data set may fill the same dict or list again for the next sample: each is taken first."""
        if len(places) > 1 and reads_by_list(self.dataset):
            try:
                found = self.dataset.__getitems__([index for _, index in places])  # type: ignore[attr-defined]
            except BaseException as error:  # some classes of libraries are no Exception
                reraise_ctrl_c(error)  # else the error comes again from the sample that raises it
            else:
                if self.guard is not None:
                    self.guard.check("the data set's __getitems__")
                return [take(sample, index) for sample, (_, index) in zip(found, places, strict=True)]
        seeded = self._seeded

        def one_by_one() -> list[T]:
            return [take(self._sample(place, seeded=seeded), place[1]) for place in places]

        return self.guard.compare_once(one_by_one, GETITEM, id(self.dataset)) if self.guard is not None else one_by_one()

    def field_names(
        self, places: Sequence[SamplePosition], at: MicrobatchPlace = (0, 0), *, also: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Names of the fields of the microbatch `at`, whose samples are at `places`; without a collation of its first sample.

        `also`: names to add if they are other names of these, as `x` of a named tuple's first field. Leaves generators seeded.
        """
        if self.collation is not None:
            ids = [index for _, index in places]
            return tuple(self.collation.values(self.samples(places), ids, at))
        sample, what = self._sample(places[0], seeded=True), f"sample {places[0][1]}"
        if self.packing is not None:
            return self.packing.batch_names(self._tensors(sample, places[0][1]))
        found = tuple(flatten_fields(sample, self.names, what, is_one_tensor))
        return found + tuple(name for name in also if name not in found and name in top_values(sample, self.names, what))

    def tensor_names(self, places: Sequence[SamplePosition]) -> tuple[str, ...]:
        """As `field_names` of the first microbatch, without fields that cannot be tensors, such as texts."""
        if self.collation is not None:
            ids = [index for _, index in places]
            found = self.collation.values(self.samples(places), ids, (0, 0))
        else:
            sample = self._sample(places[0], seeded=True)
            if self.packing is not None:
                return self.packing.batch_names(self._tensors(sample, places[0][1]))
            found = flatten_fields(sample, self.names, f"sample {places[0][1]}", is_one_tensor)
        return tuple(name for name, value in found.items() if isinstance(value, Tensor) or _can_be_tensor(value))

    @property
    def _seeded(self) -> bool:
        """Whether generators are seeded before each sample: who promises to draw no random numbers need not have them seeded;
        it does not change a bit."""
        return not getattr(self.dataset, "raypar_thread_safe", False)

    def _sample(self, place: SamplePosition, *, seeded: bool) -> Any:
        """One sample, as the data set gives it. `seeded`: seed the generators first."""
        epoch, index = place
        if seeded:
            seed_host_generators(seed_of(self.seed, "sample", epoch, index))
        try:
            sample = self.dataset[index]
        except RayparError:
            raise  # of a data set that comes with raypar: it names the file
        except BaseException as error:  # some classes of libraries are no Exception
            reraise_ctrl_c(error)
            size, more, cure = self._size(), "", f"read it by itself: dataset[{index}]"
            if size is not None and (isinstance(error, IndexError) or (isinstance(error, KeyError) and error.args == (index,))):
                more = f"\n  its length is {size:,}, so samples 0 to {size - 1:,} are read"
                cure += "; " + (
                    "if there are fewer samples, let __len__ return their number"
                    if index < size
                    else "the length was larger when the run began: let __len__ return the same in every process"
                )
            raise UserCodeError(
                f"sample {index} (epoch {epoch}): the data set raised {error_text(error)}{more}\n{traceback.format_exc()}",
                cure=cure,
            ) from error
        if self.guard is not None:
            self.guard.check(GETITEM)
        return sample

    def _size(self) -> int | None:
        """Number of samples, as the data set tells it; None where it does not."""
        try:
            return len(self.dataset)
        except BaseException as error:  # some classes of libraries are no Exception
            reraise_ctrl_c(error)
            return None

    def _values(self, sample: object, index: int) -> list[Tensor | int]:
        """The fields of a sample that are asked for."""
        found = top_values(sample, self.names, f"sample {index}")
        return [self._value(sample, found, name, index) for name in self.fields]

    def _value(self, sample: object, found: Mapping[str, object], name: str, index: int) -> Tensor | int:
        """A field of a sample; an integer as it is: a batch of them is made at once. `found`: the sample's `top_values`."""
        try:
            value = found[name] if name in found else value_at(found, name)
        except KeyError:
            inside = [
                each for each in flatten_fields(sample, self.names, f"sample {index}", is_one_tensor) if each not in found
            ]
            there = [str(each) for each in (*found, *inside)]
            cure = name_fields_cure([str(each) for each in found]) if isinstance(sample, Mapping) else WHERE_FIELDS_ARE_NAMED
            if near := get_close_matches(name, there, 1):
                cure = (
                    f"if {near[0]!r} is meant, correct {name!r} where it is named: data.input, data.target, or a layer's input"
                )
            raise DataError(
                f"sample {index} has no field {name!r}, only {', '.join(there) or 'none at all'}", cure=cure
            ) from None
        if isinstance(value, Tensor):
            return value.detach()
        if type(value) is int and abs(value) <= _LARGEST:
            return value
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"sample {index}, field {name!r}: a {type(value).__name__} cannot be made a tensor: {error}",
                cure="return tensors, arrays or numbers",
            ) from error

    def _tensors(self, sample: object, index: int) -> dict[str, Tensor]:
        """The fields of a sample that can be tensors; of a named tuple also those that are asked for by another name."""
        what = f"sample {index}"
        values = flatten_fields(sample, self.names, what, is_one_tensor)
        others = top_values(sample, self.names, what)
        values |= {name: others[name] for name in self.fields if name in others and name not in values}
        return {
            name: value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
            for name, value in values.items()
            if isinstance(value, Tensor) or _can_be_tensor(value)
        }

    def _batch(self, name: str, values: list[Tensor | int], places: Sequence[SamplePosition]) -> Tensor:
        column = [value for value in values if isinstance(value, Tensor)]
        if not column and self.padding is None:
            return torch.tensor(values)
        if len(column) < len(values):
            column = [torch.as_tensor(value) for value in values]
        if self.padding is not None and self.padding.pads(name, column[0]):
            return self.padding.stack(name, column, places)
        return self._stack(name, column, places)

    @staticmethod
    def _stack(name: str, column: list[Tensor], places: Sequence[SamplePosition]) -> Tensor:
        shape, dtype = column[0].shape, column[0].dtype
        if any(value.shape != shape or value.dtype != dtype for value in column):
            kinds = [(tuple(value.shape), value.dtype) for value in column]
            usual = Counter(kinds).most_common(1)[0][0]
            odd, (epoch, index) = next((k, p) for k, p in zip(kinds, places, strict=True) if k != usual)
            cure = "pad or crop samples to one shape, and give every sample the same dtype"
            if all(k[0][1:] == kinds[0][0][1:] and k[0] and k[1] == kinds[0][1] for k in kinds):
                cure += "; or let data.pad do it: {multiple: 64}, or a list of lengths: {to: [64, 128, 256]}"
            other = next(p[1] for k, p in zip(kinds, places, strict=True) if k == usual)
            raise DataError(
                f"sample {index} (epoch {epoch}), field {name!r}: expected shape {usual[0]} {usual[1]} as in sample {other} "
                f"of the same microbatch, found shape {odd[0]} {odd[1]}",
                cure=cure,
            )
        return torch.stack(column)


def is_one_tensor(value: object) -> bool:
    """Whether a tuple or list of tensors is one value, because PyTorch makes one tensor of it: each has one number."""
    return isinstance(value, (tuple, list)) and _can_be_tensor(value)


def _can_be_tensor(value: object) -> bool:
    """Whether PyTorch makes a tensor of a value that is none."""
    try:
        torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
