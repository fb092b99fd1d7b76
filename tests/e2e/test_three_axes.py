"""The quickstart on stages, replicas and shards: the loss without them, the weights of the same shards in one process."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from helpers.quick_reference import trained
from helpers.same_shards import gpt_whole

from raypar.cli import main
from raypar.job.read_job import load_job
from raypar.model.layer_skeletons import parameter_shapes
from raypar.plan import ParallelPlan
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.run_in_one_process import OneProcessRun

QUICKSTART = Path(__file__).parents[2] / "jobs/quickstart.yaml"
STEPS, CLOSE = 20, 1e-4
SMALL = {"width": 40, "depth": 2, "heads": 5, "context": 16}


def job_of(steps: int, **size: int) -> dict:
    """The job file, with a model of another size."""
    job = yaml.safe_load(QUICKSTART.read_text())
    job["model"]["args"] |= size
    job["data"]["args"]["context"] = job["model"]["args"]["context"]
    return {**job, "steps": steps}


@pytest.mark.part(3)
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_workers_in_one_process_have_the_bits_of_the_reference_of_a_job_file(shards, sequence):
    context = f"args.context={SMALL['context']}"
    sets = [f"model.args.{key}={value}" for key, value in SMALL.items()]
    sets += ["steps=3", f"data.{context}", f"validation.{context}", f"plan.sequence_parallel={str(sequence).lower()}"]
    spec = load_job(QUICKSTART, sets)
    with OneProcessRun(spec, ParallelPlan.mesh(dp=2, pp=2, tp=shards, layers=4), "1f1b") as local:
        losses = [local.step(step)[0].loss for step in range(3)]
        held: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
        for core in local.cores:
            for stage in core.stages.values():
                held[local.plan.roles[core.rank][0].shard] |= {name: p.detach() for name, p in stage.parameters.items()}
        like = {name: torch.empty(shape) for name, shape in parameter_shapes(local.graph).items()}
        weights = weights_hash(gpt_whole(held, like, SMALL["heads"]))
    assert (losses, weights) == trained(job_of(3, **SMALL), shards, sequence=sequence)


@pytest.mark.full
def test_the_quickstart_on_all_three_axes_has_the_loss_of_one_process_and_the_weights_of_the_same_shards(tmp_path, capfd):
    """2 stages x 2 replicas x 2 shards on Ray."""
    sets = [*(f"plan.{axis}=2" for axis in ("stages", "replicas", "shards")), f"steps={STEPS}", f"run_dir={tmp_path}"]
    assert main(["train", str(QUICKSTART), *(word for one in sets for word in ("--set", one))]) == 0
    said = capfd.readouterr().out
    lines = map(json.loads, (tmp_path / "quickstart/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "norm" in line]
    same, weights = trained(job_of(STEPS), 2)
    assert losses == same and said.splitlines()[-1] == f"weights sha256 {weights}"
    plain, _ = trained(job_of(STEPS), 1)
    assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) < CLOSE
    assert "8 workers = 2 stages x 2 replicas x 2 shards" in said
    drawn = (tmp_path / "quickstart/swimlane.svg").read_text()
    assert all(f"(stage {s}, replica {r}, shard {t})" in drawn for s in (0, 1) for r in (0, 1) for t in (0, 1))
