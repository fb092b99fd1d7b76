"""`raypar drain --run RUN`: where the run's cluster is, or why there is none to drain a node of."""

import json

import pytest

from raypar.errors import ConfigError
from raypar.launch.drain_node import read_cluster_facts_of_run
from raypar.storage.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    made = RunFolder.create(tmp_path, "tiny")
    made.cluster.write_text(json.dumps({"kind": "own", "address": "127.0.0.1:7", "nodes": []}))
    return made


@pytest.mark.parametrize("phase", ["starting", "running", "recovering", "waiting"])
def test_the_cluster_of_a_run_under_way_is_found(folder, phase):
    folder.members.write_text(json.dumps({"phase": phase}))
    assert read_cluster_facts_of_run("tiny", str(folder.path.parent))["address"] == "127.0.0.1:7"


def test_a_run_that_has_ended_says_so(folder):
    folder.members.write_text(json.dumps({"phase": "ended"}))
    with pytest.raises(ConfigError, match="tiny has ended"):
        read_cluster_facts_of_run("tiny", str(folder.path.parent))


def test_the_cure_names_the_run_of_the_same_job_that_is_under_way(folder):
    folder.members.write_text(json.dumps({"phase": "ended"}))
    second, killed = (RunFolder.create(folder.path.parent, "tiny") for _ in range(2))
    killed.job.touch()
    with second.hold_lock(), pytest.raises(ConfigError) as caught:
        read_cluster_facts_of_run("tiny", str(folder.path.parent))
    assert caught.value.cure == "--run tiny-2 is under way"


def test_where_no_run_lies_the_cure_is_another_folder(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_cluster_facts_of_run("tiny", str(tmp_path))
    assert f"no run lies under {tmp_path}: give the path" in caught.value.cure
