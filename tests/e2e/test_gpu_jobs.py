"""Jobs for GPUs, as far as the client and the pool go, without a cluster."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ugly_models
from helpers.tiny_job import write_job

from raypar.actors import worker_pool as pool_module
from raypar.actors.cluster_info import ClusterCapacity
from raypar.actors.first_placement import reserve_all_workers
from raypar.actors.numerics_fingerprint import describe_fingerprint_differences, fingerprint_worker_numerics
from raypar.actors.ray_connection import RayConnection, connect_ray
from raypar.actors.worker_pool import WorkerPool
from raypar.cli import main
from raypar.comm.tcp.handshake import RunCredential
from raypar.elastic.placement_constraints import PlacementConstraints
from raypar.errors import CheckpointError, ClusterError, ConfigError
from raypar.job.contract import contract_of_job
from raypar.plan import ParallelPlan
from raypar.worker.backend import GpuBackend
from raypar.worker.checkpoint.check_job_changes import changes_at_resume
from raypar.worker.checkpoint.checkpoint_files import Manifest
from raypar.worker.checkpoint.contract_comparison import list_contract_differences


def joined(monkeypatch, cluster):
    """A cluster with so much, which nobody may ask for anything more; what was asked of it."""
    asked = []

    @contextlib.contextmanager
    def connected(address, workers, folder, nodes, gpus):
        asked.append(gpus)
        yield RayConnection("own", "a local Ray cluster", "nowhere:0")

    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", connected)
    monkeypatch.setattr("raypar.actors.cluster_info.cluster_capacity", lambda: cluster)
    monkeypatch.chdir(Path(__file__).parents[1])
    return asked


@pytest.mark.parametrize(
    "cluster, said",
    [
        (ClusterCapacity(1, 8, 8, None), "the plan has 2 GPU workers, and there is no GPU"),
        (ClusterCapacity(1, 8, 8, None, gpus=1), "the plan has 2 GPU workers, and there is 1 GPU"),
        (ClusterCapacity(1, 8, 8, 8, gpus=0, max_gpus=1), "the plan has 2 GPU workers, and there is 1 GPU"),
    ],
)
def test_a_plan_for_more_gpus_than_there_can_be_ends_before_anything_is_started(cluster, said, tmp_path, monkeypatch, capfd):
    asked = joined(monkeypatch, cluster)
    status = main(["train", str(write_job(tmp_path)), "--set", "device=gpu", "--set", "plan.replicas=1"])
    err = capfd.readouterr().err
    assert status == 1 and asked == [True]
    assert said in err and "cure: " in err and err.count("error: ") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "replicas, elastic, said",
    [
        (15, False, "and there are 4 GPUs"),  # 30 communicators; that is not what is wrong
        (16, False, "(stage 0, replica 0) would use 32 NCCL communicators"),
        (11, True, "and there are 4 GPUs"),
        (12, True, "on 23 at a time, 8 more being kept for state that changes hands"),
    ],
)
def test_a_plan_with_more_communicators_than_a_gpu_works_on_ends_before_a_cluster_is_looked_for(
    replicas, elastic, said, tmp_path, monkeypatch, capfd
):
    asked = joined(monkeypatch, ClusterCapacity(1, 64, 64, None, gpus=4))
    sets = ["device=gpu", "plan.stages=2", f"plan.replicas=[1,{replicas}]", "microbatches=16", "batch_size=16"]
    sets += ["elastic=true"] * elastic
    assert main(["train", str(write_job(tmp_path)), *(word for one in sets for word in ("--set", one))]) != 0
    err = capfd.readouterr().err
    assert said in err and "cure: " in err and err.count("error: ") == 1
    assert bool(asked) == ("GPUs" in said)


def test_the_request_says_what_each_worker_has_and_how_its_process_is_started(tmp_path, monkeypatch):
    """And a job for CPUs asks for nothing of the kind."""
    seen = []

    def follow(request, tell, heard):
        seen.append(request)
        raise ClusterError("enough")

    monkeypatch.setattr("raypar.actors.driver_client.follow_run", follow)
    for device, gpus in (("gpu", 2), ("cpu", 0)):
        joined(monkeypatch, ClusterCapacity(1, 8, 8, None, gpus=gpus))
        sets = [f"device={device}", "plan.replicas=1", "elastic=true"]
        assert main(["train", str(write_job(tmp_path)), *(word for one in sets for word in ("--set", one))]) == 1
    on_gpu, on_cpu = seen
    assert on_gpu.placement.gpus == 1 and on_gpu.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert on_gpu.environment["CUDA_MODULE_LOADING"] == "EAGER" and on_gpu.environment["NCCL_MAX_CTAS"] == "4"
    assert on_gpu.environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "0", "each sees its own GPU only"
    assert on_gpu.environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and on_gpu.contract["device"] == "gpu"
    assert {key: getattr(on_gpu.policy, key) for key in GpuBackend.deadlines} == GpuBackend.deadlines
    assert on_cpu.placement.gpus == 0 and not on_cpu.environment and on_cpu.policy.adopt_s < GpuBackend.deadlines["adopt_s"]


def test_several_local_nodes_cannot_share_the_gpus_of_a_machine(tmp_path):
    with pytest.raises(ConfigError, match="would each offer all GPUs"), connect_ray(None, 4, tmp_path, nodes=2, gpus=True):
        pass


@pytest.fixture
def placed(monkeypatch):
    """What the pool asks Ray for."""
    asked = []

    def group(bundles, **more):
        asked.append(bundles)
        return SimpleNamespace(id=SimpleNamespace(hex=lambda: str(len(asked))))

    made = SimpleNamespace(options=lambda **options: asked.append(options) or SimpleNamespace(remote=lambda *args: "worker"))
    context = SimpleNamespace(runtime_env={"env_vars": {"NCCL_MAX_CTAS": "16"}})
    monkeypatch.setattr(pool_module, "placement_group", group)
    monkeypatch.setattr(pool_module, "make_worker_actor_class", lambda: made)
    monkeypatch.setattr(pool_module, "max_workers_per_node", lambda gpus: 8)
    monkeypatch.setattr(pool_module, "PlacementGroupSchedulingStrategy", lambda *args, **more: "there")
    monkeypatch.setattr(pool_module, "placement_group_table", lambda: {str(n): {"state": "CREATED"} for n in range(99)})
    monkeypatch.setattr(pool_module.ray, "get_runtime_context", lambda: context)
    return asked


def test_a_worker_on_a_gpu_has_a_bundle_with_one_and_a_process_of_its_own(placed):
    pool = WorkerPool(
        RunCredential.fresh("run"), PlacementConstraints(gpus=1), {"NCCL_MAX_CTAS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    )
    asyncio.run(reserve_all_workers(pool, ParallelPlan.of((1,), shards=(2,), layers=2), 1.0, print))
    assert placed == [[{"CPU": 1, "GPU": 1}] * 2], "the shards of a seat together"
    pool.start_worker(0, b"", None, 60.0)
    options = placed[-1]
    assert options["num_gpus"] == 1 and options["num_cpus"] == 1
    assert options["runtime_env"] == {"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_MAX_CTAS": "16"}}


def test_a_worker_on_a_cpu_asks_for_nothing_more(placed):
    pool = WorkerPool(RunCredential.fresh("run"))
    asyncio.run(reserve_all_workers(pool, ParallelPlan.mesh(layers=2), 1.0, print))
    pool.start_worker(0, b"", None, 60.0)
    assert placed[0] == [{"CPU": 1}] and not {"num_gpus", "runtime_env"} & set(placed[1])


def test_a_checkpoint_of_another_kind_of_device_is_refused():
    job = ugly_models.job()
    plain = contract_of_job(job)
    old = {key: value for key, value in plain.items() if key != "device"}
    for contract in (plain, old):
        manifest = Manifest(Path("step_1"), 1, contract, (), {}, {})
        assert not list_contract_differences(manifest, job)
        with pytest.raises(CheckpointError, match="device was 'cpu', is 'gpu'"):
            changes_at_resume(manifest, job.replace(device="gpu"))


def test_a_gpu_is_part_of_what_a_worker_computes_with():
    here = fingerprint_worker_numerics(1, torch.device("cpu"))
    assert "gpu" not in here and not describe_fingerprint_differences([here, here])
    there = here | {"gpu": "NVIDIA A", "kernels": "1"}
    assert describe_fingerprint_differences([there, there | {"gpu": "NVIDIA B"}]) == [
        "gpu: worker 0 NVIDIA A, worker 1 NVIDIA B"
    ]
