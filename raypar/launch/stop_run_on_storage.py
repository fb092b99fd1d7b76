"""Stops a run on S3, wherever it trains: marks its lease; the run's driver reads the mark, saves and ends."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from raypar.errors import ClusterError, ConfigError
from raypar.files.untrusted_files import shorten
from raypar.storage.held_lease import WRITE_ATTEMPTS
from raypar.storage.run_lease import RENEW_S, FoundLease, is_held
from raypar.storage.s3_lease_store import s3_lease_store
from raypar.storage.storage_uri import StorageUri

if TYPE_CHECKING:
    from raypar.storage.run_lease import LeaseStore

POLL_S = 1.0
"""Time between two reads of the lease."""
SAY_S = 5.0
"""Time between two lines about the wait."""


def stop_run_on_storage(uri: StorageUri, wait_s: float, say: Callable[[str], None]) -> bool:
    """Stop the run as Ctrl-C does, and wait until its process has given the lease back. Returns False if no process trains it.

    Raises `ConfigError` for storage other than S3, `ClusterError` if the storage does not answer or the run goes on after
    `wait_s`.
    """
    store = s3_lease_store(uri)
    if store is None:
        raise ConfigError(
            f"raypar stop reaches a run on storage through its lease, which only S3 has: {uri}",
            cure="stop it where it was started (Ctrl-C, or SIGTERM), a submitted job by `raypar stop JOB --address URL`",
        )
    held = request_stop(store, uri)
    if held is None:
        return False
    say(f"asked {shorten(held.lease.holder)} to save and end; it reads the request within {RENEW_S:.0f} s")
    began_s = told_s = time.monotonic()
    while (found := store.read()) is not None and is_held(found) and found.lease.owner == held.lease.owner:
        now_s = time.monotonic()
        if now_s - began_s > wait_s:
            raise ClusterError(
                f"run {uri.name} ({shorten(found.lease.holder)}) was asked to save and end, and has not ended within "
                f"{wait_s:.0f} s",
                cure=f"`raypar status {shlex.quote(str(uri))}` says what it does; a second Ctrl-C where it was started ends it "
                "at once, without saving",
            )
        if now_s - told_s >= SAY_S:
            told_s = now_s
            say(f"waiting for run {uri.name} to finish its step and save, for {now_s - began_s:.0f} s so far")
        time.sleep(POLL_S)
    return True


def request_stop(store: LeaseStore, uri: StorageUri) -> FoundLease | None:
    """Mark the lease so that its owner stops. Returns the lease as it was found; None if no process holds it.

    Raises `ClusterError` if the storage does not answer.
    """
    for _ in range(WRITE_ATTEMPTS):
        found = store.read()
        if found is None or not is_held(found):
            return None
        if found.lease.stop_requested or store.put(replace(found.lease, stop_requested=True), found.version) is not None:
            return found
    raise ClusterError(
        f"the lease of {uri} changed at each of {WRITE_ATTEMPTS} attempts to ask the run to stop",
        cure="run the same command again",
    )
