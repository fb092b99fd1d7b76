"""Jobs whose model is an unmodified module: every plan trains it as one process does, and exports what the module loads."""

import inspect
import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers import checkpoint_folders
from helpers.captured_jobs import graph_of
from helpers.model_zoo import TokenSamples, import_transformers, make_zoo_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import raypar
from raypar.cli import main
from raypar.errors import ModelError, PlanError
from raypar.job import Job
from raypar.job.contract import contract_of_job
from raypar.job.read_job import load_job, parse_job
from raypar.model.capture.captured_layer import cache_of
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import parameter_shapes
from raypar.plan import ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.planner.model_profile import ModelProfile
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph, make_layer_graph_without_values
from raypar.worker.measure_profile import profile_layers, read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

STEPS = 3


class Pairs:
    """Samples (x, y)."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), torch.tensor(float(index))


def loss_of_logits(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


class Mixed(nn.Module):
    """Parameters and a buffer that glue of several layers uses, a module called twice, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale, self.unused = nn.Parameter(torch.randn(6)), nn.Linear(2, 2)
        self.register_buffer("places", torch.arange(6.0))
        self.register_buffer("also", self.places)
        self.head = nn.Linear(6, 1)

    def forward(self, features: Tensor) -> Tensor:
        x = features
        for block in self.blocks:
            x = self.blocks[0](torch.tanh(block(x))) * self.scale + self.places
        return self.head(x).squeeze(-1)


def spec_of(model: Any, **given: Any) -> Job:
    """The job of a small run."""
    job: dict[str, Any] = {"loss": "model", "data": {"function": TokenSamples, "target": "labels"}, "steps": STEPS}
    job |= {"batch_size": 4, "microbatches": 1, "optimizer": ("torch.optim:SGD", {"lr": 0.1}), **given}
    return raypar.Trainer(model=model, **job).job


def run(spec: Job, schedule: str = "1f1b", graph: Graph | None = None, **mesh: Any) -> OneProcessRun:
    """A run of all steps in stages, replicas and shards as `mesh` says; runs of one job have one capture of its model."""
    graph = graph_of(spec) if graph is None else graph
    plan = ParallelPlan.mesh(layers=len(graph.layers), **mesh)
    found = OneProcessRun(spec, plan, schedule, graph=graph)
    for step in range(spec.steps):
        found.step(step)
    return found


def parameters_of(found: OneProcessRun) -> dict[str, Tensor]:
    """Name -> parameter, the same on every worker that has it."""
    values = found.parameters()
    assert all(torch.equal(copies[0], each) for copies in values.values() for each in copies)
    return {name: copies[0] for name, copies in values.items()}


def unequal(one: OneProcessRun, other: OneProcessRun) -> list[str]:
    """The parameters that are not bit for bit equal in two runs."""
    mine, theirs = parameters_of(one), parameters_of(other)
    assert mine.keys() == theirs.keys()
    return [name for name, value in mine.items() if not torch.equal(value, theirs[name])]


def plain(spec: Job, loss: Any, fields: Any) -> nn.Module:
    """The user's own module after the same steps in one process: one microbatch a step, SGD."""
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(spec.seed)
    model: nn.Module = spec.model.call().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = spec.data.call()
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed_of(0, "epoch", 0)))
    for step in range(spec.steps):
        samples = [dataset[i] for i in order[4 * step : 4 * step + 4].tolist()]
        optimizer.zero_grad()
        (loss(model, fields(samples)) * 4.0).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / 4.0)
        optimizer.step()
    return model


def stacked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def assert_equal_to(model: nn.Module, found: OneProcessRun) -> None:
    state = dict(model.named_parameters(remove_duplicate=False))
    values = parameters_of(found)
    assert [name for name, value in values.items() if not torch.equal(state[name], value)] == []
    assert {id(state[name]) for name in values} == {id(parameter) for parameter in model.parameters()}


MESHES = [{}, {"pp": 2}, {"pp": 4}, {"pp": 2, "dp": 2}]


