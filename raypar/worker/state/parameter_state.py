"""State of one parameter in a worker's memory: of the whole, of a shard's slice, or of a run of elements that was received.

Elements are numbered as `plan.pieces.Piece` says: those of the whole parameter with the cut dim as the slowest, those of a
parameter that is not cut as they lie in memory. The numbering depends on the style alone, so it is the same under every plan
(`TensorCut.element_ranges`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor

from raypar.comm.buffer_pool import CPU
from raypar.plan.shard_ranges import (
    IndexRanges,
    TensorCut,
    intersect_ranges,
    merge_ranges,
    positions_of_indices,
    subtract_ranges,
)
from raypar.plan.tensor_parallel_layout import shard_slice_shape
from raypar.worker.checkpoint.state_key import PARAMETER, SHARED_KINDS, StateKey
from raypar.worker.state.file_memory import PAGE_BYTES
from raypar.worker.step.optimizer_state import Value

StatePart = tuple[str, int]
"""(parameter or buffer, which part of it): a virtual shard's slice, by number; `WHOLE`; or a run of elements (`run_part`)."""
WHOLE = -1
StateByKey = dict[StateKey, Value]
"""State of one parameter: PARAMETER -> tensor; optimizer state, what it shares with others too -> tensor or number."""


def run_part(name: str, start: int) -> StatePart:
    """The run of a parameter's elements that begins with `start`."""
    return name, WHOLE - 1 - start


def tensor_in(state: StateByKey, key: StateKey = PARAMETER) -> Tensor:
    """What a parameter's state has under `key`, where that is a tensor, as the parameter itself is."""
    value = state[key]
    assert isinstance(value, Tensor), key
    return value


@dataclass(frozen=True)
class ParameterSlice:
    """Which part of a parameter a tensor is: one shard's, or all of it."""

    cut: TensorCut | None = None
    """How the parameter is cut over shards; None: this is all of it."""
    shard: int = 0
    """The shard whose slice this is."""
    start: int | None = None
    """First element, if the tensors are flat runs of elements; None: they have the shape of a slice."""

    def spans(self, size: int) -> IndexRanges:
        """The elements in this part of a parameter that has `size` elements; of a run, the run's `size`."""
        if self.start is not None:
            return ((self.start, self.start + size),)
        return ((0, size),) if self.cut is None else self.cut.element_ranges(self.cut.indices_by_shard[self.shard], size)

    def size(self, local: Sequence[int]) -> int:
        """Number of elements of the whole parameter; `local`: the shape of this part."""
        count = 1
        for dim, n in enumerate(local):
            count *= self.cut.whole_size if self.cut is not None and dim == self.cut.dim else n
        return count


@dataclass(frozen=True)
class ParameterState:
    """Some elements of one parameter, with what the optimizer keeps for them.

    What the optimizer keeps in the parameter's shape is sliced with it; all else (step counts) belongs to every slice.
    """

    state: StateByKey
    """The parameter's tensor, and the optimizer's tensors and numbers for it."""
    slice: ParameterSlice = ParameterSlice()
    """Which part of the parameter the tensors are."""
    is_read_only: bool = False
    """Whether the tensors lie in a copy of the mirror's, which must not change."""

    @property
    def start(self) -> int | None:
        """See `ParameterSlice.start`."""
        return self.slice.start

    @property
    def spans(self) -> IndexRanges:
        """The parameter's elements in this state."""
        return self.slice.spans(self.slice.size(tensor_in(self.state).shape))

    def sliced(self, key: StateKey) -> bool:
        """Whether `state[key]` has one element for each element of the parameter."""
        value = self.state[key]
        return key.kind not in SHARED_KINDS and isinstance(value, Tensor) and value.shape == tensor_in(self.state).shape

    def in_own_memory(self) -> ParameterState:
        """The same state, where nothing else lies in the memory of its tensors, or in that of a copy of the mirror's."""
        if self.is_read_only:
            return self
        kept = {key: _in_own_memory(value) if isinstance(value, Tensor) else value for key, value in self.state.items()}
        return replace(self, state=kept)

    def take(self, key: StateKey, start: int, stop: int, whole: TensorCut | None) -> Tensor:
        """Elements [start, stop), flat, which lie in one of `spans`.

        `whole`: how shards would cut the parameter, where all of it is here; its elements are numbered by that.
        """
        value = tensor_in(self.state, key)
        if self.start is not None:
            return value[start - self.start : stop - self.start]
        if self.slice.cut is None:
            return read_elements(value, whole, 0, start, stop)
        return read_elements(value, self.slice.cut, self.slice.shard, start, stop)


def _in_own_memory(tensor: Tensor) -> Tensor:
    return tensor if tensor.untyped_storage().nbytes() < tensor.nbytes + PAGE_BYTES else tensor.clone()


def extract_elements(holdings: Iterable[ParameterState], start: int, stop: int, whole: TensorCut | None) -> StateByKey:
    """Elements [start, stop) of a parameter, flat, and what is not sliced, from states that have these elements together; may
    share their memory."""
    found = _read(holdings, ((start, stop),), whole)
    assert found is not None, f"elements {start} to {stop} are not here"
    parts, others = found
    return {key: of_key[0] if len(of_key) == 1 else _joined(of_key, of_key[0].device) for key, of_key in parts.items()} | others


