"""Facts about a machine and a cluster, as data. `gather.py` gathers them; the checks judge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raypar.doctor.finding import NotKnown
from raypar.files.json_type import Json


@dataclass(frozen=True)
class ProcessorFacts:
    """Processors and memory."""

    processors: int
    """Processors that this process may use."""
    all_processors: int
    """Processors of the machine."""
    quota: float | None
    """Processors that a container may use by its CPU quota; None: no quota."""
    memory_bytes: int
    free_memory_bytes: int
    """Memory that processes may still take, that of the container's limit if there is one."""


@dataclass(frozen=True)
class FolderFacts:
    """A folder on disk and its file system."""

    path: str
    """The folder, or the nearest one above it that exists."""
    error: str
    """Why nothing can be written there; empty if it can."""
    size_bytes: int
    free_bytes: int
    free_inodes: int | None
    """Files that may still be made; None: the file system has no limit."""


@dataclass(frozen=True)
class StorageFacts:
    """A place for runs on shared storage, such as S3."""

    uri: str
    """The place."""
    error: str = ""
    """Why nothing can be written there; empty if it can."""
    cure: str = ""
    """What to do about that."""
    write_s: float = 0.0
    """How long it took to write and remove a small object."""
    guarded: bool = False
    """Whether runs of other clusters are kept out by a lease there, as on S3."""


@dataclass(frozen=True)
class LimitFacts:
    """Limits of this process (ulimit); None: unlimited."""

    open_files: int | None
    open_files_hard: int | None
    processes: int | None
    running_processes: int | None = None
    """Processes and threads that this user has; None: not counted."""
    address_space_bytes: int | None = None
    """Address space that a process may have."""


@dataclass(frozen=True)
class HostFacts:
    """Names, addresses and ports of this machine."""

    name: str
    addresses: tuple[str, ...]
    """What the name resolves to."""
    own_connection_error: str
    """Why a connection to a port of the first address failed; empty if it did not."""
    interfaces: tuple[str, ...]
    """Names of network interfaces."""
    first_port: int
    last_port: int
    """The range of ports that the system gives to listeners."""


@dataclass(frozen=True)
class TokenFacts:
    """The cluster's token, of which nobody reads the value."""

    mode: str
    """RAY_AUTH_MODE; empty if it is not set."""
    in_environment: bool
    """Whether RAY_AUTH_TOKEN is set."""
    file: str
    """The file that would hold the token."""
    file_exists: bool
    file_mode: int = 0
    """Permissions of the file."""


@dataclass(frozen=True)
class TlsFacts:
    """What is set for TLS on Ray's connections."""

    used: bool
    """Whether RAY_USE_TLS asks for it."""
    unset: tuple[str, ...] = ()
    """Variables that must name a file and are not set."""
    unreadable: tuple[str, ...] = ()
    """`VARIABLE=path` of files that cannot be read."""


@dataclass(frozen=True)
class NodeFacts:
    """A node of the cluster, as a task on it has found it."""

    node: str
    """The first characters of its id."""
    host: str
    error: str = ""
    """Why it has not answered; empty if it has."""
    skew_s: float = 0.0
    """Its clock minus this machine's."""
    uncertainty_s: float = 0.0
    """By how much `skew_s` may be wrong: half of the time that the answer took."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Library -> version; empty where it is not installed."""
    processor: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that choose kernels."""
    sees_folder: bool | None = None
    """Whether it sees the runs folder of this machine; None: not asked."""
    shm_free_bytes: int | None = None
    open_files: int | None = None


@dataclass(frozen=True)
class ClusterFacts:
    """What the cluster has said."""

    address: str
    nodes: tuple[NodeFacts, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    """This machine's versions."""
    processor: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    open_to_all: bool = False
    """Whether it lets in who shows no token."""


@dataclass(frozen=True)
class DoctorFacts:
    """All facts. Each may be unknown, with the reason."""

    versions: Mapping[str, str] | NotKnown
    """Library -> version, empty where it is not installed; with `python` and `raypar`."""
    processors: ProcessorFacts | NotKnown
    gpus: tuple[str, ...]
    """Device files of NVIDIA GPUs."""
    torch: Mapping[str, Json] | NotKnown
    """What PyTorch says of itself in a process of its own: `error`, `cuda` (it was built for), `gpus` (names)."""
    torchvision: Mapping[str, Json] | NotKnown
    """`error`: why it cannot be imported; empty if it can."""
    nccl: Mapping[str, Json] | NotKnown
    """`text`, or `error` and `cure`."""
    ray: Mapping[str, Json] | NotKnown
    """`error`: why it cannot be imported."""
    shm: FolderFacts | NotKnown
    runs: FolderFacts | StorageFacts | NotKnown
    """Where runs are to lie."""
    temporary: FolderFacts | NotKnown
    limits: LimitFacts | NotKnown
    host: HostFacts | NotKnown
    token: TokenFacts | NotKnown
    tls: TlsFacts | NotKnown
    environment: Mapping[str, str]
    cluster: ClusterFacts | NotKnown
    address: str | None
    """Of the cluster that was asked; None: none was named."""
