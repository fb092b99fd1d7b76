"""Drains a node of a cluster, of which a run's folder may know the address and the raylets."""

from __future__ import annotations

import re
from collections.abc import Sequence

from raypar.errors import ClusterError, ConfigError
from raypar.record.document_fields import ClusterDocument, NodeFacts
from raypar.record.value_text import short_node_id
from raypar.storage.run_folder import RunFolder


def drain_node_of_cluster(
    word: str, address: str, known: Sequence[NodeFacts], deadline_s: float, reason: str
) -> tuple[str, float | None]:
    """Drain the node that `word` names; returns its name for messages, and None.

    A node that is being drained already is left as it is; then the second is the Unix time at which it leaves: infinite if
    that is as soon as nothing runs there.

    `known`: the raylets of a local cluster, of which some may be gone. Raises `ConfigError` or `ClusterError`.
    """
    from raypar.actors.ray_connection import check_address_answers
    from raypar.ray_compat.nodes import drain_node, find_node, list_draining_nodes_of_cluster, list_live_nodes

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
        return str(node), leaves_at
    drain_node(address, node, deadline_s, reason)
    return str(node), None


def read_cluster_facts_of_run(run: str, run_dir: str) -> ClusterDocument:
    """Facts of a run's cluster: kind, address, nodes. Raises `ConfigError`, also if the run is over."""
    with RunFolder.open_for_reading(run, run_dir, with_job=False, last_bytes=0) as folder:
        if (folder.read_document(folder.members) or {}).get("phase") == "ended":
            active = [] if folder.shared is not None else runs_under_way_of_same_job(folder)
            raise ConfigError(
                f"run {folder.name} has ended: it has no work to move off",
                cure=f"--run {' or --run '.join(sorted(active))} is under way"
                if active
                else "to drain a node all the same give --address host:port",
            )
        facts: ClusterDocument | None = folder.read_document(folder.cluster)
        if facts is None or any(facts.get(key) is None for key in ("kind", "address", "nodes")):
            raise ConfigError(
                f"run {folder.name} does not say where its cluster is: {folder.place_of(folder.cluster)} is missing or "
                "incomplete",
                cure="give --address host:port",
            )
        return facts


def runs_under_way_of_same_job(folder: RunFolder) -> list[str]:
    """The names of the runs beside this one that have the same job's name and are under way on this machine."""
    job = re.sub(r"-\d+$", "", folder.name)
    beside = [RunFolder(path) for path in folder.path.parent.iterdir() if re.fullmatch(re.escape(job) + r"(-\d+)?", path.name)]
    return [run.name for run in beside if run.is_locked()]
