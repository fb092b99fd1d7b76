"""The folder of a job as Ray unpacks it on its nodes, and a process's current directory in it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

log = logging.getLogger(__name__)

GONE = " (deleted)"
NOWHERE = "/"

UNPACKED_S = 30.0
"""How long nodes may take to unpack a job's folder before we go on without them."""


def wait_until_unpacked() -> None:
    """Return when those nodes that share a machine have unpacked the folder of this process's job, if it has one.

    They share the folder of unpacked `working_dir`s too, and begin to remove it and unpack it anew as soon as a process of the
    job has joined the cluster: what is imported from it meanwhile, here or in a worker, may not be found. A node that takes
    longer than `UNPACKED_S`, or is lost, is no reason not to begin; the plan's workers are waited for as always.
    """
    if "working_dir" not in ray.get_runtime_context().runtime_env:
        return
    nodes = [node for node in ray.nodes() if node["Alive"]]
    there = Counter(node["NodeManagerHostname"] for node in nodes)
    shared = [node["NodeID"] for node in nodes if there[node["NodeManagerHostname"]] > 1]
    # By value: a function that is imported would be read from the very folder.
    stand = ray.remote(num_cpus=0, max_retries=0)(lambda: None)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in shared]
    asked = [stand.options(scheduling_strategy=place).remote() for place in places]
    _, late = ray.wait(asked, num_returns=len(asked), timeout=UNPACKED_S) if asked else ([], [])
    for task in late:
        ray.cancel(task)
    if late:
        names = ", ".join(node[:8] for node, task in zip(shared, asked, strict=True) if task in late)
        log.warning("nodes %s have not unpacked the job's folder within %g s; the run begins without them", names, UNPACKED_S)


class WorkingDir:
    """Several raylets of one machine share a folder of unpacked `working_dir`s, and each that needs one removes it and unpacks
    it anew: whoever works there stands in a folder that is gone, and whatever asks for the current directory fails. The new
    one has the same path."""

    def __init__(self) -> None:
        self._wanted: str | None = None
        """Where we were before it was gone, until it is there again."""

    def keep(self) -> None:
        """Stand somewhere, and where we stood if that is possible."""
        try:
            here = os.getcwd()
        except FileNotFoundError:
            self._wanted = os.readlink("/proc/self/cwd").removesuffix(GONE)
            os.chdir(NOWHERE)
            here = NOWHERE
        if self._wanted is not None and here == NOWHERE:
            with contextlib.suppress(FileNotFoundError):
                os.chdir(self._wanted)
                self._wanted = None

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """In a place that nobody removes: torch asks for the current directory in the middle of its imports, and half an import
        cannot be made good. Not for code of the user's, which may open files of the job's folder."""
        self.keep()
        if self._wanted is None:
            self._wanted = os.getcwd()
        os.chdir(NOWHERE)
        try:
            yield
        finally:
            self.keep()
