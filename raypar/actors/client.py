"""The client's side of a run: start the driver actor, follow its events, pass Ctrl-C on, remove what is left."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypar import __version__
from raypar.actors.driver_actor import ABANDONED_S, DriverActor
from raypar.actors.driver_shutdown import CLIENT_GONE_S
from raypar.actors.journal import Journal
from raypar.actors.run_request import RunRequest
from raypar.actors.worker_pool import remove_leftovers, run_namespace
from raypar.elastic.actions import EndKind
from raypar.errors import ActiveError, ClusterError, OutlivedError, RayparError, WorkerLost

GRACE_S = 1.5
"""How long the steps in flight may take after Ctrl-C before they are made void."""

TURN_S = 0.5

DRIVER_SILENT_S = 30.0
"""How long the driver may take to answer; it only passes on what has happened."""

DRIVER_START_S = 300.0
"""How long the driver's process may take to start: on a busy machine more than half a minute."""

ALONE_S = 10.0
"""A client asks for news all the time: a driver that has heard nothing for so long has none any more."""

DRIVER_BACK_S = 60.0
"""How long Ray may take to start the driver of an elastic run again."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended. `done`: steps of the job that are done."""

    end: EndKind
    why: str
    done: int
    error: Exception | None


def follow_run(request: RunRequest, tell: Callable[[dict[str, Any]], None]) -> RunEnd:
    """Run a request on the Ray this process is connected to; every event is given to `tell`. Blocks until the run is over.

    The first Ctrl-C (SIGTERM, SIGHUP) asks the driver to save and end, the second one removes everything at once.
    Raises `ActiveError` when a run of this name is active already, `WorkerLost` when the driver itself dies.
    """
    place = run_namespace(request.run)
    home = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    try:
        driver = (
            ray.remote(DriverActor)
            .options(
                name="driver",
                namespace=place,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1 if request.policy.elastic else 0,
                max_concurrency=100,
                scheduling_strategy=home,  # beside the client, not on a node that may be the one to go
            )
            .remote(request.run)
        )
    except ValueError as error:
        raise active_run_error(request.run) from error
    try:
        with collect_signals() as asked:
            return _follow(driver, request, tell, asked)
    finally:
        remove_run(driver, request.run)


def remove_run(driver: Any, run: str) -> None:
    """The driver, and what it has left on the cluster."""
    with contextlib.suppress(Exception):
        ray.kill(driver, no_restart=True)
    with contextlib.suppress(Exception):
        remove_leftovers(run)
    with contextlib.suppress(Exception):
        Journal(run).erase()


def refuse_active_run(run: str) -> None:
    """Raises `ActiveError` when a driver of this run lives on the Ray this process is connected to. Who has lost its client
    saves and ends first (`OutlivedError`), so that the next attempt finds a newer checkpoint and nobody else."""
    try:
        driver = ray.get_actor("driver", namespace=run_namespace(run))
    except ValueError:
        return
    epoch = cursor = 0
    until_s, ends = time.monotonic() + DRIVER_SILENT_S, list[dict[str, Any]]()
    try:
        alone_s = ray.get(driver.alone_s.remote(), timeout=DRIVER_SILENT_S)
        if alone_s < ALONE_S:
            raise active_run_error(run)
        driver.stop.remote("its client is gone, and it is to be resumed", GRACE_S)
        while not ends and time.monotonic() < until_s:
            events, epoch, cursor = ray.get(driver.events.remote(epoch, cursor, 0.3), timeout=DRIVER_SILENT_S)
            ends = [event for event in events if event["kind"] == "end"]
    except RayError as error:  # it does not answer, or dies
        raise active_run_error(run) from error
    if not ends:
        raise active_run_error(run)
    remove_run(driver, run)
    raise OutlivedError(
        f"run {run!r} was still active on this cluster, without a client for {alone_s:.0f} s; now it has ended, "
        f"after {ends[0]['done']} steps",
        cure="the same command again goes on from its last checkpoint",
    )


def active_run_error(run: str) -> ActiveError:
    """There can be only one of a name."""
    minutes = (ABANDONED_S + CLIENT_GONE_S) / 60
    ends = f"one whose client is gone saves its state and ends by itself within {minutes:.0f} minutes"
    return ActiveError(
        f"a run called {run!r} is active on this cluster",
        cure=f"end that one with Ctrl-C where it was started ({ends}), or choose another name",
    )


