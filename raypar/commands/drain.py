"""`raypar drain NODE`: tells Ray that a node will leave; a run with workers there moves their work to other workers."""

from __future__ import annotations

import argparse
import contextlib

from raypar.console.command_arguments import add_run_dir_argument


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
    import math
    import os
    import time

    from raypar.actors.local_cluster_token import find_local_token
    from raypar.console.run_status import local_time
    from raypar.errors import ConfigError
    from raypar.launch.drain_node import drain_node_of_cluster, read_cluster_facts_of_run
    from raypar.ray_compat.authentication import token_authentication
    from raypar.ray_compat.settings import parse_raylet_command

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
    token = find_local_token(address)
    with token_authentication(token) if token is not None else contextlib.nullcontext():
        node, leaves_at = drain_node_of_cluster(word, address, known, args.deadline_s, args.reason)
    if leaves_at is not None:
        at = f"at {local_time(leaves_at)}" if not math.isinf(leaves_at) else "as soon as nothing runs there"
        print(f"node {node} is being drained already: it leaves {at}; nothing has changed")
    else:
        after = f"at {local_time(time.time() + args.deadline_s)}, in {args.deadline_s:g} s"
        print(f"node {node} is going to leave {after}: it takes nothing new, runs move their work off")
    return 0
