"""A run that reads a stream is killed and resumed under another plan: it reads the samples that it would have read in peace.

`python examples/stream.py [FOLDER]` trains on sentences that come from an iterable data set, once in peace, and once killed in
the middle (`kill -9` of all its processes) and resumed with four replicas in the place of two stages. It compares the two runs'
records of samples (`samples.bin`: a digest of every microbatch) and their weights. Then it shows what a `transformers.Trainer`
reads that is resumed with another number of data processes, if `transformers` and `accelerate` are installed. One to three
minutes.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
RAYPAR = [sys.executable, "-m", "raypar"]
SENTENCES, WORDS, LENGTH = 600, 60, 12
STEPS, SAVED_EVERY, KILLED_AFTER, BATCH = 60, 10, 25, 16


class Sentences(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Ids of words, each sentence by a rule of its own; several workers divide the sentences."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        for index in range(info.id if info else 0, SENTENCES, info.num_workers if info else 1):
            ids = torch.tensor([(index * 7 + place * (1 + index % 5)) % WORDS for place in range(LENGTH + 1)])
            yield {"ids": ids[:-1], "labels": ids[1:], "number": torch.tensor(index)}


class Model(nn.Module):
    """Predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4))
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


JOB = f"""
steps: {STEPS}
batch_size: {BATCH}
microbatches: 4
model: examples.stream:Model
loss: examples.stream:loss
data: {{function: examples.stream:Sentences, target: labels, shuffle_window: 50}}
optimizer: {{function: torch.optim:AdamW, args: {{lr: 0.003}}}}
checkpoint: {{every: {SAVED_EVERY}}}
"""


def command(word: str, what: str, *settings: str) -> list[str]:
    return [*RAYPAR, word, what, *(part for setting in settings for part in ("--set", setting))]


def run(*words: str) -> str:
    """A raypar command, shown; the hash of the weights that it ends with."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
        lines = []
        for line in running.stdout:  # type: ignore[union-attr]
            print(line, end="", flush=True)
            lines.append(line)
    if running.returncode:
        sys.exit(f"{' '.join(words)} has failed")
    return lines[-1].split()[-1]


def steps_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.exists() else 0


def run_until_killed(folder: Path, *words: str) -> None:
    """Start a raypar command, and kill it with all that it has started."""
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=ROOT, start_new_session=True) as running:
        while running.poll() is None and steps_done(folder) < KILLED_AFTER:
            time.sleep(0.02)
        table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        parent = {int(pid): int(ppid) for pid, ppid in map(str.split, table.splitlines())}

        def began_here(pid: int) -> bool:
            while pid in parent and pid != running.pid:
                pid = parent[pid]
            return pid == running.pid

        for pid in [pid for pid in parent if began_here(pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # has ended meanwhile
                continue
    print(f">>> after {steps_done(folder)} steps all processes of the run were killed")


def show_transformers_trainer(folder: Path) -> None:
    """What a `transformers.Trainer` reads that is stopped in the middle and resumed with another number of data processes."""
    if not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")):
        print("\n(with transformers and accelerate installed, this is where the samples of a transformers.Trainer are counted)")
        return
    from transformers import Trainer, TrainerCallback, TrainingArguments

    read: list[list[int]] = []

    class Counted(Model):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
            read.append(number.tolist())
            output = super().forward(ids)
            return {"loss": loss(output, labels), "logits": output}

    class StopInTheMiddle(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):  # type: ignore[no-untyped-def]
            control.should_training_stop = state.global_step == KILLED_AFTER // SAVED_EVERY * SAVED_EVERY

    def train(name: str, processes: int, *callbacks: TrainerCallback, resume: bool = False) -> list[int]:
        read.clear()
        arguments = TrainingArguments(
            str(folder / name),
            max_steps=SENTENCES // BATCH,
            per_device_train_batch_size=BATCH,
            save_steps=SAVED_EVERY,
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_num_workers=processes,
        )
        trainer = Trainer(Counted(), arguments, train_dataset=Sentences(), callbacks=list(callbacks))
        trainer.train(resume_from_checkpoint=resume or None)
        return [number for batch in read for number in batch]

    in_peace = train("in_peace", 1)
    begun = train("stopped", 1, StopInTheMiddle())
    found = begun + train("stopped", 2, resume=True)
    times = collections.Counter(found)
    lost, again = len(set(in_peace) - set(times)), sum(count - 1 for count in times.values())
    print("\ntransformers.Trainer, resumed with 2 data processes in the place of 1:", end=" ")
    print(f"of {len(in_peace)} samples {lost} lost, {again} repeated")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"runs/stream-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "stream.yaml"
    job.write_text(JOB)
    in_peace, killed = folder / "in_peace", folder / "killed"
    weights = run(*command("train", str(job), "plan.stages=2", "name=in_peace", f"run_dir={folder}"))
    run_until_killed(killed, *command("train", str(job), "plan.stages=2", "name=killed", f"run_dir={folder}"))
    again = run(*command("resume", str(killed), "plan.stages=1", "plan.replicas=4"))

    records = [(run_folder / "samples.bin").read_bytes() for run_folder in (in_peace, killed)]
    print(f"\nin peace             {weights}\nkilled and resumed   {again}")
    print(f"record of samples: {STEPS * 4} microbatches, {'equal' if records[0] == records[1] else 'DIFFERENT'}")
    show_transformers_trainer(folder)
    equal = weights == again and records[0] == records[1]
    print("equal" if equal else "DIFFERENT")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
