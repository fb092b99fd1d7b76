"""Ctrl-C, SIGTERM or SIGHUP before the first step: one line says that nothing was trained, and nothing is left behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray
from helpers.run_processes import RunProcesses
from helpers.tiny_job import write_job

from raypar import Trainer
from raypar.actors.cluster_info import ClusterCapacity
from raypar.actors.ray_connection import RayConnection, start_local_ray
from raypar.cli import main
from raypar.errors import InputError, Interrupted, WorkerLost
from raypar.launch import Result, raise_run_failure
from raypar.user_code.stop_signals import StopSignal, stop_signals_raise
from raypar.user_code.stop_signals_outside_training import after_the_run, stopped_before_training
from raypar.user_code.traceback_filter import is_raypar_file

ROOT = Path(__file__).parents[2]
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
MOMENTS = ("the model is checked", "Ray starts", "the run folder is there")


def ends_itself(number: int):
    """A model function during which this process gets a signal."""
    os.kill(os.getpid(), number)
    time.sleep(5)


def raises_keyboard_interrupt():
    raise KeyboardInterrupt


def waits_as_ray_does(number: int):
    """A model function whose wait a signal ends as it ends `ray.get`: by a plain `KeyboardInterrupt`, whatever was raised."""
    with contextlib.suppress(KeyboardInterrupt):
        ends_itself(number)
    raise KeyboardInterrupt


@pytest.fixture
def stop_at(monkeypatch, tmp_path):
    """Sends this process a signal at one of `MOMENTS`; Ray is not started. Returns words for the job."""
    monkeypatch.chdir(ROOT / "tests")
    before = {number: signal.getsignal(number) for number in NAMES}
    for number in NAMES:  # these tests may run under nohup, or in a background job
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def arranged(moment: str, number: int) -> list[str]:
        @contextlib.contextmanager
        def connected(*arguments):
            if moment == "Ray starts":
                ends_itself(number)
            yield RayConnection("own", "a local Ray cluster", "nowhere:0")

        def follows(*arguments):
            assert (tmp_path / "runs/tiny").exists()
            ends_itself(number)

        monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", connected)
        monkeypatch.setattr("raypar.actors.cluster_info.cluster_capacity", lambda: ClusterCapacity(1, 5, 5, None))
        monkeypatch.setattr("raypar.launch.launch_run._follow", follows)
        checked = moment == "the model is checked"
        return [f"model={{function: test_stopped_before_training:ends_itself, args: {{number: {int(number)}}}}}"] * checked

    yield arranged
    for number, handler in before.items():
        assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL), "as it was"
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NAMES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_command_that_is_stopped_before_training_says_so_in_one_line(moment, number, stop_at, tmp_path, capfd):
    """SIGTERM ended it without a word, Ctrl-C said `interrupted`."""
    words = [part for word in stop_at(moment, number) for part in ("--set", word)]
    assert main(["train", str(write_job(tmp_path)), *words]) == 130
    (line,) = capfd.readouterr().err.splitlines()
    said = f"stopped before training began ({NAMES[number]}): nothing was trained, and nothing is left of this start"
    assert line == said and not (tmp_path / "runs/tiny").exists()


def test_a_signal_when_the_run_is_over_says_how_the_run_ended(stop_at, tmp_path, monkeypatch, capfd):
    """While this process leaves Ray, or computes the hash of the weights: `interrupted`, as if the run were."""

    @contextlib.contextmanager
    def connected(*arguments):
        yield RayConnection("own", "a local Ray cluster", "nowhere:0")
        ends_itself(signal.SIGTERM)

    stop_at("", signal.SIGTERM)
    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", connected)
    ended = Result({}, str(tmp_path / "runs/tiny"), "done", 12, checkpoint_path="c/step_12")
    monkeypatch.setattr("raypar.launch.launch_run._follow", lambda *given: ended)
    assert main(["train", str(write_job(tmp_path))]) == 130
    said = "stopped by SIGTERM when the run was over: done after 12 steps, the checkpoint c/step_12 is whole\n"
    assert capfd.readouterr().err == said


def test_a_signal_after_the_driver_was_lost_says_so(stop_at, tmp_path, monkeypatch, capfd):
    """After 9 steps it was `stopped before training began (Ctrl-C): nothing was trained`."""

    @contextlib.contextmanager
    def connected(*arguments):
        try:
            yield RayConnection("own", "a local Ray cluster", "nowhere:0")
        finally:
            ends_itself(signal.SIGINT)

    def lost(*given):
        raise WorkerLost("the driver was lost: its process died", cure="begin the run anew")

    stop_at("", signal.SIGINT)
    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", connected)
    monkeypatch.setattr("raypar.launch.launch_run._follow", lost)
    assert main(["train", str(write_job(tmp_path))]) == 130
    said = "stopped by Ctrl-C when the run was over: it had failed (the driver was lost: its process died)\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_script_that_is_stopped_before_training_gets_an_error_without_frames_of_raypar(moment, stop_at, tmp_path):
    trainer = Trainer.from_yaml(write_job(tmp_path), stop_at(moment, signal.SIGTERM))
    with pytest.raises(Interrupted, match=r"stopped before training began \(SIGTERM\): nothing was trained") as stopped:
        trainer.fit(verbose=False)
    frames = [str(frame.path) for frame in stopped.traceback]
    assert not [path for path in frames if is_raypar_file(path)], frames
    assert stopped.value.__cause__ is None and stopped.value.__suppress_context__


def test_a_keyboard_interrupt_of_users_code_is_an_error_of_that_code(stop_at, tmp_path):
    stop_at("", signal.SIGINT)
    job = ["model={function: test_stopped_before_training:raises_keyboard_interrupt}"]
    with pytest.raises(InputError, match="raised by the code itself: nobody has pressed Ctrl-C"):
        Trainer.from_yaml(write_job(tmp_path), job).fit(verbose=False)


@pytest.mark.parametrize("number", NAMES)
def test_a_signal_that_ends_a_wait_for_ray_before_the_run_is_told_by_its_name(number, stop_at, tmp_path):
    """While rows of Ray Data are read for the checks: `raised by the code itself: nobody has pressed Ctrl-C`."""
    stop_at("", number)
    job = [f"model={{function: test_stopped_before_training:waits_as_ray_does, args: {{number: {int(number)}}}}}"]
    with pytest.raises(Interrupted, match=rf"stopped before training began \({NAMES[number]}\): nothing was trained"):
        Trainer.from_yaml(write_job(tmp_path), job).fit(verbose=False)
    with pytest.raises(Interrupted, match=rf"\({NAMES[number]}\)"), stopped_before_training():
        waits_as_ray_does(number)
    over = f"stopped by {NAMES[number]} when the run was over"
    with pytest.raises(Interrupted, match=over), stopped_before_training(), after_the_run("done"):
        waits_as_ray_does(number)


def test_a_run_that_was_stopped_while_its_workers_started_says_what_is_left(tmp_path):
    """`stopped after 0 steps (Ctrl-C): there is no checkpoint`"""
    new = Result({}, str(tmp_path / "gone"), "interrupted", 0, why="Ctrl-C")
    with pytest.raises(Interrupted) as stopped:
        raise_run_failure(new)
    text = "stopped before training began (Ctrl-C): nothing was trained, and nothing is left of this start"
    assert (stopped.value.what, stopped.value.cure) == (text, "")
    (tmp_path / "job.yaml").touch()
    resumed = Result({}, str(tmp_path), "interrupted", 7, why="Ctrl-C", checkpoint_path="c/step_7")
    with pytest.raises(Interrupted) as stopped:
        raise_run_failure(resumed)
    assert "nothing was trained, and the checkpoint c/step_7 is as it was" in stopped.value.what
    assert stopped.value.cure == f"raypar resume {tmp_path}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_ray_swallows_or_takes_for_itself_still_ends_the_start(number, monkeypatch, tmp_path):
    def swallowing(**arguments):
        from ray._private import utils

        utils.set_sigterm_handler(lambda n, frame: sys.exit(n))
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except KeyboardInterrupt:
            pass

    monkeypatch.setattr(ray, "init", swallowing)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with stop_signals_raise():
        handler = signal.getsignal(number)
        with pytest.raises(StopSignal, match=NAMES[number]), start_local_ray(1):
            pytest.fail("the run went on")
        assert signal.getsignal(number) is handler


class SignalledAtItsEnd:
    """An object whose process gets a signal while Python removes it: what is raised there goes no further."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0.01)


