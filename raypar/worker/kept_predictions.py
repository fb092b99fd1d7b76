"""What a run that predicts keeps of the model's output: it stands where other jobs have their loss, and their metrics."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from raypar.errors import UserCodeError, with_article
from raypar.job import FunctionConfig
from raypar.model.graph import ModelOutput
from raypar.plan.wording import count_noun
from raypar.worker.data.data_set_with_sample_numbers import SAMPLE, number_and_length
from raypar.worker.metrics.metric_state import KeptOutput, LiveObject, MetricValue, ObjectState, State

NUMBERS = "sample"
"""The column of a prediction with the numbers of the samples."""
LENGTHS = "length"
"""The column with their lengths, where `data.pad` pads them."""
MOST_BYTES = 1 << 30
"""Bytes that the outputs of one pass may have, on one worker."""


@dataclass(eq=False)
class Prediction:
    """What is kept of the output of each microbatch."""

    function: FunctionConfig | None = None
    """The user's function of the output, which returns what is kept: a tensor, or tensors by name. None: the output itself."""
    microbatches: int = 0
    """Number of microbatches of a pass that this worker runs; 0: not known."""
    name: str = "prediction"
    """Its name among metrics."""
    needs_batch: bool = False
    """It reads the output alone."""
    in_training: bool = False
    """Its run trains nothing."""
    part: str | None = None
    """It gets the whole output."""

    def __call__(self, output: ModelOutput, target: Tensor) -> Tensor:
        """A scalar of all outputs, in the place of a loss: for the checks before a run. Zero without gradients."""
        if not torch.is_grad_enabled():
            return torch.zeros((), device=target.device)
        found = [tensor.float().sum() for _, tensor in named_tensors(output) if tensor.is_floating_point()]
        return torch.stack(found).sum() if found else torch.zeros((), device=target.device)

    def measure(self, output: ModelOutput, batch: Mapping[str, Tensor], target: Tensor) -> KeptOutput:
        """See `Metric`: the bytes of what is kept of one microbatch. `target`: the field `SAMPLE` of its samples."""
        kept = output if self.function is None else self.function.partial()(output)
        numbers, lengths = number_and_length(target.to("cpu"))
        own = {SAMPLE: numbers} if lengths is None else {SAMPLE: numbers, LENGTHS: lengths}
        found = dict(own)
        for name, tensor in named_tensors(kept):
            if not tensor.dim():
                continue  # of no sample: a model's own loss
            if name in own or name == NUMBERS:
                what = "lengths" if name == LENGTHS else "numbers"
                raise UserCodeError(
                    f"the output {name!r} has the name of the column with the {what} of the samples",
                    cure="give a function of the output that returns it under another name: --function; from Python function=",
                )
            if len(tensor) != len(target):
                raise UserCodeError(
                    f"the output {name!r} of {len(target)} samples is {list(tensor.shape)}: it has no row for each sample",
                    cure="give a function of the output that returns tensors [samples, ...]: --function; from Python function=",
                )
            found[name] = tensor.detach()
        if len(found) == len(own):
            raise UserCodeError(
                f"the output is {with_article(type(kept).__name__)}, in which no tensor has a row for each sample",
                cure="give a function of the output that returns tensors [samples, ...]: --function; from Python function=",
            )
        data = pack_predictions(found)
        self._check_size(len(data))
        return {"bytes": data}

    def _check_size(self, nbytes: int) -> None:
        """Raise `UserCodeError` if as many bytes of each microbatch of a pass are too many."""
        if (total := nbytes * self.microbatches) > MOST_BYTES:
            count = count_noun(self.microbatches, "microbatch", "microbatches")
            raise UserCodeError(
                f"the outputs of a microbatch have {nbytes / 2**20:,.1f} MiB, those of the {count} that a worker has in a pass "
                f"{total / 2**20:,.0f} MiB, and at most {MOST_BYTES >> 20:,} MiB are kept",
                cure="keep less of each output, by a function of it (--function; from Python function=), or set a smaller "
                "batch size",
            )

    merges_by_user = False

    def merge(self, before: State, state: State) -> State:
        """See `Metric`: outputs are not merged."""
        raise AssertionError("outputs are kept by microbatch")

    def pack(self, states: Sequence[State]) -> list[State]:
        """See `Metric`: outputs are sent by themselves."""
        raise AssertionError("outputs are kept by microbatch")

    def compute(self, state: State) -> MetricValue:
        """See `Metric`: outputs have no value."""
        raise AssertionError("outputs are kept by microbatch")

    def bytes_of(self, states: Mapping[int, Mapping[str, State]]) -> dict[int, bytes]:
        """Microbatch -> what is kept of it, of the states of metrics of one pass."""
        found: dict[int, bytes] = {}
        for microbatch, by_name in states.items():
            state = by_name[self.name]
            assert not isinstance(state, (LiveObject, ObjectState)) and "bytes" in state
            found[microbatch] = state["bytes"]
        return found

    @property
    def code(self) -> str:
        """What errors call the user's function."""
        return f"the function {self.function.label}" if self.function is not None else self.label_in_messages

    @property
    def label_in_messages(self) -> str:
        """What the checks before a run call it."""
        return "the outputs that are kept"


def pack_predictions(found: Mapping[str, Tensor]) -> bytes:
    """Tensors by name as bytes: the length of a table in JSON, the table, and the tensors' own bytes one after the other.

    It copies each tensor once. Safetensors' `save` takes ten times as long for the few small tensors of a microbatch.
    """
    table = _table(tuple([(name, tensor.dtype, tensor.shape) for name, tensor in found.items()]))
    return b"".join([table, *[_bytes_of(tensor) for tensor in found.values()]])


def _bytes_of(tensor: Tensor) -> bytes:
    """The values, row by row."""
    try:
        return tensor.numpy().tobytes()
    except (TypeError, RuntimeError):  # on a device, of a dtype that NumPy has not, or to be conjugated or negated
        whole = tensor.resolve_conj().resolve_neg().to("cpu").contiguous()
        flat = whole.as_strided((whole.numel(),), (1,))  # a view of one element keeps any stride
        return flat.view(torch.uint8).numpy().tobytes()


@lru_cache(maxsize=64)
def _table(entries: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> bytes:
    """The head of packed tensors: (name, dtype, shape) of each."""
    table = json.dumps([(name, str(dtype).removeprefix("torch."), tuple(shape)) for name, dtype, shape in entries]).encode()
    return len(table).to_bytes(8, "little") + table


def unpack_predictions(data: bytes) -> dict[str, Tensor]:
    """Name -> rows, of what `Prediction.measure` has kept; the samples' numbers among them."""
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, kind, shape in json.loads(data[8:start]):
        dtype: torch.dtype = getattr(torch, kind)
        end = start + math.prod(shape) * dtype.itemsize
        own = torch.frombuffer(bytearray(data[start:end]), dtype=dtype) if end > start else torch.empty(0, dtype=dtype)
        found[name], start = own.reshape(shape), end
    return found


def named_tensors(value: ModelOutput, name: str = "") -> list[tuple[str, Tensor]]:
    """(dotted name, tensor) of the tensors in an output; of one that is a tensor itself `output`."""
    if isinstance(value, Tensor):
        return [(name or "output", value)]
    parts: list[tuple[str, ModelOutput]] = []
    if type(value) is dict or isinstance(value, Mapping):  # with cold caches the latter takes long
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, (tuple, list)):
        own = getattr(value, "_fields", None) or [str(number) for number in range(len(value))]
        parts = list(zip(own, value, strict=True))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [found for key, part in parts for found in named_tensors(part, f"{name}.{key}" if name else key)]
