"""A run on shared storage, from the side of the process that starts it: its name, its lease, its working folder.

The lease is taken before anything of a former run is read or written, given back at the end, and renewed in between: by this
process for as long as it lives, and by the driver.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import ActiveError, LeaseHeldError, RayparError
from raypar.launch.launch_options import EventHandler
from raypar.run_folder import RemotePlace, RunFolder
from raypar.storage.filesystems import check_storage_is_writable, open_filesystem, storage_errors
from raypar.storage.folder_download import download_run, remove_run
from raypar.storage.folder_upload import FolderUpload
from raypar.storage.held_lease import HeldLease
from raypar.storage.run_files import CHECKPOINTS, LINE_FILES, ROOM_PREFIX, SENT_MARK
from raypar.storage.s3_lease_store import s3_lease_store
from raypar.storage.storage_uri import StorageUri

if TYPE_CHECKING:
    from raypar.storage.run_lease import LeaseStore

NO_GUARD = (
    "only runs of this Ray cluster are kept from training in {place} at the same time: the storage has no conditional writes "
    "that raypar knows (S3 has), so leave it to one cluster at a time"
)
LAST_TRY_S = 20.0
"""How long this process tries to send what a driver has not sent."""


class RunHold:
    """The lease of one run in the process that starts it."""

    def __init__(self, folder: RunFolder, tell: EventHandler, *, new: bool) -> None:
        assert folder.remote is not None
        self.folder = replace(folder, remote=replace(folder.remote, owner=uuid.uuid4().hex))
        """The run's working folder, with the id of the lease's owner."""
        self.tell = tell
        """Gets lines for the user."""
        self.new = new
        """Whether nothing lay at the run's place before."""
        self.lease: HeldLease | None = None
        """The lease; None before it is taken."""

    @property
    def uri(self) -> StorageUri:
        """The run's place."""
        assert self.folder.remote is not None
        return self.folder.remote.uri

    def take_on_storage(self) -> bool:
        """Take the lease if the storage itself can keep one; False if it cannot. Raises `LeaseHeldError` if it is another's."""
        store = s3_lease_store(self.uri)
        if store is None:
            return False
        lease = self._held(store)
        lease.take()
        if not store.honours_conditions(lease.mine):
            return False
        self._keep(lease)
        return True

    def take_in_ray(self) -> None:
        """Take the lease in the key-value store of the Ray cluster that this process has joined, unless it is taken already.

        Raises `LeaseHeldError` if it is another's.
        """
        if self.lease is not None:
            return
        from raypar.actors.ray_lease_store import RayLeaseStore

        self.tell({"kind": "warning", "text": NO_GUARD.format(place=self.uri)})
        lease = self._held(RayLeaseStore(str(self.uri)))
        lease.take()
        assert self.folder.remote is not None
        self.folder = replace(self.folder, remote=replace(self.folder.remote, lease_in_ray=True))
        self._keep(lease)

    def _held(self, store: LeaseStore) -> HeldLease:
        assert self.folder.remote is not None
        return HeldLease(store, self.folder.remote.owner, self.folder.name, str(self.uri))

    def _keep(self, lease: HeldLease) -> None:
        self.lease = lease
        lease.start_renewing()

    def end(self) -> None:
        """Send what the driver has not sent, and give the lease back. A new run that ended before it began is removed."""
        lease = self.lease
        if lease is None:
            return
        try:
            given_back = self.folder.remote is not None and self.folder.remote.lease_in_ray  # by the driver
            if lease.lost is None or given_back:
                self._leave(lease)
        finally:
            lease.stop_renewing()

    def _leave(self, lease: HeldLease) -> None:
        """See `end`; the lease is held."""
        there = self.folder.path.exists()
        if not there and self.new and not self._has_begun():
            with contextlib.suppress(RayparError):
                remove_run(self.uri)  # with its lease, if that is there
        elif there and not (self.folder.path / SENT_MARK).exists():
            upload = FolderUpload(self.folder.path, self.uri, lease.check)
            upload.start()
            try:
                upload.finish(LAST_TRY_S)
            except RayparError as error:
                kept = Path(tempfile.mkdtemp(prefix=f"{ROOM_PREFIX}not-sent-"))
                with contextlib.suppress(OSError):
                    shutil.copytree(self.folder.path, kept / self.folder.name)
                self.tell({"kind": "warning", "text": f"{error.what}\n  cure: they are in {kept}: copy them from there"})
        lease.release()

    def _has_begun(self) -> bool:
        """Whether the run's place has checkpoints or metrics. True if the storage does not say."""
        from pyarrow.fs import FileType

        with contextlib.suppress(RayparError), storage_errors(f"cannot read {self.uri}"):
            filesystem, path = open_filesystem(self.uri)
            found = filesystem.get_file_info([f"{path}/{CHECKPOINTS}", f"{path}/{LINE_FILES[0]}"])
            return any(info.type is not FileType.NotFound for info in found)
        return True


