"""One process of a contender of `data_peers.py`: `python data_peers_runs.py KIND --folder F --processes N [--validate]`.

All train the same model: a weight for each sample, of which a sample that is trained on takes 1. So the weights that a run ends
with say how often each sample is in them, whatever was read and thrown away. The first rank writes a line a step (`steps`),
and at the end the counts (`counts`).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

SAMPLES, BATCH, EVERY = 1003, 8, 20
"""Samples of an epoch, which neither ranks, processes nor batches divide, and of a step over all ranks; steps from one
checkpoint to the next."""
STEPS = SAMPLES // BATCH
VALIDATED = 1003
READ_S, STEP_S = 0.002, 0.02
"""How long a sample takes to read, and at least a step."""
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
KINDS = ("hf", "hf-stream", "lightning", "lightning-stream", "streaming", "torchtitan", "ray")


class Ids(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is the number i."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(READ_S)
        return torch.tensor(index)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """The same numbers as a stream, which is divided over the workers of a `DataLoader`, and over `ranks`."""

    def __init__(self, size: int = SAMPLES, rank: int = 0, ranks: int = 1) -> None:
        self.size, self.rank, self.ranks = size, rank, ranks

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for index in range(self.rank * workers + worker, self.size, self.ranks * workers):
            time.sleep(READ_S)
            yield torch.tensor(index)


class Counts(nn.Module):
    """A weight for each sample. With SGD of rate `BATCH`, a sample in a batch takes 1 of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = nn.Embedding(VALIDATED, 1)
        nn.init.zeros_(self.taken.weight)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """The loss of this rank's numbers, so that the mean over ranks is that of the batch."""
        return self.taken(numbers).sum() * WORLD / BATCH


class Progress:
    """What the first rank writes down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def step(self, number: int) -> None:
        """After step `number`, from 1."""
        if RANK:
            return
        with (self.folder / "steps").open("a") as file:
            file.write(f"{number}\n")
        time.sleep(STEP_S)

    def end(self, model: Counts) -> None:
        """After the last step."""
        if not RANK:
            weights = model.taken.weight.detach().flatten()[:SAMPLES]
            (self.folder / "counts").write_text(json.dumps((-weights).round().int().tolist()))


def validated(folder: Path, total: int, distinct: int) -> None:
    """Write down what a validation has counted."""
    if not RANK:
        (folder / "validated").write_text(json.dumps([total, distinct]))


# -- raypar, whose workers import these ---------------------------------------------------------------------------------------


class IdPairs(Ids):
    """`Ids` as pairs of input and target."""

    raypar_thread_safe = True

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), index


class StreamPairs(Stream):
    """`Stream` as pairs of input and target."""

    def __iter__(self) -> Iterator[Any]:
        return ((number, number) for number in super().__iter__())


class Taken(Counts):
    """`Counts` without the loss."""

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers' weights."""
        time.sleep(STEP_S / 8)
        return self.taken(numbers).squeeze(-1)


