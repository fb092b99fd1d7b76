"""Watches whether Ray's control store still answers, and makes calls of Ray that end when the store is given up.

While the control store does not answer, a call of Ray may block for many minutes: if the head's machine has vanished, nobody
closes the connection. Therefore one thread probes the store over connections of its own. Calls of Ray are made in further
threads, which are abandoned when the store is given up.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from raypar.errors import ClusterError
from raypar.ray_compat.settings import RAY_RECONNECT_S, RECONNECT_VARIABLE

T = TypeVar("T")

LIMIT_MARGIN_S = 15.0
"""How much longer than Ray's processes the client waits, so that a store that is restarted in time is never given up."""
PROBE_INTERVAL_S = 3.0
"""Pause between two probes of the store."""
PROBE_TIMEOUT_S = 3.0
"""How long the store may take to accept a connection, and then to answer."""
REPORT_AFTER_S = 10.0
"""Length of a silence after which a line tells the user."""
POLL_S = 0.25
"""How often a waiting caller checks whether the store was given up."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What a client sends first on an HTTP/2 connection, and so in gRPC: the preface and empty settings. The server then sends its
own settings."""


class ControlStoreLost(ClusterError):
    """Ray's control store has not answered for longer than a run waits for it."""


class ControlStoreWatch:
    """Counts for how long the control store has been silent. Time in which this process itself was stopped does not count.

    A store that has never answered a probe, as behind a firewall, counts as not silent.
    """

    def __init__(
        self,
        address: str,
        *,
        limit_s: float | None = None,
        interval_s: float = PROBE_INTERVAL_S,
        report_after_s: float = REPORT_AFTER_S,
    ) -> None:
        self.address = address
        """Where the store answers: `host:port`."""
        self.limit_s = silence_limit_s(os.environ) if limit_s is None else limit_s
        """Silence after which the store is given up."""
        self.interval_s = interval_s
        """Pause between two probes."""
        self.report_after_s = report_after_s
        """Length of a silence after which a line tells the user."""
        self.silent_s = 0.0
        """For how long the store has been silent; 0 while it answers."""
        self.on_silence: Callable[[bool], None] = lambda silent: None
        """Called with True when a silence is reported, and with False when the store answers again after that."""
        self._has_answered = False
        """Whether the store has ever answered a probe."""
        self._reported = False
        """Whether a line has told the user of the present silence."""
        self._lines: list[str] = []
        """Lines for the user that `new_lines` has not returned yet."""

    @property
    def is_silent(self) -> bool:
        """Whether the store has been silent for so long that the user is told."""
        return self.silent_s >= self.report_after_s

    @property
    def is_lost(self) -> bool:
        """Whether the store is given up."""
        return self.silent_s >= self.limit_s

    def note_probe(self, answered: bool, elapsed_s: float) -> None:
        """Note whether the store has answered a probe. Once it is given up, later answers change nothing.

        `elapsed_s`: time since the end of the probe before.
        """
        if self.is_lost:
            return
        if answered:
            self._has_answered = True
            self.note_progress()
        elif self._has_answered:
            self.silent_s += min(elapsed_s, self.interval_s + 2 * PROBE_TIMEOUT_S)
        if self.is_silent and not self._reported:
            self._reported = True
            text = f"{self.silence_text}; after {self.limit_s:.0f} s the run ends with an error"
            self._lines.append(f"{text} (a head with Redis may be restarted meanwhile)")
            self.on_silence(True)

    def note_progress(self) -> None:
        """Note that the store answers: a probe was answered, or a step was committed, which is written to the store."""
        if self.is_lost:
            return
        if self._reported:
            self._lines.append(f"Ray's control store answers again, after {self.silent_s:.0f} s")
            self._reported = False
            self.on_silence(False)
        self.silent_s = 0.0

    def new_lines(self) -> list[str]:
        """The lines for the user since the last call."""
        lines, self._lines = self._lines, []
        return lines

    @property
    def silence_text(self) -> str:
        """A sentence about the silence, with its length."""
        return f"Ray's control store at {self.address} has not answered for {self.silent_s:.0f} s"

    def lost_error(self, resume: str = "`raypar resume` goes on from the run's last checkpoint") -> ControlStoreLost:
        """The error of a run whose control store is given up. `resume`: the advice how the run can go on."""
        return ControlStoreLost(
            self.silence_text,
            cure=f"look at the head node of the cluster; {resume}, on this cluster when its head is back or on another one. "
            "A head with Redis can be restarted without ending runs",
        )

    def call(self, call: Callable[[], T]) -> T:
        """The result of `call`. Raises `ControlStoreLost` if the store is given up before; the call is then abandoned."""
        outcome: list[T] = []
        failure: list[BaseException] = []
        over = threading.Event()

        def make_call() -> None:
            try:
                outcome.append(call())
            except BaseException as error:  # raised again in the caller's thread
                failure.append(error)
            finally:
                over.set()

        threading.Thread(target=make_call, name="raypar-ray-call", daemon=True).start()
        while not over.wait(POLL_S):
            if self.is_lost:
                raise self.lost_error()
        if failure:
            raise failure[0]
        return outcome[0]


