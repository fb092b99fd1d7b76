"""The client's side of a run: starts the driver actor, follows its events, passes Ctrl-C on, removes what is left."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypar import __version__
from raypar.actors.actor_handle_types import DriverHandle, PendingAnswer, Polled, kill_actor
from raypar.actors.control_store_watch import ControlStoreLost, call_ray, current_watch, run_with_timeout
from raypar.actors.driver_actor import ABANDONED_S, DriverActor
from raypar.actors.driver_shutdown import CLIENT_GONE_S
from raypar.actors.local_cluster_temp_folder import describe_full_temp, give_reserve_to_ray
from raypar.actors.messages import GRACE_S, RunRequest
from raypar.actors.run_state_in_ray_kv import Journal
from raypar.actors.worker_pool import remove_leftover_placement_groups, run_namespace
from raypar.elastic.actions import EndKind
from raypar.errors import ActiveError, ClusterError, OutlivedError, OutOfMemory, RayparError, WorkerLost, error_first_line
from raypar.fences.private_api_fence import warnings_sent_to
from raypar.plan.forward_pass_batching import PASSES_CURE
from raypar.plan.wording import after_steps
from raypar.ray_compat.actor_errors import KILL_CURE, memory_monitor_kill_error, memory_shortage_here
from raypar.record.events import Event, RunWarning, StopRequest
from raypar.record.parse_events import read_event
from raypar.storage.run_folder import resume_argument
from raypar.user_code.stop_signals import STOP_SIGNALS, heard_stop_signals

T = TypeVar("T")

TURN_S = 0.5
"""Longest single wait for the driver; signals are handled between two waits."""

DRIVER_SILENT_S = 30.0
"""How long the driver may take for an answer, which only reports what has happened."""

DRIVER_START_S = 300.0
"""How long the driver's process may take to start: more than half a minute on a busy machine."""

MEMORY_LOOK_S = 20.0
"""Time from one look at the node's memory to the next while the driver's process starts. Two in a row must find it short."""

ALONE_S = 10.0
"""Time without a poll after which a driver has lost its client: clients poll all the time."""

DRIVER_BACK_S = 60.0
"""How long Ray may take to restart the driver of an elastic run."""

MOST_DRIVER_DEATHS = 4
"""How often in a row the driver may die without reporting another step, validation or checkpoint: the same cause, such as a
callback, would end every new one too."""

