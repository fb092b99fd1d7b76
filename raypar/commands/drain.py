"""`raypar drain NODE`: tells Ray that a node will leave; a run with workers there moves their work to other workers."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from raypar.console.run_folder_arguments import add_run_dir_argument

if TYPE_CHECKING:
    from raypar.storage.run_folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar drain`."""
    parser.add_argument(
        "node", help="beginning of the node's id (`raypar status` shows it), its IP, or its raylet's pid if here"
    )
    parser.add_argument("--run", help="a run on the cluster: its name under --run-dir, or the path or URI of its folder")
    add_run_dir_argument(parser)
    parser.add_argument("--address", help="the cluster's address host:port (default: the run's, the pid's, or RAY_ADDRESS)")
    parser.add_argument("--deadline-s", type=float, default=120.0, metavar="S", help="the node leaves then (default 120)")
    parser.add_argument("--reason", default="raypar drain", metavar="TEXT", help="what Ray's log says")


def run(args: argparse.Namespace) -> int:
    """Drain the node; exit code 0, also if the node is being drained already. Raises `ConfigError` or `ClusterError`."""
    import os

    from raypar.errors import ConfigError
    from raypar.ray_compat.raylet_options import parse_raylet_command

    if not args.deadline_s > 0:
        raise ConfigError(f"--deadline-s {args.deadline_s:g}", cure="give the seconds until the node leaves, more than 0")
    word, address, known = args.node, args.address, []
    here = parse_raylet_command(int(word)) if word.isdecimal() else None
    if here is not None:
        word = here[0]
    if address is None and args.run is not None:
        facts = read_cluster_facts_of_run(args.run, args.run_dir)
        address, known = str(facts["address"]), facts["nodes"]
    if address is None:
        address = here[1] if here is not None else os.environ.get("RAY_ADDRESS")
    if address is None:
        raise ConfigError(
            f"{args.node!r} is no raylet of this machine, and nothing says which cluster has such a node",
            cure="give --run RUN or --address host:port, or set RAY_ADDRESS",
        )
    if not address.rpartition(":")[2].isdigit() or "://" in address:
        raise ConfigError(f"address {address!r}", cure="give --address host:port, where the cluster's control store answers")

    from raypar.actors.local_cluster_token import find_local_token
    from raypar.ray_compat.authentication import token_authentication

    token = find_local_token(address)
    with token_authentication(token) if token is not None else contextlib.nullcontext():
        return drain_node_of_cluster(word, address, known, args.deadline_s, args.reason)


def drain_node_of_cluster(word: str, address: str, known: list[dict[str, Any]], deadline_s: float, reason: str) -> int:
    """Drain the node that `word` names; `known`: the raylets of a local cluster, of which some may be gone. Exit code 0."""
    import math
    import time

    from raypar.actors.ray_connection import check_address_answers
    from raypar.console.run_status import local_time
    from raypar.errors import ClusterError, ConfigError
    from raypar.ray_compat.nodes import drain_node, find_node, list_draining_nodes_of_cluster, list_live_nodes
    from raypar.record.events import short_node_id

    try:
        check_address_answers(address)
    except ClusterError as error:
        raise ClusterError(
            error.what, cure="the run has ended, or its head is somewhere else: give --address host:port"
        ) from error
    nodes = list_live_nodes(address)
    left = [one for one in known if str(one["pid"]) == word or one["node"].startswith(word.lower())]
    if len(left) == 1 and all(left[0]["node"] != there.node for there in nodes):
        raise ConfigError(
            f"node {short_node_id(left[0]['node'])} (raylet {left[0]['pid']}) has left already: it was drained, or has died",
            cure=f"the nodes are {', '.join(map(str, nodes))}",
        )
    node = find_node(word, nodes)
    leaves_at = list_draining_nodes_of_cluster(address).get(node.node)
    if leaves_at is not None:
        when = "as soon as nothing runs there" if math.isinf(leaves_at) else f"at {local_time(leaves_at)}"
        print(f"node {node} is being drained already: it leaves {when}; nothing has changed")
        return 0
    drain_node(address, node, deadline_s, reason)
    until = local_time(time.time() + deadline_s)
    print(f"node {node} is going to leave at {until}, in {deadline_s:g} s: it takes nothing new, runs move their work off")
    return 0


def read_cluster_facts_of_run(run: str, run_dir: str) -> dict[str, Any]:
    """Facts of a run's cluster: kind, address, nodes. Raises `ConfigError`, also if the run is over."""
    from raypar.errors import ConfigError
    from raypar.storage.run_folder import RunFolder

    with RunFolder.open_for_reading(run, run_dir, with_job=False, last_bytes=0) as folder:
        if (folder.read_document(folder.members) or {}).get("phase") == "ended":
            active = [] if folder.shared is not None else runs_under_way_of_same_job(folder)
            raise ConfigError(
                f"run {folder.name} has ended: it has no work to move off",
                cure=f"--run {' or --run '.join(sorted(active))} is under way"
                if active
                else "to drain a node all the same give --address host:port",
            )
        facts = folder.read_document(folder.cluster)
        if facts is None or any(facts.get(key) is None for key in ("kind", "address", "nodes")):
            raise ConfigError(
                f"run {folder.name} does not say where its cluster is: {folder.place_of(folder.cluster)} is missing or "
                "incomplete",
                cure="give --address host:port",
            )
        return facts


def runs_under_way_of_same_job(folder: RunFolder) -> list[str]:
    """The names of the runs beside this one that have the same job's name and are under way on this machine."""
    import re

    from raypar.storage.run_folder import RunFolder

    job = re.sub(r"-\d+$", "", folder.name)
    beside = [RunFolder(path) for path in folder.path.parent.iterdir() if re.fullmatch(re.escape(job) + r"(-\d+)?", path.name)]
    return [run.name for run in beside if run.is_locked()]
