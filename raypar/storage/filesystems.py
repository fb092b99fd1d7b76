"""Opens the `pyarrow.fs` file system of a URI, registers file systems that were given as objects, and translates their errors.

A file system that was given as an object (`RunConfig(storage_filesystem=...)`) gets an id, which stands in URIs for it. The
driver and the workers receive its pickle and register it under the same id. So its credentials never appear in a URI.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from raypar.errors import CheckpointError, ConfigError, RayparError
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.storage.storage_uri import FILESYSTEM_SCHEME, StorageUri, parse_storage_uri

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from pyarrow.fs import FileSystem

CONNECT_S, REQUEST_S = 5.0, 15.0
"""Limits for S3 to accept a connection and to answer a request; each request is tried three times."""
WRITE_CHECK_S = 60.0
"""How long the storage may take to write and remove one small object, before a run begins."""
LONGEST_KEY = 110
"""Length of the name of the object that this check writes: about that of the longest one that a run writes below its run_dir (a
worker's part of a checkpoint). A storage may limit names (S3 to 1,024 bytes with all folders)."""
SECRETS_IN = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_KEY")
"""Environment variables whose values are removed from messages."""
STORAGE_CURE = "look at its address, at the network, and at the credentials that this machine has for it"

_registered: dict[str, FileSystem] = {}
"""Id -> file system that was given as an object to a run of this process, or to the run that this process works for."""

T = TypeVar("T")


def place_of_checkpoint_object(given: T, what: str) -> T | str:
    """The path or URI of a `ray.train.Checkpoint`, and anything else as it is. `what`: the argument, for messages.

    It is to be asked before `os.PathLike` is: these objects are that, too, but their `__fspath__` raises.
    """
    filesystem, path = getattr(given, "filesystem", None), getattr(given, "path", None)
    if filesystem is None or not isinstance(path, str):
        return given
    return path if filesystem.type_name == "local" else str(uri_of_filesystem_object(filesystem, path, what))


def uri_of_filesystem_object(
    filesystem: FileSystem, path: str, what: str = "run_config.storage_filesystem"
) -> StorageUri | Path:
    """The URI of `path` on a file system that was given as an object, which is registered; for a local file system, the path.

    `what`: the argument that gave it, for messages. Raises `ConfigError` for an object
    that is not a `pyarrow.fs.FileSystem`, for one that cannot be sent to other processes, and for a path that is a URI.
    """
    from pyarrow.fs import FileSystem, LocalFileSystem, SubTreeFileSystem

    if not isinstance(filesystem, FileSystem):
        raise ConfigError(
            f"{what} is a {type(filesystem).__name__}, not a pyarrow.fs.FileSystem",
            cure="give one of pyarrow.fs (wrap one of fsspec: PyFileSystem(FSSpecHandler(filesystem)))",
        )
    if re.match(r"[A-Za-z][\w+.-]+:/", path):
        raise ConfigError(
            f"{what} is given, and its path is a URI: {shorten(path.partition('?')[0])}",
            cure="give the path in that file system (BUCKET/FOLDER), or the URI alone",
        )
    inner, prefix = filesystem, path
    while isinstance(inner, SubTreeFileSystem):
        inner, prefix = inner.base_fs, f"{inner.base_path.rstrip('/')}/{prefix.lstrip('/')}"
    if isinstance(inner, LocalFileSystem):
        return Path(prefix)
    parts = path.strip("/").split("/")
    if not all(part.isprintable() and part not in ("", ".", "..") for part in parts):
        raise ConfigError(
            f"{what} is given, and {shorten(path)!r} is no path in it",
            cure="give BUCKET/FOLDER, without '..' in it",
        )
    if path.startswith("/") and not is_object_store(filesystem):
        filesystem = SubTreeFileSystem("/", filesystem)  # a URI's path has no slash at its beginning
    return StorageUri(FILESYSTEM_SCHEME, "/".join([register_filesystem(filesystem, what), *parts]))


def register_filesystem(filesystem: FileSystem, what: str = "the file system") -> str:
    """Register a file system in this process; returns its id. Raises `ConfigError` if it cannot be pickled."""
    try:
        known_as = hashlib.sha256(pickle.dumps(filesystem)).hexdigest()[:12]
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be sent to other processes: {type(error).__name__}",
            cure="give a file system of pyarrow.fs that can be pickled, or the URI of the storage",
        ) from None
    _registered[known_as] = filesystem
    return known_as


def pickle_registered_filesystems(locations: Iterable[str]) -> dict[str, bytes]:
    """Id -> pickle of each registered file system on which one of these locations lies, for other processes."""
    places = [parse_storage_uri(text) for text in locations if text.startswith(f"{FILESYSTEM_SCHEME}:/")]
    return {uri.root: pickle.dumps(_registered_filesystem(uri)) for uri in places}


