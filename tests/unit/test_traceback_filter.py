"""An error from Python is its two lines below the user's own frames; raypar's are kept where they can be looked at."""

import io
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch
from helpers import tiny_job

import raypar
from raypar.console.event_printer import EventPrinter
from raypar.errors import ConfigError, InputError, Interrupted, PlanError, RayparError, UserCodeError, error_first_line
from raypar.launch.launch_run import describe_end
from raypar.launch.result import Result
from raypar.launch.run_failure import raise_run_failure
from raypar.user_code.traceback_filter import filter_traceback_text, is_raypar_file, is_user_file
from raypar.user_code.user_code_errors import error_text

PACKAGE = Path(raypar.__file__).parent
ROOT = PACKAGE.parent

TEXT = f"""layer 'up' raised ZeroDivisionError: division by zero
  at stage 1, replica 0, step 3, microbatch 2
Traceback (most recent call last):
  File "{PACKAGE}/worker/stage/layer_call.py", line 90, in __call__
    out = self.forward(*inputs)
          ^^^^^^^^^^^^^^^^^^^^^
  File "/elsewhere/_ray_pkg_1/raypar/worker/stage/stage.py", line 9, in forward
    return layer(x)
  [Previous line repeated 3 more times]
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl
    return forward_call(*args, **kwargs)
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
  File "/home/me/model.py", line 12, in forward
    return x / 0
           ~~^~~
ZeroDivisionError: division by zero"""


def test_raypars_frames_and_calls_between_pytorchs_modules_go_and_all_others_stay():
    shown = filter_traceback_text(TEXT)
    assert "/raypar/" not in shown and "repeated" not in shown and "self.forward" not in shown
    assert shown.splitlines()[:3] == TEXT.splitlines()[:3] and shown.splitlines()[-4:] == TEXT.splitlines()[-4:]
    assert "linear.py" in shown and filter_traceback_text(shown) == shown
    assert "_call_impl" not in shown, "how PyTorch comes from a module to its forward"


def test_a_traceback_of_raypars_frames_alone_is_removed_with_its_header():
    frame = f'  File "{PACKAGE}/cli.py", line 1, in f\n    f(1)\n'
    text = f"data set raised TypeError: f() takes 1\nTraceback (most recent call last):\n{frame}TypeError: f()"
    assert filter_traceback_text(text) == "data set raised TypeError: f() takes 1\nTypeError: f()"


def test_which_files_are_raypars_and_which_the_users(tmp_path: Path):
    assert is_raypar_file(str(PACKAGE / "trainer.py")) and is_raypar_file("/other/site-packages/raypar/job/job.py")
    (tmp_path / "raypar").mkdir()
    (tmp_path / "raypar/callbacks.py").write_text("")  # a user's, in a folder of that name
    assert is_user_file(str(tmp_path / "raypar/callbacks.py")) and is_user_file(str(ROOT / "examples/gpt.py"))
    assert not any(is_user_file(name) for name in (traceback.__file__, pytest.__file__, "<frozen importlib._bootstrap>"))
    assert is_user_file("<stdin>") and is_user_file("/home/me/raypar/model.py")


SCRIPT = """
import raypar

def build(**given):
    return raypar.Trainer(loss="m:loss", data="m:data", batch_size=8, microbatches=4, **given)

build(model="m:model", steps="many")
"""


def said(folder: Path, **environment: str) -> list[str]:
    """The traceback that a user's script ends with."""
    (folder / "script.py").write_text(SCRIPT)
    found = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 1, found.stdout + found.stderr
    return found.stderr[found.stderr.index("Traceback") :].splitlines()


def files(lines: list[str]) -> list[str]:
    """Names of the files in a traceback."""
    return [Path(line.split('"')[1]).name for line in lines if line.startswith('  File "')]


def test_a_wrong_argument_is_two_lines_below_the_users_frames(tmp_path: Path):
    lines = said(tmp_path)
    assert files(lines) == ["script.py", "script.py"]
    assert lines[-2:] == [
        "raypar.errors.ConfigError: steps: expected a valid integer, got 'many' (str)",
        "  cure: correct the argument steps",
    ]
    assert "trainer.py" in files(said(tmp_path, RAYPAR_TRACEBACK="whole"))


