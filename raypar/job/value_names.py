"""Names of values that sections and messages about them share, so that neither imports the other."""

from __future__ import annotations

from typing import Literal, get_args

AUTO, GIVEN = "<auto>", "<given>"
"""Tags of the two types of `plan`. Pydantic puts them into error locations; messages leave them out."""
PrecisionName = Literal["bf16"]
"""The values of a job's `precision.compute`."""
NO_FLOAT16 = "float16, which needs a scaled loss, is not supported yet"
"""What is said of float16, for messages."""


def precision_settings_text() -> str:
    """The values that a job's `precision` may have, in words: `{"compute": "bf16"}`."""
    return " or ".join(f'{{"compute": "{name}"}}' for name in get_args(PrecisionName))


def is_importable_name(text: str) -> bool:
    """Whether a text is `module:name`, both of names with dots."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))
