"""The one page that imports no raypar has the bits of the workers, also where blocks are empty or a microbatch is ragged."""

import re
from pathlib import Path

import pytest
import torch
from helpers.parity import PRECISIONS

from examples import plain_gpt
from raypar.job import DataConfig, Job, LossConfig, LrScheduleConfig, ModelConfig, OptimizerConfig
from raypar.job.walk_sections import dotted_keys
from raypar.plan import ParallelPlan
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.run_in_one_process import OneProcessRun

ROOT = Path(__file__).parents[2]
SIZES = {"width": 16, "depth": 2, "heads": 2, "context": 16}


@pytest.mark.parametrize(
    "microbatches, blocks, compute",
    [
        (4, 4, None),
        (3, 7, None),
        (5, 2, None),
        (4, 0, None),
        (3, 2, "bf16"),
        (5, 3, "bf16 parameters"),
        (5, 2, "bf16 gradients"),
        (3, 2, "fp16"),
        (5, 3, "fp16 parameters"),
        (4, 2, "fp16 gradients"),
    ],
)
def test_plain_gpt_ends_with_the_weights_of_a_pipeline(microbatches, blocks, compute):
    model, data = {"function": "examples.gpt:layers", "args": SIZES}, {"function": "examples.gpt:text", "args": {"context": 16}}
    optimizer = {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "fused": True}
    schedule = {"warmup": 2, "total": 3}
    job = {
        "seed": 5,
        "steps": 3,
        "batch_size": 9,
        "microbatches": microbatches,
        "virtual_replicas": blocks,
        "model": model,
        "loss": "examples.gpt:loss",
        "data": data,
        "optimizer": {"function": "torch.optim:AdamW", "args": optimizer},
        "lr_schedule": {"function": "examples.gpt:cosine", "args": schedule},
        "clip_norm": 1.0,
        "precision": PRECISIONS[compute].model_dump(exclude_defaults=True),
    }
    spec = Job(
        name="plain",
        seed=5,
        steps=3,
        batch_size=9,
        microbatches=microbatches,
        model=ModelConfig(function=model["function"], args=SIZES),
        virtual_replicas=blocks,
        loss=LossConfig(function="examples.gpt:loss"),
        data=DataConfig(function=data["function"], args=data["args"]),
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args=optimizer),
        lr_schedule=LrScheduleConfig(function="examples.gpt:cosine", args=schedule),
        clip_norm=1.0,
        precision=PRECISIONS[compute],
    )
    plain = weights_hash(dict(plain_gpt.train(job).named_parameters()))
    with OneProcessRun(spec, ParallelPlan.of((2, 2), layers=4), "1f1b") as run:
        for step in range(3):
            run.step(step)
        assert weights_hash({name: copies[0] for name, copies in run.parameters().items()}) == plain
    assert torch.get_num_threads() == 1


def test_plain_gpt_takes_settings_from_the_command_line(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("steps: 3\nmodel: {function: m:f, args: {depth: 2}}\n")
    read = plain_gpt.read_job(job, ["precision.compute=bf16", "model.args.depth=4", "steps=1"])
    assert read == {
        "steps": 1,
        "model": {"function": "m:f", "args": {"depth": 4}},
        "precision": {"compute": "bf16"},
    }


def dropping():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))


def tied():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    return torch.nn.Sequential(first, second)


@pytest.mark.parametrize(
    "model, more, what",
    [
        (dropping, {}, "has dropout"),
        (tied, {}, "share parameters"),
        (torch.nn.Sequential, {"init_from": "w"}, "has init_from"),
        (torch.nn.Sequential, {"model": {"function": "m:f", "buffers": "last"}}, "has model.buffers"),
    ],
)
def test_plain_gpt_refuses_what_it_would_compute_otherwise(model, more, what):
    with pytest.raises(SystemExit, match=what) as refused:
        plain_gpt.check_model(more, model())
    assert str(refused.value).count("\n") == 1 and "cure: " in str(refused.value)


SMALLEST = {"steps": 1, "batch_size": 1, "microbatches": 1, "model": "m:f", "loss": "m:f", "data": {"function": "m:f"}}


@pytest.mark.parametrize(
    "more, what",
    [
        ({"stpes": 1}, "the job has stpes, which"),
        ({"sede": 1, "optimizer": {"function": "m:f", "arsg": {}}}, "the job has sede, optimizer.arsg, which"),
        ({"data": {"function": "m:d", "shuffle": "indexed"}}, "the job has data.shuffle, which"),
        ({"optimizer": {"function": "m:f", "groups": []}}, "the job has optimizer.groups, which"),
        ({"early_stopping": {"patience": 1}}, "the job has early_stopping, which"),
        ({"epochs": 2}, "the job has epochs, which"),
    ],
)
def test_plain_gpt_refuses_keys_that_it_does_not_know(more, what):
    with pytest.raises(SystemExit, match=re.escape(what)) as refused:
        plain_gpt.train(SMALLEST | more)
    assert str(refused.value).count("\n") == 1 and "cure: " in str(refused.value)


def test_plain_gpt_names_the_keys_that_are_missing():
    with pytest.raises(SystemExit, match=r"^error: the job has no batch_size, loss\n  cure: add it, or --set batch_size="):
        plain_gpt.train({key: value for key, value in SMALLEST.items() if key not in ("batch_size", "loss")})


def test_every_key_that_plain_gpt_knows_is_one_of_a_job():
    keys = {*dotted_keys(Job)}
    known = {f"{section}.{key}".lstrip(".") for section, of in plain_gpt.KNOWN.items() for key in of}
    assert known <= keys, known - keys


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_plain_gpt_knows_the_keys_of_the_example_jobs_or_says_that_it_cuts_no_layers(path):
    job = plain_gpt.read_job(path, [])
    if "virtual_shards" not in job:
        return plain_gpt.check_keys(job)
    with pytest.raises(SystemExit, match=r"^error: the job has virtual_shards, which this page does not compute"):
        plain_gpt.check_keys(job)
