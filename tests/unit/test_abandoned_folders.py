"""The folder of a local Ray cluster is removed by the next start if all processes that would have done it were killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypar.actors import ray_connection
from raypar.actors.local_cluster_temp_folder import remove_abandoned_local_ray
from raypar.files.abandoned_folders import BOOT_ID, OWNER, abandoned_folders, owned_folder

PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from raypar.actors.local_cluster_temp_folder import remove_local_ray_on_exit
folder = Path(sys.argv[1])
folder.mkdir()
(folder / "logs").mkdir()
with remove_local_ray_on_exit(folder):
    with open(folder / "logs" / "out", "w") as out:
        stuck = subprocess.Popen(["sleep", "600"], stdout=out)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    print(stuck.pid, *(pid for pid in children if int(pid) != stuck.pid), flush=True)
    time.sleep(600)
"""
DEADLINE_S = 30.0


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a test, which end with it."""
    made: list[subprocess.Popen[str]] = []
    yield made
    for process in made:
        process.kill()
        process.wait()


def own(folder: Path, started: list[subprocess.Popen[str]]) -> tuple[subprocess.Popen[str], int, int]:
    """(a process that has a local Ray cluster's folder, one that writes in it, the shell that would remove it)."""
    started.append(subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE, text=True))
    assert started[-1].stdout is not None
    stuck, cleaner = map(int, started[-1].stdout.readline().split())
    return started[-1], stuck, cleaner


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_folder_whose_owner_and_shell_were_killed_is_removed_with_who_writes_there(
    tmp_path: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
):
    gone, stuck, cleaner = own(tmp_path / "raypar-gone", started)
    _, other, _ = own(tmp_path / "raypar-live", started)
    for pid in (cleaner, gone.pid):
        os.kill(pid, signal.SIGKILL)
    gone.wait()
    wait_for_end(cleaner)
    assert (tmp_path / "raypar-gone" / "logs" / "out").exists() and is_alive(stuck)
    monkeypatch.setattr(ray_connection.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(ray_connection, "SOCKET_PATH_ROOM", 4096)
    made = ray_connection.make_short_temp_dir()
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "raypar-live", made]) and is_alive(other)
    wait_for_end(stuck)
    os.kill(other, signal.SIGKILL)


def test_a_shell_that_still_lives_owns_the_folder(tmp_path: Path, started: list[subprocess.Popen[str]]):
    """It waits 3 s before it removes what is stuck."""
    gone, stuck, cleaner = own(tmp_path / "raypar-gone", started)
    os.kill(cleaner, signal.SIGSTOP)
    gone.kill()
    gone.wait()
    remove_abandoned_local_ray(tmp_path, "raypar-")
    assert (tmp_path / "raypar-gone").exists() and is_alive(stuck)
    os.kill(cleaner, signal.SIGCONT)
    wait_for_end(cleaner)
    assert not (tmp_path / "raypar-gone").exists() and not is_alive(stuck)


def test_what_is_not_proved_to_be_abandoned_stays(tmp_path: Path):
    names = ("raypar-without", "raypar-elsewhere", "raypar-held", "raypar-gone", "other-gone")
    for name in names:
        (tmp_path / name).mkdir()
    for name in ("other-gone", "raypar-gone"):
        with owned_folder(tmp_path / name) as lock:
            assert len(lock) == 1 and not list(abandoned_folders(tmp_path, "raypar-"))
    (tmp_path / "raypar-elsewhere" / OWNER).write_bytes(BOOT_ID.read_bytes()[::-1])
    (tmp_path / "raypar-link").symlink_to(tmp_path / "raypar-gone")
    (tmp_path / "raypar-without" / OWNER).symlink_to(tmp_path / "raypar-gone" / OWNER)
    with owned_folder(tmp_path / "raypar-held"):
        assert list(abandoned_folders(tmp_path, "raypar-")) == [tmp_path / "raypar-gone"]
        remove_abandoned_local_ray(tmp_path, "raypar-")
    assert {path.name for path in tmp_path.iterdir()} == {*names, "raypar-link"} - {"raypar-gone"}


def test_a_copy_of_a_folder_and_a_mark_that_another_user_has_put_into_one_are_not_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nobody holds the lock of a copy; in a folder that all may write in, anybody can say that it has no owner."""
    (tmp_path / "raypar-live").mkdir()
    with owned_folder(tmp_path / "raypar-live"):
        shutil.copytree(tmp_path / "raypar-live", tmp_path / "raypar-saved")
        assert not list(abandoned_folders(tmp_path, "raypar-"))
    assert list(abandoned_folders(tmp_path, "raypar-")) == [tmp_path / "raypar-live"]
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result([*(of := list(fstat(file)))[:4], of[4] + 1, *of[5:]]))
    assert not list(abandoned_folders(tmp_path, "raypar-"))
