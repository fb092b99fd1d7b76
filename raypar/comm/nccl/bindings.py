"""CuPy: NCCL through it (which library this process has, one communicator), and kernels in CUDA C++. The only file that imports
cupy, inside functions.

CuPy's bindings take plain numbers (pointers, counts, streams), so that no cupy array or stream is needed. Its communicators
are blocking ones: making one waits without a limit for all ranks and cannot be interrupted (see `connect`).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from raypar.errors import ClusterError, CommError
from raypar.plan.wording import count_noun

log = logging.getLogger("raypar")

OLDEST_NCCL = 21800
"""NCCL 2.18, as `ncclGetVersion` codes it: the first with all calls that CuPy 14 makes."""

OLDEST_CUPY = 14
"""Unique ids are bytes since then, and communicators take no tuple any more."""

BYTE = 1
"""ncclUint8: operations that only move memory move bytes, whatever the dtype."""
SUM = 0
"""ncclSum."""
REMOTE_ERROR = 6
"""ncclRemoteError."""
IN_PROGRESS = 7
"""ncclInProgress: a communicator that does not block is not done yet. CuPy 14 has no name for it."""

NCCL_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""dtypes that NCCL can add -> its codes (nccl.h, ncclDataType_t)."""


@dataclass(frozen=True, slots=True)
class NcclInstallation:
    """The NCCL of this process, and the CuPy and PyTorch that use it."""

    cupy_version: str
    """Version of CuPy."""
    cupy_cuda: int
    """CUDA major version that CuPy was built for."""
    torch_cuda: int | None
    """CUDA major version that PyTorch was built for; None for a CPU build."""
    cupy_nccl_version: int
    """Version of NCCL that CuPy was built with: 22907 is 2.29.7."""
    nccl_version: int
    """Version of NCCL that is loaded."""
    paths: tuple[str, ...]
    """Files of the loaded library."""

    def __str__(self) -> str:
        where = ", ".join(self.paths) or "a place that is not known"
        torch_cuda = "no CUDA" if self.torch_cuda is None else f"CUDA {self.torch_cuda}"
        return (
            f"NCCL {format_nccl_version(self.nccl_version)} from {where}; CuPy {self.cupy_version} for CUDA {self.cupy_cuda}, "
            f"built with NCCL {format_nccl_version(self.cupy_nccl_version)}; PyTorch for {torch_cuda}"
        )


def format_nccl_version(version: int) -> str:
    """22907 -> 2.29.7 (codes before 2.9 were shorter; these versions are too old anyway)."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def cupy_install_command(cuda: int | None) -> str:
    """The command that installs CuPy for a CUDA version."""
    if cuda in (12, 13):
        return f"pip install 'raypar[cuda{cuda}]'"
    return "pip install 'raypar[cuda13]' (PyTorch for CUDA 13) or 'raypar[cuda12]' (for CUDA 12)"


def cuda_of_torch() -> int | None:
    """The CUDA major version PyTorch was built for."""
    return int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None


def cuda_of_cupy() -> int:
    """The CUDA major version CuPy was built for."""
    import cupy

    return int(cupy.cuda.runtime.runtimeGetVersion()) // 1000


def compile_cuda(source: str, name: str, device: int) -> Callable[[int, int, tuple[int, ...], int], None]:
    """Compile a kernel in CUDA C++ and load it on a device, so that its first launch loads nothing. Additions and products are
    rounded one by one.

    Returns what launches it: (blocks, threads of a block, arguments, stream). Raises whatever CuPy and the compiler do.
    """
    import cupy

    with cupy.cuda.Device(device):
        kernel = cupy.RawKernel(source, name, options=("--fmad=false",))
        kernel.compile()

    def launch(blocks: int, threads: int, arguments: tuple[int, ...], stream: int) -> None:
        with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream):
            kernel((blocks,), (threads,), arguments)

    return launch


def cupy_packages() -> list[str]:
    """Names of the installed distributions of CuPy; there should be one."""
    names = {str(distribution.metadata["Name"]).lower().replace("_", "-") for distribution in distributions()}
    return sorted(name for name in names if name == "cupy" or name.startswith("cupy-cuda"))


def load_nccl_bindings() -> Any:
    """The module `cupy.cuda.nccl`, loaded. Raises `ClusterError` when there is no CuPy, or no libnccl for it."""
    cuda = cuda_of_torch()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a missing libnccl is reported below, with the reason
            from cupy.cuda import nccl
    except ImportError as error:
        # A CuPy for another CUDA may lack that CUDA's libraries; its error names only the file that it has not found.
        others = [name for name in cupy_packages() if cuda is not None and name not in ("cupy", f"cupy-cuda{cuda}x")]
        remove = f"pip uninstall -y {' '.join(others)} && " if others else ""
        raise ClusterError(
            f"the nccl transport needs CuPy, which cannot be imported ({error})", cure=remove + cupy_install_command(cuda)
        ) from error
    if not nccl.available:
        import cupy

        check_same_cuda_version(cuda, cuda_of_cupy(), str(cupy.__version__))
        raise ClusterError(
            "CuPy finds no libnccl.so.2 in this process",
            cure="PyTorch's CUDA builds bring it: install one, or `pip install nvidia-nccl-cu13` (-cu12 for CUDA 12)",
        )
    return nccl


def nccl_version() -> int:
    """The version of the NCCL of this process, as in `NcclInstallation.version`."""
    return int(load_nccl_bindings().get_version())


def find_nccl_installation() -> NcclInstallation:
    """The library that is loaded in this process, logged and not checked (`check_nccl_installation`)."""
    nccl = load_nccl_bindings()
    import cupy

    found = NcclInstallation(
        cupy_version=str(cupy.__version__),
        cupy_cuda=cuda_of_cupy(),
        torch_cuda=cuda_of_torch(),
        cupy_nccl_version=int(nccl.get_build_version()),
        nccl_version=nccl_version(),
        paths=loaded_library_paths("libnccl"),
    )
    log.info("%s", found)
    return found


def loaded_library_paths(name: str) -> tuple[str, ...]:
    """Paths of the shared libraries in this process whose file name begins with `name`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return tuple(sorted(path for path in paths if Path(path).name.startswith(name)))


