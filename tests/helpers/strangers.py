"""What strangers send, and peers whose bytes were damaged: mutations of a message, both ends of a handshake played badly."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from raypar.comm.tcp.handshake import (
    ACCEPTOR,
    CHALLENGE,
    DIALER,
    HELLO,
    MAGIC,
    NONCE_BYTES,
    VERSION,
    DialerHandshake,
    RankClaim,
    RunCredential,
)

CASES: Counter[str] = Counter()
"""How many were tried, by message; `conftest` prints them."""


Mutation = Callable[[bytes], bytes]


def mutations(length: int, seed: int = 7) -> list[tuple[str, Mutation]]:
    """(what is done, the doing) for messages of `length` bytes: every byte with other values, every truncation, every byte left
    out, bytes put in before every byte. None leaves a message as it is."""
    chance = random.Random(seed)
    found: list[tuple[str, Mutation]] = []
    for at in range(length):
        found += [(f"byte {at} is {v:#04x}", partial(_set, at=at, value=v)) for v in (0x00, 0xFF, chance.randrange(256))]
        found += [(f"byte {at} has ^{v:#04x}", partial(_flip, at=at, bits=v)) for v in (0x01, 0x80)]
        found += [(f"{v:#04x} is put in at {at}", partial(_put, at=at, value=v)) for v in (0x00, 0xFF, chance.randrange(256))]
        found += [(f"byte {at} is left out", partial(_leave_out, at=at)), (f"cut after {at}", partial(_cut, at=at))]
    return found


def _set(message: bytes, at: int, value: int) -> bytes:
    """Where it has that value already, another one."""
    return _flip(message, at, message[at] ^ value or 0x55)


def _flip(message: bytes, at: int, bits: int) -> bytes:
    return message[:at] + bytes([message[at] ^ bits]) + message[at + 1 :]


def _put(message: bytes, at: int, value: int) -> bytes:
    """Before a byte of the same value it would be put in behind it as well: then another one."""
    return message[:at] + bytes([value if value != message[at] else value ^ 0x55]) + message[at:]


def _leave_out(message: bytes, at: int) -> bytes:
    return message[:at] + message[at + 1 :]


def _cut(message: bytes, at: int) -> bytes:
    return message[:at]


def some(cases: Sequence[Any], share: int, seed: int = 7) -> list[Any]:
    """One of `share`, by chance, always the same."""
    return random.Random(seed).sample(list(cases), max(1, len(cases) // share)) if share > 1 else list(cases)


class Knock:
    """A connection to a worker's port: says `hello`, and to a challenge what `answer` makes of it. `closed`: by the worker."""

    def __init__(self, door: Any, hello: bytes, answer: Callable[[bytes], bytes] | None, hang_up: bool) -> None:
        self.socket = socket.socket(socket.AF_UNIX if isinstance(door, bytes) else socket.AF_INET)
        self.socket.connect(door)
        self.answer, self.hang_up, self.heard, self.closed = answer, hang_up, b"", False
        self.say(hello)
        self.socket.setblocking(False)
        self.told = False

    def say(self, words: bytes) -> None:
        """The worker may have closed already."""
        with contextlib.suppress(OSError):
            self.socket.sendall(words)
            if self.hang_up:
                self.socket.shutdown(socket.SHUT_WR)

    def listen(self) -> None:
        """Hear what there is."""
        try:
            data = self.socket.recv(4096)
        except OSError:  # reset: it has closed with bytes of ours unread
            data = b""
        self.heard += data
        self.closed = not data
        if not self.told and self.answer is not None and len(self.heard) >= CHALLENGE.size:
            self.told = True
            self.say(self.answer(self.heard[: CHALLENGE.size]))


def knock(doors: Sequence[Any], sayings: Sequence[tuple[bytes, Any, bool]], limit_s: float) -> list[Knock]:
    """All at once, on the doors in turn, until the worker has closed every connection or the time is over."""
    knocks = [Knock(doors[i % len(doors)], *saying) for i, saying in enumerate(sayings)]
    with selectors.DefaultSelector() as selector:
        for one in knocks:
            selector.register(one.socket, selectors.EVENT_READ, one)
        until = time.monotonic() + limit_s
        while selector.get_map() and time.monotonic() < until:
            for key, _ in selector.select(0.05):
                key.data.listen()
                if key.data.closed:
                    selector.unregister(key.fileobj)
    for one in knocks:
        one.socket.close()
    return knocks


def hello_of(credential: RunCredential, claim: RankClaim) -> tuple[bytes, Callable[[bytes], bytes]]:
    """An honest dialer's HELLO, and what it says to a challenge without looking at its proof."""
    hello = DialerHandshake(credential, claim).hello

    def answer(challenge: bytes) -> bytes:
        _, _, nonce, _ = CHALLENGE.unpack(challenge)
        return credential.proof(DIALER, hello, nonce)

    return hello, answer


def challenge_to(credential: RunCredential, hello: bytes) -> bytes:
    """An honest acceptor's CHALLENGE."""
    nonce = os.urandom(NONCE_BYTES)
    return CHALLENGE.pack(MAGIC, VERSION, nonce, credential.proof(ACCEPTOR, hello, nonce))


class FalseAcceptor:
    """Listens where a worker is expected; `play(sock, hello)` tells a dialer what it likes, then it hangs up or is silent."""

    def __init__(self, play: Callable[[socket.socket, bytes], None], hang_up: bool) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._play, self._hang_up = play, hang_up
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._door.accept()
            except OSError:
                return
            sock.settimeout(5.0)
            with contextlib.suppress(OSError):
                hello = b""
                while len(hello) < HELLO.size and (data := sock.recv(HELLO.size - len(hello))):
                    hello += data
                self._play(sock, hello)
                if self._hang_up:
                    sock.shutdown(socket.SHUT_WR)
            self._kept.append(sock)

    def close(self) -> None:
        """No thread and no descriptor is left."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        for sock in (self._door, *self._kept):
            sock.close()


def footprint() -> tuple[int, int]:
    """(threads, open descriptors) of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def memory_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Wiretap:
    """Stands in front of a worker's TCP port, passes on what both sides say, and keeps it."""

    def __init__(self, door: tuple[str, int]) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.dialer_said = self.acceptor_said = b""
        self._door, self._sockets = door, list[socket.socket]()
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        dialer, _ = self._server.accept()
        acceptor = socket.create_connection(self._door)
        self._sockets = [dialer, acceptor]
        back = threading.Thread(target=self._pass_on, args=(acceptor, dialer, "acceptor_said"), daemon=True)
        self._threads.append(back)
        back.start()
        self._pass_on(dialer, acceptor, "dialer_said")

    def _pass_on(self, source: socket.socket, target: socket.socket, kept: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, kept, getattr(self, kept) + data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Both connections must be over."""
        for thread in list(self._threads):
            thread.join(5)
        for one in (self._server, *self._sockets):
            one.close()
