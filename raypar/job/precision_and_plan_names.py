"""Names of precisions and of the forms of `plan`, which sections and the messages about them share."""

from __future__ import annotations

from typing import Literal, get_args

AUTO, GIVEN = "<auto>", "<given>"
"""Tags of the two types of `plan`. Pydantic puts them into error locations; messages leave them out."""
PrecisionName = Literal["bf16"]
"""The values of a job's `precision.compute` and `precision.parameters`."""
NO_FLOAT16 = "float16, which needs a scaled loss, is not supported yet"
"""What is said of float16, for messages."""
COPIES_TEXT = '{"parameters": "bf16", "master": "float32"}'
"""The other form of a job's `precision`, for messages about its keys."""


def precision_settings_text() -> str:
    """The values that a job's `precision` may have, in words: `{"compute": "bf16"}`."""
    return " or ".join(f'{{"compute": "{name}"}}' for name in get_args(PrecisionName))
