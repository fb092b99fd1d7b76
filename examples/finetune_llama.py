"""A folder with a Llama is fine-tuned with LoRA adapters on 2 stages x 2 replicas, and the best weights are put to use.

`python examples/finetune_llama.py [FOLDER]` makes a tiny Llama with random weights, as `save_pretrained` writes it (nothing is
downloaded), trains adapters on lines of a poem with an accuracy measured on lines that are held out and on another poem, merges
the best checkpoint into a folder for `from_pretrained`, and generates text with it. `raypar evaluate` and a plain loop over
the merged folder measure the same accuracies. It needs `transformers` and `peft`; one to two minutes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
RAYPAR = [sys.executable, "-m", "raypar"]
LENGTH, STEPS = 48, 160
POEM = (
    b"Tyger Tyger, burning bright, in the forests of the night; what immortal hand or eye, could frame thy fearful symmetry? "
    b"In what distant deeps or skies, burnt the fire of thine eyes? On what wings dare he aspire? What the hand, dare seize "
    b"the fire? And what shoulder, and what art, could twist the sinews of thy heart? And when thy heart began to beat, what "
    b"dread hand, and what dread feet? "
)


OTHER_POEM = (
    b"Little Lamb who made thee? Dost thou know who made thee? Gave thee life, and bid thee feed, by the stream and o'er the "
    b"mead; gave thee clothing of delight, softest clothing, woolly, bright. "
)


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of bytes of the poem, and the byte after each; every fifth one is held out. `other`: of another poem, all."""

    def __init__(self, held_out: bool = False, every: int = 3, other: bool = False) -> None:
        self.text = OTHER_POEM if other else POEM
        starts = range(0, len(self.text) - LENGTH, every)
        self.starts = [start for number, start in enumerate(starts) if other or (number % 5 == 4) == held_out]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.tensor(list(self.text[self.starts[index] : self.starts[index] + LENGTH]))
        return {"input_ids": tokens[:-1], "next": tokens[1:]}


def loss(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of the next byte."""
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def accuracy(output: Any, target: Tensor) -> tuple[Tensor, int]:
    """(number of next bytes that are predicted, number of all)."""
    right = output.logits.argmax(-1) == target
    return right.sum(), right.numel()


def make_base(folder: Path) -> None:
    """A Llama of 4 layers as the folder to begin with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


JOB = """
steps: {steps}
batch_size: 24
microbatches: 4
model:
  pretrained: {base}
  adapter:
    r: 16
    target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
    modules_to_save: [embed_tokens, lm_head]
loss: examples.finetune_llama:loss
data: {{function: examples.finetune_llama:Windows, target: next}}
validation:
  every: 10
  held_out: {{function: examples.finetune_llama:Windows, args: {{held_out: true}}}}
  other_poem: {{function: examples.finetune_llama:Windows, args: {{other: true}}, batch_size: 16}}
metrics: {{accuracy: examples.finetune_llama:accuracy}}
optimizer: {{function: torch.optim:AdamW, args: {{lr: 0.01}}}}
lr_schedule:
  function: transformers:get_cosine_schedule_with_warmup
  args: {{num_warmup_steps: 8, num_training_steps: job.steps}}
checkpoint: {{only: trained, best: [{{metric: validation/held_out/accuracy, mode: max}}]}}
plan: {{stages: 2, replicas: 2}}
"""


def raypar(*words: str) -> str:
    """A raypar command, shown; what it has printed."""
    print(f">>> raypar {' '.join(words)}", flush=True)
    with subprocess.Popen([*RAYPAR, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
        lines = []
        for line in running.stdout:  # type: ignore[union-attr]
            print(line, end="", flush=True)
            lines.append(line)
    if running.returncode:
        sys.exit(f"raypar {words[0]} has failed")
    return "".join(lines)


def accuracies_of_folder(folder: Path) -> tuple[list[float], str]:
    """(accuracy on the held-out windows and on the other poem, what the model writes after the poem's first word) of a folder,
    by a plain loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    with torch.no_grad():
        for windows in (Windows(held_out=True), Windows(other=True)):
            samples = [windows[index] for index in range(len(windows))]
            batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
            right, count = accuracy(model(batch["input_ids"]), batch["next"])
            found.append(float(right) / count)
        prompt = torch.tensor([list(b"Tyger ")])
        written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
    return found, bytes(written[0].tolist()).decode(errors="replace")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"runs/finetune_llama-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base, merged, job = folder / "base", folder / "merged", folder / "tyger.yaml"
    make_base(base)
    job.write_text(JOB.format(base=base, steps=STEPS))
    run = str(folder / "tyger")
    raypar("train", str(job), "--set", f"run_dir={folder}")
    raypar("export", run, "--best", "--format", "hf", "--merge", "--out", str(merged))
    evaluated = raypar("evaluate", run, "--best")
    raypar("report", run, "--out", str(folder / "report.html"))

    before, _ = accuracies_of_folder(base)
    after, text = accuracies_of_folder(merged)
    print("\naccuracy by a plain loop, of the base and of the merged folder:")
    for name, first, last in zip(("held-out windows", "another poem"), before, after, strict=True):
        print(f"  {name}: {first:.4f}, {last:.4f}")
    print(f"the merged folder writes: {text!r}")
    same = all(
        f"{name}/accuracy {value!r}\n" in evaluated for name, value in zip(("held_out", "other_poem"), after, strict=True)
    )
    print(f"raypar evaluate and the plain loop: {'equal' if same else 'DIFFERENT'}; the report: {folder / 'report.html'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
