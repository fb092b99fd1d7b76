"""Fine-tuning: a run begins with weights from a file, and its embedding is frozen.

`python examples/finetune.py [FOLDER]` makes such a file first (a small GPT, trained by plain PyTorch for some seconds and saved
in bfloat16), then trains it on other text on 2 stages x 2 replicas. It shows that the first loss is that of the loaded
model, and that the embedding has not changed by a bit. Half a minute.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples import gpt  # noqa: E402

SIZE = {"width": 64, "depth": 4, "heads": 4, "context": 64}
POEM = """Tyger Tyger, burning bright,
In the forests of the night;
What immortal hand or eye,
Could frame thy fearful symmetry?

In what distant deeps or skies.
Burnt the fire of thine eyes?
On what wings dare he aspire?
What the hand, dare seize the fire?
"""

JOB = """
name: finetuned
run_dir: {folder}
init_from: {folder}/pretrained.safetensors   # names and shapes must be the model's; bfloat16 is cast
model: {{function: "examples.finetune:frozen_embedding", args: {size}}}
loss: examples.gpt:loss
data: {{function: "examples.finetune:poem", args: {{context: 64}}}}
steps: 40
batch_size: 16          # all of the poem: the first loss is that of the loaded model on all of it
microbatches: 4
optimizer: {{function: "torch.optim:AdamW", args: {{lr: 1.0e-3}}}}
plan: {{stages: 2, replicas: 2}}
"""


def frozen_embedding(**size: int) -> nn.Sequential:
    """The model of examples/gpt.py; its first layer does not learn."""
    model = gpt.layers(**size)
    model.embed.requires_grad_(False)
    return model


def poem(context: int) -> gpt.Windows:
    """16 windows of a poem, over and over."""
    return gpt.Windows((POEM.encode() * 8)[: 16 * context + 1], context)


def pretrained(steps: int = 60) -> nn.Sequential:
    """A model that has seen some English, as bfloat16."""
    torch.set_num_threads(1)  # so small a model is slower with more
    torch.manual_seed(0)
    model, data = gpt.layers(**SIZE), gpt.text(context=SIZE["context"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        total, count = loss_on(model, data, range(step * 16, step * 16 + 16))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return model.bfloat16()


def loss_on(model: nn.Module, data: gpt.Windows, indices: range) -> tuple[torch.Tensor, int]:
    """(sum over tokens, number of tokens) of these samples."""
    inputs, targets = (torch.stack(field) for field in zip(*(data[index] for index in indices), strict=True))
    return gpt.loss(model(inputs), targets)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"runs/finetune-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    weights = pretrained().state_dict()
    save_file(weights, folder / "pretrained.safetensors")

    loaded = gpt.layers(**SIZE)
    loaded.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    data = poem(SIZE["context"])
    with torch.no_grad():
        total, count = loss_on(loaded, data, range(len(data)))

    job = folder / "finetune.yaml"
    job.write_text(JOB.format(folder=folder, size=json.dumps(SIZE)))
    raypar = [sys.executable, "-m", "raypar"]
    subprocess.run([*raypar, "train", str(job)], check=True, cwd=ROOT)
    out = folder / "finetuned.safetensors"
    subprocess.run([*raypar, "export", str(folder / "finetuned"), "--out", str(out)], check=True, cwd=ROOT)

    lines = map(json.loads, (folder / "finetuned/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    tuned = load_file(out)
    kept = [name for name in weights if torch.equal(tuned[name], weights[name].float())]
    print(
        f"\nloss of the loaded model {(total / count).item():.4f}, first loss of the run {losses[0]:.4f}, last {losses[-1]:.4f}"
    )
    print(f"unchanged: {', '.join(kept)}")
    well = abs(losses[0] - (total / count).item()) < 1e-4 and losses[-1] < losses[0]
    sys.exit(not (well and kept == ["embed.token.weight", "embed.position.weight"]))


if __name__ == "__main__":
    main()
