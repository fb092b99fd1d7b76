"""The section `elastic` of a job: how a run continues when workers are lost, and when workers join."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from raypar.errors import ConfigError
from raypar.files.printable_text import shorten
from raypar.job.key import CLIENT, WORKERS
from raypar.job.section import MAX_WORKERS, LocalFolder, Section, Workers

T = TypeVar("T")

MIRROR_COST = 0.02
"""Share of the steps' time that the mirror may take, when `elastic.mirror` is auto."""


class ElasticConfig(Section):
    """How a run continues when workers are lost, and when workers join."""

    min_workers: Annotated[PositiveInt, CLIENT] = 1
    """The run begins with so many workers if no others have come for `grow_after_s`, and grows when others come. With fewer
    than this it waits for others, up to the job's `wait_for_workers_s`, at the beginning and later."""
    max_workers: Annotated[Workers | None, CLIENT] = None
    """Lost workers are replaced up to this number; None: as many as the plan has."""
    standbys: Annotated[NonNegativeInt, Field(le=MAX_WORKERS), CLIENT] = 0
    """Extra workers that are started and wait, so that a lost worker is replaced at once."""
    grow_after_s: Annotated[NonNegativeFloat, CLIENT] = 5.0
    """Workers that join get work between two steps: when all of them have started, or this many seconds after the first one.
    They get none if moving the state to them takes more time than they save; beyond `standbys` they are then given back to the
    cluster."""
    step_deadline_s: Annotated[PositiveFloat, CLIENT] = 3.0
    """Seconds. A step counts as hung if it takes longer than this and longer than 5 times the longest of the last 100 steps;
    workers that do not answer then are given up. Up to two minutes in which a worker that answers pings reads samples do not
    count."""
    last_copy_wait_s: Annotated[NonNegativeFloat, CLIENT] = 600.0
    """How many more seconds a silent worker is waited for if it has the only copy of some state (a copy in the mirror counts as
    another one). The wait ends early if its process or its node is known to have ended."""
    lost_state: Annotated[Literal["restart", "fail"], CLIENT] = "restart"
    """What follows if no worker, no mirror and no checkpoint has some of the state any more. `restart`: a line says so, and all
    begin again with the first step, with the same results as before. `fail`: the run ends with an error."""
    mirror: Annotated[Literal["auto", "off"] | PositiveInt, CLIENT] = "auto"
    """Every how many steps each worker copies its state into the memory of another one, for the case that the last worker with
    some state is lost. `auto`: as often as 2 % of the time allows. `off`: never."""
    mirror_in: Annotated[LocalFolder | None, WORKERS] = None
    """A folder on a local disk of each worker, in which the mirror's copies lie; None: in memory. They take room for up to four
    times a worker's state, and are gone when it ends."""
    stragglers: Annotated[Literal["report", "replace", "rebalance"], CLIENT] = "report"
    """What happens to a straggler (a slow worker): a line reports it; or it is replaced as soon as another worker can take its
    place; or it gets a smaller share of the blocks (`virtual_replicas`) until it is as fast as the others again, with the same
    results, and is replaced only where a smaller share does not help."""
    straggler_times: Annotated[float, Field(gt=1), CLIENT] = 1.5
    """A worker is a straggler if it computes more than this many times as long as its replicas, 20 steps in a row; a worker
    without replicas is compared with its own first 20 steps."""

    @property
    def mirror_place(self) -> Literal["memory", "files"] | None:
        """Where the mirror's copies lie; None: there are none."""
        return None if self.mirror == "off" else "memory" if self.mirror_in is None else "files"

    @field_validator("mirror", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """Undo what YAML makes of `off`: a truth value."""
        value = {False: "off", True: "auto"}[value] if isinstance(value, bool) else value
        if value not in ("auto", "off") and not (isinstance(value, int) and value > 0):
            raise ValueError("auto, off, or a number of steps")
        return value

    def to_policy_fields(self, wait_for_workers_s: float) -> dict[str, Any]:
        """The fields of `elastic.run_policy.RunPolicy` for an elastic run. Deadlines are short: a wrong suspicion costs a
        recovery only. `wait_for_workers_s`: the job's."""
        return {
            "elastic": True,
            "hires": True,
            "min_workers": self.min_workers,
            "max_workers": self.max_workers,
            "standbys": self.standbys,
            "grow_after_s": self.grow_after_s,
            "step_deadline_s": self.step_deadline_s,
            "step_deadline_times": 5.0,
            "capacity_s": wait_for_workers_s,
            "last_copy_wait_s": self.last_copy_wait_s,
            "restarts": self.lost_state == "restart",
            "replace_stragglers": self.stragglers == "replace",
            "rebalance_stragglers": self.stragglers == "rebalance",
            "straggler_times": self.straggler_times,
            "mirror_every": self.mirror if isinstance(self.mirror, int) else 0,
            "mirror_cost": MIRROR_COST if self.mirror == "auto" else 0.0,
        }

    @model_validator(mode="after")
    def _least_and_most(self) -> ElasticConfig:
        if self.mirror_in is not None and self.mirror == "off":
            raise ConfigError(
                f"elastic.mirror_in is {shorten(self.mirror_in)}, and elastic.mirror is off: there are no copies to put there",
                cure="leave elastic.mirror_in out, or set elastic.mirror: auto",
            )
        if self.max_workers is not None and self.min_workers > self.max_workers:
            raise ConfigError(
                f"elastic.min_workers is {self.min_workers} and elastic.max_workers is {self.max_workers}: there would "
                "never be workers enough",
                cure=f"set min_workers to {self.max_workers} or less, or max_workers to {self.min_workers} or more",
            )
        return self


def switch(value: T) -> T | dict[str, T] | None:
    """The section that `elastic: true` (the defaults) or `elastic: false` (None) stands for. Raises `ConfigError` for a bare
    `elastic:`, which could be meant either way."""
    if value is None:
        raise ConfigError("elastic is empty", cure="write `elastic: {}` (or true) for the defaults, `elastic: false` for none")
    return ({} if value else None) if isinstance(value, bool) else value
