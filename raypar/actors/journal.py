"""The journal of committed steps in Ray's internal key-value store, written by compare-and-set (DESIGN 4.7)."""

from __future__ import annotations

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

from raypar.errors import ClusterError


class Journal:
    """One run's keys. All calls block for about a millisecond."""

    def __init__(self, run: str, generation: int) -> None:
        self.prefix = f"raypar/{run}/"
        self.generation = generation

    def claim(self, generation: int) -> bool:
        """Whether this driver is the first to claim `generation`; from then on it commits under it."""
        if _internal_kv_put(f"{self.prefix}generation/{generation}", b"1", overwrite=False):
            return False
        self.generation = generation
        return True

    def commit(self, step: int) -> None:
        """Claim `step` for this driver's generation. Raises `ClusterError` when another driver has done it already."""
        if _internal_kv_put(f"{self.prefix}step/{step}", str(self.generation), overwrite=False):
            raise ClusterError(
                f"step {step} is in the journal already: another driver of this run is at work",
                cure="let that one go on, or stop it before resuming",
            )
        if step >= 2:
            _internal_kv_del(f"{self.prefix}step/{step - 2}")

    def erase(self) -> None:
        """Remove every key of the run."""
        _internal_kv_del(self.prefix, del_by_prefix=True)
