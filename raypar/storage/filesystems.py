"""Opens the `pyarrow.fs` file system of a URI, keeps those that were given as objects, and words their errors.

A file system that was given as an object (`RunConfig(storage_filesystem=...)`) has an id, by which URIs name it: its pickle
travels to the driver and to workers, which register it under the same id. It may hold credentials, which are in no URI.
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
from typing import Any, TypeVar

from raypar.errors import CheckpointError, ConfigError, RayparError
from raypar.storage.storage_uri import GIVEN, StorageUri, parse_storage_uri
from raypar.untrusted_files import shorten

CONNECT_S, REQUEST_S = 5.0, 15.0
"""How long S3 may take to accept a connection, and for an answer; each request is tried three times."""
CHECK_S = 60.0
"""How long a storage may take to write and remove one small object, before a run begins."""
SECRETS_IN = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_KEY")
"""Environment variables whose values appear in no message."""
STORAGE_CURE = "look at its address, at the network, and at the credentials that this machine has for it"

_given: dict[str, Any] = {}
"""Id -> file system that was given as an object to a run of this process."""

T = TypeVar("T")


def given_filesystem_uri(filesystem: Any, path: str, what: str = "run_config.storage_filesystem") -> StorageUri | Path:
    """The place of `path` on a file system that was given as an object, which this process keeps from now on.

    The path itself for one of this machine's folders. `what`: what gave it, for messages. Raises `ConfigError` for an object
    that is no `pyarrow.fs.FileSystem`, for one that cannot be sent to other processes, and for a path that is a URI.
    """
    from pyarrow.fs import FileSystem, LocalFileSystem, SubTreeFileSystem

    if not isinstance(filesystem, FileSystem):
        raise ConfigError(
            f"{what} is a {type(filesystem).__name__}, not a pyarrow.fs.FileSystem",
            cure="give one of pyarrow.fs (one of fsspec: PyFileSystem(FSSpecHandler(it)))",
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
    if path.startswith("/") and not makes_objects(filesystem):
        filesystem = SubTreeFileSystem("/", filesystem)  # a URI's path has no slash at its beginning
    return StorageUri(GIVEN, "/".join([keep_given_filesystem(filesystem, what), *parts]))


def keep_given_filesystem(filesystem: Any, what: str = "the file system") -> str:
    """Keep a file system for this process; returns its id. Raises `ConfigError`."""
    try:
        known_as = hashlib.sha256(pickle.dumps(filesystem)).hexdigest()[:12]
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be sent to other processes: {type(error).__name__}",
            cure="give a file system of pyarrow.fs that can be pickled, or the URI of the storage",
        ) from None
    _given[known_as] = filesystem
    return known_as


def pickle_given_filesystems(locations: Iterable[str]) -> dict[str, bytes]:
    """Id -> pickle, for other processes, of the file systems given as objects on which these locations lie."""
    places = [parse_storage_uri(text) for text in locations if text.startswith(f"{GIVEN}:/")]
    return {uri.root: pickle.dumps(_given_filesystem(uri)) for uri in places}


def keep_pickled_filesystems(pickled: Mapping[str, bytes]) -> None:
    """Keep file systems that another process has pickled, under the ids that they have there."""
    for known_as, content in pickled.items():
        _given[known_as] = pickle.loads(content)


def open_filesystem(uri: StorageUri) -> tuple[Any, str]:
    """(the `pyarrow.fs.FileSystem` of a place, its path there). Raises `ConfigError` if there can be none."""
    rest = uri.path.partition("/")[2]
    if uri.scheme == GIVEN:
        return _given_filesystem(uri), rest
    if uri.scheme == "s3":
        return _open_s3(uri.root, uri.query, _environment_of_s3()), uri.path
    filesystem, base = _open_by_uri(uri.scheme, uri.root, uri.query)
    return filesystem, f"{base.rstrip('/')}/{rest}" if base or uri.scheme in ("hdfs", "viewfs") else rest


def _given_filesystem(uri: StorageUri) -> Any:
    if uri.root not in _given:
        raise ConfigError(
            f"{uri} lies on a file system that was given to Trainer as an object, and this process does not have it",
            cure="open it from Python, with the same RunConfig(storage_filesystem=...), or give the storage's own URI (s3://...)",
        )
    return _given[uri.root]


@functools.cache
def _open_by_uri(scheme: str, root: str, query: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem

    uri = StorageUri(scheme, root, query)
    with storage_errors(f"cannot open {uri}", ConfigError):
        filesystem, base = FileSystem.from_uri(str(uri))
    return filesystem, base


def s3_settings(uri: StorageUri) -> dict[str, str]:
    """Region, endpoint and scheme of an S3 URI, as far as the URI or the environment says them."""
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
def _open_s3(bucket: str, query: str, environment: tuple[tuple[str, str], ...]) -> Any:
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
    """Turn errors of a file system inside into an error `kind` that begins with `what`."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError, KeyError) as error:  # pyarrow's own classes derive from these
        raise kind(f"{what}: {storage_error_text(error)}", cure=cure) from None  # its text may be long, and name keys


