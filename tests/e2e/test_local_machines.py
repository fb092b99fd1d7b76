"""Simulated machines of `cluster.local`, without Ray: each has its own network, processes and files, and leaves nothing behind.

They need root and /dev/net/tun, so most are marked `chaos`, and `.ci/run` runs them; elsewhere one error says what is missing.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import local
from cluster.local import LocalCluster, LocalClusterError, processes_of_namespace

SERVER = """
import socket, sys
door = socket.create_server((sys.argv[1], 5000))
while True:
    sock, (peer, _) = door.accept()
    sock.sendall(f"{socket.gethostname()} sees {peer}".encode())
    sock.close()
"""
CLIENT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 5000), 0.5) as sock:
        print(sock.recv(100).decode())
except OSError as error:
    print(type(error).__name__)
"""
OWNER = """
import sys, time
from cluster.local import LocalCluster
cluster = LocalCluster()
machine = cluster.add_machine("a")
machine.start([sys.executable, "-S", "-c", "import time; time.sleep(60)"], {}, cluster.folder / "log")
print(machine.init_pid, cluster._forwarder.pid, cluster.folder, flush=True)
time.sleep(60)
"""


@pytest.fixture
def cluster():
    with LocalCluster() as made:
        yield made


def within(fact, limit_s=10.0):
    until = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < until
        time.sleep(0.02)


def ask(cluster, source, destination):
    """What a client on one machine hears from the server on another."""
    log = cluster.folder / f"client{time.monotonic()}"
    client = source.start([sys.executable, "-S", "-c", CLIENT, destination.address], {}, log)
    within(lambda: client.exit_code is not None)
    return client.text().strip()


def test_without_root_one_error_says_so_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(local.os, "geteuid", lambda: 1000)
    with pytest.raises(LocalClusterError, match="no simulated machines here: network namespaces need root"):
        LocalCluster()


@pytest.mark.chaos
def test_machines_reach_each_other_until_they_are_partitioned_or_lose_their_power(cluster):
    a, b, c = (cluster.add_machine(name) for name in "abc")
    server = a.start([sys.executable, "-S", "-c", SERVER, a.address], {}, cluster.folder / "server")
    within(lambda: ask(cluster, b, a) == f"a sees {b.address}")
    cluster.partition(["b"], ["a"], "out")
    assert (ask(cluster, b, a), ask(cluster, c, a)) == ("TimeoutError", f"a sees {c.address}")
    cluster.heal()
    cluster.partition(["b"], ["a"], "in")
    assert ask(cluster, b, a) == "TimeoutError"
    cluster.heal()
    cluster.shape("b", delay_s=0.4)
    assert ask(cluster, b, a) == "TimeoutError", "a connection takes a round trip, 0.8 s"
    cluster.shape("b")
    assert ask(cluster, b, a) == f"a sees {b.address}"
    outside = a.pids()[server.pid]
    cluster.kill("a")
    assert ask(cluster, b, a) == "TimeoutError", "nobody says that it is gone"
    assert server.exit_code == -signal.SIGKILL and not Path(f"/proc/{outside}").exists()


@pytest.mark.chaos
def test_a_machine_that_hangs_goes_on(cluster):
    machine = cluster.add_machine("a")
    count = "import time\nwhile True: print(1, flush=True); time.sleep(0.01)"
    counting = machine.start([sys.executable, "-S", "-c", count], {}, cluster.folder / "count")
    within(counting.text)
    machine.stop()
    time.sleep(0.1)
    before = counting.text()
    time.sleep(0.1)
    assert counting.text() == before
    machine.go_on()
    within(lambda: counting.text() != before)
    assert list(processes_of_namespace(machine.init_pid)) == [1, counting.pid]


@pytest.mark.chaos
def test_nothing_is_left_of_a_cluster_whose_owner_was_killed(cluster):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(local.ROOT)}
    )
    init, forwarder, folder = owner.stdout.readline().split()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    within(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (init, forwarder)))
    assert Path(folder) in local.remove_orphaned_folders() and cluster.folder.exists()
