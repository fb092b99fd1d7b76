"""Finds MLPs and attention in the record of layers, as groups: column-parallel linear layers and the rows after them.

Module names play no part. Linear layers with functions of PyTorch between them are an MLP, and attention if the columns'
outputs are split into heads on the way. That split also shows how a fused layer orders queries, keys and values. Where a group
may have several styles, all are proposed, and `try_styles` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from raypar.model.tensor_parallel.record_layer_calls import LayerRecord, RecordedCall
from raypar.model.tensor_parallel.styles.head_styles import (
    AttentionStyle,
    FusedKvStyle,
    HeadsRowStyle,
    HeadsStyle,
    KvHeadsStyle,
    QkvStyle,
    is_plain_attention,
)
from raypar.model.tensor_parallel.styles.linear_styles import ColumnStyle, RowStyle
from raypar.model.tensor_parallel.styles.style import ShardingStyle, is_plain_linear
from raypar.model.transposed_linear import linear_features

_ELSEWHERE = ""
"""In place of a linear layer's name: a reader that needs the whole value (the layer's outputs, other modules)."""
_RESHAPES = {"view", "reshape", "unflatten", "flatten", "view_as", "reshape_as"}
_PIECES = {"chunk", "split", "unbind", "tensor_split", "split_with_sizes"}

Styles = Mapping[str, ShardingStyle]
"""Qualified name of a module -> style."""


def find_mlps_and_attention(record: LayerRecord, modules: Mapping[str, nn.Module]) -> list[list[Styles]]:
    """Groups of modules to be cut together, each as its possible styles, likely ones first.

    Every `nn.MultiheadAttention` comes first, then groups of linear layers, those with most parameters first.

    `modules`: by qualified name.
    """
    flow = _Flow(record, {path for path, module in modules.items() if is_plain_linear(module)})
    found: dict[tuple[frozenset[str], frozenset[str]], int] = {}
    for row in flow.linears:
        group = flow.group_of_row(row)
        if group is not None:
            found[group] = sum(modules[path].get_parameter("weight").numel() for path in group[0] | group[1])
    groups = sorted(found, key=lambda group: (-found[group], sorted(group[0])))
    called = dict.fromkeys(call.module for call in record.calls if call.module is not None)
    attention: list[list[Styles]] = [[{path: AttentionStyle()}] for path in called if is_plain_attention(modules[path])]
    return attention + [_readings(flow, modules, columns, rows) for columns, rows in groups]


def linears_with_one_row_per_sample(record: LayerRecord, modules: Mapping[str, nn.Module], samples: int) -> list[str]:
    """Names of linear layers whose input has at most one row for each sample."""
    found: dict[str, bool] = {}
    for call in record.calls:
        if call.module is not None and is_plain_linear(modules[call.module]):
            few = all(prod(record.shapes[number][:-1]) <= samples for number in call.inputs)
            found[call.module] = found.get(call.module, True) and few
    return [path for path, few in found.items() if few]


class _Flow:
    """Which linear layers read the outputs of which others, with only functions of PyTorch between them."""

    def __init__(self, record: LayerRecord, linears: set[str]) -> None:
        self.record = record
        self.linears = list(dict.fromkeys(c.module for c in record.calls if c.module in linears))
        """Names of the linear layers that were called, in order."""
        self._linears = linears
        self._makers: dict[int, set[str]] = {}
        """Number of a tensor -> the linear layers from whose outputs it is computed."""
        self._readers: dict[int, set[str]] = {}
        """Number of a tensor -> the linear layers that read what is computed from it, or `_ELSEWHERE`."""
        self.calls_reading: dict[int, list[RecordedCall]] = {}
        """Number of a tensor -> the calls that were given it."""
        for call in record.calls:
            made = {call.module} if call.module in linears else self._made_of(call.inputs) if call.module is None else set()
            self._makers.update(dict.fromkeys(call.outputs, made))
            for number in call.inputs:
                self.calls_reading.setdefault(number, []).append(call)
        for number in record.outputs:
            self._readers[number] = {_ELSEWHERE}
        for call in reversed(record.calls):
            read = {call.module} if call.module in linears else self._read_of(call.outputs)
            if call.module is not None and call.module not in linears:
                read = {_ELSEWHERE}
            for number in call.inputs:
                self._readers.setdefault(number, set()).update(read)

    def _made_of(self, numbers: Sequence[int]) -> set[str]:
        return set().union(*(self._makers.get(number, set()) for number in numbers))

    def _read_of(self, numbers: Sequence[int]) -> set[str]:
        return set().union(*(self._readers.get(number, set()) for number in numbers))

    def outputs_of(self, linear: str) -> Iterator[int]:
        """Numbers of the tensors that a linear layer has returned."""
        return (number for call in self.record.calls if call.module == linear for number in call.outputs)

    def group_of_row(self, row: str) -> tuple[frozenset[str], frozenset[str]] | None:
        """(columns, rows) of the smallest group with this row; None if anything but its rows reads the columns' outputs."""
        rows, columns = {row}, set[str]()
        while True:
            more = {
                maker for call in self.record.calls if call.module in rows for maker in self._made_of(call.inputs)
            } - columns
            if not more:
                break
            columns |= more
            rows |= self._read_of([number for column in more for number in self.outputs_of(column)])
            if _ELSEWHERE in rows:
                return None
        return (frozenset(columns), frozenset(rows)) if columns and not columns & rows else None


@dataclass(frozen=True, slots=True)
class _Split:
    """How a column's output features are split before a row reads them: into pieces, and these into dims."""

    pieces: tuple[int, ...]
    """Sizes of the pieces (`chunk`, `split`), in order; one piece where there is no such split."""
    dims: tuple[int, ...]
    """The dims into which the largest piece is reshaped; one dim where it is not."""


