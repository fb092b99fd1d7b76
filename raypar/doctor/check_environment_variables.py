"""Judges environment variables that change results, or make runs slow or hang. Pure. No value of a secret is told."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from raypar.doctor.finding import Finding, NotKnown

if TYPE_CHECKING:
    from raypar.doctor.machine_facts import HostFacts

FINGERPRINT_SETTINGS = (
    "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip
"""Variables that make a library choose kernels with other rounding, and that workers compare before a run."""
CHANGES_BITS = (*FINGERPRINT_SETTINGS, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""All such variables."""
PINS = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")
"""Variables that bind threads to processors: of several workers, all to the same ones."""
HARMLESS_NCCL = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_VERSION", "NCCL_CONF_FILE")
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
RAY_KNOWN = (
    "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED", "RAY_TMPDIR",
    "RAY_API_SERVER_ADDRESS", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_REDIS_ADDRESS", "RAY_JOB_STOP_WAIT_TIME_S",
    "RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT",
)  # fmt: skip
"""Variables of Ray that raypar expects, or judges by themselves."""
SOCKET_PATH_ROOM = 40
"""Ray puts about 65 characters of socket path below its folder, and the system allows 107."""
FOLDER_NAMES = 18
"""Characters of `/raypar-12345678/r`, the folders that a local cluster makes for Ray."""


def check_environment_variables(environment: Mapping[str, str], host: HostFacts | NotKnown) -> list[Finding]:
    """The settings that matter on a machine of these names."""
    addresses, interfaces = ((), ()) if isinstance(host, NotKnown) else (host.addresses, host.interfaces)
    found = [*_bits(environment), *_threads(environment), *_nccl(environment, interfaces)]
    found += [*_proxies(environment, addresses), *_ray(environment), *_others(environment)]
    return found or [Finding("ok", "environment", "no setting that changes results, or makes runs slow or hang")]


def _bits(environment: Mapping[str, str]) -> list[Finding]:
    named = [f"{name}={environment[name]}" for name in CHANGES_BITS if name in environment]
    if not named:
        return []
    cure = "unset it, or set it to the same for every process of every run that is to be compared"
    return [Finding("warning", "environment", f"{', '.join(named)}: chooses kernels, so results have other bits", cure)]


def _threads(environment: Mapping[str, str]) -> list[Finding]:
    found = []
    count = environment.get("OMP_NUM_THREADS", "")
    if count and not all(part.strip().isdigit() and int(part) > 0 for part in count.split(",")):
        cure = "unset it: `threads` of the job says"
        found.append(Finding("warning", "environment", f"OMP_NUM_THREADS={count!r} is no number", cure))
    elif count:
        text = f"OMP_NUM_THREADS={count} is not used: the job's `threads` says how many threads a worker has"
        found.append(Finding("ok", "environment", text))
    pins = [
        f"{name}={environment[name]}" for name in PINS if environment.get(name, "").lower() not in ("", "false", "disabled")
    ]
    if pins:
        text = f"{', '.join(pins)}: binds the threads of every worker to the same processors, so that they wait for each other"
        found.append(Finding("warning", "environment", text, f"unset {', '.join(pin.partition('=')[0] for pin in pins)}"))
    if environment.get("OMP_WAIT_POLICY", "").lower() == "active" or environment.get("KMP_BLOCKTIME", "").lower() == "infinite":
        text = "idle OpenMP threads keep their processors busy (OMP_WAIT_POLICY, KMP_BLOCKTIME)"
        found.append(Finding("warning", "environment", text, "unset it: workers that share processors then run faster"))
    return found


def _nccl(environment: Mapping[str, str], interfaces: Collection[str]) -> list[Finding]:
    named = sorted(name for name in environment if name.startswith("NCCL_") and name not in HARMLESS_NCCL)
    found = []
    wanted = environment.get("NCCL_SOCKET_IFNAME", "")
    if wanted and interfaces and not _names_an_interface(wanted, interfaces):
        text = f"NCCL_SOCKET_IFNAME={wanted}, and this machine has {', '.join(sorted(interfaces))}: NCCL finds no network"
        found.append(Finding("warning", "environment", text, "unset it, or name one of these"))
    if named:
        text = f"{', '.join(named)}: changes how NCCL moves tensors; on GPUs a wrong value hangs, and some change bits or speed"
        found.append(Finding("warning", "environment", text, "unset what you do not know to be needed on this cluster"))
    return found


