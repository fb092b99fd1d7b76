"""Message tags: which step, edge, microbatch and tensor a message belongs to, in one 63-bit integer.

Layout, high to low: 15 bits of the step (tags only need to differ among the few steps in flight), 3 bits of kind, 10 + 10
bits of stages, 17 bits of microbatch, 7 bits of index in the bundle: 62 bits; transports may use the one above for their own.
"""

from __future__ import annotations

from raypar.errors import PlanError

_KINDS = {"activation": 0, "gradient": 1, "tie": 2, "vote": 3, "validation": 4, "state": 5, "mirror": 6, "buffers": 7}
LIMITS = {"stages": 1 << 10, "microbatches": 1 << 17, "values on one edge": 1 << 7}


def _tag(step: int, kind: int, src: int, dst: int, microbatch: int, index: int) -> int:
    if not (src < 1 << 10 and dst < 1 << 10 and microbatch < 1 << 17 and index < 1 << 7):
        raise PlanError(
            f"stage {max(src, dst)}, microbatch {microbatch}, tensor {index} does not fit a message tag",
            cure="stay below " + ", ".join(f"{limit} {what}" for what, limit in LIMITS.items()),
        )
    return (step & 0x7FFF) << 47 | kind << 44 | src << 34 | dst << 24 | microbatch << 7 | index


def bundle_tag(step: int, kind: str, src: int, dst: int, microbatch: int, index: int, *, validation: bool = False) -> int:
    """Tag of one tensor of the bundle of edge (src, dst) for one microbatch."""
    return _tag(step, _KINDS["validation" if validation else kind], src, dst, microbatch, index)


def tie_tag(step: int, src: int, dst: int, tie: int, use: int) -> int:
    """Tag of the reduced gradient of one use of tie number `tie`, from stage `src` to the worker that hosts `dst`."""
    return _tag(step, _KINDS["tie"], src, dst, tie, use)


def vote_tag(step: int) -> int:
    """Tag of a worker's vote for one step."""
    return _tag(step, _KINDS["vote"], 0, 0, 0, 0)


def buffers_tag(step: int, stage: int) -> int:
    """Tag of what one replica of a stage has written into buffers in one step."""
    return _tag(step, _KINDS["buffers"], stage, stage, 0, 0)


def state_tag(index: int) -> int:
    """Tag of the `index`-th tensor of the state that one worker hands to another when a generation begins."""
    return _tag(0, _KINDS["state"], 0, 0, index, 0)


def mirror_tag(done: int, index: int) -> int:
    """Tag of the `index`-th message of a worker's copy of the state after `done` steps."""
    return _tag(done, _KINDS["mirror"], 0, 0, index, 0)
