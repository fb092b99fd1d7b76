"""Environment variables that steer Ray's processes, and setting them for the length of a block. Needs no Ray.

No public API of Ray sets these, and Ray ignores a variable that it does not know without a word. So nothing here can be
asked for while a run goes on: `tests/unit/test_fences.py` looks for each name in the installed Ray's files instead.
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
"""Longer deadlines for the local Ray cluster: its processes may start on a busy machine, and one of them may be stopped for a
while before Ray calls it lost (Ray's own limit of 7 minutes is meant for machines that are gone). Without them Ray may have to
be started again, and a stopped process may be lost."""

NOT_RECORDED = {"RAY_task_events_report_interval_ms": "0", "RAY_enable_metrics_collection": "false"}
"""Keeps Ray from sending the control store a record of every call of an actor. It would hold them in memory (15 KB for a step
of four workers) for Ray's dashboard, and a local Ray cluster has none; nor a page of metrics, which asks for no token. Without
them memory grows, and `tests/e2e/test_closed_cluster.py` finds the page."""

NICENESS = {"RAY_worker_niceness": "0"}
"""Ray's default lets other processes of the machine come before workers. Without it steps take longer on a busy machine."""

RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""The variable that says how long Ray's processes wait for a control store that is restarted. Without it Ray may end this
process before raypar can say why (`actors/killed_process_message.py` says it then)."""
RAY_RECONNECT_S = 60.0
"""Ray's default for that variable."""

BLOCKING_GET_VARIABLE = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
"""The variable that turns off Ray's warning about blocking calls in an async actor. Without it the warning is printed."""

SUBMITTED_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable that Ray's job server gives to every job's command. Without it a submitted job is taken for one on this machine:
its run lies in the folder that Ray removes."""


@contextlib.contextmanager
def temporary_environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which Ray's processes inherit, and put the old ones back."""
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
