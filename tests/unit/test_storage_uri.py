"""Places on shared storage as text: what is one, and what is refused before anything starts."""

from pathlib import Path

import pytest

from raypar.errors import ConfigError
from raypar.storage import filesystems
from raypar.storage.checkpoint_store import LocalCheckpointStore, open_checkpoint, open_checkpoint_store
from raypar.storage.filesystems import (
    open_filesystem,
    pickle_registered_filesystems,
    storage_error_text,
    uri_of_filesystem_object,
)
from raypar.storage.run_folder import parse_storage_location
from raypar.storage.storage_uri import StorageUri, local_path_of_file_uri, parse_storage_uri

QUERY = "endpoint_override=127.0.0.1%3A5000&scheme=http"


def test_a_uri_leads_to_places_below_it_and_keeps_its_settings():
    uri = parse_storage_uri(f"s3://bucket/runs/?{QUERY}")
    run = uri.child("mine")
    assert str(run) == f"s3://bucket/runs/mine?{QUERY}"
    assert (run.name, run.parent, run.root) == ("mine", uri, "bucket")
    assert run.settings == {"endpoint_override": "127.0.0.1:5000", "scheme": "http"}
    checkpoint = open_checkpoint(str(run.child("checkpoints", "step_00000004")))
    assert checkpoint.name == "step_00000004" and str(checkpoint) == str(run.child("checkpoints", "step_00000004"))
    assert checkpoint.file_location("manifest.json") == str(run.child("checkpoints", "step_00000004", "manifest.json"))


def test_a_public_bucket_of_gcs_may_be_opened_without_credentials():
    uri = parse_storage_uri("gs://anonymous@bucket/runs?scheme=http&endpoint_override=127.0.0.1:9")
    assert open_filesystem(uri)[1] == "bucket/runs" and open_filesystem(uri)[0].type_name == "gcs"


def test_what_pathlib_makes_of_a_uri_is_that_uri():
    assert parse_storage_uri(str(Path("s3://bucket/runs"))) == StorageUri("s3", "bucket/runs")


@pytest.mark.parametrize(
    "text, what",
    [
        ("ftp://host/x", "does not read or write ftp storage"),
        ("s3://", "names no bucket"),
        ("s3:///runs", "names no bucket"),
        ("s3://bucket/../other", r"part of its path is '\.\.'"),
        ("s3://bucket//runs", "part of its path is ''"),
        ("s3://bucket/a\nb", "part of its path is"),
        ("s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@bucket/runs", "holds credentials"),
        ("s3://bucket/runs?access_key=AKIAIOSFODNN7EXAMPLE&secret_key=wJalrXUtnFEMI", "holds credentials"),
        ("abfs://:wJalrXUtnFEMI@account.dfs.core.windows.net/c/runs", "holds credentials"),
        ("gs://AKIAIOSFODNN7EXAMPLE@bucket/runs", "holds credentials"),
        ("s3://anonymous@bucket/runs", "holds credentials"),
        ("s3://bucket/runs?colour=red", "has the setting 'colour'"),
        ("file://elsewhere/runs", "file URI has the whole path"),
    ],
)
def test_what_cannot_be_a_place_is_refused_with_a_cure_and_shows_no_secret(text: str, what: str):
    with pytest.raises(ConfigError, match=what) as caught:
        parse_storage_location(text, "run_dir")
        local_path_of_file_uri(text, "run_dir")
    assert caught.value.cure and "wJalr" not in str(caught.value) and "AKIA" not in str(caught.value)


def test_a_file_uri_is_the_path(tmp_path: Path):
    assert parse_storage_location(f"file://{tmp_path}", "run_dir") is None
    assert local_path_of_file_uri(f"file://{tmp_path}/a%20b", "run_dir") == tmp_path / "a b"
    assert open_checkpoint_store(f"file://{tmp_path}") == LocalCheckpointStore(tmp_path)


def test_a_file_system_that_was_given_is_known_by_its_id_here_and_in_other_processes(tmp_path: Path):
    from fsspec.implementations.local import LocalFileSystem as Fsspec
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem, SubTreeFileSystem

    given = PyFileSystem(FSSpecHandler(Fsspec()))
    uri = uri_of_filesystem_object(given, "some/where")
    assert isinstance(uri, StorageUri) and open_filesystem(uri)[0].equals(given)
    pickled = pickle_registered_filesystems([str(uri), "s3://bucket/x", "runs/mine"])
    assert list(pickled) == [uri.root]
    filesystems._registered.clear()
    with pytest.raises(ConfigError, match="was given to Trainer as an object"):
        open_filesystem(uri)
    filesystems.register_pickled_filesystems(pickled)
    assert open_filesystem(uri)[0].equals(given)
    assert uri_of_filesystem_object(SubTreeFileSystem(str(tmp_path), LocalFileSystem()), "runs") == tmp_path / "runs"
    for wrong, path in ((object(), "a"), (given, "s3://a/b"), (given, "a/../b")):
        with pytest.raises(ConfigError):
            uri_of_filesystem_object(wrong, path)


def test_an_error_of_a_storage_is_one_line_without_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    text = storage_error_text(OSError("When getting https://u:p@host/x?X-Amz-Signature=abc: wJalrXUtnFEMI\nand more"))
    assert storage_error_text(OSError(f"When writing 'a/.raypar-check-0123{'-' * 90}': no")).endswith("raypar-check-0123': no")
    assert text == "When getting https://host/x?... [removed]"


def test_the_folders_of_a_file_system_that_spells_paths_otherwise_are_found():
    """fsspec's memory file system returns `/bucket/...` for `bucket/...`: no run and no checkpoint was found there."""
    from fsspec.implementations.memory import MemoryFileSystem
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    filesystem = PyFileSystem(FSSpecHandler(MemoryFileSystem()))
    for name in ("folders_of_a_test/b/below", "folders_of_a_test/a"):
        filesystem.create_dir(name)
    assert filesystems.list_folders(filesystem, "folders_of_a_test") == ["a", "b"]
    assert filesystems.list_folders(filesystem, "folders_of_a_test/none") == []
