"""Matches the names of a weights file with those of a model; differences are errors or notes, and nothing is guessed."""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raypar.errors import CheckpointError, ConfigError
from raypar.worker.weights_file import FLOATING, WeightsFile

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, Sequence[int]]
_SHOWN = 5
"""Differences of each kind that a message names."""


@dataclass(frozen=True)
class WeightsSource:
    """`init_from` of a job.

    The model's name of a tensor is the file's name without `strip_prefix`, then `rename`d, then with `add_prefix`. A name that
    does not begin with `strip_prefix` keeps its beginning.
    """

    path: str
    strip_prefix: str = ""
    add_prefix: str = ""
    rename: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement), as in `re.sub`, applied one after the other."""
    allow_missing: tuple[str, ...] = ()
    """Patterns (`head.*`) of the model's names that the file may lack: these get the model's own initial values."""
    allow_unexpected: tuple[str, ...] = ()
    """Patterns of the file's names, before or after renaming, that the model may lack.

    A tensor whose shape differs is left out if both `allow_missing` and `allow_unexpected` match it.
    """

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """The model's name -> the file's. Raises `ConfigError` if a setting matches no name, or two names become equal."""
        names = list(names)
        if self.strip_prefix and not any(name.startswith(self.strip_prefix) for name in names):
            raise ConfigError(
                f"init_from.strip_prefix {self.strip_prefix!r} is at the beginning of none of the {len(names)} names in "
                f"{self.path} ({_listed(names)})",
                cure="leave it out, or set the prefix that they have",
            )
        new = {name: name.removeprefix(self.strip_prefix) for name in names}
        for pattern, replacement in self.rename:
            try:
                after = {name: re.sub(pattern, replacement, now) for name, now in new.items()}
            except (re.error, IndexError) as error:
                raise ConfigError(
                    f"init_from.rename {pattern!r} -> {replacement!r} is no replacement: {error}",
                    cure="see Python's re.sub: a regular expression, and \\1 for its first group",
                ) from error
            if after == new and not any(re.search(pattern, now) for now in new.values()):
                raise ConfigError(
                    f"init_from.rename {pattern!r} matches none of the file's names ({_listed(list(new.values()))})",
                    cure="leave it out, or correct it",
                )
            new = after
        found: dict[str, str] = {}
        for name, now in new.items():
            now = self.add_prefix + now
            if now in found:
                raise ConfigError(
                    f"init_from: {found[now]} and {name} would both be {now}", cure="correct rename, or strip_prefix"
                )
            found[now] = name
        return found


@dataclass(frozen=True)
class Matching:
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
    source: WeightsSource | None = None,
    dtype: str | torch.dtype = "float32",
    dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> Matching:
    """The tensor of `file` for each of `wanted`: name -> shape of the model's parameters and persistent buffers.

    Raises `CheckpointError` that lists tensors that are missing, unexpected, or of another shape or dtype, unless `source`
    allows them. Floating-point values are cast; others must have the model's dtype.

    `ties`: groups of names of one parameter; the file needs one of a group. If it has several, their shapes are compared and
    the first one's values are used; a note tells of others that begin otherwise. `optional`: names of non-persistent buffers;
    the file may have them, and they are read if they are in `wanted` too. `dtype`: the model's; `dtypes`: those of tensors
    with another one.
    """
    source = source or WeightsSource(str(file.path))
    here, others = _dtype_name(dtype), {name: _dtype_name(each) for name, each in (dtypes or {}).items()}
    found = _compare(file, wanted, ties, optional, source, here, others)
    if found.differences:
        raise CheckpointError(
            f"{file.path} does not fit the model: {'; '.join(found.differences)}",
            cure=_cure(file, wanted, ties, optional, source, here, others, found),
        )
    if wanted and not found.names and found.missing - set(optional):
        raise CheckpointError(
            f"none of the model's {len(wanted)} tensors is in {file.path}, and init_from.allow_missing allows it",
            cure="give weights of this model, correct rename or the prefixes, or leave init_from out",
        )
    short = file.path.name
    new, unused = [name for name in wanted if name in found.missing - set(optional)], found.allowed_unexpected
    notes = [*file.notes]
    notes += [
        f"{short} has {first} and {other}, which are one parameter of the model, with different values: "
        f"those of {first} are used"
        for first, other in found.disagreeing
    ]
    notes += [
        f"{short} holds {there}: {number} {'tensors are' if number > 1 else 'tensor is'} cast to {here}"
        for (there, here), number in sorted(found.casts.items())
    ]
    if new:
        begin = "begin" if len(new) > 1 else "begins"
        notes.append(f"{_tensors(new)} {begin} with the model's own initial values, not with those of {short}: {_listed(new)}")
    if unused:
        notes.append(f"{_tensors(unused)} of {short} {_is(unused)} not used: {_listed(unused)}")
    if buffers := found.unused_buffers:
        notes.append(
            f"{_tensors(buffers)} of {short} {_is(buffers)} not used, since the model's own values of buffers that are "
            f"not persistent are: {_listed(buffers)}"
        )
    return Matching(found.names, tuple(name for name in wanted if name in found.missing), tuple(notes))


@dataclass
class _Comparison:
    """The model's names compared with the file's, after renaming."""

    names: dict[str, str] = field(default_factory=dict)
    """The model's name -> the file's, where both have the tensor."""
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


def _compare(
    file: WeightsFile,
    wanted: Shapes,
    ties: Sequence[Sequence[str]],
    optional: Collection[str],
    source: WeightsSource,
    dtype: str,
    dtypes: Mapping[str, str],
) -> _Comparison:
    """See `match_weights`."""
    there = source.renamed(file.names)
    tied = {name: tuple(names) for names in ties for name in names}
    known = {*wanted, *tied, *optional}
    result = _Comparison()
    used, left_out, told = set[str](), set[str](), set[str]()
    for name, shape in wanted.items():
        names = (name, *(other for other in tied.get(name, ()) if other != name))
        present = [other for other in names if other in there]
        allowed = any(_matches(other, source.allow_missing) for other in names)
        wrong = {other: text for other in present if (text := _shape_text(file, other, there[other], shape))}
        if wrong and allowed and all(_either_matches(other, there[other], source.allow_unexpected) for other in wrong):
            left_out.update(wrong)
            present = [other for other in present if other not in wrong]
            wrong = {}
        if wrong:
            result.other_shape |= wrong
        elif present:
            stored, here = file.names[there[present[0]]].dtype, dtypes.get(name, dtype)
            if stored != here and not (stored in FLOATING and here in FLOATING):
                result.other_kind[name] = f"{name} is {here} in the model and {stored} in the file"
            elif stored != here and there[present[0]] not in used:
                result.casts[stored, here] += 1
            result.names[name] = there[present[0]]
            if there[present[0]] not in used and not told.intersection(names):
                told.update(names)
                read, *others = (there[other] for other in present)
                result.disagreeing += [(read, other) for other in others if file.differ(read, other)]
            used.add(there[present[0]])
        elif allowed or name in optional:
            result.missing.add(name)
        elif not told.intersection(names):
            result.lacking.append(name)
            told.update(names)
    used_tensors = {file.aliases.get(name, name) for name in used}
    for name, old in there.items():
        if name in left_out:
            result.allowed_unexpected.append(old)
        elif name in known:
            if name in optional and name not in wanted:
                result.unused_buffers.append(old)
        elif file.aliases.get(old, old) in used_tensors:
            continue  # another name of what is read
        elif _either_matches(name, old, source.allow_unexpected):
            result.allowed_unexpected.append(old)
        else:
            result.unexpected.append(old)
    result.differences = [
        *_not_in(result.lacking, _number_of_tensors(wanted, tied), "model", "file"),
        *_not_in(result.unexpected, len(set(file.names) - set(file.aliases)), "file", "model"),
        *[f"{len(x)} {_has(x)} another shape: {_listed(list(x.values()))}" for x in (result.other_shape,) if x],
        *[f"{len(x)} {_has(x)} values of another kind: {_listed(list(x.values()))}" for x in (result.other_kind,) if x],
    ]
    return result


def _shape_text(file: WeightsFile, name: str, old: str, shape: Sequence[int]) -> str:
    """The sentence about a tensor, called `old` in the file, whose shapes differ; "" if they are equal."""
    stored = file.names[old].shape
    if stored == tuple(shape):
        return ""
    as_there = "" if old == name else f" as {old}"
    return f"{name} is {list(shape)} in the model and {list(stored)} in the file{as_there}"


# -- cures -------------------------------------------------------------------------------------------------------------------


def _cure(
    file: WeightsFile,
    wanted: Shapes,
    ties: Sequence[Sequence[str]],
    optional: Collection[str],
    source: WeightsSource,
    dtype: str,
    dtypes: Mapping[str, str],
    found: _Comparison,
) -> str:
    """The cure for the differences found: a setting of `init_from`, if one would help."""
    part = re.fullmatch(r"(.+)-\d{5}-of-\d{5}\.safetensors", file.path.name)
    if part and found.lacking and any(file.path.parent.glob("*.safetensors.index.json")):
        return f"it is one file of several: give the folder, {file.path.parent}"
    best = _other_prefix(file, wanted, ties, source)
    if best is not None:
        then = _compare(file, wanted, ties, optional, best, dtype, dtypes).differences
        return f"its names differ by a prefix: write init_from: {_yaml(best)}" + f"; then {'; '.join(then)}" * bool(then)
    for name in found.lacking[:_SHOWN]:
        near = difflib.get_close_matches(name, found.unexpected[:1000], n=1, cutoff=0.8)
        if near:
            return (
                f"{near[0]} in the file for {name}? Then write init_from: "
                f"{_yaml(source, rename={'^' + re.escape(near[0]) + '$': name})}"
            )
    if found.other_kind:
        return "convert the file, or change the model"
    if not found.names:
        return "give weights of this model; if they are called otherwise there, write init_from.rename: {pattern: replacement}"
    missing = _patterns([*found.lacking, *found.other_shape], wanted)
    unexpected = _patterns([*found.unexpected, *found.other_shape], file.names)
    allow = {"allow_missing": missing} if missing else {}
    allow |= {"allow_unexpected": unexpected} if unexpected else {}
    return f"give weights of this model; if it is meant so (a new head, for example), write init_from: {_yaml(source, **allow)}"


def _other_prefix(
    file: WeightsFile, wanted: Shapes, ties: Sequence[Sequence[str]], source: WeightsSource
) -> WeightsSource | None:
    """`source` with the prefixes under which the file has most of the model; None if other prefixes find no more."""
    tied = {name: tuple(names) for names in ties for name in names}

    def number(with_these: WeightsSource) -> int:
        try:
            there = with_these.renamed(file.names)
        except ConfigError:
            return 0
        return sum(any(other in there for other in (name, *tied.get(name, ()))) for name in wanted)

    choices = [
        replace(source, strip_prefix=strip, add_prefix=add)
        for strip in _common_prefixes(file.names)
        for add in _common_prefixes(wanted)
        if strip != add or not strip
    ]
    best = max(choices, key=lambda choice: (number(choice), -len(choice.strip_prefix + choice.add_prefix)))
    return best if number(best) > number(source) else None


def _common_prefixes(names: Iterable[str]) -> list[str]:
    """Prefixes of one to three dotted parts that at least half of the names share, and the empty prefix."""
    names = list(names)
    found: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        found.update(".".join(parts[:n]) + "." for n in range(1, min(4, len(parts))))
    return ["", *(prefix for prefix, number in found.items() if number >= 2 and number * 2 >= len(names))]


def _yaml(source: WeightsSource, **changed: object) -> str:
    """The value of `init_from` as written in a job file, on one line; `changed` settings are added to those of `source`."""
    settings = {
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
    return "{" + ", ".join([f"path: {source.path}", *(f"{k}: {json.dumps(v)}" for k, v in settings.items() if v)]) + "}"


def _patterns(names: Collection[str], among: Iterable[str]) -> list[str]:
    """Up to five patterns that match `names` and no others of `among`; as few as possible."""
    others = set(among) - set(names)
    tight: dict[str, bool] = {}
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        numbered, module = ".".join("*" if part.isdigit() else part for part in parts), ".".join([*parts[:-1], "*"])
        choices = [numbered] * (numbered != name) + [module] * (len(parts) > 1)
        for choice in choices:
            if choice not in tight:
                tight[choice] = not any(fnmatch.fnmatchcase(other, choice) for other in others)
        found[next((choice for choice in choices if tight[choice]), name)] = None
        if len(found) == _SHOWN:
            break
    return list(found)


# -- words -------------------------------------------------------------------------------------------------------------------


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _either_matches(name: str, old: str, patterns: Iterable[str]) -> bool:
    return _matches(name, patterns) or _matches(old, patterns)


def _dtype_name(dtype: str | torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _number_of_tensors(wanted: Shapes, tied: Mapping[str, tuple[str, ...]]) -> int:
    """Number of tensors in `wanted`, a tie counted once."""
    return len({tied.get(name, (name,))[0] for name in wanted})


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _tensors(names: Collection[str]) -> str:
    return f"{len(names)} tensor" + "s" * (len(names) != 1)


def _not_in(names: Sequence[str], total: int, there: str, where: str) -> list[str]:
    """The sentence about `names`, which of model and file only `there` has; empty if there are none."""
    whole = f"the {there}'s {total} tensors"
    number = f"none of {whole} is" if len(names) == total else f"{len(names)} of {whole} {_is(names)} not"
    return [f"{number} in the {where}: {_listed(names)}"] if names else []


def _is(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _has(names: Collection[str]) -> str:
    return "has" if len(names) == 1 else "have"