def storage_error_text(error: BaseException) -> str:
    """The first line of a storage's error, without settings of URLs and without the secrets that this process knows."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, OSError) and error.strerror and not text.startswith(("When", "[")):
        text = error.strerror
    for name in SECRETS_IN:
        if len(os.environ.get(name, "")) >= 4:
            text = text.replace(os.environ[name], "[removed]")
    text = re.sub(r"\?[^\s'\"]*", "?...", text)
    text = re.sub(r"(://)[^\s/@'\"]*@", r"\1", text)
    return shorten(text, 400)


def within(seconds: float, call: Callable[[], T], what: str, kind: type[RayparError] = ConfigError) -> T:
    """The result of a call to a storage, which may block for long. Raises `kind` after `seconds`; the call's thread goes on."""
    box: dict[str, Any] = {}

    def run() -> None:
        try:
            box["result"] = call()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=run, name="raypar-storage", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise kind(f"{what} did not answer within {seconds:g} s", cure=STORAGE_CURE)
    if "error" in box:
        raise box["error"]
    found: T = box["result"]
    return found


def check_storage_is_writable(uri: StorageUri) -> None:
    """Write and remove one small object below a place. Raises `ConfigError` if that cannot be done within `CHECK_S`."""

    def check() -> None:
        filesystem, path = open_filesystem(uri)
        name = f"{path}/.raypar-check-{uuid.uuid4().hex[:12]}"
        with storage_errors(
            f"cannot write to {uri}",
            ConfigError,
            "make the bucket or container, and give this machine credentials that may list, read, write and delete there",
        ):
            if not makes_objects(filesystem):
                filesystem.create_dir(path, recursive=True)
            with filesystem.open_output_stream(name) as file:
                file.write(b"raypar may write here\n")
            filesystem.delete_file(name)

    within(CHECK_S, check, f"the storage of {uri}")


def makes_objects(filesystem: Any) -> bool:
    """Whether this is an object store: a file appears whole when it is closed, replaces a former one, and needs no folder."""
    from pyarrow.fs import SubTreeFileSystem

    while isinstance(filesystem, SubTreeFileSystem):
        filesystem = filesystem.base_fs
    return filesystem.type_name in ("s3", "gcs", "abfs")


def s3_client_of(uri: StorageUri) -> tuple[Any, str, str] | None:
    """(boto3 client, bucket, key) of a place on S3; None if it lies elsewhere. Raises `ConfigError` if boto3 is missing."""
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


def _s3_of_given(uri: StorageUri) -> tuple[Mapping[str, str], str, dict[str, Any]] | None:
    """(settings, path, boto3's credentials) of a given file system, if it is one of S3 and its credentials are known."""
    if uri.scheme != GIVEN:
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
