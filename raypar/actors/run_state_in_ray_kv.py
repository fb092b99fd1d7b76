"""The state of a run that outlives its driver, in Ray's key-value store: generations, committed steps, members, workers.

Two drivers may run at once, each as the driver of the run. A generation belongs to the driver that writes its key first
(compare-and-set). A driver that sees a newer generation of another driver commits no more steps; it looks for one every
`CLAIM_CHECK_S`.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from ray import cloudpickle

from raypar.actors.messages import WorkerHello
from raypar.comm.tcp.handshake import RunCredential
from raypar.errors import ClusterError
from raypar.files.json_type import Json
from raypar.plan import ParallelPlan
from raypar.ray_compat.key_value_store import kv_delete, kv_get, kv_list, kv_put

if TYPE_CHECKING:
    from raypar.actors.messages import RunRequest
    from raypar.worker.worker_reports import Report

KEPT_STEPS = 1000
"""At least so many of the last steps keep their reports here, for a new driver that does not find them in the run folder."""

STEPS_IN_BLOCK = 100
"""Number of steps whose keys share a prefix, so that one call removes their reports."""

CLAIM_CHECK_S = 0.25
"""Least time between two checks whether another driver has claimed a newer generation."""


class EndFacts(TypedDict):
    """How a run ended, for a driver that Ray starts after its end."""

    end: str
    """As in `EndOfRun`."""
    why: str
    """Why, in words."""
    done: int
    """Steps done."""
    error: bytes | None
    """The pickled error of a failed run."""


@dataclass(frozen=True)
class MembershipRecord:
    """The plan and members of a generation."""

    generation: int
    """The generation, from 1."""
    plan: ParallelPlan
    """Its plan."""
    members: tuple[int, ...]
    """By rank: the worker number."""
    schedule: str
    """The name of its schedule."""


class DriverReplaced(ClusterError):
    """Raised when another driver has claimed a newer generation: this driver must commit no more steps."""


class Journal:
    """One run's keys in Ray's key-value store. Every call blocks for about a millisecond."""

    def __init__(self, run: str) -> None:
        self.run = run
        """The run's name."""
        self.prefix = f"raypar/{run}/"
        """How all keys of the run begin."""
        self.generation = 0
        """The newest generation that this driver has claimed; 0: none."""
        self.identity = uuid.uuid4().bytes
        """What this driver writes as the value of a claim."""
        self._next_claim_check_s = 0.0
        """Time (monotonic) from which on `commit` checks again whether another driver has taken over."""
        self._validations: deque[int] = deque()
        """Steps after which validations are in the store, ascending; empty until this driver writes the first."""

    # -- generations and steps ---------------------------------------------------------------------------------------------

    def claim(self, generation: int) -> bool:
        """Whether this driver is the first to claim `generation`; from then on it commits under it."""
        key = f"{self.prefix}generation/{generation}"
        if kv_put(key, self.identity, overwrite=False) and kv_get(key) != self.identity:
            return False
        self.generation = generation
        return True

    def commit(self, step: int, facts: Report | None = None) -> None:
        """Store that `step` is committed, with its report `facts`.

        An entry that another driver has written for this step stays: a step is committed only after all workers have applied
        it, so both entries have the same report. For the same reason not every commit has to check whether another driver has
        taken over; a check costs as much as calling a worker. Raises `DriverReplaced` in the first check after another driver
        has taken over, which is up to `CLAIM_CHECK_S` later.
        """
        if time.monotonic() >= self._next_claim_check_s:
            self.check_claim(step + 1)
        kv_put(self._step_key(step), pickle.dumps((self.generation, facts)), overwrite=False)
        block = (step - KEPT_STEPS) // STEPS_IN_BLOCK - 1
        if step % STEPS_IN_BLOCK == 0 and block >= 0:
            kv_delete(f"{self.prefix}step/{block}/", prefix=True)

    def check_claim(self, done: int) -> None:
        """Raise `DriverReplaced` if another driver has claimed the next generation. `done`: steps so far, for the error."""
        checked_s = time.monotonic()
        newer = kv_get(f"{self.prefix}generation/{self.generation + 1}")
        if newer not in (None, self.identity):  # our own claim may be under way in another thread
            raise DriverReplaced(
                f"step {done}: another driver of this run has claimed generation {self.generation + 1}",
                cure="that one goes on with the run; nothing is to be done",
            )
        self._next_claim_check_s = checked_s + CLAIM_CHECK_S

    def committed_steps(self) -> list[int]:
        """The last committed steps, ascending; older ones were deleted."""
        return sorted(self._numbers("step"))

    def _step_key(self, step: int) -> str:
        """The key of a step's report."""
        return f"{self.prefix}step/{step // STEPS_IN_BLOCK}/{step}"

    def step_report(self, step: int) -> Report | None:
        """The report of a committed step; None if the journal does not have it, or no longer."""
        value = kv_get(self._step_key(step))
        found: Report | None = None if value is None else pickle.loads(value)[1]
        return found

    def store_validation(self, done: int, line: dict[str, Json]) -> None:
        """Store the metrics line of the validation after `done` steps; remove old lines."""
        kv_put(f"{self.prefix}validation/{done}", pickle.dumps(line), overwrite=True)
        if not self._validations:
            self._validations.extend(self.validations())
        elif done > self._validations[-1]:
            self._validations.append(done)
        while self._validations and self._validations[0] < done - KEPT_STEPS:
            kv_delete(f"{self.prefix}validation/{self._validations.popleft()}")

    def validations(self) -> list[int]:
        """The steps after which validations are stored, ascending; those of the last `KEPT_STEPS` steps."""
        return sorted(self._numbers("validation"))

    def load_validation(self, done: int) -> dict[str, Json] | None:
        """The metrics line given to `store_validation`; None if the journal does not have it."""
        value = kv_get(f"{self.prefix}validation/{done}")
        found: dict[str, Json] | None = None if value is None else pickle.loads(value)
        return found

    def store_validated(self, values: Mapping[int, float]) -> None:
        """Store the values of the metric that the learning rates follow, of all validations so far.

        They are stored under the generation that this driver has claimed: a driver that was replaced overwrites none of its
        successor's. Removes those of older generations.
        """
        kv_put(f"{self.prefix}validated/{self.generation}", pickle.dumps(values), overwrite=True)
        for generation in self._numbers("validated"):
            if generation < self.generation:
                kv_delete(f"{self.prefix}validated/{generation}")

    def validated(self) -> dict[int, float]:
        """What was given to `store_validated` in the newest generation that has any."""
        value = kv_get(f"{self.prefix}validated/{max(self._numbers('validated'), default=0)}")
        found: dict[int, float] = {} if value is None else pickle.loads(value)
        return found

    # -- lines that a full disk does not take (`jsonl_file.LineBackupStore`) ---------------------------------------------------

    def keep_lines(self, file: str, block: int, text: str) -> None:
        """Store lines of the run folder's `file` as block number `block`, in place of what it had."""
        kv_put(f"{self.prefix}lines/{file}/{block}", text.encode(), overwrite=True)

    def kept_lines(self, file: str) -> dict[int, str]:
        """Block number -> its lines, of all blocks of `file`."""
        found = {block: kv_get(f"{self.prefix}lines/{file}/{block}") for block in self._numbers(f"lines/{file}")}
        return {block: value.decode() for block, value in found.items() if value is not None}

    def drop_lines(self, file: str, block: int | None = None) -> None:
        """Remove one block of `file`, or all blocks: their lines are in the file now."""
        kv_delete(f"{self.prefix}lines/{file}/{'' if block is None else block}", prefix=block is None)

    def record(self, record: MembershipRecord) -> None:
        """Store the members of a generation, before they begin: a new driver has to find them. Removes old records."""
        kv_put(f"{self.prefix}record/{record.generation}", pickle.dumps(record), overwrite=True)
        for generation in self._numbers("record"):
            if generation < record.generation - 1:
                kv_delete(f"{self.prefix}record/{generation}")

    def last_record(self) -> MembershipRecord | None:
        """The record of the newest generation that had members; None while there has been none."""
        for generation in sorted(self._numbers("record"), reverse=True):
            value = kv_get(f"{self.prefix}record/{generation}")
            if value is not None:
                found: MembershipRecord = pickle.loads(value)
                return found
        return None

    def newest_claimed_generation(self) -> int:
        """The newest generation that any driver has claimed; 0: none."""
        return max(self._numbers("generation"), default=0)

    # -- workers -----------------------------------------------------------------------------------------------------------

    def store_worker_number(self, number: int) -> None:
        """Store that `number` has been given to a worker; no other worker ever gets it."""
        kv_put(f"{self.prefix}hired", str(number + 1).encode(), overwrite=True)

    def count_worker_numbers(self) -> int:
        """How many worker numbers have been given."""
        return int(kv_get(f"{self.prefix}hired") or 0)

    def store_on_demand_workers(self, numbers: Iterable[int]) -> None:
        """Store that these workers were asked for on on-demand nodes."""
        for number in numbers:
            kv_put(f"{self.prefix}on-demand/{number}", b"", overwrite=True)

    def on_demand_workers(self) -> tuple[int, ...]:
        """All workers that were ever asked for on on-demand nodes, lost ones too."""
        return tuple(sorted(self._numbers("on-demand")))

    def store_useful_workers(self, workers: int) -> None:
        """Store the largest number of workers that the planner can use."""
        kv_put(f"{self.prefix}useful", str(workers).encode(), overwrite=True)

    def useful_workers(self) -> int | None:
        """The largest number of workers that the planner can use; None: it has declined none."""
        value = kv_get(f"{self.prefix}useful")
        return None if value is None else int(value)

    def store_hello(self, number: int, hello: WorkerHello) -> None:
        """Store the hello of a worker that has started, so that a new driver knows the worker."""
        kv_put(f"{self.prefix}hello/{number}", pickle.dumps(hello), overwrite=True)

    def hellos(self) -> dict[int, WorkerHello]:
        """Worker number -> hello, of all workers that have ever started, lost ones too."""
        found = {number: kv_get(f"{self.prefix}hello/{number}") for number in self._numbers("hello")}
        return {number: pickle.loads(value) for number, value in found.items() if value is not None}

    # -- the run -----------------------------------------------------------------------------------------------------------

    def put_credential(self, credential: RunCredential) -> None:
        """Store the run's credential, before the request: a driver that finds the request then finds the credential too."""
        kv_put(f"{self.prefix}credential", pickle.dumps(credential), overwrite=True)

    def credential(self) -> RunCredential:
        """The run's credential, the same for all of its drivers. Raises `ClusterError` if Ray has lost it."""
        value = kv_get(f"{self.prefix}credential")
        if value is None:
            raise ClusterError(
                f"Ray's store has lost the secret by which the workers of run {self.run!r} know each other",
                cure="`raypar resume` goes on from the last checkpoint, with new workers",
            )
        found: RunCredential = pickle.loads(value)
        return found

    def put_request(self, request: RunRequest) -> None:
        """Store the run's request: a driver that Ray has restarted reads it here."""
        kv_put(f"{self.prefix}request", cloudpickle.dumps(request), overwrite=True)

    def request(self) -> RunRequest | None:
        """The run's `RunRequest`; None if the run is over or has not begun."""
        value = kv_get(f"{self.prefix}request")
        return None if value is None else pickle.loads(value)

    def end(self, facts: EndFacts | None = None) -> EndFacts | None:
        """Store how the run ended, before anything is removed. Without `facts`: what was stored; None while the run lasts."""
        key = f"{self.prefix}end"
        if facts is not None:
            kv_put(key, pickle.dumps(facts), overwrite=True)
            return facts
        value = kv_get(key)
        found: EndFacts | None = None if value is None else pickle.loads(value)
        return found

    def began(self, time_s: float | None = None) -> float | None:
        """Store when the run was started or resumed (Unix time). Without `time_s`: what was stored."""
        key = f"{self.prefix}began"
        if time_s is not None:
            kv_put(key, repr(time_s).encode(), overwrite=True)
            return time_s
        value = kv_get(key)
        return None if value is None else float(value)

    def erase(self) -> None:
        """Remove every key of the run."""
        kv_delete(self.prefix, prefix=True)

    def _numbers(self, kind: str) -> list[int]:
        """The last parts of this run's keys below `kind`, which are numbers."""
        return [int(key.decode().rpartition("/")[2]) for key in kv_list(f"{self.prefix}{kind}/")]
