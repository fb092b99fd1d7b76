"""Forwards IP packets between the TUN devices of simulated machines, by `link_rules`; a process of its own.

`python packet_forwarder.py FD`: FD is a SOCK_SEQPACKET socket, on which each message is a JSON document and is answered by one:
`{"attach": ADDRESS}` with the device's descriptor, `{"detach": ADDRESS}`, `{"block": [SOURCES, DESTINATIONS]}`,
`{"heal": true}`, `{"shape": [ADDRESS, MBIT_S or null, DELAY_S, LOSS]}`, `{"count": true}`. It ends when the other end of the
socket is closed.
"""

from __future__ import annotations

import array
import contextlib
import heapq
import itertools
import json
import math
import os
import selectors
import socket
import sys
import time
from typing import Any

from link_rules import LinkRules, LinkShape

PACKETS_PER_TURN = 64
"""Most packets read from one device before the other devices have their turn."""
MAX_PACKET_BYTES = 65536


class Forwarder:
    """Forwards packets between the devices, as a network switch does."""

    def __init__(self, control: socket.socket, seed: int) -> None:
        self.control = control
        """The socket on which commands come."""
        self.rules = LinkRules(seed)
        """Decides which packets are dropped or delayed."""
        self.devices: dict[bytes, int] = {}
        """Address (4 bytes) -> descriptor of its TUN device."""
        self.names: dict[bytes, str] = {}
        """Address (4 bytes) -> the address as text."""
        self.delayed: list[tuple[float, int, bytes, bytes]] = []
        """Heap of (time of arrival, number, destination, packet)."""
        self.counts = {"forwarded": 0, "dropped": 0}
        """Numbers of packets so far."""
        self.numbers = itertools.count()
        """Numbers for delayed packets, which keep those of equal arrival time in order."""
        self.selector = selectors.DefaultSelector()
        """Waits for commands and packets."""
        self.selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Forward packets until the control socket is closed."""
        while True:
            wait_s = max(0.0, self.delayed[0][0] - time.monotonic()) if self.delayed else None
            for key, _ in self.selector.select(wait_s):
                if key.fileobj is self.control:
                    if not self.obey():
                        return
                else:
                    self.read_device(key.data)
            now_s = time.monotonic()
            while self.delayed and self.delayed[0][0] <= now_s:
                _, _, destination, packet = heapq.heappop(self.delayed)
                self.write(destination, packet)

    def obey(self) -> bool:
        """Carry out one command; False if there will be no more."""
        message, given, _, _ = self.control.recvmsg(65536, socket.CMSG_SPACE(4))
        if not message:
            return False
        descriptors = array.array("i")
        for _, _, data in given:
            descriptors.frombytes(data[: len(data) - len(data) % 4])
        command: dict[str, Any] = json.loads(message)
        answer: dict[str, Any] = {}
        if "attach" in command:
            self.attach(command["attach"], descriptors[0])
        if "detach" in command:
            self.detach(socket.inet_aton(command["detach"]))
        if "block" in command:
            self.rules.block(*command["block"])
        if "heal" in command:
            self.rules.heal()
        if "shape" in command:
            address, mbit_s, delay_s, loss = command["shape"]
            self.rules.shapes[address] = LinkShape(math.inf if mbit_s is None else mbit_s, delay_s, loss)
        if "count" in command:
            answer = self.counts
        self.control.send(json.dumps(answer).encode())
        return True

    def attach(self, address: str, device: int) -> None:
        """Begin to forward from and to a device."""
        key = socket.inet_aton(address)
        self.detach(key)
        os.set_blocking(device, False)
        self.devices[key], self.names[key] = device, address
        self.selector.register(device, selectors.EVENT_READ, key)

    def detach(self, key: bytes) -> None:
        """Forget a device: its machine is gone."""
        device = self.devices.pop(key, None)
        if device is not None:
            self.selector.unregister(device)
            os.close(device)

    def read_device(self, key: bytes) -> None:
        """Take the packets that a machine has sent."""
        device = self.devices.get(key)
        for _ in range(PACKETS_PER_TURN if device is not None else 0):
            try:
                packet = os.read(device, MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the machine has lost its power, and the device with it
                self.detach(key)
                return
            self.forward(packet)

    def forward(self, packet: bytes) -> None:
        """Deliver an IPv4 packet now or later, or drop it."""
        source, destination = self.names.get(packet[12:16]), self.names.get(packet[16:20])
        if packet[0] >> 4 != 4 or source is None or destination is None:
            return  # IPv6, or an address that no machine has
        now_s = time.monotonic()
        at_s = self.rules.arrival_s(source, destination, len(packet), now_s)
        if at_s is None:
            self.counts["dropped"] += 1
        elif at_s <= now_s:
            self.write(packet[16:20], packet)
        else:
            heapq.heappush(self.delayed, (at_s, next(self.numbers), packet[16:20], packet))

    def write(self, destination: bytes, packet: bytes) -> None:
        """Hand a packet to a machine. It is lost if the machine is gone or takes no more."""
        device = self.devices.get(destination)
        self.counts["forwarded"] += 1
        if device is not None:
            with contextlib.suppress(OSError):
                os.write(device, packet)


if __name__ == "__main__":
    Forwarder(socket.socket(fileno=int(sys.argv[1])), seed=int(sys.argv[2])).serve()
