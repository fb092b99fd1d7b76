"""An export is the model: the plain module takes it with strict=True, ties and buffers included, whatever the plan was."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers.ugly_models import SEQ, VOCAB, WIDTH, job
from safetensors import safe_open
from safetensors.torch import load_model
from torch import Tensor, nn

from raypar.cli import main
from raypar.job import Job, ModelConfig
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.run_in_one_process import OneProcessRun


class Positions(nn.Module):
    """Adds a fixed table, kept with the model; a second one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, SEQ).unsqueeze(-1))
        self.register_buffer("scratch", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table * self.scratch


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, VOCAB, bias=False)


LAYERS = [
    ("embed", lambda: nn.Embedding(VOCAB, WIDTH)),
    ("positions", Positions),
    ("norm", lambda: nn.LayerNorm(WIDTH)),
    ("head", Head),
]


def graph() -> Graph:
    return Graph.sequential(LAYERS, input="x", ties=(("embed.weight", "head.weight"),))


def module() -> nn.Sequential:
    made = nn.Sequential(OrderedDict((name, build()) for name, build in LAYERS))
    made.head.weight = made.embed.weight
    made.positions.table.zero_()
    return made


def spec() -> Job:
    return job("tangled", steps=2).replace(model=ModelConfig(function=graph))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint after two steps on three stages of two replicas each, and the parameters it should hold."""
    root = tmp_path_factory.mktemp("run")
    with OneProcessRun(spec(), ParallelPlan.mesh(pp=3, dp=2, layers=len(LAYERS)), "1f1b") as local:
        for step in range(2):
            local.step(step)
        path = checkpoint_files.save_run(local, root, 2)
        return path, {name: copies[0].detach().clone() for name, copies in local.parameters().items()}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_plain_module_takes_an_export_as_it_is(suffix: str, saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, parameters = saved
    out, model = tmp_path / f"model{suffix}", module()
    assert main(["export", str(path), "--out", str(out)]) == 0
    if suffix == ".pt":
        model.load_state_dict(torch.load(out), strict=True)
    else:
        assert load_model(model, out, strict=True) == (set(), [])
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.positions.table, Positions().table)
    assert weights_hash(dict(model.named_parameters())) == weights_hash(parameters)
    assert capsys.readouterr().out.splitlines()[-1] == f"weights sha256 {weights_hash(parameters)}"


def test_a_tied_parameter_lies_in_a_file_once_and_its_other_name_is_noted(saved, tmp_path: Path):
    out = tmp_path / "model.safetensors"
    main(["export", str(saved[0]), "--out", str(out)])
    with safe_open(out, framework="pt") as file:
        assert set(file.keys()) == {"embed.weight", "norm.weight", "norm.bias", "positions.table"}
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_ties_and_buffers_are_no_part_of_what_a_run_resumes_from(saved):
    path, parameters = saved
    manifest = checkpoint_files.verify_checkpoint(path)
    assert set(manifest.shapes) == set(parameters) == set(checkpoint_files.read_checkpoint_state(path))
    assert checkpoint_files.checkpoint_weights_hash(path) == weights_hash(parameters)
    assert manifest.ties == {"head.weight": "embed.weight"}
    written = json.loads((path / "manifest.json").read_text())["entries"]
    assert [entry["name"] for entry in written if entry["kind"] == "buffer"] == ["positions.table"]