@pytest.mark.parametrize("number", NAMES)
def test_a_signal_in_code_whose_exceptions_python_ignores_still_ends_the_body(number, monkeypatch, capfd):
    """It was lost, and Python printed `Exception ignored in` and a traceback."""
    if signal.getsignal(number) is signal.SIG_IGN:  # `nohup pytest`: SIGHUP is not heard then
        monkeypatch.setattr("raypar.user_code.stop_signals.heard_stop_signals", lambda: [number])
    monkeypatch.setattr(sys, "unraisablehook", hook := sys.__unraisablehook__)
    with pytest.raises(StopSignal, match=NAMES[number]), stop_signals_raise():
        SignalledAtItsEnd(number)
        time.sleep(5)
        pytest.fail("the body went on")
    assert sys.unraisablehook is hook and not capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_such_code_while_ray_starts_ends_the_start_once(number, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    monkeypatch.setattr(ray, "init", lambda **arguments: SignalledAtItsEnd(number))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with stop_signals_raise():
        with pytest.raises(StopSignal, match=NAMES[number]), start_local_ray(1):
            pytest.fail("the run went on")
        time.sleep(0.5)  # no second one follows
    assert not capfd.readouterr().err


SCRIPT = """
import raypar
raypar.Trainer.from_yaml({job!r}).fit()
"""


SIGNALLED_WHILE_IT_CONNECTS = """
import os, signal, sys
import ray._raylet as native

class CoreWorker(native.CoreWorker):
    def __init__(self, *given):
        os.kill(os.getpid(), signal.Signals({number}))

native.CoreWorker = CoreWorker
from raypar.cli import main
sys.exit(main(["train", {job!r}]))
"""
"""The native part of the connection is made by `__cinit__`; the signal comes before Ray's Python code runs on."""


# Both wait in the same way until the process is connected; Ray has a native handler of SIGTERM only.
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), pytest.param(signal.SIGTERM, marks=pytest.mark.ci)]
)
def test_a_signal_while_the_process_connects_to_ray_prints_one_line_and_no_native_stack(number, tmp_path):
    temp = Path(tempfile.mkdtemp(prefix="rp"))
    script = SIGNALLED_WHILE_IT_CONNECTS.format(number=int(number), job=str(write_job(tmp_path)))
    env = {**os.environ, "TMPDIR": str(temp), "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, cwd=ROOT / "tests", capture_output=True, text=True, timeout=120
        )
    finally:
        shutil.rmtree(temp)
    said = f"stopped before training began ({NAMES[number]}): nothing was trained, and nothing is left of this start"
    assert (done.returncode, done.stderr) == (130, said + "\n"), done.stdout + done.stderr


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["command", "script"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", ["[1/", "[2/", "[3/", "[4/"])
def test_on_ray_a_start_that_is_stopped_leaves_nothing(after, number, how, tmp_path):
    home, temp, found = tmp_path / "home", Path(tempfile.mkdtemp(prefix="rp")), RunProcesses()
    home.mkdir()
    job = write_job(tmp_path)
    words = ["-m", "raypar", "train", str(job)] if how == "command" else ["-c", SCRIPT.format(job=str(job))]
    env = {**os.environ, **found.env, "HOME": str(home), "TMPDIR": str(temp), "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    run = subprocess.Popen(
        [sys.executable, *words], env=env, cwd=ROOT / "tests", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for line in run.stdout:
            if line.startswith(after):
                break
        time.sleep(0.3)
        found.see()
        began = time.monotonic()
        run.send_signal(number)
        out, err = run.communicate(timeout=60)
        seconds = time.monotonic() - began
        left = found.left() + [path for path in temp.iterdir() if not path.name.startswith("torchinductor_")]
    finally:
        if run.poll() is None:
            run.kill()
        found.end()
        shutil.rmtree(temp)
    said = f"stopped before training began ({NAMES[number]}): nothing was trained, and nothing is left of this start"
    assert err.splitlines()[-1] == said, out + err
    assert run.returncode == 130 and "Traceback" not in err
    assert not left and not list(home.iterdir()) and not list((tmp_path / "runs").glob("*")), out
    assert seconds < 20, seconds
