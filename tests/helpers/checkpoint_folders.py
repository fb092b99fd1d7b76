"""Checkpoints in folders by their paths, for tests that damage, list and compare what lies there.

Has the functions of `checkpoint_files`; those that return a checkpoint return the path of its folder.
"""

from pathlib import Path
from typing import Any

from raypar.worker.checkpoint import checkpoint_files


def __getattr__(name: str) -> Any:
    return getattr(checkpoint_files, name)


def create_checkpoint(root: Path, steps_done: int, **how: Any) -> Path:
    return Path(str(checkpoint_files.create_checkpoint(root, steps_done, **how)))


def commit_checkpoint(folder: Path, *given: Any, **facts: Any) -> Path:
    return Path(str(checkpoint_files.commit_checkpoint(folder, *given, **facts)))


def latest_usable_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    found, skipped = checkpoint_files.latest_usable_checkpoint(root)
    return (None if found is None else Path(str(found))), skipped