def register_pickled_filesystems(pickled: Mapping[str, bytes]) -> None:
    """Register file systems that another process has pickled, under the same ids."""
    for known_as, content in pickled.items():
        _registered[known_as] = pickle.loads(content)


def open_filesystem(uri: StorageUri) -> tuple[FileSystem, str]:
    """(the `pyarrow.fs.FileSystem` of a place, the path in it). Raises `ConfigError` if it cannot be opened."""
    rest = uri.path.partition("/")[2]
    if uri.scheme == FILESYSTEM_SCHEME:
        return _registered_filesystem(uri), rest
    if uri.scheme == "s3":
        return _open_s3(uri.root, uri.query, _environment_of_s3()), uri.path
    filesystem, base = _open_by_uri(uri.scheme, uri.root, uri.query)
    above = "/" if uri.scheme in ("hdfs", "viewfs") else ""
    return filesystem, above + "/".join(part for part in (base.strip("/"), rest) if part)


def _registered_filesystem(uri: StorageUri) -> FileSystem:
    if uri.root not in _registered:
        raise ConfigError(
            f"{uri} lies on a file system that was given to Trainer as an object, and this process does not have it",
            cure="open it from Python, with the same RunConfig(storage_filesystem=...), or give the storage's own URI (s3://...)",
        )
    return _registered[uri.root]


@functools.cache
def _open_by_uri(scheme: str, root: str, query: str) -> tuple[FileSystem, str]:
    from pyarrow.fs import FileSystem

    uri = StorageUri(scheme, root, query)
    with storage_errors(f"cannot open {uri}", ConfigError):
        filesystem, base = FileSystem.from_uri(str(uri))
    return filesystem, base


def s3_settings(uri: StorageUri) -> dict[str, str]:
    """Region, endpoint and scheme for an S3 URI, from the URI or the environment; what neither gives is left out."""
    return _s3_settings(uri.query, _environment_of_s3())


def _environment_of_s3() -> tuple[tuple[str, str], ...]:
    names = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    return tuple((name, os.environ[name]) for name in names if os.environ.get(name))


def _s3_settings(query: str, environment: tuple[tuple[str, str], ...]) -> dict[str, str]:
    told, known = StorageUri("s3", "", query).settings, dict(environment)
    endpoint = told.get("endpoint_override") or known.get("AWS_ENDPOINT_URL_S3") or known.get("AWS_ENDPOINT_URL")
    region = told.get("region") or known.get("AWS_REGION") or known.get("AWS_DEFAULT_REGION")
    found = {"region": region} if region else {}
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        found |= {"endpoint_override": host.strip("/"), "scheme": told.get("scheme") or scheme or "https"}
    elif "scheme" in told:
        found["scheme"] = told["scheme"]
    return found


@functools.cache
def _open_s3(bucket: str, query: str, environment: tuple[tuple[str, str], ...]) -> FileSystem:
    """The file system of an S3 bucket, one for each environment that settings are taken from."""
    from pyarrow.fs import S3FileSystem, resolve_s3_region

    settings = _s3_settings(query, environment)
    with storage_errors(f"cannot open s3://{bucket}", ConfigError):
        if "region" not in settings:
            settings["region"] = "us-east-1" if "endpoint_override" in settings else resolve_s3_region(bucket)
        return S3FileSystem(**settings, connect_timeout=CONNECT_S, request_timeout=REQUEST_S, allow_delayed_open=True)


