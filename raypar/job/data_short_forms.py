"""The short forms of `data` that stand in the place of its function: files, and a mixture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from raypar.errors import ConfigError
from raypar.files.printable_text import shorten
from raypar.job.section import as_file_list

T = TypeVar("T")

MIXTURE = "raypar.worker.data.mixture_dataset:Mixture"
"""The data set of `data.mix`, which is made of its sources."""

FUNCTION_OF_FILES = {
    "parquet": "raypar.data.parquet_files:ParquetFiles",
    "jsonl": "raypar.data.json_lines:JsonLines",
    "tar": "raypar.data.tar_shards:TarShards",
}
"""Key of `data` that names files -> the data set function that reads them; its argument `files` names them."""


def with_function_of_short_form(value: T) -> T | dict[str, Any]:
    """A section of data in which a short form names files or a mixture, with the function that reads them.

    Raises `ConfigError` for two short forms, and for one beside a function.
    """
    if not isinstance(value, Mapping):
        return value
    functions = FUNCTION_OF_FILES | {"mix": MIXTURE}
    named = [key for key in functions if value.get(key) not in ((None,) if key != "mix" else (None, [], ()))]
    if not named:
        return value
    key, function = named[0], functions[named[0]]
    others = [f"{other}: {shorten(value[other])}" for other in named[1:]]
    if value.get("function") not in (None, function):
        others = [f"function: {shorten(value['function'])}"]
    if others:
        raise ConfigError(
            f"{key}: {shorten(value[key])} and {others[0]} are given together, and either of them is the data set",
            cure="leave one out; several data sets: data.mix",
        )
    if key == "mix":
        return {**value, "function": function}
    given = value.get("args") or {}
    return {
        **value,
        "function": function,
        "args": {**given, "files": as_file_list(value[key])} if isinstance(given, Mapping) else given,
    }
