"""Matches the names of a weights file with those of a model; differences are errors or notes, and nothing is guessed."""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import CheckpointError, ConfigError
from raypar.files.json_type import Json
from raypar.job import InitFromConfig
from raypar.job.init_from_section import MAX_SHOWN_NAMES, format_name_list
from raypar.plan.wording import count_noun
from raypar.worker.pretrained.open_weights import PART
from raypar.worker.pretrained.weights_file import FLOATING, WeightsFile, format_tensor_count

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, Sequence[int]]
_MAX_PATTERNS = 20
"""More of them help nobody: then the weights are those of another model."""
_MAX_PARTS = 3
"""The most parts of a model that may all begin with the same weights, as a policy, its reference and its critic do."""


@dataclass(frozen=True)
class WeightsMatch:
    """Which tensors of a file the model starts from."""

    names: Mapping[str, str]
    """The model's name -> the file's, for `WeightsFile.read`."""
    missing: tuple[str, ...]
    """Names of the model that keep its own initial values."""
    notes: tuple[str, ...]
    """Lines for the user: casts, tensors that are not used."""


def match_weights(
    file: WeightsFile,
    wanted: Shapes,
    ties: Sequence[Sequence[str]] = (),
    optional: Collection[str] = (),
    *,
    source: InitFromConfig | None = None,
    dtype: str | torch.dtype = "float32",
    dtypes: Mapping[str, str | torch.dtype] | None = None,
    may_differ_by_prefix: bool = False,
) -> WeightsMatch:
    """Find the tensor of `file` for each of `wanted`: name -> shape of the model's parameters and persistent buffers.

    Raises `CheckpointError` that lists tensors that are missing, unexpected, or of another shape or dtype, unless `source`
    allows them. Floating-point values are cast; others must have the model's dtype.

    `ties`: groups of names of one parameter; the file needs one of a group. If it has several, they must be alike in shape and
    in their first 4 KiB, unless `source` allows the others to be unexpected; the first one's values are used.
    `optional`: names of non-persistent buffers; the file may have them, and they are read if they are in `wanted` too. `dtype`:
    the model's; `dtypes`: those of tensors with another one. `may_differ_by_prefix`: whether the names may lack a prefix, or
    have one more, as `from_pretrained` takes them; a note says so.
    """
    source = source or InitFromConfig(path=str(file.path))
    here, others = _dtype_name(dtype), {name: _dtype_name(each) for name, each in (dtypes or {}).items()}
    model = _Model(wanted, {name: tuple(names) for names in ties for name in names}, optional, here, others)
    _refuse_idle_prefixes(file, model, source)
    found, notes = _compare(file, model, source), list(file.notes)
    if found.differences and may_differ_by_prefix:
        found, source, line = _with_other_prefix(file, model, source, found)
        notes += line
    _refuse_unequal_ties(file, source, found)
    if found.differences:
        raise CheckpointError(
            f"{file.path} does not fit the model: {'; '.join(found.differences)}",
            cure=_cure(file, model, source, found),
        )
    if wanted and not found.names and found.missing - set(optional):
        raise CheckpointError(
            f"none of the model's {count_noun(len(wanted), 'tensor')} is in {file.path}, and init_from.allow_missing allows it",
            cure="give weights of this model, correct rename or the prefixes, or leave init_from out",
        )
    short = file.path.name
    new, unused = [name for name in wanted if name in found.missing - set(optional)], found.allowed_unexpected
    notes += [
        f"{short} holds {there}: {number} {'tensors are' if number > 1 else 'tensor is'} cast to {here}"
        for (there, here), number in sorted(found.casts.items())
    ]
    if new:
        notes.append(
            f"{format_tensor_count(new)} {'begin' if len(new) > 1 else 'begins'} with the model's own initial values, not with "
            f"those of {short}: {format_name_list(new)}"
        )
    if unused:
        notes.append(f"{format_tensor_count(unused)} of {short} {_is(unused)} not used: {format_name_list(unused)}")
    if buffers := found.unused_buffers:
        notes.append(
            f"{format_tensor_count(buffers)} of {short} {_is(buffers)} not used, since the model's own values of buffers "
            f"that are not persistent are: {format_name_list(buffers)}"
        )
    return WeightsMatch(found.names, tuple(name for name in wanted if name in found.missing), tuple(notes))


