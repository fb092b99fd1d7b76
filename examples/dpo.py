"""Direct preference optimisation (DPO): a GPT learns from pairs of answers, with the bits of one plain process.

`python examples/dpo.py [FOLDER]` makes the weights to begin with first (a GPT, by plain PyTorch for some seconds). Then it is
trained on 2 stages x 2 replicas to prefer how a line of text goes on to the same words in another order (Rafailov et al. 2023,
arXiv:2305.18290). The model is a module that holds policy and reference, which begin with the same weights, and returns the
loss. Only the policy has optimizer state and gradients, and the checkpoints leave the reference out. The script compares the
policy with that of a plain loop over the same module, and opens it alone. Half a minute.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples import gpt  # noqa: E402
from examples.distill import TEXT, names_in_checkpoint, pretrained, train_in_one_process, unequal  # noqa: E402

STEPS, BATCH, MICROBATCHES, LENGTH = 20, 16, 4, 72
SIZE = {"width": 64, "depth": 4, "heads": 4, "context": LENGTH}

JOB = """
name: preferred
run_dir: {folder}
model: examples.dpo:Preferences
init_from: {{path: {folder}/base.safetensors, add_prefix: [policy., reference.]}}
loss: model
data: {{function: examples.dpo:Pairs, target: answers}}
validation: {{function: examples.dpo:Pairs, args: {{held_out: true}}, every: 10}}
metrics: {{accuracy: examples.dpo:accuracy}}
steps: {steps}
batch_size: {batch}
microbatches: {microbatches}
optimizer: {{function: "torch.optim:AdamW", args: {{lr: 5.0e-4}}}}
checkpoint: {{only: trained}}
plan: {{stages: 2, replicas: 2}}
"""


class Pairs(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The beginning of a line as prompt, its end as the chosen answer, the end's words in another order as the rejected one.

    `ids` [2, length]: prompt and chosen answer, prompt and rejected answer, and zeros. `answers`: which of them are answers.
    Every eighth line is held out.
    """

    def __init__(self, held_out: bool = False) -> None:
        lines = [line.strip() for line in TEXT.decode().splitlines()]
        lines = [line for line in lines if 40 < len(line.encode()) <= LENGTH and line.count(" ") > 6]
        self.lines = [line for number, line in enumerate(lines) if (number % 8 == 7) == held_out]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.lines[index].split()
        prompt, end = " ".join(words[:4]).encode(), words[4:]
        ids, answers = torch.zeros(2, LENGTH, dtype=torch.int64), torch.zeros(2, LENGTH)
        for row, answer in enumerate((end, random.Random(index).sample(end, len(end)))):
            line = prompt + b" " + " ".join(answer).encode()
            ids[row, : len(line)] = torch.tensor(list(line))
            answers[row, len(prompt) : len(line)] = 1
        return {"ids": ids, "answers": answers}


class Preferences(nn.Module):
    """A policy, its frozen reference, and the loss of both."""

    def __init__(self, beta: float = 0.2) -> None:
        super().__init__()
        self.policy = gpt.layers(**SIZE)
        self.reference = gpt.layers(**SIZE).requires_grad_(False)
        self.beta = beta

    def forward(self, ids: Tensor, answers: Tensor) -> dict[str, Tensor]:
        ids, answers = ids.flatten(0, 1), answers.flatten(0, 1)  # chosen and rejected ones go through a model together
        with torch.no_grad():
            before = log_probability(self.reference(ids), ids, answers)
        gain = log_probability(self.policy(ids), ids, answers) - before
        chosen, rejected = (self.beta * gain).unflatten(0, (-1, 2)).unbind(1)
        return {"loss": -F.logsigmoid(chosen - rejected).mean(), "margin": chosen - rejected}


def log_probability(logits: Tensor, ids: Tensor, answers: Tensor) -> Tensor:
    """Of each sequence: the logarithm of its answer's probability."""
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return -(each.view_as(ids[:, 1:]) * answers[:, 1:]).sum(1)


def accuracy(output: dict[str, Tensor], answers: Tensor) -> tuple[Tensor, int]:
    """(number of pairs whose chosen answer has gained more than the rejected one, number of pairs)."""
    return (output["margin"] > 0).sum(), len(answers)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"runs/dpo-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = pretrained(SIZE, steps=50).state_dict()
    save_file(base, folder / "base.safetensors")
    job = folder / "dpo.yaml"
    job.write_text(JOB.format(folder=folder, steps=STEPS, batch=BATCH, microbatches=MICROBATCHES))
    subprocess.run([sys.executable, "-m", "raypar", "train", str(job)], check=True, cwd=ROOT)

    import raypar

    policy = raypar.load(folder / "preferred").policy
    plain = Preferences()
    plain.policy.load_state_dict(base)
    plain.reference.load_state_dict(base)
    train_in_one_process(plain, Pairs(), steps=STEPS, batch=BATCH, microbatches=MICROBATCHES, lr=5e-4)
    different = unequal(policy.state_dict(), plain.policy.state_dict())
    held = names_in_checkpoint(folder / "preferred", STEPS)
    print(f"\nthe checkpoint holds {len(held)} tensors, of the reference {sum('reference.' in name for name in held)}")
    print(f"of {len(base)} tensors of the policy and of a plain loop's policy {len(different)} differ")
    alone = gpt.layers(**SIZE)
    alone.load_state_dict(policy.state_dict())
    print(f"the policy alone: {gpt.generate(alone, 'The value of ', 60, context=LENGTH)!r}")
    equal = not different and not any("reference." in name for name in held)
    print("equal" if equal else "DIFFERENT")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
