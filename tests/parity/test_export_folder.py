"""`raypar export --format hf`: the folder that the model's own `save_pretrained` writes, bit for bit."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import captured_jobs, plain_module
from helpers.captured_jobs import MODELS, graph_of, job_of
from helpers.finished_runs import train_into_folder
from helpers.full_disk import room
from helpers.model_zoo import import_transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import raypar
from raypar.cli import main
from raypar.job import LossConfig

pytestmark = pytest.mark.part(5)

QUICK = ("gpt2", "mixtral", "vit")
LONG = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3", "bert", "roberta", "deberta2", "albert", "vitmae", "t5", "bart",
    "whisper", "mamba", "clip",
)  # fmt: skip
"""Models of the zoo that are of `transformers`: the first three in every run of the tests."""


def trained(name: str, run_dir: Path) -> tuple[Path, nn.Module]:
    """(the folder of a run of one step in two stages, the module that one process has trained)."""
    import_transformers()
    job = job_of(name, steps=1)
    path, _ = train_into_folder(job, run_dir, pp=2)
    return path, plain_module.train(graph_of(job), job)[1].eval()


def content(folder: Path) -> dict[str, Any]:
    """File -> what is in it: of weights the metadata, and the name, dtype and shape of each tensor."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            found[path.name] = json.loads(path.read_text())
            continue
        with safe_open(path, framework="pt") as file:
            tensors = {name: (file.get_tensor(name).dtype, file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
            found[path.name] = file.metadata(), tensors
    return found


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def outputs(model: nn.Module, name: str) -> list[Tensor]:
    with torch.no_grad():
        found = model(**MODELS[name].batch())
    return [value for value in found.values() if isinstance(value, Tensor)]


def check_export(name: str, tmp_path: Path, *arguments: str, **same: Any) -> None:
    path, module = trained(name, tmp_path)
    assert main(["export", str(path), "--format", "hf", "--out", str(tmp_path / "out"), *arguments]) == 0
    module.save_pretrained(tmp_path / "wanted", **same)
    assert content(tmp_path / "out") == content(tmp_path / "wanted")
    found, wanted = weights(tmp_path / "out"), weights(tmp_path / "wanted")
    assert [key for key, tensor in wanted.items() if not torch.equal(found[key], tensor)] == []
    opened = type(module).from_pretrained(tmp_path / "out").eval()
    there = dict(opened.named_parameters(remove_duplicate=False))
    assert there.keys() == dict(module.named_parameters(remove_duplicate=False)).keys()
    assert [key for key, p in module.named_parameters(remove_duplicate=False) if not torch.equal(p, there[key])] == []
    assert all(torch.equal(a, b) for a, b in zip(outputs(opened, name), outputs(module, name), strict=True))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", QUICK)
def test_the_folder_is_that_of_save_pretrained_and_opens_as_the_trained_model(name: str, tmp_path: Path):
    check_export(name, tmp_path, "--max-shard-size", "40KB", max_shard_size="40KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() and len(list((tmp_path / "out").glob("model-*"))) > 1


@pytest.mark.full
@pytest.mark.parametrize("name", LONG)
def test_the_folder_of_every_model_is_that_of_save_pretrained(name: str, tmp_path: Path):
    check_export(name, tmp_path)


# -- dtype, tokenizer, adapters ----------------------------------------------------------------------------------------------


def net() -> nn.Module:
    """A module of one's own."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def small_gpt2() -> nn.Module:
    return captured_jobs.make_model("gpt2", 0.0)


class Wrapper(nn.Module):
    """A module of one's own around one of `transformers`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.encoder = nn.Parameter(torch.ones(())), captured_jobs.make_model("gpt2", 0.0)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.encoder(input_ids).logits.mean((1, 2)) * self.scale


class Pairs:
    """Samples (x, y)."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), torch.ones(1)


def own_run(model: Any, run_dir: Path, data: Any = Pairs) -> tuple[Path, dict[str, Tensor]]:
    job = {
        "loss": "torch.nn:MSELoss",
        "data": data,
        "steps": 1,
        "batch_size": 4,
        "microbatches": 2,
        "optimizer": "torch.optim:SGD",
    }
    return train_into_folder(raypar.Trainer(model=model, **job).job, run_dir)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_has_the_weights_in_another_dtype(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, parameters = own_run(net, tmp_path)
    out = tmp_path / f"model{suffix}"
    assert main(["export", str(path), "--out", str(out), "--dtype", "bf16"]) == 0
    found = load_file(out) if suffix == ".safetensors" else torch.load(out)
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in parameters.items())
    assert found["1.running_mean"].dtype == torch.bfloat16 and found["1.num_batches_tracked"].dtype == torch.int64
    assert capsys.readouterr().out.endswith("before the cast to bfloat16\n")
    assert net().bfloat16().load_state_dict(found, strict=True)


@pytest.mark.ci
def test_a_folder_has_the_weights_in_another_dtype_and_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, module = trained("gpt2", tmp_path)
    base = tmp_path / "base"
    base.mkdir()
    for name in ("tokenizer.json", "merges.txt", "model.safetensors"):
        (base / name).write_text(name)
    (tmp_path / "out").mkdir()
    options = ["--format", "hf", "--dtype", "bfloat16", "--tokenizer", str(base)]
    assert main(["export", str(path), *options, "--out", str(tmp_path / "out")]) == 0
    names = ["config.json", "generation_config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names
    assert (tmp_path / "out" / "merges.txt").read_text() == "merges.txt"
    opened = type(module).from_pretrained(tmp_path / "out")
    assert opened.dtype == torch.bfloat16
    assert all(torch.equal(p, q.bfloat16()) for p, q in zip(opened.parameters(), module.parameters(), strict=True))
    assert f"5 files after 1 step in {tmp_path / 'out'} (" in (said := capsys.readouterr().out)
    assert "GPT2LMHeadModel.from_pretrained(" in said and said.endswith("before the cast to bfloat16\n")


def test_a_model_with_adapters_writes_these_or_is_merged_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class PeftModel(nn.Module):
        """Has of peft's class what an export asks of it."""

        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = nn.Linear(4, 1, bias=False), nn.Parameter(torch.ones(1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.adapter.T

        def save_pretrained(self, save_directory: str) -> None:
            save_file({"adapter": self.adapter.detach()}, f"{save_directory}/adapter_model.safetensors")

        def merge_and_unload(self) -> "Merged":
            return Merged(self.base.weight + self.adapter)

    class Merged:
        def __init__(self, weight: Tensor) -> None:
            self.weight = weight.detach()

        def save_pretrained(self, save_directory: str) -> None:
            save_file({"weight": self.weight}, f"{save_directory}/model.safetensors")

    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=PeftModel))
    monkeypatch.setattr(f"{__name__}.adapted", PeftModel, raising=False)
    path, parameters = own_run(f"{__name__}:adapted", tmp_path)
    for out, more in (("alone", []), ("merged", ["--merge"])):
        assert main(["export", str(path), "--format", "hf", "--out", str(tmp_path / out), *more]) == 0
    assert torch.equal(load_file(tmp_path / "alone" / "adapter_model.safetensors")["adapter"], parameters["adapter"])
    merged = load_file(tmp_path / "merged" / "model.safetensors")["weight"]
    assert torch.equal(merged, parameters["base.weight"] + parameters["adapter"])


@pytest.mark.ci
def test_a_run_of_objects_takes_the_model_function_as_an_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    name, job = "gpt2", job_of("gpt2", steps=1)
    made = job.replace(loss=LossConfig(function=partial(captured_jobs.loss_of, name=name)))
    path, parameters = train_into_folder(made, tmp_path)
    arguments = ["export", str(path), "--format", "hf", "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "--model module:name" in capsys.readouterr().err
    here = tmp_path / "here"
    here.mkdir()
    (here / "model_of_this_folder.py").write_text(f"from {__name__} import small_gpt2\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])  # as the command has it
    assert main([*arguments, "--model", "model_of_this_folder:small_gpt2"]) == 0
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["transformer.ln_f.bias"], parameters["transformer.ln_f.bias"]
    )


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_a_module_of_ones_own_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import_transformers()
    path, _ = own_run(net, tmp_path)
    wrapped, _ = own_run((Wrapper, {}), tmp_path, (captured_jobs.BatchesOf, {"name": "gpt2"}))
    for run, what, cure in (
        (path, "is a Sequential, no PreTrainedModel of transformers", "leave --format out"),
        (wrapped, "is a Wrapper, no PreTrainedModel", f"raypar.load({str(wrapped)!r}).encoder.save_pretrained(FOLDER) writes"),
    ):
        assert main(["export", str(run), "--format", "hf", "--out", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert what in said and cure in said and len(said[said.index("error:") :].splitlines()) == 2
    assert main(["export", str(path), "--format", "hf", "--out", str(tmp_path / "out"), "--merge"]) == 2
    assert "no PeftModel with adapters" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--format", "hf", "--out", "full"], "--out full has files in it already"),
        (["--format", "hf", "--out", "full/file"], "name a new folder in a folder that exists"),
        (["--format", "hf", "--out", "no/where"], "name a new folder in a folder that exists"),
        (["--format", "hf", "--out", "s3://bucket/out"], "here only a folder of this machine will do"),
        (["--format", "hf", "--out", "out", "--tokenizer", "full"], "--tokenizer full has no files of a tokenizer"),
        (["--format", "hf", "--out", "out", "--tokenizer", "gpt2"], "--tokenizer gpt2 is no folder"),
        (["--out", "model.pt", "--merge"], "are for folders"),
        (["--out", "model.pt", "--model", "a:b"], "are for folders"),
        (["--out", "out"], "or give --format hf for a folder"),
        (["--out", "model.pt", "--dtype", "int8"], "invalid choice"),
    ],
)
def test_bad_arguments_exit_with_2(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["export", "run", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.ci
def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, _ = trained("gpt2", tmp_path)
    arguments = ["export", str(path), "--format", "hf", "--out", str(tmp_path / "out")]
    with room(20_000):
        assert main(arguments) == 2
    assert f"cannot write {tmp_path / 'out'}: File too large" in capsys.readouterr().err
    config = "transformers.configuration_utils.PreTrainedConfig.save_pretrained"
    with mock.patch(config, side_effect=ValueError("not this configuration")):
        assert main(arguments) == 2
    assert "GPT2LMHeadModel.save_pretrained raised ValueError: not this configuration" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
