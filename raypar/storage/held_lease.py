"""The lease of one run as a process holds it: takes it, renews it in a thread, checks it before each write, releases it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from raypar.errors import ClusterError, LeaseHeldError, LeaseLostError
from raypar.files.printable_text import shorten
from raypar.storage.run_lease import (
    LEASE_S,
    RENEW_S,
    FoundLease,
    Lease,
    LeaseStore,
    claim_lease,
    is_held,
    may_write,
    renew_lease,
)

WRITE_ATTEMPTS = 5
"""How often a conditional write is tried: it fails if another process of the same run has renewed the lease meanwhile."""
STOP_S = 5.0
"""How long `stop_renewing` waits for the thread."""
WATCH_S = 1.0
"""Time between two reads of another process's lease in a store without a clock."""


def seconds_since_boot() -> float:
    """Seconds since this machine was started, including those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def describe_this_process() -> str:
    """`process 4711 of HOST`, for the error of a process that is refused."""
    return f"process {os.getpid()} of {socket.gethostname()}"


class HeldLease:
    """The lease of one run in this process. Several processes of one run hold it together, by its owner's id."""

    def __init__(self, store: LeaseStore, owner: str, run: str, place: str) -> None:
        self.store = store
        """Where the lease is stored."""
        self.mine = Lease(owner, describe_this_process())
        """The lease as this process writes it, but for its renewal number."""
        self.run = run
        """The run's name, for messages."""
        self.place = place
        """The run's location, for messages."""
        self.renewed_s = -LEASE_S
        """When the last renewal that succeeded was begun (`seconds_since_boot`)."""
        self.lost: LeaseLostError | None = None
        """The error if another process has the lease now; None while it is held."""
        self.failure = ""
        """Why the last renewal failed; empty if it succeeded."""
        self.stop_requested = False
        """Whether the run is to save and end: somebody has written that into the lease (`raypar stop`)."""
        self._stopped = threading.Event()
        """Set by `stop_renewing`."""
        self._thread: threading.Thread | None = None
        """The thread that renews; None before `start_renewing`."""

    def take(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Take the lease. Raises `LeaseHeldError` if it is another's, `ClusterError` if the store does not answer.

        `say`: is called with a line before a wait. A lease of unknown age is watched for up to `LEASE_S`.
        """
        for _ in range(WRITE_ATTEMPTS):
            found = self._with_watched_age(self.store.read(), say)
            began_s = seconds_since_boot()
            lease, version = claim_lease(found, self.mine, self.run, self.place)
            if self.store.put(lease, version) is not None or self._is_there(lease):
                self.renewed_s = began_s
                return
        raise LeaseHeldError(
            f"run {self.run} is wanted by others at the same moment: its lease of {self.place} changed {WRITE_ATTEMPTS} times",
            cure="run the same command again",
        )

    def _with_watched_age(self, found: FoundLease | None, say: Callable[[str], None]) -> FoundLease | None:
        """The lease `found`, with an age if another process may hold it.

        A lease of unknown age is watched until it changes (age 0) or `LEASE_S` have passed. So the clocks of two machines are
        never compared; an owner that lives is noticed within `RENEW_S`, because it renews the lease.
        """
        if found is None or found.age_s is not None or not is_held(found) or found.lease.owner == self.mine.owner:
            return found
        say(f"waiting up to {LEASE_S:.0f} s to see whether {shorten(found.lease.holder)} still trains in {self.place}")
        began_s = seconds_since_boot()
        while (watched_s := seconds_since_boot() - began_s) < LEASE_S:
            time.sleep(WATCH_S)
            now = self.store.read()
            if now is None or now.version != found.version:
                return now if now is None else replace(now, age_s=0.0)
        return replace(found, age_s=watched_s)

    def renew(self) -> None:
        """Write the lease again. Raises `LeaseLostError`, and `ClusterError` if the store does not answer."""
        for _ in range(WRITE_ATTEMPTS):
            began_s = seconds_since_boot()
            lease, version = renew_lease(self.store.read(), self.mine, self.run, self.place)
            if self.store.put(lease, version) is not None or self._is_there(lease):
                self.renewed_s, self.stop_requested = began_s, lease.stop_requested
                return
        raise ClusterError(f"the lease of {self.place} changed {WRITE_ATTEMPTS} times while it was renewed")

    def _is_there(self, lease: Lease) -> bool:
        """Whether the lease is stored although its write was refused: its client repeated a write whose answer was lost."""
        found = self.store.read()
        return found is not None and found.lease == lease

    def check(self) -> None:
        """Raise unless this process may begin to write at the run's place.

        Raises `LeaseLostError` if another process has the lease, and `ClusterError` if it may have, because the lease could not
        be renewed in time.
        """
        if self.lost is not None:
            raise self.lost
        if not may_write(self.renewed_s, seconds_since_boot()):
            raise ClusterError(
                f"the lease of {self.place} could not be renewed for {seconds_since_boot() - self.renewed_s:.0f} s "
                f"({self.failure or 'this process was stopped'}): nothing is written until that succeeds",
                cure="look at the storage, and at the network to it; the last good checkpoint stays",
            )

    def start_renewing(self) -> None:
        """Renew the lease in a thread, until `stop_renewing`."""
        self._stopped.clear()
        self._thread = threading.Thread(target=self._renew_until_stopped, name="raypar-lease", daemon=True)
        self._thread.start()

    def stop_renewing(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _renew_until_stopped(self) -> None:
        while not self._stopped.wait(RENEW_S if not self.failure else RENEW_S / 4):
            try:
                self.renew()
                self.failure = ""
            except LeaseLostError as error:
                self.lost = error
                return
            except ClusterError as error:
                self.failure = error.what

    def release(self) -> None:
        """Give the lease back, if it is still held. If the storage does not answer, the lease expires after `LEASE_S`."""
        with contextlib.suppress(ClusterError):
            for _ in range(WRITE_ATTEMPTS):
                lease, version = renew_lease(self.store.read(), self.mine, self.run, self.place)
                if self.store.put(Lease(lease.owner, lease.holder, lease.renewal, released=True), version) is not None:
                    return
