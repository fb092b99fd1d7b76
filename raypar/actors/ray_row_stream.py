"""A `ray.data.Dataset` as a stream of samples: an actor computes its rows in order, and hands them to all workers that read."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from typing import Any, Protocol

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, ObjectLostError, RayActorError

from raypar.actors.actor_handle_types import RemoteMethod
from raypar.data.ray_rows import MOST_BYTES, RayDataset, blocks_in_order, lineage_of
from raypar.data.shared_rows import SILENT_S, FedRowIterator, FedRows, RowFeed, RowsLostError
from raypar.errors import DataError
from raypar.job import Job
from raypar.worker.data.data_set_with_sample_numbers import NumberedSamples

NAMESPACE = "raypar.rows"
"""The Ray namespace of the actors: no run's."""
READERS = 64
"""So many workers are answered at the same time."""
KEPT_S = 30.0
"""For so long the actor is kept when nobody reads: the checks before a run read the first samples several times."""
MOST_LOSSES = 5
"""After so many actors that died without a row the data set is not computed again."""
UNREACHABLE_PAUSE_S = 0.5
"""So long after it could not be reached an actor is asked again."""


class RayRowActor:
    """Computes the rows of a data set, and hands them out."""

    def __init__(self, lineage: bytes) -> None:
        import ray.data

        dataset: Any = ray.data.Dataset.deserialize_lineage(lineage)
        dataset.context.enable_progress_bars = False
        dataset.context.execution_options.preserve_order = True  # for good: a pass that ends must not take it from another
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        self._feed = RowFeed(lambda: blocks_in_order(dataset))

    def read(self, row: int, with_content: bool) -> FedRows:
        """See `RowFeed.read`."""
        return self._feed.read(row, with_content=with_content)


class _Handle(Protocol):
    read: RemoteMethod[[int, bool], FedRows]


