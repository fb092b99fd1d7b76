"""The lease of a run on shared storage: which process may write there, and until when. Pure; times are arguments.

A run folder on one machine has a lock that the kernel releases when its process ends (`RunFolder.hold_lock`). Shared storage
has no such lock. Instead an object names the owner, who writes it again every `RENEW_S`; a process that finds it `LEASE_S` old
may take the lease. The object is replaced only by conditional writes (`LeaseStore.put`), so if two processes try to take the
lease at once, one of them is refused.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from raypar.errors import LeaseHeldError, LeaseLostError
from raypar.files.printable_text import shorten
from raypar.files.untrusted_files import parse_untrusted_json

LEASE_S = 45.0
"""How long a lease lasts after it was written."""
RENEW_S = 10.0
"""Time between two renewals by its owner."""
MARGIN_S = 10.0
"""The owner begins no write in the last seconds of its lease, because a write takes time."""
LEASE_BYTES = 4096
"""Size limit of a lease."""


@dataclass(frozen=True)
class Lease:
    """The content of a lease."""

    owner: str
    """Id of one start of the run. The client and the drivers of this start share it; no other process has it."""
    holder: str
    """The owner in words: host and process."""
    renewal: int = 0
    """How often it has been renewed."""
    released: bool = False
    """Whether its owner has ended, so that any process may take it at once."""
    stop_requested: bool = False
    """Whether somebody has asked the owner to save and end (`raypar stop`). Renewals keep the mark, a new owner has none."""

    def to_bytes(self) -> bytes:
        """The lease as JSON."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class FoundLease:
    """A lease as read from a store."""

    lease: Lease
    """Its content."""
    version: str
    """The version that a conditional write must name to replace it."""
    age_s: float | None
    """How long ago it was written, by the store's own clock; None: the store has no clock, and the machines' clocks differ."""


class LeaseStore(Protocol):
    """A place for the lease of one run. Methods raise `ClusterError` if it does not answer."""

    def read(self) -> FoundLease | None:
        """The stored lease; None if there is none."""

    def put(self, lease: Lease, version: str | None) -> str | None:
        """Write the lease if the stored one still has this version (None: if no lease is stored).

        Returns the new version; None if the write was refused, because another lease is stored.
        """


def parse_lease(content: bytes) -> Lease:
    """The lease in a JSON document. One that cannot be parsed counts as held by an unknown process."""
    try:
        if len(content) > LEASE_BYTES:
            raise ValueError("too long")
        found = parse_untrusted_json(content)
        stop = found.get("stop_requested", False)
        lease = Lease(str(found["owner"]), str(found["holder"]), found["renewal"], found["released"], stop)
        if type(lease.renewal) is not int or type(lease.released) is not bool or type(stop) is not bool:
            raise ValueError("wrong types")
        return lease
    except (ValueError, KeyError, TypeError, AttributeError):
        return Lease("", "a process whose lease raypar cannot read")


def claim_lease(found: FoundLease | None, mine: Lease, run: str, place: str) -> tuple[Lease, str | None]:
    """(the lease to write, the version to replace) for a process that wants to take the lease `found`.

    Raises `LeaseHeldError` if another process holds it. A lease without an age counts as just written: see `HeldLease.take`.
    """
    if found is None:
        return mine, None
    age_s = found.age_s or 0.0
    if found.lease.owner == mine.owner or found.lease.released or age_s >= LEASE_S:
        return replace(mine, renewal=found.lease.renewal + 1), found.version
    raise LeaseHeldError(
        f"run {run} is under way: {shorten(found.lease.holder)} trains in {place}, and was last heard of "
        f"{max(0.0, age_s):.0f} s ago",
        cure=f"`raypar status {shlex.quote(place)}` says how it gets on: wait for its end, or stop it there; if it has died, "
        f"its lease ends in {LEASE_S - age_s:.0f} s, and the same command takes the run over then",
    )


def is_held(found: FoundLease | None) -> bool:
    """Whether a process holds the lease, or may hold it."""
    return found is not None and not found.lease.released and (found.age_s is None or found.age_s < LEASE_S)


def renew_lease(found: FoundLease | None, mine: Lease, run: str, place: str) -> tuple[Lease, str]:
    """(the lease to write, the version to replace) for the owner. Raises `LeaseLostError` if another process has it by now."""
    if found is None or found.lease.owner != mine.owner or found.lease.released:
        now = "its lease was removed" if found is None else f"{shorten(found.lease.holder)} has it now"
        raise LeaseLostError(
            f"run {run} has lost its lease of {place}: {now}; nothing more is written there",
            cure=f"leave the run to the other one (`raypar status {shlex.quote(place)}`); if there is none, "
            f"`raypar resume {shlex.quote(place)}` goes on from the last checkpoint",
        )
    renewed = replace(mine, renewal=found.lease.renewal + 1, stop_requested=found.lease.stop_requested)
    return renewed, found.version


def may_write(renewed_s: float, now_s: float) -> bool:
    """Whether the owner may begin to write: its last renewal was begun at `renewed_s`, by its own clock."""
    return now_s - renewed_s < LEASE_S - MARGIN_S
