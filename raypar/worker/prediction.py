"""What a run that predicts keeps of the model's output: it stands where other jobs have their loss, and their metrics.

The samples are divided into microbatches once, for the whole data set, and the run makes one pass over so many of them after
the other. So outputs depend neither on the plan nor on how many microbatches a pass has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from raypar.errors import UserCodeError, with_article
from raypar.job import FunctionConfig
from raypar.plan.microbatches import Microbatches
from raypar.plan.wording import count_noun
from raypar.worker.data.microbatch_loader import BatchSource
from raypar.worker.data.numbered_samples import SAMPLE

MOST_BYTES = 1 << 30
"""Bytes that the outputs of one pass may have, on one worker."""


@dataclass(eq=False)
class Prediction:
    """What is kept of the output of each microbatch."""

    samples: int
    """Number of samples of the whole data set that go through the model."""
    microbatches: int
    """Number of microbatches of a pass."""
    function: FunctionConfig | None = None
    """The user's function of the output, which returns what is kept: a tensor, or tensors by name. None: the output itself."""
    first_pass: int = 0
    """Number of passes that other runs have made already."""
    name: str = "prediction"
    """Its name among metrics."""
    needs_batch: bool = False
    """It reads the output alone."""

    def __call__(self, output: object, target: Tensor) -> Tensor:
        """A scalar of all outputs, in the place of a loss: for the checks before a run. Zero without gradients."""
        if not torch.is_grad_enabled():
            return torch.zeros((), device=target.device)
        found = [tensor.float().sum() for _, tensor in named_tensors(output) if tensor.is_floating_point()]
        return torch.stack(found).sum() if found else torch.zeros((), device=target.device)

    def measure(self, output: object, batch: Mapping[str, Tensor], target: Tensor) -> Mapping[str, object]:
        """See `Metric`: the bytes of what is kept of one microbatch. `target`: the numbers of its samples."""
        kept = output if self.function is None else self.function.partial()(output)
        found = {SAMPLE: target.to("cpu")}
        for name, tensor in named_tensors(kept):
            if not tensor.dim():
                continue  # of no sample: a model's own loss
            if len(tensor) != len(target):
                raise UserCodeError(
                    f"the output {name!r} of {len(target)} samples is {list(tensor.shape)}: it has no row for each sample",
                    cure="give a function of the output that returns tensors [samples, ...]: --function; from Python function=",
                )
            found[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if len(found) == 1:
            raise UserCodeError(
                f"the output is {with_article(type(kept).__name__)}, in which no tensor has a row for each sample",
                cure="give a function of the output that returns tensors [samples, ...]: --function; from Python function=",
            )
        return {"bytes": save(found)}

    def compute(self, states: Sequence[Mapping[str, object]]) -> object:
        """See `Metric`: outputs are not merged."""
        raise AssertionError("outputs are kept by microbatch")

    def take_outputs(
        self, states: Mapping[int, Mapping[str, Mapping[str, object]]], batch_size: int, microbatches: int
    ) -> dict[int, bytes]:
        """Microbatch of the whole data set -> what is kept of it, of the states of metrics of one pass.

        `batch_size`, `microbatches`: the job's. Raises `UserCodeError` for more than `MOST_BYTES`.
        """
        count = whole_batching(self.samples, batch_size, microbatches).count
        found = {m: state[self.name]["bytes"] for m, state in states.items() if m < count}
        outputs = {m: data for m, data in found.items() if isinstance(data, bytes)}
        if (total := sum(map(len, outputs.values()))) > MOST_BYTES:
            raise UserCodeError(
                f"the outputs of {count_noun(len(outputs), 'microbatch', 'microbatches')} have {total / 2**20:,.0f} MiB, and "
                f"those of one pass have at most {MOST_BYTES >> 20:,} MiB",
                cure="keep less of each output, by a function of it (--function; from Python function=), or set a smaller "
                "batch size",
            )
        return outputs

    @property
    def label_in_messages(self) -> str:
        """What the checks before a run call it."""
        return "the outputs that are kept"


def unpack(data: bytes) -> dict[str, Tensor]:
    """Name -> rows, of what `Prediction.measure` has kept; the samples' numbers among them."""
    return load(data)


def named_tensors(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of the tensors in an output; of one that is a tensor itself `output`."""
    if isinstance(value, Tensor):
        yield name or "output", value
        return
    parts: list[tuple[str, object]] = []
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, (tuple, list)):
        own = getattr(value, "_fields", None) or [str(number) for number in range(len(value))]
        parts = list(zip(own, value, strict=True))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    for key, part in parts:
        yield from named_tensors(part, f"{name}.{key}" if name else key)


def whole_batching(samples: int, batch_size: int, microbatches: int) -> Microbatches:
    """The samples of a whole data set in microbatches of at most the training size."""
    count = -(-samples // -(-batch_size // microbatches))
    return Microbatches(count, count, samples)


class ReadsAhead(Protocol):
    """A loader."""

    def prefetch(self, step: int, microbatches: Sequence[int]) -> None:
        """Begin to read these microbatches."""


class MicrobatchesOfPass:
    """The microbatches of the present pass, read from those of the whole data set. The last pass repeats the last one."""

    def __init__(self, loader: ReadsAhead | None, source: BatchSource | None, count: int) -> None:
        self.loader, self.source, self.count = loader, source, count
        self.first = 0
        """The first microbatch of the present pass."""

    def get(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """See `BatchSource`."""
        assert self.source is not None
        return self.source.get(0, self._of_whole(microbatch))

    def begin(self, first: int, own: Sequence[int]) -> None:
        """Begin the pass that has microbatch `first` first; `own`: those of a pass that this worker runs."""
        self.first = first
        if self.loader is not None:
            self.loader.prefetch(0, sorted({self._of_whole(microbatch) for microbatch in own}))

    def _of_whole(self, microbatch: int) -> int:
        return min(self.first + microbatch, self.count - 1)
