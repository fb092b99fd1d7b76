"""Whether Ray's error for a lost actor says that its node has died, and the errors of raypar for lost workers."""

from __future__ import annotations

from typing import Any

from ray.exceptions import ActorDiedError

from raypar.errors import NodeLost, WorkerLost, error_first_line
from raypar.fences.fence import Fence
from raypar.ray_compat import TESTED

REASON = "raypar_death_reason"
"""Attribute of Ray's `ActorDiedError` in which `keep_death_reasons` keeps the code of the cause."""


def _look_for_reasons() -> Any:
    """The code of a death by the node's; the cause must have a field for it, and the error must be made from the cause."""
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    code = ActorDiedErrorContext.Reason.Value("NODE_DIED")
    ActorDiedError(ActorDiedErrorContext(reason=code, actor_id=bytes(16)))
    return code


DEATH_REASONS: Fence[Any] = Fence(
    api="ray.core.generated.common_pb2.ActorDiedErrorContext.reason",
    reason="Ray makes its error from this code, and then keeps only the text for people",
    versions=TESTED,
    feature="telling a node's death from that of a single process",
    without="a worker lost with its node counts as one that the step may have killed, and its node is named only once Ray "
    "lists it as dead",
    probe=_look_for_reasons,
)


def keep_death_reasons() -> None:
    """Have every `ActorDiedError` that Ray makes in this process from now on keep the code of its cause. Idempotent."""
    made = ActorDiedError.__init__
    if DEATH_REASONS.find() is None or getattr(made, REASON, False):
        return

    def make_and_keep(self: ActorDiedError, cause: Any = None) -> None:
        made(self, cause)
        setattr(self, REASON, getattr(cause, "reason", None))

    setattr(make_and_keep, REASON, True)
    ActorDiedError.__init__ = make_and_keep  # type: ignore[method-assign]


def is_node_death(error: Exception) -> bool:
    """Whether Ray says that an actor has died with its node; needs `keep_death_reasons` before the error is made."""
    reason = getattr(error, REASON, None)
    return reason is not None and reason == DEATH_REASONS.find()


def worker_lost_error(who: str, error: Exception, cure: str = "") -> WorkerLost:
    """raypar's error for a worker whose call ended with Ray's `RayActorError`; `NodeLost` if its node has died with it."""
    if is_node_death(error):
        return NodeLost(f"{who} was lost: its node died", cure=cure)
    return WorkerLost(f"{who} was lost: {error_first_line(error)}", cure=cure)