@pytest.mark.ci
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_an_unmodified_llama_with_its_own_loss_is_trained_as_in_one_process(mesh: dict[str, int]):
    spec = spec_of((make_zoo_model, {"name": "llama"}), microbatches=1 if "dp" not in mesh else 2)
    if "dp" in mesh:  # two microbatches have other sums than one: compared with another plan
        assert unequal(run(spec), run(spec, **mesh)) == []
        return
    wanted = plain(spec, lambda model, batch: model(**batch).loss, stacked)
    assert_equal_to(wanted, run(spec, **mesh))


@pytest.mark.ci
def test_a_function_of_what_the_model_returns_is_the_loss():
    spec = spec_of((make_zoo_model, {"name": "gpt2"}), loss=loss_of_logits)
    found = run(spec, pp=3)
    wanted = plain(spec, lambda model, batch: loss_of_logits(model(input_ids=batch["input_ids"]), batch["labels"]), stacked)
    assert_equal_to(wanted, found)
    assert "labels" not in found.graph.batch_fields


def test_the_input_of_pairs_is_given_by_place_and_tensors_used_in_many_places_are_one():
    spec = spec_of(Mixed, loss=nn.functional.mse_loss, data=Pairs)
    fields = {"x": 0, "y": 1}
    wanted = plain(
        spec,
        lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"]),
        lambda samples: {name: torch.stack([sample[place] for sample in samples]) for name, place in fields.items()},
    )
    for mesh in ({}, {"pp": 2}):  # with more stages the first edition of the contract adds uses in another order
        found = run(spec, **mesh)
        state = dict(wanted.named_parameters())
        values = parameters_of(found)
        assert values.keys() == state.keys()
        assert [name for name, value in values.items() if not torch.allclose(state[name], value, atol=1e-6)] == []
        held = [stage.buffers for core in found.cores for stage in core.stages.values()]
        assert all(torch.equal(buffers["places"], torch.arange(6.0)) for buffers in held)


@pytest.mark.ci
def test_other_schedules_and_recomputation_have_the_bits_of_one_stage():
    spec = spec_of((make_zoo_model, {"name": "llama", "p": 0.1}), batch_size=7, microbatches=3)
    wanted = run(spec)
    assert unequal(run(spec, "interleaved", pp=2, chunks=2), wanted) == []
    assert unequal(run(spec, "zb-h1", pp=2), wanted) == []
    assert unequal(run(spec, pp=2, recompute=range(1, 6)), wanted) == []


@pytest.mark.ci
def test_validation_runs_the_model_in_evaluation_mode():
    validation = {"function": TokenSamples, "samples": 4}
    spec = spec_of((make_zoo_model, {"name": "gpt2", "p": 0.5}), steps=1, validation=validation)
    graph = make_layer_graph(spec)
    found = OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=len(graph.layers)), "1f1b", graph=graph)
    model = spec.model.call().eval()
    model.load_state_dict({name: copies[0] for name, copies in found.parameters().items()}, strict=False)
    with torch.no_grad():
        batch = stacked([TokenSamples()[i] for i in range(4)])
        assert found.validate(0) == float(model(**batch).loss)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["bert", "mixed"])
def test_an_export_is_what_the_module_itself_loads_strictly(name: str, tmp_path: Path):
    if name == "mixed":
        spec = spec_of(Mixed, loss=nn.functional.mse_loss, data=Pairs, steps=1)
    else:
        spec = spec_of((make_zoo_model, {"name": name}), loss=loss_of_logits, steps=1)
    found = run(spec, pp=2)
    assert main(["export", str(checkpoint_folders.save_run(found, tmp_path, 1)), "--out", str(tmp_path / "model.pt")]) == 0
    fresh = spec.model.call()
    fresh.load_state_dict(torch.load(tmp_path / "model.pt"), strict=True)
    state = dict(fresh.named_parameters(remove_duplicate=False))
    assert [n for n, value in parameters_of(found).items() if not torch.equal(state[n], value)] == []


