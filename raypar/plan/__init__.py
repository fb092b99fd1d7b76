"""WHO holds WHAT: stages, replicas, routing, blocks, the addition tree. Pure: standard library only, no clock, no random."""

from raypar.plan.microbatches import Microbatches
from raypar.plan.parallel_plan import MicrobatchRouting, ParallelPlan, Seat, StagePlan
from raypar.plan.stage_connections import ModelOutline, StageConnections, StageEdge, TiedParameter

__all__ = [
    "MicrobatchRouting",
    "Microbatches",
    "ModelOutline",
    "ParallelPlan",
    "Seat",
    "StageConnections",
    "StageEdge",
    "StagePlan",
    "TiedParameter",
]