def test_a_method_that_dataclass_has_written_for_raypar_is_raypars_too():
    """Its frame is in the file `<string>`, as the user's own are under `python -c`."""
    with pytest.raises(PlanError, match="4 microbatches cannot be cut from a batch of 2 samples") as caught:
        raypar.Trainer(model="m:model", loss="m:loss", data="m:data", steps=1, batch_size=2, microbatches=4)
    assert [frame.name for frame in traceback.extract_tb(caught.tb)] == [
        "test_a_method_that_dataclass_has_written_for_raypar_is_raypars_too"
    ]
    with pytest.raises(PlanError) as caught:  # the user's frames
        exec(
            compile(
                "def f(): raypar.Trainer(model='m:f', loss='m:f', data='m:f', steps=1, batch_size=2, microbatches=4)\nf()",
                "<string>",
                "exec",
            ),
            {"raypar": raypar},
        )
    assert [frame.name for frame in traceback.extract_tb(caught.tb)][1:] == ["<module>", "f"]


@pytest.mark.parametrize(
    "model, frames", [("users_models:model", ["users_models.py"]), ("users_broken:f", ["users_broken.py"] * 2)]
)
def test_of_what_the_users_code_raises_the_users_frames_are_shown(model: str, frames: list[str], tmp_path: Path, monkeypatch):
    (tmp_path / "users_broken.py").write_text("def f():\n    import mine_is_missing\n\nf()\n")
    (tmp_path / "users_models.py").write_text("def model():\n    return missing_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    parts = {"loss": "helpers.tiny_job:loss", "data": "helpers.tiny_job:data"}
    trainer = raypar.Trainer(model=model, **parts, steps=2, batch_size=8, microbatches=4)
    with pytest.raises(RayparError) as found:
        trainer.fit(verbose=False)
    lines = "".join(traceback.format_exception(found.value)).splitlines()
    assert not [line for line in lines if str(PACKAGE) in line], "\n".join(lines)
    assert sorted(files(lines)) == sorted([*frames, Path(__file__).name])
    assert lines[-1].startswith("  cure: ")


def test_a_failed_run_keeps_the_whole_text_in_its_folder(tmp_path: Path):
    error = UserCodeError(f"worker 1 (stage 1, replica 0), step 3: {TEXT}", "look at forward")
    with pytest.raises(UserCodeError) as found:
        raise_run_failure(Result({}, str(tmp_path), "failed", 3, error=error))
    assert "layer_call.py" not in str(found.value) and "model.py" in str(found.value)
    assert found.value.cure == f"look at forward; raypar's own frames are in {tmp_path}/error.txt"
    assert "layer_call.py" in (tmp_path / "error.txt").read_text()


def test_a_machine_that_refuses_something_inside_a_run_is_an_error_that_says_what_is_saved(tmp_path: Path):
    def cure(done: int, checkpoint: str | None) -> str:
        full = ConfigError("plan.activations_in /fast does not keep activations: No space left on device", "give a folder")
        with pytest.raises(ConfigError) as found:
            raise_run_failure(Result({}, str(tmp_path), "failed", done, error=full, checkpoint_path=checkpoint))
        return found.value.cure.partition("; raypar's own frames")[0]

    (tmp_path / "job.yaml").write_text("")
    saved = f"{tmp_path}/checkpoints/step_00000003"
    kept = f"the run had done 4 steps, and its last checkpoint is {saved}"
    assert cure(4, saved) == f"give a folder; {kept}: raypar resume {tmp_path}"
    assert cure(4, None) == "give a folder; the run had done 4 steps, and has no checkpoint: begin it anew"
    assert cure(0, None) == "give a folder"


def test_an_interrupted_run_without_a_job_file_is_resumed_from_python(tmp_path: Path):
    stopped = Result({}, str(tmp_path), "interrupted", 3, checkpoint_path=str(tmp_path / "checkpoints/step_00000003"))
    with pytest.raises(Interrupted) as found:
        raise_run_failure(stopped)
    assert found.value.cure == f"give Trainer resume_from_checkpoint={str(tmp_path)!r}"
    (tmp_path / "job.yaml").write_text("")
    with pytest.raises(Interrupted) as found:
        raise_run_failure(stopped)
    assert found.value.cure == f"raypar resume {tmp_path}"


@pytest.mark.parametrize(("done", "said"), [(1, "after 1 step"), (1024, "after 1,024 steps")])
def test_the_ends_of_runs_count_their_steps(done: int, said: str, tmp_path: Path):
    def told(end: str) -> str:
        with pytest.raises(RayparError) as found:
            raise_run_failure(Result({}, str(tmp_path), end, done, why="Ctrl-C", history=[{"step": done}]))
        return found.value.what

    assert told("interrupted") == f"stopped {said} (Ctrl-C): there is no checkpoint"
    assert told("failed") == f"the run failed {said}: Ctrl-C"
    assert told("deposed") == f"another driver has taken this run over {said}: Ctrl-C"
    ended = Result({}, "runs/x", "done", done)
    assert describe_end(ended) == f"done {said}" and f"Result of a run, done {said}: " in repr(ended)


def test_a_printed_result_does_not_hold_the_whole_history():
    assert "'step': 1" not in repr(Result({"loss": 1.0}, "runs/x", "done", 3, history=[{"step": 1}]))


def test_a_mistake_of_raypars_own_keeps_its_frames(tmp_path: Path):
    with pytest.raises(RayparError) as found:
        raise_run_failure(Result({}, str(tmp_path), "failed", 3, error=RayparError(f"the driver failed:\n{TEXT}")))
    assert "layer_call.py" in str(found.value)


def test_errors_are_still_errors_of_their_class_with_what_and_cure():
    with pytest.raises(ConfigError) as found:
        raypar.Trainer(steps="many")  # type: ignore[call-arg]
    assert found.value.args == (found.value.what, found.value.cure)
    assert found.traceback[-1].path == Path(__file__)


class Silent(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_without_a_text_is_named_by_its_class():
    assert error_text(Silent()) == "Silent: <exception str() failed>" and error_first_line(Silent()).startswith("<exception")


def test_what_the_model_function_raises_without_a_text_is_an_input_error_with_the_users_frames():
    def model() -> None:
        raise Silent

    parts = {"loss": "helpers.tiny_job:loss", "data": "helpers.tiny_job:data"}
    with pytest.raises(RayparError, match="raised Silent: <exception str") as found:
        raypar.Trainer(model=model, **parts, steps=2, batch_size=8, microbatches=4).fit(verbose=False)
    assert not [line for line in str(found.value).splitlines() if str(PACKAGE) in line]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of Python 3.11")
def test_raypars_frames_go_from_a_group_of_exceptions_too():
    frames = f'  |   File "{PACKAGE}/cli.py", line 1, in f\n  |     f(1)\n  |     ^^^^\n'
    users = '  |   File "/home/me/model.py", line 12, in forward\n  |     g()\n'
    header = "    | Traceback (most recent call last):\n"
    inner = f'{header}    |   File "{PACKAGE}/cli.py", line 2, in g\n    |     g()\n    | KeyError: 1\n'
    text = f"raised\n  + Exception Group Traceback (most recent call last):\n{frames}{users}  | ExceptionGroup: two\n{inner}"
    shown = filter_traceback_text(text)
    assert "/raypar/" not in shown and "f(1)" not in shown and "    | Traceback" not in shown
    assert shown.splitlines() == [
        "raised",
        "  + Exception Group Traceback (most recent call last):",
        *users.splitlines(),
        "  | ExceptionGroup: two",
        "    | KeyError: 1",
    ]


def test_an_error_about_a_file_whose_name_is_no_text_is_kept_too(tmp_path: Path):
    error = UserCodeError(f"sample 3: cannot read \udcff.png\n{TEXT}", "look at it")
    with pytest.raises(UserCodeError) as found:
        raise_run_failure(Result({}, str(tmp_path), "failed", 3, error=error))
    assert found.value is error and "\\udcff.png" in (tmp_path / "error.txt").read_text()


def test_what_an_output_cannot_encode_is_printed_with_escapes():
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding="ascii")
    EventPrinter(steps=1, out=out).line("ünï \udcff")
    assert written.getvalue() == b"\\xfcn\\xef \\udcff\n"


class Stepless(torch.optim.SGD):
    """An optimizer whose step raises."""

    def step(self, *given: object) -> None:  # type: ignore[override]
        raise ZeroDivisionError("mine")


class Locked(raypar.Callback):
    """A data set and callback that no other process can have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> object:
        return tiny_job.data()[index]


@pytest.mark.parametrize(
    "given, says",
    [
        (
            {"optimizer": Stepless},
            r"^the step of optimizer Stepless, tried on small parameters, raised ZeroDivisionError: mine\n",
        ),
        (
            {"data": Locked()},
            r"^data cannot be sent to other processes: TypeError: cannot pickle .*\n  cure: open files, locks",
        ),
        ({"callbacks": [Locked()]}, r"^callbacks cannot be sent to other processes: TypeError: cannot pickle"),
        ({"data": tiny_job.data(), "validation": Locked()}, r"^validation cannot be sent to other processes: TypeError"),
    ],
    ids=["optimizer", "data", "callbacks", "validation"],
)
def test_what_fails_before_a_run_is_an_error_before_ray_is_started(
    given: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ray.init", lambda **settings: pytest.fail("Ray was started"))
    parts = {"model": "helpers.tiny_job:model", "loss": "helpers.tiny_job:loss", "data": "helpers.tiny_job:data"}
    with pytest.raises(InputError, match=says) as found:
        raypar.Trainer(**{**parts, **given}, steps=2, batch_size=8, microbatches=4).fit(verbose=False)
    assert not [line for line in str(found.value).splitlines() if str(PACKAGE) in line]
