"""raypar among the contenders of a bench: in processes of its own, and on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import ROOT, Contender, worker_command

OLD = "old raypar"
"""Begins the names of contenders that are another checkout's raypar."""


def raypar(name: str, microbatches: int, *, replicas: int = 1, stages: int = 1, root: Path = ROOT, **more: Any) -> Contender:
    """raypar's worker core in processes of its own, over the TCP transport. `root`: the checkout whose raypar it is."""
    options: dict[str, Any] = {"work": {}, "microbatches": microbatches, "replicas": replicas, "stages": stages, **more}
    world, named = replicas * stages, f"raypar {name}" if root == ROOT else f"{OLD} {name}"
    return Contender(
        named, world, lambda a: [worker_command("raypar", a, r, root=root, **options) for r in range(world)], root=root
    )


def raypar_on_ray(name: str, microbatches: int, *, replicas: int = 1, stages: int = 1, **more: Any) -> Contender:
    """raypar's actors on a Ray of its own; the steps are asked for as its driver does."""
    options: dict[str, Any] = {"work": {}, "microbatches": microbatches, "replicas": replicas, "stages": stages, **more}
    return Contender(f"raypar {name} on Ray", 1, lambda a: [worker_command("raypar-ray", a, 0, **options)], never_idle=True)
