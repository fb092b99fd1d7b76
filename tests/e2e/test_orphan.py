"""Workers that nobody asks for anything, for long or any more, without a cluster."""

import asyncio
import os
import time
from types import SimpleNamespace

import pytest
from helpers.partial_objects import make_with

from raypar.actors import worker_actor as module
from raypar.actors.driver_startup import DriverStartup
from raypar.actors.removed_working_dir import WorkingDirGuard
from raypar.actors.worker_actor import WorkerActor
from raypar.elastic.run_policy import RunPolicy


@pytest.mark.parametrize("store", ["raises", "does not answer"])
def test_an_orphan_ends_also_where_ray_cannot_remove_its_place(store, monkeypatch):
    """The thread that was to end it died of the error, and the process stayed."""

    def place():
        if store == "raises":
            raise ConnectionError("no control store")
        time.sleep(60.0)

    ended = []
    monkeypatch.setattr(module.ray.util, "get_current_placement_group", place)
    monkeypatch.setattr(module, "LEAVE_S", 0.2)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    worker = WorkerActor.__new__(WorkerActor)
    worker.heard_s, worker.orphan_timeout_s, worker.doing = time.monotonic(), 0.2, "idle"
    start_s = time.monotonic()
    worker._leave_when_orphaned()
    assert ended == [1] and time.monotonic() - start_s < 5.0


def test_a_worker_that_loads_its_code_for_long_is_no_orphan(monkeypatch):
    """Nobody asks it anything meanwhile: it ended itself after a minute of imports, and so did the next one."""
    ended = []
    monkeypatch.setattr(module, "remove_own_placement_group", lambda: None)
    monkeypatch.setattr(module, "LOADING_S", 1.0)
    monkeypatch.setattr(os, "_exit", ended.append)
    worker = WorkerActor.__new__(WorkerActor)
    worker.working_dir, worker.torch_guard, worker.calls = WorkingDirGuard(), None, {}
    worker.heard_s = start_s = time.monotonic()
    worker.orphan_timeout_s, worker.doing = 0.2, module.LOADING
    worker._leave_when_orphaned()
    assert ended == [1] and time.monotonic() - start_s >= 1.0, "but not for ever"
    worker.heard_s = 0.0
    worker._run_call(module.LOADING, lambda: None)
    assert time.monotonic() - worker.heard_s < 1.0, "it has just been waited for"


def test_a_worker_that_was_stopped_is_no_orphan(monkeypatch):
    """Nobody could ask it anything meanwhile. It ended itself the moment it went on, and with it the only copy of a state."""
    ended, slept = [], []
    sleep, clock = time.sleep, time.monotonic

    def stopped_once(seconds):
        slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(module, "remove_own_placement_group", lambda: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(module.time, "sleep", stopped_once)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock() + 100.0 * bool(slept))
    worker = WorkerActor.__new__(WorkerActor)
    worker.heard_s, worker.orphan_timeout_s, worker.doing = clock(), 0.2, "idle"
    worker._leave_when_orphaned()
    assert ended == [1] and len(slept) >= 4, "it has its time after it goes on, and no more"


def test_who_has_started_is_kept_alive_while_another_loads_its_code():
    """The run's start waits for all, and pings nobody before."""
    pinged = []

    def worker(number, seconds):
        ping = SimpleNamespace(remote=lambda: pinged.append(number))
        hello = SimpleNamespace(remote=lambda joining: asyncio.sleep(seconds, result=f"hello of {number}"))
        return SimpleNamespace(ping=ping, hello=hello)

    async def ask(number, ref):
        return await ref

    startup = make_with(
        DriverStartup,
        request=SimpleNamespace(policy=RunPolicy(workers=2, job_steps=9, elastic=True), start_deadline_s=10.0),
        pool=SimpleNamespace(workers={0: worker(0, 0.0), 1: worker(1, 2.5)}),
        calls=SimpleNamespace(ask=ask),
    )
    assert len(asyncio.run(startup._await_hellos((0, 1)))) == 2
    assert pinged.count(0) >= 2
