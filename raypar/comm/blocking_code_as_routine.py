"""Runs code that blocks, such as a layer that waits for its shards inside autograd, as a routine.

On a real transport such code simply blocks. Under the cooperative scheduler all ranks share one thread: there the code gets a
thread of its own, which runs only while its routine is resumed. One of these threads runs at a time, and the scheduler chooses
which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from raypar.comm.routine import Routine, RoutineWait, RoutineWork, drive_routine, run_routine
from raypar.comm.transport import Handle, wait_named
from raypar.errors import GroupAborted

T = TypeVar("T")

_RUNNING = threading.local()


def wait_for_handle(handle: Handle, what: str, timeout_s: float | None = None, *, on_stream: bool = False) -> None:
    """Wait until `handle` is done; inside `as_routine`, let other routines run meanwhile. `on_stream`: see `RoutineWait`.

    Raises the error of the operation. A time-out names `what`.
    """
    fiber: _Fiber | None = getattr(_RUNNING, "fiber", None)
    if fiber is not None:
        fiber.suspend(RoutineWait(handle, what, on_stream))
    else:
        wait_named(handle, what, timeout_s, on_stream=on_stream)


def as_routine(work: Callable[[], T]) -> Routine[T]:
    """The routine that runs `work` to its end and yields at each `wait_for_handle` in it.

    `work` has a state of torch's CPU generator of its own, as it would have in a process of its own.
    """
    fiber = _Fiber(work)
    error: BaseException | None = None
    while (waiting := fiber.resume(error)) is not None:
        try:
            yield waiting
            error = None
        except GeneratorExit:
            fiber.resume(GroupAborted("the routine was closed"))
            raise
        except Exception as failed:
            error = failed
    if fiber.error is not None:
        raise fiber.error
    return fiber.result  # type: ignore[no-any-return]


def run_or_yield(routine: Routine[T], timeout_s: float | None = None) -> T:
    """Run a routine as `transport.run_routine` does; inside `as_routine`, pass on what the routine yields instead.

    So code that blocks may itself run a routine with code that blocks: a whole step of a worker with sharded layers.
    """
    fiber: _Fiber | None = getattr(_RUNNING, "fiber", None)
    return run_routine(routine, timeout_s) if fiber is None else drive_routine(routine, fiber.suspend)


class _Fiber:
    """A thread that takes turns with the thread that resumes it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self._turn = threading.Semaphore(0)
        """Released when this thread may go on."""
        self._back = threading.Semaphore(0)
        """Released when the resuming thread may go on."""
        self._waiting: RoutineWait | RoutineWork | None = None
        """What the thread waits for; None while it runs, and at its end."""
        self._thrown: BaseException | None = None
        """The error to raise in the thread, where it waits, when it goes on."""
        self._thread = threading.Thread(target=self._run, name="raypar-routine", daemon=True)
        self._begun = False
        """Whether the thread has been started."""
        self._threads = torch.get_num_threads()
        """Number of threads that torch shall use in the thread, as in the one that made it."""

    def resume(self, error: BaseException | None = None) -> RoutineWait | RoutineWork | None:
        """Run the thread until its next wait, which is returned; None at its end. `error` is raised where the thread waits."""
        self._thrown, self._waiting = error, None
        if not self._begun:
            self._begun = True
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()
        if self._waiting is None:
            self._thread.join()
        return self._waiting

    def suspend(self, waiting: RoutineWait | RoutineWork) -> None:
        """Called in the thread: hand `waiting` to the resuming thread, and block until it resumes this one."""
        state = torch.get_rng_state()
        self._waiting = waiting
        self._back.release()
        self._turn.acquire()
        torch.set_rng_state(state)
        if self._thrown is not None:
            raise self._thrown

    def _run(self) -> None:
        _RUNNING.fiber = self
        torch.set_num_threads(self._threads)  # a thread's own setting; bits of a dot product depend on it
        try:
            # Otherwise autograd would compute on a device in a thread of its own, which cannot take turns.
            with torch.autograd.set_multithreading_enabled(False):
                self.result = self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._back.release()
