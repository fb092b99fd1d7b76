"""The first process of a simulated machine: sets up its namespaces, starts programs there and reaps them.

`unshare --net --pid --mount --ipc --uts --fork ... python machine_init.py FD SETTINGS`: FD is a SOCK_SEQPACKET socket, SETTINGS
a JSON document (`name`, `address`, `mtu`, `folders`: [place, folder behind it] pairs). It answers once with the descriptor of
its TUN device. Then each message `{"argv", "env", "cwd", "log"}` starts a program and is answered by `{"pid": N}`, and the end
of a program is told by `{"ended": N, "code": CODE}`; pids are those inside the machine. It exits when the socket is closed, and
the kernel then kills every process of the machine. Standard library only.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from typing import Any

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8916, 0x891C, 0x8922, 0x8913, 0x8914
IFF_UP = 0x1
DEVICE = "net0"


def open_tun_device(address: str, mtu: int) -> int:
    """Make the machine's network device; returns the descriptor at the other end of its cable."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.0.0")):
            packed = struct.pack("16sHH4s8x", DEVICE.encode(), socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(sock, request, packed)
        fcntl.ioctl(sock, SIOCSIFMTU, struct.pack("16si12x", DEVICE.encode(), mtu))
        for name in (DEVICE, "lo"):
            found = fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16sH14x", name.encode(), 0))
            flags = struct.unpack("16sH14x", found)[1]
            fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", name.encode(), flags | IFF_UP))
    return device


def mount(*words: str) -> None:
    """Run `mount`, for this machine only."""
    subprocess.run(["mount", *words], check=True)


def set_up(settings: dict[str, Any]) -> int:
    """Give the machine its name, files and network; returns the descriptor of its TUN device."""
    socket.sethostname(settings["name"])
    for place, folder in settings["folders"]:
        mount("--bind", folder, place)
    mount("-t", "tmpfs", "-o", "size=1g", "tmpfs", "/dev/shm")
    return open_tun_device(settings["address"], settings["mtu"])


class Init:
    """Starts programs on request, and reaps whatever ends."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        """The socket on which the owner's requests come."""
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        self.selector = selectors.DefaultSelector()
        """Waits for requests and for the ends of programs."""
        self.selector.register(control, selectors.EVENT_READ)
        self.selector.register(self.wake_read, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve requests until the owner is gone."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is not self.control:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_read, 4096)
                    continue
                message = self.control.recv(1 << 20)
                if not message:
                    return
                self.control.send(json.dumps({"pid": self.start(json.loads(message))}).encode())
            self.reap()

    def start(self, request: dict[str, Any]) -> int:
        """Start a program in a session of its own; returns its pid."""
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            child = subprocess.Popen(
                request["argv"],
                env=request["env"],
                cwd=request["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        child.returncode = 0  # `reap` alone waits for processes
        return child.pid

    def reap(self) -> None:
        """Reap all processes that have ended. Workers of a raylet that is not reaped would think that it is alive."""
        with contextlib.suppress(ChildProcessError, BrokenPipeError, ConnectionError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self.control.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def main() -> None:
    """Set up the machine, hand out its network cable, and serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    device = set_up(json.loads(sys.argv[2]))
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [device]))
    control.sendmsg([b"{}"], [rights])
    os.close(device)
    Init(control).serve()


if __name__ == "__main__":
    main()
