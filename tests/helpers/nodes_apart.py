"""Runs in one process as if their workers were on several nodes, between which everything that can be cut travels in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from raypar.comm.routine import Routine
from raypar.plan import ParallelPlan, bundle_parts
from raypar.plan.bundle_parts import node_of_each_replica
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step import bundle_gather


def put_apart(
    patch: pytest.MonkeyPatch, nodes_of: Callable[[ParallelPlan], tuple[int, ...]] = node_of_each_replica
) -> list[int]:
    """Put the workers of all runs on nodes, and cut all tensors. Collects the number of cut tensors of each bundle in parts."""
    made, gather, gathered = OneProcessRun.__init__, bundle_gather.BundleGather.gather, list[int]()

    def init(self: OneProcessRun, spec: Any, plan: ParallelPlan, *args: Any, **given: Any) -> None:
        made(self, spec, plan, *args, **{"nodes": nodes_of(plan)} | given)

    def counting(
        self: bundle_gather.BundleGather, stage: int, microbatch: int, came: Sequence[Tensor], what: str
    ) -> Routine[list[Tensor]]:
        gathered.append(sum(cut is not None for cut in bundle_gather.read_description(came[0])))
        return (yield from gather(self, stage, microbatch, came, what))

    patch.setattr(bundle_parts, "LEAST_BYTES_IN_PARTS", 1)
    patch.setattr(OneProcessRun, "__init__", init)
    patch.setattr(bundle_gather.BundleGather, "gather", counting)
    return gathered
