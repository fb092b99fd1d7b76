"""The checkpoints of a run, for its driver: begun for the workers that write them, committed, removed when they are old."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from raypar.actors.driver_storage_session import DriverStorageSession
from raypar.actors.messages import RunRequest
from raypar.errors import UnreadableStateError
from raypar.files.json_type import Json
from raypar.job.contract import VALIDATED
from raypar.job.lr_schedule_metric import FollowedMetric
from raypar.record.best_checkpoint_rules import BestValues
from raypar.storage.checkpoint_store import CheckpointRef, open_checkpoint_store
from raypar.worker.checkpoint import checkpoint_files
from raypar.worker.checkpoint.checkpoint_files import ShardRecord


class RunCheckpoints:
    """Begins, commits and removes the checkpoints of a run."""

    def __init__(
        self, request: RunRequest, location: str, storage_session: DriverStorageSession | None, followed: FollowedMetric | None
    ) -> None:
        """`location`: where they lie. `storage_session`: the lease of a run on shared storage. `followed`: the metric that the
        learning rates follow; None: they follow none."""
        self._request, self._storage_session, self._followed = request, storage_session, followed
        self._store = open_checkpoint_store(location)
        self.last: CheckpointRef | None = None
        """The last checkpoint."""
        self.best: BestValues | None = None
        """Which checkpoints are the best; None before the record of former drivers and starts was read for it."""
        self.loss_and_norm: dict[str, Json] = {}
        """Loss and norm of the last step, for a checkpoint's manifest."""

    def find_last(self) -> CheckpointRef | None:
        """Find the last whole checkpoint of former drivers, which is `last` from now on."""
        self.last, _ = checkpoint_files.latest_usable_checkpoint(self._store)
        return self.last

    def begin(self, done: int, *, only_weights: bool = False) -> CheckpointRef:
        """Begin a checkpoint, or weights, into which workers write. Raises `CheckpointError`."""
        self.check_lease()
        return checkpoint_files.create_checkpoint(self._store, done, only_weights=only_weights)

    def check_lease(self) -> None:
        """Raise `ClusterError` if checkpoints may not be written now, because another process may hold the run's lease."""
        if self._storage_session is not None:
            self._storage_session.check()

    def drop(self, begun: CheckpointRef) -> None:
        """Remove a checkpoint that could not be finished."""
        checkpoint_files.discard_checkpoint(begun)

    def commit(self, done: int, begun: CheckpointRef, records: Sequence[ShardRecord | None]) -> None:
        """Write the manifest, give the checkpoint its name, remove the oldest beyond `keep`. Raises `CheckpointError`."""
        self.last = self._commit(done, begun, records)
        self.remove_old()

    def remove_old(self) -> None:
        """Remove checkpoints that are neither among the newest nor the best."""
        checkpoint_files.remove_old_checkpoints(self._store, self._request.job.checkpoint.keep, self._kept_as_best)

    def _kept_as_best(self, steps: Collection[int]) -> Collection[int]:
        return self.best.kept(steps) if self.best is not None else ()

    def commit_weights(self, done: int, begun: CheckpointRef, records: Sequence[ShardRecord | None]) -> CheckpointRef:
        """The same for weights without state of the optimizer; only the newest are kept. Returns where they are."""
        weights = self._commit(done, begun, records, only_weights=True)
        checkpoint_files.remove_other_weights(weights)
        return weights

    def _commit(
        self, done: int, begun: CheckpointRef, records: Sequence[ShardRecord | None], *, only_weights: bool = False
    ) -> CheckpointRef:
        written = [record for record in records if record is not None]
        followed = self._followed.as_json(done) if self._followed is not None else None
        try:
            for record in written:
                if not begun.has_file(record.file):
                    raise UnreadableStateError(
                        f"{begun.file_location(record.file)}, written by a worker, cannot be seen by the driver",
                        cure="set run_dir to storage that all nodes share",
                    )
            self.check_lease()
            return checkpoint_files.commit_checkpoint(
                begun,
                written,
                steps_done=done,
                contract=self._request.contract if followed is None else {**self._request.contract, VALIDATED: followed},
                metrics=self.loss_and_norm,
                only_weights=only_weights,
            )
        except Exception:
            checkpoint_files.discard_checkpoint(begun)  # on a full disk the next one needs its room
            raise
