"""Digests of the user's code: what of it counts, what does not, and what a resumed run says of a change."""

import asyncio
import functools
import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.partial_objects import make_with
from helpers.tiny_job import write_job

from raypar.actors import driver_startup
from raypar.job import DataConfig, Job
from raypar.job.metrics_section import MetricConfig
from raypar.job.read_job import load_job
from raypar.launch import Result, launch_run, train_job_in_new_folder
from raypar.launch.trainer_arguments import Given
from raypar.launch.user_code_digests import code_of_job, describe_change_beside_training, describe_code_change
from raypar.worker.checkpoint import checkpoint_files
from raypar.worker.checkpoint.state_key import OPTIMIZER, PARAMETER, StateKey

MODEL = '''"""A model."""
import math
import torch
from . import layers
from .sizes import WIDTH

def make(depth=2):
    """Make it."""
    from mine import late
    return torch.nn.Sequential(*(layers.Layer(WIDTH) for _ in range(depth)))
'''
LAYERS = (
    "import torch\n\nclass Layer(torch.nn.Linear):\n    def forward(self, x):\n        return torch.tanh(super().forward(x))\n"
)


def job(model, loss="torch.nn.functional:mse_loss", **more) -> Job:
    data, optimizer = "mine.data:samples", "torch.optim:SGD"
    return Job(name="j", steps=2, batch_size=4, microbatches=2, model=model, loss=loss, data=data, optimizer=optimizer, **more)


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """A package of the user's, of which nothing is imported."""
    package = tmp_path / "mine"
    package.mkdir()
    for name, text in {
        "__init__": "", "model": MODEL, "layers": LAYERS, "sizes": "WIDTH = 8\n", "late": "", "data": "import math\n",
        "unused": "",
    }.items():  # fmt: skip
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


def test_files_are_followed_over_imports_and_named_below_the_folder_of_import(mine: Path):
    found = code_of_job(job("mine.model:make"))
    files = [f"mine/{name}.py" for name in ("__init__", "data", "late", "layers", "model", "sizes")]
    assert list(found) == [*files, "package torch"]
    assert found["package torch"] == importlib.metadata.version("torch")
    assert "mine.model" not in sys.modules, "nothing was imported"


def test_folders_without_init_are_followed_at_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "no_init" / "inside").mkdir(parents=True)
    (tmp_path / "no_init" / "inside" / "model.py").write_text("def make():\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "no_init/inside/model.py" in code_of_job(job("no_init.inside.model:make"))


@pytest.mark.parametrize("name, before, after, told", [
    ("layers", "tanh", "relu", "mine/layers.py"),
    ("sizes", "8", "16", "mine/sizes.py"),
    ("model", '"""A model."""', "'''Another\ntext.'''  # and a comment", None),
    ("model", '    """Make it."""\n', "", None),
    ("layers", "torch.tanh(super().forward(x))", "torch.tanh(\n            super( ).forward(x),\n        )", None),
    ("unused", "", "x = 1", None),
])  # fmt: skip
def test_code_counts_and_words_about_it_do_not(mine: Path, name, before, after, told):
    then, file = code_of_job(job("mine.model:make")), mine / f"{name}.py"
    file.write_text(file.read_text().replace(before, after) if before else after)
    line = describe_code_change(then, code_of_job(job("mine.model:make")))
    if told is None:
        assert line is None
    else:
        assert line is not None and f"since the checkpoint: {told}; the run goes on" in line


def test_what_is_new_gone_or_of_another_version_is_named_and_checkpoints_without_digests_say_nothing():
    line = describe_code_change(
        {"a.py": "1", "b.py": "1", "package torch": "2.1"}, {"b.py": "2", "c.py": "1", "package torch": "2.2"}
    )
    assert line is not None
    assert line.startswith(
        "the job's code has changed since the checkpoint: a.py (no longer used), b.py, c.py (new), package torch 2.1 -> 2.2; "
    )
    assert describe_code_change(None, {"a.py": "1"}) is None


SCRIPT = """
import torch
{imports}
RATE = {rate}

def scaled(x):
    return x * RATE

class Net(torch.nn.Linear):
    def forward(self, x):
        return torch.{function}(scaled(super().forward(x)))

def make():
    return Net(8, 8)

loss = lambda out, y: (out - y).{power}().mean()
{more}
"""


def of_script(folder: Path, monkeypatch, as_object: bool = False, **parts: str) -> dict[str, str]:
    """The code of a job whose functions a script defines."""
    words = {"imports": "", "rate": "2.0", "function": "tanh", "power": "square", "more": "steps = 3", **parts}
    path = folder / f"script_{abs(hash(tuple(words.values())))}.py"
    path.write_text(SCRIPT.format(**words))
    main = type(sys)("__main__")
    main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(path.read_text(), str(path), "exec"), vars(main))
    model = functools.partial(torch.nn.Sequential, main.Net(8, 8)) if as_object else main.make
    return code_of_job(job(model, main.loss))


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("change, told", [
    ({"function": "relu"}, "script: Net"), ({"rate": "3.0"}, "script: scaled"), ({"power": "abs"}, "script: <lambda>"),
    ({"more": "steps = 4  # and resume"}, None), ({"imports": "import os"}, None),
])  # fmt: skip
def test_of_a_script_what_the_functions_use_counts_and_the_rest_does_not(mine, tmp_path, monkeypatch, change, told, as_object):
    then = of_script(tmp_path, monkeypatch, as_object)
    line = describe_code_change(then, of_script(tmp_path, monkeypatch, as_object, **change))
    assert (line is None) if told is None else (line is not None and f"checkpoint: {told}; " in line)


