"""Limits of a plan that follow from message tags, which number stages, microbatches and values in a fixed number of bits
(`worker/step/message_tags.py`)."""

from __future__ import annotations

from raypar.errors import PlanError
from raypar.plan.stage_connections import StageConnections

STAGE_BITS = 10
MICROBATCH_BITS = 17
VALUE_BITS = 10
MAX_STAGES = 1 << STAGE_BITS
MAX_MICROBATCHES = 1 << MICROBATCH_BITS
MAX_VALUES_OF_MESSAGE = 1 << VALUE_BITS
"""The most values that one stage may send another for one microbatch."""

_FEWER_VALUES = (
    "choose other split points (plan.cuts) or fewer stages, so that fewer values pass between stages; or let layers pass fewer "
    "values: stack or concatenate them, or make the module around both layers a unit (model.units)"
)


def find_oversized_message(connections: StageConnections) -> str | None:
    """The first edge or relay of more values than a message tag can number, in words; None if there is none."""
    for edge in connections.edges:
        if len(edge.values) > MAX_VALUES_OF_MESSAGE:
            return f"{len(edge.values)} values pass from stage {edge.src} to stage {edge.dst}"
    for relay in connections.relays:
        if len(relay.values) > MAX_VALUES_OF_MESSAGE:
            return f"gradients of {len(relay.values)} values pass from stage {relay.src} to stage {relay.dst}"
    return None


def check_message_limits(connections: StageConnections, stages: int, microbatches: int) -> None:
    """Raises `PlanError` for a plan some of whose messages no tag could name."""
    if stages > MAX_STAGES:
        raise PlanError(f"the plan has {stages} stages, and {MAX_STAGES} is the most", cure="choose fewer stages")
    if microbatches > MAX_MICROBATCHES:
        raise PlanError(
            f"a step or validation pass has {microbatches} microbatches, and {MAX_MICROBATCHES} is the most",
            cure="choose fewer microbatches, or fewer samples for validation",
        )
    found = find_oversized_message(connections)
    if found is not None:
        raise PlanError(f"{found} for each microbatch, and {MAX_VALUES_OF_MESSAGE} is the most", cure=_FEWER_VALUES)
