"""A process whose current directory has been removed and made anew."""

import os
import shutil

from raypar.actors.footing import elsewhere, keep_footing


def test_a_removed_current_directory_is_entered_again_once_it_is_there_anew(tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    keep_footing()
    shutil.rmtree(place)
    place.mkdir()
    (place / "file").touch()
    keep_footing()
    assert os.listdir() == ["file"]


def test_where_it_is_gone_for_good_the_code_s_own_folder_will_do(tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    shutil.rmtree(place)
    keep_footing()
    assert "raypar" in os.listdir()


def test_elsewhere_nothing_is_noticed_of_it(tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    with elsewhere():
        shutil.rmtree(place)
        os.getcwd()
        place.mkdir()
    assert os.getcwd() == str(place)