def _follow(driver: Any, request: RunRequest, tell: Callable[[dict[str, Any]], None], asked: list[str]) -> RunEnd:
    """Ask for news until one says that the run is over. A driver that died and is started again tells the steps once more:
    those that have been told are left out."""
    epoch = cursor = 0
    done, validated, saved = request.policy.first, -1, -1
    passed_on, lost_s, patience_s = False, None, DRIVER_START_S

    def say(event: dict[str, Any]) -> None:
        try:
            tell(event)
        except OSError:
            if not asked:  # after SIGHUP the terminal is gone, and the checkpoint is still to be written
                raise

    started = driver.start.remote(request)
    while True:
        asking = driver.events.remote(epoch, cursor, 0.3)
        if not wait_for_driver(asking, asked, patience_s):
            patience_s = min(patience_s, DRIVER_SILENT_S) if asked else patience_s
            what = f"the driver does not answer for {patience_s:.0f} s"
            cure = "look at its node; `raypar resume` goes on from the last checkpoint"
            if not request.policy.elastic:
                raise WorkerLost(what, cure=cure)
            say({"kind": "warning", "text": f"{what}: it is ended and started again"})
            ray.kill(driver, no_restart=False)
            if not wait_for_driver(asking, asked, DRIVER_BACK_S):
                raise WorkerLost(f"{what}, nor another one {DRIVER_BACK_S:.0f} s later", cure=cure)
        if len(asked) > 1:
            return RunEnd("interrupted", f"{asked[1]} again: ended without waiting", done, None)
        try:
            events, epoch, cursor = ray.get(asking)
            if started is not None and ray.wait([started], timeout=0)[0]:
                ray.get(started)
                started = None
        except RayTaskError as error:  # unforeseen; for example another version of raypar on the cluster
            if isinstance(error, RayparError):
                raise
            raise ClusterError(
                f"the driver could not begin: {error.cause!r}",
                cure=f"if the cluster has another raypar than this machine (here {__version__}), install the same; else please "
                "report it",
            ) from error
        except RayActorError as error:
            now = time.monotonic()
            lost_s = now if lost_s is None else lost_s
            final = not request.policy.elastic or isinstance(error, ActorDiedError)
            if final or now - lost_s > DRIVER_BACK_S:
                cure = "`raypar resume` goes on from the last checkpoint"
                raise WorkerLost(f"the driver was lost: {str(error).strip().splitlines()[0]}", cure=cure) from error
            if started is not None:  # it died before it had begun
                started = driver.start.remote(request)
            passed_on = False
            time.sleep(0.1)
            continue
        lost_s, patience_s = None, DRIVER_SILENT_S
        for event in events:
            if event["kind"] == "end":
                error = pickle.loads(event["error"]) if event["error"] is not None else None
                return RunEnd(event["end"], event["why"], event["done"], error)
            if event["kind"] == "step":
                if event["step"] <= done:
                    continue
                done = event["step"]
            if event["kind"] == "validation":
                if event["step"] <= validated:
                    continue
                validated = event["step"]
            if event["kind"] == "checkpoint":
                if event["step"] <= saved:
                    continue
                saved = event["step"]
            say(event)
        if asked and not passed_on:
            passed_on = True
            say({"kind": "stopping", "time": time.time(), "text": f"{asked[0]}: finishing the step and saving"})
            driver.stop.remote(asked[0], GRACE_S)


def wait_for_driver(asking: Any, asked: list[str], patience_s: float) -> bool:
    """Whether the driver answers within `patience_s`, if only by its death.

    After Ctrl-C it has `DRIVER_SILENT_S` at most; a second Ctrl-C ends the wait. Turns are counted, not seconds: time in which
    this process was itself stopped (Ctrl-Z, a frozen container) does not count.
    """
    turns = patience_s / TURN_S
    while not ray.wait([asking], timeout=TURN_S)[0] and len(asked) < 2:
        turns = min(turns, DRIVER_SILENT_S / TURN_S) - 1 if asked else turns - 1
        if turns < 0:
            return False
    return True


@contextlib.contextmanager
def collect_signals() -> Iterator[list[str]]:
    """Collects Ctrl-C, SIGTERM and SIGHUP instead of raising; in a thread other than the main one, signals stay as they are."""
    asked: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
    heard = [n for n in names if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]  # nohup is respected
    before = {number: signal.signal(number, lambda n, frame: asked.append(names[signal.Signals(n)])) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
