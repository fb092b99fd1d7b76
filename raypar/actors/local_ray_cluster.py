"""What a local Ray cluster gets from raypar: its token, its removal, room in its temporary folder, further nodes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.errors import ClusterError, ConfigError, error_first_line
from raypar.files.untrusted_files import parse_untrusted_json, read_limited_bytes
from raypar.ray_compat.local_cluster import end_raylet, head_node, reap_raylet, start_raylet
from raypar.ray_compat.settings import find_token, read_raylet_options

SCRIPT = """
read -r word || sleep 3
for turn in 1 2; do
    ls -l /proc/[0-9]*/fd/[13] 2>/dev/null | while read -r line; do
        case "$line" in l?w*" -> $1/"*)
            pid=${line#*/proc/} pid=${pid%%/*}
            [ "$pid" = "$PPID" ] || kill -9 "$pid" 2>/dev/null
        esac
    done
    rm -rf "$1"
done
"""
"""The shell's script; `$1` is the folder of the local Ray cluster.

A word on its input means that this process has ended well. The end of the input means that it was killed: Ray's processes then
die too, and workers exit within 3 s. What remains is stuck: workers that are stopped, and Ray's agents, which look for the
control store for a minute. The script recognises them by their open files: a worker's output (1) goes to a file below the
folder, and an agent has inherited that of its raylet (3)."""

PATIENCE_S = 15.0
"""How long the shell may take after a good end."""


@contextlib.contextmanager
def remove_local_ray_on_exit(folder: Path) -> Iterator[None]:
    """After the body, kill the processes that write below `folder` and remove it. The shell has its own session, like Ray."""
    shell = subprocess.Popen(["sh", "-c", SCRIPT, "raypar-cleaner", str(folder)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            shell.communicate(b"done\n", timeout=PATIENCE_S)


RESERVE_BYTES = 1 << 20
"""Room that is kept in the temporary folder of a local Ray cluster, for a new driver: some lines for each of many processes.
Where logs have no room, a process that Ray starts dies at its first line, and Ray starts the next one."""
SHARE = 8
"""A small disk is asked for no more than one part of so many of its free room."""
FULL_BYTES = 64 << 10
"""With less room than this Ray's processes may not begin."""

_reserves: list[Path] = []
"""The reserve of this process's local Ray cluster, if there is one."""


@contextlib.contextmanager
def room_for_new_driver(folder: Path) -> Iterator[None]:
    """Keep some room in `folder`, of a local Ray cluster, during the block. Where there is too little nothing is kept."""
    path = folder / "reserve"
    with contextlib.suppress(OSError):  # no room: the cluster may still do
        size = min(RESERVE_BYTES, shutil.disk_usage(folder).free // SHARE)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
    _reserves.append(path)
    try:
        yield
    finally:
        _reserves.remove(path)
        path.unlink(missing_ok=True)


def describe_full_temp() -> str:
    """Text such as `/tmp has 0 KiB left` if the temporary folder of this process's local Ray cluster is full; else empty."""
    with contextlib.suppress(OSError):
        for path in _reserves:
            free = shutil.disk_usage(path.parent).free
            if free < FULL_BYTES:
                return f"{path.parent.parent} has {free // 1024} KiB left"
    return ""


def give_reserve_to_ray() -> str:
    """Free the reserve if the temporary folder is full. Returns what is said of it; empty if nothing was freed."""
    full = describe_full_temp()
    given = 0
    for path in _reserves if full else ():
        with contextlib.suppress(OSError):
            given += path.stat().st_size
            path.unlink()
    if not given:
        return ""
    return (
        f"{full}, where Ray's processes write their logs and without which none begins: {given // 1024} KiB that were kept for "
        "a new driver are free now\n  cure: free disk space there, or set TMPDIR to another folder"
    )


TOKEN_FILE = "auth_token"
"""Name of the file beside Ray's own folder: its address and its token, as JSON."""


def choose_token(environ: Mapping[str, str]) -> str:
    """The user's token if there is one, so that the user's other programs get in, else a random one. Raises `ConfigError`."""
    return find_token(environ) or secrets.token_hex(32)


def write_token_file(folder: Path, address: str, token: str) -> None:
    """Keep the token in `folder`, which only this user may read, for `find_local_token`."""
    content = json.dumps({"address": address, "token": token}).encode()
    file = os.open(folder / TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as open_file:
        open_file.write(content)


def find_local_token(address: str) -> str | None:
    """The token of the local Ray cluster whose control store answers at `address`; None if this user has started none there.

    Its raylets say in which folder Ray's files lie. Another user's raylet, and a file of another address, are not believed.
    """
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, KeyError):
            if entry.stat().st_uid != os.getuid():
                continue
            options = read_raylet_options(int(entry.name))
            if options is None or options["gcs-address"] != address:
                continue
            file = Path(options["temp_dir"]).parent / TOKEN_FILE
            if file.lstat().st_uid != os.getuid():
                continue
            with contextlib.suppress(ConfigError, ValueError):
                found = parse_untrusted_json(read_limited_bytes(file, follow=False, limit=4096, cure="remove it"))
                if isinstance(found, dict) and found.get("address") == address and isinstance(found.get("token"), str):
                    return str(found["token"])
    return None


JOIN_S = 60.0
"""How long a raylet may take to appear in Ray's node table."""


@dataclass(frozen=True)
class LocalNode:
    """A raylet of the local Ray cluster."""

    node: str
    """Ray's id of the node, in hex."""
    pid: int
    """The raylet's process."""
    cpus: int
    """Its logical CPUs."""
    head: bool = False
    """Whether it is the head's raylet. The run ends with it: the client is connected to Ray there."""


def cpus_per_node(workers: int, nodes: int) -> int:
    """Logical CPUs of each node: the nodes together have room for every worker and at least one more.

    So few CPUs make the loss of a node matter: what fits on `nodes` nodes need not fit on `nodes` - 1.
    """
    return -(-(workers + 1) // nodes)


@contextlib.contextmanager
def start_local_nodes(count: int, cpus: int, store_bytes: int, folder: Path) -> Iterator[tuple[LocalNode, ...]]:
    """Start `count` - 1 raylets beside the head that `ray.init` has started in this process; yields all of them.

    Ray's files lie in `folder`. Like the head, the raylets die with the thread that starts them, so with this process. Raises
    `ClusterError`.
    """
    started: list[Any] = []
    try:
        try:
            head = head_node()
            found = [LocalNode(head.node_id, reap_raylet(head), cpus, head=True)]
            for _ in range(count - 1):
                started.append(start_raylet(head.gcs_address, cpus, store_bytes, folder))
                found.append(LocalNode(started[-1].node_id, reap_raylet(started[-1]), cpus))
        except ClusterError:
            raise
        except Exception as error:  # Ray raises a bare one when a raylet is not up in time
            raise ClusterError(
                f"local node {len(started) + 2} of {count} did not start: {error_first_line(error)}",
                cure="ask for fewer with --local-nodes, or look at what else this machine is doing",
            ) from error
        wait_for_nodes(tuple(found))
        yield tuple(found)
    finally:
        for node in started:
            end_raylet(node)


def wait_for_nodes(nodes: tuple[LocalNode, ...]) -> None:
    """Wait until Ray lists all the nodes as alive. Raises `ClusterError` after `JOIN_S`."""
    import ray

    deadline = time.monotonic() + JOIN_S
    while True:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        missing = [node for node in nodes if node.node not in alive]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{len(missing)} of {len(nodes)} local nodes did not join within {JOIN_S:.0f} s "
                f"(pids {', '.join(str(node.pid) for node in missing)})",
                cure="ask for fewer with --local-nodes, or look at what else this machine is doing",
            )
        time.sleep(0.05)
