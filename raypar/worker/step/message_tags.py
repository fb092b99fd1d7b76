"""Message tags: which step, edge, microbatch and tensor a message belongs to, in one 63-bit integer.

Layout, high to low: 12 bits of the step, 3 bits of kind, 10 + 10 bits of stages, 17 bits of microbatch, 10 bits of index in the
bundle: 62 bits; transports may use the one above for their own.

Tags only need to differ among the steps in flight: at most `MAX_OPEN_STEPS` of them, and one mirror snapshot. Steps that are
replayed after a recovery have the same tags in a later generation, which messages carry beside the tag. The last three parts
are limits of a plan, which `plan/stage_connections.py` checks before a run starts.
"""

from __future__ import annotations

from raypar.errors import PlanError
from raypar.plan.stage_connections import (
    MAX_MICROBATCHES,
    MAX_STAGES,
    MAX_VALUES_OF_MESSAGE,
    MICROBATCH_BITS,
    STAGE_BITS,
    VALUE_BITS,
)

_KINDS = {"activation": 0, "gradient": 1, "tie": 2, "vote": 3, "validation": 4, "state": 5, "mirror": 6, "buffers": 7}
_STEP_BITS, _KIND_BITS = 12, 3
_MICROBATCH_SHIFT = VALUE_BITS
_DST_SHIFT = _MICROBATCH_SHIFT + MICROBATCH_BITS
_SRC_SHIFT = _DST_SHIFT + STAGE_BITS
_KIND_SHIFT = _SRC_SHIFT + STAGE_BITS
_STEP_SHIFT = _KIND_SHIFT + _KIND_BITS
_STEP_MASK = (1 << _STEP_BITS) - 1


def _tag(step: int, kind: int, src: int, dst: int, microbatch: int, index: int) -> int:
    if src >= MAX_STAGES or dst >= MAX_STAGES or microbatch >= MAX_MICROBATCHES or index >= MAX_VALUES_OF_MESSAGE:
        raise PlanError(
            f"stage {max(src, dst)}, microbatch {microbatch}, tensor {index} does not fit a message tag",
            cure=f"use at most {MAX_STAGES} stages, {MAX_MICROBATCHES} microbatches, {MAX_VALUES_OF_MESSAGE} values between "
            "two stages",
        )
    return (
        (step & _STEP_MASK) << _STEP_SHIFT
        | kind << _KIND_SHIFT
        | src << _SRC_SHIFT
        | dst << _DST_SHIFT
        | microbatch << _MICROBATCH_SHIFT
        | index
    )


def bundle_tag(step: int, kind: str, src: int, dst: int, microbatch: int, index: int, *, validation: bool = False) -> int:
    """Tag of one tensor of the bundle of edge (src, dst) for one microbatch."""
    return _tag(step, _KINDS["validation" if validation else kind], src, dst, microbatch, index)


def tie_tag(step: int, src: int, dst: int, tie: int, use: int) -> int:
    """Tag of the reduced gradient of one use of tie number `tie`, from stage `src` to the worker that hosts `dst`."""
    return _tag(step, _KINDS["tie"], src, dst, tie, use)


def vote_tag(step: int) -> int:
    """Tag of a worker's vote for one step."""
    return _tag(step, _KINDS["vote"], 0, 0, 0, 0)


def buffers_tag(step: int, stage: int, virtual_shard: int) -> int:
    """Tag of what one replica of a virtual shard of a stage has written into buffers in one step."""
    return _tag(step, _KINDS["buffers"], stage, stage, virtual_shard, 0)


def metrics_tag(step: int, stage: int) -> int:
    """Tag of the states of metrics that one replica of the last stage has measured in one pass."""
    return _tag(step, _KINDS["buffers"], stage, stage, 0, 1)


def state_tag(index: int) -> int:
    """Tag of the `index`-th tensor of the state that one worker hands to another when a generation begins."""
    return _tag(0, _KINDS["state"], 0, 0, index, 0)


def mirror_tag(done: int, index: int) -> int:
    """Tag of the `index`-th message of a worker's copy of the state after `done` steps."""
    return _tag(done, _KINDS["mirror"], 0, 0, index, 0)
