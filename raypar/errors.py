"""The tree of errors raised on purpose: each says what broke, then the cure.

`assert` and plain Python exceptions are for our own mistakes; everything a user can cause or cure is a `RayparError`.
Every error survives pickling between actors because both texts are in `args`.
"""

from __future__ import annotations

from collections.abc import Iterator


class RayparError(Exception):
    """Base of every error raised on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 1

    def __init__(self, what: str, cure: str = "") -> None:
        super().__init__(what, cure)
        self.what = what
        self.cure = cure

    def __str__(self) -> str:
        return f"{self.what}\n  cure: {self.cure}" if self.cure else self.what


class InputError(RayparError):
    """The request itself cannot be carried out; nothing has been started."""

    exit_code = 2


class ConfigError(InputError):
    """A job file, command line or argument is wrong."""


class PlanError(InputError):
    """A parallel plan contradicts itself, the model or the cluster."""


class ScheduleError(InputError):
    """A schedule is not executable: incomplete, not causal, unpaired, not canonical, deadlocking or too large."""


class ModelError(InputError):
    """The model cannot be cut, built or initialised as asked."""


class DataError(InputError):
    """The data set is empty, malformed or yields samples that do not fit together."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged or belongs to another model or contract."""


class ClusterError(RayparError):
    """The cluster cannot give, or no longer gives, what the plan needs."""


class ActiveError(ClusterError):
    """Another driver on the cluster trains the run."""


class OutlivedError(ActiveError):
    """It had outlived its client: now it has saved and ended, and the same again goes on from there."""


class CommError(RayparError):
    """A transport operation failed."""


class GroupAborted(CommError):
    """The group was aborted (by us, by a lost peer or by a newer generation); it is never used again."""


class CommTimeout(CommError):
    """A wait passed its deadline; the text names what was waited for."""


class WorkerLost(RayparError):
    """A worker died or was removed; the text has its coordinate."""


class OutOfMemory(RayparError):
    """A worker had no memory left; the text says what it holds, and what would fit."""


class UserCodeError(RayparError):
    """User code (model, loss, data set, callback) raised; `what` holds the coordinate and the original traceback."""


class NonFiniteError(RayparError):
    """Loss or gradient norm is NaN or infinite and the policy is `stop`."""


class Interrupted(RayparError):
    """The run was stopped by the user; a resumable checkpoint was left."""

    exit_code = 130


def error_first_line(error: Exception) -> str:
    """What it says in a line; messages of Ray and of workers have many, and the first says it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def exception_chain(error: BaseException | None, *, contexts: bool = False) -> Iterator[BaseException]:
    """An error and what it was raised from, each once: two may be each other's cause. `contexts`: also what was handled when an
    error was raised without `from`."""
    seen: set[int] = set()  # by id, for errors may be equal
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if contexts else None)
