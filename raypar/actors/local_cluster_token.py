"""The token of a local Ray cluster, and the file in which this user's other commands find it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from raypar.errors import ConfigError
from raypar.files.untrusted_files import parse_untrusted_json, read_limited_bytes
from raypar.ray_compat.settings import find_token, read_raylet_options

TOKEN_FILE = "auth_token"
"""Name of the file beside Ray's own folder: its address and its token, as JSON."""


def choose_token(environ: Mapping[str, str]) -> str:
    """The user's token if there is one, so that the user's other programs get in, else a random one. Raises `ConfigError`."""
    return find_token(environ) or secrets.token_hex(32)


def write_token_file(folder: Path, address: str, token: str) -> None:
    """Keep the token in `folder`, which only this user may read, for `find_local_token`."""
    content = json.dumps({"address": address, "token": token}).encode()
    file = os.open(folder / TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as open_file:
        open_file.write(content)


def find_local_token(address: str) -> str | None:
    """The token of the local Ray cluster whose control store answers at `address`; None if this user has started none there.

    Its raylets say in which folder Ray's files lie. Another user's raylet, and a file of another address, are not believed.
    """
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, KeyError):
            if entry.stat().st_uid != os.getuid():
                continue
            options = read_raylet_options(int(entry.name))
            if options is None or options["gcs-address"] != address:
                continue
            file = Path(options["temp_dir"]).parent / TOKEN_FILE
            if file.lstat().st_uid != os.getuid():
                continue
            with contextlib.suppress(ConfigError, ValueError):
                found = parse_untrusted_json(read_limited_bytes(file, follow=False, limit=4096, cure="remove it"))
                if isinstance(found, dict) and found.get("address") == address and isinstance(found.get("token"), str):
                    return str(found["token"])
    return None
