"""`raypar.load`: the user's own module with the trained weights, equal to the one that one process has trained."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.finished_runs import train_into_folder
from helpers.model_zoo import TokenSamples, import_transformers
from helpers.plain_module import train
from torch import Tensor, nn

import raypar
from raypar.errors import CheckpointError, ConfigError, ModelError
from raypar.job import Job
from raypar.launch.forward_run import find_trained_run
from raypar.model.graph import Graph, Layer
from raypar.plan import ParallelPlan
from raypar.worker.checkpoint import checkpoint_files
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)


class Net(nn.Module):
    """Linear layers between a batch norm and a table that is no parameter; one parameter is frozen, one has two names."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        self.blocks[1].bias.requires_grad_(False)
        self.register_buffer("table", torch.randn(width), persistent=False)
        self.head, self.unused = nn.Linear(width, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.table
        return self.head(x)


class HalfNet(Net):
    """The same in bfloat16, which a job of dtype float32 casts."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


class Pairs:
    """Samples (x, y)."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = getattr(torch, dtype)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(6, generator=torch.Generator().manual_seed(index)).to(self.dtype), torch.ones(1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def gpt2(**sizes: Any) -> nn.Module:
    """A small GPT-2, whose output layer is its embedding."""
    transformers = import_transformers()
    config = transformers.GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=16, **sizes)
    config.use_cache = False
    return transformers.GPT2LMHeadModel(config)


def layers() -> list[tuple[str, nn.Module]]:
    return [("one", nn.Linear(6, 6)), ("two", nn.Linear(6, 1))]


def graph(*, skips: bool = False) -> Graph:
    chain = [("one", lambda: nn.Linear(6, 6)), ("same", lambda: nn.Linear(6, 6)), ("two", lambda: nn.Linear(6, 1))]
    made = Graph.sequential(chain, input="x", ties=(("one.weight", "same.weight"),))
    if not skips:
        return made
    return Graph((*made.layers[:2], Layer("two", nn.Identity, ("one.out",), ("two.out",))), output="two.out")


