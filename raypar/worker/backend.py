"""What differs between the kinds of device that a job may compute on: one object per kind, found by the job's `device`."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from raypar.comm.buffer_pool import CPU
from raypar.comm.nccl import device as nccl_device
from raypar.comm.nccl.endpoint import NcclEndpoint
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import RunCredential
from raypar.comm.transport import CommunicatorKey, WorkerEndpoint
from raypar.errors import ClusterError, ConfigError, PlanError
from raypar.job import Job, PrecisionConfig
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.plan.pieces import AdoptPlanCommand
from raypar.plan.stage_plan import GATHER_SPANS
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.schedule.program_assignment import ProgramAssignment
from raypar.worker.layer_precisions import layer_precision_of
from raypar.worker.process.gpu_setup import GPU_WORKER_ENVIRONMENT, configure_torch
from raypar.worker.required_communicators import check_communicator_limit, nccl_environment, required_communicators


class DeviceBackend(ABC):
    """One kind of device: what the launcher asks before a run, and how a worker opens its device and its endpoint.

    The launcher uses the attributes, `check_plan` and `environment`. A worker calls `open_device` and
    `check_precision` once, then `listen` once, then `communicators` for every generation.
    """

    gpus_per_worker: int
    """GPUs that Ray has to reserve for each worker."""
    deadlines: Mapping[str, float]
    """Fields of `elastic.run_policy.RunPolicy`, in seconds, for which this kind of device has values of its own."""
    plan_notes: tuple[str, ...]
    """Lines shown with the plan."""

    @abstractmethod
    def check_plan(
        self, spec: Job, graph: Graph, plan: ParallelPlan, parts: Sequence[ProgramAssignment], *, elastic: bool
    ) -> None:
        """Raise `PlanError` for a plan that workers on this kind of device cannot carry out. `parts`: assignments by rank."""

    @abstractmethod
    def environment(self, spec: Job, graph: Graph, plan: ParallelPlan, parts: Sequence[ProgramAssignment]) -> Mapping[str, str]:
        """Environment variables that the workers' processes are started with, for a run that begins with this plan."""

    @abstractmethod
    def open_device(self, *, exact: bool) -> torch.device:
        """Prepare this process to compute; return the device of its tensors. Raises `ClusterError` when there is none.

        `exact`: the same computation must always give the same bits.
        """

    @abstractmethod
    def check_precision(self, precision: PrecisionConfig | None) -> None:
        """Raise `ClusterError` if the device cannot compute in the job's precision; after `open_device`."""

    @abstractmethod
    def listen(self, host: str, credential: RunCredential) -> WorkerEndpoint:
        """An endpoint that listens on `host`, and whose transports move tensors of the device; after `open_device`."""

    @abstractmethod
    def communicators(
        self, order: AdoptPlanCommand, rank: int, spec: Job, layout: Callable[[int], TensorParallelLayout]
    ) -> frozenset[CommunicatorKey]:
        """The communicators that `WorkerEndpoint.connect` has to make for this rank in the generation of `order`.

        `layout`: see `required_communicators`.
        """


class CpuBackend(DeviceBackend):
    """Workers compute on processors and talk over TCP."""

    gpus_per_worker = 0
    deadlines: Mapping[str, float] = {}
    plan_notes = ()

    def check_plan(
        self, spec: Job, graph: Graph, plan: ParallelPlan, parts: Sequence[ProgramAssignment], *, elastic: bool
    ) -> None:
        """See `DeviceBackend.check_plan`: sockets carry any plan."""

    def environment(self, spec: Job, graph: Graph, plan: ParallelPlan, parts: Sequence[ProgramAssignment]) -> Mapping[str, str]:
        """See `DeviceBackend.environment`: none, so that Ray's own processes will do."""
        return {}

    def open_device(self, *, exact: bool) -> torch.device:
        """See `DeviceBackend.open_device`. Products on a CPU have the same bits at all times."""
        return CPU

    def check_precision(self, precision: PrecisionConfig | None) -> None:
        """See `DeviceBackend.check_precision`."""
        lower = layer_precision_of(precision)
        if lower is not None and not lower.cpu_supports():
            raise ClusterError(
                f"PyTorch {torch.__version__} cannot compute in {lower.dtype_name} on the processor of {socket.gethostname()}",
                cure='use a newer PyTorch, or set precision: {"compute": "bf16"}, or leave precision out of the job',
            )

    def listen(self, host: str, credential: RunCredential) -> WorkerEndpoint:
        """See `DeviceBackend.listen`."""
        return TcpEndpoint.listen(host, credential=credential)

    def communicators(
        self, order: AdoptPlanCommand, rank: int, spec: Job, layout: Callable[[int], TensorParallelLayout]
    ) -> frozenset[CommunicatorKey]:
        """See `DeviceBackend.communicators`: none."""
        return frozenset()