def _names_an_interface(wanted: str, interfaces: Collection[str]) -> bool:
    """Whether NCCL_SOCKET_IFNAME names one of the interfaces: prefixes, `=` for whole names, `^` for all but these."""
    exclude, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    names = [name for name in wanted.lstrip("^=").split(",") if name]
    hit = [one for one in interfaces if any(one == name if exact else one.startswith(name) for name in names)]
    return len(hit) < len(interfaces) if exclude else bool(hit)


def _proxies(environment: Mapping[str, str], addresses: Collection[str]) -> list[Finding]:
    named = [name for name in PROXIES if environment.get(name)]
    if not named:
        return []
    outside = [part.strip() for part in (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")]
    wanted = ["localhost", "127.0.0.1", *(one for one in addresses if ":" not in one and not one.startswith("127."))]
    missing = [one for one in wanted if one not in outside and "*" not in outside and not _in_a_network(one, outside)]
    if not missing:
        return [Finding("ok", "environment", f"{', '.join(named)}: not used between nodes (no_proxy)")]
    text = (
        f"{', '.join(named)}: Ray's connections between nodes may go to the proxy and hang; no_proxy lacks {', '.join(missing)}"
    )
    return [Finding("warning", "environment", text, f"export no_proxy={','.join(wanted)} with the addresses of all nodes")]


def _in_a_network(address: str, outside: Collection[str]) -> bool:
    """Whether an address lies in one of the networks of no_proxy, such as 10.0.0.0/8."""
    import ipaddress

    for part in outside:
        try:
            if "/" in part and ipaddress.ip_address(address) in ipaddress.ip_network(part, strict=False):
                return True
        except ValueError:
            continue
    return False


def _ray(environment: Mapping[str, str]) -> list[Finding]:
    found = []
    if environment.get("RAY_ADDRESS"):
        text = f"RAY_ADDRESS={environment['RAY_ADDRESS']}: runs join that cluster"
        found.append(Finding("ok", "environment", f"{text}, also without --address"))
    folder = environment.get("RAY_TMPDIR", "")
    if len(folder) > SOCKET_PATH_ROOM:
        text = f"RAY_TMPDIR has {len(folder)} characters: the paths of Ray's sockets become too long"
        found.append(Finding("warning", "environment", text, f"use a folder with {SOCKET_PATH_ROOM} characters at most"))
    faults = sorted(name for name in environment if name.startswith("RAY_testing_"))
    if faults:
        found.append(Finding("warning", "environment", f"{', '.join(faults)}: makes Ray fail on purpose", "unset it"))
    if environment.get("RAY_memory_monitor_refresh_ms") == "0":
        text = "RAY_memory_monitor_refresh_ms=0: where memory runs out the system kills any process, also the head's"
        found.append(Finding("warning", "environment", text, "unset it"))
    if any(environment.get(name) not in (None, "", "0") for name in ("RAY_DEBUG", "RAY_PDB", "RAY_DEBUG_POST_MORTEM")):
        text = "Ray's debugger is on (RAY_DEBUG, RAY_PDB): a worker that fails waits for somebody to attach"
        found.append(Finding("warning", "environment", text, "unset it"))
    judged = {*RAY_KNOWN, "RAY_memory_monitor_refresh_ms", "RAY_DEBUG", "RAY_PDB", "RAY_DEBUG_POST_MORTEM"}
    others = sorted(name for name in environment if name.startswith("RAY_") and name not in judged and name not in faults)
    if others:
        shown = ", ".join(others[:12]) + f" and {len(others) - 12} more" * (len(others) > 12)
        found.append(Finding("ok", "environment", f"also set for Ray: {shown}"))
    return found


def _others(environment: Mapping[str, str]) -> list[Finding]:
    found = []
    if environment.get("LD_PRELOAD"):
        text = "LD_PRELOAD is set: another allocator gives other addresses, by which MKL may choose other kernels"
        found.append(Finding("warning", "environment", text, "set the same for all processes of runs that are to be compared"))
    if environment.get("CUDA_LAUNCH_BLOCKING") not in (None, "", "0"):
        text = "CUDA_LAUNCH_BLOCKING: every kernel is waited for, and communication may hang"
        found.append(Finding("warning", "environment", text, "unset CUDA_LAUNCH_BLOCKING"))
    return found
