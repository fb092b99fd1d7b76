"""The ids of an epoch's samples where the job names them: `data.sampler`, `data.weights` and `data.group_by` (rule 1)."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypar.errors import ConfigError, DataError, RayparError, UserCodeError, with_article
from raypar.job import FunctionConfig, Job, WeightsConfig
from raypar.job.stable_callable_text import argument_refusal
from raypar.model.random_state import preserve_random_state, seed_all
from raypar.plan.seeds import seed_of
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import error_text
from raypar.worker.data.user_dataset import MapStyleDataset
from raypar.worker.process.torch_state_guard import TorchStateGuard

MOST_IDS = 10**7
"""A sampler that gives more ids in an epoch, and more than ten times the samples, is taken to have no end."""
MOST_WEIGHTS = 2**24
"""The most samples of which `torch.multinomial` draws."""
MOST_BATCHES = 50
"""The most batches within which `data.group_by` sorts, as in `transformers`."""


@dataclass
class EpochSampler:
    """The ids of every epoch: a pure function of the job and the epoch."""

    key: str
    """The job's key, for messages."""
    label: str
    """The function's name, for messages."""
    seed: int
    """The job's seed."""
    size: int
    """Number of samples of the data set."""
    draw: Callable[[int, int], object]
    """(epoch, its seed) -> the ids of the epoch; Python's, NumPy's and PyTorch's generators are seeded with the same seed."""
    guard: TorchStateGuard | None = None
    """Restores process state that the sampler leaves changed."""
    _kept: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """Epoch -> its ids, of the epochs used last."""
    _digests: dict[int, bytes] = field(default_factory=dict, repr=False)
    """Epoch -> a digest of its ids, of all epochs that were drawn here."""
    _length: int | None = None
    """Number of ids of an epoch; None before the first was drawn."""

    @property
    def length(self) -> int:
        """Number of ids of an epoch, which is that of epoch 0. Raises what `ids` does."""
        if self._length is None:
            self.ids(0)
        assert self._length is not None
        return self._length

    def ids(self, epoch: int) -> Tensor:
        """The ids of an epoch [length], int64.

        Raises `UserCodeError` for what the sampler raises, and `DataError` for ids that there are not, or another number of
        them than in epoch 0.
        """
        if epoch not in self._kept:
            found = self._drawn(epoch)
            if self._length is None:
                self._length = len(found) if epoch == 0 else self.length
            if len(found) != self._length:
                raise DataError(
                    f"{self.key} {self.label} gave {len(found):,} ids in epoch {epoch}, and {self._length:,} in epoch 0",
                    cure="give as many in every epoch: the place of a step in the data must not depend on all epochs before",
                )
            while len(self._kept) > 1:
                del self._kept[min(self._kept)]
            self._kept[epoch] = found
            self._digests[epoch] = hashlib.blake2b(found.numpy().tobytes(), digest_size=8).digest()
        return self._kept[epoch]

    def digest(self, epochs: Sequence[int]) -> int:
        """64 bits over the ids of these epochs."""
        for epoch in epochs:
            self.ids(epoch)
        digests = b"".join(self._digests[epoch] for epoch in epochs)
        return int.from_bytes(hashlib.blake2b(digests, digest_size=8).digest(), "little")

    def _drawn(self, epoch: int) -> Tensor:
        """The ids of an epoch, checked."""
        here = seed_of(self.seed, "sampler", epoch)
        try:
            with preserve_random_state():
                seed_all(here)
                ids = self._listed(self.draw(epoch, here))
        except RayparError:
            raise
        except BaseException as error:  # some classes of libraries are no Exception
            reraise_ctrl_c(error)
            raise UserCodeError(
                f"{self.key} {self.label} raised {error_text(error)}\n  in epoch {epoch}\n{traceback.format_exc()}",
                cure=f"call it by itself, with the data set and {self.key}.args",
            ) from error
        if self.guard is not None:
            self.guard.check(self.key)
        wrong = ((ids < 0) | (ids >= self.size)).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise DataError(
                f"{self.key} {self.label} gave id {int(ids[place]):,} (number {place:,} of epoch {epoch}), and the data set "
                f"has {self.size:,} samples, 0 to {self.size - 1:,}",
                cure="give ids of samples that there are",
            )
        return ids

    def _listed(self, found: object) -> Tensor:
        """What the sampler gave, as int64. Raises `DataError` for what are no ids."""
        if not isinstance(found, Tensor):
            if not isinstance(found, Iterable):
                raise self._no_ids(with_article(type(found).__name__))
            most = max(MOST_IDS, 10 * self.size)
            found = list(itertools.islice(found, most + 1)) if not hasattr(found, "__array__") else found
            if isinstance(found, list) and len(found) > most:
                raise self._no_ids(f"more than {most:,} ids in an epoch")
            if isinstance(found, list) and found and isinstance(found[0], (list, tuple)):
                raise DataError(
                    f"{self.key} {self.label} gives batches of ids",
                    cure="give the sampler in it: raypar makes the batches, of batch_size consecutive ids each",
                )
            try:
                found = torch.as_tensor(found)
            except (TypeError, ValueError, RuntimeError):
                raise self._no_ids(with_article(type(found).__name__) + " of other things") from None
        if found.dim() != 1 or not len(found) or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
            raise self._no_ids(f"{list(found.shape)} numbers of {found.dtype}")
        return found.detach().to("cpu", torch.int64, copy=True).contiguous()

    def _no_ids(self, what: str) -> DataError:
        return DataError(
            f"{self.key} {self.label} gave {what}, no ids of samples", cure="give a list of integers, or a Sampler"
        )


