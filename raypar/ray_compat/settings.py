"""Ray's settings: environment variables of its processes, the options of its raylets, the token they share. Imports no Ray.

No public API of Ray sets the variables, and Ray silently ignores one that it does not know. A fence cannot probe for them:
`tests/unit/test_fences.py` looks for each name in the installed Ray's files instead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from raypar.errors import ConfigError
from raypar.fences.private_api_fence import Fence
from raypar.ray_compat import TESTED

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Settings that keep Ray from sending statistics and from printing warnings."""

PATIENT = {
    "RAY_gcs_server_port_wait_time_s": "180",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_grpc_client_keepalive_timeout_ms": "3600000",
}
"""Longer deadlines for the local Ray cluster. Its processes may start on a busy machine, or be suspended for a while; Ray's own
limits would call them lost and the start would have to be repeated."""

NOT_RECORDED = {"RAY_task_events_report_interval_ms": "0", "RAY_enable_metrics_collection": "false"}
"""Turns off two services of the dashboard, which a local Ray cluster does not have: records of every actor call, which fill the
control store's memory (15 KB for a step of four workers), and a page of metrics, which anybody can read without a token
(`tests/e2e/test_closed_cluster.py`)."""

NICENESS = {"RAY_worker_niceness": "0"}
"""Ray's default (15) gives workers a lower priority than other processes, so that steps take longer on a busy machine."""

RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""How long Ray's processes wait for a control store that is restarted. With Ray's default, Ray may end this process before
raypar can say why (then `actors/print_if_killed.py` says it)."""
RAY_RECONNECT_S = 60.0
"""Ray's default for that variable."""

BLOCKING_GET_VARIABLE = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
"""The variable that turns off Ray's warning about blocking calls in an async actor."""

SUBMITTED_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable that Ray's job server sets for every job's command. If a release renames it, raypar takes a submitted job for a
local one, and the run's folder is in the job's working directory, which Ray removes."""


@contextlib.contextmanager
def temporary_environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which Ray's processes inherit, for the length of a block."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


PROC = Path("/proc")
"""Where Linux shows the command lines of processes."""
NAMES = frozenset({"node_id", "gcs-address", "temp_dir"})
"""The options that are read."""


def _read_options(words: list[str]) -> dict[str, str]:
    """The options of a split command line, without their dashes. Raises `KeyError` if one of `NAMES` is missing."""
    found = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    if lacking := sorted(NAMES - found.keys()):
        raise KeyError(f"a raylet without --{' or --'.join(lacking)}")
    return found


OPTIONS = Fence(
    api="ray.core.src.ray.raylet.raylet --node_id --gcs-address --temp_dir",
    reason="a process outside a cluster learns only from it which node of which cluster a raylet of this machine is",
    versions=TESTED,
    feature="recognising the raylets of this machine",
    without="`raypar drain` cannot take a pid, commands in other terminals cannot find a local cluster's token, and `raypar "
    "status` cannot say which local nodes have died",
    probe=lambda: _read_options,
)


def read_raylet_options(pid: int) -> dict[str, str] | None:
    """The options on the command line of the process `pid`, without their dashes; None if it is no raylet."""
    try:
        words = (PROC / str(pid) / "cmdline").read_text().split("\0")
    except OSError:
        return None
    if Path(words[0]).name != "raylet":
        return None
    return OPTIONS.use(lambda read: read(words), None)


def parse_raylet_command(pid: int) -> tuple[str, str] | None:
    """(Ray's node id, address of its cluster) from the command line of the process `pid`; None if it is no raylet."""
    options = read_raylet_options(pid)
    return None if options is None else (options["node_id"], options["gcs-address"])


TOKEN_VARIABLE, PATH_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""The variables that hold the token, and the path of its file."""
DEFAULT_FILE = "~/.ray/auth_token"
"""The token's file where no variable names one."""


def token_file(environ: Mapping[str, str]) -> Path:
    """The file from which the token is read where `RAY_AUTH_TOKEN` is not set. It need not exist."""
    return Path(environ.get(PATH_VARIABLE) or DEFAULT_FILE).expanduser()


def find_token(environ: Mapping[str, str]) -> str | None:
    """The token of `RAY_AUTH_TOKEN`, of the file `RAY_AUTH_TOKEN_PATH`, or of `~/.ray/auth_token`; None if there is none.

    Raises `ConfigError` where a file that is named or there cannot be read, and for a token that no header can hold.
    """
    token = environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        path = token_file(environ)
        try:
            token = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, FileNotFoundError) and not environ.get(PATH_VARIABLE):
                return None
            raise ConfigError(
                f"the token cannot be read from {path}: {getattr(error, 'strerror', None) or 'it is no text'}",
                cure=f"put the cluster's token there, or into {TOKEN_VARIABLE} ({PATH_VARIABLE} names another file)",
            ) from error
    if not token.isprintable():
        raise ConfigError("the cluster's token holds characters that no header can", cure="it is one line of text")
    return token or None