LEAVE_S = 5.0
"""How long the call that tells the driver to end may take, once the control store is given up."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    end: EndKind
    """The kind of end."""
    why: str
    """The reason, in words."""
    done: int
    """Number of steps of the job that are done."""
    error: Exception | None
    """The error of a failed run."""


def follow_run(request: RunRequest, tell: Callable[[Event], None], on_answer: Callable[[], None] = lambda: None) -> RunEnd:
    """Run a request on the Ray cluster this process is connected to, until the run is over; `tell` gets every event.

    `on_answer` is called with every answer of the driver.

    The first Ctrl-C (SIGTERM, SIGHUP) asks the driver to save and end, the second one removes everything at once, as the first
    does while the driver's process has not begun.
    Raises `ActiveError` when a run of this name is active already, `WorkerLost` when the driver itself is lost,
    `ControlStoreLost` when Ray's control store has not answered for too long.
    """
    driver = None
    try:
        with collecting_signals() as asked:
            driver = call_ray(lambda: start_driver(request))
            return _follow(driver, request, tell, asked, on_answer)
    finally:
        if driver is not None:
            remove_run_from_cluster(driver, request.run)


def start_driver(request: RunRequest) -> DriverHandle:
    """The new driver actor of a run. Raises `ActiveError` when a run of this name is active already."""
    home = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    try:
        made: DriverHandle = (
            ray.remote(DriverActor)  # type: ignore[assignment]  # a handle of Ray's
            .options(
                name="driver",
                namespace=run_namespace(request.run),
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1 if request.policy.elastic and not request.policy.forward_passes else 0,
                max_concurrency=100,
                scheduling_strategy=home,  # beside the client, not on a node that may be the one to go
            )
            .remote(request.run)
        )
        return made
    except ValueError as error:
        raise active_run_error(request.run) from error


def remove_run_from_cluster(driver: DriverHandle, run: str) -> None:
    """Remove the driver and whatever the run has left on the cluster; if the control store is lost, only the driver."""
    watch = current_watch()
    for removal in (
        lambda: kill_actor(driver, no_restart=True),
        lambda: remove_leftover_placement_groups(run),
        lambda: Journal(run).erase(),
    ):
        if watch is not None and watch.is_lost:  # the store may be given up during any of these calls
            end_driver_without_control_store(driver, watch.silence_text)
            return
        with contextlib.suppress(Exception):
            call_ray(removal)


def end_driver_without_control_store(driver: DriverHandle, why: str) -> None:
    """Tell the driver to record the end of the run and to exit; its workers end as orphans.

    Such a call goes from process to process and does not need the control store. `why`: the reason that is recorded.
    """
    run_with_timeout(LEAVE_S, lambda: ray.wait([driver.leave_without_control_store.remote(why)], timeout=LEAVE_S))


def refuse_active_run(run: str) -> None:
    """Raise `ActiveError` if a driver of this run lives on the Ray cluster this process is connected to.

    A driver that has lost its client is told to save and end first; then `OutlivedError` is raised, and the next attempt to
    resume finds the newer checkpoint.
    """
    try:
        driver: DriverHandle = call_ray(lambda: ray.get_actor("driver", namespace=run_namespace(run)))  # type: ignore[assignment]
    except ValueError:
        return
    epoch = cursor = 0
    until_s, ends = time.monotonic() + DRIVER_SILENT_S, list[dict[str, Any]]()
    try:
        alone_s: float = ray.get(driver.alone_s.remote(), timeout=DRIVER_SILENT_S)
        if alone_s < ALONE_S:
            raise active_run_error(run)
        driver.stop.remote("its client is gone, and it is to be resumed", GRACE_S)
        while not ends and time.monotonic() < until_s:
            polled: Polled = ray.get(driver.events.remote(epoch, cursor, 0.3), timeout=DRIVER_SILENT_S)
            events, epoch, cursor = polled
            ends = [event for event in events if event["kind"] == "end"]
    except RayError as error:  # it does not answer, or dies
        raise active_run_error(run) from error
    if not ends:
        raise active_run_error(run)
    remove_run_from_cluster(driver, run)
    raise OutlivedError(
        f"run {run!r} was still active on this cluster, without a client for {alone_s:.0f} s; now it has ended, "
        + after_steps(ends[0]["done"]),
        cure="run the same command again: it resumes from the last checkpoint",
    )


def active_run_error(run: str) -> ActiveError:
    """The error when another run of this name is active."""
    minutes = (ABANDONED_S + CLIENT_GONE_S) / 60
    ends = f"one whose client is gone saves its state and ends by itself within {minutes:.0f} minutes"
    return ActiveError(
        f"a run called {run!r} is active on this cluster",
        cure=f"end that one with Ctrl-C where it was started ({ends}), or choose another name",
    )


def _follow(
    driver: DriverHandle,
    request: RunRequest,
    tell: Callable[[Event], None],
    asked: list[str],
    on_answer: Callable[[], None] = lambda: None,
) -> RunEnd:
    """Follow the run until it ends; returns how. Every event is told once. `asked`: the signals received so far."""
    return RunFollower(driver, request, tell, asked, on_answer).follow()


class RunFollower:
    """Polls the driver of one run until the run is over, waits for a driver that Ray restarts, and passes Ctrl-C on."""

    def __init__(
        self,
        driver: DriverHandle,
        request: RunRequest,
        tell: Callable[[Event], None],
        asked: list[str],
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self.driver = driver
        """The driver actor."""
        self.request = request
        """What the driver was asked to run."""
        self.tell = tell
        """Gets every event of the run, once."""
        self.on_answer = on_answer
        """Called with every answer of the driver."""
        self.asked = asked
        """Signals received: the first one asks the driver to save and end, the second one ends the run at once."""
        self.epoch = self.cursor = 0
        """Up to where the driver's events have been received (`EventFeed.after`)."""
        self.last_step = {"step": request.policy.steps_before_run, "validation": -1, "checkpoint": -1}
        """Kind of event -> the last step told of it. A restarted driver sends these events again."""
        self.stop_sent = False
        """Whether the driver that lives now has been told of the first signal."""
        self.lost_s: float | None = None
        """Since when the driver has been dead; None while it lives."""
        self.answered = False
        """Whether any driver has answered."""
        self.deaths = 0
        """How often the driver has died since the last step, validation or checkpoint was told."""
        self.patience_s = DRIVER_START_S
        """How long the driver may take for its next answer."""
        self.started: PendingAnswer[None] | None = call_ray(lambda: driver.start.remote(request))
        """The pending call that starts the run; None once it has returned."""
        self.watch = current_watch()
        """Says for how long Ray's control store has been silent; None if it is not watched."""

    def follow(self) -> RunEnd:
        """Poll until an event says how the run ended. Raises `WorkerLost` or `ClusterError` for a driver that is lost.

        A driver that was killed because its node had no memory left is a failed run like any whose worker was.

        The error is also told at once, because Ray may end this process while the run is being removed. If Ray's control store
        is silent, raises `ControlStoreLost` instead: the silence is then the cause of the other error.
        """
        try:
            with warnings_sent_to(self._warn):
                return self._poll_until_end()
        except OutOfMemory as error:
            return RunEnd("failed", error_first_line(error), self.last_step["step"], error)
        except (WorkerLost, ClusterError) as error:
            if self.watch is not None and (isinstance(error, ControlStoreLost) or self.watch.is_silent):
                raise self.watch.lost_error(self._how_to_resume()) from error
            with contextlib.suppress(OSError):  # the terminal is gone
                advice = "" if self.request.policy.forward_passes else f" ({error.cure})"  # such a run is begun anew
                self._say(RunWarning(text=f"{error.what}; what is left of the run is removed now{advice}"))
            raise

    def _how_to_resume(self) -> str:
        """The advice how the run can go on, and from which step."""
        if self.request.policy.forward_passes:
            return PASSES_CURE
        saved = max(self.last_step["checkpoint"], self.request.policy.steps_before_run)
        if saved <= 0:
            return "begin the run anew (it has no checkpoint yet, from which `raypar resume` would go on)"
        place = self.request.storage or os.path.relpath(self.request.folder)
        place = self.request.folder if place.startswith("..") else place
        return f"`raypar resume {resume_argument(place)}` goes on from the run's last checkpoint, {after_steps(saved)}"

    def _poll_until_end(self) -> RunEnd:
        """Poll until an event says how the run ended."""
        while True:
            self._report_control_store()
            asking = call_ray(lambda: self.driver.events.remote(self.epoch, self.cursor, 0.3))
            self._await_answer(asking)
            if self.asked and not self.answered and not has_answer(asking):
                return RunEnd("interrupted", self.asked[0], self.last_step["step"], None)
            if len(self.asked) > 1:
                return RunEnd("interrupted", f"{self.asked[1]} again: ended without waiting", self.last_step["step"], None)
            for event in self._receive(asking):
                if event["kind"] == "end":
                    error = pickle.loads(event["error"]) if event.get("error") is not None else None
                    return RunEnd(event["end"], event["why"], event["done"], error)
                if self._is_new(event):
                    self._say(read_event(event))
            if self.asked and not self.stop_sent and self.lost_s is None:
                self.stop_sent = True
                text = f"{self.asked[0]}: finishing the step and saving (once more: end at once, without)"
                self._say(StopRequest(text=text, time=time.time()))
                call_ray(lambda: self.driver.stop.remote(self.asked[0], GRACE_S))

    def _report_control_store(self) -> None:
        """Tell the user that the control store is silent, or answers again. Raises `ControlStoreLost` once it is given up."""
        if self.watch is None:
            return
        for line in self.watch.new_lines():
            self._say(RunWarning(text=line))
        if self.watch.is_lost:
            raise self.watch.lost_error()

    def _await_answer(self, asking: PendingAnswer[T]) -> None:
        """Wait for an answer of the driver. The silent driver of an elastic run is killed, and Ray starts another one.

        Raises `OutOfMemory` if no driver begins and this node's memory is so short meanwhile that Ray kills every one.
        """
        if self._answers_in_time(asking):
            return
        self.patience_s = min(self.patience_s, DRIVER_SILENT_S) if self.asked else self.patience_s
        what = f"the driver does not answer for {self.patience_s:.0f} s"
        cure = "look at its node; `raypar resume` goes on from the last checkpoint"
        if not self.request.policy.elastic:
            raise unanswering_driver_error(what, cure)
        self._say(RunWarning(text=f"{what}: it is ended and started again"))
        call_ray(lambda: kill_actor(self.driver, no_restart=False))
        if not wait_for_driver_answer(asking, self.asked, DRIVER_BACK_S):
            raise unanswering_driver_error(f"{what}, nor another one {DRIVER_BACK_S:.0f} s later", cure)

    def _answers_in_time(self, asking: PendingAnswer[T]) -> bool:
        """Whether the driver answers within `patience_s`, or the wait is over because of signals."""
        if self.answered:
            return wait_for_driver_answer(asking, self.asked, self.patience_s)
        waited_s, was_short = 0.0, False
        while waited_s < self.patience_s:
            turn_s = min(MEMORY_LOOK_S, self.patience_s - waited_s)
            if wait_for_driver_answer(asking, self.asked, turn_s, signals=1):
                return True
            waited_s += turn_s
            shortage = memory_shortage_here()
            if shortage and was_short:
                what = f"no process of the driver has begun within {waited_s:.0f} s"
                raise OutOfMemory(f"{what}: {shortage}, on this node, where it would be", cure=KILL_CURE)
            was_short = bool(shortage)
        return False

    def _receive(self, asking: PendingAnswer[Polled]) -> list[dict[str, Any]]:
        """The events in the driver's answer; none while the driver is dead and may be restarted."""
        try:
            polled: Polled = call_ray(lambda: ray.get(asking))
            events, self.epoch, self.cursor = polled
            if self.started is not None and call_ray(lambda: ray.wait([self.started], timeout=0))[0]:
                call_ray(lambda: ray.get(self.started))
                self.started = None
        except RayTaskError as error:  # unforeseen; for example another version of raypar on the cluster
            if isinstance(error, RayparError):
                raise
            raise ClusterError(
                f"the driver could not begin: {error.cause!r}",
                cure=f"if the cluster has another raypar than this machine (here {__version__}), install the same; else please "
                "report it",
            ) from error
        except ActorUnschedulableError as error:
            raise WorkerLost(
                "the driver was lost: Ray has given up the node of this machine, which it could not reach",
                cure="look at the network to Ray's control store; `raypar resume` goes on from the last checkpoint",
            ) from error
        except (RayActorError, OutOfMemoryError) as error:
            self._wait_for_restart(error)
            return []
        self.lost_s, self.patience_s, self.answered = None, DRIVER_SILENT_S, True
        self.on_answer()
        return list(events)

    def _wait_for_restart(self, error: RayActorError | OutOfMemoryError) -> None:
        """Note that the driver is dead. Raises `WorkerLost` if Ray does not restart it in time, or it has died
        `MOST_DRIVER_DEATHS` times in a row; `OutOfMemory` if Ray's memory monitor has killed it."""
        now = time.monotonic()
        if self.lost_s is None:
            self.lost_s, self.deaths = now, self.deaths + 1
            if given := give_reserve_to_ray():
                self._warn(given)
        step = self.last_step["step"] + 1
        what = None
        if not self.request.policy.elastic or isinstance(error, ActorDiedError):
            what = f"its process died before it had reported step {step}"
        elif now - self.lost_s > DRIVER_BACK_S:
            what = f"its process died before it had reported step {step}, and no other has begun within {DRIVER_BACK_S:.0f} s"
        elif self.deaths >= MOST_DRIVER_DEATHS:
            what = f"its process has died {self.deaths} times in a row without reporting step {step}"
        if what is not None:
            if isinstance(error, OutOfMemoryError):
                raise memory_monitor_kill_error(f"the driver was lost: {what}; it", error) from error
            cure = "look at what your callbacks do, which run in it, and at the memory and the temporary folder of its machine"
            if full := describe_full_temp():
                what = f"{what}: {full}, and Ray starts no process while its logs have no room there"
                cure = "free disk space there, or set TMPDIR to a folder on another disk"
            raise WorkerLost(f"the driver was lost: {what}", cure=f"{cure}; {self._how_to_resume()}") from error
        if self.started is not None:  # it died before it had begun
            self.started = call_ray(lambda: self.driver.start.remote(self.request))
        self.stop_sent = False
        time.sleep(0.1)

    def _is_new(self, event: dict[str, Any]) -> bool:
        """Whether the event has not been told before."""
        kind = event["kind"]
        if kind not in self.last_step:
            return True
        if event["step"] <= self.last_step[kind]:
            return False
        self.last_step[kind], self.deaths = event["step"], 0
        if kind == "step" and self.watch is not None:
            self.watch.note_progress()  # a step is told once it is in the control store
        return True

    def _warn(self, text: str) -> None:
        """Tell a warning."""
        self._say(RunWarning(text=text))

    def _say(self, event: Event) -> None:
        """Tell an event. After SIGHUP the terminal is gone: that must not keep the driver from saving."""
        try:
            self.tell(event)
        except OSError:
            if not self.asked:
                raise


