"""The lease of a run in Ray's key-value store, for storage without conditional writes. It excludes runs of one cluster only."""

from __future__ import annotations

import hashlib

from raypar.errors import ClusterError
from raypar.ray_compat.key_value_store import kv_delete, kv_get, kv_list, kv_put
from raypar.storage.run_lease import FoundLease, Lease, parse_lease

READS = 5
"""How often the lease is read if it is replaced meanwhile."""


class RayLeaseStore:
    """A `LeaseStore` of numbered entries: a write creates entry n + 1, if it does not exist yet, and then deletes entry n.

    The only condition that Ray's store knows is that an entry does not exist, so each write needs a new number.
    """

    def __init__(self, place: str) -> None:
        self.prefix = f"raypar-lease/{hashlib.sha256(place.encode()).hexdigest()[:24]}/"
        """Beginning of the keys of this run's lease."""

    def read(self) -> FoundLease | None:
        """See `LeaseStore`. Ray's store has no clock, so the age is not known."""
        for _ in range(READS):
            numbers = self._numbers()
            if not numbers:
                return None
            value = _get(f"{self.prefix}{numbers[-1]}")
            if value is not None:
                return FoundLease(parse_lease(value), str(numbers[-1]), None)
        raise ClusterError("the lease in Ray's store changes all the time", cure="run the same command again")

    def put(self, lease: Lease, version: str | None) -> str | None:
        """See `LeaseStore`."""
        number = 1 if version is None else int(version) + 1
        if self._numbers()[-1:] != ([] if version is None else [number - 1]):
            return None
        key, value = f"{self.prefix}{number}", lease.to_bytes()
        try:
            there_already = kv_put(key, value, overwrite=False)
        except Exception as error:  # Ray's store fails with errors of many classes
            raise _unanswered(error) from error
        if there_already and _get(key) != value:
            return None
        for old in self._numbers():
            if old < number or lease.released:  # a released lease leaves no entry
                kv_delete(f"{self.prefix}{old}")
        return str(number)

    def _numbers(self) -> list[int]:
        """The numbers of the entries, ascending."""
        try:
            found = kv_list(self.prefix)
        except Exception as error:
            raise _unanswered(error) from error
        return sorted(int(key.decode().removeprefix(self.prefix)) for key in found)


def _get(key: str) -> bytes | None:
    try:
        found: bytes | None = kv_get(key)
    except Exception as error:
        raise _unanswered(error) from error
    return found


def _unanswered(error: Exception) -> ClusterError:
    return ClusterError(f"the lease in Ray's store: {error}", cure="look at the cluster's head")
