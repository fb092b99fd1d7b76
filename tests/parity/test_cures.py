"""The cure of an error about what users bring from plain PyTorch is what they have to change."""

import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import raypar
from raypar.cli import main
from raypar.errors import ConfigError, InputError, UserCodeError, with_article
from raypar.launch import launch_run
from raypar.launch.start_new_run import train_job_in_new_folder
from raypar.record.events import RunWarning
from raypar.worker.job_preflight import preflight

pytestmark = pytest.mark.part(4)

GIVEN: dict[str, Any] = {
    "model": lambda: nn.Sequential(nn.Linear(2, 2)),
    "loss": nn.functional.mse_loss,
    "data": [(torch.ones(2), torch.ones(2))] * 4,
    "steps": 2,
    "batch_size": 2,
    "microbatches": 1,
}


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)


def refused(**given: Any) -> str:
    """The error of a job, in one line."""
    with pytest.raises(InputError) as found:
        preflight(raypar.Trainer(**(GIVEN | given)).job)
    return str(found.value).replace("\n  cure: ", " | ")


def test_names_have_the_article_that_they_are_spoken_with():
    names = ("ViT", "AdamW", "OptimizedModule", "LSTM", "MLP", "GPT2", "UNet", "dict", "int")
    assert [with_article(name)[:2].strip() for name in names] == ["a", "an", "an", "an", "an", "a", "a", "a", "an"]


class LitViT(ViT):
    def training_step(self, batch: Any) -> None:
        pass


class TooWide(ViT):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([x, x], dim=1))


@pytest.mark.parametrize("model", [ViT(), ViT])
def test_a_module_without_forward_is_told_to_define_it(model):
    said = refused(model=model)
    assert said.startswith("the forward of ViT, given x [2, 2] torch.float32, raised NotImplementedError:")
    assert "| define forward in that class" in said and "training_step" not in said


def test_of_a_module_with_a_training_step_the_network_is_asked_for():
    assert "| give the network inside of it as the model" in refused(model=LitViT())


def test_what_the_forward_of_a_module_raises_is_said():
    said = refused(model=TooWide())
    assert said.startswith("the forward of TooWide, given x [2, 2] torch.float32, raised RuntimeError:")
    assert "| call the model on one batch by itself" in said


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, which DDP and FSDP want to have."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Inside(ViT):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.parallel.DistributedDataParallel(self.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


@pytest.mark.parametrize(
    "wrap, what, cure",
    [
        (nn.DataParallel, "the model is wrapped by DataParallel", "leave DataParallel out and give model.module: for data"),
        (
            nn.parallel.DistributedDataParallel,
            "the model is wrapped by DistributedDataParallel",
            "leave DistributedDataParallel out and give model.module: for data parallelism set plan.replicas",
        ),
        (
            lambda model: nn.Sequential(nn.Linear(2, 2), nn.parallel.DistributedDataParallel(model)),
            "1 is wrapped by DistributedDataParallel",
            "leave DistributedDataParallel out: for data parallelism set plan.replicas",
        ),
        (lambda model: Inside(), "head is wrapped by DistributedDataParallel", "leave DistributedDataParallel out: for data"),
        (
            lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
            "the model is wrapped by FullyShardedDataParallel",
            "leave FullyShardedDataParallel out: for data parallelism set plan.replicas",
        ),
        (
            lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
            "the model is wrapped by fully_shard",
            "leave fully_shard out: for data parallelism set plan.replicas",
        ),
    ],
)
@pytest.mark.parametrize("built", [True, False], ids=["object", "function"])
def test_of_a_wrapped_model_the_wrapper_is_to_be_left_out(wrap, what, cure, built, process_group):
    for made in (nn.Sequential(nn.Linear(2, 2)), TooWide()):
        model = wrap(made)
        said = refused(model=model if built else lambda model=model: model)
        assert said.startswith(f"{what}, but raypar distributes the work itself | {cure}")


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, FullyShardedDataParallel, fully_shard])
def test_a_wrapper_that_misses_its_process_group_is_to_be_left_out(wrap):
    with pytest.raises(UserCodeError, match=r"process group|accelerator|environment variable RANK") as found:
        preflight(raypar.Trainer(**(GIVEN | {"model": lambda: wrap(nn.Linear(2, 2))})).job)
    assert found.value.cure.startswith(
        "leave process groups and what is wrapped around a model (DistributedDataParallel, FSDP)"
    )
    assert found.value.cure.endswith("for data parallelism set plan.replicas")


