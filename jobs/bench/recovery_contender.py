"""One process of a contender of the recovery bench: `python recovery_contender.py KIND --options JSON`.

`ray-train` and `raypar` are drivers on a Ray cluster that runs already, `torchft` is a replica group under torchrun, and
`cluster` is a Ray of several raylets that grows on request. Options that all have: `diary`, a folder (`recovery_work.Diary`).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

START_LIMIT_S = 60.0


def ray_train(address: str, diary: str, storage: str, workers: list[int], steps: int, every: int, resize_s: float) -> None:
    """Ray Train's elastic trainer, as its documentation has it: DDP, a checkpoint every few steps, taken up after a restart."""
    import ray
    from ray.train import (
        Checkpoint,
        CheckpointConfig,
        FailureConfig,
        RunConfig,
        ScalingConfig,
        get_checkpoint,
        get_context,
        report,
    )
    from ray.train.torch import TorchTrainer, prepare_model

    def train() -> None:
        import recovery_work as work
        import torch

        context, told = get_context(), work.Diary(diary)
        rank, world = context.get_world_rank(), context.get_world_size()
        plain, batches = work.training((rank, world))
        optimizer = torch.optim.AdamW(plain.parameters(), **work.OPTIMIZER)
        first, saved = 0, get_checkpoint()
        if saved is not None:
            with saved.as_directory() as folder:
                state = torch.load(Path(folder) / "state.pt")
            plain.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["steps"]
        model = prepare_model(plain, parallel_strategy="ddp")
        for step in range(first, steps):
            work.loss(model, batches.get(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            told.step(step + 1, workers=world, samples=work.WORK.batch_size)
            if (step + 1) % every == 0:
                with tempfile.TemporaryDirectory() as folder:
                    if rank == 0:
                        state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "steps": step + 1}
                        torch.save(state, Path(folder) / "state.pt")
                    report({"step": step + 1}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
        if rank == 0:
            told.note("end", weights_sha256=work.weights_sha256(plain))

    ray.init(address=address, logging_level=logging.ERROR)
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=(workers[0], workers[1]), elastic_resize_monitor_interval_s=resize_s),
        run_config=RunConfig(
            name="recovery",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=5),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    ray.shutdown()


def torchft(diary: str, steps: int, groups: int, ready: int, ddp: bool) -> None:
    """One replica group of one process, as in torchft's `train_ddp.py`; with `ddp` false gradients go through
    `Manager.allreduce`. The samples of a step are those of its number: a step that is tried again loses none. All wait for the
    first `ready` groups, so that none trains before they are there.
    """
    import recovery_work as work
    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    told, group = work.Diary(diary), int(os.environ["REPLICA_GROUP_ID"])
    plain, batches = work.training((group, groups))

    def load(state: dict[str, Any]) -> None:
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    pg = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=pg,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"recovery_{group}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(pg, timeout=timedelta(seconds=10), device=torch.device("cpu")),
    )
    model = DistributedDataParallel(manager, plain) if ddp else plain
    optimizer = Optimizer(manager, torch.optim.AdamW(plain.parameters(), **work.OPTIMIZER))
    (Path(diary) / f"ready.{group}").touch()
    deadline = time.monotonic() + START_LIMIT_S
    while len(list(Path(diary).glob("ready.*"))) < ready and time.monotonic() < deadline:
        time.sleep(0.02)
    while (step := manager.current_step()) < steps:
        optimizer.zero_grad()
        work.loss(model, batches.get(step)).backward()
        if not ddp:
            gradients = [p.grad for p in plain.parameters() if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            manager.allreduce(flat).wait()
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        participants = manager.num_participants()
        optimizer.step()
        if manager.current_step() > step:
            told.step(manager.current_step(), workers=participants, samples=participants * batches.mine)
    told.note("end", weights_sha256=work.weights_sha256(plain))
    manager.shutdown(wait=False)


def raypar(address: str, diary: str, job: str) -> None:
    """A job file, on that cluster; what the driver tells is written down when it is heard here."""
    import recovery_work as work

    from raypar.job.read_job import load_job
    from raypar.launch import train_job_in_new_folder
    from raypar.record.events import Event

    told = work.Diary(diary)

    def tell(event: Event) -> None:
        facts = event.facts()
        told.note(facts.pop("kind"), **facts)

    result = train_job_in_new_folder(load_job(Path(job)), tell, address=address)
    told.note("end", weights_sha256=result.weights_sha256)


def cluster(address: str, head: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
    """A head without CPUs and some nodes, with Ray's default settings. Connected to the bench at `address`, which may ask
    for ("add", arguments of a node) or ("reap", raylet pid), whose process has been killed; ends when the bench is gone."""
    from ray.cluster_utils import Cluster

    connection = Client(address, "AF_UNIX")
    made = Cluster(initialize_head=True, head_node_args=head)
    raylets: dict[int, Any] = {}

    def add(arguments: dict[str, Any]) -> int:
        process = made.add_node(**arguments).all_processes["raylet"][0].process
        raylets[process.pid] = process
        return int(process.pid)

    connection.send((made.address, [add(node) for node in nodes]))
    while True:
        try:
            command, value = connection.recv()
        except (EOFError, OSError):
            break
        if command == "add":
            connection.send(add(value))
        else:
            # The parent must take note of the death: a worker whose raylet is a zombie does not end.
            connection.send(raylets[value].wait(10))
    for node in list(made.worker_nodes):
        node.kill_all_processes(check_alive=False, allow_graceful=False)
    made.head_node.kill_all_processes(check_alive=False, allow_graceful=False)


def main() -> None:
    kinds = {"ray-train": ray_train, "torchft": torchft, "raypar": raypar, "cluster": cluster}
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=list(kinds))
    parser.add_argument("--options", type=json.loads, default={})
    given = parser.parse_args()
    kinds[given.kind](**given.options)


if __name__ == "__main__":
    main()
