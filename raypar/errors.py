"""All errors that raypar raises on purpose. Each says what broke, then the cure.

`assert` and plain Python exceptions are for our own mistakes; everything a user can cause or cure is a `RayparError`.
Every error survives pickling between actors because both texts are in `args`.
"""

from __future__ import annotations

from collections.abc import Iterator


class RayparError(Exception):
    """Base of every error raised on purpose: what broke, and the cure."""

    exit_code = 1
    """The exit code of the command line for this error."""

    def __init__(self, what: str, cure: str = "") -> None:
        super().__init__(what, cure)
        self.what = what
        """What broke, with numbers."""
        self.cure = cure
        """What the user can do about it; may be empty."""

    def __str__(self) -> str:
        return f"{self.what}\n  cure: {self.cure}" if self.cure else self.what

    def add_place(self, where: str) -> None:
        """Put the name of a place before what broke: of a step, a stream or a key of the job."""
        self.what = f"{where}: {self.what}"
        self.args = (self.what, self.cure)


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


class StateNotKeptError(CheckpointError):
    """An optimizer has state that cannot be saved, or moved to another worker."""


class UnreadableStateError(CheckpointError):
    """What the workers wrote makes no checkpoint that could be read, or cannot be seen by the driver. It is no matter of a disk
    that is full: later it would not either."""


class ClusterError(RayparError):
    """The cluster cannot give, or no longer gives, what the plan needs."""


class ClusterAddressError(ClusterError):
    """No cluster at the given address lets this process in; nothing has been started."""

    exit_code = 2


class ActiveError(ClusterError):
    """Another driver on the cluster trains the run."""


class OutlivedError(ActiveError):
    """The driver had outlived its client and has saved and ended now; run the same command again to resume."""


class LeaseHeldError(ActiveError):
    """Another process holds the lease of a run on shared storage: it trains there, or has died a moment ago."""


class LeaseLostError(ClusterError):
    """This run's lease of its place on shared storage has ended or was taken: it may write nothing there any more."""


class CommError(RayparError):
    """A transport operation failed."""

    unreachable_ranks: tuple[int, ...] = ()
    """Ranks that this one could not connect to, because their machine did not answer or refused."""


class GroupAborted(CommError):
    """The communication group was aborted: by this worker, a lost peer or a newer generation. It is never used again."""


class CommTimeout(CommError):
    """A wait in communication passed its deadline; the message names what was waited for."""


class WorkerLost(RayparError):
    """A worker died or was removed; the message has its coordinate."""


class NodeLost(WorkerLost):
    """A worker was lost with its node."""


class OutOfMemory(RayparError):
    """A worker had no memory left; the message says what the worker holds, and what would fit."""


class UserCodeError(RayparError):
    """User code (model, loss, data set, callback) raised; `what` holds the coordinate and the original traceback."""


class NonFiniteError(RayparError):
    """Loss or gradient norm is NaN or infinite and the policy is `stop`."""


class Interrupted(RayparError):
    """The run was stopped by the user; a resumable checkpoint was left."""

    exit_code = 130


def error_message(error: BaseException) -> str:
    """`str(error)`; where that raises, as a user's own exception may, what Python prints then."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def with_article(name: str) -> str:
    """A name after its article: `a ViT`, `an AdamW`, `an LSTM`."""
    spelt_out = name[:2].isupper()  # read letter by letter
    return f"{'an' if name[:1] in ('AEFHILMNORSX' if spelt_out else 'AEIOaeio') else 'a'} {name}"


def error_first_line(error: Exception) -> str:
    """The first line of an error's message, which says what happened where Ray and workers write many."""
    return (error_message(error).strip() or type(error).__name__).splitlines()[0]


def exception_chain(error: BaseException | None, *, contexts: bool = False) -> Iterator[BaseException]:
    """An error and its causes, each once, even if two are each other's cause.

    `contexts`: for an error raised without `from`, also the error that was being handled then.
    """
    seen: set[int] = set()  # by id, for errors may be equal
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if contexts else None)