_watches: list[ControlStoreWatch] = []
"""The watch of this process's Ray cluster, if there is one: at most one, as a process is connected to one cluster."""


def current_watch() -> ControlStoreWatch | None:
    """The watch of the control store of this process's Ray cluster; None if it is not watched."""
    return _watches[-1] if _watches else None


def call_ray(call: Callable[[], T]) -> T:
    """The result of a call of Ray, which may block. Raises `ControlStoreLost` once the control store is given up."""
    watch = current_watch()
    return call() if watch is None else watch.call(call)


def run_with_timeout(limit_s: float, call: Callable[[], T]) -> bool:
    """Make `call` in a thread. True if it ends or fails within `limit_s`; False if it has not ended: it is abandoned."""

    def make_call() -> None:
        with contextlib.suppress(Exception):  # callers give up Ray anyway; failures help nobody
            call()

    thread = threading.Thread(target=make_call, name="raypar-last-ray-call", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def silence_limit_s(environment: Mapping[str, str]) -> float:
    """How long a client waits for a silent control store: somewhat longer than Ray's own processes."""
    try:
        return float(environment.get(RECONNECT_VARIABLE, RAY_RECONNECT_S)) + LIMIT_MARGIN_S
    except ValueError:  # Ray then takes its default too
        return RAY_RECONNECT_S + LIMIT_MARGIN_S


def answers_http2(address: str) -> bool:
    """Whether a server at `host:port` answers a new connection within `PROBE_TIMEOUT_S`, or closes it, as one with TLS does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S) as connection:
            connection.settimeout(PROBE_TIMEOUT_S)
            with contextlib.suppress(ConnectionError):  # a server that closes the connection lives
                connection.sendall(HTTP2_PREFACE)
                connection.recv(9)
            return True
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def watch_control_store(
    address: str,
    *,
    probe: Callable[[str], bool] = answers_http2,
    limit_s: float | None = None,
    interval_s: float = PROBE_INTERVAL_S,
    report_after_s: float = REPORT_AFTER_S,
) -> Iterator[ControlStoreWatch]:
    """Watch the control store at `address` during the block, in which `call_ray` raises once the store is given up."""
    watch = ControlStoreWatch(address, limit_s=limit_s, interval_s=interval_s, report_after_s=report_after_s)
    over = threading.Event()

    def keep_probing() -> None:
        before_s = time.monotonic()
        while not over.is_set():
            answered = probe(address)
            now_s = time.monotonic()
            watch.note_probe(answered, now_s - before_s)
            before_s = now_s
            over.wait(interval_s)

    thread = threading.Thread(target=keep_probing, name="raypar-control-store", daemon=True)
    _watches.append(watch)
    thread.start()
    try:
        yield watch
    finally:
        _watches.remove(watch)
        over.set()
        thread.join(0 if watch.is_silent else 2 * PROBE_TIMEOUT_S)  # a silent store would keep the caller waiting
