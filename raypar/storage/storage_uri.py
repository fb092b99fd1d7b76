"""The URI of a place on shared storage, parsed and checked: `s3://bucket/runs/mine?region=eu-west-1`. Pure.

A URI may not contain a secret, because it is written into job files and messages. Credentials are found as the storage's own
clients find them: in environment variables, in files of the user, or from the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from raypar.errors import ConfigError
from raypar.files.printable_text import shorten

FILESYSTEM_SCHEME = "filesystem"
"""Scheme of a place on a file system that was given as an object: `filesystem://ID/path`, with an id of `filesystems.py`."""
SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", FILESYSTEM_SCHEME)
"""The schemes that raypar reads and writes, besides `file`."""
QUERY_KEYS = {
    "s3": ("region", "scheme", "endpoint_override"),
    "gs": ("scheme", "endpoint_override", "retry_limit_seconds", "project_id"),
    "gcs": ("scheme", "endpoint_override", "retry_limit_seconds", "project_id"),
    "abfs": ("blob_storage_authority", "dfs_storage_authority", "enable_tls"),
    "abfss": ("blob_storage_authority", "dfs_storage_authority", "enable_tls"),
    "hdfs": ("replication", "user", "buffer_size", "default_block_size", "kerb_ticket"),
    "viewfs": ("replication", "user", "buffer_size", "default_block_size", "kerb_ticket"),
    FILESYSTEM_SCHEME: (),
}
"""Scheme -> the settings that a URI may give. None is a secret."""
ANONYMOUS = "anonymous"
"""The user in a GCS URI for which pyarrow uses no credentials: `gs://anonymous@BUCKET/...`."""
LOCAL_FILE = re.compile(r"file:(?://)?(?P<host>[^/]*)(?P<path>/.*)", re.DOTALL)
_URI = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?", re.DOTALL)
"""One slash is accepted too: `pathlib.Path` turns `s3://` into `s3:/`."""
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials, or the machine's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the machine's service account",
    "abfs": "AZURE_CLIENT_ID, AZURE_CLIENT_SECRET and AZURE_TENANT_ID, `az login`, or the machine's identity",
}


@dataclass(frozen=True)
class StorageUri:
    """A place on shared storage; `str` of it is the URI."""

    scheme: str
    """`s3`, `gs`, ...: one of `SCHEMES`."""
    path: str
    """Bucket and key, or host and path; no slash at its ends."""
    query: str = ""
    """Settings of the storage, as the URI has them."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}" + f"?{self.query}" * bool(self.query)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> StorageUri:
        """The place without the last part of its path."""
        return replace(self, path=self.path.rpartition("/")[0])

    @property
    def root(self) -> str:
        """The first part of the path: the bucket, the host, or the id of a given file system."""
        return self.path.partition("/")[0]

    @property
    def settings(self) -> dict[str, str]:
        """`query` as a mapping."""
        return {
            unquote(key): unquote(value) for key, _, value in (part.partition("=") for part in self.query.split("&")) if key
        }

    def child(self, *names: str) -> StorageUri:
        """The place with these names appended to its path; empty names are left out."""
        return replace(self, path="/".join([self.path, *filter(None, names)]))


def parse_storage_uri(text: str, what: str = "the location") -> StorageUri:
    """The place that a URI names. `what`: the argument or key that gave it.

    Raises `ConfigError` for a scheme that raypar does not know, for a path without a bucket or with `..`, and for settings that
    are unknown or secret.
    """
    found = _URI.fullmatch(text)
    scheme = found["scheme"].lower() if found else ""
    if found is None or scheme not in SCHEMES:
        raise ConfigError(
            f"{what} is {shorten(_shown(text))}: this is not a URI of a storage that raypar supports", cure=_known()
        )
    path, query = found["path"].strip("/"), found["query"] or ""
    user, at, _ = path.partition("/")[0].rpartition("@")
    public = scheme in ("gs", "gcs") and user == ANONYMOUS
    if at and not public and scheme not in ("abfs", "abfss"):  # Azure's is container@account
        raise _secret_error(what, scheme)
    if ":" in path.partition("@")[0] and "@" in path.partition("/")[0]:
        raise _secret_error(what, scheme)
    uri = StorageUri(scheme, path, query)
    parts = path.split("/")
    if not parts[0] or found["path"].startswith("/"):
        raise ConfigError(f"{what} is {shorten(_shown(text))}: it names no bucket", cure=f"give {scheme}://BUCKET/FOLDER")
    bad = next((part for part in parts if part in ("", ".", "..") or not part.isprintable()), None)
    if bad is not None:
        raise ConfigError(f"{what} is {shorten(_shown(text))}: a part of its path is {bad!r}", cure="give the path without it")
    for key in uri.settings:
        if key not in QUERY_KEYS[scheme]:
            if re.search(r"(?i)key|secret|token|password|sas|sig|credential", key):
                raise _secret_error(what, scheme)
            raise ConfigError(
                f"{what} has the setting {shorten(key)!r}, which raypar does not know for {scheme}",
                cure=f"it may have: {', '.join(QUERY_KEYS[scheme]) or 'none'}",
            )
    return uri


def local_path_of_file_uri(text: str, what: str) -> Path | None:
    """The path that a `file://` URI means; None for other texts. Raises `ConfigError` for one of another machine."""
    if not text.lower().startswith("file:/"):
        return None
    found = LOCAL_FILE.fullmatch("file:" + text[5:])
    if found is None or found["host"] not in ("", "localhost"):
        raise ConfigError(
            f"{what} is {shorten(text)}: a file URI has the whole path of a folder of this machine",
            cure="write three slashes (file:///data/runs), or give the path itself",
        )
    return Path(unquote(found["path"]))


def _known() -> str:
    known = ", ".join(f"{scheme}://" for scheme in SCHEMES if scheme != FILESYSTEM_SCHEME)
    return f"give the path of a folder (on a cluster, of storage that all nodes have mounted), file:///..., or one of {known}"


def _shown(text: str) -> str:
    """A URI that may hold a secret, as far as it may be shown."""
    return re.sub(r"(//)[^/@]*@", r"\1", text.partition("?")[0])


def _secret_error(what: str, scheme: str) -> ConfigError:
    where = next((text for start, text in _CREDENTIALS.items() if scheme.startswith(start)), "the storage's own configuration")
    return ConfigError(
        f"{what} holds credentials, and it would be written into job files and messages",
        cure=f"leave them out of the URI: they are found in {where}; or, from Python, give "
        "RunConfig(storage_filesystem=...) a file system that has them",
    )
