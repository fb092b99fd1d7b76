"""`model.pretrained` and `model.adapter`: a folder of transformers, trained with the bits of one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import language_model, plain_module
from helpers.language_model import Tokens, loaded, save_base
from helpers.model_zoo import import_transformers

import raypar
from raypar.errors import CheckpointError, ConfigError
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig
from raypar.job.contract import contract_of_job
from raypar.job.read_job import parse_job
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.pretrained.initial_values import with_weights_fingerprint
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

LORA = {
    "llama": {"r": 2, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1},
    "gpt2": {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True},
}
STEPS = 3


def job(folder: str, adapter: dict[str, Any] | None = None, **more: Any) -> Job:
    import_transformers()
    given = {"pretrained": folder} | ({"adapter": adapter} if adapter else {})
    return Job(
        **{
            "steps": STEPS,
            "batch_size": 6,
            "microbatches": 4,
            "model": given,
            "loss": LossConfig(function="model"),
            "data": DataConfig(function=Tokens, target="labels"),
            "optimizer": OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-2}),
            **more,
        }
    )


@pytest.mark.parametrize("how", ["whole", "adapter"])
@pytest.mark.parametrize("kind", LORA)
def test_a_folder_trained_on_2_x_2_has_the_bits_of_one_process_that_begins_with_from_pretrained(kind, how, tmp_path: Path):
    adapter = LORA[kind] if how == "adapter" else None
    spec = with_weights_fingerprint(job(save_base(tmp_path / "base", kind), adapter))
    graph = make_layer_graph(spec)
    plain = spec.replace(init_from=None, model=ModelConfig(function=loaded, args=spec.model.args))
    want, module = plain_module.train(make_layer_graph(plain), plain)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        for step in range(STEPS):
            assert {report.loss for report in run.step(step)} == {want.losses[step]}
        found = run.parameters()
    assert found.keys() == want.parameters.keys()
    assert all(torch.equal(copy, want.parameters[name]) for name, copies in found.items() for copy in copies)
    assert {name for name, p in module.named_parameters() if p.requires_grad and "lora_" not in name} == (
        set() if adapter else {name for name, _ in module.named_parameters()}
    )
    notes = " ".join(graph.initial_values.notes if graph.initial_values is not None else ())
    assert ("of adapters as the model function made them" in notes) == (adapter is not None)


@pytest.mark.ci
def test_modules_that_are_trained_whole_beside_adapters_begin_with_the_folder_s_weights(tmp_path: Path):
    folder = save_base(tmp_path / "base", tie_word_embeddings=False)
    adapter = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    spec = with_weights_fingerprint(job(folder, adapter))
    want = dict(loaded(folder, adapter).named_parameters())
    graph = make_layer_graph(spec)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        found = run.parameters()
    head = "base_model.model.lm_head.modules_to_save.default.weight"
    assert head in found
    assert all(torch.equal(copies[0], want[name]) for name, copies in found.items() if "lora_" not in name)


def test_the_short_form_is_a_function_with_arguments_and_init_from_and_a_job_file_of_it_reads_back(tmp_path: Path):
    spec = job("base", {"r": 2, "target_modules": ["q_proj"]}, data="helpers.language_model:Tokens")
    assert spec.init_from is not None and spec.init_from.path == "base"
    again = parse_job(spec.to_yaml())
    assert (again.model, again.init_from) == (spec.model, spec.init_from)
    assert contract_of_job(spec)["model"] == {
        "function": "raypar.model.pretrained_folder:from_folder",
        "args": {"folder": "base", "adapter": {"r": 2, "target_modules": ["q_proj"]}},
    }
    other = parse_job(spec.to_yaml().replace("pretrained: base", "pretrained: other"))
    assert other.model.args["folder"] == "other"
    own = job("base", init_from="weights.safetensors")
    assert own.init_from is not None and own.init_from.path == "weights.safetensors"
    given = raypar.Trainer(model={"pretrained": tmp_path}, loss="model", data=Tokens, steps=1, batch_size=2, microbatches=1).job
    assert given.model.args == {"folder": str(tmp_path)} and given.init_from.path == str(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.adapter is given without model\.pretrained"):
        Job(**{**spec.model_dump(), "model": {"function": "m:f", "adapter": {"r": 1}}})
    with pytest.raises(ConfigError, match="has pretrained: base and function: m:f, and either makes it"):
        raypar.Trainer(model={"pretrained": "base", "function": "m:f"}, loss="model", data=Tokens, steps=1, batch_size=1,
                       microbatches=1)  # fmt: skip


def broken(folder: Path, what: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    changed = {
        "no class": {"architectures": None},
        "a class of nobody": {"architectures": ["LlamaForNobody"]},
        "code in the folder": {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
        "an unknown kind": {"model_type": "llamma"},
        "another architecture": {"hidden_size": 32},
        "fewer layers": {"num_hidden_layers": 2},
    }.get(what)
    if changed is not None:
        (folder / "config.json").write_text(json.dumps(config | changed))
    last = max(folder.glob("*.safetensors"))
    if what == "a file is gone":
        last.unlink()
    if what == "a file is cut":
        last.write_bytes(last.read_bytes()[:-40])
    if what == "no configuration":
        (folder / "config.json").unlink()
    if what == "half a configuration":
        (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no class", r"names the class None as architectures, and transformers has none"),
        ("a class of nobody", r"names the class \['LlamaForNobody'\] as architectures"),
        (
            "code in the folder",
            r"has auto_map: the model's code lies in the folder, which raypar does not run\n  cure: read that",
        ),
        ("an unknown kind", r"transformers makes no configuration of .*config.json: "),
        ("another architecture", r"does not fit the model: .* another shape"),
        ("fewer layers", r"does not fit the model: .* of the file's .* tensors are not in the model"),
        ("a file is gone", r"model.safetensors.index.json"),
        ("a file is cut", r"model-000"),
        (
            "no configuration",
            r"model.pretrained is .*, and there is no .*config.json\n  cure: give a folder that save_pretrained",
        ),
        ("half a configuration", r"config.json cannot be read: "),
    ],
)
def test_a_folder_that_is_not_whole_or_of_another_model_is_one_error_before_workers_start(what, words, tmp_path: Path):
    spec = job(save_base(tmp_path / "base"))
    broken(tmp_path / "base", what)
    with pytest.raises((ConfigError, CheckpointError), match=words) as refused:
        preflight(with_weights_fingerprint(spec))
    assert str(refused.value).count("\n") == 1, "two lines"


def rewrite(folder: Path, change: Any) -> None:
    """Write the folder's weights as one file, with what `change` makes of them."""
    from safetensors.torch import load_file, save_file

    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    for file in (*files, *folder.glob("*.index.json")):
        file.unlink()
    save_file({name: value.contiguous() for name, value in change(tensors).items()}, folder / "model.safetensors")


