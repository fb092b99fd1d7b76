"""All checks of the doctor, in the order in which they are told. Pure."""

from __future__ import annotations

from raypar.doctor import check_machine as machine
from raypar.doctor.check_cluster import check_cluster
from raypar.doctor.check_environment import check_environment
from raypar.doctor.finding import Finding, NotKnown
from raypar.doctor.machine_facts import DoctorFacts


def examine(facts: DoctorFacts, address: str | None) -> list[Finding]:
    """The findings. `address`: of the cluster that was asked; None: none was named."""
    host = facts.host
    addresses, interfaces = ((), ()) if isinstance(host, NotKnown) else (host.addresses, host.interfaces)
    has_gpus = not isinstance(facts.gpus, NotKnown) and bool(facts.gpus)
    return [
        *machine.check_versions(facts.versions),
        *machine.check_ray(facts.ray),
        *machine.check_private_apis("PyTorch", facts.torch),
        *machine.check_private_apis("Ray", facts.ray),
        *machine.check_gpus(facts.gpus, facts.torch, facts.environment),
        *machine.check_nccl(facts.nccl, has_gpus, facts.versions),
        *machine.check_torchvision(facts.torchvision, facts.versions),
        *machine.check_processors(facts.processors),
        *machine.check_shm(facts.shm),
        *machine.check_limits(facts.limits),
        *machine.check_runs_folder(facts.runs),
        *machine.check_temporary_folder(facts.temporary),
        *machine.check_host(host, address),
        *machine.check_token(facts.token, address),
        *machine.check_tls(facts.tls),
        *check_environment(facts.environment, addresses, interfaces),
        *check_cluster(facts.cluster, address),
    ]
