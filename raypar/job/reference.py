"""Makes the reference of all job keys and `Trainer` arguments, one Markdown page, from the pydantic model of a job.

`python -m raypar.job.reference examples/guides/reference.md` writes it.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, PlainValidator
from pydantic.fields import FieldInfo

from raypar.job import function_section, init_from_section, plan_section
from raypar.job.job import Job
from raypar.job.read_job import RunArguments
from raypar.job.section import FileList, PathText
from raypar.job.section_docstrings import key_docstring, section_docstring
from raypar.job.validation_errors import _COMMAND_LINE
from raypar.job.walk_sections import short_key, walk_sections
from raypar.schedule.registry import NAMES

TYPE_OF_VALIDATOR: dict[Callable[..., Any], str] = {
    function_section.callable_or_name: "`module:name`",
    function_section._loss_function: "`module:name`, or `model`",
    plan_section._counts: "integer ≥ 1, or a list of them",
    init_from_section._prefixes: "text, or a list of them",
    plan_section._worker_grid: "list of lists of integers ≥ 0",
    plan_section._layer_patterns: "a pattern, or a list of them",
    plan_section._recompute_policy: "`none`, `full`, `auto`, or a list of patterns",
    plan_section._offload_policy: "`full`, or a list of patterns",
    plan_section._zero_levels: "`0`, `1`, `2` or `3`, a list of them, or `auto`",
    plan_section._gather_spans: "`step`, `microbatch` or `layer`, or a list of them",
    typing.get_args(PathText)[1].func: "path",
    typing.get_args(FileList)[1].func: "path or URI, or a list of them",
}
"""Validator that accepts more than the annotated type -> the type in words."""

TYPE_OF_KEY: dict[str, str] = {
    "plan.schedule": ", ".join(f"`{name}`" for name in NAMES),
    "elastic": "[section](#elastic), or `true`, `false`",
    "plan": "[section](#plan), or `auto`",
    "optimizer": "[section](#optimizer), or just `module:name`, or a list of [sections](#optimizerentries)",
    "optimizer.entries": "list, each item: [section](#optimizerentries)",
    "elastic.mirror": "`auto`, `off`, or integer ≥ 1",
    "resume_from_checkpoint": "path, or a checkpoint",
    "scaling_config": "`ray.train.ScalingConfig`",
    "run_config": "`ray.train.RunConfig`",
    "checkpoint_config": "`ray.train.CheckpointConfig`",
}
"""Key or argument -> its type in words, where the annotation does not show it."""

TRAINER_ALSO_TAKES: dict[str, str] = {
    "model": "the function or class itself; a pair `(function, {arguments})`; a module that is built already, up to 32 MiB",
    "loss": "the function itself; a loss module without parameters, such as `nn.CrossEntropyLoss()`; a pair",
    "data": "the data set itself (anything with `__len__` and `__getitem__`); a function that makes it; a pair",
    "validation": "as `data`; a mapping of names to such data sets",
    "metrics": "of each name the function or class itself; an object with `update`, `compute` and `reset`; a pair",
    "optimizer": "the class itself; a pair such as `(torch.optim.SGD, {'lr': 0.1})`, in a list as `function`",
    "lr_schedule": "the function or class itself; a pair such as `(StepLR, {'step_size': 100})`",
    "plan": "a `raypar.ParallelPlan`, whose schedule is the argument `schedule`",
    "callbacks": "objects of classes derived from `raypar.Callback`; functions that make them; pairs",
    "init_from": "a `pathlib.Path`",
    "run_dir": "a `pathlib.Path`",
}
"""Argument of `Trainer` that is also a job key -> values that it takes besides those of a job file."""

HEAD = """\
# Reference: job keys and `Trainer` arguments

All keys of a job file, which are the arguments of `raypar.Trainer` too, with the same meaning, defaults and checks. This page
is made from the code by `python -m raypar.job.reference examples/guides/reference.md`, and a test compares the two.

| | job file | command line | Python |
|---|---|---|---|
| a key | `steps: 100` | `--set steps=100` | `Trainer(steps=100)` |
| a key in a section | `checkpoint: {every: 50}` | `--set checkpoint.every=50` | `Trainer(checkpoint={"every": 50})` |
| a function | `model: nets:Net` | `--set model=nets:Net` | `Trainer(model=nets.Net)` |
| its arguments | `model: {function: nets:Net, args: {n: 4}}` | `--set model.args.n=4` | `Trainer(model=(nets.Net, {"n": 4}))` |

`raypar train`, `resume`, `plan`, `submit` and `debug` take `--set`, as often as you like. A default of *none* means that the
key is left out (`None` in Python); *required* keys have no default. A pattern is a name in which `*` stands for any text. An
unknown key is an error that names the nearest known one; names that other frameworks use (`gradient_accumulation_steps`,
`max_grad_norm`, ...) are answered with ours.