@pytest.mark.ci
@pytest.mark.parametrize("how", ["whole", "adapter"])
@pytest.mark.parametrize(("kind", "prefix"), [("gpt2", "transformer."), ("llama", "model.")])
def test_a_folder_whose_names_lack_the_class_s_prefix_is_read_as_from_pretrained_reads_it(
    kind: str, prefix: str, how: str, tmp_path: Path
):
    """As the folder `gpt2` of the hub."""
    folder, adapter = save_base(tmp_path / "base", kind, tie_word_embeddings=True), LORA[kind] if how == "adapter" else None
    rewrite(tmp_path / "base", lambda tensors: {name.removeprefix(prefix): value for name, value in tensors.items()})
    graph = make_layer_graph(spec := with_weights_fingerprint(job(folder, adapter)))
    assert any(f"add_prefix: {prefix}" in note.replace('"', "") for note in graph.initial_values.notes)
    want = dict(loaded(folder, adapter).named_parameters())
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        found = run.parameters()
    assert all(torch.equal(copies[0], want[name]) for name, copies in found.items() if "lora_" not in name)
    assert len(found) > 20


@pytest.mark.ci
def test_a_folder_of_a_class_with_a_head_is_read_by_the_class_without(tmp_path: Path):
    """Its names have a prefix more."""
    folder = save_base(tmp_path / "base", "gpt2", tie_word_embeddings=True)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2Model"]}))
    own = make_layer_graph(with_weights_fingerprint(job(folder, loss=LossConfig(function=loss_of_states)))).initial_values
    values = dict(own.stream(["wte.weight", "h.1.attn.c_attn.weight"], torch.float32))
    transformers = import_transformers()
    base = transformers.GPT2Model.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, base[name]) for name, value in values.items())


def loss_of_states(output: Any, target: Any) -> Any:
    return output.last_hidden_state.mean()


def test_unequal_values_of_a_tie_name_both_tensors(tmp_path: Path):
    spec = job(save_base(tmp_path / "base", "llama", tie_word_embeddings=True))
    rewrite(tmp_path / "base", lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    said = (
        r"has model.embed_tokens.weight and lm_head.weight, which are one parameter of the model, with different values\n  cure"
    )
    with pytest.raises(CheckpointError, match=said) as refused:
        preflight(with_weights_fingerprint(spec))
    assert str(refused.value).count("\n") == 1


def test_a_name_on_the_hub_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)no file or folder 'meta/Llama'.*hf download meta/Llama --local-dir DIR"):
        preflight(with_weights_fingerprint(job("meta/Llama")))
    with pytest.raises(ConfigError, match=r"(?s)pretrained is 'meta/Llama'.*hf download meta/Llama --local-dir DIR"):
        language_model.from_folder("meta/Llama")


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (
            {"target_modules": ["query"]},
            r"Target modules \{'query'\} not found .*\n  cure: .*names such as embed_tokens, q_proj",
        ),
        ({"rank": 3, "target_modules": ["q_proj"]}, r"unexpected keyword argument 'rank'"),
    ],
)
def test_an_adapter_that_matches_nothing_or_that_peft_does_not_know_is_one_error(adapter, words, tmp_path: Path):
    with pytest.raises(ConfigError, match=words):
        preflight(with_weights_fingerprint(job(save_base(tmp_path / "base"), adapter)))


def test_without_peft_an_adapter_says_what_to_install(tmp_path: Path):
    import_transformers()
    folder = save_base(tmp_path / "base")
    with (
        mock.patch.dict(sys.modules, {"peft": None}),
        pytest.raises(ConfigError, match=r"needs peft.*\n  cure: pip install peft"),
    ):
        language_model.from_folder(folder, {"r": 2})
