"""A Ray that does not start, cannot be joined or has no GPU is one clear error, whatever Ray itself raises."""

from types import SimpleNamespace

import pytest

from raypar.actors import local_nodes as nodes
from raypar.errors import ClusterError


@pytest.mark.parametrize("error", [Exception("The current node timed out during startup. This\ncould"), OSError("no memory")])
def test_a_second_local_node_that_does_not_start_in_time_is_one_clear_error(error, monkeypatch, tmp_path):
    """Ray raises a bare `Exception`; the nodes that did start are ended."""
    from ray._private import worker

    ended = []
    process = SimpleNamespace(pid=7, wait=lambda: None)
    node = SimpleNamespace(node_id="ab", gcs_address="here:1", all_processes={"raylet": [SimpleNamespace(process=process)]})
    node.kill_all_processes = lambda **how: ended.append(node)

    to_start = [node]

    def raylet(*given):
        if not to_start:
            raise error
        return to_start.pop()

    monkeypatch.setattr(worker, "_global_node", node)
    monkeypatch.setattr(nodes, "raylet", raylet)
    with pytest.raises(ClusterError) as found, nodes.local_nodes(4, 2, 10**8, tmp_path):
        pass
    assert found.value.what == f"local node 3 of 4 did not start: {str(error).splitlines()[0]}"
    assert "--local-nodes" in found.value.cure and ended == [node]
