"""Whether Ray's control store still answers, asked over connections of our own; Ray calls that end when it is given up.

Without its control store a call of Ray may block for many minutes: where the head's machine has vanished nobody closes the
connection. So the client asks the store itself, in a thread, and makes Ray calls in further threads, which it can abandon.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from raypar.errors import ClusterError

T = TypeVar("T")

RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""The environment variable that says how long Ray's processes wait for a control store that is restarted."""
RAY_WAITS_S = 60.0
"""How long they wait without it."""
BEYOND_RAY_S = 15.0
"""How much longer than Ray's processes the client waits, so that a store that is restarted in time is never given up."""
EVERY_S = 3.0
"""Time from one question to the next."""
PROBE_S = 3.0
"""How long the store may take for an answer."""
TOLD_S = 10.0
"""Silence after which a line says so."""
TURN_S = 0.25
"""How often a waiting caller looks whether the store was given up."""
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How every HTTP/2 connection begins, and with it gRPC: a server answers with its own settings."""


class ControlStoreLost(ClusterError):
    """Ray's control store has not answered for longer than a run waits for it."""


class ControlStoreWatch:
    """Counts for how long the control store has been silent. Time in which this process itself was stopped does not count.

    A store that has never answered a question, as behind a firewall, is not judged.
    """

    def __init__(self, address: str, *, limit_s: float | None = None, every_s: float = EVERY_S, told_s: float = TOLD_S) -> None:
        self.address = address
        """Where the store answers: `host:port`."""
        self.limit_s = silence_limit_s(os.environ) if limit_s is None else limit_s
        """Silence after which the store is given up."""
        self.every_s = every_s
        """Time from one question to the next."""
        self.told_s = told_s
        """Silence after which a line says so."""
        self.silent_s = 0.0
        """For how long the store has been silent."""
        self.on_silence: Callable[[bool], None] = lambda silent: None
        """Called with True when the silence is worth a line, with False when the store answers again."""
        self._known = False
        """Whether the store has ever answered."""
        self._told = False
        """Whether the present silence was told."""
        self._lines: list[str] = []
        """Lines for the user that `new_lines` has not returned."""

    @property
    def is_silent(self) -> bool:
        """Whether the store has been silent for long enough to be told."""
        return self.silent_s >= self.told_s

    @property
    def is_lost(self) -> bool:
        """Whether the store is given up."""
        return self.silent_s >= self.limit_s

    def note_answer(self, answered: bool, turn_s: float) -> None:
        """Note whether the store has answered, `turn_s` after the question before. A store that is given up stays so."""
        if self.is_lost:
            return
        if answered:
            self._known = True
            self.note_progress()
        elif self._known:
            self.silent_s += min(turn_s, self.every_s + 2 * PROBE_S)
        if self.is_silent and not self._told:
            self._told = True
            text = f"{self.silence}; after {self.limit_s:.0f} s the run ends with an error"
            self._lines.append(f"{text} (a head with Redis may be restarted meanwhile)")
            self.on_silence(True)

    def note_progress(self) -> None:
        """Note that the store must have answered: a step was committed, or a question answered."""
        if self.is_lost:
            return
        if self._told:
            self._lines.append(f"Ray's control store answers again, after {self.silent_s:.0f} s")
            self._told = False
            self.on_silence(False)
        self.silent_s = 0.0

    def new_lines(self) -> list[str]:
        """The lines for the user since the last call."""
        lines, self._lines = self._lines, []
        return lines

    @property
    def silence(self) -> str:
        """The silence in words, and its length."""
        return f"Ray's control store at {self.address} has not answered for {self.silent_s:.0f} s"

    def error(self, resume: str = "`raypar resume` goes on from the run's last checkpoint") -> ControlStoreLost:
        """The error of a run whose control store is given up. `resume`: how it can go on."""
        return ControlStoreLost(
            self.silence,
            cure=f"look at the head node of the cluster; {resume}, on this cluster when its head is back or on another one. "
            "A head with Redis can be restarted without ending runs",
        )

    def call(self, call: Callable[[], T]) -> T:
        """The result of `call`, made in a thread that is abandoned when the store is given up: then raises the error."""
        outcome: list[T] = []
        failure: list[BaseException] = []
        over = threading.Event()

        def carry_out() -> None:
            try:
                outcome.append(call())
            except BaseException as error:  # raised again in the caller's thread
                failure.append(error)
            finally:
                over.set()

        threading.Thread(target=carry_out, name="raypar-ray-call", daemon=True).start()
        while not over.wait(TURN_S):
            if self.is_lost:
                raise self.error()
        if failure:
            raise failure[0]
        return outcome[0]


_watches: list[ControlStoreWatch] = []
"""The watch of the Ray cluster that this process is connected to; a process has one such connection at most."""


def current_watch() -> ControlStoreWatch | None:
    """The watch of the control store of this process's Ray cluster; None where nobody watches it."""
    return _watches[-1] if _watches else None


def call_ray(call: Callable[[], T]) -> T:
    """The result of a call of Ray that may block for ever. Raises `ControlStoreLost` once the control store is given up."""
    watch = current_watch()
    return call() if watch is None else watch.call(call)


def finish_within(limit_s: float, call: Callable[[], Any]) -> bool:
    """Whether `call`, made in a thread of its own, ends or fails within `limit_s`; else it is abandoned."""

    def carry_out() -> None:
        with contextlib.suppress(Exception):  # it removes what may be gone already
            call()

    thread = threading.Thread(target=carry_out, name="raypar-last-ray-call", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def silence_limit_s(environment: Mapping[str, str]) -> float:
    """How long a client waits for a silent control store: somewhat longer than Ray's own processes."""
    try:
        return float(environment.get(RECONNECT_VARIABLE, RAY_WAITS_S)) + BEYOND_RAY_S
    except ValueError:  # Ray takes its own default then
        return RAY_WAITS_S + BEYOND_RAY_S


def answers_http2(address: str) -> bool:
    """Whether a server at `host:port` answers a new connection within `PROBE_S`, or closes it, as one with TLS does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S) as connection:
            connection.settimeout(PROBE_S)
            try:
                connection.sendall(HELLO)
                connection.recv(9)
            except ConnectionError:
                return True
            return True
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def watch_control_store(
    address: str,
    *,
    probe: Callable[[str], bool] = answers_http2,
    limit_s: float | None = None,
    every_s: float = EVERY_S,
    told_s: float = TOLD_S,
) -> Iterator[ControlStoreWatch]:
    """Watch the control store at `address` while the body runs; `call_ray` then ends when it is given up."""
    watch, over = ControlStoreWatch(address, limit_s=limit_s, every_s=every_s, told_s=told_s), threading.Event()

    def keep_asking() -> None:
        before_s = time.monotonic()
        while not over.is_set():
            answered = probe(address)
            now_s = time.monotonic()
            watch.note_answer(answered, now_s - before_s)
            before_s = now_s
            over.wait(every_s)

    thread = threading.Thread(target=keep_asking, name="raypar-control-store", daemon=True)
    _watches.append(watch)
    thread.start()
    try:
        yield watch
    finally:
        _watches.remove(watch)
        over.set()
        thread.join(0 if watch.is_silent else 2 * PROBE_S)  # a silent store would keep the caller waiting
