"""The options with which Ray starts its raylets, read from their command lines. Imports no Ray."""

from __future__ import annotations

from pathlib import Path

from raypar.fences.fence import Fence
from raypar.ray_compat import TESTED

PROC = Path("/proc")
"""Where Linux shows the command lines of processes."""
NAMES = frozenset({"node_id", "gcs-address", "temp_dir"})
"""The options that are read."""


def _read_options(words: list[str]) -> dict[str, str]:
    """The options of a split command line, without their dashes. Raises `KeyError` if one of `NAMES` is missing."""
    found = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    if lacking := sorted(NAMES - found.keys()):
        raise KeyError(f"a raylet without --{' or --'.join(lacking)}")
    return found


OPTIONS = Fence(
    api="ray.core.src.ray.raylet.raylet --node_id --gcs-address --temp_dir",
    reason="a process outside a cluster learns only from it which node of which cluster a raylet of this machine is",
    versions=TESTED,
    feature="recognising the raylets of this machine",
    without="`raypar drain` cannot take a pid, commands in other terminals cannot find a local cluster's token, and `raypar "
    "status` cannot say which local nodes have died",
    probe=lambda: _read_options,
)


def read_raylet_options(pid: int) -> dict[str, str] | None:
    """The options on the command line of the process `pid`, without their dashes; None if it is no raylet."""
    try:
        words = (PROC / str(pid) / "cmdline").read_text().split("\0")
    except OSError:
        return None
    if Path(words[0]).name != "raylet":
        return None
    return OPTIONS.use(lambda read: read(words), None)


def parse_raylet_command(pid: int) -> tuple[str, str] | None:
    """(Ray's node id, address of its cluster) from the command line of the process `pid`; None if it is no raylet."""
    options = read_raylet_options(pid)
    return None if options is None else (options["node_id"], options["gcs-address"])
