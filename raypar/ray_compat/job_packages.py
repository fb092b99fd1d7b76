"""Which files of a working directory Ray sends with a submitted job, and what its client raises where they are too many."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from raypar.fences.fence import Fence
from raypar.ray_compat import TESTED

REQUEST_STATUS = re.compile(r"Request failed with status code (\d+): ")
"""How the message of Ray's job client begins where the job server has refused: it raises a bare `RuntimeError` for every HTTP
status, so that the status is only there. In other words the status counts as unknown."""


def _look_for_rules() -> Any:
    from ray._private.runtime_env import packaging

    assert callable(packaging.get_excludes_from_ignore_files)
    return packaging


RULES: Fence[Any] = Fence(
    api="ray._private.runtime_env.packaging.get_excludes_from_ignore_files",
    reason="Ray's reading of .gitignore and .rayignore is its own, and no public API tells it",
    versions=TESTED,
    feature="checking that the job's files are sent along",
    without="a job that needs a file which .gitignore or .rayignore names fails on the cluster",
    probe=_look_for_rules,
)


def ignore_rules(place: Path, *, with_git: bool) -> list[tuple[str, Any]] | None:
    """(name of the ignore file, whether it names a path) of the rules in a folder; None where Ray has no such function.

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
        RULES.note_odd_answer(error)
        return None


def has_job_client() -> bool:
    """Whether what Ray's job client needs is installed; it raises a bare `RuntimeError` if not."""
    return importlib.util.find_spec("requests") is not None


def refused_status(error: Exception) -> int | None:
    """The HTTP status with which the job server has refused a request of Ray's job client; None for any other error."""
    found = REQUEST_STATUS.match(str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else int(found[1])


def is_package_too_large(error: Exception) -> bool:
    """Whether the working directory is too large: for the job server (HTTP 413), or for Ray's store.

    The latter is a bare `ValueError`; in other words only Ray's own message says it.
    """
    return refused_status(error) == 413 or (isinstance(error, ValueError) and "exceeds the maximum size" in str(error))
