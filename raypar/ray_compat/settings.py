"""Environment variables that configure Ray's processes, and a context that sets variables. Imports no Ray.

No public API of Ray sets these, and Ray silently ignores a variable that it does not know. A fence cannot probe for them:
`tests/unit/test_fences.py` looks for each name in the installed Ray's files instead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

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
raypar can say why (then `actors/killed_process_message.py` says it)."""
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