def _refuse_idle_prefixes(file: WeightsFile, model: _Model, source: InitFromConfig) -> None:
    """Raise `ConfigError` if one of several prefixes makes no name of the model: nothing else would say so where the file's
    tensors are read under another one."""
    known = {*model.wanted, *model.ties, *model.optional}
    idle = [
        prefix
        for prefix in source.prefixes
        if known.isdisjoint(source.replace(add_prefix=prefix).renamed(file.names)) and len(source.prefixes) > 1
    ]
    if not idle:
        return
    free = sorted({prefix for name in known for prefix in _dotted_prefixes(name)} - set(source.prefixes))
    near = {prefix: match for prefix in idle for match in difflib.get_close_matches(prefix, free, n=1)}
    right = [near.get(prefix, prefix) for prefix in source.prefixes if prefix not in idle or prefix in near]
    form = _literal(source.replace(add_prefix=right[0] if len(right) == 1 else right)) if right else ""
    best = _other_prefix(file, model, source)
    if best is not None and best.strip_prefix != source.strip_prefix:  # the file's names have one more, as `module.`
        form = _literal(best)
    raise ConfigError(
        f"init_from.add_prefix {', '.join(map(repr, idle))}: with it no tensor of {file.path} has a name of the model "
        f"({idle[0]}{next(iter(source.replace(add_prefix='').renamed(file.names)), '')})",
        cure=f"set init_from to {form}" if form else f"give prefixes of the model's names: {format_name_list(free)}",
    )


def _with_other_prefix(
    file: WeightsFile, model: _Model, source: InitFromConfig, found: _Comparison
) -> tuple[_Comparison, InitFromConfig, list[str]]:
    """(comparison, settings, a line about them) with other prefixes, if everything fits with them; else as given."""
    best = _other_prefix(file, model, source)
    other = found if best is None else _compare(file, model, best)
    if best is None or other.differences:
        return found, source, []
    return other, best, [f"the names in {file.path.name} differ by a prefix: init_from is {_literal(best)}"]


def _refuse_unequal_ties(file: WeightsFile, source: InitFromConfig, found: _Comparison) -> None:
    """Raise `CheckpointError` if two names of one parameter have different values."""
    if found.disagreeing and not found.differences:
        first, second = found.disagreeing[0]
        raise CheckpointError(
            f"{file.path} has {first} and {second}, which are one parameter of the model, with different values",
            cure=f"to begin with {first}, set init_from to {_literal(source, allow_unexpected=[second])}; or make a model that "
            "does not tie them (tie_word_embeddings: false in its configuration)",
        )


@dataclass(frozen=True)
class _Model:
    """What the model asks of a file; see `match_weights`."""

    wanted: Shapes
    ties: Mapping[str, tuple[str, ...]]
    """Name of a tied parameter -> all its names."""
    optional: Collection[str]
    dtype: str
    dtypes: Mapping[str, str]

    def names_of(self, name: str) -> tuple[str, ...]:
        """All names of a parameter, this one first."""
        return (name, *(other for other in self.ties.get(name, ()) if other != name))

    def dtype_of(self, name: str) -> str:
        """The dtype in which the model has it."""
        return self.dtypes.get(name, self.dtype)

    def number_of_tensors(self) -> int:
        """Number of tensors in `wanted`, a tie counted once."""
        return len({self.ties.get(name, (name,))[0] for name in self.wanted})


