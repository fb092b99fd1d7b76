"""Checkpoints in folders by their paths, for tests that damage, list and compare what lies there.

Has the functions of `checkpoint_files`; those that return a checkpoint return the path of its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.job.contract import contract_of_job
from raypar.worker.checkpoint import checkpoint_files

if TYPE_CHECKING:
    from raypar.worker.run_in_one_process import OneProcessRun


def __getattr__(name: str) -> Any:
    return getattr(checkpoint_files, name)


def create_checkpoint(root: Path, steps_done: int, **how: Any) -> Path:
    return Path(str(checkpoint_files.create_checkpoint(root, steps_done, **how)))


def commit_checkpoint(folder: Path, *given: Any, **facts: Any) -> Path:
    return Path(str(checkpoint_files.commit_checkpoint(folder, *given, **facts)))


def save_run(run: OneProcessRun, root: Path, done: int, contract: Mapping[str, Any] | None = None) -> Path:
    """What workers and their driver do after so many steps: all write, one commits. `contract`: by default that of the job."""
    begun = create_checkpoint(root, done)
    for core in run.cores:
        core.start_save(begun)
    records = [core.save_result() for core in run.cores]
    contract = contract_of_job(run.spec) if contract is None else contract
    return commit_checkpoint(begun, records, steps_done=done, contract=contract)


def latest_usable_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    found, skipped = checkpoint_files.latest_usable_checkpoint(root)
    return (None if found is None else Path(str(found))), skipped
