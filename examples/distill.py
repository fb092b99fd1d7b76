"""Distillation: a small GPT learns what a frozen teacher predicts, with the bits of one plain process.

`python examples/distill.py [FOLDER]` trains a teacher first (a GPT, by plain PyTorch for some seconds). Then a student with a
quarter of its parameters is trained on 2 stages x 2 replicas: the model is a module that holds both and returns the loss, the
cross-entropy of the text and the divergence from the teacher's predictions (Hinton et al. 2015, arXiv:1503.02531). Only the
student has optimizer state and gradients, and the checkpoints leave the teacher out. The script compares the student with that
of a plain loop over the same module, and opens it alone. Half a minute.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples import gpt  # noqa: E402
from examples.plain_gpt import seed_of, tree  # noqa: E402

STEPS, BATCH, MICROBATCHES, CONTEXT = 40, 16, 4, 32
TEACHER = {"width": 64, "depth": 4, "heads": 4, "context": CONTEXT}
STUDENT = {"width": 32, "depth": 4, "heads": 2, "context": CONTEXT}
TEXT = bytes(gpt.text().tokens[:100_000].tolist())

JOB = """
name: distilled
run_dir: {folder}
model: examples.distill:Distillation
init_from: {{path: {folder}/teacher.safetensors, add_prefix: teacher., allow_missing: ["student.*"]}}
loss: model
data: examples.distill:Text
steps: {steps}
batch_size: {batch}
microbatches: {microbatches}
optimizer: {{function: "torch.optim:AdamW", args: {{lr: 3.0e-3}}}}
checkpoint: {{only: trained}}
plan: {{stages: 2, replicas: 2}}
"""


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of English text, and the byte after each byte."""

    def __init__(self) -> None:
        self.windows = gpt.Windows(TEXT, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, labels = self.windows[index]
        return {"ids": ids, "labels": labels}


class Distillation(nn.Module):
    """A student, its frozen teacher, and the loss of both."""

    def __init__(self, temperature: float = 2.0, share: float = 0.5) -> None:
        super().__init__()
        self.student = gpt.layers(**STUDENT)
        self.teacher = gpt.layers(**TEACHER).requires_grad_(False)
        self.temperature, self.share = temperature, share

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.student(ids).flatten(0, 1)
        with torch.no_grad():
            wanted = (self.teacher(ids).flatten(0, 1) / self.temperature).log_softmax(-1)
        found = (logits / self.temperature).log_softmax(-1)
        divergence = F.kl_div(found, wanted, reduction="batchmean", log_target=True) * self.temperature**2
        return {"loss": self.share * F.cross_entropy(logits, labels.flatten()) + (1 - self.share) * divergence}


def train_in_one_process(model: nn.Module, data: Any, *, steps: int, batch: int, microbatches: int, lr: float) -> None:
    """A plain loop. The order of samples and of the sum of gradients is that of raypar/NUMERICS.md, whatever the plan."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    order: list[int] = []
    for epoch in range(steps * batch // len(data) + 1):
        order += torch.randperm(len(data), generator=torch.Generator().manual_seed(seed_of(0, "epoch", epoch))).tolist()
    for step in range(steps):
        gradients, part = [], batch // microbatches
        for first in range(step * batch, (step + 1) * batch, part):
            samples = [data[index] for index in order[first : first + part]]
            fields = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
            gradients.append(torch.autograd.grad(model(**fields)["loss"] * part, trained))
        for parameter, gradient in zip(trained, tree(gradients), strict=True):
            parameter.grad = gradient.mul_(1 / batch)
        optimizer.step()


def pretrained(size: dict[str, int], steps: int) -> nn.Sequential:
    """A model that has seen some English."""
    torch.manual_seed(1)
    model, data = gpt.layers(**size), gpt.Windows(TEXT, size["context"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids, labels = map(torch.stack, zip(*(data[(step * 16 + number) % len(data)] for number in range(16)), strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    return model


def names_in_checkpoint(run: Path, steps: int) -> list[str]:
    """The tensors in a run's checkpoint: parameters and state of optimizers."""
    names = []
    for file in sorted((run / "checkpoints" / f"step_{steps:08}").glob("*.safetensors")):
        names += load_file(file)
    return names


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of tensors that are not equal to the last bit."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"runs/distill-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    teacher = pretrained(TEACHER, steps=120).state_dict()
    save_file(teacher, folder / "teacher.safetensors")
    job, run, out = folder / "distill.yaml", folder / "distilled", folder / "distilled.safetensors"
    job.write_text(JOB.format(folder=folder, steps=STEPS, batch=BATCH, microbatches=MICROBATCHES))
    raypar = [sys.executable, "-m", "raypar"]
    subprocess.run([*raypar, "train", str(job)], check=True, cwd=ROOT)
    subprocess.run([*raypar, "export", str(run), "--out", str(out)], check=True, cwd=ROOT)

    torch.manual_seed(0)
    plain = Distillation()
    plain.teacher.load_state_dict(teacher)
    train_in_one_process(plain, Text(), steps=STEPS, batch=BATCH, microbatches=MICROBATCHES, lr=3e-3)
    exported = load_file(out)
    different, held = unequal(exported, plain.state_dict()), names_in_checkpoint(run, STEPS)
    print(f"\nthe checkpoint holds {len(held)} tensors, of the teacher {sum('teacher.' in name for name in held)}")
    print(f"of {len(exported)} tensors of the run and of a plain loop {len(different)} differ")
    alone = gpt.layers(**STUDENT)
    alone.load_state_dict({name.removeprefix("student."): value for name, value in exported.items() if "student." in name})
    print(f"the student alone: {gpt.generate(alone, 'The value of ', 60, context=CONTEXT)!r}")
    equal = not different and not any("teacher." in name for name in held)
    print("equal" if equal else "DIFFERENT")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
