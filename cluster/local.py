"""A Ray cluster of simulated machines on this machine, with a network between them that tests can break, delay and slow down.

Each machine is a set of Linux namespaces: network, processes, mounts, IPC and host name. It has an address of its own
(10.77.0.N), its own `/dev/shm`, `/etc/hosts` and Ray folder, and a first process (`machine_init.py`), at whose death the
kernel kills all others, as when a machine loses its power. Its only network device is a TUN device, and the other end of that
is held by `packet_forwarder.py`, which drops, delays and slows packets as it is told. There is no way out of this network.

The forwarder replaces veth, netem and iptables, because some kernels have neither netem nor tc's `drop` action. This module
needs Linux, root, `/dev/net/tun`, and the commands `unshare`, `nsenter` and `mount` of util-linux, which every Debian has.

Namespaces and devices have no names, so none can stay behind: they end with their processes, and those end when their sockets
to this process are closed, however it ends. Only the folder `raypar-local-PID-*` may stay after a crash; the next cluster
removes it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
ROOT = HERE.parent
NETWORK = "10.77"
"""Addresses are NETWORK.0.N; they exist inside the machines only."""
MTU = 1500
"""Largest packet of the machines' network devices, in bytes."""
STORE_BYTES = 100 * 2**20
"""Size of each node's object store."""
PREFIX = "raypar-local-"
"""Beginning of the name of a cluster's folder in /tmp."""
MACHINE_S, JOIN_S, LEAVE_S, END_S, ANSWER_S = 60.0, 300.0, 10.0, 20.0, 30.0
"""Limits for a machine to be up, a raylet to join or to leave, everything to end, the console to answer."""
COMMANDS = ("unshare", "nsenter", "mount")
"""Commands of util-linux that must be installed."""

Direction = Literal["both", "out", "in"]
"""Which packets are dropped: all, those that the first side sends, or those that it should receive."""


class LocalClusterError(RuntimeError):
    """The simulated machines cannot be made, or do not answer as expected."""


def why_impossible() -> str | None:
    """Why this machine cannot have such a cluster; None if it can."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing:
        return f"there is no command {', '.join(missing)} (Debian: apt-get install util-linux mount)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun (`modprobe tun`; in Docker: --device /dev/net/tun --cap-add ALL)"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
    )
    return f"`unshare` cannot make namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def processes_of_namespace(init_pid: int) -> dict[int, int]:
    """Pid inside -> pid outside, of the living processes in the process namespace whose first process is `init_pid`."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        wanted = os.stat(f"/proc/{init_pid}/ns/pid").st_ino
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/pid").st_ino == wanted:
                    status = Path(f"/proc/{entry}/status").read_text()
                    found[int(status.partition("\nNSpid:")[2].split("\n")[0].split()[-1])] = int(entry)
    return found


