"""A run on shared storage, from the side of its driver: renews the lease, sends the working folder, guards writes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from raypar.actors.ray_lease_store import RayLeaseStore
from raypar.actors.run_request import RunRequest
from raypar.elastic import events as on
from raypar.errors import ClusterError, ConfigError, LeaseLostError, RayparError
from raypar.run_folder import RemotePlace
from raypar.storage.folder_upload import FolderUpload
from raypar.storage.held_lease import HeldLease
from raypar.storage.run_files import ROOM_PREFIX, SENT_MARK
from raypar.storage.run_lease import LeaseStore
from raypar.storage.s3_lease_store import s3_lease_store
from raypar.storage.storage_uri import StorageUri, parse_storage_uri

LOOK_S = 0.25
"""How often the loop looks whether there is something to tell of the upload or of the lease."""


class RemoteRun:
    """The lease and the upload of one run's driver."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        """The run's request, whose `storage` says where the run lies."""
        self.place = RemotePlace(parse_storage_uri(request.storage), request.lease_owner, request.lease_in_ray)
        """The run's place, and who holds its lease."""
        self.lease: HeldLease | None = None
        """The lease; None before `begin`."""
        self.upload = FolderUpload(Path(request.folder), self.place.uri, self.check)
        """Sends the working folder."""
        self.told = False
        """Whether the run machine was told that the lease is lost."""

    @property
    def uri(self) -> StorageUri:
        """The run's place."""
        return self.place.uri

    def begin(self) -> None:
        """Renew the lease that the client has taken, and begin to send. Blocks for some requests to the storage.

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

    async def watch(self, over: Callable[[], bool], note: Callable[..., None], post: Callable[[on.RunEvent], None]) -> None:
        """Note what the upload has to tell, until the run is over; post a failure if the lease is lost."""
        while not over():
            for kind, text in self.upload.take_notes():
                note(kind, text=text)
            lost = self.upload.lost or (self.lease.lost if self.lease is not None else None)
            if lost is not None and not self.told:
                self.told = True
                self.upload.abandon()
                post(on.CallFailed("error", lost))
            await asyncio.sleep(LOOK_S)

    async def finish(self, tell: Callable[..., None]) -> None:
        """Send what is left, and end the threads. A failure is told, not raised: the client tries once more."""
        try:
            if self.told:
                self.upload.abandon()
                return
            await asyncio.to_thread(self.upload.finish)
            with contextlib.suppress(OSError):
                (Path(self.request.folder) / SENT_MARK).touch()
        except RayparError as error:
            tell("warning", text=str(error))
        finally:
            for kind, text in self.upload.take_notes():
                tell(kind, text=text)
            if self.lease is not None:
                await asyncio.to_thread(self.lease.stop_renewing)
                if self.place.lease_in_ray and not self.told:  # the client may have left Ray when it gives the lease back
                    await asyncio.to_thread(self.lease.release)

    def remove_folder(self) -> None:
        """Remove the working folder of a run whose client is gone, if all of it was sent."""
        folder = Path(self.request.folder)
        if folder.parent.name.startswith(ROOM_PREFIX) and (folder / SENT_MARK).exists():
            shutil.rmtree(folder.parent, ignore_errors=True)
