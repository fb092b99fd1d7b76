"""A process whose current directory is removed, and made anew."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_job import write_job

from raypar.actors.removed_working_dir import WorkingDirGuard


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def test_it_is_entered_again_once_it_is_there_anew(place):
    working_dir = WorkingDirGuard()
    working_dir.keep()
    shutil.rmtree(place)
    working_dir.keep()
    assert os.getcwd() == "/", "better than nowhere"
    place.mkdir()
    (place / "file").touch()
    working_dir.keep()
    assert os.listdir() == ["file"]


def test_who_goes_somewhere_else_by_himself_stays_there(place, tmp_path):
    working_dir = WorkingDirGuard()
    shutil.rmtree(place)
    working_dir.keep()
    os.chdir(tmp_path)
    place.mkdir()
    working_dir.keep()
    assert os.getcwd() == str(tmp_path)


@pytest.mark.parametrize("back", ["at once", "later"])
def test_elsewhere_nothing_is_noticed_of_it(place, back):
    working_dir = WorkingDirGuard()
    with working_dir.elsewhere():
        shutil.rmtree(place)
        os.getcwd()
        if back == "at once":
            place.mkdir()
    if back == "later":
        place.mkdir()
        working_dir.keep()
    assert os.getcwd() == str(place)


def test_a_ray_that_does_not_start_in_time_is_one_clear_error():
    """Ray raises a bare `Exception` then."""
    from raypar.actors.ray_connection import _started
    from raypar.errors import ClusterError

    with pytest.raises(ClusterError, match="did not start on this machine: timed out") as found, _started():
        raise Exception("timed out during startup")
    assert "try again" in found.value.cure


def test_no_ray_is_started_where_its_logs_have_no_room(monkeypatch):
    """Ray was waited for three times, half a minute each; then the machine was said to be busy or short of memory."""
    from types import SimpleNamespace

    from raypar.actors import ray_connection
    from raypar.errors import ClusterError

    monkeypatch.setattr("os.statvfs", lambda place: SimpleNamespace(f_frsize=1024, f_blocks=10**6, f_bavail=16, f_files=0))
    with pytest.raises(ClusterError, match=r"the disk is full: .* has 16 KiB left") as found, ray_connection._started():
        ray_connection.make_short_temp_dir()
    assert "TMPDIR" in found.value.cure


def test_no_ray_is_started_where_processes_have_too_little_address_space(monkeypatch):
    """The command ended by SIGABRT, with two lines of C++."""
    from raypar.actors import ray_connection
    from raypar.doctor.checks import refuse_unfit_machine
    from raypar.doctor.gather import read_limits
    from raypar.errors import ClusterError

    monkeypatch.setattr("resource.getrlimit", lambda which: (2**30, -1))
    with pytest.raises(ClusterError, match=r"1.0 GiB of address space each .* needs 2.5"), ray_connection.start_local_ray(2):
        pass
    for enough in (-1, 2**32):
        monkeypatch.setattr("resource.getrlimit", lambda which, limit=enough: (limit, -1))
        refuse_unfit_machine({"limits": read_limits()})


@pytest.mark.part(2)
@pytest.mark.parametrize("limit_kib", [400_000, 1_000_000])
def test_an_address_space_too_small_for_pytorch_is_one_error(limit_kib: int, tmp_path):
    """PyTorch ended with 50 lines of `failed to map segment` or `can't start new thread`."""
    path, resource = (
        write_job(tmp_path),
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2); ",
    )
    code = resource + "from raypar.cli import main; sys.exit(main(['train', sys.argv[2]]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(limit_kib << 10), str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert [line[:40] for line in ended.stderr.splitlines()[-2:]] == [
        f"error: processes may have {limit_kib / 2**20:.1f} GiB of address"[:40],
        "  cure: raise or remove that limit (`ulimit -v"[:40],
    ]


def test_a_ray_that_starts_too_late_is_cleared_away_and_started_again(monkeypatch, tmp_path):
    """Beside twelve processes that compute: Ray gives its raylet 30 s."""
    import contextlib

    import ray

    from raypar.actors.ray_connection import start_ray_with_retries

    ended, folders = [], []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(len(folders)))

    def start(folder):
        folders.append(folder)
        if len(folders) < 3:
            raise Exception("The current node timed out during startup.")

    with contextlib.ExitStack() as stack:
        assert start_ray_with_retries(start, stack) == folders[2] and len(set(folders)) == 3
        assert ended == [1, 2] and [folder.exists() for folder in folders] == [False, False, True]
    assert ended == [1, 2, 3] and not folders[2].exists()
    with pytest.raises(Exception, match="memory"), contextlib.ExitStack() as stack:
        start_ray_with_retries(lambda folder: (_ for _ in ()).throw(MemoryError("no memory")), stack)
