"""Runs jobs: from a checked job to a finished run. The command line and `Trainer` both come through here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypar.launch.result import Result
    from raypar.launch.resume import resume_job
    from raypar.launch.run_failure import raise_run_failure
    from raypar.launch.start_new_run import train_job_in_new_folder

__all__ = ["Result", "raise_run_failure", "resume_job", "train_job_in_new_folder"]
_WHERE = dict(zip(__all__, ("result", "run_failure", "resume", "start_new_run"), strict=True))


def __getattr__(name: str) -> Any:
    """Public names are imported when they are asked for: commands that read a run's folder need no job, nor what checks one."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
