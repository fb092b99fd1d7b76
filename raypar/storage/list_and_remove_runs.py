"""Lists the runs on shared storage, says which there are, and removes one."""

from __future__ import annotations

import contextlib

from raypar.errors import ConfigError
from raypar.record.folder import CHECKPOINTS
from raypar.storage.filesystems import list_folders, open_filesystem, storage_errors
from raypar.storage.storage_uri import StorageUri


def has_run(uri: StorageUri) -> bool:
    """Whether there is a run at this place. Raises `ConfigError` if the storage cannot be read."""
    from pyarrow.fs import FileType

    with storage_errors(f"cannot read {uri}", ConfigError):
        filesystem, path = open_filesystem(uri)
        job, checkpoints = filesystem.get_file_info([f"{path}/job.yaml", f"{path}/{CHECKPOINTS}"])
    return job.type is FileType.File or checkpoints.type is FileType.Directory


def has_document(uri: StorageUri, name: str) -> bool:
    """Whether the run at this place has a document of this name. Raises `ConfigError` if the storage cannot be read."""
    from pyarrow.fs import FileType

    with storage_errors(f"cannot read {uri}", ConfigError):
        filesystem, path = open_filesystem(uri)
        found: bool = filesystem.get_file_info(f"{path}/{name}").type is FileType.File
    return found


def list_runs_below(uri: StorageUri) -> list[tuple[StorageUri, float]]:
    """(place, Unix time of the last start) of all runs below a place, by ascending time. Raises `ConfigError`."""
    from pyarrow.fs import FileType

    with storage_errors(f"cannot read {uri}", ConfigError):
        filesystem, path = open_filesystem(uri)
        names = list_folders(filesystem, path)
        marks = ("cluster.json", "job.yaml")
        infos = filesystem.get_file_info([f"{path}/{name}/{mark}" for name in names for mark in marks]) if names else []
    started = {
        name: next(((info.mtime_ns or 0) / 1e9 for info in infos[2 * i : 2 * i + 2] if info.type is FileType.File), None)
        for i, name in enumerate(names)
    }
    there = [(uri.child(name), time_s) for name, time_s in started.items() if time_s is not None]
    return sorted(there, key=lambda pair: pair[1])


def remove_run(uri: StorageUri) -> None:
    """Remove everything at a run's place. Raises `ConfigError`."""
    # On GCS pyarrow has removed all objects when it raises FileNotFoundError, for a folder that is no object itself.
    with storage_errors(f"cannot remove {uri}", ConfigError), contextlib.suppress(FileNotFoundError):
        filesystem, path = open_filesystem(uri)
        filesystem.delete_dir(path)