# -- errors ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def storage_errors(what: str, kind: type[RayparError] = CheckpointError, cure: str = STORAGE_CURE) -> Iterator[None]:
    """Turn errors of a file system in the block into an error of class `kind` whose text begins with `what`."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError, KeyError) as error:  # pyarrow's own classes derive from these
        raise kind(f"{what}: {storage_error_text(error)}", cure=cure) from None  # pyarrow's text may be long and contain keys


def storage_error_text(error: BaseException) -> str:
    """The first line of a storage's error, without queries of URLs and without the secrets of this process's environment."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, OSError) and error.strerror and not text.startswith(("When", "[")):
        text = error.strerror
    for name in SECRETS_IN:
        if len(os.environ.get(name, "")) >= 4:
            text = text.replace(os.environ[name], "[removed]")
    text = re.sub(r"\?[^\s'\"]*", "?...", text)
    text = re.sub(r"-{20,}", "", text)  # of `check_storage_is_writable`
    text = re.sub(r"(://)[^\s/@'\"]*@", r"\1", text)
    return shorten(text, 400)


def call_with_time_limit(seconds: float, call: Callable[[], T], what: str) -> T:
    """The result of `call`, made in a thread. Raises `ConfigError` if there is none after `seconds`; the thread goes on."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="raypar-storage", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise ConfigError(f"{what} did not answer within {seconds:g} s", cure=STORAGE_CURE)
    if errors:
        raise errors[0]
    return results[0]


def check_storage_is_writable(uri: StorageUri) -> None:
    """Write and remove one small object below a place. Raises `ConfigError` if this fails or takes over `WRITE_CHECK_S`."""

    def check() -> None:
        filesystem, path = open_filesystem(uri)
        name = f"{path}/.raypar-check-{uuid.uuid4().hex[:12]}".ljust(len(path) + LONGEST_KEY, "-")
        with storage_errors(
            f"cannot write to {uri}",
            ConfigError,
            "make the bucket or container, and give this machine credentials that may list, read, write and delete there",
        ):
            if not is_object_store(filesystem):
                filesystem.create_dir(path, recursive=True)
            with filesystem.open_output_stream(name) as file:
                file.write(b"raypar may write here\n")
            filesystem.delete_file(name)

    call_with_time_limit(WRITE_CHECK_S, check, f"the storage of {uri}")


def is_object_store(filesystem: FileSystem) -> bool:
    """Whether a file here appears whole when it is closed, replaces one of the same name, and needs no folder."""
    return _kind(filesystem) in ("s3", "gcs", "abfs")


def list_folders(filesystem: FileSystem, path: str) -> list[str]:
    """The names of the folders in a folder; none if that is not there. Names that lead elsewhere are left out.

    On GCS a folder is only the beginning of objects' names, and pyarrow lists only folders that are objects themselves. So all
    objects below `path` are listed there. Raises what pyarrow raises.
    """
    from pyarrow.fs import FileSelector, FileType

    all_below = _kind(filesystem) == "gcs"
    found = filesystem.get_file_info(FileSelector(path, allow_not_found=True, recursive=all_below))
    names = {info.base_name for info in found if info.type is FileType.Directory and not all_below}
    if all_below:
        below = [(info.path.removeprefix(f"{path}/").partition("/"), info.type) for info in found]
        names = {name for (name, slash, _), kind in below if slash or kind is FileType.Directory}
    return sorted(name for name in names if name.isprintable() and name not in ("", ".", ".."))


def _kind(filesystem: FileSystem) -> str:
    """pyarrow's name for the kind of a file system, such as `s3`; for a part of a file system the kind of the whole."""
    from pyarrow.fs import SubTreeFileSystem

    while isinstance(filesystem, SubTreeFileSystem):
        filesystem = filesystem.base_fs
    return str(filesystem.type_name)


def s3_client_of(uri: StorageUri) -> tuple[BaseClient, str, str] | None:
    """(boto3 client, bucket, key) of a place on S3; None for other storage. Raises `ConfigError` if boto3 is missing."""
    if uri.scheme == "s3":
        settings: Mapping[str, str] = s3_settings(uri)
        path, arguments = uri.path, dict[str, Any]()
    else:
        found = _s3_of_given(uri)
        if found is None:
            return None
        settings, path, arguments = found
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise ConfigError(
            f"the lock of a run on S3 needs boto3, which is not installed ({uri})", cure="pip install boto3, or raypar[s3]"
        ) from None
    if endpoint := settings.get("endpoint_override"):
        arguments["endpoint_url"] = f"{settings.get('scheme') or 'https'}://{endpoint}"
    tries = Config(connect_timeout=CONNECT_S, read_timeout=REQUEST_S, retries={"total_max_attempts": 3, "mode": "standard"})
    region = settings.get("region") or "us-east-1"
    client = boto3.session.Session().client("s3", region_name=region, config=tries, **arguments)
    bucket, _, key = path.partition("/")
    return client, bucket, key


def _s3_of_given(uri: StorageUri) -> tuple[Mapping[str, str], str, dict[str, Json]] | None:
    """(settings, path, boto3's credentials) of a registered file system; None if not S3, or if they are unknown."""
    if uri.scheme != FILESYSTEM_SCHEME:
        return None
    from pyarrow.fs import S3FileSystem, SubTreeFileSystem

    filesystem, path = open_filesystem(uri)
    while isinstance(filesystem, SubTreeFileSystem):
        filesystem, path = filesystem.base_fs, f"{filesystem.base_path.rstrip('/')}/{path}"
    if not isinstance(filesystem, S3FileSystem):
        return None
    known = filesystem.__reduce__()[1][0]  # what it was made with: pyarrow has no other way to ask
    if known.get("anonymous") or known.get("role_arn"):
        return None
    names = {"access_key": "aws_access_key_id", "secret_key": "aws_secret_access_key", "session_token": "aws_session_token"}
    return known, path, {theirs: known[ours] for ours, theirs in names.items() if known.get(ours)}
