"""Plans: which worker holds and computes what. Pure: standard library only, no clock, no random numbers."""

from raypar.plan.microbatch_routing import MicrobatchRouting, serving_shards
from raypar.plan.microbatches import Microbatches, MicrobatchesOfSets
from raypar.plan.model_outline import ModelOutline
from raypar.plan.parallel_plan import ParallelPlan, Role
from raypar.plan.stage_connections import GradientRelay, StageConnections, StageEdge, TiedParameter
from raypar.plan.stage_plan import StagePlan

__all__ = [
    "GradientRelay",
    "MicrobatchRouting",
    "Microbatches",
    "MicrobatchesOfSets",
    "ModelOutline",
    "ParallelPlan",
    "Role",
    "StageConnections",
    "StageEdge",
    "StagePlan",
    "TiedParameter",
    "serving_shards",
]
