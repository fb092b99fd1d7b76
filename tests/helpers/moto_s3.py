"""S3 on this machine: moto's server with an empty bucket, and credentials in the environment that only it takes."""

from __future__ import annotations

import contextlib
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDINTESTS01",
    "AWS_SECRET_ACCESS_KEY": "planted-secret-of-the-tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Found nowhere but here: tests look for these texts in what a run leaves."""


@dataclass
class FakeS3:
    """A server with one bucket."""

    port: int
    client: Any
    """boto3's client."""

    @property
    def uri(self) -> str:
        """The bucket, with the settings that lead to this server."""
        return self.at("")

    def at(self, path: str) -> str:
        """The URI of a path in the bucket."""
        return f"s3://bucket/{path}?endpoint_override=127.0.0.1:{self.port}&scheme=http".replace("/?", "?")

    def all_keys(self, prefix: str = "") -> list[str]:
        """The keys of all objects that begin so, without the empty ones that pyarrow makes for folders."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", []) if found["Key"][-1:] != "/"]

    def content(self, key: str) -> bytes:
        """The content of an object."""
        return bytes(self.client.get_object(Bucket="bucket", Key=key)["Body"].read())


@contextlib.contextmanager
def fake_s3() -> Iterator[FakeS3]:
    """Run the server in a thread of this process during the block."""
    import boto3
    from moto.server import ThreadedMotoServer

    with mock.patch.dict(os.environ, ENVIRONMENT):
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        try:
            _, port = server.get_host_and_port()
            client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
            client.create_bucket(Bucket="bucket")
            yield FakeS3(port, client)
        finally:
            port = server.get_host_and_port()[1]
            reset = urllib.request.Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST")
            urllib.request.urlopen(reset, timeout=60).close()  # what it holds is the process's, not the server's
            server.stop()