def job_of(model: Any, **given: Any) -> Job:
    job = {"loss": loss, "data": Pairs, "steps": 2, "batch_size": 8, "microbatches": 2, "seed": 3}
    job |= {"optimizer": ("torch.optim:SGD", {"lr": 0.1})}
    return raypar.Trainer(model=model, **(job | given)).job


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by all their names."""
    kinds = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {name: tensor.detach() for kind in kinds for name, tensor in kind}


def unequal(module: nn.Module, wanted: nn.Module) -> list[str]:
    """Names of parameters and buffers that differ from those of the other module."""
    found, other = state_of(module), state_of(wanted)
    assert found.keys() == other.keys()
    return [name for name, value in found.items() if value.dtype != other[name].dtype or not torch.equal(value, other[name])]


TEXT = {"loss": "model", "data": {"function": TokenSamples, "target": "labels"}, "batch_size": 4}
DOUBLE = {"dtype": "float64", "data": (Pairs, {"dtype": "float64"})}
CASES: dict[str, tuple[Any, Mapping[str, Any], Callable[[nn.Module], Any]]] = {
    "plain": (Net, {}, lambda module: module(torch.ones(3, 6))),
    "cast": (HalfNet, {}, lambda module: module(torch.ones(3, 6))),
    "float64": (
        Net,
        {"dtype": "float64", "data": (Pairs, {"dtype": "float64"})},
        lambda module: module(torch.ones(3, 6, dtype=torch.float64)),
    ),
    "tied": (gpt2, TEXT, lambda module: module(torch.arange(9).view(1, 9)).logits),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loaded_module_is_the_one_that_one_process_has_trained(case: str, tmp_path: Path):
    model, given, call = CASES[case]
    job = job_of(model, **given)
    path, _ = train_into_folder(job, tmp_path, pp=2, dp=2)
    _, wanted = train(make_layer_graph(job), job)
    before = torch.get_rng_state()
    found = raypar.load(path)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(found) is type(wanted) and not found.training
    assert unequal(found, wanted) == []
    assert {n for n, p in found.named_parameters() if p.requires_grad} == {
        n for n, p in wanted.named_parameters() if p.requires_grad
    }
    with torch.no_grad():
        assert torch.equal(call(found), call(wanted.eval()))
    if case == "tied":
        assert found.lm_head.weight is found.transformer.wte.weight
    else:
        assert found.blocks[2].weight is found.blocks[0].weight


@pytest.mark.parametrize("made", [layers, graph])
def test_a_model_that_is_a_list_of_layers_becomes_a_sequential(made: Any, tmp_path: Path):
    path, parameters = train_into_folder(job_of(made), tmp_path, pp=2)
    found = raypar.load(path.name, run_dir=tmp_path)
    assert type(found) is nn.Sequential
    assert dict(found.named_parameters()).keys() == parameters.keys()
    assert all(torch.equal(p, parameters[name]) for name, p in found.named_parameters())
    assert made is layers or found.same.weight is found.one.weight


def test_a_run_of_objects_needs_the_argument_model(tmp_path: Path):
    path, parameters = train_into_folder(job_of(lambda: Net(6)), tmp_path)
    with pytest.raises(ConfigError) as error:
        raypar.load(path)
    assert "has no job.yaml, which would say how its model is made" in error.value.what and "model" in error.value.what
    assert f"raypar.load({str(path)!r}, model=Net)" in error.value.cure
    given = Net(6)
    for model in (Net, (Net, {"width": 6}), f"{__name__}:Net", given):
        found = raypar.load(path, model=model)
        assert all(torch.equal(p, parameters[name]) for name, p in found.named_parameters())
    assert found is given
    with pytest.raises(ConfigError, match="model is an int, which makes no module"):
        raypar.load(path, model=3)


def test_a_checkpoint_is_loaded_with_the_job_of_its_run_and_steps_may_be_named(tmp_path: Path):
    path, parameters = train_into_folder(job_of(Net), tmp_path)
    checkpoint = path / "checkpoints" / "step_00000002"
    for found in (raypar.load(checkpoint), raypar.load(path, step=2), raypar.load(f"file://{checkpoint}")):
        assert all(torch.equal(p, parameters[name]) for name, p in found.named_parameters())
    with pytest.raises(CheckpointError, match="no checkpoint after 7 steps"):
        raypar.load(path, step=7)
    alone = checkpoint.rename(tmp_path / "alone")
    with pytest.raises(ConfigError, match="is in no run"):
        raypar.load(alone)
    assert unequal(raypar.load(alone, model=Net), found) == []


def test_weights_of_a_meta_module_come_from_the_checkpoint(tmp_path: Path):
    path, parameters = train_into_folder(job_of(layers), tmp_path)
    module = nn.Sequential()
    with torch.device("meta"):
        for name, layer in layers():
            module.add_module(name, layer.to("meta"))
    found = raypar.load(path, model=module)
    assert all(torch.equal(p, parameters[name]) for name, p in found.named_parameters())


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path):
    path, parameters = train_into_folder(job_of(layers), tmp_path)
    (path / "checkpoints" / "step_00000009").mkdir()
    (path / "checkpoints" / "step_00000009" / "manifest.json").write_text("{}")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = raypar.load(path)
    assert ["skipped step_00000009" in str(line.message) for line in told] == [True]
    assert Path(told[0].filename) == Path(__file__)
    assert all(torch.equal(p, parameters[name]) for name, p in found.named_parameters())


class Untied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight = nn.Parameter(self.blocks[0].weight.detach().clone())


class TiedMore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight = self.blocks[0].weight


class OtherTable(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1), persistent=False)


class OneMore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("more", torch.zeros(1))


@pytest.mark.parametrize(
    "model, said",
    [
        (lambda: Net(7), r"norm.weight is \[7\] in the model and \[6\] in the checkpoint"),
        (lambda: nn.Linear(6, 6), "belongs to another model: only the model has weight, bias"),
        (Untied, "blocks.0.weight and blocks.2.weight are one tensor in checkpoint .*, and two in the model"),
        (TiedMore, "blocks.0.weight and blocks.1.weight are one tensor in the model, and 2 in checkpoint"),
        (OtherTable, r"buffer table is \[1\] in the model and \[6\] in checkpoint"),
        (OneMore, "has no values of buffer more"),
    ],
    ids=["other sizes", "another model", "untied", "tied", "a buffer's size", "a buffer too many"],
)
def test_another_model_is_refused(model: Any, said: str, tmp_path: Path):
    path, _ = train_into_folder(job_of(Net), tmp_path)
    with pytest.raises(CheckpointError, match=said) as error:
        raypar.load(path, model=model)
    assert error.value.cure


def test_what_is_no_module_is_refused(tmp_path: Path):
    path, _ = train_into_folder(job_of(layers), tmp_path)
    with pytest.raises(ModelError, match=r"Graph whose layer 'two' reads one\.out: only a graph in which each layer"):
        raypar.load(path, model=lambda: graph(skips=True))
    with pytest.raises(ModelError, match=r"'a\.b' cannot name a part"):
        raypar.load(path, model=lambda: [("a.b", nn.Linear(1, 1))])
    with pytest.raises(ModelError, match="returned an int"):
        raypar.load(path, model=lambda: 3)
    with pytest.raises(ConfigError, match="no run 'nothing'"):
        raypar.load("nothing", run_dir=tmp_path)
    with pytest.raises(ConfigError, match="the run is 3, not a path"):
        raypar.load(3)


def test_workers_that_train_nothing_read_weights_without_state_of_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = job_of(Net, optimizer=("torch.optim:AdamW", {"lr": 0.1}))
    path, parameters = train_into_folder(job, tmp_path, pp=2)
    checkpoint, read = path / "checkpoints" / "step_00000002", list[str]()
    stream = checkpoint_files._stream
    monkeypatch.setattr(
        checkpoint_files,
        "_stream",
        lambda m, entries, *more: read.extend(e.kind.kind for e in entries) or stream(m, entries, *more),
    )
    with OneProcessRun(job, ParallelPlan.mesh(pp=2, layers=len(make_layer_graph(job).layers)), "1f1b") as local:
        for core in local.cores:
            core.load(checkpoint, only_weights=True)
        assert all(torch.equal(each, parameters[name]) for name, copies in local.parameters().items() for each in copies)
        assert not any(state for copies in local.optimizer_state().values() for state in copies)
    assert set(read) == {"parameter", "buffer", "non-persistent buffer"}


def test_the_best_checkpoint_is_named_by_its_metric(tmp_path: Path):
    path, parameters = train_into_folder(job_of(Net, steps=1), tmp_path)
    later, _ = train_into_folder(job_of(Net), tmp_path)
    (later / "checkpoints" / "step_00000002").rename(path / "checkpoints" / "step_00000002")
    best = [{"metric": "validation_accuracy", "mode": "max", "keep": 1}]
    (path / "events.jsonl").write_text(json.dumps({"kind": "started", "time": 1.0, "best": best}) + "\n")
    lines = [
        {"time": 1.0, "step": n, "validation_loss": 0.5, "validation_accuracy": value} for n, value in ((1, 0.9), (2, 0.5))
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for metric in ("", "accuracy"):
        found = raypar.load(path, best=metric)
        assert all(torch.equal(p, parameters[name]) for name, p in found.named_parameters())
    with pytest.raises(CheckpointError, match="does not keep its best checkpoint by 'f1'"):
        raypar.load(path, best="f1")
    with pytest.raises(ConfigError, match="step is 2, and best is ''"):
        raypar.load(path, step=2, best="")
    with pytest.raises(ConfigError, match="is one checkpoint: no other one is chosen"):
        find_trained_run(path / "checkpoints" / "step_00000002", ".", 2, [], print)
