"""Which files of a working directory Ray uploads with a submitted job, and the meaning of its job client's errors."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from raypar.fences.private_api_fence import Fence
from raypar.ray_compat import TESTED

REQUEST_STATUS = re.compile(r"Request failed with status code (\d+): ")
"""The beginning of the job client's message when the job server refuses a request. The client raises a bare `RuntimeError` for
every HTTP status, so the status stands only there; if a release words it differently, the status is unknown."""


def _look_for_rules() -> ModuleType:
    from ray._private.runtime_env import packaging

    assert callable(packaging.get_excludes_from_ignore_files)
    return packaging


RULES = Fence(
    api="ray._private.runtime_env.packaging.get_excludes_from_ignore_files",
    reason="Ray parses .gitignore and .rayignore in its own way, and no public API gives the result",
    versions=TESTED,
    feature="checking that the job's files are uploaded",
    without="a job that needs a file that .gitignore or .rayignore excludes fails only on the cluster",
    probe=_look_for_rules,
)


def ignore_rules(place: Path, *, with_git: bool) -> list[tuple[str, Callable[[Path], bool]]] | None:
    """(name of the ignore file, predicate: whether it excludes a path) for the ignore files in a folder.

    None, after a warning, if this Ray has no such function.

    Raises `OSError` or `ValueError` for a file that cannot be read.
    """
    packaging = RULES.find()
    if packaging is None:
        return None
    get = packaging.get_excludes_from_ignore_files
    try:
        ray_only = get(place, include_gitignore=False)
        both = get(place, include_gitignore=with_git)
        names = [".gitignore"] * (len(both) - len(ray_only)) + [".rayignore"] * len(ray_only)
        return list(zip(names, both, strict=True))
    except TypeError as error:
        RULES.warn_of_unexpected_answer(error)
        return None


def has_job_client() -> bool:
    """Whether the packages that Ray's job client needs are installed; without them it raises a bare `RuntimeError`."""
    return importlib.util.find_spec("requests") is not None


def refused_status(error: Exception) -> int | None:
    """The HTTP status with which the job server has refused a request of Ray's job client; None for any other error."""
    found = REQUEST_STATUS.match(str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else int(found[1])


def is_package_too_large(error: Exception) -> bool:
    """Whether the working directory is too large: for the job server (HTTP 413), or for Ray's store (a bare `ValueError`).

    If a release words the latter's message differently, users see only Ray's message.
    """
    return refused_status(error) == 413 or (isinstance(error, ValueError) and "exceeds the maximum size" in str(error))
