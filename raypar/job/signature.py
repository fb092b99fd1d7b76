"""Writes the parameters of `Trainer.__init__` from the tree of a job, typed for editors and type checkers.

`python -m raypar.job.signature raypar/trainer.py` writes them into the file, between two marks.
"""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from raypar.job.data_section import SamplesConfig
from raypar.job.function_section import FunctionConfig
from raypar.job.job import Job
from raypar.job.read_job import RunArguments
from raypar.job.section import PathText

BEGIN, END = "        # keys of a job: generated", "        # keys of a job: end"
MORE = {"elastic": "bool", "plan": "ParallelPlan"}
"""Key -> what `Trainer` takes beside what its section takes everywhere."""


def signature_text() -> str:
    """The lines of all parameters: what a job cannot do without, then its other keys, then how it is run."""
    keys = sorted(Job.model_fields.items(), key=lambda item: (not item[1].is_required(), not _is_function(item[1])))
    return "".join(f"        {_parameter(name, info)},\n" for name, info in [*keys, *RunArguments.model_fields.items()])


def with_signature(source: str) -> str:
    """The source of `trainer.py` with the parameters between its marks written anew."""
    return re.sub(f"(?<={BEGIN}\n).*?(?={END}\n)", lambda _: signature_text(), source, count=1, flags=re.DOTALL)


def _is_function(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, FunctionConfig)


def _parameter(name: str, info: FieldInfo) -> str:
    """`seed: int = 0`."""
    kinds = [*_kinds(info.annotation, info.metadata), *([MORE[name]] if name in MORE else [])]
    kinds += ["None"] if info.default is None and kinds != ["Any"] and "None" not in kinds else []
    kinds.sort(key=lambda kind: kind == "None")
    text = f"{name}: {' | '.join(kinds)}"
    if info.is_required():
        return text
    default = info.default
    if isinstance(default, BaseModel):
        return f'{text} = DEFAULTS["{name}"]'
    return f"{text} = {json.dumps(default) if isinstance(default, str) else repr(default)}"


def _kinds(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[str]:
    """The alternatives of a type, as they are written in `trainer.py`. Raises `TypeError` for a type that is not known here."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if typing.get_args(PathText)[1] in metadata:
        yield from ("str", "os.PathLike[str]")
    elif origin is typing.Annotated:
        yield from _kinds(args[0], args[1:])
    elif origin in (typing.Union, types.UnionType):
        for inner in args:
            yield from _kinds(inner)
    elif origin is Literal:
        yield f"Literal[{', '.join(json.dumps(value) for value in args)}]"
    elif origin is dict and isinstance(args[1], type) and issubclass(args[1], FunctionConfig):
        yield "Mapping[str, FunctionArgument | MetricObject]"
    elif origin is tuple:
        inside = ["Callback", *_kinds(args[0])] if args[0] is FunctionConfig else _kinds(args[0])
        yield f"Sequence[{' | '.join(inside)}]"
    elif isinstance(annotation, type) and issubclass(annotation, FunctionConfig):
        yield "FunctionArgument"
        if issubclass(annotation, SamplesConfig):
            yield "SampleSource"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        first = next(iter(annotation.model_fields.values()))
        yield from _kinds(first.annotation, first.metadata) if first.is_required() else ()
        yield from ("Arguments", annotation.__name__)
    elif annotation is type(None):
        yield "None"
    elif annotation in (str, int, float, bool, Any):
        yield "Any" if annotation is Any else annotation.__name__
    else:
        raise TypeError(f"no words for the type {annotation}; add them to `_kinds`")


if __name__ == "__main__":
    for file in sys.argv[1:]:
        Path(file).write_text(with_signature(Path(file).read_text()))
