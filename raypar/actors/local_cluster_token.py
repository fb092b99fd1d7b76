"""The token of a local Ray cluster: chosen before its start, and kept where only this user's other processes find it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from raypar.actors.local_nodes import read_raylet_options
from raypar.actors.temporary_environment_variables import temporary_environment_variables
from raypar.errors import ClusterError, ConfigError
from raypar.ray_auth_token import TOKEN_VARIABLE, find_token
from raypar.untrusted_files import parse_untrusted_json, read_limited_bytes

TOKEN_FILE = "auth_token"
"""Name of the file beside Ray's own folder: its address and its token, as JSON."""
ANSWER_S = 5.0
"""How long the control store may take to answer `lets_in_without_token`."""
MODE_VARIABLE = "RAY_AUTH_MODE"
"""The variable that says whether Ray's processes ask for a token. `disabled` is not obeyed by local clusters."""


def choose_token(environ: Mapping[str, str]) -> str:
    """The user's token if there is one, so that the user's other programs get in, else a random one. Raises `ConfigError`."""
    return find_token(environ) or secrets.token_hex(32)


@contextlib.contextmanager
def token_authentication(token: str) -> Iterator[None]:
    """Have this process, and those that it starts in the body, show and ask for `token` in all of Ray's connections.

    Ray reads both variables once: it is told to read them again, at the end too, so that the user's own `ray.init` finds this
    process as it was. Raises `ClusterError` for a Ray in which that is not possible.
    """
    try:
        with temporary_environment_variables({MODE_VARIABLE: "token", TOKEN_VARIABLE: token}):
            _read_variables_again()
            yield
    finally:
        with contextlib.suppress(ClusterError):
            _read_variables_again()


def _read_variables_again() -> None:
    """Have Ray forget the authentication mode and the token that it has read from the environment."""
    try:
        from ray._raylet import AuthenticationTokenLoader, Config

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
    except (ImportError, AttributeError, TypeError) as error:
        raise ClusterError(f"this version of Ray has no tokens as raypar knows them: {error}", cure="use ray 2.60") from error


def shows_token() -> bool:
    """Whether this process shows its token in Ray's connections, and asks others for it."""
    from ray._raylet import AuthenticationMode, get_authentication_mode

    return bool(get_authentication_mode() != AuthenticationMode.DISABLED)


def lets_in_without_token(address: str) -> bool:
    """Whether the control store at `address` (`host:port` or `auto`) answers a process that shows no token.

    Only before this process joins a cluster: meanwhile none of its connections shows one.
    """
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient
    from ray.exceptions import RayError

    try:
        with temporary_environment_variables({MODE_VARIABLE: "disabled"}):
            _read_variables_again()
            GcsClient(address=canonicalize_bootstrap_address(address)).get_all_node_info(timeout=ANSWER_S)
    except (RayError, ConnectionError, RuntimeError, ValueError):
        return False
    finally:
        _read_variables_again()
    return True


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