@pytest.mark.ci
def test_weights_from_a_file_have_the_names_of_the_module(tmp_path: Path):
    torch.manual_seed(7)
    other = make_zoo_model("t5")
    save_file({name: value.clone() for name, value in other.named_parameters()}, tmp_path / "w.safetensors")
    data = {"function": Translations, "target": "labels"}
    spec = spec_of((make_zoo_model, {"name": "t5"}), data=data, init_from=str(tmp_path / "w.safetensors"), steps=1)
    graph = make_layer_graph(spec)
    found = OneProcessRun(spec, ParallelPlan.mesh(pp=3, layers=len(graph.layers)), "1f1b", graph=graph)
    state = dict(other.named_parameters(remove_duplicate=False))
    assert all(torch.equal(state[name], value) for name, value in parameters_of(found).items())
    assert load_file(tmp_path / "w.safetensors").keys() == dict(other.named_parameters()).keys()


class Translations(TokenSamples):
    """TokenSamples with a mask, and labels that the model shifts itself."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = super().__getitem__(index)
        return found | {"attention_mask": torch.ones(12, dtype=torch.long), "labels": found["labels"][:7]}


class Unlabelled(TokenSamples):
    """TokenSamples alone."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": super().__getitem__(index)["input_ids"]}


def test_a_loss_that_the_model_does_not_compute_is_one_error():
    with pytest.raises(ModelError, match=r"loss: model, and what .* returned has no loss"):
        preflight(spec_of((make_zoo_model, {"name": "llama"}), data={"function": Unlabelled, "target": "input_ids"}))


@pytest.mark.ci
def test_a_captured_model_is_cut_over_shards():
    """Its losses are those of one shard but for the order of sums; Llama computes some of them in float32."""
    spec = spec_of((make_zoo_model, {"name": "llama"}), dtype="float64")
    one, two, stages = run(spec), run(spec, tp=2), run(spec, tp=2, pp=2)
    losses = [found.cores[0].step_commit.outcome for found in (one, two, stages)]
    assert losses[1] == losses[2]
    assert abs(losses[0].loss - losses[1].loss) < 1e-6 * losses[0].loss  # type: ignore[union-attr]
    whole = sum(value.numel() for value in parameters_of(one).values())
    held = [sum(p.numel() for stage in core.stages.values() for p in stage.parameters.values()) for core in two.cores]
    assert max(held) < 0.6 * whole


@pytest.mark.ci
def test_mixed_precision_is_that_of_the_plain_module_under_autocast():
    spec = spec_of((make_zoo_model, {"name": "llama"}), precision={"compute": "bf16"})

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            found: Tensor = model(**batch).loss
        return found.float()

    wanted = plain(spec, loss, stacked)
    for mesh in ({}, {"pp": 3}):
        assert_equal_to(wanted, run(spec, **mesh))


@pytest.mark.ci
def test_a_batch_of_another_size_is_traced_again_on_every_worker():
    spec = spec_of((make_zoo_model, {"name": "gpt2"}), batch_size=7, microbatches=3)
    one, two = run(spec), run(spec, pp=3)
    assert unequal(one, two) == []
    cache = cache_of(one.graph.layers[0].build.skeleton)  # type: ignore[attr-defined]
    assert sorted(signature[1][1][0] for signature in cache._traces) == [2, 3]


@pytest.mark.ci
def test_a_model_without_its_values_has_the_same_layers():
    spec = spec_of((make_zoo_model, {"name": "llama"}))
    with_values, without = make_layer_graph(spec), make_layer_graph_without_values(spec)
    assert [layer.own_names for layer in with_values.layers] == [layer.own_names for layer in without.layers]
    assert parameter_shapes(with_values) == parameter_shapes(without) and without.initial_values is None


def test_values_by_name_are_those_of_reset_parameters():
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.head = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x).tanh()
            return self.head(x).squeeze(-1)

    spec = spec_of(Small, loss=nn.functional.mse_loss, data=Pairs, init="by-name", steps=1)
    graph = make_layer_graph(spec)
    found = OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=len(graph.layers)), "1f1b", graph=graph)
    torch.manual_seed(seed_of(0, "init", "blocks.1"))
    assert torch.equal(parameters_of(found)["blocks.1.weight"], nn.Linear(6, 6).weight)


