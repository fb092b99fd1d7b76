"""Checks Ray cluster-launcher files (`cluster/aws.yaml`, `gcp.yaml`, `azure.yaml`): Ray's own schema, and what it leaves open.

Ray's schema takes any key in `provider` and `node_config`, so a misspelt spot option is found on the bill. Here every key must
be known and of its type, and the rules of `cluster/README.md` must hold.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
from helpers.script_checks import secrets_in, shellcheck
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raypar.errors import ConfigError
from raypar.files.safe_yaml import parse_yaml

ROOT = Path(__file__).parents[2]
SOURCE = "/home/ubuntu/raypar-source"
NEEDED_TO_INSTALL = ("raypar", "pyproject.toml", "constraints.txt", "README.md")
HEAD_PORT = 6379
SHELLCHECK_EXCLUDED = ("SC2016", "SC2088", "SC2164")
"""A line for ~/.bashrc keeps its `$HOME`; Ray expands `~` in its options; a `cd` that fails ends a command by its `&&`."""


class Strict(BaseModel):
    """Every key is known, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Labels(Strict):
    """Labels of a node type that jobs may select."""

    market: Literal["spot", "on-demand"] = Field(alias="ray.io/market-type")
    """Ray's own label for it, which `placement.on_demand` of a job asks for."""


class Ebs(Strict):
    VolumeSize: int = Field(ge=30, le=16384)
    VolumeType: Literal["gp3", "gp2", "io2", "io1", "st1"]
    DeleteOnTermination: Literal[True]


class BlockDevice(Strict):
    DeviceName: str = Field(pattern=r"^/dev/(sd|xvd)[a-z]\d?$")
    Ebs: Ebs


class SpotOptions(Strict):
    SpotInstanceType: Literal["one-time"]
    InstanceInterruptionBehavior: Literal["terminate"]
    MaxPrice: str | None = None


class MarketOptions(Strict):
    MarketType: Literal["spot"]
    SpotOptions: SpotOptions


class MetadataOptions(Strict):
    HttpTokens: Literal["required"]


class AwsNode(Strict):
    """Arguments of EC2's RunInstances."""

    InstanceType: str = Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")
    ImageId: str = Field(pattern=r"^ami-[0-9a-f]{17}$")
    BlockDeviceMappings: list[BlockDevice] = Field(min_length=1)
    MetadataOptions: MetadataOptions
    InstanceMarketOptions: MarketOptions | None = None

    @property
    def is_spot(self) -> bool:
        return self.InstanceMarketOptions is not None

    @property
    def image(self) -> str:
        return self.ImageId

    @property
    def cpus(self) -> None:
        """Ray asks AWS."""


class InitializeParams(Strict):
    diskSizeGb: int = Field(ge=30, le=65536)
    sourceImage: str = Field(pattern=r"^projects/[a-z0-9-]+/global/images/(family/)?[a-z0-9-]+$")


class Disk(Strict):
    boot: Literal[True]
    autoDelete: Literal[True]
    type: Literal["PERSISTENT"]
    initializeParams: InitializeParams


class Scheduling(Strict):
    provisioningModel: Literal["SPOT"]
    instanceTerminationAction: Literal["DELETE"]
    onHostMaintenance: Literal["TERMINATE"]
    automaticRestart: Literal[False]


class GcpNode(Strict):
    """The body of Compute Engine's `instances.insert`."""

    machineType: str = Field(pattern=r"^[a-z0-9]+-[a-z]+-\d+$")
    disks: list[Disk] = Field(min_length=1)
    scheduling: Scheduling | None = None

    @property
    def is_spot(self) -> bool:
        return self.scheduling is not None

    @property
    def image(self) -> str:
        return self.disks[0].initializeParams.sourceImage

    @property
    def cpus(self) -> int:
        return int(self.machineType.rpartition("-")[2])


class BillingProfile(Strict):
    maxPrice: int | float = Field(ge=-1)


class ArmParameters(Strict):
    """Parameters of the template by which Ray makes a VM (`ray/autoscaler/_private/_azure/azure-vm-template.json`)."""

    vmSize: str = Field(pattern=r"^Standard_[A-Z]+\d+[a-z]*(_v\d)?$")
    imagePublisher: str
    imageOffer: str
    imageSku: str
    imageVersion: str
    osDiskSize: int = Field(ge=30, le=4095)
    availability_zone: str | None = None
    priority: Literal["Spot"] | None = None
    evictionPolicy: Literal["Delete"] | None = None
    billingProfile: BillingProfile | None = None