def loss_of_weights(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As that of `Counts`: the mean over the batch."""
    return output.mean()


class Seen:
    """How many different samples a validation has measured."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.times = torch.zeros(VALIDATED, dtype=torch.long)

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Count a microbatch."""
        self.times += torch.bincount(target, minlength=VALIDATED)

    def merge_state(self, other: Seen) -> None:
        """Add another's."""
        self.times = self.times + other.times

    def compute(self) -> torch.Tensor:
        """Different samples."""
        return (self.times > 0).sum()


# -- transformers ------------------------------------------------------------------------------------------------------------


def hf(given: argparse.Namespace, *, stream: bool) -> None:
    """`Trainer(...).train(resume_from_checkpoint=True)`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(Counts):
        def forward(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(numbers), "numbers": numbers}

    def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"numbers": torch.stack(samples)}

    class Told(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            progress.step(state.global_step)

    model, data = Model(), Stream if stream else Ids
    arguments = TrainingArguments(
        str(given.folder / "hf"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // WORLD,
        per_device_eval_batch_size=BATCH // WORLD,
        save_steps=EVERY,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_num_workers=given.processes,
        max_grad_norm=0.0,
        remove_unused_columns=False,
        ddp_backend="gloo" if WORLD > 1 else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=BATCH)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=data(),
        eval_dataset=data(VALIDATED),
        callbacks=[Told()],
        optimizers=(optimizer, scheduler),
    )
    if given.validate:
        outputs = trainer.predict(data(VALIDATED)).predictions
        found = (outputs[-1] if isinstance(outputs, tuple) else outputs).flatten().tolist()
        return validated(given.folder, len(found), len(set(found)))
    progress = Progress(given.folder)
    trainer.train(resume_from_checkpoint=any((given.folder / "hf").glob("checkpoint-*")) or None)
    progress.end(model)


# -- Lightning ---------------------------------------------------------------------------------------------------------------


def lightning(given: argparse.Namespace, *, stream: bool) -> None:
    """`Trainer.fit(..., ckpt_path="last")` with torchdata's `StatefulDataLoader`, whose state its checkpoints have."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    seen: list[int] = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.counts = Counts()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.counts(batch)

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            seen.extend(self.all_gather(batch).flatten().tolist())

        def on_train_batch_end(self, *_: Any) -> None:
            progress.step(self.trainer.global_step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=BATCH)

    saves = ModelCheckpoint(given.folder / "lightning", every_n_train_steps=EVERY, save_top_k=-1, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        max_epochs=1,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    if given.validate:
        data = Stream(VALIDATED, RANK, WORLD) if stream else Ids(VALIDATED)
        trainer.validate(module, torch.utils.data.DataLoader(data, BATCH // WORLD, num_workers=given.processes), verbose=False)
        return validated(given.folder, len(seen), len(set(seen)))
    options: dict[str, Any] = {"batch_size": BATCH // WORLD, "num_workers": given.processes}
    if stream:
        loader = StatefulDataLoader(Stream(SAMPLES, RANK, WORLD), **options)
    else:
        sampler = StatefulDistributedSampler(Ids(), num_replicas=WORLD, rank=RANK, shuffle=True)
        loader = StatefulDataLoader(Ids(), sampler=sampler, **options)
    progress = Progress(given.folder)
    last = given.folder / "lightning" / "last.ckpt"
    trainer.fit(module, loader, ckpt_path=str(last) if last.exists() else None, weights_only=False)
    progress.end(module.counts)
    return None


# -- loaders in a loop of one's own ------------------------------------------------------------------------------------------


def loop(given: argparse.Namespace, loader: Any, unpack: Any, *, per_rank: bool) -> None:
    """DistributedDataParallel over a loader with `state_dict` and `load_state_dict`, saved with the model.

    `per_rank`: each rank's loader has a state of its own; else the first rank's is that of all.
    """
    if WORLD > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    model = Counts()
    wrapped = nn.parallel.DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=BATCH)
    progress, done = Progress(given.folder), 0
    saved = given.folder / "saved.pt"
    if saved.exists():
        found = torch.load(saved, weights_only=False)
        model.load_state_dict(found["model"])
        done = found["done"]
        states = {key: value for state in found["states"] for key, value in state.items()} if per_rank else found["states"][0]
        loader.load_state_dict(states)
    for batch in loader:
        optimizer.zero_grad()
        wrapped(unpack(batch)).backward()
        optimizer.step()
        done += 1
        if done % EVERY == 0:
            states = [loader.state_dict()]
            if WORLD > 1:
                states = [None] * WORLD
                torch.distributed.all_gather_object(states, loader.state_dict())
            if not RANK:
                torch.save({"model": model.state_dict(), "done": done, "states": states}, f"{saved}.tmp")
                os.replace(f"{saved}.tmp", saved)
        progress.step(done)
        if done == STEPS:
            break
    progress.end(model)


def count(given: argparse.Namespace, loader: Any, unpack: Any) -> None:
    """Count what a loader gives to all ranks in one pass."""
    mine = [number for batch in loader for number in unpack(batch).tolist()]
    found: list[Any] = [mine]
    if WORLD > 1:
        found = [None] * WORLD
        torch.distributed.all_gather_object(found, mine)
    numbers = [number for part in found for number in part]
    validated(given.folder, len(numbers), len(set(numbers)))


def streaming(given: argparse.Namespace) -> None:
    """`StreamingDataLoader(StreamingDataset(...))` of mosaicml-streaming; its state, as its page on resumption says."""
    # Its classes for images are not used, and the torchvision of PyPI does not load beside a PyTorch for the CPU.
    for module in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        stand_in = sys.modules.setdefault(module, MagicMock())
        stand_in.__spec__ = ModuleSpec(module, None)
        stand_in.VisionDataset = object
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    class Slow(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            time.sleep(READ_S)
            return super().__getitem__(at)

    os.environ.setdefault("LOCAL_WORLD_SIZE", str(WORLD))
    size = VALIDATED if given.validate else SAMPLES
    folder = given.folder / f"mds{size}"
    if not RANK and not folder.exists():
        with MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=4096) as out:
            for number in range(size):
                out.write({"number": number})
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
    shuffle = not given.validate
    dataset = Slow(local=str(folder), batch_size=BATCH // WORLD, shuffle=shuffle, num_canonical_nodes=2)
    loader = StreamingDataLoader(dataset, batch_size=BATCH // WORLD, num_workers=given.processes)

    def unpack(batch: Any) -> torch.Tensor:
        return torch.as_tensor(batch["number"])

    if given.validate:
        return count(given, loader, unpack)
    return loop(given, loader, unpack, per_rank=False)


def torchtitan(given: argparse.Namespace) -> None:
    """`ParallelAwareDataloader` of torchtitan over a streamed set of `datasets`, divided by rank as its text data set does."""
    import datasets
    from datasets.distributed import split_dataset_by_node
    from torchtitan.components.dataloader import ParallelAwareDataloader

    size = VALIDATED if given.validate else SAMPLES

    def slow(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(READ_S)
        return row

    source = datasets.Dataset.from_dict({"number": list(range(size))}).to_iterable_dataset(num_shards=24).map(slow)
    divided = split_dataset_by_node(source, RANK, WORLD)
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")
    loader = ParallelAwareDataloader(divided, RANK, WORLD, batch_size=BATCH // WORLD, num_workers=given.processes)

    def unpack(batch: Any) -> torch.Tensor:
        return torch.as_tensor(batch["number"])

    if given.validate:
        return count(given, loader, unpack)
    return loop(given, loader, unpack, per_rank=True)


# -- Ray Train ---------------------------------------------------------------------------------------------------------------


def ray(given: argparse.Namespace) -> None:
    """`TorchTrainer` with Ray Data; started again with the same name and storage it goes on from its last checkpoint."""
    import ray.data
    from ray import train
    from ray.train.torch import TorchTrainer, prepare_model

    def slow(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(READ_S)
        return row

    def one_worker(config: dict[str, Any]) -> None:
        context = train.get_context()
        world, rank = context.get_world_size(), context.get_world_rank()
        shard = train.get_dataset_shard("train")
        if config["validate"]:
            mine = [number for rows in shard.iter_torch_batches(batch_size=BATCH // world) for number in rows["id"].tolist()]
            found: list[Any] = [None] * world
            torch.distributed.all_gather_object(found, mine)
            numbers = [number for part in found for number in part]
            if rank == 0:
                validated(Path(config["folder"]), len(numbers), len(set(numbers)))
            return
        model, done, progress = Counts(), 0, Progress(Path(config["folder"]))
        if (saved := train.get_checkpoint()) is not None:
            with saved.as_directory() as place:
                found = torch.load(Path(place) / "saved.pt", weights_only=False)
            model.load_state_dict(found["model"])
            done = found["done"]
        wrapped = prepare_model(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=BATCH)
        for rows in shard.iter_torch_batches(batch_size=BATCH // world):
            optimizer.zero_grad()
            (wrapped(rows["id"]) * world).backward()  # this process has no WORLD_SIZE of its own
            optimizer.step()
            done += 1
            if rank == 0:
                progress.step(done)
            if done % EVERY == 0:
                checkpoint = None
                if rank == 0:
                    place = Path(config["folder"]) / f"to_report_{done}"
                    place.mkdir(exist_ok=True)
                    torch.save({"model": model.state_dict(), "done": done}, place / "saved.pt")
                    checkpoint = train.Checkpoint.from_directory(place)
                train.report({"done": done}, checkpoint=checkpoint)
            if done == STEPS:
                break
        if rank == 0:
            progress.end(model)

    os.environ["RAY_AUTH_MODE"] = "disabled"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # A Ray of its own by its address: others of this machine are not to be found by its actors.
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "8"]
    command += ["--node-ip-address", "127.0.0.1", "--port", address.rpartition(":")[2], "--include-dashboard", "false"]
    head = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(60):
        try:
            ray.init(address=address, runtime_env={"env_vars": {"RAY_ADDRESS": address}})
            break
        except ConnectionError:
            time.sleep(1)
    # As many processes read as in the loaders of the others.
    data = ray.data.range(VALIDATED if given.validate else SAMPLES, override_num_blocks=24).map(
        slow, concurrency=given.processes
    )
    trainer = TorchTrainer(
        one_worker,
        train_loop_config={"folder": str(given.folder), "validate": given.validate},
        datasets={"train": data},
        scaling_config=train.ScalingConfig(num_workers=given.ranks),
        run_config=train.RunConfig(name="validate" if given.validate else "train", storage_path=str(given.folder / "ray")),
    )
    try:
        trainer.fit()
    finally:
        ray.shutdown()
        head.terminate()
        head.wait()


def main() -> None:
    """Run one contender's process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1, help="of Ray Train, which starts its own")
    parser.add_argument("--validate", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    name, _, kind = given.kind.partition("-")
    run = globals()[name]
    run(given, stream=kind == "stream") if name in ("hf", "lightning") else run(given)


if __name__ == "__main__":
    main()
