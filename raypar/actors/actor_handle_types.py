"""The types of the handles on a run's actors: what their methods take, and what they answer."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar

import ray

from raypar.actors.messages import CallFailure, GatheredAnswers, RunRequest, WorkerHello
from raypar.elastic.call_routes import CallRoute
from raypar.elastic.generation_guard import WorkerStatus
from raypar.plan.pieces import AdoptedStages
from raypar.plan.vote_result import VoteResult

if TYPE_CHECKING:
    from raypar.worker.checkpoint.checkpoint_files import ShardRecord
    from raypar.worker.worker_reports import Report

P = ParamSpec("P")
T = TypeVar("T", covariant=True)

Ping: TypeAlias = tuple[int, str, bool, float, int | None]
"""The answer to a ping (`WorkerActor.ping`)."""
Polled: TypeAlias = tuple[list[dict[str, Any]], int, int]
"""The answer to a poll of the driver (`DriverActor.events`)."""


class PendingAnswer(Protocol[T]):
    """The answer to a call that may not have come yet: an `ObjectRef` of Ray."""

    def future(self) -> Future[Any]:
        """The answer as a future, for asyncio."""

    def __await__(self) -> Generator[None, None, T]:
        """Wait for it; raises what the method has raised."""


class RemoteMethod(Protocol[P, T]):
    """A method of an actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> PendingAnswer[T]:
        """Call it; raises only if Ray cannot send the call."""


class WorkerHandle(Protocol):
    """A worker, `WorkerActor`."""

    hello: RemoteMethod[[bool], WorkerHello | CallFailure]
    adopt: RemoteMethod[[int, bytes, str, Sequence[str], float], AdoptedStages | CallFailure | None]
    share_out_anew: RemoteMethod[[int, bytes], bool | CallFailure]
    step: RemoteMethod[[bytes], Report | CallFailure]
    validate: RemoteMethod[[int, int, int], Report | CallFailure]
    report_status: RemoteMethod[[int], WorkerStatus | CallFailure]
    apply_kept_gradients: RemoteMethod[[int, int, VoteResult], WorkerStatus | CallFailure]
    save: RemoteMethod[[int, int, str, bool], CallFailure | None]
    save_result: RemoteMethod[[], ShardRecord | CallFailure]
    ping: RemoteMethod[[], Ping]
    activity: RemoteMethod[[], str]
    announce_generation: RemoteMethod[[int, str], CallFailure | None]
    abort: RemoteMethod[[str], None]
    stacks: RemoteMethod[[], str]
    close: RemoteMethod[[], None]


class AgentHandle(Protocol):
    """The agent of a node, `NodeAgent`."""

    meet: RemoteMethod[[Mapping[int, WorkerHandle], Mapping[str, AgentHandle]], None]
    step: RemoteMethod[[bytes, CallRoute, float], GatheredAnswers[Report | CallFailure]]
    ping: RemoteMethod[[CallRoute, float], GatheredAnswers[Ping]]


class DriverHandle(Protocol):
    """The driver, `DriverActor`."""

    start: RemoteMethod[[RunRequest], None]
    events: RemoteMethod[[int, int, float], Polled]
    alone_s: RemoteMethod[[], float]
    stop: RemoteMethod[[str, float], None]
    leave_without_control_store: RemoteMethod[[str], None]


def kill_actor(handle: WorkerHandle | AgentHandle | DriverHandle, *, no_restart: bool) -> None:
    """Kill an actor; without `no_restart` Ray starts it again, if it may."""
    ray.kill(handle, no_restart=no_restart)  # type: ignore[arg-type]  # a handle of Ray's
