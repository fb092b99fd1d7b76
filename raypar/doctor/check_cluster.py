"""Judges what the nodes of a cluster have said: clocks, versions, processors, the runs folder. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypar.doctor.check_machine import CLUSTER_SHM_BYTES, LEAST_OPEN_FILES, format_bytes
from raypar.doctor.finding import Finding, Level, NotKnown
from raypar.doctor.machine_facts import ClusterFacts, NodeFacts
from raypar.plan.wording import count_noun, word_form

SKEW_S, LARGE_SKEW_S = 0.5, 30.0
"""Differences of clocks that are a warning and a failure: times in events, and until when a node may stay, are then wrong."""
MUST_BE_EQUAL = ("python", "ray")
"""Libraries without whose equal versions Ray refuses to work; of Python the first two numbers count."""


def check_cluster(facts: ClusterFacts | NotKnown, address: str | None) -> list[Finding]:
    """The cluster at `address`; None: none was named."""
    if address is None:
        return [Finding("not checked", "cluster", "no cluster is named: give --address host:port, or set RAY_ADDRESS")]
    if isinstance(facts, NotKnown):
        cure = (
            f"look at `ray status --address {address}`; if the cluster has a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        )
        return [Finding("failure", "cluster", facts.why, cure)]
    well = [node for node in facts.nodes if not node.error]
    found = [
        Finding(
            "failure", _name(node), node.error, "look at that machine: it may be stopped, full, or cut off from the network"
        )
        for node in facts.nodes
        if node.error
    ]
    if not well:
        return [*found, Finding("failure", "cluster", f"no node of {facts.address} has answered", "start its nodes")]
    answer = word_form(well, "answers", "answer")
    head = Finding("ok", "cluster", f"{len(well)} of {count_noun(len(facts.nodes), 'node')} at {facts.address} {answer}")
    return [head, *found, *_token(facts), *_clocks(well), *_versions(facts, well), *_kernels(facts, well), *_places(well)]


def _name(node: NodeFacts) -> str:
    return f"node {node.node}"


def _token(facts: ClusterFacts) -> list[Finding]:
    if not facts.open_to_all:
        return [Finding("ok", "cluster token", "the cluster asks for one")]
    text = "the cluster asks for no token: whoever reaches its ports can run code in the workers of any run"
    cure = "start Ray with RAY_AUTH_MODE=token and a token on every node (as the files in cluster/ do), or close its ports"
    return [Finding("warning", "cluster token", text, cure)]


def _clocks(nodes: Sequence[NodeFacts]) -> list[Finding]:
    found = []
    for node in nodes:
        off = max(0.0, abs(node.skew_s) - node.uncertainty_s)
        if off > SKEW_S:
            level: Level = "failure" if off > LARGE_SKEW_S else "warning"
            way = "ahead of" if node.skew_s > 0 else "behind"
            text = f"its clock ({node.host}) is {abs(node.skew_s):.1f} s {way} this machine's"
            found.append(Finding(level, _name(node), text, "run chrony or systemd-timesyncd on every node"))
    if not found:
        most = max(abs(node.skew_s) for node in nodes)
        sure = max(node.uncertainty_s for node in nodes)
        found.append(Finding("ok", "clocks", f"equal within {max(1.0, 1000 * max(most, sure)):.0f} ms"))
    return found


def _versions(facts: ClusterFacts, nodes: Sequence[NodeFacts]) -> list[Finding]:
    found: list[Finding] = []
    for library, ours in sorted(facts.versions.items()):
        others = {
            node.versions.get(library, ""): node for node in nodes if not _fits(library, ours, node.versions.get(library, ""))
        }
        for theirs, node in others.items():
            if library == "raypar" and not theirs:
                text = "raypar is not installed there; a job takes it along only from a folder that has it"
                cure = "install raypar on the node, or submit from raypar's folder"
                found.append(Finding("warning", _name(node), text, cure))
            elif library in ("cupy", "torchvision"):
                text = f"{library} {theirs or 'is not installed'} there, {ours or 'none'} here"
                found.append(Finding("warning", _name(node), text, "install one version on all nodes, if jobs need it"))
            else:
                level: Level = "failure" if library in MUST_BE_EQUAL or not theirs else "warning"
                why = "" if level == "failure" else ": results may have other bits"
                text = f"{library} {theirs or 'is not installed'} there, {ours or 'none'} here{why}"
                found.append(Finding(level, _name(node), text, "install the same versions on all nodes (constraints.txt)"))
    return found or [Finding("ok", "versions", "the same on all nodes")]


def _fits(library: str, ours: str, theirs: str) -> bool:
    return ours.split(".")[:2] == theirs.split(".")[:2] if library == "python" else ours == theirs


def _kernels(facts: ClusterFacts, nodes: Sequence[NodeFacts]) -> list[Finding]:
    found = []
    kinds: dict[str, list[str]] = {}
    for node in nodes:
        kinds.setdefault(node.processor, []).append(node.node)
    if len(kinds) > 1:
        text = "; ".join(f"{kind or 'unknown'}: {', '.join(names[:6])}" for kind, names in sorted(kinds.items()))
        cure = "use nodes of one kind where results are to be bit-identical; a run whose workers differ says `not bitwise`"
        found.append(Finding("warning", "kinds of processor", text, cure))
    for node in nodes:
        if dict(node.settings) != dict(facts.settings):
            text = f"its settings of kernels are {_settings(node.settings)}, this machine's {_settings(facts.settings)}"
            found.append(Finding("warning", _name(node), text, "set them alike before Ray is started on each node"))
    return found or [Finding("ok", "kernels", "one kind of processor, and no setting that differs")]


def _settings(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(settings.items())) or "none"


def _places(nodes: Sequence[NodeFacts]) -> list[Finding]:
    found = []
    blind = [node for node in nodes if node.sees_folder is False]
    if blind:
        text = f"not seen by {', '.join(_name(node) for node in blind[:6])}: workers write checkpoints themselves"
        cure = "set run_dir to storage that all nodes share (NFS, EFS, Filestore)"
        found.append(Finding("failure", "shared runs folder", text, cure))
    elif any(node.sees_folder for node in nodes):
        found.append(Finding("ok", "shared runs folder", "seen by all nodes"))
    for node in nodes:
        if node.shm_free_bytes is not None and node.shm_free_bytes < CLUSTER_SHM_BYTES:
            text = f"/dev/shm has {format_bytes(node.shm_free_bytes)} free"
            cure = "a larger /dev/shm: docker run --shm-size, emptyDir with medium: Memory"
            found.append(Finding("warning", _name(node), text, cure))
        if node.open_files is not None and node.open_files < LEAST_OPEN_FILES:
            text = f"{node.open_files:,} open files at most"
            found.append(Finding("warning", _name(node), text, "ulimit -n 65536 before Ray is started there"))
    return found
