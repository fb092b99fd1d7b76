"""Google Cloud Storage on this machine: an emulator with an empty bucket, in a process of its own.

It cannot be a thread of the test: pyarrow holds Python's lock while it waits for an answer. `python -m helpers.fake_gcs FOLDER`
prints its port, and ends at the end of its standard input.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class FakeGcs:
    """A server with one bucket."""

    port: int
    """Where it answers."""
    control: Path
    """A folder. While it has a file `hold` with a pattern, writes of matching names are not answered; the first of them makes a
    file `held` there."""

    def at(self, path: str) -> str:
        """The URI of a path in the bucket."""
        query = f"scheme=http&endpoint_override=127.0.0.1:{self.port}&retry_limit_seconds=20"
        return f"gs://anonymous@bucket/{path}?{query}".replace("/?", "?")

    @property
    def filesystem(self) -> Any:
        """pyarrow's file system of the server."""
        from pyarrow.fs import FileSystem

        return FileSystem.from_uri(self.at(""))[0]

    def all_keys(self, prefix: str = "") -> list[str]:
        """The names of all objects that begin with `prefix`."""
        from pyarrow.fs import FileSelector

        found = self.filesystem.get_file_info(FileSelector("bucket", recursive=True))
        names = [info.path.removeprefix("bucket/") for info in found if info.is_file]
        return sorted(name for name in names if name.startswith(prefix))

    def content(self, key: str) -> bytes:
        """The content of an object."""
        with self.filesystem.open_input_file(f"bucket/{key}") as file:
            return bytes(file.read())


@contextlib.contextmanager
def fake_gcs(control: Path) -> Iterator[FakeGcs]:
    """Run the server during the block."""
    command = [sys.executable, "-m", "helpers.fake_gcs", str(control)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        try:
            assert server.stdout is not None
            yield FakeGcs(int(server.stdout.readline()), control)
        finally:
            server.kill()


def main(control: Path) -> None:
    """Serve until the end of standard input."""
    from gcp_storage_emulator.handlers.buckets import create_bucket
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    logging.disable(logging.CRITICAL)

    class Handler(RequestHandler):  # type: ignore[misc]
        """The emulator's, with writes that can be held."""

        def do_POST(self) -> None:
            """A write, or the beginning of one."""
            self.wait()
            super().do_POST()

        def do_PUT(self) -> None:
            """A part of a write."""
            self.wait()
            super().do_PUT()

        def wait(self) -> None:
            """Wait as long as `hold` exists and matches."""
            with contextlib.suppress(FileNotFoundError):
                while re.search((control / "hold").read_text(), self.path):
                    (control / "held").touch()
                    time.sleep(0.1)

    storage = Storage(use_memory_fs=True)
    create_bucket("bucket", storage)
    # The emulator's own server answers one request after the other: an unread download of pyarrow would block all others.
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, storage))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
