"""The lease of a run on shared storage: who may write there, until when. Pure; times are arguments.

A run folder on one machine has a lock that the kernel drops with its process (`RunFolder.hold_lock`). Storage has no such lock:
an object says who writes, and its owner writes it again every `RENEW_S`. Whoever finds it `LEASE_S` old may take it. It is
replaced only by a conditional write (`LeaseStore.put`), so that of two that take it at once one is refused.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from raypar.errors import LeaseHeldError, LeaseLostError
from raypar.untrusted_files import parse_untrusted_json, shorten

LEASE_S = 45.0
"""How long a lease lasts after it was written."""
RENEW_S = 10.0
"""How often its owner writes it again."""
MARGIN_S = 10.0
"""So long before its end the owner begins nothing any more that writes: a write that is under way takes time."""
LEASE_BYTES = 4096
"""Size limit of a lease."""


@dataclass(frozen=True)
class Lease:
    """What a lease says."""

    owner: str
    """Id of the run's present start: shared by its client and its drivers, and by nobody else."""
    holder: str
    """The owner in words: host and process."""
    renewal: int = 0
    """How often it was written again."""
    released: bool = False
    """Whether its owner has ended: anybody may take it at once."""

    def to_bytes(self) -> bytes:
        """The lease as JSON."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class FoundLease:
    """A lease as it was found in a store."""

    lease: Lease
    """What it says."""
    version: str
    """What a conditional write that replaces it has to name."""
    age_s: float
    """How long ago it was written, by the store's own clock where it has one."""


class LeaseStore(Protocol):
    """A place for the lease of one run. Methods raise `ClusterError` if it does not answer."""

    def read(self) -> FoundLease | None:
        """The lease that is there; None if there is none."""

    def put(self, lease: Lease, version: str | None) -> str | None:
        """Write the lease if the one with this version is still there (None: if none is). Returns the new version, or None if
        that was not so."""


def parse_lease(content: bytes) -> Lease:
    """The lease that JSON says. One that cannot be understood is somebody's all the same."""
    try:
        if len(content) > LEASE_BYTES:
            raise ValueError("too long")
        found = parse_untrusted_json(content)
        lease = Lease(str(found["owner"]), str(found["holder"]), found["renewal"], found["released"])
        if type(lease.renewal) is not int or type(lease.released) is not bool:
            raise ValueError("wrong types")
        return lease
    except (ValueError, KeyError, TypeError):
        return Lease("", "somebody whose lease raypar cannot read")


def claim(found: FoundLease | None, mine: Lease, run: str, place: str) -> tuple[Lease, str | None]:
    """(the lease to write, the version that it replaces) for one who wants the run.

    Raises `LeaseHeldError` if it is another's.
    """
    if found is None:
        return mine, None
    if found.lease.owner == mine.owner or found.lease.released or found.age_s >= LEASE_S:
        return replace(mine, renewal=found.lease.renewal + 1), found.version
    left = LEASE_S - found.age_s
    raise LeaseHeldError(
        f"run {run} is under way: {shorten(found.lease.holder)} trains in {place}, and was last heard of "
        f"{max(0.0, found.age_s):.0f} s ago",
        cure=f"`raypar status {shlex.quote(place)}` says how it gets on: wait for its end, or stop it there; if it has died, "
        f"its lease ends in {left:.0f} s, and the same command takes the run over then",
    )


def renewed(found: FoundLease | None, mine: Lease, run: str, place: str) -> tuple[Lease, str]:
    """(the lease to write, the version that it replaces) for its owner. Raises `LeaseLostError` if it is another's by now."""
    if found is None or found.lease.owner != mine.owner or found.lease.released:
        now = "somebody removed it" if found is None else f"{shorten(found.lease.holder)} has it now"
        raise LeaseLostError(
            f"run {run} has lost its lease of {place}: {now}; nothing more is written there",
            cure=f"leave the run to the other one (`raypar status {shlex.quote(place)}`); if there is none, "
            f"`raypar resume {shlex.quote(place)}` goes on from the last checkpoint",
        )
    return replace(mine, renewal=found.lease.renewal + 1), found.version


def may_write(renewed_s: float, now_s: float) -> bool:
    """Whether the owner may begin to write: its last renewal was begun at `renewed_s`, by its own clock."""
    return now_s - renewed_s < LEASE_S - MARGIN_S
