"""The files of `cluster/` say what they should, and mistakes in them are found: typos, other types, broken rules, secrets.

Beside the targeted mistakes below, generated ones: each key of each YAML file misspelt, each value of another type, and, in the
launcher files, whose model needs every key, each key removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers.file_mutations import misspelt, of_another_type, removed, replaced
from helpers.kuberay_manifests import MANIFESTS, complaints_about_documents, complaints_about_manifest_text
from helpers.launcher_files import API_CHECKS, MODELS, complaints_about_launcher_config, complaints_about_launcher_text
from helpers.shell_and_docker_files import (
    complaints_about_dockerfile,
    complaints_about_dockerignore,
    complaints_about_slurm_script,
)

from raypar.elastic.placement_constraints import match_labels
from raypar.job.placement_section import PlacementConfig

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
LEAST_MUTATIONS = 10


def text_of(name: str) -> str:
    return (CLUSTER / name).read_text()


# -- launcher files --------------------------------------------------------------------------------------------------------

LAUNCHER_MISTAKES: dict[str, list[tuple[str, str]]] = {
    "every cloud": [
        ("resources: {CPU: 0}", "resources: {CPU: 2}"),
        ("head_node_type: head", "head_node_type: heads"),
        ("max_workers: 8 ", "max_workers: 1 "),
        ("labels: {ray.io/market-type: spot}", "labels: {ray.io/market-type: on-demand}"),
        ("labels: {ray.io/market-type: spot}", "labels: {ray.io/market-type: cheap}"),
        ("min_workers: 0\n    max_workers: 8", "min_workers: 2\n    max_workers: 8"),
        ("priority: 10 ", "priority: -1 "),
        ("idle_timeout_s: 300", "idle_timeout_s: 300000"),
        ("cache_stopped_nodes: false", "cache_stopped_nodes: true"),
        ("/home/ubuntu/.ray/auth_token", "/root/.ray/auth_token"),
        ("export RAY_AUTH_MODE=token RAY_JOB", "export RAY_JOB"),
        ("export RAY_AUTH_MODE=token; RAY_NODE", "RAY_NODE"),
        ("--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0"),
        ("--port=6379", "--port=6380"),
        (" --autoscaling-config=~/ray_bootstrap_config.yaml", ""),
        ("chmod 600 ~/.ray/auth_token", "chmod 644 ~/.ray/auth_token"),
        ("-c constraints.txt", ""),
        ('"$RAY_HEAD_IP:/shared" /shared', "$RAY_HEAD_IP:/shared /shared"),
        ('-o "$(id -u)"', "-o $(id -u)"),
        ("mountpoint -q /shared ||", "mountpoint -q /shared |||"),
        ("cluster_name: raypar", "cluster_name: raypar\ncluster_name: raypar"),
        ("auth:\n", "auth:\n  ssh_private_key: /home/me/.ssh/key.pem\n  password: hunter2hunter2\n"),
        ("  - ray stop\n", "  - ray stop; export RAY_AUTH_TOKEN=0123456789abcdef0123456789abcdef\n"),
    ],
    "aws": [
        ("MarketType: spot", "MarketType: sopt"),
        ("VolumeType: gp3", "VolumeType: gp33"),
        ("InstanceType: m7i.2xlarge", "InstanceType: m7i.2xlargo"),
        ("ImageId: ami-0", "ImageId: ami-x"),
        ("ImageId: ami-00000000000000000\n      InstanceMarket", "ImageId: ami-00000000000000001\n      InstanceMarket"),
        ("us-west-2a,", "us-east-1a,"),
        ("type: aws", "type: aws\n  aws_credentials: {aws_access_key_id: AKIAIOSFODNN7EXAMPLE}"),
        ("HttpTokens: required", "HttpTokens: optional"),
    ],
    "gcp": [
        ("provisioningModel: SPOT", "provisioningModel: STANDARD"),
        ("automaticRestart: false", "automaticRestart: true"),
        ("machineType: n2-standard-8", "machineType: n2-standard-4"),
        ("availability_zone: us-central1-a", "availability_zone: us-east1-b"),
        ("project_id: your-project-id", "project_id: null"),
        ("diskSizeGb: 50", "diskSizeGb: 5"),
        ("onHostMaintenance: TERMINATE", "onHostMaintenance: MIGRATE"),
        ("ubuntu-2404-lts-amd64", "ubuntu-2204-lts"),
    ],
    "azure": [
        ("        priority: Spot\n", ""),
        ("        priority: Spot\n", "        priority: Low\n"),
        ("evictionPolicy: Delete", "evictionPolicy: Deallocate"),
        ("vmSize: Standard_D8s_v5", "vmSize: Standard_D4s_v5"),
        ("availability_zone: auto", "availability_zone: westus2-1"),
        ("maxPrice: -1", "maxPrice: -2"),
        ("imageVersion: latest", "imageVersion: 24.04.1"),
        ("osDiskSize: 50", "osDiskSize: 5"),
    ],
}


@pytest.mark.ci
@pytest.mark.parametrize("cloud", MODELS)
def test_launcher_files_say_what_they_should(cloud: str):
    assert complaints_about_launcher_text(text_of(f"{cloud}.yaml"), cloud) == []


@pytest.mark.ci
@pytest.mark.parametrize("cloud", MODELS)
def test_mistakes_in_launcher_files_are_found(cloud: str):
    text, missed = text_of(f"{cloud}.yaml"), []
    mistakes = LAUNCHER_MISTAKES["every cloud"] + LAUNCHER_MISTAKES[cloud]
    for old, new in mistakes:
        if not complaints_about_launcher_text(replaced(text, old, new), cloud):
            missed.append((old, new))
    assert not missed
    assert len(mistakes) >= LEAST_MUTATIONS


@pytest.mark.parametrize("cloud", MODELS)
def test_every_key_of_a_launcher_file_is_known_needed_and_of_its_type(cloud: str):
    config = yaml.safe_load(text_of(f"{cloud}.yaml"))
    assert complaints_about_launcher_config(config, cloud) == []
    mutants = [*misspelt(config), *removed(config), *of_another_type(config)]
    assert [name for name, mutant in mutants if not complaints_about_launcher_config(mutant, cloud)] == []
    assert len(mutants) >= 200


@pytest.mark.parametrize("cloud", MODELS)
def test_the_clouds_own_descriptions_know_every_key_of_a_node(cloud: str):
    """Apart from our model, which so cannot know what does not exist: each key of each `node_config` misspelt."""
    config = yaml.safe_load(text_of(f"{cloud}.yaml"))
    assert list(API_CHECKS[cloud](config)) == []
    missed, count = [], 0
    for name, kind in config["available_node_types"].items():
        for what, mutant in misspelt(kind["node_config"]):
            if what.startswith("azure_arm_parameters ->"):
                continue
            changed = {"available_node_types": {name: {"node_config": mutant}}}
            count += 1
            if not list(API_CHECKS[cloud](changed)) and "billingProfile.maxPrice" not in what:  # an object to the template
                missed.append(what)
    assert missed == []
    assert count >= LEAST_MUTATIONS


def test_launcher_files_differ_only_in_what_the_clouds_differ():
    """Commands and mounts are the same text, but for the cloud's Python package and its name of a zone."""
    tails = {cloud: text_of(f"{cloud}.yaml").partition("\n# Copied to every node.")[2] for cloud in MODELS}
    plain = {re.sub(r"pip install -q [a-z].*|cloud-init query \S+", "", tail) for tail in tails.values()}
    assert len(plain) == 1
    assert all(tails.values())