An editor with a YAML language server (VS Code's YAML extension, Neovim, Emacs, PyCharm) completes job files, shows what keys
mean, and underlines misspelt keys and wrong types. Write the schema beside the job files, and name it in the first line of
each:

```sh
raypar job --schema > job.schema.json
```

```yaml
# yaml-language-server: $schema=job.schema.json
name: run
```
"""

OUTSIDE = """\
## Arguments of `Trainer` that are not keys of a job

They say where and how a job is run, not what it is.
"""


def make_reference() -> str:
    """The text of the whole page."""
    parts = [HEAD, "## Keys of a job\n", _table("", Job)]
    for path, section in walk_sections(Job):
        name = ".".join(path)
        parts += [f"## {name}\n", f"{section_docstring(section)}\n", _table(f"{name}.", section)]
    rows = [
        (f"`{name}`", _type_in_words(name, info), _default(info), key_docstring(RunArguments, name), _command_line(name))
        for name, info in RunArguments.model_fields.items()
    ]
    parts += [OUTSIDE, _format_table(("argument", "type", "default", "", "command line"), rows)]
    return "\n".join(parts)


def _table(prefix: str, section: type[BaseModel]) -> str:
    """The table of a section's keys. `prefix`: the section's path with a dot, such as `plan.`."""
    rows = [
        (
            f"`{prefix}{name}`",
            _type_in_words(prefix + name, info),
            _default(info),
            key_docstring(section, name),
            _also(prefix + name),
        )
        for name, info in section.model_fields.items()
    ]
    heads = ("key", "type", "default", "", "`Trainer` also takes")
    if not any(row[4] for row in rows):
        return _format_table(heads[:4], [row[:4] for row in rows])
    return _format_table(heads, rows)


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _also(key: str) -> str:
    return TRAINER_ALSO_TAKES.get(key, "")


def _command_line(name: str) -> str:
    if name == "schedule":
        return "`--set plan.schedule=NAME`"
    text = _COMMAND_LINE.get(name, "")
    return f"`{text}`" if text.startswith("--") else text


# -- types and defaults --------------------------------------------------------------------------------------------------


def _type_in_words(key: str, info: FieldInfo) -> str:
    """The type of a key, in words. Raises `TypeError` for a type that is not described here."""
    if key in TYPE_OF_KEY:
        return TYPE_OF_KEY[key]
    words = list(_words(key, info.annotation, info.metadata))
    if len(words) > 2:
        return ", ".join(words)
    return ", or ".join(words)


def _words(key: str, annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[str]:
    """The alternatives of a type, each in words."""
    for one in metadata:
        if isinstance(one, (BeforeValidator, PlainValidator)):
            if one.func not in TYPE_OF_VALIDATOR:
                raise TypeError(f"{key}: no words for the validator {one.func}; add them to TYPE_OF_VALIDATOR")
            yield TYPE_OF_VALIDATOR[one.func]
            return
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from _words(key, args[0], args[1:])
    elif origin in (typing.Union, types.UnionType):
        for inner in args:
            if inner is not type(None):
                yield from _words(key, inner)
    elif origin is Literal:
        yield from (f"`{value}`" for value in args)
    elif origin is tuple:
        (item,) = _words(key, args[0])
        yield f"list, each item: {item}" if "section" in item else f"list of {item}"
    elif origin is dict:
        named = {str: "mapping of text to text", int | float: "mapping of text to number"}
        of_sections = isinstance(args[1], type) and issubclass(args[1], BaseModel)
        yield f"mapping of text to {_section_in_words(key, args[1])}" if of_sections else named.get(args[1], "mapping")
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield _section_in_words(key, annotation)
    elif annotation in (int, float):
        yield ("integer" if annotation is int else "number") + _limits(annotation is int, metadata)
    elif annotation in (str, bool):
        yield {str: "text", bool: "`true`, `false`"}[annotation]
    else:
        raise TypeError(f"{key}: no words for the type {annotation}; add them to TYPE_OF_KEY")


def _section_in_words(key: str, section: type[BaseModel]) -> str:
    """A link to a section, and its short form: a section may be given as the value of its first key (`short_key`)."""
    first, short = short_key(section), ""
    if first is not None:
        info = section.model_fields[first]
        (short,) = _words(f"{key}.{first}", info.annotation, info.metadata) if first != "tracker" else (f"its `{first}`",)
        short = f", or just {short}"
    return f"[section](#{key.replace('.', '')}){short}"  # as pages make anchors of headings


def _limits(whole: bool, metadata: Sequence[Any]) -> str:
    """` ≥ 1`, ` from 1 to 65,536`, ` > 0`: the limits of a number."""
    limits = [inner for one in metadata for inner in (one.metadata if isinstance(one, FieldInfo) else (one,))]
    above: Any = next((one.gt for one in limits if isinstance(one, Gt)), None)
    least = next((one.ge for one in limits if isinstance(one, Ge)), above + 1 if whole and above is not None else None)
    most = next((one.le for one in limits if isinstance(one, Le)), None)
    if least is not None:
        return f" from {least} to {most:,}" if most is not None else f" ≥ {least}"
    below: Any = next((one.lt for one in limits if isinstance(one, Lt)), None)
    if above is not None and below is not None:
        return f" between {above} and {below}"
    return f" > {above}" if above is not None else ""


def _default(info: FieldInfo) -> str:
    """A default as it would be written in a job file."""
    if info.is_required():
        return "*required*"
    value = info.default
    if value is None:
        return "*none*"
    if isinstance(value, BaseModel):
        function = getattr(value, "function", None)
        return f"`{function}`" if function else "*its defaults*"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value in ((), {}):
        return "*empty*"
    if isinstance(value, dict):
        return f"`{{{', '.join(f'{key}: {inner}' for key, inner in value.items())}}}`"
    return "*empty*" if value == "" else f"`{value:,}`" if isinstance(value, float) and value >= 1e6 else f"`{value}`"


if __name__ == "__main__":
    for file in sys.argv[1:]:
        Path(file).write_text(make_reference())
    if not sys.argv[1:]:
        print(make_reference())
