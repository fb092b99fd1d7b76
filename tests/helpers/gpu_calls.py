"""Workers on GPUs without Ray and without GPUs: the actor's own code in a process, CuPy over the stand-in, host memory.

Calls of worker processes (`helpers.processes`); those of `ctl` are made in the control thread.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any

import torch
from helpers import standin
from helpers.standin import Setting
from helpers.transport_cases import CREDENTIAL

State = dict[str, Any]
ON_DEVICE = frozenset({torch.float32})
"""What the jobs compute with; all else is the host's, as it would be beside a GPU."""


def host_device() -> standin.HostDevice:
    """For `jobs/bench/gpu.py`: what stands for this process's GPU."""
    standin.load()
    return standin.HostDevice(f"GPU of process {os.getpid()}", only=ON_DEVICE)


def start(state: State, index: int, run: str, spec: bytes, gpu: str = "") -> Any:
    """As the actor is created and asked for its first call; its address. `gpu`: the one it has, if not one of its own."""
    from raypar.comm.nccl import device as nccl_device

    standin.load()
    device = standin.HostDevice(gpu or f"GPU {index}", only=ON_DEVICE)
    state["device"] = device
    nccl_device.CudaDevice = lambda: device  # type: ignore[assignment, misc]
    if "actor" in state:
        state.pop("actor").close()
    return hello(state, index, run, spec).address


def start_without(state: State, index: int, run: str, spec: bytes, there: dict[str, Any]) -> Any:
    """The same on the machine as it is, but for what `there` says; what it failed with."""
    from raypar.comm.nccl import bindings

    os.environ.update(there.get("environment", {}))
    if there.get("cupy", True):
        library = standin.load()
        if "version" in there:
            library.standin_set(Setting.VERSION, there["version"])
    else:
        sys.modules["cupy"] = None  # type: ignore[assignment]
    if "torch_cuda" in there:
        bindings.cuda_of_torch = lambda: there["torch_cuda"]
    hello(state, index, run, spec)
    return call(state, index, "hello")


def hello(state: State, index: int, run: str, spec: bytes) -> Any:
    """Create the actor."""
    import ray

    from raypar.actors.worker_actor import WorkerActor
    from raypar.comm.tcp.handshake import RunCredential

    class Context:
        def get_node_id(self) -> str:
            return f"node {index}"

    ray.get_runtime_context = Context
    state["actor"] = WorkerActor(RunCredential(run, CREDENTIAL.secret), index, spec, "127.0.0.1", 3600.0)
    return state["actor"].hello()


def call(state: State, index: int, method: str, *args: Any) -> Any:
    """Any method; a failure is returned as (kind, class, text)."""
    from raypar.actors.messages import CallFailure

    answer = getattr(state["actor"], method)(*args)
    return (answer.kind, type(answer.error).__name__, str(answer.error)) if isinstance(answer, CallFailure) else answer


def ctl(state: State, method: str, *args: Any) -> Any:
    """The same, beside another call."""
    return call(state, -1, method, *args)


def adopt(state: State, index: int, generation: int, parts: dict[int, Any], addresses: list[str], deadline_s: float) -> Any:
    """One's own of `parts`."""
    return call(state, index, "adopt", generation, pickle.dumps(parts[index]), f"worker {index}", addresses, deadline_s)


def die_inside(state: State, index: int, operation: str) -> None:
    """The next call of that operation posts it; then this process is killed."""
    transport = state["actor"].core.transport
    post = getattr(transport, operation)

    def posted(*args: Any, **more: Any) -> Any:
        post(*args, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(transport, operation, posted)


def cut_everything(state: State, index: int) -> None:
    """However small, what can be cut travels in parts between nodes."""
    from raypar.plan import bundle_parts

    bundle_parts.LEAST_BYTES_IN_PARTS = 1


def fault(state: State, index: int, setting: Setting, value: int) -> None:
    """In this process's NCCL."""
    standin.load().standin_set(setting, value)


def free_before_computing(state: State, index: int) -> None:
    """Memory is short until `frees` is asked: each forward and backward of a stage begins with a `cudaFree`."""
    from raypar.worker.stage.stage import Stage

    def after_a_free(inner: Any) -> Any:
        def computed(*args: Any, **more: Any) -> Any:
            state["device"].free_cached()
            state["frees"] += 1
            return inner(*args, **more)

        return computed

    state["frees"] = 0
    for name in ("_run_forward", "_backward"):
        state.setdefault("replaced", {})[name] = getattr(Stage, name)
        setattr(Stage, name, after_a_free(getattr(Stage, name)))


def frees(state: State, index: int) -> int:
    """How often there was one; there are none from here on."""
    from raypar.worker.stage.stage import Stage

    for name, inner in state.pop("replaced").items():
        setattr(Stage, name, inner)
    return int(state["frees"])


def patience(state: State, index: int, seconds: float) -> None:
    """How long NCCL may take to end its communicators."""
    from raypar.comm.nccl import transport as nccl_transport

    nccl_transport.END_S = seconds


def slow_to_end(state: State, index: int, seconds: float) -> None:
    """After so many seconds an abort returns, and NCCL goes on ending."""
    from raypar.comm.nccl import transport as nccl_transport

    nccl_transport.ABORT_S = seconds


def communicator_calls(state: State, index: int) -> dict[str, int]:
    """Communicators of the present generation -> operations so far."""
    transport = state["actor"].core.transport
    return {stream.name: stream.operation_count for stream in transport._streams.values()}


def launch_order(state: State, index: int) -> list[str]:
    """The communicators of the present generation, as the device was given their operations, from the first one on."""
    transport = state["actor"].core.transport
    names = {standin.communicator_number(stream.communicator): stream.name for stream in transport._streams.values()}
    return [names[number] for number in state["device"].launches() if number in names]


def alive(state: State, index: int) -> int:
    """Communicators that this process's NCCL still has."""
    return standin.count(standin.Count.ALIVE)


def parameters(state: State, index: int) -> dict[str, Any]:
    """All that this worker holds, as numpy arrays."""
    stages = state["actor"].core.stages.values()
    return {name: p.detach().numpy().copy() for stage in stages for name, p in stage.parameters.items()}
