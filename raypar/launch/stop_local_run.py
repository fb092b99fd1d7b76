"""Stops a run of this machine: finds the process that trains in the run folder, and asks it to save and end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from raypar.errors import ClusterError, ConfigError
from raypar.files.writing_process import find_writing_process
from raypar.storage.run_folder import RunFolder

POLL_S = 0.2
"""How often the run's lock is looked at."""
SAY_S = 2.0
"""Time between two lines about the wait."""


def stop_local_run(folder: RunFolder, wait_s: float, say: Callable[[str], None]) -> bool:
    """Stop the run as Ctrl-C does, and wait until its process has let the folder go. Returns False if none trains in it.

    Raises `ConfigError` if the process belongs to somebody else or to another machine, `ClusterError` after `wait_s`.
    """
    if not folder.is_locked():
        return False
    pid = find_writing_process(folder.job)
    if pid is None:
        raise ConfigError(
            f"a process trains in {folder.path}, but it is not one of yours on this machine",
            cure="stop it where it was started (Ctrl-C, or SIGTERM), a submitted job by `raypar stop JOB --address URL`",
        )
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return True
    except PermissionError:
        raise ConfigError(
            f"process {pid}, which trains in {folder.path}, belongs to somebody else", cure="ask who started it"
        ) from None
    began_s = told_s = time.monotonic()
    while folder.is_locked():
        now = time.monotonic()
        if now - began_s > wait_s:
            raise ClusterError(
                f"run {folder.name} (process {pid}) was asked to save and end, and has not within {wait_s:.0f} s",
                cure=f"`raypar status {folder.path}` says what it does; the same command again ends it at once, without saving",
            )
        if now - told_s >= SAY_S:
            told_s = now
            say(f"waiting for run {folder.name} (process {pid}) to finish its step and save, for {now - began_s:.0f} s so far")
        time.sleep(POLL_S)
    return True
