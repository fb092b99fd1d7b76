"""Runs code that blocks, such as a layer that waits for its shards inside autograd, as a routine.

On a real transport such code simply blocks. Under the cooperative scheduler all ranks share one thread: there the code gets a
thread of its own, which runs only while its routine is resumed. One of these threads runs at a time, and the scheduler chooses
which.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy
import torch

from raypar.comm.routine import Routine, RoutineWait, RoutineWork, block_until_done, drive_routine, run_routine
from raypar.comm.transport import Handle, wait_named
from raypar.errors import GroupAborted

T = TypeVar("T")
KeepGenerators = Callable[[], Callable[[], None]]
"""Keeps the states of the generators that code draws from; returns what sets them back."""


class Fiber(Protocol):
    """Code that takes turns with other code: while it waits, the others run."""

    def suspend(self, waiting: RoutineWait | RoutineWork) -> None:
        """Called in the code's thread: block until the code can go on. Raises what `waiting` has failed with."""


MOST_TRIES_TO_END = 100
"""How many times code that is to end is told so: it may catch the error, and wait again."""
_RUNNING = threading.local()


def wait_for_handle(handle: Handle, what: str, timeout_s: float | None = None, *, on_stream: bool = False) -> None:
    """Wait until `handle` is done; inside `as_routine`, let other routines run meanwhile. `on_stream`: see `RoutineWait`.

    Raises the error of the operation. A time-out names `what`.
    """
    fiber: Fiber | None = getattr(_RUNNING, "fiber", None)
    if fiber is not None:
        fiber.suspend(RoutineWait(handle, what, on_stream))
    else:
        wait_named(handle, what, timeout_s, on_stream=on_stream)


def as_routine(work: Callable[[], T], keep_generators: KeepGenerators | None = None) -> Routine[T]:
    """The routine that runs `work` to its end and yields at each `wait_for_handle` in it.

    `work` has states of Python's, NumPy's and torch's generators of its own, as it would have in a process of its own.
    `keep_generators`: something quicker than `keep_all_generators`.
    """
    fiber = _ThreadFiber(work, keep_generators or keep_all_generators)
    error: BaseException | None = None
    while (waiting := fiber.resume(error)) is not None:
        try:
            yield waiting
            error = None
        except GeneratorExit:
            for _ in range(MOST_TRIES_TO_END):
                if fiber.resume(GroupAborted("the routine was closed")) is None:
                    break
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
    fiber: Fiber | None = getattr(_RUNNING, "fiber", None)
    return run_routine(routine, timeout_s) if fiber is None else drive_routine(routine, fiber.suspend)


def current_wait(timeout_s: float | None = None) -> Callable[[RoutineWait | RoutineWork], None]:
    """The function by which code in this thread waits now: its fiber's, or one that blocks, up to `timeout_s`."""
    fiber: Fiber | None = getattr(_RUNNING, "fiber", None)
    return partial(block_until_done, timeout_s=timeout_s) if fiber is None else fiber.suspend


@contextlib.contextmanager
def running_in(fiber: Fiber) -> Iterator[None]:
    """Context in which `wait_for_handle` in this thread calls `fiber.suspend`."""
    before = getattr(_RUNNING, "fiber", None)
    _RUNNING.fiber = fiber
    try:
        yield
    finally:
        _RUNNING.fiber = before


def keep_all_generators() -> Callable[[], None]:
    """Copies the states of all generators that code draws from; returns what sets them back."""
    of_python, of_numpy, of_torch = random.getstate(), numpy.random.get_state(legacy=False), torch.get_rng_state()
    generators = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    on_gpus = [(each, each.get_state()) for each in generators]

    def restore() -> None:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        for generator, state in on_gpus:
            generator.set_state(state)

    return restore


class _ThreadFiber:
    """A thread that takes turns with the thread that resumes it."""

    def __init__(self, work: Callable[[], Any], keep_generators: KeepGenerators = keep_all_generators) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work, self._keep_generators = work, keep_generators
        self._turn, self._back = threading.Lock(), threading.Lock()
        """Released when this thread may go on, and when the resuming one may; a semaphore takes ten times as long."""
        self._turn.acquire()
        self._back.acquire()
        self._waiting: RoutineWait | RoutineWork | None = None
        """What the thread waits for; None while it runs, and at its end."""
        self._thrown: BaseException | None = None
        """The error to raise in the thread, where it waits, when it goes on."""
        self._thread = threading.Thread(target=self._run, name="raypar-routine", daemon=True)
        self._begun = False
        """Whether the thread has been started."""
        self._threads = torch.get_num_threads()
        """Number of threads that torch shall use in the thread, as in the one that made it."""
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        """The stream to which the thread gives work on a GPU, as the one that made it; None without one."""

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
        restore = self._keep_generators()
        self._waiting = waiting
        self._back.release()
        self._turn.acquire()
        restore()
        if self._thrown is not None:
            raise self._thrown

    def _run(self) -> None:
        _RUNNING.fiber = self
        torch.set_num_threads(self._threads)  # a thread's own setting; bits of a dot product depend on it
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)  # and the device with it
        try:
            # Otherwise autograd would compute on a device in a thread of its own, which cannot take turns.
            with torch.autograd.set_multithreading_enabled(False):
                self.result = self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._back.release()
