"""Sets environment variables for the length of a block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def temporary_environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which Ray's processes inherit, and put the old ones back."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