def refuse_gathers_on_request(plan: ParallelPlan) -> None:
    """Raise `PlanError` for a plan whose replicas ask each other for parameters: these messages lie in host memory."""
    spans = {stage.gather_in_effect: index for index, stage in enumerate(plan.stages)}
    for span in GATHER_SPANS[1:]:
        if span in spans:
            raise PlanError(
                f"plan.gather: {span} (stage {spans[span]}) does not work on GPUs yet: replicas ask each other for parameters "
                "by messages in host memory",
                cure="set plan.gather: step, or device: cpu",
            )


class GpuBackend(DeviceBackend):
    """Every worker computes on a GPU of its own; device memory moves by NCCL, host memory over TCP."""

    gpus_per_worker = 1
    deadlines: Mapping[str, float] = {"adopt_s": 150.0, "status_s": 8.0, "abort_s": 8.0, "move_s": 10.0}
    """A generation's communicators have to be made (`comm.nccl.endpoint.MAKING_S`), and the last one's aborted
    (`comm.nccl.transport.ABORT_S`, and `END_S` before a plan is adopted). Nobody has measured how long that takes on a GPU."""
    plan_notes = ("times are of this machine's processors, not of GPUs",)

    def __init__(self) -> None:
        self._device: nccl_device.Device | None = None
        """This process's GPU, once it is open."""
        self._exact = True
        """Whether equal computations must give equal bits (`open_device`)."""

    def check_plan(
        self, spec: Job, graph: Graph, plan: ParallelPlan, parts: Sequence[ProgramAssignment], *, elastic: bool
    ) -> None:
        """See `DeviceBackend.check_plan`: a GPU works on a limited number of communicators at a time, and none of them answers
        requests."""
        refuse_gathers_on_request(plan)
        check_communicator_limit(spec, graph, plan, parts, elastic=elastic)

    def environment(self, spec: Job, graph: Graph, plan: ParallelPlan, parts: Sequence[ProgramAssignment]) -> Mapping[str, str]:
        """See `DeviceBackend.environment`."""
        return {**nccl_environment(spec, graph, plan, parts), **GPU_WORKER_ENVIRONMENT}

    def open_device(self, *, exact: bool) -> torch.device:
        """See `DeviceBackend.open_device`: the first GPU that this process sees; Ray shows it only its own."""
        self._device, self._exact = nccl_device.CudaDevice(), exact
        configure_torch(self._device.device, exact=exact)
        return self._device.device

    def check_precision(self, precision: PrecisionConfig | None) -> None:
        """See `DeviceBackend.check_precision`."""
        assert self._device is not None, "open_device comes first"
        lower = layer_precision_of(precision)
        if lower is None or precision is None:
            return
        with torch.cuda.device(self._device.device):
            supported = lower.gpu_supports()
        if not supported:
            key = "compute" if precision.compute is not None else "parameters"
            raise ClusterError(
                f"{self._device.name} on {socket.gethostname()} cannot compute in {lower.dtype_name} "
                f"(precision.{key} is {getattr(precision, key)})",
                cure=f"use GPUs of {lower.gpu_needed}, or leave precision out of the job",
            )

    def listen(self, host: str, credential: RunCredential) -> WorkerEndpoint:
        """See `DeviceBackend.listen`."""
        assert self._device is not None, "open_device comes first"
        return NcclEndpoint.listen(host, self._device, credential=credential, exact=self._exact)

    def communicators(
        self, order: AdoptPlanCommand, rank: int, spec: Job, layout: Callable[[int], TensorParallelLayout]
    ) -> frozenset[CommunicatorKey]:
        """See `DeviceBackend.communicators`."""
        return required_communicators(order, rank, spec, layout)


BACKENDS: Mapping[str, type[DeviceBackend]] = {"cpu": CpuBackend, "gpu": GpuBackend}
"""A job's `device` -> its backend."""


def make_backend(device: str) -> DeviceBackend:
    """A new backend for a job's `device`. Raises `ConfigError` for a name that is not in `BACKENDS`."""
    if device not in BACKENDS:
        raise ConfigError(f"device {device!r} is not known", cure=f"set device to one of {', '.join(BACKENDS)}")
    return BACKENDS[device]()
