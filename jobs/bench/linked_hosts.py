"""Two hosts with addresses of their own on this machine, joined by a link of a given rate: network namespaces, as root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from harness import BenchError

BURST = "8mb"
"""What may leave at once. The kernel wants more than the rate times its tick of 4 ms; large tensors have more than that."""


@dataclass(frozen=True)
class LinkedHost:
    """One of the two."""

    namespace: str
    address: str

    def command(self, command: list[str]) -> list[str]:
        """`command`, run on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]


@contextmanager
def two_linked_hosts(gbit: float) -> Iterator[tuple[LinkedHost, LinkedHost]]:
    """Two hosts whose link carries `gbit` gigabits a second in each direction, and adds no latency. They are gone afterwards,
    whatever happens.

    Raises `BenchError` if this machine has no network namespaces, or the user may not make them.
    """
    hosts = tuple(LinkedHost(f"raypar-bench-{os.getpid()}-{n}", f"10.255.77.{n + 1}") for n in range(2))
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        first, second = (host.namespace for host in hosts)
        _ip("-n", first, "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", second)
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/30", "dev", "link0")
            _ip("-n", host.namespace, "link", "set", "link0", "up")
            rate = ["root", "tbf", "rate", f"{gbit}gbit", "burst", BURST, "latency", "50ms"]
            _run(["tc", "-n", host.namespace, "qdisc", "add", "dev", "link0", *rate])
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BenchError(f"hosts with a link need iproute2: {error}") from error
    if done.returncode:
        raise BenchError(f"hosts with a link need root and network namespaces: {' '.join(command)}: {done.stderr.strip()}")