def unanswering_driver_error(what: str, cure: str) -> RayparError:
    """The error for a driver that does not answer: `OutOfMemory` where Ray kills every new one for want of memory."""
    if shortage := memory_shortage_here():
        return OutOfMemory(f"{what}: {shortage}, on this node, where the driver is", cure=KILL_CURE)
    return WorkerLost(what, cure=cure)


def has_answer(asking: PendingAnswer[T]) -> bool:
    """Whether the driver has answered this call, or is known to have died."""
    return bool(call_ray(lambda: ray.wait([asking], timeout=0))[0])


def wait_for_driver_answer(asking: PendingAnswer[T], asked: list[str], patience_s: float, signals: int = 2) -> bool:
    """Whether the driver answers or dies within `patience_s`; True also after so many `signals`, which end the wait.

    After Ctrl-C the driver has `DRIVER_SILENT_S` at most. Turns are counted, not seconds: time
    in which this process itself was stopped (Ctrl-Z, a frozen container) does not count.
    """
    turns = patience_s / TURN_S
    while not call_ray(lambda: ray.wait([asking], timeout=TURN_S))[0] and len(asked) < signals:
        turns = min(turns, DRIVER_SILENT_S / TURN_S) - 1 if asked else turns - 1
        if turns < 0:
            return False
    return True


@contextlib.contextmanager
def collecting_signals() -> Iterator[list[str]]:
    """Collect the names of signals (Ctrl-C, SIGTERM, SIGHUP) instead of raising; in other threads than the main one, none."""
    asked: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {
        number: signal.signal(number, lambda n, frame: asked.append(STOP_SIGNALS[signal.Signals(n)]))
        for number in heard_stop_signals()
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
