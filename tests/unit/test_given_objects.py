"""Objects that users give from Python: what messages show of them, and the forms in which they may be given."""

import functools
import inspect
import pydoc
import re
import textwrap
import typing
from collections.abc import Callable
from typing import Any

import numpy
import pandas
import pytest
import torch
from helpers import tiny_job

import raypar
from raypar import Trainer
from raypar.errors import RayparError
from raypar.files.printable_text import repr_text
from raypar.job import FunctionConfig
from raypar.job.contract import contract_of_job
from raypar.launch import start_new_run
from raypar.launch.result import Result
from raypar.storage.run_folder import RunFolder
from raypar.user_code.traceback_filter import remove_raypar_frames
from raypar.worker.checkpoint import checkpoint_files
from raypar.worker.checkpoint.check_job_changes import changes_at_resume
from raypar.worker.job_preflight import preflight

SAMPLES = [(torch.ones(2), torch.ones(1))] * 8
GOOD: dict[str, Any] = {
    "model": "helpers.tiny_job:model",
    "loss": "helpers.tiny_job:loss",
    "data": SAMPLES,
    "steps": 1,
    "batch_size": 4,
    "microbatches": 2,
}


SCHEDULER = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 1)


def local_model(width: int = 2) -> torch.nn.Module:
    return torch.nn.Linear(width, width)


class MisfittingPair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 3), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


class Verbose:
    """Its `repr` has a line for each of 500 rows."""

    def __repr__(self) -> str:
        return "table\n" + "\n".join(f"row {number}" for number in range(500))

    def forward(self) -> None: ...


class Lazy(Verbose):
    """Its `repr` computes it, as that of a `ray.data.Dataset` does."""

    def __repr__(self) -> str:
        raise AssertionError("the repr of users' data was made")

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter(())


class Callable_(Verbose):
    def __call__(self, *given: Any) -> Any: ...


KEYS = [key for key in {**GOOD, **dict.fromkeys(Trainer.__init__.__annotations__)} if key not in ("return",)]


@pytest.mark.parametrize("key", KEYS)
def test_no_message_about_an_argument_shows_more_than_a_line_of_it(key: str):
    for value in (Verbose(), Lazy(), Callable_()):
        forms: list[Any] = [value, (value, {}), {"function": value}, (tiny_job.model, {"x": value}), {"x": value}]
        if not isinstance(value, Lazy):  # a partial is known by the repr of its arguments
            forms += [[value], functools.partial(tiny_job.model, value)]
        for given in forms:
            try:
                Trainer(**{**GOOD, key: given}).to_yaml()
            except RayparError as error:
                assert len(error.what) < 700 and "row 3" not in str(error) and error.what.count("\n") <= 1, str(error)
                assert len(error.cure) < 700 and error.cure.count("\n") <= error.what.count("; "), "a line for each error"
    assert FunctionConfig(function=Callable_()).label == "Callable_"


def test_a_value_in_a_message_has_one_line_and_python_s_own_are_as_python_writes_them():
    for value in (3, 1.5, None, "a'b", b"x", [1, (2,), {"b": 1, "a": {3}}], torch.float32, (), {}, set(), frozenset({1})):
        assert repr_text(value) == repr(value)
    assert repr_text(Verbose()) == "<Verbose>" and repr_text([Lazy(), {"a": Verbose()}]) == "[<Lazy>, {'a': <Verbose>}]"
    assert repr_text(10**5000) == "<int>" and len(repr_text("x" * 5000)) <= 203 and len(repr_text(list(range(10**6)))) <= 203
    endless: list[Any] = []
    endless.append(endless)
    assert len(repr_text(endless)) < 100


def test_what_is_no_map_style_data_set_is_refused_before_anything_starts():
    generator = (one for one in SAMPLES)
    for given, cure in ((generator, "a function"), (iter([1]), "list(data)"), ({1}, "sorted(data)")):
        for key in ("data", "validation"):
            for form in (given, {"function": given, "input": "x"}):
                with pytest.raises(RayparError, match=f"^{key} is an? .*, which cannot be read by sample id") as found:
                    Trainer(**{**GOOD, key: form})
                assert cure in found.value.cure

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any: ...

    assert isinstance(Trainer(**{**GOOD, "data": Stream()}).job.data.call(), Stream)
    with pytest.raises(RayparError, match=r"^data is a DataLoader with batch_size 1, and the job's batch_size is 4\n"):
        Trainer(**{**GOOD, "data": torch.utils.data.DataLoader(SAMPLES)})  # type: ignore[arg-type]


class Samples:
    def __init__(self, count: int) -> None:
        self.count = count


