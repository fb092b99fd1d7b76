"""Real worker processes for tests: forked from one warm server (importing torch and ray takes 2.5 s), driven call by call."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "pytest", "raypar.comm.gradient_reduction", "raypar.actors.worker_actor"])


class Failed(Exception):
    """A call raised in the worker: `args` are the name of the exception's class, its text and the traceback."""


def _serve(calls: Any, control: Any) -> None:
    """The worker: runs calls one after another with a dict of its own; a thread answers control calls meanwhile."""
    import torch

    torch.set_num_threads(1)
    state: dict[str, Any] = {}

    def loop(pipe: Any) -> None:
        while True:
            try:
                function, args = pipe.recv()
            except EOFError:
                return
            try:
                answer = (True, function(state, *args))
            except Exception as error:
                answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
            with contextlib.suppress(OSError):
                pipe.send(answer)

    threading.Thread(target=loop, args=(control,), daemon=True).start()
    loop(calls)


class Worker:
    """One process. `call` starts `function(state, *args)` there, `result` waits for it; functions are importable by name."""

    def __init__(self) -> None:
        self._calls, theirs = _context.Pipe()
        self._control, control = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, control), daemon=True)
        self.process.start()
        theirs.close()
        control.close()

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Start a call; one at a time."""
        self._calls.send((function, args))

    def result(self, timeout_s: float = 20.0) -> Any:
        """What the call returned; raises `CallFailure` with what it raised, or `TimeoutError`."""
        return self._answer(self._calls, timeout_s)

    def control(self, function: Callable[..., Any], *args: Any, timeout_s: float = 20.0) -> Any:
        """Run a short call in the worker's control thread, also while another call runs."""
        self._control.send((function, args))
        return self._answer(self._control, timeout_s)

    def _answer(self, pipe: Any, timeout_s: float) -> Any:
        if not pipe.poll(timeout_s):
            raise TimeoutError(f"worker {self.process.pid} did not answer within {timeout_s} s")
        good, value = pipe.recv()
        if not good:
            raise Failed(*value)
        return value

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; returns the time (`time.monotonic`, the same clock in all processes) just before."""
        assert self.process.pid is not None
        now = time.monotonic()
        os.kill(self.process.pid, number)
        return now

    def kill(self, timeout_s: float = 20.0) -> float:
        """Kill it; returns the time at which it had ended, which is when the kernel had closed its connections. How long the
        kernel takes depends on the memory of the process and on the machine's load."""
        assert self.process.pid is not None
        process = os.pidfd_open(self.process.pid)
        try:
            self.signal(signal.SIGKILL)
            if not select.select([process], [], [], timeout_s)[0]:
                raise TimeoutError(f"worker {self.process.pid} had not ended {timeout_s} s after SIGKILL")
            return time.monotonic()
        finally:
            os.close(process)

    def end(self) -> None:
        """Let it end by itself; kill it if it does not within 2 s."""
        self._calls.close()
        self._control.close()
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
        self.process.join(2.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def run_code(code: str, *words: str, timeout_s: float = 120.0) -> str:
    """What the code prints, as `__main__` with these words for `sys.argv[1:]`, in a process of its own which has loaded torch
    and the worker's actor. Raises `Failed`."""
    worker = Worker()
    try:
        worker.call(_execute, code, words)
        printed: str = worker.result(timeout_s)
        return printed
    finally:
        worker.end()


def _execute(state: dict[str, Any], code: str, words: tuple[str, ...]) -> str:
    sys.argv = ["-c", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "-c", "exec"), vars(sys.modules["__main__"]))
    return out.getvalue()


class CpuWait:
    """How long threads of these processes could have run but had no processor, from when this was made."""

    def __init__(self, *pids: int | None) -> None:
        self._pids = pids
        self._before_s = self._of_threads_s()

    def seconds(self) -> float:
        """Added up over threads that are alive; a thread that has ended counts no more."""
        return sum(now_s - self._before_s.get(thread, 0.0) for thread, now_s in self._of_threads_s().items())

    def _of_threads_s(self) -> dict[Path, float]:
        waits_s: dict[Path, float] = {}
        for path in (path for pid in self._pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")):
            # A thread may end before its file is opened, or between that and reading.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                waits_s[path] = int(path.read_text().split()[1]) / 1e9
        return waits_s


class Workers:
    """`count` workers, kept over several tests. `each` runs one call on all (or some) at the same time.

    `kind`: the transport of those of a test.
    """

    kind = "unix"

    def __init__(self, count: int) -> None:
        self.workers = [Worker() for _ in range(count)]

    def cpu_wait(self, on: list[int]) -> CpuWait:
        """Of workers `on`, and of this process, from now on."""
        return CpuWait(os.getpid(), *(self.workers[index].process.pid for index in on))

    def each(self, function: Callable[..., Any], *args: Any, on: list[int] | None = None, timeout_s: float = 20.0) -> list[Any]:
        """`function(state, index, *args)` on workers `on` (all); their results in this order. All are awaited, also when one
        has failed: an answer that nobody takes would be the next call's."""
        chosen = list(range(len(self.workers))) if on is None else on
        for index in chosen:
            self.workers[index].call(function, index, *args)
        results, failed = [], None
        for index in chosen:
            try:
                results.append(self.workers[index].result(timeout_s))
            except Failed as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return results

    def replace(self, index: int) -> None:
        """A fresh process in the place of one that has died."""
        self.workers[index].end()
        self.workers[index] = Worker()

    def end(self) -> None:
        """End all."""
        for worker in self.workers:
            worker.end()
