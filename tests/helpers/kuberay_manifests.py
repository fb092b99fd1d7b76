"""Checks the manifests of `cluster/kuberay/`: schemas in which every key is known, the operator's rules, and ours.

The operator's rules are those of KubeRay 1.7's `controllers/ray/utils/validation.go`, which the CRD's schema does not have: the
API server takes a manifest that breaks one, and the operator then only writes an event.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from helpers.script_checks import secrets_in

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
MARKET = "ray.io/market-type"
"""Ray's own label of spot and on-demand nodes, which `placement.on_demand` of a job asks for."""
MANIFESTS = ("raycluster", "rayjob", "redis", "shared_runs")
RAY_VERSION = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
DNS_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
QUANTITY = r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?"
SPOT_SELECTORS = (
    {"cloud.google.com/gke-spot": "true"},
    {"eks.amazonaws.com/capacityType": "SPOT"},
    {"kubernetes.azure.com/scalesetpriority": "spot"},
    {"karpenter.sh/capacity-type": "spot"},
)
START_PARAMS = {
    "num-cpus",
    "num-gpus",
    "memory",
    "object-store-memory",
    "dashboard-host",
    "block",
    "metrics-export-port",
    "port",
}
STRINGS = {
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "serviceType": {"ClusterIP", "NodePort", "LoadBalancer"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "operator": {"Equal", "Exists"},
    "submissionMode": {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"},
    "type": {"RuntimeDefault", "Localhost", "ClusterIP"},
}
"""Strings that the API server compares with a list that no schema has."""


def complaints_about_manifest_text(text: str, name: str) -> list[str]:
    """What is wrong with the text of a manifest; empty if nothing is."""
    try:
        documents = list(yaml.load_all(text, Loader=_UniqueKeys))
    except yaml.YAMLError as error:
        return [f"yaml: {error}"]
    return secrets_in(text) + complaints_about_documents(documents, name)


def complaints_about_documents(documents: list[Any], name: str) -> list[str]:
    """The first thing that is wrong with the parsed documents; empty if nothing is."""
    try:
        return next(([found] for check in _checks(documents, name) for found in check), [])
    except KeyError as missing:  # a key that the schema does not ask for, and a rule does
        return [f"rule: no {missing}"]


class _UniqueKeys(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, in C where it was built so, takes a key given twice, as `kubectl` does not."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.YAMLError(f"a key is given twice{node.start_mark}")
        return super().construct_mapping(node, deep)


def _checks(documents: list[Any], name: str) -> Iterator[Iterator[str]]:
    kinds = {"raycluster": ["RayCluster"], "rayjob": ["RayJob"], "redis": ["Service", "StatefulSet"]}
    yield _kind_complaints(documents, kinds.get(name, ["PersistentVolumeClaim"]))
    for document in documents:
        yield schema_complaints(document)
        yield _string_complaints(document)
        yield _name_complaints(document)
    for document in documents:
        if document["kind"] == "RayJob":
            yield rayjob_complaints(document)
            yield raycluster_complaints(document["spec"]["rayClusterSpec"])
            yield our_cluster_complaints(document["spec"]["rayClusterSpec"])
        elif document["kind"] == "RayCluster":
            yield raycluster_complaints(document["spec"])
            yield our_cluster_complaints(document["spec"])
    if name == "redis":
        yield redis_complaints(*documents)
    elif name == "shared_runs":
        yield shared_runs_complaints(documents[0])


def _kind_complaints(documents: list[Any], wanted: list[str]) -> Iterator[str]:
    kinds = [document.get("kind") if isinstance(document, dict) else None for document in documents]
    if kinds != wanted:
        yield f"kind: {kinds} instead of {wanted}"


# -- schemas ---------------------------------------------------------------------------------------------------------------


def schema_complaints(document: dict[str, Any]) -> Iterator[str]:
    """Unknown or missing keys and wrong types, by the CRDs and by Kubernetes' own schemas."""
    for error in _validator(document["kind"]).iter_errors(document):
        yield f"schema: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"
    if not isinstance(document.get("metadata"), dict) or set(document["metadata"]) != {"name"}:
        yield "schema: metadata must be {name: ...}"


@functools.cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    definitions = json.loads((DATA / "kubernetes_1.34_schemas.json").read_text())["definitions"]
    job = _strict(json.loads((DATA / "kuberay_1.7.0_rayjob_v1.json").read_text()))
    job["properties"]["spec"]["required"] = ["entrypoint", "rayClusterSpec"]
    spec = {"RayJob": job["properties"]["spec"], "RayCluster": job["properties"]["spec"]["properties"]["rayClusterSpec"]}
    if kind in spec:
        body: dict[str, Any] = {
            **job,
            "properties": {**job["properties"], "spec": spec[kind], "apiVersion": {"const": "ray.io/v1"}},
        }
    else:
        group = "apps" if kind == "StatefulSet" else "core"
        version = {"const": "v1" if group == "core" else f"{group}/v1"}
        body = {"allOf": [{"$ref": f"#/definitions/{group}.v1.{kind}"}, {"properties": {"apiVersion": version}}]}
    needed = ["apiVersion", "kind", "metadata", "spec"]
    return jsonschema.Draft202012Validator({**body, "required": needed, "definitions": definitions})


def _strict(schema: Any) -> Any:
    """The schema with no unknown keys, whole pods in the place of `$pod`, and integers where strings or integers may stand."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("$pod"):
        return {"$ref": "#/definitions/core.v1.PodTemplateSpec", "required": ["spec"]}
    made = {key: _strict(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and made.get("type") == "object" and "additionalProperties" not in made:
        made["additionalProperties"] = False
    return made


def _string_complaints(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _string_complaints(each)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, str) and inner not in STRINGS.get(key, {inner}):
                yield f"string: {key}: {inner!r} is none of {sorted(STRINGS[key])}"
            if key in ("limits", "requests"):
                yield from _resource_complaints(inner)
            yield from _string_complaints(inner)


def _resource_complaints(resources: dict[str, Any]) -> Iterator[str]:
    for name, amount in resources.items():
        if name not in ("cpu", "memory", "storage", "nvidia.com/gpu") or not re.fullmatch(QUANTITY, str(amount)):
            yield f"string: {name}: {amount!r} is no amount of a resource"


def _name_complaints(document: dict[str, Any]) -> Iterator[str]:
    longest = {"RayCluster": 53, "RayJob": 47}.get(document["kind"], 63)  # KubeRay makes longer names of these
    name = document["metadata"]["name"]
    if not isinstance(name, str) or not re.fullmatch(DNS_LABEL, name) or len(name) > longest:
        yield f"name: {name!r} is no DNS label of at most {longest} characters"


# -- the operator's rules --------------------------------------------------------------------------------------------------


def rayjob_complaints(document: dict[str, Any]) -> Iterator[str]:
    """`ValidateRayJobSpec`, without what the schema has."""
    spec = document["spec"]
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        yield "operator: a job that is not shut down cannot be suspended"
    if spec.get("ttlSecondsAfterFinished", 0) < 0 or spec.get("backoffLimit", 0) < 0:
        yield "operator: ttlSecondsAfterFinished and backoffLimit are not negative"
    if spec.get("ttlSecondsAfterFinished", 0) > 0 and not spec.get("shutdownAfterJobFinishes"):
        yield "operator: ttlSecondsAfterFinished needs shutdownAfterJobFinishes"
    if "deletionStrategy" in spec:
        yield "operator: deletionStrategy needs a feature gate"
    if spec.get("clusterSelector"):
        yield "operator: clusterSelector and rayClusterSpec, or a backoffLimit, exclude each other"
    if spec.get("submissionMode") == "InteractiveMode" and spec.get("backoffLimit", 0) > 0:
        yield "operator: a job in InteractiveMode is not tried again"
    if spec.get("submissionMode") == "SidecarMode" and ("submitterPodTemplate" in spec or "submitterConfig" in spec):
        yield "operator: SidecarMode has no submitter"
    if any(spec.get(key, 1) <= 0 for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds")):
        yield "operator: deadlines are positive"
    if not isinstance(yaml.safe_load(spec.get("runtimeEnvYAML", "{}")), dict):
        yield "operator: runtimeEnvYAML is a mapping"
    # ours
    if not spec.get("shutdownAfterJobFinishes"):
        yield "ours: a finished job's cluster goes"
    if not re.search(r"python -m raypar train \S+\.yaml( .*)? --set run_dir=/shared/\S+", spec["entrypoint"]):
        yield "ours: the run folder is on the shared storage, else a retry begins anew"
    if not spec.get("backoffLimit"):
        yield "ours: a job whose head was lost is tried again"
    if "preRunningDeadlineSeconds" not in spec:
        yield "ours: a cluster that never starts is given up"


def raycluster_complaints(spec: dict[str, Any]) -> Iterator[str]:
    """`ValidateRayClusterSpec`, and what the autoscaler asks for."""
    head, groups = spec["headGroupSpec"], spec.get("workerGroupSpecs", [])
    environment = {each["name"] for each in _container(head).get("env", [])}
    options, scaled = spec.get("autoscalerOptions", {}), bool(spec.get("enableInTreeAutoscaling"))
    second = scaled and options.get("version") == "v2"
    names = [group["groupName"] for group in groups]
    if len(names) != len(set(names)) or not all(re.fullmatch(DNS_LABEL, name) for name in names):
        yield f"operator: the groups' names {names} are unique DNS labels"
    for name, group in [("head", head), *zip(names, groups, strict=True)]:
        yield from _group_complaints(name, group, second)
    if options.get("version") and "RAY_enable_autoscaler_v2" in environment:
        yield "operator: autoscalerOptions.version and RAY_enable_autoscaler_v2 exclude each other"
    if not scaled and options:
        yield "operator: autoscalerOptions without enableInTreeAutoscaling"
    if options.get("idleTimeoutSeconds", 0) < 0:
        yield "operator: idleTimeoutSeconds is not negative"
    if any(each["name"] == "KUBERAY_GEN_AUTOSCALER_START_CMD" for each in options.get("env", [])):
        yield "operator: KUBERAY_GEN_AUTOSCALER_START_CMD is the operator's"
    yield from _redis_variable_complaints(spec, head, environment)
    if spec.get("authOptions", {}).get("mode") == "token" and _version(spec.get("rayVersion", "0")) < (2, 52):
        yield "operator: a token needs rayVersion 2.52 or later"
    if spec.get("authOptions", {}).get("enableK8sTokenAuth"):
        yield "operator: enableK8sTokenAuth is not for RayJob, and another thing than a token"
    if spec.get("networkPolicy") or spec.get("tlsOptions") or spec.get("historyServerOptions"):
        yield "operator: networkPolicy, tlsOptions and historyServerOptions need feature gates"


def _group_complaints(name: str, group: dict[str, Any], second: bool) -> Iterator[str]:
    if not group["template"]["spec"].get("containers"):
        yield f"operator: {name} has no container"
        return
    parameters = group.get("rayStartParams", {})
    if not all(isinstance(value, str) for value in parameters.values()):
        yield f"operator: rayStartParams of {name} are strings"
    if unknown := set(parameters) - START_PARAMS:
        yield f"operator: `ray start` is not given {sorted(unknown)} (labels: a key of the group)"
    if group.get("resources") and set(parameters) & {"num-cpus", "num-gpus", "memory", "resources"}:
        yield f"operator: resources of {name} in two places"
    for key, value in group.get("labels", {}).items():
        if not re.fullmatch(r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?", value) or not re.fullmatch(r"[a-z0-9./-]+", key):
            yield f"operator: {name} has a label that is none: {key}: {value}"
    if second and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
        yield f"operator: restartPolicy of {name} is Never under autoscaler v2"
    if name == "head":
        return
    least, most, now = group["minReplicas"], group["maxReplicas"], group.get("replicas", 0)
    if not 0 <= least <= now <= most:
        yield f"operator: {name} has minReplicas {least}, replicas {now}, maxReplicas {most}"
    if group.get("suspend"):
        yield f"operator: {name} cannot be suspended under an autoscaler"
    if "idleTimeoutSeconds" in group and (group["idleTimeoutSeconds"] < 0 or not second):
        yield f"operator: idleTimeoutSeconds of {name} needs autoscaler v2"
    if group.get("priority") and not second:
        yield f"operator: priority of {name} needs autoscaler v2"
    if "cpu" not in _container(group).get("resources", {}).get("limits", {}) and "num-cpus" not in parameters:
        yield f"operator: the autoscaler finds no CPUs of {name}"


def _redis_variable_complaints(spec: dict[str, Any], head: dict[str, Any], environment: set[str]) -> Iterator[str]:
    parameters = set(head.get("rayStartParams", {}))
    if {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"} & environment or {
        "redis-password",
        "redis-username",
    } & parameters:
        yield "operator: Redis is named in gcsFaultToleranceOptions only"
    options = spec.get("gcsFaultToleranceOptions", {})
    if options.get("backend", "redis") == "redis" and options.get("storage"):
        yield "operator: storage is for the backend rocksdb"


def _container(group: dict[str, Any]) -> dict[str, Any]:
    """Ray's container: the first."""
    return dict(next(iter(group["template"]["spec"].get("containers") or [{}])))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


# -- ours ------------------------------------------------------------------------------------------------------------------


def our_cluster_complaints(spec: dict[str, Any]) -> Iterator[str]:
    """What `cluster/README.md` promises."""
    head, groups = spec["headGroupSpec"], spec["workerGroupSpecs"]
    if not spec.get("enableInTreeAutoscaling") or spec.get("autoscalerOptions", {}).get("version") != "v2":
        yield "ours: autoscaler v2"
    if spec.get("authOptions", {}).get("mode") != "token":
        yield "ours: whoever reaches the head needs a token"
    if spec.get("rayVersion") != RAY_VERSION:
        yield f"ours: rayVersion is {RAY_VERSION}, that of constraints.txt"
    if head.get("rayStartParams", {}).get("num-cpus") != "0" or head.get("labels") != {MARKET: "on-demand"}:
        yield "ours: the head is on demand and has no CPUs for workers"
    if {port.get("containerPort") for port in _container(head).get("ports", [])} != {6379, 8265, 10001}:
        yield "ours: the head's ports are those of Ray: 6379, 8265, 10001"
    redis = spec.get("gcsFaultToleranceOptions", {})
    secret = redis.get("redisPassword", {}).get("valueFrom", {}).get("secretKeyRef", {})
    if redis.get("redisAddress") != "redis://raypar-redis:6379" or secret != {"name": "raypar-redis", "key": "password"}:
        yield "ours: Redis is that of redis.yaml, its password in the Secret"
    if {group.get("labels", {}).get(MARKET) for group in groups} != {"spot", "on-demand"}:
        yield "ours: groups on spot and on demand, by the label ray.io/market-type"
    for group in groups:
        yield from _our_group_complaints(group)
    priorities = {group.get("labels", {}).get(MARKET): group.get("priority", 0) for group in groups}
    if priorities.get("spot", 0) <= priorities.get("on-demand", 0):
        yield "ours: spot has the highest priority"
    images = {_container(group).get("image") for group in [head, *groups]}
    if (
        len(images) != 1
        or not re.fullmatch(r"[\w.-]+(/[\w.-]+)+:[\w.-]+", str(next(iter(images))))
        or str(images).count(":latest")
    ):
        yield f"ours: one image with a tag that does not move, not {images}"
    for group in [head, *groups]:
        yield from _pod_complaints(group["template"]["spec"])


def _our_group_complaints(group: dict[str, Any]) -> Iterator[str]:
    name, pod = group["groupName"], group["template"]["spec"]
    selector = pod.get("nodeSelector", {})
    is_spot = selector in SPOT_SELECTORS
    if is_spot != (group.get("labels", {}).get(MARKET) == "spot") or (selector and not is_spot):
        yield f"ours: {name} is where its label says: {selector}"
    if is_spot and [(t.get("key"), t.get("value")) for t in pod.get("tolerations", [])] != list(selector.items()):
        yield f"ours: {name} tolerates the taint of its nodes"
    if group["minReplicas"] or group["maxReplicas"] < 1:
        yield f"ours: {name} costs nothing while nobody asks for it"
    if "idleTimeoutSeconds" not in group:
        yield f"ours: {name} has an idle time-out of its own"
    if not str(_container(group)["resources"]["limits"]["cpu"]).isdigit():
        yield f"ours: {name} has whole CPUs"


def _pod_complaints(pod: dict[str, Any]) -> Iterator[str]:
    context = pod.get("securityContext", {})
    if (
        context.get("runAsNonRoot") is not True
        or not context.get("runAsUser")
        or context.get("fsGroup") != context["runAsUser"]
    ):
        yield "ours: pods do not run as root"
    claims = {v["name"]: v.get("persistentVolumeClaim", {}).get("claimName") for v in pod.get("volumes", [])}
    for container in pod["containers"]:
        mounts = {mount["mountPath"]: claims.get(mount["name"]) for mount in container.get("volumeMounts", [])}
        if mounts.get("/shared") != "raypar-runs":
            yield "ours: every pod has the shared storage at /shared"
        inner = container.get("securityContext", {})
        if inner.get("allowPrivilegeEscalation") is not False or inner.get("capabilities") != {"drop": ["ALL"]}:
            yield "ours: no privileges"
        if container.get("resources", {}).get("limits") != container.get("resources", {}).get("requests"):
            yield "ours: limits are requests: Ray counts the limits, Kubernetes places by the requests"
    if not pod.get("terminationGracePeriodSeconds", 0) >= 30:
        yield "ours: a worker that is asked to leave has time to move its work"


def redis_complaints(service: dict[str, Any], store: dict[str, Any]) -> Iterator[str]:
    """The Redis that the clusters name: found by name and port, durable, its password in a Secret."""
    spec, template = store["spec"], store["spec"]["template"]
    container = template["spec"]["containers"][0]
    wanted = {"app": "raypar-redis"}
    places = [service["spec"].get("selector"), spec["selector"].get("matchLabels"), template.get("metadata", {}).get("labels")]
    if places != [wanted] * 3 or {service["metadata"]["name"], store["metadata"]["name"], spec["serviceName"]} != {
        "raypar-redis"
    }:
        yield "ours: Service, StatefulSet and its pods have one name"
    ports = [port["port"] for port in service["spec"]["ports"]] + [port["containerPort"] for port in container["ports"]]
    if ports != [6379, 6379] or spec["replicas"] != 1:
        yield "ours: one Redis, on port 6379"
    arguments = container.get("args", [])
    if not {"--requirepass", "$(REDIS_PASSWORD)", "--appendonly"} <= set(arguments):
        yield "ours: Redis wants a password and keeps what it was told"
    secret = {"name": "REDIS_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "raypar-redis", "key": "password"}}}
    if container.get("env") != [secret]:
        yield "ours: the password comes from the Secret"
    mounted = {mount["name"] for mount in container.get("volumeMounts", []) if mount["mountPath"] == "/data"}
    if {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])} != mounted or not mounted:
        yield "ours: Redis keeps its data on a volume"
    context, inner = template["spec"].get("securityContext", {}), container.get("securityContext", {})
    if context.get("runAsNonRoot") is not True or inner.get("capabilities") != {"drop": ["ALL"]}:
        yield "ours: pods do not run as root"
    if container["image"].partition(":")[2] in ("", "latest"):
        yield "ours: an image with a tag that does not move"


def shared_runs_complaints(claim: dict[str, Any]) -> Iterator[str]:
    """The claim that the pods mount, which many nodes write at once."""
    if claim["metadata"]["name"] != "raypar-runs" or claim["spec"].get("accessModes") != ["ReadWriteMany"]:
        yield "ours: the claim raypar-runs is written by many nodes"
    if not claim["spec"].get("storageClassName") or "storage" not in claim["spec"].get("resources", {}).get("requests", {}):
        yield "ours: the claim says its class and size"