class AzureNode(Strict):
    azure_arm_parameters: ArmParameters

    @property
    def is_spot(self) -> bool:
        arm = self.azure_arm_parameters
        return None not in (arm.priority, arm.evictionPolicy, arm.billingProfile)

    @property
    def image(self) -> str:
        arm = self.azure_arm_parameters
        return f"{arm.imagePublisher}:{arm.imageOffer}:{arm.imageSku}:{arm.imageVersion}"

    @property
    def cpus(self) -> int:
        return int(re.findall(r"\d+", self.azure_arm_parameters.vmSize)[0])


class AwsProvider(Strict):
    type: Literal["aws"]
    region: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")
    availability_zone: str
    cache_stopped_nodes: Literal[False]


class GcpProvider(Strict):
    type: Literal["gcp"]
    region: str = Field(pattern=r"^[a-z]+-[a-z]+\d+$")
    availability_zone: str
    project_id: str = Field(pattern=r"^[a-z][a-z0-9-]{4,28}[a-z0-9]$")
    cache_stopped_nodes: Literal[False]


class AzureProvider(Strict):
    type: Literal["azure"]
    location: str = Field(pattern=r"^[a-z0-9]+$")
    resource_group: str
    availability_zone: str
    cache_stopped_nodes: Literal[False]


class Auth(Strict):
    ssh_user: Literal["ubuntu"]


class NodeType(Strict):
    """What is common to the node types of all clouds."""

    min_workers: Literal[0]  # else the cluster costs more than its head while nobody uses it
    max_workers: int = Field(ge=0)
    priority: int | None = None
    idle_timeout_s: int | None = Field(None, ge=30, le=3600)
    resources: dict[Literal["CPU", "GPU", "memory"], int]
    labels: Labels
    node_config: Any


class AwsType(NodeType):
    node_config: AwsNode


class GcpType(NodeType):
    node_config: GcpNode


class AzureType(NodeType):
    node_config: AzureNode


class LauncherFile(Strict):
    """What is common to the files of all clouds; every key of Ray's that matters must be there."""

    cluster_name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")
    max_workers: int = Field(ge=1)
    upscaling_speed: int | float = Field(ge=1)
    idle_timeout_minutes: int | float = Field(gt=0, le=60)
    auth: Auth
    head_node_type: str
    file_mounts: dict[str, str]
    cluster_synced_files: list[str]
    file_mounts_sync_continuously: Literal[False]
    rsync_exclude: list[str]
    rsync_filter: list[str]
    initialization_commands: list[str]
    setup_commands: list[str]
    head_setup_commands: list[str]
    worker_setup_commands: list[str]
    head_start_ray_commands: list[str]
    worker_start_ray_commands: list[str]
    provider: Any
    available_node_types: dict[str, Any]


class AwsFile(LauncherFile):
    provider: AwsProvider
    available_node_types: dict[str, AwsType]


class GcpFile(LauncherFile):
    provider: GcpProvider
    available_node_types: dict[str, GcpType]


class AzureFile(LauncherFile):
    provider: AzureProvider
    available_node_types: dict[str, AzureType]


MODELS: dict[str, type[LauncherFile]] = {"aws": AwsFile, "gcp": GcpFile, "azure": AzureFile}


def complaints_about_launcher_text(text: str, cloud: str) -> list[str]:
    """What is wrong with the text of a launcher file; empty if nothing is."""
    try:
        config = parse_yaml(text, f"{cloud}.yaml")
    except ConfigError as error:
        return [f"yaml: {error.what}"]
    return secrets_in(text) + complaints_about_launcher_config(config, cloud)


def complaints_about_launcher_config(config: Any, cloud: str) -> list[str]:
    """The first thing that is wrong with the parsed file; empty if nothing is."""
    return next(([found] for check in _checks(config, cloud) for found in check), [])


def _checks(config: Any, cloud: str) -> Iterator[Iterator[str]]:
    yield _model_complaints(config, cloud)
    file = MODELS[cloud].model_validate(config)
    yield rule_complaints(file)
    yield ray_schema_complaints(config)
    yield API_CHECKS[cloud](config)
    yield _shell_complaints(file)


