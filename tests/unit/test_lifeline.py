"""A process that is stopped still exists; one that has ended does not: the kernel says which, without the process."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from raypar.actors import liveness_connection
from raypar.actors.liveness_connection import LivenessConnections, LivenessListener

WORKER = """
import sys, time
from raypar.actors import liveness_connection
from raypar.actors.liveness_connection import LivenessListener
door = LivenessListener("127.0.0.1")
print(door.address, flush=True)
time.sleep(60)
"""


@contextmanager
def worker():
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def within(fact, limit_s=5.0):
    until = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < until
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_ends_is_known_at_once_and_one_that_is_stopped_has_not_ended(stopped):
    async def scene(process, address):
        lines = LivenessConnections()
        lines.hold(0, address)
        await asyncio.sleep(0.1)
        if stopped:
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.2)
        assert not lines.ended
        process.kill()
        await within(lambda: lines.ended == {0})
        lines.drop(0)

    with worker() as (process, address):
        asyncio.run(scene(process, address))


def test_who_cannot_be_reached_in_the_first_place_is_not_said_to_have_ended():
    async def scene():
        door, lines = LivenessListener("127.0.0.1"), LivenessConnections()
        nobody = door.address
        door.close()
        lines.hold(0, nobody)
        lines.hold(1, "")
        await within(lambda: all(task.done() for task in lines._held.values()))
        assert not lines.ended

    asyncio.run(scene())


def test_a_stopped_process_can_still_be_connected_to_by_a_new_driver():
    async def scene(process, address):
        os.kill(process.pid, signal.SIGSTOP)
        lines = LivenessConnections()
        lines.hold(0, address)
        await asyncio.sleep(0.1)
        assert not lines.ended and not lines._held[0].done()
        process.kill()
        await within(lambda: lines.ended == {0})

    with worker() as (process, address):
        asyncio.run(scene(process, address))


class BrokenReader:
    """The driver's end of a connection whose keepalive probes nobody acknowledges."""

    async def read(self):
        await asyncio.sleep(0.01)
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")


def test_a_worker_behind_a_broken_network_has_not_ended_and_is_connected_to_again(monkeypatch):
    """A partition of more than 12 s once counted as the end of the worker: the last copy of a state was given up, alive."""
    monkeypatch.setattr(liveness_connection, "REDIAL_S", 0.01)
    open_connection, dials = asyncio.open_connection, []

    async def broken_at_first(host, port):
        reader, writer = await open_connection(host, port)
        dials.append(port)
        return (BrokenReader(), writer) if len(dials) < 3 else (reader, writer)

    async def scene(process, address):
        monkeypatch.setattr(asyncio, "open_connection", broken_at_first)
        lines = LivenessConnections()
        lines.hold(0, address)
        await within(lambda: len(dials) == 3)
        assert not lines.ended
        process.kill()
        await within(lambda: lines.ended == {0})

    with worker() as (process, address):
        asyncio.run(scene(process, address))


def test_a_worker_that_ended_while_nobody_could_reach_it_is_known_once_its_machine_answers(monkeypatch):
    monkeypatch.setattr(liveness_connection, "REDIAL_S", 0.01)
    open_connection = asyncio.open_connection

    async def scene(process, address):
        async def broken_then_dead(host, port):
            _, writer = await open_connection(host, port)
            process.kill()
            process.wait()
            return BrokenReader(), writer

        monkeypatch.setattr(asyncio, "open_connection", broken_then_dead)
        lines = LivenessConnections()
        lines.hold(0, address)
        await within(lambda: lines.ended == {0})

    with worker() as (process, address):
        asyncio.run(scene(process, address))
