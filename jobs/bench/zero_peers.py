"""Replicas that divide state (ZeRO) and their peers: contenders of `memory.py` and `peers.py --zero`, and what is claimed."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from typing import Any

from harness import Contender, torchrun_command
from raypar_contenders import raypar

from raypar.job.plan_section import MOST_ZERO

WORK = {"depth": 7, "width": 384, "heads": 6, "context": 64, "batch_size": 8}
"""12.6 million parameters, and few samples: state is most of the memory."""
WORLD = 2
OWN: dict[str, dict[str, Any]] = {f"zero {level}": {"zero": level} for level in range(MOST_ZERO + 1)}
OWN |= {f"zero {MOST_ZERO}, by {span}": {"zero": MOST_ZERO, "gather": span} for span in ("microbatch", "layer")}
"""raypar's contenders, and how their plans are made."""

CLAIMS = (
    ("raypar zero 0", "raypar zero 1", 0.97),
    ("ZeroRedundancyOptimizer", "raypar zero 1", 1.0),
    ("FSDP2, kept", "raypar zero 3", 1.0),
    ("FSDP2, kept, one reduction", "raypar zero 3", 1.0),
    ("FSDP2, resharded", "raypar zero 3, by layer", 1.15),
)
"""(base, own, how many times as fast own shall be at least); those count whose contenders run."""


def peer(name: str, kind: str, microbatches: int, **options: Any) -> Contender:
    """One of the others' ways, under torchrun."""
    given = {"work": WORK, "microbatches": microbatches, **options}
    return Contender(name, WORLD, lambda address: [torchrun_command(kind, address, WORLD, **given)])


def contenders(microbatches: int) -> list[Contender]:
    """All that run side by side: DDP, PyTorch's and DeepSpeed's ways to divide state, and raypar's levels."""
    deepspeed = (1, 2, 3) if importlib.util.find_spec("deepspeed") is not None else ()
    return [
        peer("DDP", "ddp", microbatches),
        peer("ZeroRedundancyOptimizer", "zero-redundancy", microbatches),
        peer("FSDP2, kept", "fsdp2", microbatches, reshard=False),
        peer("FSDP2, kept, one reduction", "fsdp2", microbatches, reshard=False, reductions="last"),
        peer("FSDP2, resharded", "fsdp2", microbatches, reshard=True),
        *(peer(f"DeepSpeed {level}", "deepspeed", microbatches, level=level) for level in deepspeed),
        *(raypar(name, microbatches, replicas=WORLD, work=WORK, **options) for name, options in OWN.items()),
    ]


def claims(ran: Collection[str] | Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """The claims whose contenders ran."""
    return [claim for claim in CLAIMS if claim[0] in ran and claim[1] in ran]


def left_out() -> str:
    """Which peers are not among the contenders, and why; empty if all are."""
    if importlib.util.find_spec("deepspeed") is not None:
        return ""
    return "DeepSpeed 1 to 3 are not beside them: it is not installed here."