@pytest.mark.full  # PyTorch's compiler takes seconds to be imported
def test_a_compiled_model_is_taken_out_of_its_wrapper():
    said = refused(model=torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager"))
    assert said.startswith("the model is a compiled module,") and "the model itself is model._orig_mod" in said


def test_a_layer_that_returns_a_tuple_is_written_as_a_graph():
    data = [(torch.ones(3, 2), torch.ones(3, 2))] * 4
    said = refused(model=lambda: nn.Sequential(nn.LSTM(2, 2)), data=data)
    assert said.startswith(
        "layer '0' returned 2 values (tensor, tuple), not one tensor | return one tensor, or write the model as"
    )
    assert 'whose Layer names its outputs (outputs=("h", "c"))' in said
    graph = raypar.Graph((raypar.Layer("lstm", lambda: nn.LSTM(2, 2), outputs=("h", "c")),), output="h")
    assert "layer 'lstm' returned 2 values (tensor, tuple), not 2 tensors | return a tuple" in refused(
        model=lambda: graph, data=data
    )


@pytest.mark.parametrize("model", [[nn.Linear], [nn.Identity, nn.Linear]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
def test_inputs_of_another_dtype_are_to_be_cast(model, dtype):
    data = [(torch.ones(2, dtype=dtype), torch.ones(2))] * 4
    said = refused(model=lambda: nn.Sequential(*(kind(2, 2) for kind in model)), data=data)
    assert "takes torch.float32, and its input " in said and f" is {dtype}:" in said
    assert "| cast it in the data set's __getitem__: torch.as_tensor(value, dtype=torch.float32)" in said
    assert ("or set dtype: float64 in the job" in said) == (dtype == torch.float64)


def test_ids_that_are_no_integers_are_to_be_cast_and_shapes_are_compared_as_ever():
    said = refused(model=lambda: nn.Sequential(nn.Embedding(9, 2)))
    assert "layer '0' takes torch.int64, and its input 'x' is torch.float32" in said
    assert "compare the shape of a sample" in refused(model=lambda: nn.Sequential(nn.Linear(5, 5)))


@pytest.mark.parametrize(
    "fields, first, target",
    [
        (("labels", "input_ids"), "input_ids", "labels"),
        (("image", "label"), "image", "label"),
        (("age", "income"), "age", "income"),
    ],
)
def test_the_cure_for_dict_samples_has_their_fields(fields, first, target):
    said = refused(data=[dict.fromkeys(fields, torch.ones(2))] * 4)
    assert f"| set data.input: {first}, data.target: {target} " in said and f'"input": "{first}"' in said
    named = {"function": [dict.fromkeys(fields, torch.ones(2))] * 4, "input": first, "target": target}
    assert preflight(raypar.Trainer(**(GIVEN | {"data": named})).job).samples == 4


@pytest.mark.parametrize(
    "given, cure",
    [
        ({"precision": "bf16"}, 'for mixed precision it is {"compute": "bf16"}'),
        ({"precision": {"compute": "bfloat16"}}, 'for mixed precision it is {"compute": "bf16"}'),
        ({"precision": {"compute": torch.bfloat16}}, 'for mixed precision it is {"compute": "bf16"}'),
        ({"dtype": torch.bfloat16}, 'set precision to {"compute": "bf16"}'),
        (
            {"precision": {"compute": torch.float16}},
            'for mixed precision it is {"compute": "bf16"} or {"compute": "fp16"}',
        ),
        (
            {"dtype": torch.float16},
            "for mixed precision leave it float32",
        ),
        ({"fp16": True}, "float16 is precision.compute: fp16, with a loss that is scaled as precision.loss_scale says"),
        ({"dtype": torch.float64}, '| write dtype="float64"'),
        ({"device": "cuda"}, '| write device="gpu"'),
        ({"device": torch.device("cuda:0")}, '| write device="gpu"'),
        ({"device": torch.device("cpu")}, '| write device="cpu"'),
        ({"optimizer": "torch.optim.AdamW"}, '| write "torch.optim:AdamW"; a function is'),
        ({"model": "vit.vit"}, '| write "vit:vit"; a function is'),
        ({"lr": 0.1}, 'optimizer=("torch.optim:AdamW", {"lr": ...})'),
        ({"learning_rate": 0.1}, 'optimizer=("torch.optim:AdamW", {"lr": ...})'),
        ({"validation_every": 3}, 'validation={"function": ..., "every": ...}'),
        ({"checkpoint_keep": 3}, 'checkpoint={"keep": ...}'),
        ({"plan": {"workers": 3}}, "plan.stages x plan.replicas x plan.shards"),
    ],
)
def test_what_is_written_otherwise_elsewhere_is_shown_as_it_is_written_here(given, cure):
    assert cure in refused(**given)


def test_of_several_wrong_arguments_each_has_its_cure():
    with pytest.raises(ConfigError) as found:
        raypar.Trainer(
            model=GIVEN["model"],
            train_dataset=GIVEN["data"],
            num_train_epochs=3,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            device="cuda",
            loss="mse",
        )
    assert str(found.value).splitlines() == [
        "unknown argument train_dataset; unknown argument num_train_epochs; unknown argument per_device_train_batch_size; "
        "unknown argument gradient_accumulation_steps; "
        "loss.function: expected module:name, for example torch.optim:AdamW, got 'mse' (str); "
        "device: expected 'cpu' or 'gpu', got 'cuda' (str); "
        "steps is missing; batch_size is missing; microbatches is missing; data is missing",
        "  cure: train_dataset: the training data is `data`, and what a run validates on is `validation`; raypar makes the "
        "batches",
        "        num_train_epochs: the length of a run is `steps`, or `epochs`: passes over `data`",
        "        per_device_train_batch_size, gradient_accumulation_steps: a batch is cut into `microbatches`, whose gradients "
        "are added up; batch_size counts the samples of one step",
        '        loss.function: write "torch.nn.functional:mse_loss"; a function is "module:name", the function itself, '
        "or a pair (function, keyword arguments)",
        '        device: write device="gpu"',
        "        steps, batch_size, microbatches, data: give these arguments",
    ]


@pytest.mark.parametrize(
    "given, cure",
    [
        ({"model": "bert-base-uncased"}, "a function makes it: lambda: AutoModel.from_pretrained('bert-base-uncased')"),
        ({"plan": "ddp"}, "; the parallel plan is `plan`: plan.stages (pipeline), plan.replicas (data)"),
        ({"optimizer": lambda: torch.optim.SGD([torch.ones(1)])}, "or lambda parameters: torch.optim.AdamW(parameters, ...)"),
    ],
)
def test_what_other_frameworks_take_in_the_place_of_an_argument_is_told_its_form_here(given, cure):
    assert cure in refused(**given)


def test_a_model_that_is_all_frozen_is_said_to_train_nothing():
    for model in (nn.Sequential(nn.Linear(2, 2)), Plain()):
        model.requires_grad_(False)
        (line,) = preflight(raypar.Trainer(**(GIVEN | {"model": model})).job).notes
        assert line.startswith("no parameter of the model requires a gradient: the run trains nothing\n  cure: leave requires_")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_samples_of_another_dtype_are_the_only_thing_said_and_the_cure_casts_them(dtype, monkeypatch, tmp_path):
    """The wrong dtype of a module's input was a warning about a comparison first, and the error's cure was a debugger."""
    monkeypatch.setattr(launch_run, "_connect_and_follow", lambda *given: pytest.fail("nothing was refused"))
    samples = [(torch.ones(2, dtype=dtype), torch.ones(2))] * 4
    told: list[object] = []
    trainer = raypar.Trainer(**(GIVEN | {"model": Plain, "data": samples, "run_dir": str(tmp_path)}))
    with pytest.raises(InputError, match="must have the same dtype") as found:
        train_job_in_new_folder(trainer.job, told.append)
    assert found.value.cure.startswith("cast the fields of the samples in the data set's __getitem__ to the dtype")
    assert not [event for event in told if isinstance(event, RunWarning)]


def test_a_loss_that_warns_is_not_shown_by_every_check():
    """Python shows a warning once for each place that calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        preflight(raypar.Trainer(**(GIVEN | {"data": [(torch.ones(2), torch.ones(()))] * 4, "loss": warns})).job)
    places = {Path(one.filename).name for one in caught if "broadcast" in str(one.message)}
    assert places and places.isdisjoint({"job_preflight.py", "check_loss.py"})


def warns(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    warnings.warn("this will broadcast", stacklevel=2)
    return (output - target[:, None]).square().mean()


class Plain(ViT):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class TrainerCallback:
    """Has the name of one of transformers, and is none of raypar."""


@pytest.mark.parametrize(
    "given, what",
    [
        ([TrainerCallback()], "callbacks has a TrainerCallback of test_cures, which is no raypar.Callback"),
        ([TrainerCallback], "callbacks has the class TrainerCallback of test_cures, which is no raypar.Callback"),
        ([object()], "callbacks has an object, which is no raypar.Callback"),
    ],
)
def test_what_is_no_callback_is_told_so_in_a_sentence_that_is_no_tautology(given, what):
    said = refused(callbacks=given)
    assert said.startswith(f"{what} | derive your class from raypar.Callback, and give an object of it; its hooks are on_")


def test_a_trainer_trains_by_fit():
    with pytest.raises(AttributeError, match=r"^Trainer has no attribute 'train'; fit\(\) trains"):
        raypar.Trainer(**GIVEN).train()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "words, said",
    [
        (["train", "job.yaml", "--epochs", "3"], "--set epochs=..."),
        (["train", "job.yaml", "--steps=3"], "--set steps=..."),
        (["run", "job.yaml"], "did you mean train?"),
        (["TRAIN", "job.yaml"], "did you mean train?"),
        (["list"], "did you mean runs?"),
        (["version"], "did you mean --version?"),
        (["train"], "cure: `raypar train JOB`; `raypar train --help` lists"),
        (["export", "run"], "cure: `raypar export --out ...`; `raypar export --help` lists"),
        (["train", "script.py"], "script.py is a Python script, not a job file\n  cure: a script that calls raypar.Trainer"),
    ],
)
def test_the_command_line_says_how_it_is_written_here(words, said, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 2


def test_workers_beside_a_plan_of_other_workers_are_a_contradiction():
    said = refused(plan={"stages": 2}, workers=4)
    assert said.startswith("the plan has 2 workers = 2 stages x 1 replica, but workers is 4 | leave workers out")
    assert raypar.Trainer(**GIVEN, plan={"stages": 2}, workers=2).workers == 2


def test_what_callbacks_get_is_public_and_in_the_guide():
    guide = (Path(__file__).parents[2] / "examples/guides/your_own_model.md").read_text()
    for kind in (raypar.StepInfo, raypar.ValidationInfo):
        assert f"raypar.{kind.__name__}" in guide and all(f"`{field.name}`" in guide for field in fields(kind))
