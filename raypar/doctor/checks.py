"""The one list of checks: which facts each needs, where it applies, and the function that judges them.

`raypar doctor` makes all of them. A run makes those that apply to it where it can still end with nothing started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from raypar.doctor import check_machine as machine
from raypar.doctor.check_cluster import check_cluster
from raypar.doctor.check_environment_variables import check_environment_variables
from raypar.doctor.finding import Finding, NotKnown
from raypar.errors import ClusterError

Place = Literal["machine", "nodes", "run"]
"""What a check looks at: the machine it is made on, the nodes of a cluster, a run that is about to start here."""


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    """What is looked at, for the finding that a fact is not known."""
    facts: tuple[str, ...]
    """The fields of `DoctorFacts` that it needs, which are the arguments of `judge`."""
    judge: Callable[..., list[Finding]]
    """What it makes of them; pure."""
    where: tuple[Place, ...] = ("machine",)
    """Where it applies."""
    judges_unknown: bool = False
    """Whether `judge` takes facts that are not known (`NotKnown`) too."""


CHECKS = (
    Check("versions", ("versions",), machine.check_versions),
    Check("Ray's import", ("ray",), machine.check_ray),
    Check("PyTorch's private APIs", ("torch",), partial(machine.check_private_apis, "PyTorch"), judges_unknown=True),
    Check("Ray's private APIs", ("ray",), partial(machine.check_private_apis, "Ray"), judges_unknown=True),
    Check("PyTorch's import", ("torch", "gpus", "environment"), machine.check_gpus),
    Check("CuPy and NCCL", ("nccl", "gpus", "versions"), machine.check_nccl, judges_unknown=True),
    Check("torchvision", ("torchvision", "versions"), machine.check_torchvision, judges_unknown=True),
    Check("processors", ("processors",), machine.check_processors),
    Check("/dev/shm", ("shm",), machine.check_shm),
    Check("limits", ("limits",), machine.check_limits),
    Check("address space", ("limits",), machine.check_address_space, ("machine", "run"), judges_unknown=True),
    Check("runs folder", ("runs",), machine.check_runs_folder),
    Check("temporary files", ("temporary",), machine.check_temporary_folder),
    Check("room for logs", ("temporary",), machine.check_room_for_logs, ("machine", "run"), judges_unknown=True),
    Check("host name", ("host", "address"), machine.check_host_name_and_ports, judges_unknown=True),
    Check("auth token", ("token", "address"), machine.check_token),
    Check("TLS", ("tls",), machine.check_tls),
    Check("environment", ("environment", "host"), check_environment_variables, judges_unknown=True),
    Check("cluster", ("cluster", "address"), check_cluster, ("nodes",), judges_unknown=True),
)
"""All checks, in the order in which they are told."""


def run_checks(facts: Mapping[str, Any], where: Place | None = None) -> list[Finding]:
    """The findings of the checks that apply to a place (None: of all) and whose facts are given, by field of `DoctorFacts`."""
    found: list[Finding] = []
    for check in CHECKS:
        if check.facts[0] not in facts or (where is not None and where not in check.where):
            continue
        given = [facts[name] for name in check.facts]
        unknown = next((fact for fact in given if isinstance(fact, NotKnown)), None)
        if unknown is None or check.judges_unknown:
            found += check.judge(*given)
        else:
            found.append(Finding("not checked", check.name, unknown.why))
    return found


def refuse_unfit_machine(facts: Mapping[str, Any]) -> None:
    """Raise `ClusterError` with the first failure that the checks of a run find in these facts."""
    for finding in run_checks(facts, "run"):
        if finding.level == "failure":
            raise ClusterError(finding.text, cure=finding.cure)