def test_what_an_object_that_was_given_calls_is_followed(mine: Path):
    from mine.layers import Layer

    class Samples(list):
        def __init__(self) -> None:
            self.transform = Layer(8, 8)

    for name in ("mine.layers", "mine"):
        del sys.modules[name]
    found = code_of_job(job("mine.sizes:WIDTH").replace(data=DataConfig(function=Given(Samples()))))
    assert {"mine/layers.py", "mine/sizes.py"} <= {*found}


def test_every_callable_of_the_job_is_followed_and_of_those_beside_training_another_thing_is_said(mine: Path):
    for name in ("scores", "logits", "held_out", "collated", "rows", "watch"):
        (mine / f"{name}.py").write_text("x = 1\n")
    training = code_of_job(job("mine.model:make"))
    changes = {
        "metrics": {"f1": MetricConfig(function="mine.scores:f1", of="all", preprocess_logits="mine.logits:top")},
        "validation": {"sets": {"own": {"function": "mine.held_out:rows", "collate": "mine.collated:batch"}}, "every": 1},
        "callbacks": ("mine.watch:Watch",),
    }
    found = code_of_job(job("mine.model:make", **changes))
    beside = [f"beside training: mine/{name}.py" for name in ("collated", "held_out", "logits", "scores", "watch")]
    assert found == {**training, **{name: found[name] for name in beside}}
    changed = {**found, beside[3]: "other", "mine/model.py": "other"}
    line = describe_code_change(found, changed)
    assert line is not None and "since the checkpoint: mine/model.py; the run goes on with the code of now" in line
    assert describe_change_beside_training(found, changed) == (
        "code that only validation, metrics and callbacks use has changed since the checkpoint: mine/scores.py; what it "
        "measures does not compare with what was measured before, nor what is chosen by it (best checkpoint, early stopping, "
        "learning rates)"
    )
    assert describe_code_change(training, found) is None and describe_code_change(found, training) is None
    assert describe_change_beside_training(training, found) is None, "checkpoints of before had no digests of it"


@pytest.fixture
def request_of(tmp_path, monkeypatch):
    """`request_of(resume_from)`: the driver's request for a run of a job that is begun, or goes on from a checkpoint."""
    made = []

    def connect(chosen, make_request, options, tell, after) -> Result:
        made.append(make_request(options.make_folder(chosen), "127.0.0.1"))
        return Result({}, "", "failed", 0)

    def start(resume_from=None):
        path = write_job(tmp_path)
        words = ["model={function: mine.net:make}", "plan={stages: 1}", "validation=null"]
        train_job_in_new_folder(load_job(path, words), lambda event: None, resume_from=resume_from)
        return made[-1]

    monkeypatch.setattr(launch_run, "_connect_and_follow", connect)
    return start


def test_a_run_that_goes_on_with_other_code_warns_when_it_begins(mine, tmp_path, request_of):
    """The checkpoint holds digests of the code beside its contract, in which older raypars look for nothing else."""
    file = mine / "net.py"
    file.write_text("from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())\n")
    first = request_of()
    assert first.warnings == () and "mine/net.py" in first.contract["code"]

    def checkpoint(steps: int, contract: dict) -> str:
        begun = checkpoint_files.create_checkpoint(tmp_path / "kept", steps)
        shapes = {"0.weight": (8, 8), "0.bias": (8,)}
        state = {key: (PARAMETER, *(StateKey(OPTIMIZER, name) for name in ("exp_avg", "exp_avg_sq"))) for key in shapes}
        tensors = {(name, kind): torch.zeros(shapes[name]) for name, kinds in state.items() for kind in kinds}
        record = checkpoint_files.write_shard(begun, "a.safetensors", tensors)
        return str(checkpoint_files.commit_checkpoint(begun, [record], steps_done=steps, contract=contract))

    saved = checkpoint(1, first.contract)
    assert request_of(saved).warnings == ()
    file.write_text(file.read_text().replace("Tanh", "ReLU"))
    (line,) = request_of(saved).warnings
    assert line.startswith("the job's code has changed since the checkpoint: mine/net.py; the run goes on with the code of now")
    without = {key: value for key, value in first.contract.items() if key != "code"}
    assert request_of(checkpoint(2, without)).warnings == (), "an older raypar has written it"


def test_the_driver_tells_and_records_the_warnings_of_its_request(monkeypatch):
    told = []
    monkeypatch.setattr(driver_startup, "remove_leftover_placement_groups", lambda run: 0)

    async def awaited(call):
        call()

    startup = make_with(
        driver_startup.DriverStartup,
        side_effects=SimpleNamespace(awaited=awaited, note=lambda event: told.append((event.kind, event.text))),
        recorder=SimpleNamespace(record_resumption=lambda: None, new_events=list),
        feed=SimpleNamespace(pass_on=lambda events: None),
        request=SimpleNamespace(run="r", warnings=("other code",), changes=()),
    )
    asyncio.run(startup._clear_up())
    assert told == [("warning", "other code")]
