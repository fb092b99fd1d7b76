"""The driver's part for a run on shared storage: renews the lease, checks it before writes, and sends the working folder."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from raypar.actors.messages import GRACE_S, RunRequest
from raypar.actors.ray_lease_store import RayLeaseStore
from raypar.elastic import events as on
from raypar.errors import ClusterError, ConfigError, LeaseLostError, RayparError
from raypar.record.events import Event, RunWarning, StopRequest, Wait
from raypar.record.parse_events import text_event
from raypar.storage.folder_upload import FINISH_S, FolderUpload
from raypar.storage.held_lease import HeldLease
from raypar.storage.run_folder import SharedStoragePlace
from raypar.storage.run_lease import LeaseStore
from raypar.storage.s3_lease_store import s3_lease_store
from raypar.storage.storage_uri import StorageUri, parse_storage_uri
from raypar.storage.stored_file_layout import ALL_SENT_FILE, TEMPORARY_FOLDER_PREFIX

SAY_WAITING_S = 2.0
"""Time after which the end of a run says that it waits for the storage."""
TELL_S = 0.25
"""Time between two checks for notes of the upload and for a lost lease."""


class DriverStorageSession:
    """Holds the lease of a run on shared storage and uploads its working folder, for the driver."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        """The run's request; its `storage` is the URI of the run."""
        self.place = SharedStoragePlace(parse_storage_uri(request.storage), request.lease_owner, request.lease_in_ray)
        """The run's place, and the owner of its lease."""
        self.lease: HeldLease | None = None
        """The lease; None before `begin`."""
        self.upload = FolderUpload(Path(request.folder), self.place.uri, self.check)
        """Sends the working folder."""
        self.told = False
        """Whether the run machine was told that the lease is lost."""
        self.told_to_stop = False
        """Whether the run machine was told that somebody wants the run to stop."""

    @property
    def uri(self) -> StorageUri:
        """The run's place."""
        return self.place.uri

    def begin(self) -> None:
        """Renew the lease that the client has taken, and begin to send. Blocks for a few requests to the storage.

        If the storage does not answer, nothing is written until the lease is renewed. Raises `LeaseLostError`.
        """
        store: LeaseStore | None = RayLeaseStore(str(self.uri)) if self.place.lease_in_ray else s3_lease_store(self.uri)
        if store is None:
            raise ConfigError(f"{self.uri} has no lease on S3", cure="please report it")
        lease = HeldLease(store, self.place.owner, self.request.run, str(self.uri))
        try:
            lease.renew()
        except LeaseLostError:
            raise
        except ClusterError as error:
            lease.failure = error.what
        lease.start_renewing()
        self.lease = lease
        self.upload.start()

    def check(self) -> None:
        """Raise unless this driver may begin to write at the run's place (`HeldLease.check`)."""
        if self.lease is None:
            raise ClusterError(f"the lease of {self.uri} is not held yet")
        self.lease.check()

    async def watch(self, over: Callable[[], bool], note: Callable[[Event], None], post: Callable[[on.RunEvent], None]) -> None:
        """Pass on notes of the upload until the run is over, and watch the lease.

        If the lease is lost, post a failure of the run. If it holds a request to stop (`raypar stop`), post that request.
        """
        while not over():
            for kind, text in self.upload.take_notes():
                note(text_event(kind, text))
            if self.lease is not None and self.lease.stop_requested and not self.told_to_stop:
                self.told_to_stop = True
                note(StopRequest(text=f"`raypar stop {self.uri}` was called: finishing the step and saving"))
                post(on.StopRequested("raypar stop", interrupt=True, grace_s=GRACE_S))
            lost = self.upload.lost or (self.lease.lost if self.lease is not None else None)
            if lost is not None and not self.told:
                self.told = True
                self.upload.abandon()
                post(on.CallFailed("error", lost))
            await asyncio.sleep(TELL_S)

    async def finish(self, tell: Callable[[Event], None]) -> None:
        """Send what is left, and end the threads. A failure is only told, because the client then tries to send the rest."""
        try:
            if self.told:
                self.upload.abandon()
                return
            sending = asyncio.ensure_future(asyncio.to_thread(self.upload.finish))
            if not (await asyncio.wait({sending}, timeout=SAY_WAITING_S))[0]:
                tell(Wait(text=f"{self.uri} has not taken the run's last files yet: waiting up to {FINISH_S:.0f} s"))
            await sending
            with contextlib.suppress(OSError):
                (Path(self.request.folder) / ALL_SENT_FILE).touch()
        except RayparError as error:
            tell(RunWarning(text=str(error)))
        finally:
            for kind, text in self.upload.take_notes():
                tell(text_event(kind, text))
            if self.lease is not None:
                await asyncio.to_thread(self.lease.stop_renewing)
                if self.place.lease_in_ray and not self.told:  # the client may have left the Ray cluster by then
                    await asyncio.to_thread(self.lease.release)

    def remove_folder(self) -> None:
        """Remove the working folder of a run whose client is gone, if everything in it was sent."""
        folder = Path(self.request.folder)
        if folder.parent.name.startswith(TEMPORARY_FOLDER_PREFIX) and (folder / ALL_SENT_FILE).exists():
            shutil.rmtree(folder.parent, ignore_errors=True)
