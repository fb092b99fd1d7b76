"""Ray's key-value store, which outlives a run's driver and, with Redis, the head: bytes by key, shared by a whole cluster."""

from __future__ import annotations

from types import ModuleType

from raypar.fences.private_api_fence import Fence
from raypar.ray_compat import TESTED


def _look_for_store() -> ModuleType:
    from ray.experimental import internal_kv

    for name in ("_internal_kv_get", "_internal_kv_put", "_internal_kv_del", "_internal_kv_list"):
        assert callable(getattr(internal_kv, name))
    return internal_kv


STORE = Fence(
    api="ray.experimental.internal_kv",
    reason="no public API of Ray stores a value that outlives the process which has stored it",
    versions=TESTED,
    feature="keeping a run's state in Ray's key-value store",
    without="no run can be started, taken over or placed",
    probe=_look_for_store,
)


def kv_get(key: str) -> bytes | None:
    """The value of a key; None if there is none. Blocks for about a millisecond."""
    found: bytes | None = STORE.require()._internal_kv_get(key)
    return found


def kv_put(key: str, value: bytes, *, overwrite: bool) -> bool:
    """Store a value; with `overwrite=False` only if there is none. Returns whether there was one."""
    return bool(STORE.require()._internal_kv_put(key, value, overwrite=overwrite))


def kv_delete(key: str, *, prefix: bool = False) -> None:
    """Remove a key; with `prefix`, all keys that begin with it."""
    STORE.require()._internal_kv_del(key, del_by_prefix=prefix)


def kv_list(prefix: str) -> list[bytes]:
    """The keys that begin with `prefix`."""
    found: list[bytes] = STORE.require()._internal_kv_list(prefix)
    return found