def copy_elements(
    holdings: Iterable[ParameterState], spans: IndexRanges, whole: TensorCut | None, device: torch.device | None = None
) -> StateByKey | None:
    """As `extract_elements`, of several stretches one after the other, in new tensors, on `device`, or where those of the
    first are; None: some elements are missing."""
    found = _read(list(holdings), spans, whole)
    if found is None:
        return None
    parts, others = found
    return {key: _joined(of_key, device or of_key[0].device) for key, of_key in parts.items()} | others


def _read(
    holdings: Iterable[ParameterState], spans: IndexRanges, whole: TensorCut | None
) -> tuple[dict[StateKey, list[Tensor]], StateByKey] | None:
    """(key -> parts of what is sliced, in the order of the elements; what is not); None: some elements are missing."""
    others: StateByKey = {}
    parts: dict[StateKey, list[tuple[int, int, Tensor]]] = {}
    for place, span in enumerate(spans):
        left: IndexRanges = (span,)
        for holding in holdings:
            for a, b in intersect_ranges(left, holding.spans):
                for key, value in holding.state.items():
                    if holding.sliced(key):
                        parts.setdefault(key, []).append((place, a, holding.take(key, a, b, whole)))
                    else:
                        others[key] = value
                left = subtract_ranges(left, ((a, b),))
        if left:
            return None
    return {key: [part for *_, part in sorted(found, key=itemgetter(0, 1))] for key, found in parts.items()}, others


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The parts, one after the other, in a new tensor; the mirror's lie in host memory."""
    return torch.cat([part.to(device) for part in parts])


def part_of_run(kept: StateByKey, here: slice) -> StateByKey:
    """The same state of some of a run's elements."""
    shape = tensor_in(kept).shape
    return {key: value[here] if isinstance(value, Tensor) and value.shape == shape else value for key, value in kept.items()}


def assemble_parameter(
    holdings: Sequence[ParameterState],
    place: ParameterSlice,
    size: int,
    shape: Callable[[], Sequence[int]],
    whole: Callable[[], TensorCut | None],
    device: torch.device = CPU,
) -> tuple[StateByKey, bool] | None:
    """(state of the part `place` of a parameter of `size` elements; whether it may be written to), made of `holdings`.

    The tensors of one of the `holdings`, if it has just this part; else new ones on `device`. None: some elements are
    missing. `shape` of the unsharded parameter, and `whole`, how shards would cut it, are asked for in the second case only.
    """
    wanted = place.spans(size)
    for holding in holdings:
        if holding.start is None and holding.spans == wanted:
            return holding.state, not holding.is_read_only
    if not holdings or merge_ranges(s for h in holdings for s in intersect_ranges(wanted, h.spans)) != wanted:
        return None
    cut = place.cut if place.cut is not None else whole()
    local = tuple(shape()) if place.cut is None else shard_slice_shape(place.cut, shape(), place.shard)
    kept: StateByKey = {}
    for key, value in holdings[0].state.items():
        if not holdings[0].sliced(key):
            kept[key] = value
            continue
        kept[key] = made = torch.empty(local, dtype=tensor_in(holdings[0].state, key).dtype, device=device)
        for holding in holdings:
            for start, stop in intersect_ranges(wanted, holding.spans):
                write_elements(made, cut, place.shard, start, holding.take(key, start, stop, whole()))
    return kept, True


def read_elements(local: Tensor, cut: TensorCut | None, shard: int, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the whole parameter, from this shard's slice `local`; may share its memory."""
    flat, _ = _numbered(local, cut)
    at, end = _place(local, cut, shard, start, stop)
    return flat[at:end]


def write_elements(local: Tensor, cut: TensorCut | None, shard: int, start: int, values: Tensor) -> None:
    """Write `values` [n] to the elements [start, start + n) of the whole parameter, in this shard's slice `local`."""
    with torch.no_grad():
        flat, moved = _numbered(local, cut)
        at, end = _place(local, cut, shard, start, start + values.numel())
        flat[at:end] = values
        if flat.data_ptr() != local.data_ptr():
            moved.copy_(flat.view(moved.shape))


def _numbered(local: Tensor, cut: TensorCut | None) -> tuple[Tensor, Tensor]:
    """(the slice's elements in their order, maybe a copy; the slice with the cut dim first)."""
    moved = local.detach() if cut is None else local.detach().movedim(cut.dim, 0)
    return moved.reshape(-1), moved


def _place(local: Tensor, cut: TensorCut | None, shard: int, start: int, stop: int) -> tuple[int, int]:
    """Where elements [start, stop) of the whole parameter stand among those of the slice."""
    if cut is None:
        return start, stop
    here = cut.indices_by_shard[shard]
    width = local.numel() // local.shape[cut.dim]
    (place,) = positions_of_indices(cut.element_ranges(here, width * cut.whole_size), ((start, stop),))
    return place
