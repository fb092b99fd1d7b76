"""A job is given to a cluster's job server, stopped, and given to it again: the result does not change by a bit.

`python examples/submit_and_stop.py [FOLDER] [--nodes 2] [--share]` starts a Ray cluster on this machine (a head, or a head and
another node), submits the quickstart in small, stops it, submits the same command once more, and compares the weights with
those of a run that nobody stopped. With `--share` it then submits two jobs that do not fit on the cluster together: the second
says what it waits for, and runs after the first. Two to three minutes. Needs Ray's job server: `pip install 'ray[default]'`.
"""

import argparse
import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
STEPS, STOPPED_AFTER, PATIENCE_S = 160, 40, 240.0
SMALL = [f"steps={STEPS}", "model.args.width=64", *(f"{p}.args.context=64" for p in ("model", "data", "validation"))]
STOPPED_CODE = 130
"""Exit code by which `raypar submit` and `raypar logs --follow` tell a stopped job from a finished one."""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def cluster_environment(home: Path) -> dict[str, str]:
    """The environment of a cluster's processes, and of `ray` commands for it. `home`: the home folder of their user."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return {**env, **quiet, "HOME": str(home), "PATH": path}


@contextlib.contextmanager
def cluster(nodes: int, home: Path, **settings: str) -> Iterator[str]:
    """A Ray cluster with room for four workers and a job on this machine; the address of its job server. `home`: of its user,
    in which runs of submitted jobs lie; `settings`: environment variables of its processes."""
    temp = Path(tempfile.mkdtemp(prefix="raypar-", dir="/tmp"))  # short: Ray puts its sockets in it
    port, server = free_port(), free_port()
    env = {**cluster_environment(home), **settings}
    env["TMPDIR"] = str(temp)  # the job server leaves sockets there
    cpus = -(-6 // nodes)
    common = ["--block", "--node-ip-address", "127.0.0.1", "--num-cpus", str(cpus), "--object-store-memory", str(150 * 2**20)]
    common += [
        "--disable-usage-stats",
        "--dashboard-agent-listen-port",
        "0",
        "--min-worker-port",
        "0",
        "--max-worker-port",
        "0",
    ]
    head = ["--head", "--port", str(port), "--temp-dir", str(temp), "--include-dashboard", "true"]
    head += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(server)]
    commands = [head, *[["--address", f"127.0.0.1:{port}"]] * (nodes - 1)]
    there = f"http://127.0.0.1:{server}"
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, words in enumerate(commands):
            with open(temp / f"node{number}.log", "wb") as log:
                command = [*RAY, "start", *words, *common]
                running.append(subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True))
            if number == 0:
                wait_until(lambda: answers(f"{there}/api/version"), "the job server answers", running[0], temp / "node0.log")
        yield there
    finally:
        for node in reversed(running):
            node.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
        shutil.rmtree(temp, ignore_errors=True)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        return error.code == 401  # the server runs, and asks for a token
    except OSError:
        return False


def wait_until(fact, what: str, node: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until `fact()` is true. Ends the program when that takes too long, or when the node is gone."""
    until = time.monotonic() + PATIENCE_S
    while not fact():
        if node.poll() is not None or time.monotonic() > until:
            sys.exit(f"{what}: that did not happen\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.1)


class Cluster:
    """raypar's commands for jobs of the cluster at `address`; what is called is told, and what it prints."""

    def __init__(self, address: str) -> None:
        self.env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_API_SERVER_ADDRESS": address}

    def submit(self, submission_id: str, *settings: str, wait: bool = True) -> str:
        """What is printed: if the job is waited for, its log."""
        words = [word for setting in settings for word in ("--set", setting)]
        more = [] if wait else ["--no-wait"]
        return self.call("submit", "jobs/quickstart.yaml", "--submission-id", submission_id, *more, *words)

    def quiet(self, *words: str) -> str:
        """What `raypar WORDS` prints on stdout; nothing is shown."""
        command = [sys.executable, "-m", "raypar", *words]
        return subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, check=False).stdout

    def call(self, *words: str, expected: int = 0) -> str:
        """What `raypar WORDS` prints. Ends the program unless it has the `expected` exit code."""
        print(f"\n$ raypar {shlex.join(words)}", flush=True)
        said = []
        command = [sys.executable, "-m", "raypar", *words]
        with subprocess.Popen(
            command, cwd=ROOT, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as called:
            for line in called.stdout:
                print(f"  {line}", end="", flush=True)
                said.append(line)
        if called.returncode != expected:
            sys.exit(f"`raypar {words[0]}` ended with exit code {called.returncode} instead of {expected}")
        return "".join(said)


def second_job_waits(jobs: Cluster, *settings: str) -> bool:
    """Submit two jobs that want four of the six CPUs each. Returns whether the second waited, and both were done."""
    for name in ("one", "two"):
        jobs.submit(name, *SMALL, "steps=60", *settings, f"name={name}", wait=False)
    until = time.monotonic() + PATIENCE_S
    while "waiting for 4 CPUs" not in jobs.quiet("logs", "two"):
        if time.monotonic() > until:
            sys.exit(f"job two has not said within {PATIENCE_S:.0f} s what it waits for")
        time.sleep(0.2)
    jobs.call("runs")
    said = jobs.call("logs", "two", "--follow")
    jobs.call("runs")
    return "the cluster has room for run two now" in said and "job two is done" in said


def steps_done(run: Path) -> int:
    """Each committed step is a line in the run's folder."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.exists() else 0


def weights(said: str) -> str:
    """The hash in what a run has printed."""
    found = [line.split()[-1] for line in said.splitlines() if "weights sha256" in line]
    return found[-1] if found else sys.exit("the run did not end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(f"runs/submit_and_stop-{time.strftime('%Y%m%d-%H%M%S')}"))
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--share", action="store_true", help="two more jobs, which share the cluster")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="a.b=c", help="of the job, as well")
    given = parser.parse_args()
    if importlib.util.find_spec("aiohttp_cors") is None:
        sys.exit("Ray's job server is not installed\n  cure: pip install 'ray[default]'")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as Ctrl-C: the cluster ends with this program
    home = given.folder.resolve()
    home.mkdir(parents=True, exist_ok=True)
    run = home / "raypar/runs/quickstart"
    with cluster(given.nodes, home) as address:
        jobs = Cluster(address)
        in_peace = weights(jobs.submit("in_peace", *SMALL, *given.settings, "name=in_peace"))
        jobs.submit("first", *SMALL, *given.settings, wait=False)
        until = time.monotonic() + PATIENCE_S
        while steps_done(run) < STOPPED_AFTER:
            if time.monotonic() > until:
                sys.exit(f"the run has done {steps_done(run)} steps in {PATIENCE_S:.0f} s")
            time.sleep(0.05)
        jobs.call("runs")
        jobs.call("status", str(run))  # from the run's folder, on the head or where it is mounted
        jobs.call("stop", "quickstart")
        jobs.call("logs", "first", "--follow", expected=STOPPED_CODE)
        left = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
        print(f"\nafter {steps_done(run)} of {STEPS} steps it was stopped; left in {run}/checkpoints: {', '.join(left)}")
        said = jobs.submit("second", *SMALL, *given.settings)
        jobs.call("runs")
        waited = not given.share or second_job_waits(jobs, *given.settings)
    resumed = weights(said)
    print(f"\nundisturbed            {in_peace}\nstopped and submitted  {resumed}")
    good = waited and in_peace == resumed and bool(left) and "from step_" in said and not (run.parent / "quickstart-2").exists()
    print("equal" if good else "DIFFERENT")
    sys.exit(not good)


if __name__ == "__main__":
    main()