def make_epoch_sampler(spec: Job, dataset: MapStyleDataset, guard: TorchStateGuard | None = None) -> EpochSampler | None:
    """What the job's `data.sampler`, `data.weights` or `data.group_by` draws; None without any.

    Raises `UserCodeError` for what their functions raise, and `DataError` for weights and lengths that cannot be used.
    """
    data, size = spec.data, len(dataset)
    if data.sampler is not None:
        ref = data.sampler
        return EpochSampler("data.sampler", ref.label, spec.seed, size, lambda epoch, _: _call(ref, dataset, epoch), guard)
    if data.weights is not None:
        label, weights, replacement = data.weights.label, _weights(data.weights, dataset, size), data.weights.replacement

        def draw(_: int, seed: int) -> Tensor:
            return torch.multinomial(weights, size, replacement, generator=torch.Generator().manual_seed(seed))

        return EpochSampler("data.weights", label, spec.seed, size, draw, guard)
    if data.group_by is not None:
        lengths, batch = _lengths(data.group_by, dataset, size), spec.batch_size
        return EpochSampler(
            "data.group_by",
            data.group_by.label,
            spec.seed,
            size,
            lambda _, seed: grouped_by_length(lengths, batch, seed),
            guard,
        )
    return None


def refuse_chance(spec: Job, dataset: MapStyleDataset) -> None:
    """Raise `DataError` for a sampler that gives other ids when it is asked again under the same seed."""
    one, other = make_epoch_sampler(spec, dataset), make_epoch_sampler(spec, dataset)
    if one is None or other is None:
        return
    for epoch in (0, 1):
        if len(one.ids(epoch)) != len(other.ids(epoch)) or not torch.equal(one.ids(epoch), other.ids(epoch)):
            raise DataError(
                f"{one.key} {one.label}, called twice for epoch {epoch} under the same seed, gave other ids",
                cure="let it depend on the data set, the epoch and the seeded generators of python, numpy and torch alone: no "
                "generator of its own, no counter, no clock",
            )