class Scaled(nn.Module):
    """Layers between which a parameter is used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layers = nn.Parameter(torch.ones(6)), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x) * self.scale)


class WithToken(nn.Module):
    """Parameters outside of units: of the model itself, and of a module in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaled, self.head = nn.Linear(6, 6), Scaled(), nn.Linear(6, 1)
        self.token = nn.Parameter(torch.zeros(6))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.token)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scaled(self.first(x) + self.token)).squeeze(-1)


def test_by_name_parameters_outside_of_units_are_refused_before_the_start():
    spec = spec_of(WithToken, loss=nn.functional.mse_loss, data=Pairs, init="by-name", steps=1)
    with pytest.raises(ModelError, match=r"token \(of WithToken\) and scaled\.scale \(of Scaled\) are in no unit") as error:
        preflight(spec)
    assert "init: model" in error.value.cure and "a module of its own" in error.value.cure
    preflight(spec_of(WithToken, loss=nn.functional.mse_loss, data=Pairs, steps=1))


def test_by_name_parameters_outside_of_units_may_come_from_a_file(tmp_path: Path):
    save_file(WithToken().state_dict(), tmp_path / "weights.safetensors")
    source = str(tmp_path / "weights.safetensors")
    preflight(spec_of(WithToken, loss=nn.functional.mse_loss, data=Pairs, init="by-name", init_from=source, steps=1))


def test_by_name_a_unit_whose_parameter_is_used_again_outside_of_it_begins_with_its_own_values():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(nn.functional.linear(self.first(x), self.first.weight)).squeeze(-1)

    spec = spec_of(Twice, loss=nn.functional.mse_loss, data=Pairs, init="by-name", steps=1)
    preflight(spec)
    found = OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=2), "1f1b")
    torch.manual_seed(seed_of(0, "init", "first"))
    assert torch.equal(parameters_of(found)["first.weight"], nn.Linear(6, 6).weight)


class Spread(nn.Module):
    """A layer that returns many values."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.linspace(0.5, 1.5, count))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x * factor for factor in self.factors)


class Gather(nn.Module):
    """A layer that reads many values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, *parts: Tensor) -> Tensor:
        return (torch.stack(parts).mean(0) * self.weight).sum(-1)


class Many(nn.Module):
    """A layer that hands many values to the next."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.spread, self.gather = Spread(count), Gather()

    def forward(self, x: Tensor) -> Tensor:
        return self.gather(*self.spread(x))


@pytest.mark.ci
def test_hundreds_of_values_pass_between_two_stages():
    spec = spec_of((Many, {"count": 200}), loss=nn.functional.mse_loss, data=Pairs, steps=2)
    assert unequal(run(spec), run(spec, pp=2)) == []


@pytest.mark.ci
def test_more_values_than_messages_can_tell_apart_are_refused_before_the_start():
    spec = spec_of((Many, {"count": 1025}), loss=nn.functional.mse_loss, data=Pairs, steps=1)
    with pytest.raises(PlanError, match=r"1025 values .* from stage 0 to stage 1") as error:
        run(spec, pp=2)
    assert "plan.cuts" in error.value.cure
    run(spec)


def test_the_profile_has_the_bytes_of_all_values_of_a_layer():
    spec = spec_of((Many, {"count": 5}), loss=nn.functional.mse_loss, data=Pairs, steps=1)
    graph, plan = make_layer_graph(spec), ParallelPlan.mesh(pp=2, layers=2)
    measured = profile_layers(spec, graph, read_microbatches(spec, graph, [0]))
    (edge,) = ModelProfile(measured.layers, outputs=measured.outputs).crossing(plan).edges
    (real,) = graph.crossing(plan).edges
    assert (edge.src, edge.dst, sorted(edge.values)) == (0, 1, sorted(real.values))
    assert edge.value_bytes == (4 * 6 * 4,) * 5 and edge.nbytes == 5 * 4 * 6 * 4


class Cropped(nn.Module):
    """Reads in Python, between units, how long the longest sample is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        hidden = self.first(x.unsqueeze(-1))
        return self.last(hidden[:, : int(length.max())].mean(1)).squeeze(-1)


