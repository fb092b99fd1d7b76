"""What the process that starts a run does for a run on shared storage: chooses its name, takes its lease, makes its folder.

The lease is taken before the run's files are read or written, and given back at the end. In between both this process and the
driver renew it.
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
from raypar.record.events import RunWarning, Wait
from raypar.record.folder import CHECKPOINTS, LINE_FILES
from raypar.storage.filesystems import open_filesystem, storage_errors
from raypar.storage.folder_download import download_run
from raypar.storage.folder_upload import FolderUpload
from raypar.storage.held_lease import HeldLease
from raypar.storage.list_and_remove_runs import remove_run
from raypar.storage.run_folder import RunFolder, SharedStoragePlace
from raypar.storage.s3_lease_store import s3_lease_store
from raypar.storage.storage_uri import StorageUri
from raypar.storage.stored_file_layout import ALL_SENT_FILE, TEMPORARY_FOLDER_PREFIX

if TYPE_CHECKING:
    from raypar.storage.run_lease import LeaseStore

NO_GUARD = (
    "only runs of this Ray cluster are kept from training in {place} at the same time, because raypar knows no conditional "
    "writes of this storage (S3 has them): use it from one cluster at a time"
)
LAST_TRY_S = 20.0
"""How long this process tries to send files that the driver has not sent."""


class ClientStorageSession:
    """Holds the lease of a run on shared storage for the process that starts the run, and sends what the driver could not."""

    def __init__(self, folder: RunFolder, tell: EventHandler, *, new: bool) -> None:
        assert folder.shared is not None
        self.folder = replace(folder, shared=replace(folder.shared, owner=uuid.uuid4().hex))
        """The run's working folder, with the id of the lease's owner."""
        self.tell = tell
        """Receives lines for the user."""
        self.new = new
        """Whether the run is new: its place was empty before."""
        self.lease: HeldLease | None = None
        """The lease; None before it is taken."""
        self.filled = new
        """Whether the working folder is the newest state of the run: only then is it sent at the end."""

    @property
    def uri(self) -> StorageUri:
        """The run's place."""
        assert self.folder.shared is not None
        return self.folder.shared.uri

    def take_on_storage(self) -> bool:
        """Take the lease on the storage itself. False if the storage has no conditional writes. Raises `LeaseHeldError`."""
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

        Raises `LeaseHeldError` if another process holds it.
        """
        if self.lease is not None:
            return
        from raypar.actors.ray_lease_store import RayLeaseStore

        self.tell(RunWarning(text=NO_GUARD.format(place=self.uri)))
        lease = self._held(RayLeaseStore(str(self.uri)))
        lease.take(lambda text: self.tell(Wait(text=text)))
        assert self.folder.shared is not None
        self.folder = replace(self.folder, shared=replace(self.folder.shared, lease_in_ray=True))
        self._keep(lease)

    def _held(self, store: LeaseStore) -> HeldLease:
        assert self.folder.shared is not None
        return HeldLease(store, self.folder.shared.owner, self.folder.name, str(self.uri))

    def _keep(self, lease: HeldLease) -> None:
        self.lease = lease
        lease.start_renewing()

    def end(self) -> None:
        """Send what the driver has not sent, and give the lease back. Removes a new run that ended before it wrote anything."""
        lease = self.lease
        if lease is None:
            return
        try:
            given_back = self.folder.shared is not None and self.folder.shared.lease_in_ray  # the driver gives it back
            if lease.lost is None or given_back:
                self._send_rest_and_release(lease)
        finally:
            lease.stop_renewing()

    def _send_rest_and_release(self, lease: HeldLease) -> None:
        """See `end`. The lease is held, or the driver has given it back."""
        there = self.folder.path.exists()
        if not there and self.new and not self._has_begun():
            with contextlib.suppress(RayparError):
                remove_run(self.uri)  # with the lease, if it lies there
        elif there and self.filled and not (self.folder.path / ALL_SENT_FILE).exists():
            upload = FolderUpload(self.folder.path, self.uri, lease.check)
            upload.start()
            try:
                upload.finish(LAST_TRY_S)
            except RayparError as error:
                kept = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_FOLDER_PREFIX}not-sent-"))
                with contextlib.suppress(OSError):
                    shutil.copytree(self.folder.path, kept / self.folder.name)
                self.tell(RunWarning(text=f"{error.what}\n  cure: copy them from {kept}"))
        lease.release()

    def _has_begun(self) -> bool:
        """Whether the run's place has checkpoints or metrics. True if the storage does not answer."""
        from pyarrow.fs import FileType

        with contextlib.suppress(RayparError), storage_errors(f"cannot read {self.uri}"):
            filesystem, path = open_filesystem(self.uri)
            found = filesystem.get_file_info([f"{path}/{CHECKPOINTS}", f"{path}/{LINE_FILES[0]}"])
            return any(info.type is not FileType.NotFound for info in found)
        return True


@contextlib.contextmanager
def new_run_on_storage(run_dir: StorageUri, name: str, tell: EventHandler) -> Iterator[RunFolder]:
    """Gives the block a working folder for a new run `name`, or `name-2`, ..., below `run_dir`, and holds its lease meanwhile.

    This process must have joined Ray. Raises `ClusterError` if the storage does not answer.
    """
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_FOLDER_PREFIX, ignore_cleanup_errors=True) as room:
        number = 1
        while True:
            uri = run_dir.child(name if number == 1 else f"{name}-{number}")
            number += 1
            if _is_taken(uri):
                continue
            hold = ClientStorageSession(RunFolder(Path(room) / uri.name, SharedStoragePlace(uri)), tell, new=True)
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
def resumed_run_on_storage(folder: RunFolder, tell: EventHandler) -> Iterator[Callable[[], RunFolder]]:
    """Hold the lease of a run on shared storage during the block. `folder`: a copy of the run's small files.

    Gives the block a function that returns the folder with the lease's owner. Call it once this process has joined Ray: without
    conditional writes the lease is taken there. The files are copied again once the lease is held. Raises `LeaseHeldError` if
    another process trains the run.
    """
    hold = ClientStorageSession(folder, tell, new=False)
    try:
        if hold.take_on_storage():
            download_run(hold.uri, folder.path, records=True)

        def folder_with_lease() -> RunFolder:
            if hold.lease is None:
                hold.take_in_ray()
                download_run(hold.uri, folder.path, records=True)
            hold.filled = True
            return hold.folder

        yield folder_with_lease
    finally:
        hold.end()


def names_of_checkpoints(folder: RunFolder) -> set[str]:
    """The names of the run's checkpoints. Raises `CheckpointError`."""
    from raypar.storage.checkpoint_store import open_checkpoint_store

    return set(open_checkpoint_store(folder.checkpoint_store_location).names())


def refuse_new_checkpoints(folder: RunFolder, before: set[str]) -> None:
    """Raise `ActiveError` if the run has a checkpoint that is not in `before`: another process has trained it meanwhile."""
    new = sorted(names_of_checkpoints(folder) - before)
    if new:
        raise ActiveError(
            f"run {folder.name} has got the checkpoint {new[-1]} meanwhile: another process trains it",
            cure="wait for its end, and run the same command again",
        )


def _is_taken(uri: StorageUri) -> bool:
    """Whether there is anything at a place. Raises `ClusterError`."""
    from pyarrow.fs import FileType

    from raypar.errors import ClusterError

    with storage_errors(f"cannot read {uri}", ClusterError):
        filesystem, path = open_filesystem(uri)
        return filesystem.get_file_info(path).type is not FileType.NotFound
