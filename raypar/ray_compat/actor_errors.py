"""raypar's errors for lost workers, made from Ray's errors for lost actors: whether the actor's node has died."""

from __future__ import annotations

from typing import Any

from ray.exceptions import ActorDiedError

from raypar.errors import NodeLost, WorkerLost, error_first_line
from raypar.fences.fence import Fence
from raypar.ray_compat import TESTED

REASON = "raypar_death_reason"
"""Attribute in which `keep_death_reasons` stores the reason code of an `ActorDiedError`."""


def _look_for_reasons() -> Any:
    """The reason code for a node's death. Also checks that Ray's error is made from a context that has a reason code."""
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    code = ActorDiedErrorContext.Reason.Value("NODE_DIED")
    ActorDiedError(ActorDiedErrorContext(reason=code, actor_id=bytes(16)))
    return code


DEATH_REASONS: Fence[Any] = Fence(
    api="ray.core.generated.common_pb2.ActorDiedErrorContext.reason",
    reason="Ray makes its error from this code but does not keep the code in the error",
    versions=TESTED,
    feature="telling a node's death from that of a single process",
    without="a worker lost with its node counts as one that the step may have killed, and the node is reported only once Ray "
    "lists it as dead",
    probe=_look_for_reasons,
)


def keep_death_reasons() -> None:
    """Have every `ActorDiedError` that Ray makes in this process from now on keep its reason code. Idempotent."""
    made = ActorDiedError.__init__
    if DEATH_REASONS.find() is None or getattr(made, REASON, False):
        return

    def make_and_keep(self: ActorDiedError, cause: Any = None) -> None:
        made(self, cause)
        setattr(self, REASON, getattr(cause, "reason", None))

    setattr(make_and_keep, REASON, True)
    ActorDiedError.__init__ = make_and_keep  # type: ignore[method-assign]


def is_node_death(error: Exception) -> bool:
    """Whether the error says that an actor's node has died. Only for errors made after `keep_death_reasons`."""
    reason = getattr(error, REASON, None)
    return reason is not None and reason == DEATH_REASONS.find()


def worker_lost_error(who: str, error: Exception, cure: str = "") -> WorkerLost:
    """raypar's error for a worker whose call ended with Ray's `RayActorError`; `NodeLost` if its node has died."""
    if is_node_death(error):
        return NodeLost(f"{who} was lost: its node died", cure=cure)
    return WorkerLost(f"{who} was lost: {error_first_line(error)}", cure=cure)
