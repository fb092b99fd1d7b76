"""Strangers knock at the ports of all workers, and then a worker dies: the run goes on, with the weights of an undisturbed one.

`python jobs/bench/strangers.py [--knocks 60]`. A knock is a greeting of raypar's own protocol, well-formed, with a name of
30 kB; it once ended a run at its next recovery. Prints what `raypar train` prints, then whether the weights are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import struct
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from jobs.bench.tiny_run import TinyRun
from raypar.comm.tcp.handshake import MAGIC

SETTINGS = ["steps=400", "elastic={min_workers: 1}", "plan={stages: 2, replicas: 2}"]
GREETING = struct.pack("<IHHQII", MAGIC, 1, 30_000, 1, 1, 2) + b"\xff" * 30_000


def knock(port: int) -> bool:
    """Send the greeting and read what comes; returns whether somebody was there."""
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=2) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(GREETING)
            stranger.recv(1 << 16)
        return True
    return False


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which a process accepts connections."""
    found = psutil.Process(pid).net_connections("tcp")
    return sorted({connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN})


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--knocks", type=int, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raypar-strangers-") as place:
        print("undisturbed:", flush=True)
        plain = TinyRun(Path(place), "plain", *SETTINGS).finish()
        run = TinyRun(Path(place), "knocked", *SETTINGS)
        run.wait_for_steps(30)
        _, workers = run.pids()
        ports = [port for pid in workers for port in listening_ports(pid)]
        with ThreadPoolExecutor(given.knocks) as strangers:  # Ray's ports do not hang up
            heard = sum(strangers.map(knock, (ports[number % len(ports)] for number in range(given.knocks))))
        print(f"--- {heard} greetings heard, at {len(ports)} ports of {len(workers)} workers; kill -9 of a worker", flush=True)
        os.kill(workers[-1], signal.SIGKILL)
        found = run.finish()
    print("the same weights" if found == plain else "OTHER WEIGHTS", flush=True)
    return 0 if found == plain and run.exit_code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
