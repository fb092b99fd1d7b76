"""Keeps processes running while Ray removes the job's folder (`working_dir`) and unpacks it anew."""

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
"""What Linux appends to the path of a directory that was removed."""
NOWHERE = "/"
"""A directory that nobody removes."""

UNPACKED_S = 30.0
"""How long nodes may take to unpack a job's folder before the run begins without them."""


def wait_until_working_dir_unpacked() -> None:
    """Wait until the nodes that share a machine have unpacked the folder of this process's job, if it has one.

    Such nodes share one copy of the folder. Each of them removes the copy and unpacks it anew as soon as a process of the job
    has joined the cluster; meanwhile imports from it may fail, here and in workers. Nodes that take longer than `UNPACKED_S`,
    or are lost, do not keep the run from beginning.
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


class WorkingDirGuard:
    """Keeps the current directory of this process valid.

    Several raylets of one machine share the unpacked `working_dir`, and each removes it and unpacks it anew, at the same path.
    A process in it is then in a directory that is gone, and whatever asks for the current directory fails.
    """

    def __init__(self) -> None:
        self._wanted: str | None = None
        """The directory to return to, once it exists again; None while this process is in it."""

    def keep(self) -> None:
        """Make sure that the current directory exists; return to the former one if it exists again."""
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
        """Run the body in a directory that nobody removes.

        For importing torch, which asks for the current directory in the middle of its imports: half an import cannot be
        repaired. Not for user code, which may open files of the job's folder.
        """
        self.keep()
        if self._wanted is None:
            self._wanted = os.getcwd()
        os.chdir(NOWHERE)
        try:
            yield
        finally:
            self.keep()