@pytest.mark.parametrize("key", ["data", "validation", "model", "loss", "optimizer", "lr_schedule"])
def test_a_pair_is_taken_inside_of_a_section_as_everywhere_else(key: str):
    function: dict[str, Callable[..., Any]] = {"data": Samples, "validation": Samples, "optimizer": torch.optim.SGD}
    pair = (function.get(key, tiny_job.model), {"count": 8})
    inside, outside = Trainer(**{**GOOD, key: {"function": pair}}).job, Trainer(**{**GOOD, key: pair}).job
    assert getattr(inside, key) == getattr(outside, key) and getattr(inside, key).args == {"count": 8}
    with pytest.raises(RayparError, match=f"^{key} has arguments for its function twice"):
        Trainer(**{**GOOD, key: {"function": pair, "args": {"count": 9}}})


def test_a_pair_is_taken_inside_of_a_callback():
    pair = (Samples, {"count": 1})
    inside, outside = (Trainer(**GOOD, callbacks=[form]).job for form in ({"function": pair}, pair))
    assert inside.callbacks == outside.callbacks


def test_a_run_without_a_job_file_names_the_objects_that_no_file_can_name(tmp_path, monkeypatch):
    made: list[RunFolder] = []
    monkeypatch.setattr(start_new_run, "launch_run", lambda choose, options, tell: made.append(options.make_folder(None)))
    monkeypatch.setattr(start_new_run, "plan_json", lambda chosen: "{}")
    job = Trainer(**{**GOOD, "loss": lambda output, target: output.sum()}, run_dir=tmp_path).job
    told = list[Any]()
    start_new_run.train_job_in_new_folder(job, told.append)
    (said,) = [event.text for event in told if "job.yaml" in event.text]
    assert said.startswith("the run gets no job.yaml: the job cannot be written as a job file: loss.function is")
    assert "\n" not in said and "`raypar resume`, `evaluate` and `predict` will refuse it" in said
    with pytest.raises(RayparError) as found:
        RunFolder.find(made[0].path)
    assert "loss.function is test_a_run_without_a_job_file" in found.value.what and "<lambda>" in found.value.what
    assert "data.function is an object (list)" in found.value.what and "model" not in found.value.what
    assert "put what is named here into a module" in found.value.cure
    made[0].why_no_job.unlink()  # a run of an earlier release
    with pytest.raises(RayparError, match="from functions without names, or it was removed"):
        RunFolder.find(made[0].path)


class Stacks:
    """A collator, as `transformers` has them."""

    def __call__(self, samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples)


collator = Stacks()


def test_a_collator_that_is_named_gives_the_run_a_job_file_and_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(start_new_run, "launch_run", lambda choose, options, tell: None)
    for given, said in (("test_given_objects:collator", 0), (collator, 1)):
        data = {"function": "helpers.tiny_job:Samples", "args": {"size": 8}, "collate": given}
        told = list[Any]()
        job = Trainer(**{**GOOD, "data": data}, plan={}, run_dir=tmp_path).job
        start_new_run.train_job_in_new_folder(job, told.append)
        texts = [event.text for event in told]
        assert sum("gets no job.yaml" in text and 'named as a text, "module:name"' in text for text in texts) == said
        assert preflight(job).graph is not None


def test_a_checkpoint_of_another_job_is_refused_with_the_way_to_begin_with_its_weights(tmp_path):
    before, after = (Trainer(**GOOD, optimizer=(kind, {"lr": 0.1})).job for kind in (torch.optim.SGD, torch.optim.AdamW))
    contract = contract_of_job(before)
    folder = checkpoint_files.create_checkpoint(tmp_path, 1)
    path = checkpoint_files.commit_checkpoint(folder, [], steps_done=1, contract=contract)
    with pytest.raises(RayparError, match=r"belongs to another job: optimizer\.function 'SGD' -> 'AdamW'") as found:
        changes_at_resume(checkpoint_files.load_manifest(path), after)
    assert f"init_from={path}" in found.value.cure


def test_help_begins_with_what_a_trainer_is_an_example_and_its_arguments_in_groups():
    text = pydoc.render_doc(Trainer, renderer=pydoc.plaintext).splitlines()
    lines = [part for line in text for part in (textwrap.wrap(line, 130) or [""])]
    screen = "\n".join(lines[:45])
    assert "Trains a PyTorch model on Ray" in screen and ").fit()" in screen and "Trainer(" in screen
    grouped, last, _ = screen[screen.index("- what is trained:") :].partition("price_per_worker_hour")
    grouped += last
    assert set(re.findall(r"\w+", grouped)) >= set(inspect.signature(Trainer).parameters)
    assert max(map(len, text)) < 1500, "the signature has no types"
    assert (
        typing.get_type_hints(Trainer.__init__, vars(raypar.trainer) | {"Callback": raypar.Callback})["epochs"] == float | None
    )


