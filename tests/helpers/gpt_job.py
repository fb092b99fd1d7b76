"""The job of a small GPT of `examples.gpt`, as the text of a job file, for tests that measure its memory."""


def gpt_job(depth: int, width: int, more: str = "") -> str:
    """Three steps of four samples in four microbatches. `more`: further keys."""
    return f"""
model: {{function: "examples.gpt:layers", args: {{depth: {depth}, width: {width}, heads: 2, context: 16}}}}
loss: {{function: "examples.gpt:loss"}}
data: {{function: "examples.gpt:text", args: {{context: 16}}}}
optimizer: {{function: "torch.optim:AdamW", args: {{lr: 0.001}}}}
steps: 3
batch_size: 4
microbatches: 4
{more}
"""
