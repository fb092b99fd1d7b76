"""Answers questions about a Ray cluster from inside one of its machines; a process of its own.

`python ray_console.py ADDRESS`: each line of stdin is a JSON list (question, arguments...), each line of stdout its answer:
`{"answer": ...}` or `{"error": TEXT}`. It joins nothing, and ends when stdin is closed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from raypar.ray_compat.nodes import drain_node, find_node, list_live_nodes


class Console:
    """Answers the questions; each method is one."""

    def __init__(self, address: str) -> None:
        import ray
        from ray._raylet import GcsClient, GcsClientOptions, GlobalStateAccessor

        self.address = address
        """Address of the control store."""
        self.client = GcsClient(address=address)
        """Ray's client for the key-value store."""
        options = GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True)
        self.accessor = GlobalStateAccessor(options)
        """Ray's client for the tables of actors and placement groups."""
        if not self.accessor.connect():
            raise ConnectionError(f"no control store answers at {address}")
        self.tables = ray.core.generated.gcs_pb2
        """The protobuf classes of Ray's tables."""

    def nodes(self) -> dict[str, str]:
        """Address -> id of the nodes that are alive."""
        return {node.ip: node.node for node in list_live_nodes(self.address)}

    def drain(self, ip: str, notice_s: float) -> None:
        """Tell Ray that the node at this address leaves."""
        drain_node(self.address, find_node(ip, list_live_nodes(self.address)), notice_s, "the machine is taken away")

    def actors(self) -> list[str]:
        """Names of actors that are not dead, with their states."""
        found = [self.tables.ActorTableData.FromString(each) for each in self.accessor.get_actor_table(None, None)]
        states = self.tables.ActorTableData.ActorState
        return sorted(f"{a.ray_namespace}/{a.name} {states.Name(a.state)}" for a in found if states.Name(a.state) != "DEAD")

    def groups(self) -> list[str]:
        """Names of placement groups that are not removed, with their states."""
        table = self.tables.PlacementGroupTableData
        found = [table.FromString(each) for each in self.accessor.get_placement_group_table()]
        states = table.PlacementGroupState
        return sorted(f"{g.name} {states.Name(g.state)}" for g in found if states.Name(g.state) != "REMOVED")

    def keys(self, prefix: str) -> list[str]:
        """Keys of the key-value store with this prefix."""
        return sorted(key.decode() for key in self.client.internal_kv_keys(prefix.encode(), None, timeout=10))


def main() -> None:
    """Answer until stdin ends."""
    console = Console(sys.argv[1])
    for line in sys.stdin:
        question, *given = json.loads(line)
        told: dict[str, Any]
        try:
            told = {"answer": getattr(console, question)(*given)}
        except Exception as error:  # told to who asks
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
