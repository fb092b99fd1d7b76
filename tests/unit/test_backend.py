"""Backends: what the launcher and a worker ask of each kind of device, without one."""

import ast
import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from helpers import ugly_models
from helpers.sources import PACKAGE, nodes_of, source_files

from raypar.comm.buffer_pool import CPU
from raypar.comm.nccl.endpoint import NcclEndpoint
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import RunCredential
from raypar.comm.transport import WorkerEndpoint
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import ClusterError, ConfigError
from raypar.job import Job, PrecisionConfig
from raypar.job.precision_and_plan_names import PrecisionName
from raypar.plan import ParallelPlan
from raypar.plan.pieces import AdoptPlanCommand
from raypar.worker import backend as backend_module
from raypar.worker.backend import BACKENDS, make_backend
from raypar.worker.layer_precisions import AUTOCAST_PRECISIONS

JOB = ugly_models.job()


def test_a_worker_on_processors_needs_nothing_but_sockets():
    backend = make_backend("cpu")
    assert (backend.gpus_per_worker, dict(backend.deadlines), backend.plan_notes) == (0, {}, ())
    assert dict(backend.environment(JOB, None, ParallelPlan.mesh(layers=1), ())) == {}
    assert backend.open_device(exact=True) == CPU
    endpoint = backend.listen("127.0.0.1", RunCredential.fresh("a run"))
    try:
        assert (
            isinstance(endpoint, TcpEndpoint)
            and endpoint.address.startswith("127.0.0.1:")
            and endpoint.unended_communicators == ()
        )
        assert backend.communicators(AdoptPlanCommand(None, {}, 0), 0, None, None) == frozenset()
        alone = endpoint.connect(
            rank=0, size=1, addresses=[endpoint.address], generation=1, deadline_s=5.0, communicators=frozenset()
        )
        assert (alone.rank, alone.size, alone.generation) == (0, 1, 1)
        alone.close()
    finally:
        endpoint.close()


@pytest.mark.parametrize("endpoint", [TcpEndpoint, NcclEndpoint])
def test_every_endpoint_is_called_as_the_protocol_says(endpoint):
    for name in ("connect", "abort_connect", "close"):
        wanted, found = (inspect.signature(getattr(one, name)).parameters for one in (WorkerEndpoint, endpoint))
        assert list(found.values()) == list(wanted.values()), name
    assert all(hasattr(endpoint, name) for name in ("address", "unended_communicators"))


def test_a_gpu_run_reserves_gpus_and_waits_longer_for_communicators():
    backend = make_backend("gpu")
    assert backend.gpus_per_worker == 1
    environment = backend.environment(JOB, None, ParallelPlan.mesh(layers=1), ())
    assert environment["CUDA_MODULE_LOADING"] == "EAGER"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    defaults = RunPolicy(workers=1, job_steps=1)
    assert all(seconds > getattr(defaults, name) for name, seconds in backend.deadlines.items())


@pytest.mark.parametrize("exact", [True, False])
def test_a_job_that_gives_up_equal_bits_has_sums_added_by_nccl(exact, monkeypatch):
    device = SimpleNamespace(device=CPU, name="a GPU")
    monkeypatch.setattr(backend_module.nccl_device, "CudaDevice", lambda: device)
    backend = make_backend("gpu")
    backend.open_device(exact=exact)
    endpoint = backend.listen("127.0.0.1", RunCredential.fresh("a run"))
    try:
        assert endpoint._exact == exact
    finally:
        endpoint.close()


def test_every_name_of_a_precision_has_a_record():
    assert get_args(PrecisionName) == tuple(AUTOCAST_PRECISIONS)
    assert all(precision.dtype.is_floating_point for precision in AUTOCAST_PRECISIONS.values())


def test_a_gpu_without_bfloat16_is_refused_by_its_name_before_anything_is_computed(monkeypatch):
    class OldGpu:
        device, name = torch.device("cuda", 0), "cuda:0 (Tesla V100)"

    backend = make_backend("gpu")
    backend._device = OldGpu()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, found=supported: found)
        backend.check_precision(PrecisionConfig())
        if supported:
            backend.check_precision(PrecisionConfig(compute="bf16"))
    with pytest.raises(ClusterError, match=r"cuda:0 \(Tesla V100\) on .* cannot compute in bfloat16") as refused:
        backend.check_precision(PrecisionConfig(compute="bf16"))
    assert "compute capability 8.0" in refused.value.cure
    make_backend("cpu").check_precision(PrecisionConfig(compute="bf16"))


def test_a_device_that_no_backend_has_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="device 'tpu' is not known") as refused:
        make_backend("tpu")
    assert "cpu, gpu" in refused.value.cure
    assert Job.model_fields["device"].default in BACKENDS, "the default"


@pytest.mark.ci
def test_no_other_file_asks_which_kind_of_device_a_job_has():
    """Only the model of a job, what stands for its key (Trainer's argument, Ray Train's `use_gpu`, the cure
    for other words) and the registry name them;
    `gpu` is also a line of a worker's fingerprint."""
    names = {
        str(path.relative_to(PACKAGE))
        for path in source_files()
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and node.value == "gpu"
    }
    ways_in = {"job/job.py", "job/validation_errors.py", "trainer.py", "launch/convert_ray_train_configs.py"}
    assert names == {*ways_in, "worker/backend.py", "actors/numerics_fingerprint.py"}


@pytest.mark.parametrize("name", BACKENDS)
def test_an_endpoint_is_listened_on_only_once_its_device_is_open(name):
    backend = make_backend(name)
    if backend.gpus_per_worker:
        with pytest.raises(AssertionError, match="open_device comes first"):
            backend.listen("127.0.0.1", RunCredential.fresh("a run"))
    else:
        backend.open_device(exact=False)
        backend.listen("127.0.0.1", RunCredential.fresh("a run")).close()
