"""WHO holds WHAT: stages, replicas, routing, blocks, the addition tree. Pure: standard library only, no clock, no random."""

from raypar.plan.crossing import Crossing, Edge, Outline, Tie
from raypar.plan.microbatches import Microbatches
from raypar.plan.parallel_plan import ParallelPlan, Routing, Seat, StagePlan

__all__ = ["Crossing", "Edge", "Microbatches", "Outline", "ParallelPlan", "Routing", "Seat", "StagePlan", "Tie"]