def _split_of(flow: _Flow, column: str) -> _Split:
    """The first split of a linear layer's output features."""
    shapes = flow.record.shapes
    first = next(flow.outputs_of(column))
    pieces: tuple[int, ...] = (shapes[first][-1],)
    todo, seen = [first], {first}
    for number in todo:
        shape = shapes[number]
        for call in flow.calls_reading.get(number, []):
            if call.module is not None or not call.outputs:
                continue
            made = [shapes[each] for each in call.outputs]
            if call.function in _RESHAPES and made[0][-1:] != shape[-1:]:
                return _Split(pieces, _dims_of(shape, made[0]))
            if call.function in _PIECES and len(made) > 1 and all(len(each) == len(shape) for each in made):
                sizes = tuple(each[-1] for each in made)
                if sum(sizes) == shape[-1] and len(pieces) == 1:
                    pieces, made = sizes, [made[sizes.index(max(sizes))]]
                    call = replace(call, outputs=(call.outputs[sizes.index(max(sizes))],))
                    shape = made[0]
            fresh = {n for n, each in zip(call.outputs, made, strict=True) if each[-1:] == shape[-1:] and len(each) >= 2} - seen
            seen |= fresh
            todo += sorted(fresh)
    return _Split(pieces, (max(pieces),))


def _dims_of(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """The dims into which a reshape splits the last dim of `old`."""
    features = old[-1]
    for start in range(len(new) - 1, -1, -1):
        if prod(new[start:]) == features:
            return tuple(n for n in new[start:] if n != 1 or start == len(new) - 1)
    if new and features % new[-1] == 0:  # heads and samples are one dim: [sequence, batch * heads, width]
        return (features // new[-1], new[-1])
    return (features,)


def _readings(flow: _Flow, modules: Mapping[str, nn.Module], columns: frozenset[str], rows: frozenset[str]) -> list[Styles]:
    """The styles that a group may have, likely ones first."""
    splits = {column: _split_of(flow, column) for column in sorted(columns)}
    features = {column: linear_features(modules[column])[1] for column in splits}
    width = max(linear_features(modules[row])[0] for row in rows)
    found: list[Styles] = []
    if any(len(split.dims) > 1 for split in splits.values()):
        most = max(len(split.dims) for split in splits.values())
        counted = [_head_counts(splits, features, place) for place in range(most - 1, -1, -1)]
        fused_first = sorted(filter(None, counted), key=lambda reading: not _is_likely(reading, splits))
        found += [_styles_by_heads(reading, rows) for reading in fused_first]
    if all(made % width == 0 for made in features.values()):
        by_features: dict[str, ShardingStyle] = {column: ColumnStyle(made // width) for column, made in features.items()}
        found.append(by_features | dict.fromkeys(sorted(rows), RowStyle()))
    unique: list[Styles] = []
    for styles in found:
        if styles not in unique:
            unique.append(styles)
    return unique


@dataclass(frozen=True, slots=True)
class _Heads:
    """How a column's output features are ordered: part after part, and in each part head after head."""

    parts: int
    """Usually 1 for queries, keys or values alone, 2 for keys and values, 3 for all."""
    heads: int
    """Heads of each part."""
    key_heads: int
    """Heads of keys and values, where the parts are unequal."""


def _head_counts(splits: Mapping[str, _Split], features: Mapping[str, int], place: int) -> dict[str, _Heads] | None:
    """The order of each column's features if the dim at `place` counts heads, where a split has so many dims."""
    found: dict[str, _Heads] = {}
    for column, split in splits.items():
        if len(split.dims) < 2:
            continue
        at = min(place, len(split.dims) - 2)
        heads, width = split.dims[at], prod(split.dims[at + 1 :])
        parts, key_heads = len(split.pieces) * prod(split.dims[:at]), heads
        if len(set(split.pieces)) > 1:  # [queries, keys, values], with fewer keys
            if len(split.pieces) != 3 or at or min(split.pieces) % width:
                return None
            key_heads = min(split.pieces) // width
        found[column] = _Heads(parts, heads, key_heads)
    most = max(each.heads for each in found.values())
    widths = {features[column] // (each.parts * each.heads) for column, each in found.items()}
    for column, made in features.items():
        if column not in found and made in widths and most > 1:  # keys or values of one head
            found[column] = _Heads(1, 1, 1)
        elif column not in found:  # a gate of all features
            if made % most:
                return None
            found[column] = _Heads(1, most, most)
    return found


def _is_likely(reading: Mapping[str, _Heads], splits: Mapping[str, _Split]) -> bool:
    """Whether each column has the parts of a common layer: one alone, keys and values, or queries, keys and values."""
    return all(each.parts in (1, 2, 3) for each in reading.values()) and (
        any(each.parts > 1 for each in reading.values()) or all(len(split.dims) < 3 for split in splits.values())
    )


def _styles_by_heads(reading: Mapping[str, _Heads], rows: frozenset[str]) -> Styles:
    """The styles of an attention group whose columns are ordered so."""
    heads = max(each.heads for each in reading.values())
    key_heads = min(each.key_heads for each in reading.values())
    styles: dict[str, ShardingStyle] = {}
    for column, each in reading.items():
        if each.parts == 3:
            styles[column] = QkvStyle(heads, key_heads)
        elif each.parts == 2:
            styles[column] = FusedKvStyle(heads, each.heads)
        elif each.heads < heads:
            styles[column] = KvHeadsStyle(heads, each.heads)
        else:
            styles[column] = HeadsStyle(heads, key_heads)
    return styles | dict.fromkeys(sorted(rows), HeadsRowStyle(heads, key_heads))
