"""Asks every node of a cluster for its clock, versions and limits, in a process of its own, for `raypar doctor`.

`python -m raypar.actors.cluster_probe ADDRESS FOLDER` prints one JSON line. What runs on the nodes is sent there whole, because
they may have no raypar.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypar.actors.numerics_fingerprint import processor_model
from raypar.doctor.check_environment_variables import FINGERPRINT_SETTINGS
from raypar.errors import RayparError, error_first_line
from raypar.files.json_type import Json

NODE_S = 25.0
"""How long a node may take to start a process and answer."""
MOST_NODES = 64
"""Nodes that are asked."""
CLOCK_READINGS = 5
"""How often each clock is read; the quickest answer counts."""
LIBRARIES = ("torch", "ray", "numpy", "raypar")
"""Whose versions are compared, with Python's."""


class NodeFactsProbe:
    """An actor on a node. Its code is sent to the node, so it imports nothing of raypar."""

    def clock(self) -> float:
        """The node's time."""
        return time.time()

    def describe(self, libraries: Sequence[str], settings: Sequence[str], file: str | None) -> dict[str, Json]:
        """Versions, settings and limits of the node; whether it sees `file`."""
        import importlib.metadata
        import platform
        import resource

        versions = {"python": platform.python_version()}
        for library in libraries:
            try:
                versions[library] = importlib.metadata.version(library)
            except importlib.metadata.PackageNotFoundError:
                versions[library] = ""
        if not versions.get("raypar"):
            with contextlib.suppress(ImportError):
                versions["raypar"] = importlib.import_module("raypar").__version__
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(soft, hard) if min(soft, hard) >= 0 else None
        shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
        return {
            "host": socket.gethostname(),
            "versions": versions,
            "processor": processor_model(),
            "settings": {name: os.environ[name] for name in settings if name in os.environ},
            "sees_folder": os.path.exists(file) if file is not None else None,
            "shm_free_bytes": shm.f_bavail * shm.f_frsize if shm is not None else 0,
            "open_files": most,
        }


def send_code_whole() -> None:
    """Have the code of `NodeFactsProbe` pickled, and not only its name: a node may have no raypar, or another one."""
    from ray import cloudpickle

    for module in {NodeFactsProbe.__module__, processor_model.__module__}:
        cloudpickle.register_pickle_by_value(sys.modules[module])


def ask_nodes(folder: str) -> list[dict[str, Json]]:
    """The facts of each node of the cluster that this process has joined.

    `folder`: each node says whether it sees this folder; empty: no folder is asked about.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]][:MOST_NODES]
    send_code_whole()
    reporter: Any = ray.remote(num_cpus=0)(NodeFactsProbe)
    asked = []
    with contextlib.ExitStack() as stack:
        file = None
        if len(nodes) > 1 and folder:
            with contextlib.suppress(OSError):
                file = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".raypar-doctor-", dir=folder)).name
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor = reporter.options(scheduling_strategy=there).remote()
            asked.append((node, actor, actor.describe.remote(LIBRARIES, FINGERPRINT_SETTINGS, file)))
        until = time.monotonic() + NODE_S
        return [_ask(node, actor, answer, until) for node, actor, answer in asked]


def _ask(node: dict[str, Any], actor: Any, answer: Any, until: float) -> dict[str, Json]:
    """The answer of one node, with the difference of its clock; or why there is none."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    known = {"node": node["NodeID"][:8], "host": node.get("NodeManagerHostname") or node.get("NodeManagerAddress") or ""}
    try:
        found = ray.get(answer, timeout=max(1.0, until - time.monotonic()))
        readings = []
        for _ in range(CLOCK_READINGS):
            before = time.time()
            theirs = ray.get(actor.clock.remote(), timeout=5)
            after = time.time()
            readings.append(((after - before) / 2, theirs - (before + after) / 2))
        uncertainty_s, skew_s = min(readings)
        return {**known, **found, "skew_s": skew_s, "uncertainty_s": uncertainty_s}
    except GetTimeoutError:
        return {**known, "error": f"{known['host']} did not answer within {NODE_S:g} s"}
    except RayError as error:
        return {**known, "error": f"{known['host']}: {error_first_line(error)}"}


def main(address: str, folder: str) -> dict[str, Json]:
    """What the cluster at `address` says; `error` if it cannot be joined. A local cluster of this user's is shown its token."""
    from raypar.actors.local_cluster_token import find_local_token
    from raypar.ray_compat.authentication import token_authentication

    token = find_local_token(address)
    with token_authentication(token) if token is not None else contextlib.nullcontext():
        return join_and_ask(address, folder)


def join_and_ask(address: str, folder: str) -> dict[str, Json]:
    """What the cluster at `address` says; `error` if it cannot be joined."""
    from raypar.actors.ray_connection import check_address_answers, is_open_to_all
    from raypar.ray_compat.local_cluster import loopback_address_kept_if_needed
    from raypar.ray_compat.settings import QUIET

    os.environ.update(QUIET)
    try:
        check_address_answers(address)
        import ray

        open_to_all = is_open_to_all(address)
        with loopback_address_kept_if_needed(address):
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except RayparError as error:
        return {"error": error.what}
    except Exception as error:  # Ray raises a bare one in places
        return {"error": f"cannot join a Ray cluster at {address!r}: {error_first_line(error)}"}
    try:
        ours = NodeFactsProbe().describe(LIBRARIES, FINGERPRINT_SETTINGS, None)
        nodes = ask_nodes(folder if not folder or Path(folder).is_dir() else os.getcwd())
        return {"nodes": nodes, "open_to_all": open_to_all, **{key: ours[key] for key in ("versions", "processor", "settings")}}
    finally:
        ray.shutdown()


if __name__ == "__main__":
    print("\n" + json.dumps(main(*sys.argv[1:3])), flush=True)
