"""`cluster/aws.yaml` on moto, a stand-in for AWS on this machine: what Ray makes of the file, and that nothing is left."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
REGION = "us-west-2"
TOKEN = "not-a-secret-but-treated-as-one"
COMMAND_TIMEOUT_S = 240.0


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """EC2 of an account that has never been used, on the loopback; `$HOME` is a new folder, since Ray keeps its keys there."""
    from moto.ec2.models.instance_types import InstanceTypeBackend
    from moto.server import ThreadedMotoServer

    # Ray reads all types of instances that there are, which takes seconds.
    few = [kind for kind in InstanceTypeBackend.instance_types if kind.name.startswith("m7i.")]
    monkeypatch.setattr(InstanceTypeBackend, "instance_types", few)
    monkeypatch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    (tmp_path / "home/.ray").mkdir(parents=True)
    (tmp_path / "home/.ray/auth_token").write_text(TOKEN)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(tmp_path / "home"),
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    yield boto3.client("ec2", region_name=REGION)
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    server.stop()


def instances(ec2: Any) -> list[dict[str, Any]]:
    return [each for reservation in ec2.describe_instances()["Reservations"] for each in reservation["Instances"]]


def node_type(instance: dict[str, Any]) -> str:
    return next(tag["Value"] for tag in instance["Tags"] if tag["Key"] == "ray-user-node-type")


@pytest.mark.ci
def test_the_aws_file_makes_an_on_demand_head_and_spot_workers_and_leaves_nothing(aws: Any, monkeypatch: pytest.MonkeyPatch):
    """Bootstrap (role, keys, subnets, security group), one create per node type, terminate: by Ray's own provider."""
    from ray.autoscaler._private.aws import config as aws_config
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config, validate_config

    waits: list[float] = []  # Ray's two pauses of 15 s until a new role is known everywhere, which it is here at once
    monkeypatch.setattr(aws_config, "time", types.SimpleNamespace(sleep=waits.append))
    config = prepare_config(yaml.safe_load((ROOT / "cluster/aws.yaml").read_text()))
    validate_config(config)
    config = AWSNodeProvider.fillout_available_node_types_resources(config)
    resources = {name: kind["resources"] for name, kind in config["available_node_types"].items()}
    assert resources["head"]["CPU"] == 0
    assert resources["spot"]["CPU"] == resources["ondemand"]["CPU"] == 8
    config = AWSNodeProvider.bootstrap_config(config)
    assert waits == [15, 15]

    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    for name in ("head", "spot", "spot", "ondemand"):
        arguments = copy.deepcopy(config["available_node_types"][name]["node_config"])
        if name == "head":
            arguments |= config["head_node"]
        kind = "head" if name == "head" else "worker"
        tags = {"ray-node-type": kind, "ray-user-node-type": name, "ray-node-status": "uninitialized", "ray-launch-config": "0"}
        provider.create_node(arguments, tags, 1)

    made = instances(aws)
    assert [(node_type(each), each["InstanceType"], each.get("InstanceLifecycle")) for each in made] == [
        ("head", "m7i.large", None),
        ("spot", "m7i.2xlarge", "spot"),
        ("spot", "m7i.2xlarge", "spot"),
        ("ondemand", "m7i.2xlarge", None),
    ]
    assert all(each["MetadataOptions"]["HttpTokens"] == "required" for each in made)
    assert all(each["KeyName"] == f"ray-autoscaler_{REGION}" for each in made)
    assert [bool(each.get("IamInstanceProfile")) for each in made] == [True, False, False, False]  # the head makes nodes
    assert len({each["SecurityGroups"][0]["GroupId"] for each in made}) == 1
    assert [volume["Size"] for volume in aws.describe_volumes()["Volumes"]] == [200, 50, 50, 50]

    provider.terminate_nodes(provider.non_terminated_nodes({}))
    assert provider.non_terminated_nodes({}) == []
    assert {each["State"]["Name"] for each in instances(aws)} == {"terminated"}
    assert aws.describe_volumes()["Volumes"] == []


RECORDER = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    print(json.dumps([{name!r}, *sys.argv[1:]]), file=log)
"""


@pytest.mark.chaos
def test_ray_up_and_ray_down_with_the_aws_file(aws: Any, tmp_path: Path, request: pytest.FixtureRequest):
    """The commands themselves; `ssh` and `rsync` only write down what would be done on the head."""
    stubs, log = tmp_path / "stubs", tmp_path / "log"
    stubs.mkdir()
    for name in ("ssh", "rsync", "scp"):
        (stubs / name).write_text(RECORDER.format(python=sys.executable, log=str(log), name=name))
        (stubs / name).chmod(0o755)
    ray = shutil.which("ray", path=str(Path(sys.executable).parent)) or "ray"
    user = f"moto-{os.getpid()}"
    env = os.environ | {"PATH": f"{stubs}:{os.environ['PATH']}", "TERM": "dumb", "TMPDIR": str(tmp_path), "LOGNAME": user}
    sockets = f"/tmp/ray_ssh_{hashlib.sha256(user.encode()).hexdigest()[:10]}"  # Ray's folder for connections of ssh
    request.addfinalizer(lambda: shutil.rmtree(sockets, ignore_errors=True))

    def run(*command: str) -> str:
        done = subprocess.run(
            [ray, *command], cwd=ROOT, env=env, timeout=COMMAND_TIMEOUT_S, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    said = run("up", "--yes", "--no-config-cache", "cluster/aws.yaml")
    (head,) = instances(aws)
    assert (node_type(head), head["State"]["Name"]) == ("head", "running")
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    remote = [shlex.join(call) for call in calls]
    config = yaml.safe_load((ROOT / "cluster/aws.yaml").read_text())
    wanted = [
        *(config["initialization_commands"] + config["setup_commands"] + config["head_setup_commands"]),
        *config["head_start_ray_commands"],
    ]
    places = [_first_with(remote, command) for command in wanted]
    assert places == sorted(places), "commands run in the order in which they stand"
    start = remote[places[-1]]
    assert "RAY_enable_autoscaler_v2=1" in start
    assert re.search(r"RAY_OVERRIDE_LABELS=.{0,40}ray\.io/market-type.{0,40}on-demand", start)
    assert re.search(r"RAY_OVERRIDE_RESOURCES=.{0,20}CPU\W{1,12}0\b", start)
    sent = {call[-1].partition(":")[2] for call in calls if call[0] == "rsync"}
    assert {mount.rstrip("/") for mount in sent} >= {mount.rstrip("/") for mount in config["file_mounts"]}
    assert TOKEN not in said + "".join(remote), "the token is copied as a file, and named nowhere"

    run("down", "--yes", "cluster/aws.yaml")
    assert {each["State"]["Name"] for each in instances(aws)} == {"terminated"}


def _first_with(remote: list[str], command: str) -> int:
    """Where a command was given to ssh: by its letters and digits, since it is quoted several times on its way."""
    plain = [re.sub(r"\W", "", call) for call in remote]
    found = [place for place, call in enumerate(plain) if re.sub(r"\W", "", command) in call]
    assert found, f"{command} was not run"
    return found[0]
