"""Makes the JSON schema of job files from the pydantic model of a job: editors complete and check job files with it.

It accepts every job file that raypar accepts. What it cannot say is found when the job is read: conditions on several keys, and
whether functions and files are there.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, BeforeValidator, PlainValidator
from pydantic.fields import FieldInfo

from raypar.files.json_type import Json
from raypar.job import elastic_section, function_section, init_from_section, plan_section
from raypar.job.average_section import AverageConfig
from raypar.job.data_section import ValidationConfig, ValidationSetConfig
from raypar.job.data_short_forms import FUNCTION_OF_FILES, MIXTURE
from raypar.job.function_section import FROM_FOLDER, SEVERAL_OPTIMIZERS, OptimizerEntry
from raypar.job.job import RUN_NAME, Job
from raypar.job.plain_values import to_plain_values
from raypar.job.section import MAX_WORKERS, FileList, PathText
from raypar.job.section_docstrings import key_docstring, section_docstring
from raypar.job.walk_sections import short_key
from raypar.plan.loss_scale import LEAST, MOST
from raypar.plan.stage_plan import GATHER_SPANS
from raypar.schedule.registry import ALIASES, NAMES

Schema = dict[str, Json]

DIALECT = "http://json-schema.org/draft-07/schema#"
"""What the YAML language server of editors reads."""
_FUNCTION: Schema = {"type": "string", "pattern": r"^[^:\s]+:[^:\s]+$"}
_COUNT: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_WORKERS}
_LEVEL: Schema = {"enum": list(range(plan_section.MOST_ZERO + 1))}
_SPAN: Schema = {"enum": list(GATHER_SPANS)}
_RANKS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_WORKERS - 1},
    "minItems": 1,
}
_TEXTS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}

SCHEMA_OF_VALIDATOR: dict[Callable[..., Any], tuple[Schema, ...]] = {
    function_section.callable_or_name: (_FUNCTION,),
    function_section._loss_function: (_FUNCTION, {"const": function_section.LOSS_OF_MODEL}),
    plan_section._counts: (_COUNT, {"type": "array", "items": _COUNT, "minItems": 1}),
    init_from_section._prefixes: ({"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}),
    plan_section._worker_grid: ({"type": "array", "items": _RANKS, "minItems": 1},),
    plan_section._layer_patterns: ({"type": "string", "minLength": 1}, _TEXTS),
    plan_section._zero_levels: (_LEVEL, {"const": "auto"}, {"type": "array", "items": _LEVEL, "minItems": 1}),
    plan_section._gather_spans: (_SPAN, {"type": "array", "items": _SPAN, "minItems": 1}),
    plan_section._offload_policy: ({"enum": ["full"]}, _TEXTS),
    plan_section._recompute_policy: ({"enum": ["none", "full", "auto"]}, _TEXTS),
    typing.get_args(PathText)[1].func: ({"type": "string"},),
    typing.get_args(FileList)[1].func: ({"type": "string"}, {"type": "array", "items": {"type": "string"}}),
}
"""Validator that accepts more, or less, than the annotated type -> the alternatives that it accepts in a job file."""


def _powers_of_two(least: int, most: int) -> list[float]:
    return [2.0**exponent for exponent in range(least, most + 1)]


SCHEMA_OF_KEY: dict[str, tuple[Schema, ...]] = {
    "name": ({"type": "string", "pattern": f"^{RUN_NAME}$"},),
    "plan.schedule": ({"enum": [*NAMES, *ALIASES]},),
    "precision.loss_scale.init_scale": ({"enum": _powers_of_two(LEAST, MOST)},),
    "precision.loss_scale.growth_factor": ({"enum": _powers_of_two(1, MOST)},),
    "precision.loss_scale.backoff_factor": ({"enum": _powers_of_two(LEAST, -1)},),
    "elastic.mirror": ({"enum": ["auto", "off"]}, {"type": "boolean"}, {"type": "integer", "minimum": 1}),
}
"""Key -> what it accepts, where neither its annotation nor a validator of `SCHEMA_OF_VALIDATOR` says it."""
SHORT_FORMS: dict[str, tuple[Schema, ...]] = {"elastic": ({"type": "boolean"},)}
"""Key of a section -> what may stand in the section's place, beside the value of its first key (see `_section`)."""
NEVER_EMPTY = {"elastic", "steps", "validation.function"}
"""Keys that may be left out of a job file, but not be written without a value."""


def make_schema() -> Schema:
    """The schema of a job file. Unknown keys and wrong types are errors by it; keys have their docstrings and defaults."""
    (schema,) = _section("", Job)
    epochs: Schema = {"required": ["epochs"], "properties": {"epochs": {"type": "number"}}}
    length: Schema = {"if": epochs, "then": {"not": {"required": ["steps"]}}, "else": {"required": ["steps"]}}
    return {"$schema": DIALECT, "title": "A job of raypar", **schema, **length}