@dataclass
class _Comparison:
    """The model's names compared with the file's, after renaming."""

    names: dict[str, str] = field(default_factory=dict)
    """The model's name -> the file's, where both have the tensor."""
    read: set[str] = field(default_factory=set)
    """The file's names in `names`."""
    lacking: list[str] = field(default_factory=list)
    """The model's names that the file lacks and `allow_missing` does not match; one for each tie."""
    unexpected: list[str] = field(default_factory=list)
    """The file's names that the model lacks and `allow_unexpected` does not match."""
    other_shape: dict[str, str] = field(default_factory=dict)
    """Name -> sentence about its two shapes."""
    other_kind: dict[str, str] = field(default_factory=dict)
    """Name -> sentence about its two dtypes, which are not cast into each other."""
    missing: set[str] = field(default_factory=set)
    """The model's names that the file lacks and may lack."""
    allowed_unexpected: list[str] = field(default_factory=list)
    """The file's names that are not used, as `allow_unexpected` permits."""
    unused_buffers: list[str] = field(default_factory=list)
    """The file's names of buffers that are not persistent in the model, and keep the model's own values."""
    casts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(dtype in the file, dtype in the model) -> number of tensors."""
    disagreeing: list[tuple[str, str]] = field(default_factory=list)
    """(what is read, another), as the file calls them: names of one tie with different values at their beginning."""
    differences: list[str] = field(default_factory=list)
    """Sentences about what does not fit; empty if everything fits."""


def _compare(file: WeightsFile, model: _Model, source: InitFromConfig) -> _Comparison:
    """See `match_weights`."""
    there = source.renamed(file.names)
    result = _Comparison()
    left_out = set[str]()  # the model's names of tensors that have another shape, and may
    tied = set[str]()  # names of tied parameters that were compared under one of their names
    for name, shape in model.wanted.items():
        names = model.names_of(name)
        present = [other for other in names if other in there]
        may_miss = any(_matches(other, source.allow_missing) for other in names)
        wrong = {other: text for other in present if (text := _shape_text(file, other, there[other], shape))}
        if wrong and may_miss and all(_either_matches(other, there[other], source.allow_unexpected) for other in wrong):
            left_out.update(wrong)
            present = [other for other in present if other not in wrong]
            wrong = {}
        if wrong:
            result.other_shape |= wrong
            continue
        if not present and (may_miss or name in model.optional):
            result.missing.add(name)
            continue
        first_of_tie = not tied.intersection(names)
        tied.update(names)
        if present:
            used = [other for other in present if not _either_matches(other, there[other], source.allow_unexpected)]
            _read(file, model, result, name, [there[other] for other in used or present], compare=first_of_tie)
        elif first_of_tie:
            result.lacking.append(name)
    _sort_unread(file, model, source, result, there, left_out)
    # One name for each tensor, as in the number of all.
    all_unexpected = set(result.unexpected)
    unexpected = [name for name in result.unexpected if file.aliases.get(name) not in all_unexpected]
    result.differences = [
        *_not_in(result.lacking, model.number_of_tensors(), "model", "file"),
        *_not_in(unexpected, len(set(file.names) - set(file.aliases)), "file", "model"),
        *[f"{len(x)} {_has(x)} another shape: {format_name_list(list(x.values()))}" for x in (result.other_shape,) if x],
        *[
            f"{len(x)} {_has(x)} values of another kind: {format_name_list(list(x.values()))}"
            for x in (result.other_kind,)
            if x
        ],
    ]
    return result


def _read(file: WeightsFile, model: _Model, result: _Comparison, name: str, stored: Sequence[str], *, compare: bool) -> None:
    """Note in `result` that the model's `name` begins with the first of `stored`, the file's names of it.

    `compare`: whether that is to be compared with the others, which are further names of one tied parameter.
    """
    first, *others = stored
    there, here = file.names[first].dtype, model.dtype_of(name)
    new = first not in result.read
    if there != here and not (there in FLOATING and here in FLOATING):
        result.other_kind[name] = f"{name} is {here} in the model and {there} in the file"
    elif there != here and new:
        result.casts[there, here] += 1
    if new and compare:
        result.disagreeing += [(first, other) for other in others if file.differ(first, other)]
    result.names[name] = first
    result.read.add(first)


def _sort_unread(
    file: WeightsFile,
    model: _Model,
    source: InitFromConfig,
    result: _Comparison,
    there: Mapping[str, str],
    left_out: Collection[str],
) -> None:
    """Note in `result` the file's tensors that no tensor of the model begins with: those that are allowed, and those that are
    not.

    `there`: the model's name -> the file's, of all that the file has.
    """
    known = {*model.wanted, *model.ties, *model.optional}
    read = {file.aliases.get(name, name) for name in result.read}
    for name, old in there.items():
        if name in left_out:
            result.allowed_unexpected.append(old)
        elif name in known:
            if name in model.optional and name not in model.wanted:
                result.unused_buffers.append(old)
        elif file.aliases.get(old, old) in read:
            continue  # another name of what is read
        elif _either_matches(name, old, source.allow_unexpected):
            result.allowed_unexpected.append(old)
        else:
            result.unexpected.append(old)


def _shape_text(file: WeightsFile, name: str, old: str, shape: Sequence[int]) -> str:
    """The sentence about a tensor, called `old` in the file, whose shapes differ; "" if they are equal."""
    stored = file.names[old].shape
    if stored == tuple(shape):
        return ""
    as_there = "" if old == name else f" as {old}"
    return f"{name} is {list(shape)} in the model and {list(stored)} in the file{as_there}"


# -- cures -------------------------------------------------------------------------------------------------------------------


def _cure(file: WeightsFile, model: _Model, source: InitFromConfig, found: _Comparison) -> str:
    """The cure for the differences found: a setting of `init_from`, if one would help."""
    if found.lacking and isinstance(file.path, Path) and PART.fullmatch(file.path.name):
        there = any(file.path.parent.glob("*.safetensors.index.json"))
        return f"it is one file of several: give the folder, {file.path.parent}" + (
            "" if there else ", with the index of the model (a file model.safetensors.index.json) beside them"
        )
    best = _other_prefix(file, model, source)
    if best is not None:
        then = _compare(file, model, best).differences
        return f"its names differ by a prefix: set init_from to {_literal(best)}" + f"; then {'; '.join(then)}" * bool(then)
    for name in found.lacking[:MAX_SHOWN_NAMES]:
        near = difflib.get_close_matches(name, found.unexpected[:1000], n=1, cutoff=0.8)
        if near:
            return (
                f"{near[0]} in the file for {name}? Then set init_from to "
                f"{_literal(source, rename={'^' + re.escape(near[0]) + '$': name})}"
            )
    if found.other_kind:
        return "convert the file, or change the model"
    if not found.names:
        return "give weights of this model; if they are called otherwise there, write init_from.rename: {pattern: replacement}"
    missing = _patterns([*found.lacking, *found.other_shape], model.wanted)
    unexpected = _patterns([*found.unexpected, *found.other_shape], file.names)
    allow = {"allow_missing": missing} if missing else {}
    allow |= {"allow_unexpected": unexpected} if unexpected else {}
    if max(len(missing), len(unexpected)) > _MAX_PATTERNS:
        return "give weights of this model"
    return (
        f"give weights of this model; if it is meant so (a new head, for example), set init_from to {_literal(source, **allow)}"
    )


def _other_prefix(file: WeightsFile, model: _Model, source: InitFromConfig) -> InitFromConfig | None:
    """`source` with the prefixes under which the file has most of the model; None if other prefixes find no more."""

    def number(with_these: InitFromConfig) -> int:
        try:
            there = with_these.renamed(file.names)
        except ConfigError:
            return 0
        return sum(any(other in there for other in model.names_of(name)) for name in model.wanted)

    parts = tuple(dict.fromkeys(f"{name.partition('.')[0]}." for name in model.wanted))
    choices = [
        source.replace(strip_prefix=strip, add_prefix=add)
        for strip in _common_prefixes(file.names)
        for add in (*_common_prefixes(model.wanted), *([parts] if 1 < len(parts) <= _MAX_PARTS else []))
        if strip != add or not strip
    ]
    best = max(choices, key=lambda choice: (number(choice), -len("".join((choice.strip_prefix, *choice.add_prefix)))))
    return best if number(best) > number(source) else None


def _common_prefixes(names: Iterable[str]) -> list[str]:
    """Prefixes of one to three dotted parts that at least half of the names share, and the empty prefix."""
    names = list(names)
    found: Counter[str] = Counter()
    for name in names:
        found.update(_dotted_prefixes(name))
    return ["", *(prefix for prefix, number in found.items() if number >= 2 and number * 2 >= len(names))]


def _dotted_prefixes(name: str) -> list[str]:
    """The prefixes of one to three dotted parts of a name: `model.`, `model.layers.`."""
    parts = name.split(".")
    return [".".join(parts[:n]) + "." for n in range(1, min(4, len(parts)))]


def _literal(source: InitFromConfig, **changed: Json) -> str:
    """The value of `init_from` on one line, as both a job file and Python read it; `changed` settings are added to those of
    `source`."""
    settings: dict[str, Json] = {
        "path": str(source.path),
        "strip_prefix": source.strip_prefix,
        "add_prefix": source.add_prefix,
        "rename": dict(source.rename),
        "allow_missing": list(source.allow_missing),
        "allow_unexpected": list(source.allow_unexpected),
    }
    for key, value in changed.items():
        before = settings[key]
        if isinstance(before, dict) and isinstance(value, dict):
            settings[key] = before | value
        elif isinstance(before, list) and isinstance(value, list):
            settings[key] = [*before, *(x for x in value if x not in before)]
    return json.dumps({key: value for key, value in settings.items() if value}, ensure_ascii=False)


def _patterns(names: Collection[str], among: Iterable[str]) -> list[str]:
    """Patterns that match all of `names` and no others of `among`: a module's tensors, or those of a whole layer if these
    are more than `MAX_SHOWN_NAMES`."""
    found = _tight_patterns(names, among, by_layer=False)
    return found if len(found) <= MAX_SHOWN_NAMES else _tight_patterns(names, among, by_layer=True)


def _tight_patterns(names: Collection[str], among: Iterable[str], *, by_layer: bool) -> list[str]:
    others = set(among) - set(names)
    tight: dict[str, bool] = {}
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        numbered, module = ".".join("*" if part.isdigit() else part for part in parts), ".".join([*parts[:-1], "*"])
        choices = [numbered] * (numbered != name) + [module] * (len(parts) > 1)
        if by_layer:
            choices = [".".join([*parts[:depth], "*"]) for depth in range(1, len(parts))] + choices
        for choice in choices:
            if choice not in tight:
                tight[choice] = not any(fnmatch.fnmatchcase(other, choice) for other in others)
        found[next((choice for choice in choices if tight[choice]), name)] = None
    return list(found)


# -- words -------------------------------------------------------------------------------------------------------------------


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _either_matches(name: str, old: str, patterns: Iterable[str]) -> bool:
    return _matches(name, patterns) or _matches(old, patterns)


def _dtype_name(dtype: str | torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _not_in(names: Sequence[str], total: int, there: str, where: str) -> list[str]:
    """The sentence about `names`, which of model and file only `there` has; empty if there are none."""
    whole = f"the {there}'s {count_noun(total, 'tensor')}"
    number = f"none of {whole} is" if len(names) == total else f"{len(names)} of {whole} {_is(names)} not"
    return [f"{number} in the {where}: {format_name_list(names)}"] if names else []


def _is(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _has(names: Collection[str]) -> str:
    return "has" if len(names) == 1 else "have"
