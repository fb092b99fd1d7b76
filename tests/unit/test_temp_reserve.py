"""A full temporary folder costs no local run its driver: some room is kept for it, which is freed when the driver has died."""

from collections import namedtuple

import pytest
from ray.exceptions import ActorDiedError, RayActorError
from test_run_follower import END, Driver, follow, step  # noqa: F401 - a fixture

from raypar.actors import local_cluster_temp_folder
from raypar.actors.local_cluster_temp_folder import RESERVE_BYTES, describe_full_temp, give_reserve_to_ray, room_for_new_driver
from raypar.errors import WorkerLost

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes are free."""

    def made(count: int) -> None:
        monkeypatch.setattr(local_cluster_temp_folder.shutil, "disk_usage", lambda path: Usage(1 << 30, 0, count))

    made(1 << 30)
    return made


@pytest.mark.parametrize("room, kept", [(1 << 30, RESERVE_BYTES), (4 << 20, 512 << 10)])
def test_some_room_is_kept_for_a_new_driver_and_given_back(room, kept, free, tmp_path):
    free(room)
    with room_for_new_driver(tmp_path):
        assert (tmp_path / "reserve").stat().st_blocks * 512 >= kept == (tmp_path / "reserve").stat().st_size
        assert give_reserve_to_ray() == describe_full_temp() == "" and (tmp_path / "reserve").exists()
        free(0)
        said = give_reserve_to_ray()
        assert said.startswith(f"{tmp_path.parent} has 0 KiB left") and f"{kept // 1024} KiB that were kept" in said
        assert "cure: free disk space there" in said and not (tmp_path / "reserve").exists()
        assert give_reserve_to_ray() == "" and describe_full_temp() == f"{tmp_path.parent} has 0 KiB left"
    assert describe_full_temp() == "" and not list(tmp_path.iterdir())


def test_a_driver_that_dies_beside_a_full_temporary_folder_comes_back(follow, free, tmp_path):  # noqa: F811
    """Ray started one after the other, each of which died at its first line, and the run was lost."""
    with room_for_new_driver(tmp_path):
        free(0)
        end, told = follow(Driver([step(1)], RayActorError(), [step(2)], [step(3), END]))
    assert end.end == "done" and [event.kind for event in told] == ["step", "warning", "step", "step"]
    assert "KiB that were kept for a new driver are free now" in told[1].text


def test_where_the_room_does_not_do_the_error_names_the_folder_and_how_the_run_goes_on(follow, free, tmp_path):  # noqa: F811
    checkpoint = {"kind": "checkpoint", "step": 1, "path": "c"}
    with room_for_new_driver(tmp_path), pytest.raises(WorkerLost) as lost:
        free(0)
        follow(Driver([step(1), checkpoint], ActorDiedError()))
    assert f"died before it had reported step 2: {tmp_path.parent} has 0 KiB left" in lost.value.what
    assert "callbacks" not in lost.value.cure and lost.value.cure.startswith("free disk space there, or set TMPDIR")
    assert "`raypar resume /r/tiny` goes on from the run's last checkpoint, after 1 step" in lost.value.cure
