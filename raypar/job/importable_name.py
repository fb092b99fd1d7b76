"""Whether a text is the name of something that can be imported, module:name."""

from __future__ import annotations


def is_importable_name(text: str) -> bool:
    """Whether a text is `module:name`, both of names with dots."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))