def check_nccl_installation(found: NcclInstallation, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `ClusterError` for an NCCL that cannot do what the transport needs, whatever the device."""
    there = cupy_packages()
    if len(there) > 1:
        raise ClusterError(
            f"{' and '.join(there)} are installed side by side, and overwrite each other's files",
            cure=f"pip uninstall -y {' '.join(there)} && {cupy_install_command(found.torch_cuda)}",
        )
    if int(found.cupy_version.partition(".")[0]) < OLDEST_CUPY:
        raise ClusterError(
            f"CuPy {found.cupy_version} is too old, {OLDEST_CUPY} is the oldest that works",
            cure=cupy_install_command(found.torch_cuda),
        )
    if found.nccl_version < OLDEST_NCCL:
        raise ClusterError(
            f"NCCL {format_nccl_version(found.nccl_version)} ({', '.join(found.paths)}) is too old, "
            f"{format_nccl_version(OLDEST_NCCL)} is the oldest that works",
            cure="install a newer PyTorch, which brings its own, or `pip install -U nvidia-nccl-cu13` (-cu12 for CUDA 12)",
        )
    if environment.get("NCCL_COMM_BLOCKING") == "0":
        raise ClusterError(
            "NCCL_COMM_BLOCKING=0 asks for communicators that answer 'in progress', which CuPy does not understand",
            cure="unset NCCL_COMM_BLOCKING for the workers",
        )
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        raise ClusterError(
            "CUDA_LAUNCH_BLOCKING makes a worker stand still in every send until it is received, of which the receiver then "
            "never hears",
            cure="unset CUDA_LAUNCH_BLOCKING for the workers",
        )


def check_cuda_versions(found: NcclInstallation) -> None:
    """Raise `ClusterError` when CuPy and PyTorch are for different CUDA versions, or PyTorch for none."""
    if found.torch_cuda is None:
        raise ClusterError(
            f"PyTorch {torch.__version__} was built without CUDA, so that it has no tensors for NCCL",
            cure="install a CUDA build of PyTorch (pip install torch), or plan for CPU workers",
        )
    check_same_cuda_version(found.torch_cuda, found.cupy_cuda, found.cupy_version)


def check_same_cuda_version(torch_cuda: int | None, cupy_cuda: int, cupy: str) -> None:
    """Raise `ClusterError` when CuPy and PyTorch are for different CUDA versions."""
    if torch_cuda not in (None, cupy_cuda):
        raise ClusterError(
            f"PyTorch is for CUDA {torch_cuda}, CuPy {cupy} for CUDA {cupy_cuda}: two libraries of one name",
            cure=f"pip uninstall -y cupy-cuda{cupy_cuda}x && {cupy_install_command(torch_cuda)}",
        )


def check_gpu_count(wanted: int, there: int) -> None:
    """Raise `ClusterError` when there are fewer GPUs than a plan has workers."""
    workers = count_noun(wanted, "GPU worker")
    if there == 0:
        raise ClusterError(
            f"the plan has {workers}, and there is no GPU",
            cure="join a cluster that has GPUs (nvidia-smi shows those of a node), or set device: cpu",
        )
    if there < wanted:
        raise ClusterError(
            f"the plan has {workers}, and there {'is' if there == 1 else 'are'} {count_noun(there, 'GPU')}",
            cure=f"set plan.stages, plan.replicas and plan.shards so that they multiply to at most {there}, or add nodes",
        )


# -- communicators


def new_unique_id() -> bytes:
    """A new unique id (128 bytes), for one communicator; this process listens until all its ranks have connected."""
    nccl = load_nccl_bindings()
    with translated(nccl, "making an id"):
        return bytes(nccl.get_unique_id())


class PeerEnded(CommError):
    """A peer's end of a communicator is gone. Why, the peer knows, or the control transport, which then has lost it."""


REASON_S = 1.0
"""How long to wait for the reason of a peer whose end of a communicator is gone: NCCL may notice before its words come."""


def status_missing_in_cupy(error: KeyError) -> int:
    """The status that NCCL has answered with, if CuPy has failed because its table lacks it; raises any other error again."""
    (status,) = error.args
    if type(status) is not int:
        raise error
    return status


@contextmanager
def translated(nccl: Any, what: str) -> Iterator[None]:
    """Raise `CommError` for whatever NCCL fails with inside; `nccl` is CuPy's module."""
    cure = "abort this group; NCCL_DEBUG=WARN in the workers' environment makes NCCL say more"
    try:
        yield
    except nccl.NcclError as error:
        kind = PeerEnded if error.status == REMOTE_ERROR else CommError
        raise kind(f"NCCL failed at {what}: {error}", cure=cure) from error
    except KeyError as error:
        status = status_missing_in_cupy(error)
        if status != IN_PROGRESS:
            raise CommError(
                f"NCCL failed at {what}: it answers with status {status}, which this CuPy does not know", cure=cure
            ) from error
        raise CommError(
            f"NCCL failed at {what}: it answers 'in progress', as communicators do that do not block, for which CuPy has "
            "no call",
            cure="take NCCL_COMM_BLOCKING=0 out of the workers' environment, of /etc/nccl.conf and of ~/.nccl.conf",
        ) from error


class NcclCommunicator:
    """One NCCL communicator. Calls only enqueue work on `stream` (a number); the caller keeps the memory.

    Not thread-safe but for `abort`. Raises `CommError` with NCCL's own text.
    """

    def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
        """Blocks until all ranks have connected, however long that takes."""
        self._nccl = load_nccl_bindings()
        self._comm = self._nccl.NcclCommunicator.__new__(self._nccl.NcclCommunicator)
        with translated(self._nccl, "making a communicator"):
            try:
                self._comm.__init__(size, unique_id, rank)
            except BaseException:
                self._comm.abort()  # else Python's collector destroys what there is of it, which may wait for the others
                raise

    @contextmanager
    def group_calls(self) -> Iterator[None]:
        """Enqueue the calls made inside as one: they make progress together, and cannot deadlock with each other."""
        with translated(self._nccl, "a group of operations"):
            self._nccl.groupStart()
        try:
            yield
        except BaseException:
            with suppress(CommError), translated(self._nccl, "a group of operations"):
                self._nccl.groupEnd()  # which says once more that a call has failed
            raise
        with translated(self._nccl, "a group of operations"):
            self._nccl.groupEnd()

    def send(self, pointer: int, nbytes: int, peer: int, stream: int) -> None:
        """Send bytes to rank `peer` of this communicator."""
        with translated(self._nccl, "a send"):
            self._comm.send(pointer, nbytes, BYTE, peer, stream)

    def recv(self, pointer: int, nbytes: int, peer: int, stream: int) -> None:
        """Receive bytes from rank `peer` of this communicator."""
        with translated(self._nccl, "a receive"):
            self._comm.recv(pointer, nbytes, BYTE, peer, stream)

    def all_reduce(self, pointer: int, count: int, dtype: torch.dtype, stream: int) -> None:
        """Sum in place, in an order of NCCL's own."""
        with translated(self._nccl, "an all-reduce"):
            self._comm.allReduce(pointer, pointer, count, NCCL_DTYPES[dtype], SUM, stream)

    def reduce_scatter(self, source: int, out: int, count: int, dtype: torch.dtype, stream: int) -> None:
        """`out` [count] = the sum of all ranks' parts for this rank in `source` [size * count], in an order of NCCL's own."""
        with translated(self._nccl, "a reduce-scatter"):
            self._comm.reduceScatter(source, out, count, NCCL_DTYPES[dtype], SUM, stream)

    def all_gather(self, mine: int, out: int, nbytes: int, stream: int) -> None:
        """`out` [size * nbytes] = all ranks' `mine` [nbytes]."""
        with translated(self._nccl, "an all-gather"):
            self._comm.allGather(mine, out, nbytes, BYTE, stream)

    def broadcast(self, pointer: int, nbytes: int, root: int, stream: int) -> None:
        """Copy the bytes of rank `root` of this communicator to all ranks, in place."""
        with translated(self._nccl, "a broadcast"):
            self._comm.broadcast(pointer, pointer, nbytes, BYTE, root, stream)

    def raise_background_error(self) -> None:
        """Raise an error that NCCL has found in the background. That something is in progress there is none."""
        with translated(self._nccl, "work in the background"):
            try:
                self._comm.check_async_error()
            except KeyError as error:
                if status_missing_in_cupy(error) != IN_PROGRESS:
                    raise

    def destroy(self) -> None:
        """Finish what is enqueued and free the communicator; waits forever for a peer that is gone: `abort` then."""
        with translated(self._nccl, "freeing a communicator"):
            self._comm.destroy()

    def abort(self) -> None:
        """Stop what is enqueued and free the communicator, from any thread. Later garbage collection does nothing more."""
        with translated(self._nccl, "an abort"):
            self._comm.abort()