def ray_schema_complaints(config: Any) -> Iterator[str]:
    """Ray's own check, as `ray up` makes it: defaults filled in, then the schema."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    if not isinstance(config, dict) or not isinstance(config.get("provider"), dict):
        yield "ray: no mapping with a provider"
        return
    try:
        jsonschema.validate(config, _ray_schema())
        validate_config(prepare_config(copy.deepcopy(config)))
    except jsonschema.ValidationError as error:
        yield f"ray: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"
    except Exception as error:  # Ray raises what it happens to stumble over: KeyError, AttributeError, ...
        yield f"ray: {type(error).__name__}: {str(error)[:200]}"


@functools.cache
def _ray_schema() -> dict[str, Any]:
    import ray.autoscaler

    return dict(json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text()))


def _model_complaints(config: Any, cloud: str) -> Iterator[str]:
    try:
        MODELS[cloud].model_validate(config)
    except ValidationError as error:
        yield from (f"model: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())


def rule_complaints(file: LauncherFile) -> Iterator[str]:
    """Rules between several values, and what the commands must say."""
    yield from _node_type_complaints(file)
    if file.head_node_type in file.available_node_types:
        yield from _place_complaints(file)
    yield from _mount_complaints(file)
    yield from _command_complaints(file)


def _node_type_complaints(file: LauncherFile) -> Iterator[str]:
    types = file.available_node_types
    head = types.get(file.head_node_type)
    if head is None:
        yield f"rule: head_node_type {file.head_node_type!r} is no node type"
        return
    if head.max_workers or head.resources.get("CPU") != 0 or head.labels.market != "on-demand":
        yield "rule: the head is on demand, has max_workers: 0 and resources: {CPU: 0}"
    workers = {name: kind for name, kind in types.items() if kind is not head}
    if {kind.labels.market for kind in workers.values()} != {"spot", "on-demand"}:
        yield "rule: there are workers on spot and on demand"
    for name, kind in types.items():
        begin = "head" if kind is head else kind.labels.market.replace("-", "")
        if not name.startswith(begin):
            yield f"rule: the name {name} begins with {begin}: `ray status` shows names, not labels"
        if (kind.labels.market == "spot") != kind.node_config.is_spot:
            yield f"rule: {name} is labelled {kind.labels.market}, which its node_config is not"
        if kind.max_workers > file.max_workers:
            yield f"rule: {name} may have {kind.max_workers} nodes, all types together {file.max_workers}"
        if kind is not head and (not kind.max_workers or kind.idle_timeout_s is None or kind.priority is None):
            yield f"rule: {name} needs max_workers, priority and idle_timeout_s"
        if kind is not head and kind.resources.get("CPU") != kind.node_config.cpus:
            yield f"rule: {name} has {kind.node_config.cpus} CPUs, not {kind.resources.get('CPU')} (AWS: say nothing)"
    preferred = max(workers.values(), key=lambda kind: kind.priority or 0, default=head)
    if preferred.labels.market != "spot":
        yield "rule: spot has the highest priority"
    if len({kind.node_config.image for kind in types.values()}) != 1:
        yield "rule: all nodes have one image"


def _place_complaints(file: LauncherFile) -> Iterator[str]:
    provider = file.provider
    region = getattr(provider, "region", None)
    if region is None:
        head = file.available_node_types[file.head_node_type].node_config.azure_arm_parameters
        if head.availability_zone != "none":
            yield "rule: Azure chooses the head's zone (`availability_zone: none`, as in Ray's own file)"
        if not re.fullmatch(r"auto|none|\d(,\d)*", provider.availability_zone):
            yield f"rule: {provider.availability_zone!r} names no zones of Azure"
        return
    pattern = rf"{region}[a-z]" if provider.type == "aws" else rf"{region}-[a-z]"
    for zone in provider.availability_zone.split(","):
        if not re.fullmatch(pattern, zone):
            yield f"rule: zone {zone!r} is not in region {region}"


def _mount_complaints(file: LauncherFile) -> Iterator[str]:
    wanted = {"/home/ubuntu/.ray/auth_token": "~/.ray/auth_token"} | {f"{SOURCE}/{name}": name for name in NEEDED_TO_INSTALL}
    if file.file_mounts != wanted:
        yield f"rule: file_mounts must be the token and what pip needs: {wanted}"
    yield from (f"rule: {name} is not in the repository" for name in NEEDED_TO_INSTALL if not (ROOT / name).exists())


def _command_complaints(file: LauncherFile) -> Iterator[str]:
    head, worker = " ; ".join(file.head_start_ray_commands), " ; ".join(file.worker_start_ray_commands)
    setup = " ; ".join(file.setup_commands)
    needed = [
        (head, rf"ray start --head --port={HEAD_PORT}\b", "the head listens on the port that workers use"),
        (head, r"--autoscaling-config=~/ray_bootstrap_config.yaml", "the head starts the autoscaler"),
        (head, r"--dashboard-host=127\.0\.0\.1(\s|$)", "the dashboard is not open to the network"),
        (head, r"export RAY_AUTH_MODE=token\b.*ray start", "the head asks for the token"),
        (head, r"RAY_JOB_STOP_WAIT_TIME_S=[1-9]\d+", "a stopped job has time to save"),
        (worker, rf'ray start --address="\$RAY_HEAD_IP:{HEAD_PORT}"', "workers join the head"),
        (worker, r"export RAY_AUTH_MODE=token\b.*ray start", "workers ask for the token"),
        (worker, r"RAY_NODE_ZONE=", "workers say their zone"),
        (setup, r"chmod 600 ~/\.ray/auth_token", "only the user may read the token"),
        (setup, r"-c constraints\.txt -e '\.\[jobs\]'", "the versions are those of constraints.txt"),
        (setup, r"RAY_AUTH_MODE=token' >> ~/\.bashrc", "Ray's commands on a node use the token"),
        (" ; ".join(file.head_setup_commands), r"exportfs -ra", "the head exports /shared"),
        (" ; ".join(file.worker_setup_commands), r'"\$RAY_HEAD_IP:/shared" /shared', "workers mount the head's /shared"),
    ]
    yield from (f"rule: {why} ({pattern})" for text, pattern, why in needed if not re.search(pattern, text))
    for text in (head, worker):
        if not text.startswith("ray stop ; ") or "ulimit -n 65536;" not in text:
            yield "rule: Ray is started anew, with enough file descriptors"
    if "RAY_HEAD_IP" in head + setup + " ".join(file.head_setup_commands):
        yield "rule: the head has no RAY_HEAD_IP"


def ec2_complaints(config: dict[str, Any]) -> Iterator[str]:
    """What EC2's own description of RunInstances, in botocore, does not know."""
    import botocore.session
    from botocore.validate import ParamValidator

    shape = _run_instances_shape(botocore.session)
    for name, kind in config["available_node_types"].items():
        arguments = {**kind["node_config"], "MinCount": 1, "MaxCount": 1}
        report = ParamValidator().validate(arguments, shape)
        if report.has_errors():
            yield f"ec2: {name}: {report.generate_report()}"
        else:
            yield from (f"ec2: {name}: {found}" for found in _values_not_in_enum(arguments, shape))