@contextlib.contextmanager
def new_remote_run(run_dir: StorageUri, name: str, tell: EventHandler) -> Iterator[RunFolder]:
    """A working folder for a new run below `run_dir`, under `name` or `name-2`, ..., whose lease is held during the block.

    Call it when this process has joined Ray. Raises `ClusterError` if the storage does not answer.
    """
    with tempfile.TemporaryDirectory(prefix=ROOM_PREFIX, ignore_cleanup_errors=True) as room:
        number = 1
        while True:
            uri = run_dir.child(name if number == 1 else f"{name}-{number}")
            number += 1
            if _is_taken(uri):
                continue
            hold = RunHold(RunFolder(Path(room) / uri.name, RemotePlace(uri)), tell, new=True)
            try:
                if not hold.take_on_storage():
                    hold.take_in_ray()
            except LeaseHeldError:
                continue
            break
        try:
            hold.folder.path.mkdir()
            yield hold.folder
        finally:
            hold.end()


@contextlib.contextmanager
def resumed_remote_run(folder: RunFolder, tell: EventHandler) -> Iterator[Callable[[], RunFolder]]:
    """Hold the lease of a run on shared storage during the block; `folder` has a copy of its small files.

    Gives a function that returns the folder with the lease's owner; call it when this process has joined Ray, where the lease
    may be. The copy is made again under the lease. Raises `LeaseHeldError` if another process trains the run.
    """
    hold = RunHold(folder, tell, new=False)
    try:
        if hold.take_on_storage():
            download_run(hold.uri, folder.path)

        def held() -> RunFolder:
            if hold.lease is None:
                hold.take_in_ray()
                download_run(hold.uri, folder.path)
            return hold.folder

        yield held
    finally:
        hold.end()


def checkpoints_there(folder: RunFolder) -> set[str]:
    """The names of the run's checkpoints. Raises `CheckpointError`."""
    from raypar.worker.checkpoint.checkpoint_store import open_checkpoint_store

    return set(open_checkpoint_store(folder.checkpoint_location).names())


def refuse_new_checkpoints(folder: RunFolder, before: set[str]) -> None:
    """Raise `ActiveError` if the run has checkpoints that were not there `before`: another process has trained it meanwhile."""
    new = sorted(checkpoints_there(folder) - before)
    if new:
        raise ActiveError(
            f"run {folder.name} has got the checkpoint {new[-1]} meanwhile: another process trains it",
            cure="wait for its end, and run the same command again",
        )


def check_run_dir_on_storage(run_dir: StorageUri) -> None:
    """Raise `ConfigError` unless runs can be kept below this place: for S3 boto3 is there, and the storage takes files."""
    s3_lease_store(run_dir)
    check_storage_is_writable(run_dir)


def _is_taken(uri: StorageUri) -> bool:
    """Whether anything lies at a place. Raises `ClusterError`."""
    from pyarrow.fs import FileType

    from raypar.errors import ClusterError

    with storage_errors(f"cannot read {uri}", ClusterError):
        filesystem, path = open_filesystem(uri)
        return filesystem.get_file_info(path).type is not FileType.NotFound
