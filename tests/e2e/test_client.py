"""What the client makes of signals and of errors, without a cluster."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from helpers.tiny_job import write_job

from raypar.actors import driver_client, ray_connection
from raypar.actors.cluster_info import ClusterCapacity
from raypar.actors.driver_client import collecting_signals
from raypar.actors.ray_connection import RayConnection
from raypar.cli import main
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import ClusterError, DataError
from raypar.launch import Result, raise_run_failure
from raypar.record.events import SavedCheckpoint


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_run_is_collected_so_that_the_run_can_save(number):
    before = signal.getsignal(number)
    if before == signal.SIG_IGN:  # these tests run under nohup, which is respected
        signal.signal(number, signal.SIG_DFL)
    asked_of = signal.getsignal(number)
    try:
        with collecting_signals() as asked:
            os.kill(os.getpid(), number)
            assert len(asked) == 1
        assert signal.getsignal(number) == asked_of
    finally:
        signal.signal(number, before)


def test_ctrl_c_is_heard_by_a_background_job_of_a_shell_script():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with collecting_signals() as asked:
            os.kill(os.getpid(), signal.SIGINT)
            assert asked == ["Ctrl-C"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with collecting_signals() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not asked
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_client_that_was_stopped_itself_does_not_take_the_driver_for_hung(monkeypatch):
    """Ctrl-Z and `fg` half a minute later ended a run that was well."""
    now_s, waits = [0.0], []

    def wait(refs, timeout):
        now_s[0] += 100.0 if not waits else timeout  # stopped while it waited for the first time
        waits.append(now_s[0])
        return (refs, []) if len(waits) == 2 else ([], refs)

    monkeypatch.setattr(driver_client, "ray", SimpleNamespace(wait=wait))
    monkeypatch.setattr(driver_client, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    assert driver_client.wait_for_driver_answer("a call", [], 30.0)
    assert not driver_client.wait_for_driver_answer("another", [], 30.0)
    assert waits[-1] - waits[1] >= 30.0


def test_a_driver_may_take_long_to_start_and_no_time_at_all_to_answer_afterwards(monkeypatch):
    """Beside twelve processes that compute its process took 40 s to start: it was ended, and started again, for ever."""
    waits, ended, told = [], [], []
    news = [
        ([{"kind": "stage", "text": "begins"}], 1, 1),
        ([{"kind": "end", "end": "done", "why": "", "done": 2, "error": None}], 1, 2),
    ]

    def wait(refs, timeout):
        waits.append(timeout)
        slow = sum(waits) < 90.0 or 100.0 <= sum(waits) < 140.0  # to start; and once it has
        return ([], refs) if slow else (refs, [])

    def get(ref):
        if ref == "events":
            waits.append(10.0)
            return news.pop(0)

    def ask(name):
        return SimpleNamespace(remote=lambda *given: name)

    fake = SimpleNamespace(wait=wait, get=get, kill=lambda driver, no_restart: ended.append(sum(waits)))
    monkeypatch.setattr(driver_client, "ray", fake)
    monkeypatch.setattr("raypar.actors.actor_handle_types.ray", fake)
    driver = SimpleNamespace(start=ask("start"), events=ask("events"), stop=ask("stop"))
    request = SimpleNamespace(policy=RunPolicy(workers=2, job_steps=9, elastic=True))
    end = driver_client._follow(driver, request, told.append, [])
    assert end.end == "done"
    (at_s,) = ended
    assert 120.0 < at_s < 140.0, "not while it started, and half a minute after it had last answered"


def test_clients_that_have_seeded_python_alike_do_not_take_each_other_for_one(monkeypatch):
    """Ray draws a client's name from Python's random numbers, and reading the same first sample seeds them alike."""
    names = []

    def init(**given):
        names.append(random.getrandbits(224))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:6379", runtime_env={}))
    monkeypatch.setattr(ray_connection, "check_address_answers", lambda address: None)
    following = []
    for _ in range(2):
        random.seed(7)
        with ray_connection.join_cluster("127.0.0.1:6379", Path.cwd()):
            following.append(random.random())
    assert names[0] != names[1]
    assert following == [random.Random(7).random()] * 2, "who called us goes on with the random numbers that it has seeded"


def test_bad_input_found_during_a_run_is_a_failed_run():
    failed = Result({}, "runs/x", "failed", 3, error=DataError("sample 3 is short", cure="pad it"))
    with pytest.raises(DataError) as caught:
        raise_run_failure(failed)
    assert caught.value.exit_code == 1 and DataError.exit_code == 2


def test_a_run_that_cannot_begin_leaves_no_run_folder(tmp_path, monkeypatch, capfd):
    @contextlib.contextmanager
    def connected(*arguments):
        yield RayConnection("own", "a local Ray cluster", "nowhere:0")

    def taken(*arguments):
        assert (tmp_path / "runs/tiny").exists()
        raise ClusterError("a run called 'tiny' is active on this cluster")

    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", connected)
    monkeypatch.setattr("raypar.actors.cluster_info.cluster_capacity", lambda: ClusterCapacity(1, 5, 5, None))
    monkeypatch.setattr("raypar.actors.driver_client.follow_run", taken)
    assert main(["train", str(write_job(tmp_path))]) == 1
    assert "is active" in capfd.readouterr().err
    assert not (tmp_path / "runs/tiny").exists()


def test_a_run_whose_disk_was_replaced_can_be_resumed_and_nobody_else_trains_in_it_meanwhile(tmp_path, monkeypatch, capfd):
    """Checkpoints, metrics and events were written to the new disk; job.yaml, without which no command takes it, was not."""
    folder = tmp_path / "runs/tiny"

    @contextlib.contextmanager
    def connected(*arguments):
        yield RayConnection("own", "a local Ray cluster", "nowhere:0")

    def follows(request, folder, tell, on_answer):
        before = {path: path.read_bytes() for path in (folder.job, folder.plan, folder.cluster)}
        shutil.rmtree(folder.path)
        (folder.path / "checkpoints/step_00000001").mkdir(parents=True)
        tell(SavedCheckpoint(step=1, path=str(folder.path / "checkpoints/step_00000001")))
        assert before == {path: path.read_bytes() for path in before}
        second = [sys.executable, "-m", "raypar", "resume", str(folder.path)]
        refused = subprocess.run(second, capture_output=True, text=True, cwd=Path(__file__).parents[1])
        assert refused.returncode == 2 and f"process {os.getpid()}, which was started" in refused.stderr, refused.stderr
        return Result({}, str(folder.path), "stopped", 1)

    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", connected)
    monkeypatch.setattr("raypar.actors.cluster_info.cluster_capacity", lambda: ClusterCapacity(1, 5, 5, None))
    monkeypatch.setattr("raypar.launch.launch_run._follow", follows)
    assert main(["train", str(write_job(tmp_path))]) == 0
    out = capfd.readouterr().out
    assert f"files of {folder} were removed: those of job.yaml, plan.json, cluster.json that were gone are written again" in out


def test_an_address_where_nothing_listens_is_an_error_at_once(tmp_path, monkeypatch, capfd):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"  # bound, but it does not listen
        monkeypatch.chdir(Path(__file__).parents[1])
        assert main(["train", str(write_job(tmp_path)), "--address", address]) == 2
    error = capfd.readouterr().err
    assert f"nothing answers at '{address}'" in error and "cure: " in error
    assert not (tmp_path / "runs").exists()