# -- labels ----------------------------------------------------------------------------------------------------------------


def labels_of_node_types() -> Iterator[tuple[str, str, dict[str, str]]]:
    """(file, node type, its labels) of every node type of every cluster file."""
    for cloud in MODELS:
        for name, kind in yaml.safe_load(text_of(f"{cloud}.yaml"))["available_node_types"].items():
            yield cloud, name, kind["labels"]
    for manifest in ("raycluster", "rayjob"):
        spec = yaml.safe_load(text_of(f"kuberay/{manifest}.yaml"))["spec"]
        spec = spec.get("rayClusterSpec", spec)
        yield manifest, "head", spec["headGroupSpec"]["labels"]
        for group in spec["workerGroupSpecs"]:
            yield manifest, group["groupName"], group["labels"]


def test_a_job_that_asks_for_on_demand_workers_and_says_no_labels_gets_the_on_demand_nodes_of_every_file():
    selector = PlacementConfig(on_demand=1).to_constraints().selector(on_demand=True)
    chosen = {(file, name): match_labels(labels, selector) for file, name, labels in labels_of_node_types()}
    assert {file for file, _ in chosen} == {*MODELS, "raycluster", "rayjob"}
    assert chosen == {(file, name): name in ("head", "ondemand") for file, name in chosen}