def grouped_by_length(lengths: Tensor, batch_size: int, seed: int) -> Tensor:
    """All ids [n], shuffled, then sorted by length, longest first, within each `MOST_BATCHES` batches.

    As `group_by_length` of `transformers`: so batches have samples of similar length, and the longest sample comes first, to
    find out at once whether there is enough memory. `lengths`: [n], int64.
    """
    size = len(lengths)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    within = batch_size * max(1, min(size // (batch_size * 4), MOST_BATCHES))
    parts = [part[lengths[part].argsort(descending=True, stable=True)] for part in order.split(within)]
    longest = int(torch.stack([lengths[part[0]] for part in parts]).argmax())
    first, other = int(parts[0][0]), int(parts[longest][0])
    parts[0][0], parts[longest][0] = other, first
    return torch.cat(parts)


def _call(ref: FunctionConfig, dataset: MapStyleDataset, epoch: int) -> object:
    """What a sampler's function or class gives for an epoch. Of an object with `set_epoch` that is called.

    Parameters called `dataset`, `data_source` and `epoch` get these; without such names the first two of a function that `args`
    does not give, and that have no defaults.
    """
    function = ref.resolve()
    free = [one for one in inspect.signature(function).parameters.values() if one.name not in ref.args]
    named: dict[str, object] = {"dataset": dataset, "data_source": dataset, "epoch": epoch}
    given = {**ref.args, **{one.name: named[one.name] for one in free if one.name in named}}
    if not isinstance(function, type):
        names = {one.name for one in free}
        left: list[object] = [] if names & {"dataset", "data_source"} else [dataset]
        left += [] if "epoch" in names else [epoch]
        needed = [one.name for one in free if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        given |= dict(zip([name for name in needed if name not in named], left, strict=False))
    if (refusal := argument_refusal(function, given, ref.label, "data.sampler.args")) is not None:
        if isinstance(function, type):
            who = "a class gets the data set as its parameter `dataset` or `data_source`, and the epoch's number as `epoch`"
            refusal = ConfigError(refusal.what, cure=f"{who}: call them so; or {refusal.cure}")
        raise refusal
    made = function(**given)
    if callable(set_epoch := getattr(made, "set_epoch", None)):
        set_epoch(epoch)
    return made


def _weights(ref: WeightsConfig, dataset: MapStyleDataset, size: int) -> Tensor:
    """The weights of the samples [size], float64. Raises `DataError` for others than `torch.multinomial` draws with."""
    found = _numbers(ref, dataset, "data.weights", size, "weights").to(torch.float64)
    if size > MOST_WEIGHTS:
        raise DataError(
            f"data.weights for {size:,} samples, and up to {MOST_WEIGHTS:,} can be drawn of", cure="give a data.sampler instead"
        )
    wrong = (~(found.isfinite() & (found >= 0))).nonzero()
    if len(wrong):
        raise DataError(
            f"data.weights {ref.label} gave sample {int(wrong[0]):,} the weight {float(found[wrong[0]])}",
            cure="give finite weights, none below 0",
        )
    positive = int((found > 0).sum())
    if positive == 0 or (positive < size and not ref.replacement):
        raise DataError(
            f"data.weights {ref.label} gave {positive:,} of {size:,} samples a weight above 0, and an epoch draws {size:,}"
            + ("" if positive == 0 else " without replacement"),
            cure="give every sample a weight above 0, or set data.weights.replacement: true",
        )
    return found


def _lengths(ref: FunctionConfig, dataset: MapStyleDataset, size: int) -> Tensor:
    """The lengths of all samples [size], int64. Raises `DataError` for another number of them."""
    found = _numbers(ref, dataset, "data.group_by", size, "lengths")
    whole = found.to(torch.int64)
    wrong = (whole != found).nonzero()
    if len(wrong):
        raise DataError(
            f"data.group_by {ref.label} gave sample {int(wrong[0]):,} the length {found[int(wrong[0])].item():g}",
            cure="give whole numbers: round them, or multiply them first where their fractions matter",
        )
    return whole


def _numbers(ref: FunctionConfig, dataset: MapStyleDataset, key: str, size: int, what: str) -> Tensor:
    """What a function of the data set gives [size], as a tensor; of objects given from Python, their numbers. `what`: in words.

    Raises `UserCodeError` for what it raises, and `DataError` for another number of them.
    """
    function = ref.resolve()
    try:
        takes_dataset = any(
            one.default is one.empty and one.name not in ref.args for one in inspect.signature(function).parameters.values()
        )
        found = function(dataset, **ref.args) if takes_dataset else function(**ref.args)
        values: Sequence[object] | Tensor = found if hasattr(found, "__array__") or isinstance(found, Tensor) else list(found)
        numbers = torch.as_tensor(values).detach().to("cpu", copy=True)
    except BaseException as error:  # some classes of libraries are no Exception
        reraise_ctrl_c(error)
        raise UserCodeError(
            f"{key} {ref.label} raised {error_text(error)}\n{traceback.format_exc()}",
            cure=f"call it by itself, with the data set and {key}.args: it returns a number for each sample",
        ) from error
    if numbers.shape != (size,):
        raise DataError(
            f"{key} {ref.label} gave {list(numbers.shape)} {what} for {size:,} samples", cure="give one for each sample"
        )
    return numbers