def test_a_result_is_shown_in_ten_lines():
    metrics = {
        "step": 100,
        "loss": 0.123456789,
        "norm": 2.0,
        "lr": 0.001,
        "busy_shares": [0.5] * 500,
        "peak_rss_bytes": [1] * 500,
    }
    result = Result(
        metrics, "runs/net", "done", 100, "all 100 steps are done", checkpoint_path="runs/net/checkpoints/step_00000100",
        history=[metrics] * 100, weights_sha256="ab" * 32, picture_path="runs/net/swimlane.svg",
    )  # fmt: skip
    assert repr(result).splitlines() == [
        "Result of a run, done after 100 steps: all 100 steps are done",
        "  metrics: loss 0.123457, lr 0.001, norm 2",
        "  history: 100 steps and validations (result.history, result.metrics_dataframe)",
        "  folder: runs/net",
        "  checkpoint: runs/net/checkpoints/step_00000100",
        f"  weights: sha256 {'ab' * 32}",
        "  picture: runs/net/swimlane.svg",
    ]
    failed = Result({}, "x" * 5000, "failed", 0, "line\n" * 500, RayparError("what\n" * 500, "cure"))
    assert len(repr(failed).splitlines()) <= 10 and len(repr(failed)) < 1200 and "error: RayparError: what" in repr(failed)
    assert len(repr([result, failed])) < 2500


@pytest.mark.parametrize(
    "given, what, cure",
    [
        ({"data": (torch.ones(8, 2), torch.ones(8))}, "data is a tuple of Tensor, Tensor", "TensorDataset(inputs, targets)"),
        ({"validation": (numpy.ones(8), numpy.ones(8))}, "validation is a tuple of ndarray", "TensorDataset"),
        ({"data": pandas.DataFrame({"x": [1.0]})}, "data is a DataFrame, whose [0] is a column", "to_dict('records')"),
        ({"model": local_model().state_dict()}, "model is an OrderedDict of tensors, such as weight", "init_from=FILE"),
        ({"model": "weights/net.pt"}, "model.function: expected module:name", "init_from: weights/net.pt"),
        ({"optimizer": "adamw"}, "optimizer.function: expected module:name", 'write "torch.optim:AdamW"'),
        ({"optimizer": ("SGD", {"lr": 0.1})}, "optimizer.function: expected module:name", 'write "torch.optim:SGD"'),
        ({"loss": "mse"}, "loss.function: expected module:name", 'write "torch.nn.functional:mse_loss"'),
        ({"loss": "CrossEntropyLoss"}, "loss.function: expected", 'write "torch.nn.functional:cross_entropy"'),
        ({"lr_schedule": SCHEDULER}, "lr_schedule is a StepLR of an optimizer that is made already", "(StepLR, {...})"),
        ({"checkpoint": 50}, "checkpoint: expected keys and values", 'for checkpoint.every write {"every": 50}'),
        ({"plan": 4}, "plan: expected keys and values", 'for plan.replicas write {"replicas": 4}'),
    ],
)
def test_what_newcomers_give_gets_the_cure_that_helps(given: dict[str, Any], what: str, cure: str):
    with pytest.raises(RayparError) as found:
        Trainer(**{**GOOD, **given})
    assert found.value.what.startswith(what) and cure in found.value.cure, str(found.value)


class OnGpu(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("Torch not compiled with CUDA enabled")


class OnlySteps(torch.nn.Linear):
    forward = torch.nn.Module.forward

    def training_step(self, batch: object, number: int) -> None: ...


@pytest.mark.parametrize(
    "model, cure",
    [
        (lambda: OnGpu(2, 1), "leave .cuda() and .to(device) out"),
        (lambda: OnlySteps(2, 1), "the network inside of it"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(2, 1)), ""),
        (MisfittingPair, "compare the shapes of samples"),
    ],
)
def test_a_forward_that_fails_shows_the_line_of_the_user_and_few_others(model: Callable[[], torch.nn.Module], cure: str):
    with pytest.raises(RayparError) as found:
        preflight(Trainer(**{**GOOD, "model": model}).job)
    remove_raypar_frames(found.value)
    assert cure in found.value.cure and found.value.what.count("  File ") <= 4, found.value.what
    assert "During handling" not in found.value.what and "_call_impl" not in found.value.what
    if model is MisfittingPair:
        assert "self.second(self.first(x))" in found.value.what


def test_a_dict_among_the_arguments_may_have_keys_that_json_has_not():
    def contract(key: Any) -> Any:
        return contract_of_job(Trainer(**{**GOOD, "model": ("helpers.tiny_job:model", {"sizes": [{key: 1}]})}).job)["model"]

    assert contract((1, 2)) == contract((1, 2)) != contract((1, 3))
    assert contract(7)["args"] == {"sizes": [{"7": 1}]}