@functools.cache
def _run_instances_shape(session: Any) -> Any:
    return session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape


def _values_not_in_enum(value: Any, shape: Any) -> Iterator[str]:
    if shape.type_name == "structure":
        for key, inner in value.items():
            yield from _values_not_in_enum(inner, shape.members[key])
    elif shape.type_name == "list":
        for inner in value:
            yield from _values_not_in_enum(inner, shape.member)
    elif getattr(shape, "enum", None) and value not in shape.enum:
        yield f"{value!r} is no {shape.name}"


def compute_engine_complaints(config: dict[str, Any]) -> Iterator[str]:
    """What Google's own description of an Instance does not know."""
    schema = json.loads((ROOT / "tests/data/compute_v1_instance.json").read_text())
    validator = jsonschema.Draft202012Validator({"$ref": "#/definitions/Instance", **schema})
    for name, kind in config["available_node_types"].items():
        for error in validator.iter_errors(kind["node_config"]):
            yield f"gcp: {name}: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"


def arm_template_complaints(config: dict[str, Any]) -> Iterator[str]:
    """What the template by which Ray makes VMs on Azure does not take. The zone is no parameter of it: Ray reads it itself."""
    import ray.autoscaler

    template = Path(ray.autoscaler.__file__).parent / "_private/_azure/azure-vm-template.json"
    kinds: dict[str, tuple[type, ...]] = {"string": (str,), "int": (int,), "object": (dict,), "bool": (bool,), "array": (list,)}
    taken = {name: kinds.get(each["type"], ()) for name, each in json.loads(template.read_text())["parameters"].items()}
    for name, kind in config["available_node_types"].items():
        for key, value in kind["node_config"]["azure_arm_parameters"].items():
            if key != "availability_zone" and not isinstance(value, taken.get(key, ())):
                yield f"azure: {name}: {key}: {value!r}"


API_CHECKS = {"aws": ec2_complaints, "gcp": compute_engine_complaints, "azure": arm_template_complaints}
"""By the clouds' own descriptions: they keep our models from knowing what does not exist."""


def _shell_complaints(file: LauncherFile) -> Iterator[str]:
    lists = (file.initialization_commands, file.setup_commands, file.head_setup_commands, file.worker_setup_commands)
    for command in [c for commands in (*lists, file.head_start_ray_commands, file.worker_start_ray_commands) for c in commands]:
        yield from shellcheck(f"#!/bin/bash\n{command}\n", exclude=SHELLCHECK_EXCLUDED)