@dataclass
class Program:
    """A program that was started on a machine."""

    machine: Machine
    """The machine."""
    pid: int
    """Its pid inside the machine."""
    log: Path
    """What it has printed."""

    @property
    def exit_code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs. -9 if its machine was killed."""
        self.machine.read_messages()
        if self.pid not in self.machine.ended and not self.machine.alive:
            return -signal.SIGKILL
        return self.machine.ended.get(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal to the program, if it still runs. Its children get none."""
        self.machine.signal(number, [self.pid])

    def text(self) -> str:
        """All that it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Machine:
    """One simulated machine. It needs no Ray; `LocalCluster.add_node` starts a raylet on it."""

    def __init__(self, name: str, address: str, folder: Path, shared: Path) -> None:
        """`folder` is the machine's own, outside of it; its part `ray` is seen inside as `shared`."""
        self.name, self.address, self.folder = name, address, folder
        """Host name, IP address inside the network, and folder outside of the machine."""
        self.ended: dict[int, int] = {}
        """Pid inside -> exit code, of programs that have ended."""
        self._answers: deque[dict[str, Any]] = deque()
        """Answers to `start` that nobody has taken yet."""
        (folder / "ray").mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        folders = [(str(shared), str(folder / "ray")), ("/etc/hosts", str(folder / "hosts"))]
        settings = {"name": name, "address": address, "mtu": MTU, "folders": folders}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.log = folder / "init.log"
        words = [
            "unshare",
            "--net",
            "--pid",
            "--mount",
            "--ipc",
            "--uts",
            "--fork",
            "--kill-child",
            "--mount-proc",
            sys.executable,
        ]
        with self.log.open("w") as log, theirs:
            self._unshare = subprocess.Popen(
                [*words, "-S", str(HERE / "machine_init.py"), str(theirs.fileno()), json.dumps(settings)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self.cable = self._receive_cable()
            """Descriptor of the other end of its network device; given away by `LocalCluster`."""
            self.init_pid = int(Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()[0])
            """Its first process, seen from outside."""
        except BaseException:
            self._unshare.kill()
            self._unshare.wait()
            self._control.close()
            raise

    def _receive_cable(self) -> int:
        self._control.settimeout(MACHINE_S)
        try:
            _, given, _, _ = self._control.recvmsg(100, socket.CMSG_SPACE(4))
        except TimeoutError:
            given = []
        if not given:
            raise LocalClusterError(f"machine {self.name} is not up within {MACHINE_S:.0f} s: {self.log.read_text().strip()}")
        return array.array("i", given[0][2][:4])[0]

    @property
    def alive(self) -> bool:
        """Whether it has not lost its power."""
        return self._unshare.poll() is None

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path = ROOT) -> Program:
        """Start a program on the machine."""
        request = {"argv": list(argv), "env": dict(env), "cwd": str(cwd), "log": str(log)}
        self._control.send(json.dumps(request).encode())
        deadline = time.monotonic() + MACHINE_S
        while not self._answers:
            if not self.read_messages(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                raise LocalClusterError(f"machine {self.name} started nothing within {MACHINE_S:.0f} s")
        return Program(self, self._answers.popleft()["pid"], log)

    def read_messages(self, wait_s: float = 0.0) -> bool:
        """Read messages of the machine's first process; returns whether there were any. Waits up to `wait_s` for the first."""
        heard = False
        with contextlib.suppress(BlockingIOError, TimeoutError, ConnectionError):
            while self._control.fileno() >= 0:
                self._control.settimeout(0.0 if heard else wait_s)
                message = self._control.recv(65536)
                if not message:
                    if not self._answers and wait_s:
                        raise LocalClusterError(f"machine {self.name} is gone: {self.log.read_text().strip()}")
                    return heard
                heard, told = True, json.loads(message)
                if "ended" in told:
                    self.ended[told["ended"]] = told["code"]
                else:
                    self._answers.append(told)
        return heard

    def pids(self) -> dict[int, int]:
        """Pid inside -> pid outside, of its processes but the first."""
        return (
            {inside: pid for inside, pid in processes_of_namespace(self.init_pid).items() if inside != 1} if self.alive else {}
        )

    def signal(self, number: int, inside: Iterable[int]) -> None:
        """Send a signal to processes that may be gone, by their pids inside."""
        there = self.pids()
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                if pid in there:
                    os.kill(there[pid], number)

    def stop(self) -> None:
        """Stop all its processes (SIGSTOP). Its kernel still acknowledges packets."""
        self.signal(signal.SIGSTOP, self.pids())

    def go_on(self) -> None:
        """Let the processes that `stop` has stopped continue."""
        self.signal(signal.SIGCONT, self.pids())

    def kill(self) -> None:
        """Kill every process of the machine at once. Idempotent. See `LocalCluster.kill`."""
        if self.alive:  # else its pid may be another process's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init_pid, signal.SIGKILL)
        self._unshare.wait(END_S)
        self.read_messages()
        self._control.close()


@dataclass
class Node:
    """A machine with a raylet."""

    machine: Machine
    """The machine."""
    cpus: int
    """Number of its CPUs for Ray."""
    raylet: Program
    """`ray start --block`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray's labels of the node."""

    @property
    def name(self) -> str:
        """The machine's name."""
        return self.machine.name

    @property
    def address(self) -> str:
        """The machine's address."""
        return self.machine.address


class LocalCluster:
    """Machines, their network, and Ray on them; a context manager. The first node is the head.

    `python_path`: what processes of Ray import from. `environment`: further variables for them, for example Ray's settings.
    """

    def __init__(self, python_path: Sequence[str] = (), environment: Mapping[str, str] | None = None, seed: int = 7) -> None:
        if (why := why_impossible()) is not None:
            raise LocalClusterError(f"no simulated machines here: {why}")
        remove_orphaned_folders()
        made = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}{os.getpid()}-", dir="/tmp"))
        self._lock = (made / "lock").open("w")
        """Held until this cluster, or its process, is gone."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = made.rename(made.with_name(made.name.removeprefix("new-")))
        """Everything of this cluster. It gets its name once it is locked: other clusters remove what is not."""
        self.ray_folder = self.folder / "ray"
        """Ray's folder as the machines see it."""
        self.ray_folder.mkdir()
        self.machines: dict[str, Machine] = {}
        """Name -> the machine that was last added under this name."""
        self.addresses: dict[str, str] = {}
        """Name -> address, of machines that have not been killed."""
        self.nodes: dict[str, Node] = {}
        """Name -> node, of all that have not been killed."""
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            "PYTHONPATH": os.pathsep.join([str(ROOT), *python_path]),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_TMPDIR": str(self.ray_folder),
            "RAY_raylet_start_wait_time_s": "180",  # many machines start at once, perhaps on a busy one
            "RAY_gcs_server_port_wait_time_s": "180",
            **(environment or {}),
        }
        """For every program on a machine."""
        self.address = ""
        """Of Ray's control store, `host:port`, once there is a node."""
        self._numbers = 0
        """Machines so far; the addresses of those that are gone are not used again."""
        self._console: subprocess.Popen[str] | None = None
        """Answers `ask`."""
        self._consoles: list[subprocess.Popen[str]] = []
        """All that were ever started."""
        self._switch, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._switch.settimeout(ANSWER_S)
        with theirs:
            self._forwarder = subprocess.Popen(
                [sys.executable, "-S", str(HERE / "packet_forwarder.py"), str(theirs.fileno()), str(seed)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- machines and nodes ------------------------------------------------------------------------------------------------

    def add_machine(self, name: str) -> Machine:
        """Add a machine without Ray, with the next free address."""
        self._numbers += 1
        address = f"{NETWORK}.{self._numbers // 250}.{self._numbers % 250 + 1}"
        machine = Machine(name, address, self.folder / f"{self._numbers}-{name}", self.ray_folder)
        if name in self.machines:
            self.machines[name].kill()
        self.machines[name] = machine
        self.addresses[name] = address
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [machine.cable]))
        self._switch.sendmsg([json.dumps({"attach": address}).encode()], [rights])
        self._answer()
        os.close(machine.cable)
        return machine

    def add_node(self, name: str, cpus: int = 0, labels: Mapping[str, str] | None = None, wait: bool = True) -> Node:
        """Add a machine with a raylet of so many CPUs; the first one is the head. `wait`: until it has joined the cluster."""
        machine = self.add_machine(name)
        words = ["start", "--block", "--node-ip-address", machine.address, "--num-cpus", str(cpus), "--num-gpus", "0"]
        words += ["--object-store-memory", str(STORE_BYTES), "--disable-usage-stats", "--include-log-monitor", "true"]
        words += ["--labels", json.dumps(dict(labels or {}))] if labels else []
        if self.nodes:
            words += ["--address", self.address]
        else:
            self.address = f"{machine.address}:6379"
            words += ["--head", "--port", "6379", "--include-dashboard", "false", "--temp-dir", str(self.ray_folder)]
        raylet = machine.start(
            [sys.executable, "-m", "ray.scripts.scripts", *words], self.environment, machine.folder / "ray_start.log"
        )
        node = self.nodes[name] = Node(machine, cpus, raylet, dict(labels or {}))
        if wait:
            self.wait_for_nodes([name])
        return node

    def wait_for_nodes(self, names: Iterable[str]) -> None:
        """Wait until these nodes have joined the cluster. Raises `LocalClusterError` after `JOIN_S`."""
        wanted = {self.nodes[name].address: name for name in names}
        deadline = time.monotonic() + JOIN_S
        while missing := set(wanted) - set(self.live_addresses()):
            for address in missing:
                raylet = self.nodes[wanted[address]].raylet
                if raylet.exit_code is not None:
                    raise LocalClusterError(f"`ray start` on {wanted[address]} ended with {raylet.exit_code}:\n{raylet.text()}")
            if time.monotonic() > deadline:
                names = ", ".join(sorted(wanted[address] for address in missing))
                raise LocalClusterError(f"{names} did not join the cluster within {JOIN_S:.0f} s")
            time.sleep(0.2)

    def live_addresses(self) -> dict[str, str]:
        """Address -> node id, of the nodes that Ray lists as alive; empty while the control store is not up."""
        try:
            return dict(self.ask("nodes"))
        except LocalClusterError:
            return {}

    def kill(self, name: str) -> None:
        """Simulate a loss of power. The network is cut first, so that no other machine sees connections closed."""
        self._tell({"detach": self.addresses.pop(name)})
        self.nodes.pop(name, None)
        self.machines[name].kill()

    def leave(self, name: str) -> None:
        """Shut a machine down in order: its raylet signs off, so that Ray knows at once. One that hangs is killed."""
        raylet = self.nodes[name].raylet
        raylet.signal(signal.SIGTERM)
        deadline = time.monotonic() + LEAVE_S
        while raylet.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill(name)

    def stop(self, name: str) -> None:
        """Stop all processes of the machine (SIGSTOP)."""
        self.nodes[name].machine.stop()

    def go_on(self, name: str) -> None:
        """Let the processes that `stop` has stopped continue."""
        self.nodes[name].machine.go_on()

    def drain(self, name: str, notice_s: float = 60.0) -> None:
        """Tell Ray that the machine will be taken away."""
        self.ask("drain", self.nodes[name].address, notice_s)

    def begin_drain(self, name: str, notice_s: float = 60.0) -> None:
        """Like `drain`, without waiting for the answer, which takes long from a machine that cannot be reached."""
        console = self._start_console()
        assert console.stdin is not None
        console.stdin.write(json.dumps(["drain", self.nodes[name].address, notice_s]) + "\n")
        console.stdin.close()

    # -- the network -------------------------------------------------------------------------------------------------------

    def partition(self, side: Iterable[str], other: Iterable[str] | None = None, direction: Direction = "both") -> None:
        """Drop the packets between two sets of machines; without `other`, between `side` and all others there are now."""
        ours = list(side)
        theirs = [name for name in self.addresses if name not in ours] if other is None else list(other)
        here, there = ([self.addresses[name] for name in names] for names in (ours, theirs))
        for drop, pair in (("in", [there, here]), ("out", [here, there])):
            if direction in ("both", drop):
                self._tell({"block": pair})

    def heal(self) -> None:
        """End all partitions."""
        self._tell({"heal": True})

    def shape(self, name: str, bandwidth_mbit_s: float = math.inf, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Set the bandwidth, delay and loss of a machine's link, in each direction."""
        limit = None if math.isinf(bandwidth_mbit_s) else bandwidth_mbit_s
        self._tell({"shape": [self.addresses[name], limit, delay_s, loss]})

    def packets(self) -> dict[str, int]:
        """Numbers of packets that were forwarded and dropped so far."""
        return self._tell({"count": True})

    def _tell(self, command: dict[str, Any]) -> dict[str, Any]:
        self._switch.send(json.dumps(command).encode())
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            message = self._switch.recv(65536)
        except TimeoutError:
            message = b""
        if not message:
            raise LocalClusterError(f"the packet forwarder does not answer (exit code {self._forwarder.poll()})")
        return dict(json.loads(message))

    # -- questions to Ray --------------------------------------------------------------------------------------------------

    def ask(self, question: str, *given: Any) -> Any:
        """The answer of `ray_console.Console`, which runs on the head. Raises `LocalClusterError` if there is none."""
        console = self._console
        if console is None or console.poll() is not None:
            console = self._console = self._start_console()
        assert console.stdin is not None and console.stdout is not None
        try:
            console.stdin.write(json.dumps([question, *given]) + "\n")
            console.stdin.flush()
            silent = not select.select([console.stdout], [], [], JOIN_S)[0]
            line = "" if silent else console.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            console.kill()
            console.wait()
        told = json.loads(line) if line else {"error": f"no answer within {JOIN_S:.0f} s, or the control store is not there"}
        if "error" in told:
            raise LocalClusterError(f"{question} {given}: {told['error']}")
        return told["answer"]

    def _start_console(self) -> subprocess.Popen[str]:
        head = next(iter(self.nodes.values())).machine
        words = ["nsenter", "--target", str(head.init_pid), "--net", sys.executable, str(HERE / "ray_console.py"), self.address]
        console = subprocess.Popen(
            words,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._consoles.append(console)
        return console

    # -- the end -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill every machine and remove every trace. Idempotent."""
        for console in self._consoles:
            console.kill()
            console.wait()
            for stream in (console.stdin, console.stdout):
                with contextlib.suppress(OSError):
                    if stream is not None:
                        stream.close()
        self.nodes.clear()
        for machine in self.machines.values():
            machine.kill()
        self._switch.close()
        if self._forwarder.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._forwarder.wait(END_S)
            self._forwarder.kill()
        self._forwarder.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def remove_orphaned_folders(base: Path = Path("/tmp")) -> list[Path]:
    """Remove the folders of clusters whose process has ended, which their locks show; returns the removed folders."""
    removed = []
    for folder in base.glob(f"{PREFIX}*"):
        try:
            with (folder / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
        except OSError:  # in use, or just being made
            continue
    return removed