class RayRowStream:
    """The samples of a data set of Ray Data, in its order.

    The actor belongs to the process that has asked for it first, and ends with it; the next one that asks starts another,
    which computes the rows again and skips those that were read. `lineage`, `columns`: see `lineage_of`; `too_large`:
    whether they are a stream because there are too many of them to be held.
    """

    raypar_thread_safe = True
    """Draws no random numbers: nothing needs to be seeded before a sample."""
    num_shards = 1
    """One stream: parts of it would be in no order."""

    def __init__(self, lineage: bytes, columns: str, *, too_large: bool, number: str = "") -> None:
        self._lineage, self._columns, self._too_large = lineage, columns, too_large
        self._name = f"rows-{number or uuid.uuid4().hex[:12]}"
        self._actor: _Handle | None = None
        self._let_go: threading.Timer | None = None
        self._losses = 0

    @staticmethod
    def of(dataset: RayDataset, what: str, *, too_large: bool = False) -> RayRowStream:
        """Raises `DataError`, see `lineage_of`."""
        return RayRowStream(*lineage_of(dataset, what), too_large=too_large)

    @property
    def line_about_one_stream(self) -> str:
        """What the user is told of a data set that is read so without having asked for it."""
        why = f" of more than {MOST_BYTES >> 20:,} MiB" if self._too_large else ""
        return (
            f"data is a ray.data.Dataset{why}: an actor computes its rows in order, as one stream, and hands them to every "
            "worker of the first stage\n"
            "  cure: data.streams: 1 says that this is meant; rows that its write_parquet(FOLDER) has written are read by id"
        )

    @property
    def raypar_why_places_are_read_for(self) -> str:
        """See `StreamSource.why_places_are_read_for`."""
        return (
            "of a ray.data.Dataset the rows before a place are computed again\n"
            "  cure: rows that its write_parquet(FOLDER) has written are read by id, at any place at once: "
            "data={'parquet': 'FOLDER/*.parquet'}"
        )

    def __repr__(self) -> str:
        return f"RayRowStream({self._columns})"

    def __getstate__(self) -> dict[str, Any]:
        # Each run has actors of its own: its data is pickled once.
        return {**self.__dict__, "_name": f"rows-{uuid.uuid4().hex[:12]}", "_actor": None, "_let_go": None, "_losses": 0}

    def __deepcopy__(self, memo: dict[int, object]) -> RayRowStream:
        return RayRowStream(self._lineage, self._columns, too_large=self._too_large, number=self._name.removeprefix("rows-"))

    def __iter__(self) -> FedRowIterator:
        import ray.data  # noqa: F401  # pyarrow learns the types of tensor columns

        return FedRowIterator(self._read, lambda: f"the actor {self._name} (namespace {NAMESPACE}) of the ray.data.Dataset")

    def raypar_close(self) -> None:
        """Let the actor end soon, if this process has started it."""
        self._keep_actor()
        self._let_go = threading.Timer(KEPT_S, setattr, (self, "_actor", None))
        self._let_go.daemon = True
        self._let_go.start()

    def _keep_actor(self) -> None:
        if self._let_go is not None:
            self._let_go.cancel()
            self._let_go = None

    def _read(self, row: int, *, with_content: bool) -> FedRows:
        """An answer of the actor. Raises `RowsLostError` for one that is gone, `DataError` after several of them."""
        self._keep_actor()
        try:
            found = self._ask(row, with_content)
        except GetTimeoutError as error:
            raise DataError(
                f"the actor {self._name} (namespace {NAMESPACE}) of the ray.data.Dataset has not answered for {SILENT_S:.0f} s",
                cure=f"look at the cluster: {_free_processors()}; the actor needs none, and a node on which it can start",
            ) from error
        except (RayActorError, ObjectLostError) as error:
            self._actor, self._losses = None, self._losses + 1
            lost = f"the actor {self._name} (namespace {NAMESPACE}) that computes the rows of the ray.data.Dataset is gone"
            if self._losses > MOST_LOSSES:
                raise DataError(
                    f"{lost}, as {MOST_LOSSES} before it, and none has given a row: {error}",
                    cure="look at its log: it may have run out of memory, of which it needs some blocks of the data set",
                ) from error
            time.sleep(0.2 * self._losses)  # until Ray lets go of the name
            raise RowsLostError(lost, cure="none is needed: another one computes the rows again") from error
        self._losses = 0 if found.content else self._losses
        return found

    def _ask(self, row: int, with_content: bool) -> FedRows:
        """The actor's answer. One that cannot be reached is asked again: it takes Ray some ten seconds to know that a node is
        lost, and until then neither the actor has died nor has another one its name. Raises `DataError` after `SILENT_S`, and
        what Ray raises."""
        since_s: float | None = None
        while True:
            self._actor = actor = self._actor or self._start()
            try:
                found: FedRows = ray.get(actor.read.remote(row, with_content), timeout=SILENT_S)
                return found
            except ActorUnavailableError as error:
                since_s = since_s or time.monotonic()
                if time.monotonic() - since_s > SILENT_S:
                    raise DataError(
                        f"the actor {self._name} (namespace {NAMESPACE}) of the ray.data.Dataset could not "
                        f"be reached for {SILENT_S:.0f} s: {error}",
                        cure="look at the network between the nodes, and whether the actor's node lives (ray status)",
                    ) from error
                time.sleep(UNREACHABLE_PAUSE_S)

    def _start(self) -> _Handle:
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": READERS, "max_restarts": 0}
        made: Any = ray.remote(**options)(RayRowActor).options(name=self._name, namespace=NAMESPACE, get_if_exists=True)
        handle: _Handle = made.remote(self._lineage)
        return handle


def reads_ray_data_as_stream(job: Job) -> bool:
    """Whether a job's samples are rows that an actor of Ray Data computes while it runs."""
    functions = [one.function for one in (job.data, *job.validation_sets.values())]
    functions += [one.data.function for one in functions if isinstance(one, NumberedSamples)]
    return any(isinstance(getattr(one, "value", None), RayRowStream) for one in functions)


def _free_processors() -> str:
    with contextlib.suppress(Exception):  # only words of a message
        return f"{ray.available_resources().get('CPU', 0):g} of {ray.cluster_resources().get('CPU', 0):g} CPUs are free"
    return "it does not say what is free"