MODEL_IS_MADE_BY: Schema = {
    "if": {"required": ["pretrained"], "properties": {"pretrained": {"type": "string"}}},
    "then": {"properties": {"function": {"const": FROM_FOLDER}}},
    "else": {"required": ["function"], "properties": {"adapter": {"type": "null"}}},
}
"""Of a model that is no text: a folder, or a function."""


def _data_is_made_by(*, mix: bool = False) -> Schema:
    """Of data that is no text: one of the short forms, or a function; likewise. `mix`: whether it may be a mixture."""
    made: Schema = {"required": ["function"]}
    if mix:
        given: Schema = {"required": ["mix"], "properties": {"mix": {"type": "array", "minItems": 1}}}
        made = {"if": given, "then": {"properties": {"function": {"const": MIXTURE}}}, "else": made}
    for key, function in FUNCTION_OF_FILES.items():
        given = {"required": [key], "properties": {key: {"type": ["string", "array"]}}}
        others: Schema = {other: {"type": "null"} for other in FUNCTION_OF_FILES if other != key}
        made = {"if": given, "then": {"properties": {"function": {"const": function}, **others}}, "else": made}
    return made


def _validation_is_made_by() -> Schema:
    """Of a validation that is no text: one data set, as `data`, or several by name."""
    keys = list(ValidationConfig.model_fields)
    of_one: Schema = {"propertyNames": {"enum": keys}, "properties": {"sets": {"maxProperties": 0}}}
    of_several: Schema = {
        "not": {"propertyNames": {"enum": [key for key in keys if key != "sets"]}},
        "properties": {"sets": {"minProperties": 1}},
    }
    return {
        "if": {"anyOf": [{"required": [key]} for key in ("function", *FUNCTION_OF_FILES)]},
        "then": {"allOf": [of_one, _data_is_made_by()]},
        "else": of_several,
    }


SEVERAL_OR_ONE: Schema = {
    "if": {"required": ["entries"], "properties": {"entries": {"type": "array", "minItems": 1}}},
    "then": {"properties": {"function": {"const": SEVERAL_OPTIMIZERS}}},
    "else": {"required": ["function"]},
}
"""Of an optimizer that is no text and no list: several, or one; likewise."""

MADE_BY: dict[str, Schema] = {
    "optimizer": SEVERAL_OR_ONE,
    "model": MODEL_IS_MADE_BY,
    "data": _data_is_made_by(mix=True),
    "data.mix": _data_is_made_by(),
    "validation": _validation_is_made_by(),
    "validation.sets": _data_is_made_by(),
}
"""Section -> what it must have in the place of its function, beside the condition that `_any_of` adds, as its `else`."""


def _section(key: str, section: type[BaseModel]) -> Iterator[Schema]:
    """The alternatives for a section: its short forms, and keys and values. `key`: the section's own; the whole job's is empty.

    A section may be given as the value of its first key, as in `optimizer: torch.optim:SGD` (`short_key`).
    """
    prefix = f"{key}." if key else ""
    if key and key != "optimizer.entries" and (first := short_key(section)) is not None:
        info = section.model_fields[first]
        for one in _alternatives(prefix + first, info.annotation, info.metadata):
            yield {**one, **_list_of_optimizers()} if key == "optimizer" else one
    yield from SHORT_FORMS.get(key, ())
    yield {
        "type": "object",
        "description": section_docstring(section),
        # first: validators go by this order, and a misspelt key may be the required one
        "additionalProperties": _any_of([*_section(f"{key}.sets", ValidationSetConfig)]) if key == "validation" else False,
        "properties": {
            name: {"description": key_docstring(section, name).replace("*none*", "none"), **_value(prefix + name, info)}
            for name, info in section.model_fields.items()
        }
        | _aliases(key),
        "required": [name for name, info in section.model_fields.items() if info.is_required() and key not in MADE_BY],
        **({"else": MADE_BY[key]} if key in MADE_BY else {}),
    }


def _aliases(key: str) -> Schema:
    """Other names of a section's keys -> their schema."""
    if key != "average":
        return {}
    return {
        "from": {
            "description": "The same as from_step.",
            **_value("average.from_step", AverageConfig.model_fields["from_step"]),
        }
    }


def _list_of_optimizers() -> Schema:
    """What a text in the place of an optimizer may be too. No alternative: validators name what is wrong in an item."""
    (entry,) = _section("optimizer.entries", OptimizerEntry)
    return {"type": ["string", "array"], "items": entry, "minItems": 1}


def _value(key: str, info: FieldInfo) -> Schema:
    """The schema of a key's value, with its default."""
    found = list(SCHEMA_OF_KEY.get(key) or _alternatives(key, info.annotation, info.metadata))
    default = info.default
    if default is None and key not in NEVER_EMPTY:
        found.append({"type": "null"})
    one = {name: part for name, part in _any_of(found).items() if name != "description"}
    if default in ((), {}) and "type" in one:  # not as an alternative: validators would no longer name what is wrong in an item
        one["type"] = [one["type"], "null"]
    if info.is_required() or default is None or key == "name":  # a job file has another name: its own
        return one
    return {**one, "default": to_plain_values(default)[0] if isinstance(default, BaseModel) else _plain(default)}


