"""The lease of a run as an object on S3, replaced only by conditional writes. Needs boto3. The lease's age is by S3's clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from raypar.errors import ClusterError, ConfigError
from raypar.storage.filesystems import check_storage_is_writable, s3_client_of, storage_error_text
from raypar.storage.run_lease import LEASE_BYTES, FoundLease, Lease, parse_lease
from raypar.storage.storage_uri import StorageUri

if TYPE_CHECKING:
    from botocore.client import BaseClient

REFUSED = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
"""S3's error codes if the condition of a write does not hold, or if two conditional writes coincide."""
MISSING = {"NoSuchKey", "404"}
"""S3's error codes for an object that does not exist."""
LEASE_FILE = "lease.json"
"""The object's name in the run's folder."""


class S3LeaseStore:
    """A `LeaseStore`: the object `lease.json` in a run's folder on S3."""

    def __init__(self, client: BaseClient, bucket: str, key: str) -> None:
        self.client = client
        """boto3's client for S3."""
        self.bucket = bucket
        """The bucket."""
        self.key = key
        """The key of the object."""

    def read(self) -> FoundLease | None:
        """See `LeaseStore`."""
        with self._errors() as missing:
            found = self.client.get_object(Bucket=self.bucket, Key=self.key)
            with contextlib.closing(found["Body"]) as body:
                content = body.read(LEASE_BYTES + 1)
        if missing:
            return None
        said = found["ResponseMetadata"]["HTTPHeaders"].get("date")
        now_s = parsedate_to_datetime(said).timestamp() if said else time.time()
        return FoundLease(parse_lease(content), found["ETag"], now_s - found["LastModified"].timestamp())

    def put(self, lease: Lease, version: str | None) -> str | None:
        """See `LeaseStore`."""
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        with self._errors(REFUSED) as refused:
            written = self.client.put_object(Bucket=self.bucket, Key=self.key, Body=lease.to_bytes(), **condition)
        return None if refused else str(written["ETag"])

    def honours_conditions(self, lease: Lease) -> bool:
        """Whether this storage refuses a write whose condition does not hold: some S3-compatible storages ignore conditions.

        Call it while the lease is stored; a storage that ignores conditions writes it once more.
        """
        return self.put(lease, None) is None

    @contextlib.contextmanager
    def _errors(self, allowed: set[str] = frozenset()) -> Iterator[list[str]]:  # type: ignore[assignment]
        """Turn boto3's errors into `ClusterError`, except the codes of `allowed` and `MISSING`, which are added to the list."""
        from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

        met: list[str] = []
        try:
            yield met
        except ParamValidationError:
            raise ConfigError(
                "the installed boto3 knows no conditional writes to S3", cure="pip install --upgrade boto3 (1.36 or newer)"
            ) from None
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code not in allowed | MISSING:
                raise ClusterError(
                    f"the lease s3://{self.bucket}/{self.key}: {storage_error_text(error)}",
                    cure="give this machine credentials that may read and write there",
                ) from None
            met.append(code)
        except (BotoCoreError, OSError) as error:
            raise ClusterError(
                f"the lease s3://{self.bucket}/{self.key}: {storage_error_text(error)}",
                cure="look at the storage's address, and at the network",
            ) from None


def s3_lease_store(uri: StorageUri) -> S3LeaseStore | None:
    """The store for the lease of the run at `uri`; None if that is not on S3. Raises `ConfigError` if boto3 is missing."""
    found = s3_client_of(uri)
    return None if found is None else S3LeaseStore(found[0], found[1], f"{found[2]}/{LEASE_FILE}")


def check_run_dir_on_storage(run_dir: StorageUri) -> bool:
    """Whether leases keep runs of several clusters apart below this place.

    Raises `ConfigError` unless files can be written there and, for S3, boto3 is installed.
    """
    has_leases = s3_lease_store(run_dir) is not None
    check_storage_is_writable(run_dir)
    return has_leases
