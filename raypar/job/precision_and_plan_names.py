"""Names of precisions and of the forms of `plan`, which sections and the messages about them share."""

from __future__ import annotations

from typing import Literal, get_args

AUTO, GIVEN = "<auto>", "<given>"
"""Tags of the two types of `plan`. Pydantic puts them into error locations; messages leave them out."""
PrecisionName = Literal["bf16", "fp16"]
"""The values of a job's `precision.compute` and `precision.parameters`."""
COPIES_TEXT = " or ".join(f'{{"parameters": "{name}", "master": "float32"}}' for name in get_args(PrecisionName))
"""The other form of a job's `precision`, for messages about its keys."""


def precision_settings_text() -> str:
    """The values that a job's `precision` may have, in words: `{"compute": "bf16"}`."""
    return " or ".join(f'{{"compute": "{name}"}}' for name in get_args(PrecisionName))