def _any_of(found: Sequence[Schema]) -> Schema:
    """The schema of what is right by one of several, of which one at most is of a section.

    `anyOf` of a section and its short forms would let validators say of a misspelt key in it that no alternative fits. So the
    section's keys stand outside of the condition: every validator names the key that is wrong.
    """
    if len(found) == 1:
        return found[0]
    section = next((one for one in found if "properties" in one), None)
    if section is None:
        return {"anyOf": [*found]}
    others = [one for one in found if one is not section]
    values = [value for one in others for value in _short_values(one)]
    return {
        **section,
        "type": list(dict.fromkeys(name for one in found for name in _type_names(one))),
        "if": {"not": {"type": section["type"]}},
        "then": others[0] if len(others) == 1 else {"anyOf": others},
        **({"examples": values} if values else {}),  # editors complete values by these; of a `then` they read no values
    }


def _short_values(schema: Schema) -> list[Json]:
    """The values that a schema without alternatives allows, where it names them."""
    if schema.get("type") == "boolean":
        return [True, False]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return list(values) if isinstance(values, list) else []


def _type_names(schema: Schema) -> list[str]:
    """The types that a schema without alternatives asks for. Raises `TypeError` for values of other types than text."""
    if "type" in schema:
        return [str(name) for name in schema["type"]] if isinstance(schema["type"], list) else [str(schema["type"])]
    if not all(isinstance(value, str) for value in _short_values(schema)):
        raise TypeError(f"no type for the values of {schema}")
    return ["string"]


def _plain(default: Any) -> Json:
    """A default of plain values, where a tuple is a list."""
    return list(default) if isinstance(default, tuple) else dict(default) if isinstance(default, Mapping) else default


def _alternatives(key: str, annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[Schema]:
    """The alternatives of a type, without None. Raises `TypeError` for a type that has no schema here."""
    for one in metadata:
        if isinstance(one, (BeforeValidator, PlainValidator)) and one.func is not elastic_section.switch:
            if one.func not in SCHEMA_OF_VALIDATOR:
                raise TypeError(f"{key}: no schema for the validator {one.func}; add it to SCHEMA_OF_VALIDATOR")
            yield from SCHEMA_OF_VALIDATOR[one.func]
            return
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from _alternatives(key, args[0], args[1:])
    elif origin in (typing.Union, types.UnionType):
        for inner in args:
            if inner is not type(None):
                yield from _alternatives(key, inner, metadata)
    elif origin is Literal:
        yield {"enum": list(args)}
    elif origin is tuple:
        yield {"type": "array", "items": _any_of([*_alternatives(key, args[0])]), **_least_length(metadata, "minItems")}
    elif origin is dict:
        kind: Schema | None = dict[type | types.UnionType, Schema](
            {str: {"type": "string"}, int | float: {"type": "number"}}
        ).get(args[1])
        if isinstance(args[1], type) and issubclass(args[1], BaseModel):
            kind = _any_of([*_section(key, args[1])])
        elif typing.get_origin(args[1]) is Literal:
            kind = _any_of([*_alternatives(key, args[1])])
        yield {"type": "object", "additionalProperties": kind} if kind else {"type": "object"}
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _section(key, annotation)
    elif annotation in (int, float):
        yield {"type": "integer" if annotation is int else "number", **_limits(metadata)}
    elif annotation is str:
        yield {"type": "string", **_least_length(metadata, "minLength")}
    elif annotation is bool:
        yield {"type": "boolean"}
    else:
        raise TypeError(f"{key}: no schema for the type {annotation}; add it to SCHEMA_OF_KEY")


def _least_length(metadata: Sequence[Any], word: str) -> Schema:
    """The least length of a text or a list, if it has one, in JSON schema's word for it."""
    return next(({word: one.min_length} for one in _flat(metadata) if isinstance(one, MinLen)), {})


_LIMITS = (
    (Gt, "gt", "exclusiveMinimum"), (Ge, "ge", "minimum"), (Lt, "lt", "exclusiveMaximum"), (Le, "le", "maximum"),
)  # fmt: skip
"""Kind of a limit -> its attribute, and JSON schema's word."""


def _limits(metadata: Sequence[Any]) -> Schema:
    """The limits of a number, in JSON schema's words."""
    found: Schema = {}
    for one in _flat(metadata):
        for kind, limit, word in _LIMITS:
            if isinstance(one, kind):
                found[word] = getattr(one, limit)
    return found


def _flat(metadata: Sequence[Any]) -> list[Any]:
    """Constraints, also those inside of pydantic's fields."""
    return [inner for one in metadata for inner in (one.metadata if isinstance(one, FieldInfo) else (one,))]