class Lengths:
    """Samples of one shape, of so many lengths."""

    def __init__(self, lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"x": x, "length": torch.tensor(index % self.lengths + 1), "y": torch.tensor(float(index))}


@pytest.mark.ci
def test_a_forward_that_is_recorded_anew_for_each_batch_is_told_of_once():
    def warnings(lengths: int, **mesh: int) -> list[str]:
        data = {"function": Lengths, "args": {"lengths": lengths}, "target": "y"}
        spec = spec_of(Cropped, loss=nn.functional.mse_loss, data=data, microbatches=4)
        return run(spec, graph=make_layer_graph(spec), **mesh).warnings

    assert warnings(4) == []
    for mesh in ({}, {"pp": 2}):
        (line,) = warnings(16, **mesh)
        where = inspect.getsourcelines(Cropped.forward)[1] + 2
        assert f"int() at {__file__}:{where}" in line or f"int() at {Path(__file__).name}:{where}" in line
        assert re.search(r"recorded 8 times.* [\d.]+ ms each\n  cure: .*torch\.arange.*model\.units", line)


def test_a_job_file_names_units_and_the_models_loss(tmp_path: Path):
    text = (
        "steps: 1\nbatch_size: 4\nmicrobatches: 2\nmodel: {function: 'm:f', units: ['*.attention']}\nloss: model\ndata: m:d\n"
    )
    (tmp_path / "job.yaml").write_text(text)
    spec = load_job(tmp_path / "job.yaml")
    assert spec.model.units == ("*.attention",) and spec.loss.is_loss_of_model
    assert contract_of_job(spec)["units"] == ["*.attention"]
    trainer = raypar.Trainer(
        model={"function": "m:f", "units": ["*.attention"]}, loss="model", data="m:d", steps=1, batch_size=4, microbatches=2
    )
    assert trainer.job.model.units == spec.model.units and trainer.job.loss == spec.loss
    assert parse_job(trainer.job.to_yaml()).model.units == spec.model.units


class Padded(TokenSamples):
    """Tokens of which some samples are padded."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = torch.ones(12, dtype=torch.long)
        if index % 4 == 0:
            mask[-3:] = 0
        return super().__getitem__(index) | {"attention_mask": mask}


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_microbatches_with_and_without_padding_are_told_apart_on_every_worker(name: str):
    data = {"function": Padded, "target": "labels"}
    spec = spec_of((make_zoo_model, {"name": name}), data=data, batch_size=8, microbatches=4)
    one, two = run(spec), run(spec, pp=2, dp=2)
    assert unequal(one, two) == []
    single = spec_of((make_zoo_model, {"name": name}), data=data)
    assert_equal_to(plain(single, lambda model, batch: model(**batch).loss, stacked), run(single, pp=3))


@pytest.mark.ci
def test_the_readmes_example_of_an_unmodified_model_is_a_job():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = re.findall(r"```python\n(trainer = raypar\.Trainer\(\n    model=lambda: transformers.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"raypar": raypar, "transformers": import_transformers(), "tokens": TokenSamples}
    exec(block, names)
    checked = preflight(names["trainer"].job)
    assert [layer.name for layer in checked.graph.layers if "layers" in layer.name] == [f"model.layers.{i}" for i in range(4)]


class MaskedTokens(TokenSamples):
    """Tokens whose labels are masked in part, with a field that nobody reads."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        labels = sample["labels"].clone()
        labels[: index % 4] = -100
        return {**sample, "labels": labels, "weight": torch.ones(())}


@pytest.mark.ci
def test_fields_that_nobody_reads_and_masked_labels_are_told():
    one, other = preflight(
        spec_of((make_zoo_model, {"name": "llama"}), data={"function": MaskedTokens, "target": "labels"})
    ).notes
    assert one == "neither the model nor the loss reads these fields of the samples: weight"
    assert "some of labels are -100 (masked)" in other and "{function: model, count: labels}" in other
    assert preflight(spec_of((make_zoo_model, {"name": "llama"}))).notes == ()