# -- KubeRay ---------------------------------------------------------------------------------------------------------------

INTEGERS_ALLOWED = (".cpu = 7", ".memory = 7", ".storage = 7", ".port = 7")
"""Kubernetes takes integers for amounts and ports."""

RAY_MISTAKES = [
    ("kind: Ray", "kind: Ry"),
    ("ray.io/v1", "ray.io/v1alpha1"),
    ("name: raypar", "name: Raypar"),
    ("name: raypar", "name: raypar-with-a-name-that-is-much-longer-than-kuberay-can-take"),
    ('rayVersion: "2.60.0"', 'rayVersion: "2.50.0"'),
    ('rayVersion: "2.60.0"', "rayVersion: 2.60"),
    ("version: v2", "version: v1"),
    ("version: v2", "version: v3"),
    ("enableInTreeAutoscaling: true", "enableInTreeAutoscaling: false"),
    ("mode: token", "mode: disabled"),
    ("mode: token", "mode: token\n      enableK8sTokenAuth: true"),
    ('num-cpus: "0"', "num-cpus: 0"),
    ('num-cpus: "0"', 'num-cpus: "2"'),
    ('num-cpus: "0"', 'num-cpu: "0"'),
    ('num-cpus: "0"', 'num-cpus: "0"\n      labels: market=spot'),
    ("restartPolicy: Never", "restartPolicy: Always"),
    ("groupName: ondemand", "groupName: spot"),
    ("groupName: ondemand", "groupName: On_Demand"),
    ("minReplicas: 0", "minReplicas: 9"),
    ("minReplicas: 0", "minReplicas: -1"),
    ("replicas: 0", "replicas: 99"),
    ("maxReplicas: 8", "maxReplicas: 0"),
    ("idleTimeoutSeconds: 120", "idleTimeoutSeconds: -5"),
    ("        idleTimeoutSeconds: 120\n", ""),
    ("labels: {ray.io/market-type: spot}", "labels: {ray.io/market-type: on-demand}"),
    ("labels: {ray.io/market-type: spot}", "labels: {ray.io/market-type: spot!}"),
    ("priority: 10 ", "priority: -1 "),
    ('gke-spot: "true"}', 'gke-spot: "false"}'),
    ("containerPort: 8265", "containerPort: 8266"),
    ("{name: client, containerPort: 10001}", "{name: client, containerPort: 10001, port: 10001}"),
    ("redisAddress: redis://raypar-redis:6379", "redisAddress: redis://elsewhere:6379"),
    ("secretKeyRef: {name: raypar-redis, key: password}", "secretKeyRef: {name: raypar-redis, key: passwort}"),
    ("redisPassword:", "redisPassword:\n        value: correct-horse-battery\n      redisUsername:"),
    ("env:\n", "env:\n                - {name: RAY_REDIS_ADDRESS, value: redis}\n"),
    ("env:\n", 'env:\n                - {name: RAY_enable_autoscaler_v2, value: "1"}\n'),
    ("runAsNonRoot: true", "runAsNonRoot: false"),
    ("allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true"),
    ("drop: [ALL]", "drop: []"),
    ("raypar:2.60.0-cpu", "raypar:latest"),
    ("raypar:2.60.0-cpu", "raypar"),
    ("mountPath: /shared", "mountPath: /share"),
    ("claimName: raypar-runs", "claimName: runs"),
    ('limits: {cpu: "8", memory: 24Gi}', 'limits: {cpu: "16", memory: 24Gi}'),
    ('requests: {cpu: "8", memory: 24Gi}', 'requests: {cpu: "8", memory: 24 GB}'),
    ("terminationGracePeriodSeconds: 60", "terminationGracePeriodSeconds: 0"),
]
MANIFEST_MISTAKES: dict[str, list[tuple[str, str]]] = {
    "raycluster": RAY_MISTAKES,
    "rayjob": [
        *RAY_MISTAKES,
        ("shutdownAfterJobFinishes: true", "shutdownAfterJobFinishes: false"),
        ("submissionMode: K8sJobMode", "submissionMode: K8SJobMode"),
        ("submissionMode: K8sJobMode", "submissionMode: InteractiveMode"),
        ("backoffLimit: 3", "backoffLimit: -3"),
        ("backoffLimit: 3", "backoffLimit: 3\n  clusterSelector: {ray.io/cluster: raypar}"),
        ("backoffLimit: 3", "backoffLimit: 3\n  deletionStrategy: {onFailure: {policy: DeleteNone}}"),
        ("run_dir=/shared/runs", "run_dir=runs"),
        ("ttlSecondsAfterFinished: 120", "ttlSecondsAfterFinished: -1"),
        ("preRunningDeadlineSeconds: 3600", "preRunningDeadlineSeconds: 0"),
        ("preRunningDeadlineSeconds: 3600", "activeDeadlineSeconds: 0"),
    ],
    "redis": [
        ("apps/v1", "v1"),
        ("kind: StatefulSet", "kind: Deployment"),
        ("selector: {app: raypar-redis}", "selector: {app: redis}"),
        ("labels: {app: raypar-redis}", "labels: {app: redis}"),
        ("serviceName: raypar-redis", "serviceName: redis"),
        ("{name: redis, port: 6379}", "{name: redis, port: 6380}"),
        ("replicas: 1", "replicas: 3"),
        (", --requirepass, $(REDIS_PASSWORD)", ""),
        ("$(REDIS_PASSWORD)", "hunter2"),
        ("secretKeyRef: {name: raypar-redis, key: password}", "secretKeyRef: {name: raypar, key: password}"),
        ("valueFrom:", "value: hunter2\n              valueFrom:"),
        ("redis:7.4-bookworm", "redis:latest"),
        ("runAsNonRoot: true", "runAsNonRoot: false"),
        ("mountPath: /data", "mountPath: /var"),
        ("name: data\n", "name: date\n"),
        ("storage: 2Gi", "storage: two"),
        ("kind: Service", "password: hunter2hunter2\nkind: Service"),
    ],
    "shared_runs": [
        ("ReadWriteMany", "ReadWriteOnce"),
        ("ReadWriteMany", "ReadWriteAll"),
        ("name: raypar-runs", "name: runs"),
        ("storage: 1Ti", "storage: 1 TB"),
        ("storage: 1Ti", "disk: 1Ti"),
        ("storageClassName: standard-rwx ", "storageClass: standard-rwx "),
        ("  storageClassName: standard-rwx ", "  #"),
        ("kind: PersistentVolumeClaim", "kind: PersistentVolume"),
        ("apiVersion: v1", "apiVersion: v2"),
        ("  resources:", "  resource:"),
        ("spec:", "spec:\nspec:"),
        ("accessModes: [ReadWriteMany]", "accessModes: ReadWriteMany"),
    ],
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_say_what_they_should(name: str):
    assert complaints_about_manifest_text(text_of(f"kuberay/{name}.yaml"), name) == []


@pytest.mark.ci
@pytest.mark.parametrize("name", MANIFESTS)
def test_mistakes_in_manifests_are_found(name: str):
    text, missed = text_of(f"kuberay/{name}.yaml"), []
    for old, new in MANIFEST_MISTAKES[name]:
        if old not in text:  # the same line, indented otherwise in the other manifest
            old, new = (re.sub(r"(?m)^  ", "", part) for part in (old, new))
        if not complaints_about_manifest_text(replaced(text, old, new), name):
            missed.append((old, new))
    assert not missed
    assert len(MANIFEST_MISTAKES[name]) >= LEAST_MUTATIONS


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_key_of_a_manifest_is_known_and_of_its_type(name: str):
    documents = list(yaml.safe_load_all(text_of(f"kuberay/{name}.yaml")))
    assert complaints_about_documents(documents, name) == []
    mutants = [*misspelt(documents), *of_another_type(documents)]
    missed = [what for what, mutant in mutants if not complaints_about_documents(mutant, name)]
    assert [what for what in missed if not what.endswith(INTEGERS_ALLOWED)] == []
    assert len(mutants) >= 2 * LEAST_MUTATIONS


def test_rays_autoscaler_reads_the_cluster_as_it_is_meant():
    """By the code that turns a RayCluster into node types inside the head's pod."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    cluster = yaml.safe_load(text_of("kuberay/raycluster.yaml"))
    cluster["metadata"]["namespace"] = "default"
    config = _derive_autoscaling_config_from_ray_cr(cluster)
    gigabyte = 2**30
    assert config["idle_timeout_minutes"] == 5
    assert config["available_node_types"] == {
        "headgroup": {
            "min_workers": 0,
            "max_workers": 0,
            "node_config": {},
            "resources": {"CPU": 0, "memory": 8 * gigabyte},
            "labels": {"ray.io/market-type": "on-demand"},
        },
        "spot": {
            "min_workers": 0,
            "max_workers": 8,
            "node_config": {},
            "resources": {"CPU": 8, "memory": 24 * gigabyte},
            "labels": {"ray.io/market-type": "spot"},
            "idle_timeout_s": 300.0,
            "priority": 10,
        },
        "ondemand": {
            "min_workers": 0,
            "max_workers": 2,
            "node_config": {},
            "resources": {"CPU": 8, "memory": 24 * gigabyte},
            "labels": {"ray.io/market-type": "on-demand"},
            "idle_timeout_s": 120.0,
            "priority": 0,
        },
    }


def test_the_job_has_the_cluster_of_the_cluster_file():
    """Who has got one running changes nothing for the other."""
    cluster = yaml.safe_load(text_of("kuberay/raycluster.yaml"))
    job = yaml.safe_load(text_of("kuberay/rayjob.yaml"))
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]


# -- Slurm and Docker ------------------------------------------------------------------------------------------------------

SLURM_MISTAKES = [
    ("set -euo pipefail", "set -eu"),
    ("#SBATCH --no-kill", "#SBATCH --nokill"),
    ("#SBATCH --requeue", "#SBATCH --no-requeue"),
    ("--signal=B:TERM@180", "--signal=TERM@180"),
    ("umask 077", "umask 022"),
    ("RAY_AUTH_MODE=token", "RAY_AUTH_MODE=disabled"),
    ('kill -TERM "$trainer"', 'kill -INT "$trainer"'),
    ("trap end_cluster EXIT", ""),
    ("trap stop_trainer TERM", ""),
    ("--kill-on-bad-exit=0", "--kill-on-bad-exit=1"),
    ('--resume --address "$address"', '--address "$address"'),
    ('train "$job_file"', "train $job_file"),
    ('rm -rf "$state"', "rm -rf $state"),
    ('wait "$trainer" || status="$?"', 'wait "$trainer" || staus="$?"'),
    ("if ((nodes > 1)); then", "if [ $nodes > 1 ]; then"),
    ('exit "$status"', "exit 0"),
    ("    sleep 1\ndone", "    sleep 1\n"),
    ("#SBATCH --ntasks-per-node=1", "#SBATCH --ntasks-per-node=8"),
    ("/dev/urandom", "/etc/hostname"),
    ("steps=()", "steps=()\nRAY_AUTH_TOKEN=0123456789abcdef0123456789abcdef"),
]
DOCKER_MISTAKES = [
    ("USER 1000:1000\n", ""),
    ("USER 1000:1000", "USER root"),
    ("USER 1000:1000", "USER ray"),
    ("-c constraints.txt ", ""),
    ("--no-cache-dir ", ""),
    ("--no-install-recommends ", ""),
    ("install -y ", "install "),
    ("rm -rf /var/lib/apt/lists/*", "true"),
    ("# hadolint ignore=DL3008\n", ""),
    ("COPY raypar raypar", "ADD raypar raypar"),
    ("COPY raypar raypar", "COPY . ."),
    ("README.md ", ""),
    ("WORKDIR /opt/raypar", "WORKDIR opt/raypar"),
    ("WORKDIR /opt/raypar", "RUN cd /opt/raypar"),
    ("wget \\\n", "curl \\\n"),
    ("--uid 1000", "--uid 1001"),
    ("ENV PYTHONPATH=/home/ray/app", "ENV PYTHONPATH=/app"),
    ("FROM ", "FRON "),
    ('CMD ["raypar", "train", "jobs/quickstart.yaml"]', "CMD raypar train jobs/quickstart.yaml"),
    ("USER 1000:1000", "ENV API_TOKEN=abcdef123456\nUSER 1000:1000"),
]
IGNORE_MISTAKES = [
    ("*\n", ""),
    ("!raypar\n", ""),
    ("!README.md\n", ""),
    ("!examples\n", "!examples\n!runs\n"),
    ("**/__pycache__", ""),
]
DOCKERFILES = {
    "Dockerfile.cpu": [("python:3.12-slim-bookworm", "python:latest"), ("python:3.12-slim-bookworm", "python")],
    "Dockerfile.cuda": [("nvidia/cuda:13.0.1-runtime-ubuntu24.04", "nvidia/cuda:latest"), ("userdel", "sudo userdel")],
}


def test_the_slurm_script_says_what_it_should():
    assert complaints_about_slurm_script(text_of("slurm.sh")) == []
    assert (CLUSTER / "slurm.sh").stat().st_mode & 0o111


@pytest.mark.ci
def test_mistakes_in_the_slurm_script_are_found():
    text = text_of("slurm.sh")
    missed = [each for each in SLURM_MISTAKES if not complaints_about_slurm_script(replaced(text, *each))]
    assert not missed
    assert len(SLURM_MISTAKES) >= LEAST_MUTATIONS


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_say_what_they_should(name: str):
    assert complaints_about_dockerfile(text_of(name)) == []
    assert complaints_about_dockerignore(text_of(f"{name}.dockerignore")) == []


@pytest.mark.ci
@pytest.mark.parametrize("name", DOCKERFILES)
def test_mistakes_in_dockerfiles_are_found(name: str):
    text, mistakes = text_of(name), DOCKER_MISTAKES + DOCKERFILES[name]
    missed = [each for each in mistakes if not complaints_about_dockerfile(replaced(text, *each))]
    ignore = text_of(f"{name}.dockerignore")
    missed += [each for each in IGNORE_MISTAKES if not complaints_about_dockerignore(replaced(ignore, *each))]
    assert not missed
    assert len(mistakes) >= LEAST_MUTATIONS


def test_cuda_versions_of_the_image_and_of_cupy_are_one():
    assert re.search(r"^FROM nvidia/cuda:13\.", text_of("Dockerfile.cuda"), re.MULTILINE)
    assert '".[jobs,cuda13]"' in text_of("Dockerfile.cuda")


def test_versions_in_names_and_texts_are_those_of_the_constraints():
    ray = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    texts = {path: path.read_text() for path in CLUSTER.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    found = {(path.name, version) for path, text in texts.items() for version in re.findall(r"\b2\.\d\d\.\d\b", text)}
    assert {version for _, version in found} == {ray}


def test_no_file_of_the_folder_has_a_secret():
    from helpers.script_checks import secrets_in

    texts = {path: path.read_text() for path in CLUSTER.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".py")}
    assert {path.name: found for path, text in texts.items() if (found := secrets_in(text))} == {}
    assert len(texts) >= 12
